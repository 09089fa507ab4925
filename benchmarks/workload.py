"""What fills the binlog: single-order transactions through an outbox, and traffic that is not ours.

Also one loading process: ``python -m benchmarks.workload orders PORT FIRST COUNT``. Every
transaction is its own commit, as a service makes it; only the statements of many transactions
travel in one packet, so that loading does not take longer than measuring.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Final

from pymysql.constants import CLIENT

from benchmarks.place import Place, connect
from cdc_relay.outbox import DEFAULT_TABLE

PROCESSES: Final = 4
_PACKET: Final = 100
"""Transactions in one packet."""

# Their square is the million of one transaction.
_SEED_ROWS: Final = 1000

ORDER_EVENTS: Final = 7
"""Binlog events of one order: GTID, BEGIN, table map and row of each table, XID."""
UNRELATED_EVENTS: Final = 7
"""Binlog events of one unrelated transaction: the same, an INSERT and an UPDATE."""
UNRELATED_PER_ORDER: Final = 4
"""Unrelated transactions for each order in "mixed": with the order's own row, 9 unrelated row
events for each row of the outbox."""

_OUTBOX: Final = (
    f"INSERT INTO {DEFAULT_TABLE} (event_id, aggregate_type, aggregate_id, event_type, payload)"
    " VALUES ('{}', 'order', '{}', 'ORDER_CREATED', '{}')"
)
_NAMES: Final = ("Åsa Öberg", "李小龍", "María José Núñez", "John Smith", "Zoë O\u2019Brien")


def load(place: Place, workload: str, count: int, *, first: int = 1) -> float:
    """Commit ``count`` transactions, numbered from ``first``; returns the seconds it took."""
    start = time.monotonic()
    share, rest = divmod(count, PROCESSES)
    begin = first
    processes = []
    with place.loading():
        for index in range(PROCESSES):
            size = share + (index < rest)
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.workload", workload]
                    + [str(number) for number in (place.mysql.port, begin, size)],
                    stdin=subprocess.DEVNULL,
                )
            )
            begin += size
        try:
            for process in processes:
                if process.wait() != 0:
                    raise RuntimeError(f"loading {workload} failed")
        finally:
            for process in processes:
                process.kill()
    return time.monotonic() - start


def one_transaction(place: Place) -> int:
    """A million orders in one transaction, made of a thousand that are committed before; returns
    how many rows there are in all."""
    load(place, "orders", _SEED_ROWS)
    with place.loading():
        place.sql(
            "INSERT INTO outbox_event"
            " (event_id, aggregate_type, aggregate_id, event_type, payload)"
            " SELECT UUID(), one.aggregate_type, one.aggregate_id, one.event_type, one.payload"
            " FROM outbox_event AS one CROSS JOIN outbox_event AS other"
            " WHERE one.aggregate_type = 'order' AND other.aggregate_type = 'order'"
        )
    return _SEED_ROWS + _SEED_ROWS**2


def order(number: int, dice: random.Random) -> str:
    """The statements of one order and its event."""
    customer = dice.randrange(100_000)
    lines = [
        f'{{"sku": "SKU-{dice.randrange(10_000):05d}", "quantity": {dice.randrange(1, 9)}, '
        f'"price": {dice.randrange(100, 50_000) / 100}}}'
        for _ in range(2)
    ]
    total = Decimal(dice.randrange(100, 99_999)) / 100
    payload = (
        f'{{"id": {number}, "total": {total}, "currency": "EUR", "paid": true, "coupon": null, '
        f'"customer": {{"id": {customer}, "name": "{_NAMES[customer % 5]}", "vip": false}}, '
        f'"lines": [{", ".join(lines)}], "placed_at": "2026-02-03T04:05:06.{number % 10**6:06d}Z"}}'
    )
    return (
        f"INSERT INTO orders (id, customer_id, total, state)"
        f" VALUES ({number}, {customer}, {total}, 'placed');"
        f"{_OUTBOX.format(_uuid7(dice), number, payload)};COMMIT"
    )


def sized(number: int, dice: random.Random) -> str:
    """One event of 100 bytes to 100 kB, small ones as common as large ones; half of it random."""
    size = int(100 * 1000 ** dice.random())
    note = dice.randbytes(max(size - 40, 2) // 4).hex() + "x" * (size // 2)
    payload = f'{{"id": {number}, "note": "{note}"}}'
    return f"{_OUTBOX.format(_uuid7(dice), number, payload)};COMMIT"


def unrelated(number: int, _dice: random.Random) -> str:
    """The statements of one transaction that writes no event."""
    return (
        f"INSERT INTO visits VALUES ({number}, '/products/{number % 1000}?ref=mail', 0);"
        f"UPDATE visits SET seen = seen + 1 WHERE id = {number};COMMIT"
    )


def mixed(number: int, dice: random.Random) -> str:
    """One order and the unrelated traffic beside it."""
    beside = range(number * UNRELATED_PER_ORDER, (number + 1) * UNRELATED_PER_ORDER)
    return ";".join([order(number, dice), *(unrelated(n, dice) for n in beside)])


def _uuid7(dice: random.Random) -> str:
    bits = time.time_ns() // 1_000_000 << 80 | 7 << 76 | 2 << 62
    text = f"{bits | dice.getrandbits(12) << 64 | dice.getrandbits(62):032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


_WORKLOADS: Final[dict[str, Callable[[int, random.Random], str]]] = {
    "orders": order,
    "unrelated": unrelated,
    "mixed": mixed,
    "sized": sized,
    # Orders that go to a topic of their own.
    "warm-up": lambda number, dice: order(number, dice).replace("'order'", "'warm-up'"),
}


def _packets(workload: str, first: int, count: int) -> Iterator[str]:
    dice = random.Random(first)
    transaction = _WORKLOADS[workload]
    for begin in range(first, first + count, _PACKET):
        numbers = range(begin, min(begin + _PACKET, first + count))
        yield ";".join([transaction(number, dice) for number in numbers])


def _main(workload: str, port: str, first: str, count: str) -> None:
    connection = connect(
        int(port), autocommit=False, client_flag=CLIENT.MULTI_STATEMENTS, read_timeout=120
    )
    with connection, connection.cursor() as cursor:
        for packet in _packets(workload, int(first), int(count)):
            cursor.execute(packet)
            while cursor.nextset():
                pass


if __name__ == "__main__":
    _main(*sys.argv[1:])
