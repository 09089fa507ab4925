"""kill -9 between every two steps of the pipeline.

``CDC_RELAY_TEST_FAULT`` names the step behind which the relay kills itself
(``cdc_relay/faults.py``). Each relay of a chain dies at another step, under load; the last one
dies at none. Then table and topic are compared as a ``read_committed`` consumer sees it.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cdc_relay.kafka.checkpoints import topic_name
from dev.kafka import Kafka
from tests.support.harness import CHECKOUT, Harness, Process, alter_topic, take_over
from tests.support.load import Load, account
from tests.support.sql import Database, insert, row

KEYS = [f"k{number}" for number in range(20)]

# Passed with every group under load.
LOADED = ["gathered", "routed", "begun", "produced", "committing", "delivered", "marking", "marked"]
# Passed at the start of a term, or now and then.
IDLE = ["fenced", "saving", "saved"]
# Passed in a test of their own below.
SPECIAL = ["swept", "healed", "parking", "retrying", "retried"]
# Passed at the start of a term, when a compensator's pass is fenced.
STARTING = ["pass_fenced"]


@pytest.fixture
def shop(mysql: Database, quick_kafka: Kafka, tmp_path: Path) -> Iterator[Harness]:
    settings = {"SESSION_TIMEOUT": "2s", "TRANSACTION_TIMEOUT": "5s"}
    with Harness(mysql, quick_kafka.bootstrap, tmp_path, settings) as made:
        made.create_topic(partitions=6)
        yield made


def dies_at(shop: Harness, fault: str, **extra: str) -> Process:
    """Start a relay that kills itself at ``fault``, and see it die."""
    relay = shop.spawn("start", TEST_FAULT=fault, **extra)
    shop.until(lambda: not relay.running, 40)
    assert relay.wait(1) == -signal.SIGKILL, (fault, relay.text())
    return relay


def ends_well(shop: Harness, timeout: float = 60, **extra: str) -> Process:
    """Let a relay without a fault finish the work; rows that were not visible when it anchored
    keep their aggregates closed until it looks again."""
    relay = shop.relay(**extra)
    shop.wait_all_sent(timeout)
    shop.until(lambda: (last := shop.checkpoint()) is not None and not last.closed)
    assert relay.terminate() == 0, relay.text()
    return relay


def check(shop: Harness, about: object = "", kind: str = "order") -> None:
    """Lost 0, invented 0, duplicates 0, in order, all marked, nothing owed."""
    found = account(shop.database, shop.table, kind, shop.messages(kind))
    assert found.whole, (about, found)
    assert found.duplicates == 0, (about, found)
    assert found.committed > 0, about
    assert shop.count(1, kind) == found.committed, (about, found)
    last = shop.checkpoint()
    assert last is not None
    assert not last.owed, about
    assert not last.closed, about


def test_every_fault_point_is_tested() -> None:
    sources = (CHECKOUT / "cdc_relay").rglob("*.py")
    found = {
        name
        for source in sources
        for name in re.findall(r'faults\.point\("(\w+)"\)', source.read_text())
    }
    assert found == {*LOADED, *IDLE, *SPECIAL, *STARTING}


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([f"{name}:1" for name in LOADED], id="first"),
        pytest.param([f"{name}:2" for name in LOADED], id="second"),
    ],
)
def test_killed_at_every_step_under_load(steps: list[str], shop: Harness) -> None:
    relay = shop.relay()
    shop.until(shop.checkpoint)
    relay.kill()
    times = []
    with Load(shop, KEYS, pause=0.01, threads=2):
        for step in steps:
            dies_at(shop, step)
            times.append((step, round(time.time() * 1000)))
    ends_well(shop)
    check(shop, times)


def test_killed_around_a_checkpoint_without_records(shop: Harness) -> None:
    relay = shop.relay()
    shop.until(shop.checkpoint)
    relay.kill()
    for step in [f"{name}:{count}" for name in ("saving", "saved") for count in (1, 2)]:
        for key in KEYS[:3]:
            shop.ins(key, {"n": _next(shop, key)})
        dies_at(shop, step)
    for step in ("fenced:1", "pass_fenced:1"):
        dies_at(shop, step)
    ends_well(shop)
    check(shop)


def test_killed_when_fenced_by_another_producer(shop: Harness) -> None:
    """Whoever takes the transactional id ends the term; the next one begins with the last
    checkpoint."""
    relay = shop.spawn("start", TEST_FAULT="fenced:2")
    with Load(shop, KEYS, pause=0.01, threads=2):
        shop.until(shop.checkpoint)
        shop.wait_sent(20)
        for producer in (".0", ".0.second"):  # a shard has two that take turns
            take_over(shop.kafka, f"cdc-relay.{shop.name}{producer}")
        shop.until(lambda: not relay.running, 40)
    assert relay.wait(1) == -signal.SIGKILL, relay.text()
    ends_well(shop)
    check(shop)


def test_killed_after_healing(shop: Harness) -> None:
    relay = shop.relay()
    shop.until(shop.checkpoint)
    relay.kill()
    for turn in range(2):
        for key in KEYS:
            shop.ins(key, {"n": _next(shop, key)})
        dies_at(shop, "marking")
        last = shop.checkpoint()
        assert last is not None
        assert last.owed, turn
        dies_at(shop, "healed")
    ends_well(shop)
    check(shop)


def test_killed_in_and_after_a_sweep(shop: Harness) -> None:
    """The first start on a table of pending rows, over several groups, with writers at work."""
    _backlog(shop, 12_000)
    with Load(shop, KEYS, pause=0.02, threads=2):
        for step in ("begun:1", "delivered:1", "committing:2", "swept:1", "saved:1", "marked:1"):
            dies_at(shop, step)
    ends_well(shop)
    check(shop)


def test_killed_in_a_backlog_of_several_groups(shop: Harness) -> None:
    """Groups are larger than what is taken at once."""
    relay = shop.relay()
    shop.until(shop.checkpoint)
    relay.kill()
    _backlog(shop, 24_000)
    for step in ("delivered:1", "committing:1", "delivered:1", "marked:1"):
        dies_at(shop, step, BATCH_ROWS="4000")
    ends_well(shop)
    check(shop)


def test_killed_in_a_transaction_that_is_too_large_to_hold(shop: Harness) -> None:
    """Its rows are delivered part by part, from a place inside of it."""
    relay = shop.relay()
    shop.until(shop.checkpoint)
    relay.kill()
    _backlog(shop, 7_000, transactions=1, filling=6_000)
    for step in ("delivered:1", "committing:1", "delivered:1"):
        dies_at(shop, step, BATCH_ROWS="500")
    ends_well(shop)
    check(shop)


@pytest.mark.parametrize(
    ("kind", "delivery"),
    [("prepared", "exactly_once"), ("prepared", "at_least_once"), ("partial", "exactly_once")],
)
def test_killed_in_a_large_transaction_of_rows_to_read_back(
    kind: str, delivery: str, shop: Harness
) -> None:
    """Of which the log tells little more than the keys: prepared (XA), or of images that lack
    columns. All their marks in one checkpoint would be more than its topic takes."""
    settings = {"DELIVERY": delivery, "BATCH_ROWS": "500", "QUEUE_ROWS": "500"}
    relay = shop.relay(**settings)
    shop.ins("a", {"n": 1})  # which proves what the columns are
    shop.wait_sent(1)
    alter_topic(shop.kafka, topic_name(shop.name), {"max.message.bytes": "15000"})
    with shop.database.connect() as connection, connection.cursor() as cursor:
        if kind == "prepared":
            cursor.execute("XA START 'large'")
            _fill(cursor, shop.table, range(12_000), {})
            cursor.execute("XA END 'large'")
            cursor.execute("XA PREPARE 'large'")
            shop.until(lambda: (last := shop.checkpoint()) is not None and last.position.prepared)
            relay.kill()
            cursor.execute("XA COMMIT 'large'")
        else:
            relay.kill()
            cursor.execute("SET SESSION binlog_row_image = MINIMAL")
            _fill(cursor, shop.table, range(12_000), {})
            connection.commit()
    if delivery == "exactly_once":
        dies_at(shop, "committing:6", **settings)
        last = shop.checkpoint()
        assert last is not None
        assert last.position.partial is not None
    ends_well(shop, **settings)
    check(shop)


def _next(shop: Harness, key: str) -> int:
    sql = f"SELECT COUNT(*) + 1 FROM {shop.table} WHERE aggregate_id = %s"
    return int(shop.database.sql(sql, (key,))[0][0])


def _backlog(shop: Harness, rows: int, transactions: int = 100, filling: int = 0) -> None:
    """Rows of many aggregates, numbered as ``Load`` does."""
    each = rows // transactions
    numbers: dict[str, int] = {}
    with shop.database.connect() as connection, connection.cursor() as cursor:
        for first in range(0, rows, each):
            _fill(cursor, shop.table, range(first, first + each), numbers, filling)
            connection.commit()


def _fill(
    cursor: Any, table: str, which: Sequence[int], numbers: dict[str, int], filling: int = 0
) -> None:
    """The rows ``which`` of a backlog, 500 with each statement."""
    for start in range(0, len(which), 500):
        made = []
        for number in which[start : start + 500]:
            key = f"b{number % 97}"
            numbers[key] = numbers.get(key, 0) + 1
            made.append(row(key, {"n": numbers[key], "filling": "x" * filling}))
        cursor.execute(*insert(table, made))
