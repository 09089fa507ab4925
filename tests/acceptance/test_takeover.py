"""Two relays of one name: one stream, whoever owns it, and nothing lost, doubled or reordered when
it changes hands. How long that takes is printed and recorded (``record_property``), not judged: it
is Kafka's session timeout that decides."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from dev.kafka import Kafka
from tests.support.harness import Harness, Process
from tests.support.load import Load, account
from tests.support.sql import Database

KEYS = [f"k{number}" for number in range(20)]
PARTITIONS = 6
SESSION_S = 6  # the least that a broker with its own defaults accepts

Record = Callable[[str, object], None]


@pytest.fixture(params=["exactly_once", "at_least_once"])
def shop(
    request: pytest.FixtureRequest, mysql: Database, quick_kafka: Kafka, tmp_path: Path
) -> Iterator[Harness]:
    settings = {"DELIVERY": request.param, "SESSION_TIMEOUT": f"{SESSION_S}s"}
    with Harness(mysql, quick_kafka.bootstrap, tmp_path, settings) as made:
        made.create_topic(partitions=PARTITIONS)
        yield made


OWNING = "owning the shard"
ENDS = ("the shard was taken over by another member", "starting a new term", "standing by")


def own(process: Process) -> bool:
    """Whether the last that it has said of the shard is that it owns it."""
    lines = [line for line in process.text().splitlines() if line.startswith("{")]
    events = [json.loads(line)["event"] for line in lines]
    return next((event for event in reversed(events) if event in (OWNING, *ENDS)), "") == OWNING


def two(shop: Harness) -> tuple[Process, Process]:
    """An owner and a relay that stands by."""
    owner = shop.relay()
    standby = shop.spawn("start")
    shop.until(lambda: standby.logged("standing by"))
    # That it joined may have moved the shard.
    shop.until(lambda: own(owner) != own(standby) and streams(owner, standby))
    return (owner, standby) if own(owner) else (standby, owner)


def streams(*processes: Process) -> bool:
    """Whether one of them owns the shard and has begun to stream since."""
    return any(
        own(process) and process.text().rfind('"streaming"') > process.text().rfind(OWNING)
        for process in processes
    )


class Ends:
    """Where a ``read_committed`` consumer can read to now, all partitions together."""

    def __init__(self, shop: Harness) -> None:
        self._topic = shop.topic_prefix + "order"
        self._consumer = Consumer(
            {
                "bootstrap.servers": shop.kafka,
                "group.id": f"{shop.name}-ends",
                "isolation.level": "read_committed",
            }
        )

    def total(self) -> int:
        parts = [TopicPartition(self._topic, number) for number in range(PARTITIONS)]
        return sum(self._consumer.get_watermark_offsets(part, timeout=10)[1] for part in parts)

    def close(self) -> None:
        self._consumer.close()


@pytest.fixture
def ends(shop: Harness) -> Iterator[Ends]:
    made = Ends(shop)
    yield made
    made.close()


def silence(ends: Ends, since: float) -> float:
    """Seconds from ``since`` until a consumer can read on. What was on its way is left to arrive
    first."""
    time.sleep(0.3)
    before = ends.total()
    deadline = time.monotonic() + 40
    while ends.total() == before:
        assert time.monotonic() < deadline, "nothing comes any more"
        time.sleep(0.05)
    return time.monotonic() - since


def check(shop: Harness, *running: Process) -> None:
    """All marked; lost 0, invented 0, in order; no duplicates exactly once."""
    shop.wait_all_sent(60)
    for process in running:
        assert process.terminate() == 0, process.text()
    found = account(shop.database, shop.table, "order", shop.messages())
    assert found.whole, found
    assert found.committed > 100, found
    if "exactly_once" in shop.environment()["CDC_RELAY_DELIVERY"]:
        assert found.duplicates == 0, found
    last = shop.checkpoint()
    assert last is not None
    assert not last.owed


def test_until_current_beside_a_relay_at_work(shop: Harness) -> None:
    """It ends when the other one has come so far, and leaves that at work."""
    owner = shop.relay()
    shop.until(lambda: own(owner))
    for number in range(50):
        shop.ins(f"k{number % 5}", {"n": number})
    drained = shop.run("start", "--until-current", "--http", "off")
    assert drained.wait() == 0, drained.text()
    assert shop.count(1) == 50
    assert drained.logged("standing by")
    shop.ins("k0", {"n": 50})
    shop.wait_sent(51)
    assert owner.terminate() == 0
    assert len(shop.messages()) == 51


def test_two_that_start_at_once_are_one_stream(shop: Harness) -> None:
    with Load(shop, KEYS, pause=0.005, threads=2):
        first, second = shop.spawn("start"), shop.spawn("start")
        shop.wait_sent(200)
        shop.until(lambda: all(one.logged("standing by") or own(one) for one in (first, second)))
        shop.until(lambda: own(first) != own(second))
    assert first.running
    assert second.running
    check(shop, first, second)


def test_kill_9_of_the_owner(shop: Harness, ends: Ends, record_property: Record) -> None:
    owner, standby = two(shop)
    with Load(shop, KEYS, pause=0.005, threads=2):
        shop.wait_sent(100)
        owner.kill()
        seconds = silence(ends, time.monotonic())
        shop.wait_sent(shop.count(1) + 100)
    record_property("takeover_seconds", round(seconds, 2))
    print(f"taken over {seconds:.2f} s after kill -9 (session timeout {SESSION_S} s)")
    assert own(standby)
    check(shop, standby)


def test_an_owner_that_stands_still_longer_than_its_session(
    shop: Harness, ends: Ends, record_property: Record
) -> None:
    owner, standby = two(shop)
    with Load(shop, KEYS, pause=0.005, threads=2):
        shop.wait_sent(100)
        owner.signal(signal.SIGSTOP)
        seconds = silence(ends, time.monotonic())
        shop.wait_sent(shop.count(1) + 100)
        owner.signal(signal.SIGCONT)
        shop.until(lambda: not own(owner))
        shop.until(lambda: own(standby))
        shop.wait_sent(shop.count(1) + 100)
    record_property("takeover_seconds", round(seconds, 2))
    print(f"taken over {seconds:.2f} s after SIGSTOP (session timeout {SESSION_S} s)")
    assert owner.running
    check(shop, owner, standby)


def test_sigterm_hands_over(shop: Harness, ends: Ends, record_property: Record) -> None:
    owner, standby = two(shop)
    with Load(shop, KEYS, pause=0.005, threads=2):
        shop.wait_sent(100)
        started = time.monotonic()
        assert owner.terminate() == 0, owner.text()
        stopped = time.monotonic() - started
        shop.until(lambda: streams(standby))
        seconds = time.monotonic() - started
        shop.wait_sent(shop.count(1) + 100)
    record_property("handover_seconds", round(seconds, 2))
    print(f"stopped in {stopped:.2f} s, handed over {seconds:.2f} s after SIGTERM")
    assert own(standby)
    check(shop, standby)
