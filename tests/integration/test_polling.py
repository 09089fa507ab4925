"""``source = "polling"``: the same relay without the binlog."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc_relay.config import load
from cdc_relay.database import connected, describe_table, engine
from cdc_relay.store import Store
from tests.support.harness import Harness
from tests.support.load import Load, account
from tests.support.sql import INSERT, Database, insert, row

KEYS = [f"k{number}" for number in range(12)]


@pytest.fixture
def polled(database: Database, kafka: str, tmp_path: Path) -> Iterator[Harness]:
    settings = {"SOURCE": "polling", "TRANSACTION_TIMEOUT": "5s"}
    with Harness(database, kafka, tmp_path, settings) as made:
        made.create_topic(partitions=6)
        yield made


@pytest.fixture
def mysql_polled(mysql: Database, kafka: str, tmp_path: Path) -> Iterator[Harness]:
    settings = {"SOURCE": "polling", "TRANSACTION_TIMEOUT": "5s"}
    with Harness(mysql, kafka, tmp_path, settings) as made:
        made.create_topic(partitions=6)
        yield made


def check(shop: Harness) -> None:
    """Lost 0, invented 0, duplicates 0, in order, all marked, nothing owed."""
    found = account(shop.database, shop.table, "order", shop.messages())
    assert found.whole, found
    assert found.duplicates == 0, found
    assert found.committed > 0
    assert shop.count(1) == found.committed, found
    last = shop.checkpoint()
    assert last is not None
    assert (last.source, len(last.owed), len(last.closed)) == ("polling", 0, 0)


def closed(shop: Harness) -> int:
    last = shop.checkpoint()
    assert last is not None
    return len(last.closed)


def test_load_in_order_without_a_replication_grant(polled: Harness) -> None:
    with polled.database.user("SELECT, UPDATE ON {schema}.outbox_event") as user:
        relay = polled.spawn("start", DATABASE_URL=user.text)
        with Load(polled, KEYS, pause=0.005, threads=3):
            polled.wait_sent(300)
        polled.wait_all_sent()
        assert relay.terminate() == 0, relay.text()
    check(polled)


def test_a_row_that_is_committed_late_is_seen(polled: Harness) -> None:
    """Ids are given out at the INSERT: the lower one may come later."""
    relay = polled.spawn("start")
    with polled.database.connect() as late, late.cursor() as cursor:
        late_row = row("late", {"n": 1})
        cursor.execute(INSERT.format(table=polled.table), late_row)
        for number in range(5):
            polled.ins("early", {"n": number})
            polled.wait_sent(number + 1)
        late.commit()
    polled.wait_sent(6)
    assert relay.terminate() == 0
    assert [message.key for message in polled.messages()].count("late") == 1


def test_a_backlog_in_growing_batches_and_an_end(mysql_polled: Harness) -> None:
    for start in range(0, 10_000, 1000):
        rows = [row(f"k{n % 37}", {"n": n}) for n in range(start, start + 1000)]
        mysql_polled.database.sql(*insert("outbox_event", rows))
    done = mysql_polled.run("start", "--until-current")
    assert done.wait() == 0, done.text()
    assert mysql_polled.count(1) == 10_000
    by_key: dict[str, list[int]] = {}
    for message in mysql_polled.messages():
        by_key.setdefault(message.key, []).append(message.json["n"])
    assert sum(map(len, by_key.values())) == 10_000
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


def test_a_refused_row_is_parked_and_never_overtaken(mysql_polled: Harness) -> None:
    shop = mysql_polled
    shop.create_topic("small", 1, **{"max.message.bytes": "2000"})
    relay = shop.spawn("start", KAFKA_COMPRESSION_TYPE="none")
    for number in range(1, 6):
        shop.ins("a", {"n": number, "filling": "x" * (5000 if number == 2 else 1)}, kind="small")
    shop.ins("b", {"n": 1})
    shop.wait_sent(2)
    shop.until(lambda: shop.database.sql("SELECT MAX(retry_count) FROM outbox_event")[0][0])
    assert shop.count(0) == 4
    shop.database.sql("UPDATE outbox_event SET payload = JSON_REMOVE(payload, '$.filling')")
    shop.wait_all_sent(60)
    assert relay.terminate() == 0
    assert [message.json["n"] for message in shop.messages("small")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("step", ["produced", "committing", "delivered", "marking", "marked"])
def test_killed_under_load(step: str, mysql_polled: Harness) -> None:
    shop = mysql_polled
    with Load(shop, KEYS, pause=0.01, threads=2):
        relay = shop.spawn("start", TEST_FAULT=f"{step}:3")
        shop.until(lambda: not relay.running, 60)
        assert relay.wait(1) == -signal.SIGKILL, relay.text()
        relay = shop.spawn("start")
        shop.wait_sent(shop.count(1) + 50)
    shop.wait_all_sent()
    assert relay.terminate() == 0
    check(shop)


def test_to_the_binlog_and_back(polled: Harness) -> None:
    with Load(polled, KEYS, pause=0.01, threads=2):
        for source in ("polling", "binlog", "polling", "binlog"):
            relay = polled.spawn("start", SOURCE=source)
            polled.wait_sent(polled.count(1) + 60)
            assert relay.terminate() == 0, relay.text()
    relay = polled.spawn("start")
    polled.wait_all_sent()
    # What the binlog's anchors waited for (rows not yet visible then) flows again.
    polled.until(lambda: not closed(polled))
    assert relay.terminate() == 0
    check(polled)


def test_a_pass_leaves_the_table_to_a_relay_that_polls(mysql_polled: Harness) -> None:
    shop = mysql_polled
    relay = shop.spawn("start", POLL_INTERVAL="20s", SESSION_TIMEOUT="45s")
    shop.until(shop.checkpoint)
    shop.ins("k", {"n": 1})
    shop.wait_sent(1)
    shop.ins("k", {"n": 2})
    found = shop.compensate()
    assert (found["relay"], found["sent"], found["exit_code"]) == ("alive", 0, 0), found
    assert found["left_to_relay"] == 1
    assert relay.terminate() == 0
    found = shop.compensate()
    assert (found["relay"], found["sent"]) == ("dead", 1), found
    relay = shop.spawn("start")
    shop.ins("k", {"n": 3})
    shop.wait_sent(3)
    assert relay.terminate() == 0
    check(shop)


def test_polling_needs_marks(mysql_polled: Harness) -> None:
    done = mysql_polled.run("start", MARK="none")
    assert done.wait() == 2
    assert "polling" in done.text()


@pytest.mark.parametrize("rows", [1_000, 100_000])
def test_a_look_reads_what_is_pending_and_no_more(rows: int, database: Database) -> None:
    """At any size of the table: along an index, without a sort. Counted by the server."""
    database.create_outbox()
    database.sql("SET SESSION cte_max_recursion_depth = 1000000", None) if not (
        database.is_mariadb
    ) else database.sql("SET SESSION max_recursive_iterations = 1000000")
    database.sql(
        "INSERT INTO outbox_event (event_id, aggregate_type, aggregate_id, event_type, payload,"
        " status) WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n"
        f" WHERE i < {rows}) SELECT CONCAT('e', i), 'order', CONCAT('k', i % 50), 'T', '{{}}',"
        f" IF(i % {rows // 200} = 0, 0, 1) FROM n"
    )
    settings = load(environ={}, flags={"database_url": database.text})
    pool = engine(settings)
    try:
        with connected(pool) as connection:
            shape = describe_table(connection, settings)
        store = Store(pool, shape)
        assert store.newest_pending(0) == rows
        sql = store._scan_sql(0, 200, 0, rows)
        with connected(pool) as connection:
            connection.exec_driver_sql("FLUSH STATUS")
            found = connection.exec_driver_sql(sql).all()
            read = dict(
                connection.exec_driver_sql("SHOW SESSION STATUS LIKE 'Handler_read%%'").all()
            )
            explain = "EXPLAIN" if database.is_mariadb else "EXPLAIN FORMAT=TRADITIONAL"
            plan = connection.exec_driver_sql(f"{explain} {sql}").mappings().all()
    finally:
        pool.dispose()
    assert len(found) == 200
    # The rows themselves, a look for a dead one each, and what the sort of the union reads.
    assert sum(int(count) for count in read.values()) < 2_000, read
    accesses = {one["table"]: (one["type"], one["key"]) for one in plan if one["table"]}
    assert accesses["outbox"][1] == "idx_status_next_retry", plan
    assert accesses["dead"][1] == "idx_status_aggregate", plan
    assert all(kind not in ("ALL", "index") for kind, key in accesses.values() if key), plan
