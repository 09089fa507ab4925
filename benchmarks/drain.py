"""``python -m benchmarks.drain [--rows N] [--filling BYTES] [--polling]``: pending rows drained by
the compensator (or by a relay that polls), and by a plain poller: SELECT 200, send each, UPDATE
each.

Servers are those of ``CDC_RELAY_TEST_MYSQL_URL`` and ``CDC_RELAY_TEST_KAFKA_BOOTSTRAP``
(``python3 -m dev env``).
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

from confluent_kafka import Producer

from tests.support.harness import Harness
from tests.support.sql import Database

_HEAD = "INSERT INTO outbox_event (event_id, aggregate_type, aggregate_id, event_type, payload)"


def fill(database: Database, rows: int, filling: int) -> None:
    """Pending rows of 5,000 aggregates."""
    database.sql("SET SESSION cte_max_recursion_depth = 100000000")
    for start in range(0, rows, 50_000):
        stop = min(start + 50_000, rows)
        database.sql(
            f"{_HEAD} WITH RECURSIVE n (i) AS (SELECT {start} UNION ALL SELECT i + 1 FROM n"
            f" WHERE i < {stop - 1}) SELECT UUID(), 'order', CONCAT('k', i %% 5000), 'CREATED',"
            " JSON_OBJECT('n', i, 'filling', REPEAT('x', %s)) FROM n",
            (filling,),
        )


def plain(database: Database, kafka: str, topic: str, seconds: float) -> float:
    """Rows/s of the poller that everybody writes first."""
    producer = Producer({"bootstrap.servers": kafka, "acks": "all", "enable.idempotence": True})
    done, begun = 0, time.monotonic()
    with database.connect() as connection, connection.cursor() as cursor:
        while time.monotonic() - begun < seconds:
            cursor.execute(
                "SELECT id, aggregate_id, payload FROM outbox_event WHERE status = 0"
                " ORDER BY id LIMIT 200"
            )
            rows = cursor.fetchall()
            if not rows:
                break
            for row_id, key, payload in rows:
                producer.produce(topic, payload, key)
                producer.flush(30)
                cursor.execute("UPDATE outbox_event SET status = 1 WHERE id = %s", (row_id,))
                connection.commit()
                done += 1
    return done / (time.monotonic() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--filling", type=int, default=10)
    parser.add_argument("--polling", action="store_true")
    arguments = parser.parse_args()
    kafka = os.environ["CDC_RELAY_TEST_KAFKA_BOOTSTRAP"]
    with (
        Database.create(os.environ["CDC_RELAY_TEST_MYSQL_URL"]) as database,
        tempfile.TemporaryDirectory() as home,
        Harness(database, kafka, Path(home), {"SOURCE": "polling"}) as shop,
    ):
        shop.create_topic(partitions=6)
        fill(database, arguments.rows, arguments.filling)
        own = plain(database, kafka, shop.topic_prefix + "order", 10)
        pending = shop.count(0)
        begun = time.monotonic()
        what: tuple[str, ...] = ("start", "--until-current")
        if not arguments.polling:
            what = ("compensate", "--older-than", "0s")
        done = shop.run(*what, timeout=600)
        took = time.monotonic() - begun
        assert done.wait() == 0, done.text()
        assert shop.count(0) == 0
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
        rate = pending / took
        print(
            f"{what[0]}: {pending} rows in {took:.1f} s, {rate:,.0f} rows/s, start included;"
            f" {peak} MB resident; plain poller {own:,.0f} rows/s, ratio {rate / own:.0f}"
        )


if __name__ == "__main__":
    main()
