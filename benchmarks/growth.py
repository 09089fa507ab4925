"""What grows with what: rows of backlog, aggregates, partitions. Time should be linear in the rows,
and memory flat in all of them."""

from __future__ import annotations

from typing import Final

from benchmarks.command import Plan
from benchmarks.figures import Figure
from benchmarks.place import PARTITIONS, Place
from benchmarks.relay import ready
from dev.console import say

_MIB: Final = 2**20
_ROWS: Final = (100_000, 1_000_000, 10_000_000)
_AGGREGATES: Final = (10, 1_000, 1_000_000)
_PARTITIONS: Final = (1, 8, 64)
# What the last two are measured with.
_BACKLOG: Final = 1_000_000
# Rows of one transaction: the backlog is made by the server, at a rate that makes 10⁷ bearable.
_TRANSACTION: Final = 1_000


def growth(place: Place, plan: Plan) -> list[Figure]:
    """Exactly once without marks, one value of one thing after the other: a quarter of an hour."""
    figures = []
    for rows in _ROWS:
        figures += _measure(place, f"{rows:,} rows", rows, 100_000, PARTITIONS)
    for aggregates in _AGGREGATES:
        figures += _measure(place, f"{aggregates:,} aggregates", _BACKLOG, aggregates, PARTITIONS)
    for partitions in _PARTITIONS:
        figures += _measure(place, f"{partitions} partitions", _BACKLOG, 100_000, partitions)
    return figures


def _measure(place: Place, name: str, rows: int, aggregates: int, partitions: int) -> list[Figure]:
    place.clear()
    one = ready(place, "exactly_once", "none", partitions=partitions)
    _fill(place, rows, aggregates)
    process = one.run()
    place.check_numbered(one.topic, rows)
    seconds = process.wall
    peak = process.peak_rss / _MIB
    say(f"growth: {name}: {seconds:.1f} s, {peak:.1f} MiB")
    scenario = f"growth: {name}"
    return [
        Figure(scenario, "start of the process to its end", "s", [seconds]),
        Figure(scenario, "rows by the clock, start included", "rows/s", [rows / seconds]),
        Figure(scenario, "CPU of the process", "s", [process.cpu_seconds]),
        Figure(scenario, "largest resident size", "MiB", [peak]),
    ]


def _fill(place: Place, rows: int, aggregates: int) -> None:
    """Committed rows of about 300 bytes."""
    place.sql(
        "CREATE TABLE IF NOT EXISTS digits (n INT PRIMARY KEY)",
        "INSERT IGNORE INTO digits WITH RECURSIVE d (n) AS"
        " (SELECT 0 UNION ALL SELECT n + 1 FROM d WHERE n < 999) SELECT n FROM d",
    )
    with (
        place.loading(),
        place.connect(read_timeout=120) as connection,
        connection.cursor() as cursor,
    ):
        for begin in range(0, rows, _TRANSACTION):
            n = f"({begin} + n)"
            cursor.execute(
                "INSERT INTO outbox_event"
                " (event_id, aggregate_type, aggregate_id, event_type, payload)"
                f" SELECT LPAD({n}, 36, '0'), 'order', CONCAT('k', {n} % {aggregates}), 'PLACED',"
                f" JSON_OBJECT('n', {n}, 'note', REPEAT('x', 200), 'paid', TRUE)"
                f" FROM digits WHERE n < {min(_TRANSACTION, rows - begin)}"
            )
