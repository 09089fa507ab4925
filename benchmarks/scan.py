"""``python -m benchmarks.scan [ROWS...]``: how long a look at 200 pending rows takes in tables of
that many rows, all others sent.

Each look reads what the compensator and ``source = "polling"`` read: the highest pending id, a
batch of ids, the rows. The server is that of ``CDC_RELAY_TEST_MYSQL_URL`` (``python3 -m dev env``).
"""

from __future__ import annotations

import os
import statistics
import sys
import time

from cdc_relay.config import load
from cdc_relay.database import connected, describe_table, engine
from cdc_relay.store import Store
from tests.support.sql import Database

_PENDING = 200
_LOOKS = 200
_CHUNK = 200_000


def fill(database: Database, rows: int) -> None:
    """``rows`` rows of 5,000 aggregates; 200 of them, evenly spread, are pending."""
    database.sql("SET SESSION cte_max_recursion_depth = 100000000, sql_log_bin = 0")
    for start in range(0, rows, _CHUNK):
        stop = min(start + _CHUNK, rows)
        database.sql(
            "INSERT INTO outbox_event (event_id, aggregate_type, aggregate_id, event_type, payload,"
            f" status) WITH RECURSIVE n (i) AS (SELECT {start} UNION ALL SELECT i + 1 FROM n"
            f" WHERE i < {stop - 1}) SELECT CONCAT('e', LPAD(i, 12, '0')), 'order',"
            f" CONCAT('k', i % 5000), 'CREATED', JSON_OBJECT('n', i),"
            f" IF(i % {rows // _PENDING} = 0, 0, 1) FROM n"
        )


def main() -> None:
    for rows in [int(text) for text in sys.argv[1:]] or [1_000, 100_000]:
        with Database.create(os.environ["CDC_RELAY_TEST_MYSQL_URL"]) as database:
            database.create_outbox()
            begun = time.monotonic()
            fill(database, rows)
            filled = time.monotonic() - begun
            settings = load(environ={}, flags={"database_url": database.text})
            pool = engine(settings)
            with connected(pool) as connection:
                store = Store(pool, describe_table(connection, settings))
            took = []
            for _ in range(_LOOKS):
                begun = time.perf_counter()
                [ids] = store.scan(0, _PENDING).ids()
                assert sum(map(len, store.rows(ids))) == _PENDING
                took.append((time.perf_counter() - begun) * 1000)
            pool.dispose()
        took.sort()
        print(
            f"{rows:>10,} rows: {statistics.median(took):.1f} ms a look (p10 {took[20]:.1f},"
            f" p90 {took[180]:.1f}); filled in {filled:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
