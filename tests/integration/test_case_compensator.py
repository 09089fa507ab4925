"""Bad moments for a pass: locks, a database that goes away, clocks, brokers that stay away; and
the same passes at least once."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dev.kafka import Kafka
from dev.server import Server
from tests.support.harness import Harness, Process
from tests.support.load import Load, account
from tests.support.sql import Database

AT_LEAST_ONCE = {"DELIVERY": "at_least_once"}


def starting(shop: Harness, *arguments: str, **extra: str) -> Process:
    return shop.spawn("compensate", "--older-than", "0s", "--json", *arguments, **extra)


def numbers(shop: Harness, key: str) -> list[int]:
    return [message.json["n"] for message in shop.messages() if message.key == key]


def summary(process: Process) -> dict[str, object]:
    assert process.wait(90) == 0, process.text()
    found: dict[str, object] = json.loads(process.stdout)
    return found


# --- locks ---------------------------------------------------------------------------------------


def test_a_lock_that_others_hold_for_too_long_delays_the_marks(shop: Harness) -> None:
    """Error 1205: a session holds one of the rows for longer than the marks wait for a lock. It
    delays no mark but its own; a pass that is killed meanwhile sends nothing again, and neither
    does the next one, which goes on although the lock is still held."""
    shop.create_topic()
    for number in range(1, 6):
        shop.ins("k", {"n": number})
    with shop.database.connect() as holder, holder.cursor() as cursor:
        cursor.execute("SELECT id FROM outbox_event WHERE id = 3 FOR UPDATE")
        going = starting(shop)
        shop.until(lambda: shop.count(1) == 4)
        assert going.running, going.text()
        going.kill()
        shop.ins("k", {"n": 6})
        going = starting(shop)
        shop.until(lambda: shop.count(1) == 5)
        assert going.running, going.text()
        holder.rollback()
    found = summary(going)
    assert (found["sent"], found["marked"]) == (1, 2), found
    assert shop.count(0) == 0
    assert numbers(shop, "k") == [1, 2, 3, 4, 5, 6]


def test_marks_that_are_the_victim_of_a_deadlock(shop: Harness) -> None:
    """Error 1213: the other session has changed more rows, so the marks are rolled back."""
    shop.create_topic()
    for number in range(1, 6):
        shop.ins("k", {"n": number})
    shop.database.sql("CREATE TABLE heavy (n INT)")
    with shop.database.connect() as other, other.cursor() as cursor:
        cursor.execute("INSERT INTO heavy VALUES " + ",".join(["(1)"] * 2000))
        cursor.execute("SELECT id FROM outbox_event WHERE id = 4 FOR UPDATE")
        going = starting(shop)
        shop.until(lambda: waits_for_a_lock(shop))
        cursor.execute("UPDATE outbox_event SET headers = '{}' WHERE id = 1")  # held by the marks
        other.commit()
    found = summary(going)
    assert (found["sent"], found["marked"]) == (5, 5), found
    assert numbers(shop, "k") == [1, 2, 3, 4, 5]


def waits_for_a_lock(shop: Harness) -> bool:
    time.sleep(0.2)  # the server shows old news to who asks more often than every tenth of a second
    sql = "SELECT COUNT(*) FROM information_schema.INNODB_TRX WHERE trx_state = 'LOCK WAIT'"
    return bool(shop.database.sql(sql)[0][0])


# --- clocks --------------------------------------------------------------------------------------


def test_created_at_is_no_order(shop: Harness) -> None:
    """Ids are: with clocks that disagree, and with equal times."""
    shop.create_topic()
    for number in range(1, 6):
        shop.ins("k", {"n": number})
    age = "UPDATE outbox_event SET created_at = UTC_TIMESTAMP(6) - INTERVAL {} MINUTE WHERE id = {}"
    for row_id, minutes in ((1, 20), (2, 40), (3, 30), (4, 30), (5, 5)):
        shop.database.sql(age.format(minutes, row_id))
    assert shop.compensate("--older-than", "10m")["sent"] == 4
    assert numbers(shop, "k") == [1, 2, 3, 4]


def test_an_old_row_waits_behind_a_younger_one_of_its_aggregate(mysql_shop: Harness) -> None:
    shop = mysql_shop
    shop.create_topic()
    for number in (1, 2):
        shop.ins("k", {"n": number})
    shop.database.sql(
        "UPDATE outbox_event SET created_at = UTC_TIMESTAMP(6) - INTERVAL 1 HOUR WHERE id = 2"
    )
    shop.compensate("--older-than", "10m")
    assert shop.count(0) == 2
    assert shop.compensate()["sent"] == 2
    assert numbers(shop, "k") == [1, 2]


# --- the database goes away ----------------------------------------------------------------------


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_a_database_that_goes_away_between_acknowledgement_and_mark(
    delivery: str, own_mysql: Server, kafka: str, tmp_path: Path
) -> None:
    """The marks wait for it; nothing is sent again, by this pass or by the next."""
    with (
        Database.create(own_mysql.url()) as database,  # type: ignore[attr-defined]
        Harness(database, kafka, tmp_path, {"DELIVERY": delivery}) as shop,
    ):
        shop.create_topic()
        for number in range(1, 11):
            shop.ins("k", {"n": number})
        with database.connect() as holder, holder.cursor() as cursor:
            cursor.execute("SELECT id FROM outbox_event FOR UPDATE")
            going = starting(shop)
            shop.until(lambda: len(shop.messages()) == 10)
            shop.until(lambda: waits_for_a_lock(shop))
            database.close()
            own_mysql.kill()
        time.sleep(5)
        own_mysql.start()
        found = summary(going)
        assert (found["sent"], found["marked"]) == (10, 10), going.text()
        assert shop.count(1) == 10
        assert shop.compensate()["sent"] == 0
        assert numbers(shop, "k") == list(range(1, 11))


# --- the brokers stay away -----------------------------------------------------------------------


def test_brokers_that_stay_away_cost_no_row_a_try(
    mysql: Database, quick_kafka: Kafka, tmp_path: Path
) -> None:
    """Half a minute, and more passes than a row has tries, beside a relay."""
    settings = {"SESSION_TIMEOUT": "2s", "TRANSACTION_TIMEOUT": "5s", "MAX_TRIES": "5"}
    with Harness(mysql, quick_kafka.bootstrap, tmp_path, settings) as shop:
        shop.create_topic(partitions=3)
        relay = shop.relay()
        shop.until(shop.checkpoint)
        [broker] = quick_kafka.brokers
        with Load(shop, ["a", "b", "c"], pause=0.05, threads=2):
            shop.wait_sent(20)
            broker.kill()
            try:
                for _ in range(8):
                    outcome = starting(shop, "--send-timeout", "3s").wait(60)
                    assert outcome == 4
            finally:
                broker.start()
            assert relay.running
            shop.wait_sent(shop.count(1) + 50, 60)
        shop.wait_all_sent(60)
        assert relay.terminate() == 0
        tries = shop.database.sql("SELECT MAX(retry_count), MAX(status) FROM outbox_event")
        assert tries == ((0, 1),)
        found = account(mysql, shop.table, "order", shop.messages())
        assert found.whole, found
        assert found.duplicates == 0, found


# --- at least once -------------------------------------------------------------------------------


@pytest.fixture
def lax_shop(database: Database, kafka: str, tmp_path: Path) -> Iterator[Harness]:
    with Harness(database, kafka, tmp_path, AT_LEAST_ONCE) as made:
        made.create_topic(partitions=3)
        yield made


def test_at_least_once_sends_in_order_and_marks(lax_shop: Harness) -> None:
    for number in range(90):
        lax_shop.ins(f"k{number % 4}", {"n": number})
    found = lax_shop.compensate("--batch", "25")
    assert (found["sent"], found["marked"], found["exit_code"]) == (90, 90, 0), found
    for key in range(4):
        assert numbers(lax_shop, f"k{key}") == list(range(key, 90, 4))
    assert lax_shop.compensate()["sent"] == 0


def test_at_least_once_a_killed_pass_loses_nothing_and_names_what_it_repeats(
    lax_shop: Harness,
) -> None:
    for step in ("pass_begun", "pass_delivered", "marking", "marked"):
        for number in range(20):
            lax_shop.ins("k", {"n": number})
        going = starting(lax_shop, TEST_FAULT=step)
        assert going.wait(60) == -signal.SIGKILL, (step, going.text())
        assert lax_shop.compensate()["exit_code"] == 0
    assert lax_shop.count(1) == 80
    arrived = [message.event_id for message in lax_shop.messages()]
    rows = lax_shop.database.sql("SELECT event_id FROM outbox_event ORDER BY id")
    assert list(dict.fromkeys(arrived)) == [event_id for (event_id,) in rows]
    # Two of the four were killed with records acknowledged and nothing marked.
    assert len(arrived) == 120


def test_at_least_once_beside_a_relay_that_is_alive(lax_shop: Harness) -> None:
    relay = lax_shop.relay()
    lax_shop.until(lax_shop.checkpoint)
    with Load(lax_shop, [f"k{number}" for number in range(8)], pause=0.01, threads=2):
        for _ in range(3):
            found = lax_shop.compensate()
            assert found["relay"] in ("alive", None), found
    lax_shop.wait_all_sent()
    assert relay.terminate() == 0
    result = account(lax_shop.database, lax_shop.table, "order", lax_shop.messages())
    assert result.whole, result
    assert result.duplicates == 0, result


def test_at_least_once_a_refused_row_is_parked_and_not_overtaken(lax_shop: Harness) -> None:
    lax_shop.create_topic("small", 1, **{"max.message.bytes": "2000"})
    for number in range(1, 5):
        payload = {"n": number, "filling": "x" * (5000 if number == 2 else 1)}
        lax_shop.ins("a", payload, kind="small")
    lax_shop.ins("b", {"n": 1})
    found = lax_shop.compensate(KAFKA_COMPRESSION_TYPE="none")
    assert (found["sent"], found["failed"], found["left"]) == (2, 1, 3), found
    assert found["exit_code"] == 6
    lax_shop.database.sql(
        "UPDATE outbox_event SET payload = JSON_REMOVE(payload, '$.filling'),"
        " next_retry_time = UTC_TIMESTAMP(6) WHERE status = 0"
    )
    assert lax_shop.compensate()["sent"] == 3
    assert [message.json["n"] for message in lax_shop.messages("small")] == [1, 2, 3, 4]
