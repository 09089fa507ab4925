"""Relay and compensator on one table: whoever sends an event, it is sent once.

Real processes, real kills: a pass beside a living relay, after a dead one, before one that comes
back, and in the middle of one that starts.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dev.kafka import Kafka
from tests.support.harness import CHECKOUT, Harness, Process
from tests.support.load import ACCOUNTS, Load, account
from tests.support.sql import INSERT, Database, row

KEYS = [f"k{number}" for number in range(20)]
# Passed by a pass that has something to send, with no relay alive.
POINTS = ["pass_fenced", "relay_fenced", "pass_begun", "begun", "produced", "committing"]
POINTS += ["pass_delivered", "marking", "marked", "pass_marked", "pass_done"]


@pytest.fixture
def shop(mysql: Database, quick_kafka: Kafka, tmp_path: Path) -> Iterator[Harness]:
    settings = {"SESSION_TIMEOUT": "2s", "TRANSACTION_TIMEOUT": "5s"}
    with Harness(mysql, quick_kafka.bootstrap, tmp_path, settings) as made:
        made.create_topic(partitions=6)
        yield made


def check(shop: Harness, about: object = "") -> None:
    """Lost 0, invented 0, duplicates 0, in order, all marked."""
    found = account(shop.database, shop.table, "order", shop.messages())
    assert found.whole, (about, found)
    assert found.duplicates == 0, (about, found)
    assert found.committed > 0, about
    assert shop.count(1) == found.committed, (about, found)


def write(shop: Harness, count: int, *, hidden: bool = False, filling: int = 0) -> None:
    """Rows of ``KEYS``, numbered on from where ``Load`` is; ``hidden`` from the binlog."""
    sql = "SELECT aggregate_id, COUNT(*) FROM outbox_event GROUP BY aggregate_id"
    numbers: dict[str, int] = dict(shop.database.sql(sql))  # type: ignore[arg-type]
    shop.database.sql(ACCOUNTS)
    with shop.database.connect() as connection, connection.cursor() as cursor:
        if hidden:
            cursor.execute("SET sql_log_bin = 0")
        for number in range(count):
            key = KEYS[number % len(KEYS)]
            numbers[key] = numbers.get(key, 0) + 1
            payload = {"n": numbers[key], "filling": "x" * filling}
            cursor.execute(INSERT.format(table=shop.table), row(key, payload))
            if number % 50 == 49:
                connection.commit()
        connection.commit()
    for key, number in numbers.items():
        shop.database.sql("REPLACE INTO account VALUES (%s, %s)", (key, number))


def started(shop: Harness) -> Process:
    """A relay with a checkpoint."""
    relay = shop.relay()
    shop.until(shop.checkpoint)
    return relay


def starting_pass(shop: Harness, *arguments: str, **extra: str) -> Process:
    return shop.spawn("compensate", "--older-than", "0s", "--json", *arguments, **extra)


def summary(process: Process, timeout: float = 60) -> dict[str, Any]:
    code = process.wait(timeout)
    assert process.stdout, process.text()
    result: dict[str, Any] = json.loads(process.stdout)
    assert result["exit_code"] == code
    return result


@contextmanager
def stopped(process: Process) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end."""
    process.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.signal(signal.SIGCONT)


# --- the relay is alive --------------------------------------------------------------------------


def test_passes_beside_a_streaming_relay_send_nothing_twice(shop: Harness) -> None:
    relay = started(shop)
    seen = []
    with Load(shop, KEYS, pause=0.005, threads=3):
        for _ in range(4):
            seen.append(shop.compensate())
            assert seen[-1]["exit_code"] == 0, seen
    shop.wait_all_sent()
    assert relay.terminate() == 0, relay.text()
    assert {one["relay"] for one in seen} <= {"alive", None}
    assert "alive" in {one["relay"] for one in seen}
    check(shop, seen)


def test_rows_that_the_stream_missed_are_sent_once_beside_it(shop: Harness) -> None:
    relay = started(shop)
    write(shop, 40)
    write(shop, 200, hidden=True)
    with Load(shop, ["other"], pause=0.01, threads=1):
        found = shop.compensate()
    assert (found["relay"], found["exit_code"]) == ("alive", 0), found
    assert found["sent"] >= 200, found
    shop.wait_all_sent()
    again = shop.compensate()
    assert again["sent"] == 0
    assert relay.terminate() == 0
    check(shop)


def test_what_a_relay_has_not_reached_is_left_to_it(shop: Harness) -> None:
    relay = shop.relay(SESSION_TIMEOUT="45s")
    shop.until(shop.checkpoint)
    with stopped(relay):
        write(shop, 60)
        found = summary(starting_pass(shop, "--relay-wait", "1s"))
        assert (found["relay"], found["sent"], found["exit_code"]) == ("alive", 0, 0), found
        assert (found["late"], found["left_to_relay"], found["left"]) == (60, 60, 0), found
        assert shop.count(0) == 60
    shop.wait_all_sent()
    assert relay.terminate() == 0
    check(shop)


def test_force_asks_no_relay(shop: Harness) -> None:
    relay = shop.relay(SESSION_TIMEOUT="45s")
    shop.until(shop.checkpoint)
    with stopped(relay):
        write(shop, 20)
        found = summary(starting_pass(shop, "--force"))
        assert (found["relay"], found["sent"], found["marked"]) == ("forced", 20, 20), found
    # The relay may send them as well, as documented; it goes on in any case.
    last = shop.ins("k0", {"n": 99})
    shop.until(lambda: last in {message.event_id for message in shop.messages()})
    assert relay.terminate() == 0


def test_a_parked_aggregate_is_the_relays_alone(shop: Harness) -> None:
    """Rows behind a refused one are never tried and old, and the stream has passed them."""
    relay = started(shop)
    with Load(shop, KEYS[:5], pause=0.01, threads=2):
        shop.ins("missing", {"n": 1}, kind="nowhere")
        for number in range(2, 20):
            shop.ins("missing", {"n": number}, kind="nowhere")
        shop.until(lambda: shop.database.sql("SELECT MAX(retry_count) FROM outbox_event")[0][0])
        for turn in range(4):
            found = summary(starting_pass(shop))
            assert found["relay"] in ("alive", None), found
            if turn == 1:
                shop.create_topic("nowhere")
    shop.wait_all_sent(60)
    assert relay.terminate() == 0
    numbers = [message.json["n"] for message in shop.messages("nowhere")]
    assert numbers == list(range(1, 20))


# --- the relay is dead ---------------------------------------------------------------------------


def test_what_a_relay_keeps_back_without_a_failure_is_left_to_it(shop: Harness) -> None:
    """A relay that anchors waits for rows that are not visible yet: no row has failed."""
    with shop.database.connect() as late, late.cursor() as cursor:
        cursor.execute(INSERT.format(table=shop.table), row("k", {"n": 1}))
        relay = shop.relay()
        shop.until(lambda: relay.logged("rows that are not visible yet are waited for"))
        shop.until(lambda: (last := shop.checkpoint()) is not None and last.closed)
        with shop.database.connect(autocommit=True) as hidden, hidden.cursor() as other:
            other.execute("SET sql_log_bin = 0")
            other.execute(INSERT.format(table=shop.table), row("k", {"n": 2}))
        process = shop.run("compensate", "--older-than", "0s", "--json")
        assert process.wait() == 0, process.text()
        found = json.loads(process.stdout)
        assert (found["relay"], found["left"], found["left_to_relay"]) == ("alive", 0, 1)
        late.commit()
    shop.wait_sent(2)
    assert relay.terminate() == 0
    assert [message.json["n"] for message in shop.messages()] == [1, 2]


def test_a_dead_relays_rows_are_taken_and_not_sent_again_when_it_comes_back(shop: Harness) -> None:
    relay = started(shop)
    write(shop, 40)
    shop.wait_sent(40)
    relay.kill()
    write(shop, 300)
    write(shop, 20, hidden=True)
    found = summary(starting_pass(shop))
    while found["relay"] == "alive":  # Kafka has not noticed yet
        found = summary(starting_pass(shop, "--relay-wait", "0s"))
    assert (found["relay"], found["sent"], found["left"]) == ("dead", 320, 0), found
    with Load(shop, KEYS, pause=0.01, threads=2):
        relay = shop.relay()
        shop.wait_sent(500)
    shop.wait_all_sent()
    assert relay.terminate() == 0
    check(shop)


def test_a_paused_relay_that_was_replaced_by_a_pass_sends_nothing_twice(shop: Harness) -> None:
    """Its last transaction is open while the pass takes the rows."""
    with Load(shop, KEYS, pause=0.002, threads=3):
        relay = started(shop)
        for _ in range(2):
            shop.wait_sent(shop.count(1) + 100)
            with stopped(relay):
                time.sleep(2.5)
                found = summary(starting_pass(shop, "--relay-wait", "0s"))
                while found["relay"] == "alive":
                    found = summary(starting_pass(shop, "--relay-wait", "0s"))
                assert found["relay"] == "dead", found
    shop.wait_all_sent(60)
    assert relay.terminate() == 0
    check(shop)


def test_a_relay_that_starts_in_the_middle_of_a_pass(shop: Harness) -> None:
    relay = started(shop)
    relay.terminate()
    write(shop, 6000)
    going = starting_pass(shop, "--batch", "50")
    shop.until(lambda: shop.count(1) > 0)
    relay = shop.relay()
    shop.wait_all_sent(60)
    found = summary(going)
    assert found["exit_code"] == 0, found
    assert relay.terminate() == 0
    check(shop, found)


def test_a_first_start_in_the_middle_of_a_pass(shop: Harness) -> None:
    write(shop, 6000)
    going = starting_pass(shop, "--batch", "50")
    shop.until(lambda: shop.count(1) > 0)
    relay = shop.relay()
    shop.wait_all_sent(60)
    found = summary(going)
    assert (found["relay"] in ("none", "alive"), found["exit_code"]) == (True, 0), found
    assert relay.terminate() == 0
    check(shop, found)


# --- a pass is killed ----------------------------------------------------------------------------


def test_every_fault_point_of_a_pass_is_tested() -> None:
    sources = (CHECKOUT / "fallback").rglob("*.py")
    found = {
        name
        for source in sources
        for name in re.findall(r'faults\.point\("(\w+)"\)', source.read_text())
    }
    shared = {"begun", "produced", "committing", "marking", "marked"}
    assert found == {*POINTS, "pass_parking"} - shared


@pytest.mark.parametrize("before_relay", [False, True], ids=["first", "after-an-outage"])
def test_a_pass_killed_at_every_step(before_relay: bool, shop: Harness) -> None:
    if before_relay:
        assert started(shop).terminate() == 0
    steps = POINTS if before_relay else ["produced", "committing", "pass_delivered", "marked"]
    for number, step in enumerate(steps):
        write(shop, 60)
        # Of those that are passed several times, at times the second one.
        often = step in ("begun", "produced", "committing", "pass_delivered")
        turn = 1 + number % 2 if often else 1
        going = starting_pass(shop, "--batch", "20", TEST_FAULT=f"{step}:{turn}")
        assert going.wait(60) == -signal.SIGKILL, (step, going.text())
        if number % 4 == 3:
            relay = shop.relay()
            shop.wait_all_sent()
            assert relay.terminate() == 0
    found = summary(starting_pass(shop))
    assert found["exit_code"] == 0, found
    check(shop)
    relay = shop.relay()
    shop.ins("k0", {"n": len([1 for m in shop.messages() if m.key == "k0"]) + 1})
    shop.wait_all_sent()
    assert relay.terminate() == 0
    check(shop)


def test_a_pass_killed_before_its_marks_is_healed_by_the_next_one(shop: Harness) -> None:
    write(shop, 100)
    assert starting_pass(shop, TEST_FAULT="marking").wait(60) == -signal.SIGKILL
    assert shop.count(0) == 100
    assert len(shop.messages()) == 100
    found = summary(starting_pass(shop))
    assert (found["sent"], found["healed"], found["exit_code"]) == (0, 100, 0), found
    check(shop)


def test_a_pass_killed_before_its_marks_is_healed_by_the_relay(shop: Harness) -> None:
    assert started(shop).terminate() == 0
    write(shop, 100)
    assert starting_pass(shop, TEST_FAULT="marking").wait(60) == -signal.SIGKILL
    assert shop.count(0) == 100
    relay = shop.relay()
    shop.wait_all_sent()
    assert relay.terminate() == 0
    check(shop)


def test_a_pass_killed_while_it_parks(shop: Harness) -> None:
    shop.ins("bad", {"n": 1}, kind="no topic/Ü")
    write(shop, 40)
    assert starting_pass(shop, TEST_FAULT="pass_parking").wait(60) == -signal.SIGKILL
    found = summary(starting_pass(shop))
    assert (found["sent"], found["failed"], found["exit_code"]) == (40, 1, 6), found


def test_two_passes_and_a_relay_at_once(shop: Harness) -> None:
    relay = started(shop)
    relay.kill()
    write(shop, 3000)
    both = [starting_pass(shop, "--batch", "100") for _ in range(2)]
    with Load(shop, KEYS, pause=0.01, threads=2):
        relay = shop.relay()
        found = [summary(one, 90) for one in both]
    assert [one["exit_code"] for one in found] == [0, 0], found
    shop.wait_all_sent(60)
    assert relay.terminate() == 0
    check(shop, found)
