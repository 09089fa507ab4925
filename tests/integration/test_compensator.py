"""The compensator as a process, with real databases and a real broker."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cdc_relay.config import load
from tests.support.harness import CHECKOUT, Harness, Message
from tests.support.sql import Database, row


def values(messages: list[Message], key: str) -> list[object]:
    return [message.json["n"] for message in messages if message.key == key]


def test_sends_what_is_pending_in_order_and_marks_it(shop: Harness) -> None:
    shop.create_topic(partitions=12)
    for number in range(60):
        shop.ins(f"k{number % 7}", {"n": number})
    summary = shop.compensate("--batch", "25")
    assert summary["exit_code"] == 0
    assert (summary["sent"], summary["marked"], summary["left"]) == (60, 60, 0)
    assert summary["batches"] == 3
    messages = shop.messages()
    assert len(messages) == 60
    for key in range(7):
        assert values(messages, f"k{key}") == list(range(key, 60, 7))
    assert shop.count(1) == 60
    again = shop.compensate()
    assert (again["sent"], again["exit_code"]) == (0, 0)
    assert len(shop.messages()) == 60


def test_the_message_is_the_streams_message(shop: Harness) -> None:
    """Same key, value, headers and timestamp, byte for byte, whichever way the row was read."""
    shop.create_topic()
    relay = shop.relay()
    odd = {"d": 1.50, "n": 12345678901234567890, "t": "naïve \U0001f600", "e": [], "z": None}
    headers = {"traceparent": "00-1", "retry": 3, "no": None, "deep": {"ключ": "é"}}
    event_id = shop.ins("k", {"n": odd}, headers=headers)
    shop.ins("k", None)
    shop.wait_sent(2)
    assert relay.terminate() == 0
    shop.database.sql("UPDATE outbox_event SET status = 0")
    assert shop.compensate()["sent"] == 2
    streamed, tombstone, compensated, tombstone_again = shop.messages()
    assert streamed.event_id == event_id
    assert streamed._replace(offset=0) == compensated._replace(offset=0)
    assert tombstone.value is None
    assert tombstone._replace(offset=0) == tombstone_again._replace(offset=0)


def test_only_rows_that_are_old_enough(mysql_shop: Harness) -> None:
    mysql_shop.create_topic()
    mysql_shop.ins("old", {"n": 1})
    mysql_shop.database.sql(
        "UPDATE outbox_event SET created_at = UTC_TIMESTAMP(6) - INTERVAL 11 MINUTE"
    )
    mysql_shop.ins("young", {"n": 2})
    summary = mysql_shop.compensate("--older-than", "10m")
    assert (summary["sent"], summary["left"], summary["exit_code"]) == (1, 0, 0)
    assert [message.key for message in mysql_shop.messages()] == ["old"]


def test_bad_rows_at_the_head_are_parked_and_the_good_ones_go(shop: Harness) -> None:
    shop.create_topic()
    for number in range(10):
        shop.ins(f"bad{number}", {"n": number}, kind="Dont care/Ü")
    for number in range(5):
        shop.ins(f"good{number}", {"n": number})
    summary = shop.compensate("--batch", "10")
    assert (summary["sent"], summary["failed"], summary["left"]) == (5, 10, 10)
    assert summary["exit_code"] == 6
    [(reason, tries)] = set(
        shop.database.sql("SELECT last_error, retry_count FROM outbox_event WHERE status = 0")
    )
    assert "is not a Kafka topic name" in reason
    assert tries == 1


def test_a_too_large_row_is_parked_and_not_overtaken(shop: Harness) -> None:
    """Refused by the broker: its topic takes less than the client sends."""
    shop.create_topic("order", 1, **{"max.message.bytes": "2000"})
    shop.ins("a", {"n": 1})
    shop.ins("a", {"n": 2, "x": "y" * 5000})
    shop.ins("a", {"n": 3})
    shop.ins("b", {"n": 4})
    summary = shop.compensate(KAFKA_COMPRESSION_TYPE="none")
    assert (summary["sent"], summary["failed"], summary["left"]) == (2, 1, 2)
    assert summary["exit_code"] == 6
    assert values(shop.messages(), "a") == [1]
    assert values(shop.messages(), "b") == [4]


def test_eleven_failures_make_a_row_dead(mysql_shop: Harness) -> None:
    mysql_shop.ins("k", {"n": 1}, kind="not a topic")
    mysql_shop.database.sql("UPDATE outbox_event SET retry_count = 9")
    for dead in (0, 1):
        summary = mysql_shop.compensate()
        assert (summary["failed"], summary["dead"]) == (1 - dead, dead)
        assert summary["exit_code"] == 6
        mysql_shop.database.sql("UPDATE outbox_event SET next_retry_time = UTC_TIMESTAMP(6)")
    assert mysql_shop.database.sql("SELECT status, retry_count FROM outbox_event") == ((2, 11),)
    assert mysql_shop.compensate()["exit_code"] == 0


def test_no_broker_costs_no_row_a_try(mysql_shop: Harness) -> None:
    mysql_shop.ins("k", {"n": 1})
    summary = mysql_shop.compensate("--send-timeout", "2s", KAFKA_BOOTSTRAP="127.0.0.1:1")
    assert summary["exit_code"] == 4
    assert "are the brokers up" in summary["error"]
    assert mysql_shop.database.sql("SELECT status, retry_count FROM outbox_event") == ((0, 0),)


def test_waiting_for_kafka_holds_no_lock_and_no_transaction(mysql_shop: Harness) -> None:
    first = mysql_shop.ins("k", {"n": 1})
    waiting = mysql_shop.spawn(
        "compensate", "--older-than", "0s", "--send-timeout", "4s", KAFKA_BOOTSTRAP="127.0.0.1:1"
    )
    time.sleep(2)
    started = time.monotonic()
    mysql_shop.ins("k", {"n": 2})
    mysql_shop.database.sql("UPDATE outbox_event SET status = 1 WHERE event_id = %s", (first,))
    assert time.monotonic() - started < 0.5
    open_ones = mysql_shop.database.sql(
        "SELECT COUNT(*) FROM information_schema.INNODB_TRX AS t"
        " JOIN performance_schema.processlist AS p ON p.ID = t.trx_mysql_thread_id"
        " WHERE p.DB = %s AND p.ID <> CONNECTION_ID()",
        (mysql_shop.database.name,),
    )
    assert open_ones == ((0,),)
    assert waiting.wait() == 4


def test_two_passes_at_once_send_nothing_twice(shop: Harness) -> None:
    shop.create_topic()
    for number in range(300):
        shop.ins(f"k{number % 3}", {"n": number})
    both = [
        shop.spawn("compensate", "--older-than", "0s", "--batch", "50", "--json") for _ in range(2)
    ]
    assert [process.wait(90) for process in both] == [0, 0]
    assert shop.count(1) == 300
    messages = shop.messages()
    for key in range(3):
        assert values(messages, f"k{key}") == list(range(key, 300, 3))


def test_loop_stays_and_stops_on_sigterm(mysql_shop: Harness) -> None:
    mysql_shop.create_topic()
    loop = mysql_shop.spawn("compensate", "--older-than", "0s", "--loop", "--json")
    for number in range(3):
        mysql_shop.ins("k", {"n": number})
        mysql_shop.wait_sent(number + 1)
    assert loop.terminate(10) == 0
    assert json.loads(loop.stdout)["sent"] == 3
    assert values(mysql_shop.messages(), "k") == [0, 1, 2]


def test_fallback_as_a_module(mysql_shop: Harness) -> None:
    mysql_shop.create_topic()
    mysql_shop.ins("k", {"n": 1})
    done = subprocess.run(
        [sys.executable, "-m", "fallback", "--older-than", "0s"],
        cwd=CHECKOUT,
        env=mysql_shop.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sent 1, marked 1, failed 0, dead 0, left 0")


@pytest.mark.parametrize("payload", ["BLOB", "TEXT"])
def test_a_table_with_only_the_required_columns(
    database: Database, kafka: str, tmp_path: object, payload: str
) -> None:
    from tests.integration.test_store import LEGACY, LEGACY_INSERT

    database.sql(LEGACY.format(payload=payload, retry="DATETIME NOT NULL DEFAULT '2000-01-01'"))
    with Harness(database, kafka, tmp_path, create=False) as shop:  # type: ignore[arg-type]
        shop.create_topic()
        database.sql(LEGACY_INSERT, ("e-1", "order", "k", "T", "naïve"))
        summary = shop.compensate()
        assert (summary["sent"], summary["marked"]) == (1, 1)
        [message] = shop.messages()
    assert message.value == "naïve".encode()
    types = {"BLOB": b"application/octet-stream", "TEXT": b"text/plain; charset=utf-8"}
    assert message.headers["content-type"] == types[payload]


@pytest.mark.parametrize("by", ["relay", "compensator"])
def test_rows_whose_names_are_null_go_dead(
    database: Database, kafka: str, tmp_path: Path, by: str
) -> None:
    """As existing tables allow it. They can never be sent; their aggregates wait, nobody else."""
    from tests.integration.test_store import BARE, LEGACY_INSERT

    database.sql(BARE)
    with Harness(database, kafka, tmp_path, {"MAX_TRIES": "1"}, create=False) as shop:
        shop.create_topic()
        relay = shop.relay() if by == "relay" else None
        for names in ((None, "order", "a"), ("e-2", None, "b"), ("e-3", "order", None)):
            database.sql(LEGACY_INSERT, (*names, "T", "{}"))
        database.sql(LEGACY_INSERT, ("e-4", "order", "a", "T", "{}"))  # behind the first
        database.sql(LEGACY_INSERT, ("e-5", "order", "c", "T", "{}"))
        dead = "SELECT COUNT(*) FROM outbox_event WHERE status = 2"
        if relay is None:
            shop.until(
                lambda: shop.compensate()["exit_code"] == 6 and database.sql(dead)[0][0] == 3
            )
        else:
            shop.until(lambda: database.sql(dead)[0][0] == 3)
            shop.wait_sent(1)
            assert relay.terminate() == 0, relay.text()
        again = shop.run("start", "--until-current")
        assert again.wait() == 0, again.text()
        found = database.sql("SELECT status, retry_count FROM outbox_event ORDER BY id")
        assert found == ((2, 2), (2, 2), (2, 2), (0, None), (1, None))
        assert [message.event_id for message in shop.messages()] == ["e-5"]


def test_a_large_backlog_drains_in_bounded_batches(mysql_shop: Harness) -> None:
    mysql_shop.create_topic(partitions=3)
    connection = mysql_shop.database.connect()
    with connection.cursor() as cursor:
        sql = (
            "INSERT INTO outbox_event (event_id, aggregate_type, aggregate_id, event_type, payload)"
            " VALUES (%s, %s, %s, %s, %s)"
        )
        rows = [row(f"k{number}", {"n": number})[:5] for number in range(20_000)]
        cursor.executemany(sql, rows)
    connection.commit()
    connection.close()
    summary = mysql_shop.compensate()
    assert (summary["sent"], summary["batches"]) == (20_000, 40)
    assert len({message.key for message in mysql_shop.messages()}) == 20_000


def test_status_shows_the_table(mysql_shop: Harness) -> None:
    mysql_shop.ins("k", {"n": 1})
    process = mysql_shop.spawn("status", "--json")
    assert process.wait() == 0
    status = json.loads(process.stdout)
    assert (status["pending"], status["sent"], status["dead"]) == (1, 0, 0)
    assert 0 <= status["oldest_pending_s"] < 60
    assert status["checkpoint"] is None
    assert load(environ={}).name != status["name"]
