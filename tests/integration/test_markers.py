"""End markers that brokers forget in partitions without a leader (Kafka 4.3.1), and who writes
them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from structlog.testing import capture_logs

from cdc_relay import faults
from cdc_relay.config import Settings, load
from cdc_relay.errors import SinkUnavailableError
from cdc_relay.kafka import coordinator, markers
from cdc_relay.kafka.checkpoints import Checkpoint, read_last, topic_name
from cdc_relay.kafka.reader import Reader
from cdc_relay.kafka.sink import FencedError
from cdc_relay.kafka.transactions import TransactionalSink
from cdc_relay.position import NOWHERE
from cdc_relay.router import Record
from tests.support.brokers import TwoBrokers

_names = count(1)
NEAR, FAR = 0, 1
"""Partitions: the one of the broker that stays, and that of the broker that goes away."""


class Shop:
    """A relay's name with topics on both brokers."""

    def __init__(self, cluster: TwoBrokers, checkpoints_on: Sequence[int]) -> None:
        self.cluster = cluster
        self.name = f"markers-{next(_names)}"
        self.topic = f"{self.name}.order"
        environment = {"CDC_RELAY_TRANSACTION_TIMEOUT": "30s"}
        flags = {"kafka_bootstrap": cluster.bootstrap, "name": self.name}
        self.settings: Settings = load(environ=environment, flags=flags)
        self.admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        made = [
            NewTopic(self.topic, 2, replica_assignment=[[1], [2]]),
            NewTopic(topic_name(self.name), 1, replica_assignment=[list(checkpoints_on)]),
        ]
        for future in self.admin.create_topics(made).values():
            future.result(timeout=30)

    def sink(self) -> TransactionalSink:
        return TransactionalSink(self.settings, 0, None, lambda: True)

    def records(self, *events: tuple[int, str]) -> list[Record]:
        return [
            Record(self.topic, b"k", b"{}", [("id", name.encode())], 0, partition)
            for partition, name in events
        ]

    def deliver(
        self,
        sink: TransactionalSink,
        *events: tuple[int, str],
        going_on: Callable[[], bool] = lambda: True,
    ) -> None:
        checkpoint = Checkpoint(NOWHERE, anchor=events[-1][1]).record(self.name)
        assert sink.deliver(self.records(*events), checkpoint, going_on) == {}

    def visible(self) -> list[tuple[int, str]]:
        """What a ``read_committed`` reader is given."""
        reader = Reader(self.settings)
        try:
            found = [one for batch in reader.since([self.topic], 0) for one in batch]
        finally:
            reader.close()
        return sorted((one.partition, one.event_id) for one in found)

    def until_visible(self, *events: tuple[int, str]) -> None:
        deadline = time.monotonic() + 30
        while self.visible() != list(events):
            assert time.monotonic() < deadline, self.visible()
            time.sleep(0.1)

    def last(self) -> str:
        """The event that the last checkpoint names."""
        found = read_last(self.settings, settled=True)
        return found.anchor if found is not None else ""

    def lose_far(self, sink: TransactionalSink) -> None:
        """Kill a broker that has taken what ``sink`` has sent, and wait until its partition is
        known to have no leader."""
        assert sink._producer.flush(10) == 0
        self.cluster.brokers[1].kill()
        deadline = time.monotonic() + 30
        while self._leader() != -1:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def bring_back(self) -> None:
        self.cluster.brokers[1].start()
        deadline = time.monotonic() + 30
        while self._leader() != 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def _leader(self) -> int:
        topic = self.admin.list_topics(self.topic, timeout=10).topics[self.topic]
        leader: int = topic.partitions[FAR].leader
        return leader


def poll(sink: TransactionalSink, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        sink.poll()
        time.sleep(0.1)


@pytest.fixture
def at_commit(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Do something once, between the records of a transaction and its commit."""

    def arrange(action: Callable[[], None]) -> None:
        def point(name: str) -> None:
            if name == "committing":
                monkeypatch.setattr(faults, "point", lambda _: None)
                action()

        monkeypatch.setattr(faults, "point", point)

    return arrange


@pytest.mark.parametrize("checkpoints_on", [[1], [2]], ids=["near", "far"])
def test_a_commit_that_a_broker_forgot(
    two_brokers: TwoBrokers, at_commit: Any, checkpoints_on: list[int]
) -> None:
    shop = Shop(two_brokers, checkpoints_on)
    sink = shop.sink()
    shop.deliver(sink, (NEAR, "a"), (FAR, "b"))
    shop.until_visible((NEAR, "a"), (FAR, "b"))
    at_commit(lambda: shop.lose_far(sink))
    shop.deliver(sink, (NEAR, "c"), (FAR, "d"))  # it is committed
    shop.bring_back()
    # The premise: readers of the partition wait for ever.
    assert shop.visible() == [(NEAR, "a"), (NEAR, "c"), (FAR, "b")]
    sink.close(1.0)
    with capture_logs() as logs:
        sink = shop.sink()
    assert shop.visible() == [(NEAR, "a"), (NEAR, "c"), (FAR, "b"), (FAR, "d")]
    assert shop.last() == "d"
    [said] = [line for line in logs if line["event"].startswith("a transaction that the brokers")]
    assert said["committed"] is True
    assert f"{shop.topic}/{FAR}" in said["partitions"]
    shop.deliver(sink, (FAR, "e"))
    sink.close(1.0)
    assert shop.visible() == [(NEAR, "a"), (NEAR, "c"), (FAR, "b"), (FAR, "d"), (FAR, "e")]


def test_an_abort_that_a_broker_forgot(two_brokers: TwoBrokers, at_commit: Any) -> None:
    """The next commit of the same producer in that partition would bring back what was aborted."""
    shop = Shop(two_brokers, [1])
    sink = shop.sink()
    shop.deliver(sink, (FAR, "a"))
    going_on = True

    def fail() -> None:
        nonlocal going_on
        shop.lose_far(sink)
        going_on = False
        raise KafkaException(KafkaError(KafkaError._FAIL, "as if it could not be committed"))

    at_commit(fail)
    with pytest.raises(SinkUnavailableError):
        shop.deliver(sink, (NEAR, "b"), (FAR, "c"), going_on=lambda: going_on)
    shop.bring_back()
    sink.close(1.0)
    sink = shop.sink()
    for name in ("d", "e"):  # each of the two producers
        shop.deliver(sink, (FAR, name))
    sink.close(1.0)
    assert shop.visible() == [(FAR, "a"), (FAR, "d"), (FAR, "e")]


def test_an_abort_that_a_broker_forgot_and_the_next_try(
    two_brokers: TwoBrokers, at_commit: Any
) -> None:
    """The same call tries again, with the same producer: not before it is known what is open."""
    shop = Shop(two_brokers, [1])
    sink = shop.sink()
    shop.deliver(sink, (FAR, "a"))

    shop.until_visible((FAR, "a"))
    lost = threading.Event()

    def fail() -> None:
        shop.lose_far(sink)
        lost.set()
        raise KafkaException(KafkaError(KafkaError._FAIL, "as if it could not be committed"))

    at_commit(fail)
    with ThreadPoolExecutor(1) as pool:
        delivered = pool.submit(shop.deliver, sink, (NEAR, "b"), (FAR, "c"))
        assert lost.wait(60)
        time.sleep(2)  # the abort's marker is left out, and the next try is wanted
        shop.bring_back()  # here: the broker ends with the thread that starts it
        with pytest.raises(FencedError, match="does not end"):
            delivered.result(60)
    sink.close(1.0)
    sink = shop.sink()
    shop.deliver(sink, (NEAR, "b"), (FAR, "c"))
    shop.until_visible((NEAR, "b"), (FAR, "a"), (FAR, "c"))
    shop.deliver(sink, (FAR, "d"))
    sink.close(1.0)
    shop.until_visible((NEAR, "b"), (FAR, "a"), (FAR, "c"), (FAR, "d"))


class Killed(BaseException):
    """As kill -9: nothing goes on behind it."""


@pytest.mark.parametrize("step", ["_add", "_add_group", "_end"])
def test_who_ends_it_is_killed_meanwhile(
    two_brokers: TwoBrokers, at_commit: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Taking over made the coordinator forget the decision; the next one finds it noted."""
    shop = Shop(two_brokers, [1])
    sink = shop.sink()
    at_commit(lambda: shop.lose_far(sink))
    shop.deliver(sink, (NEAR, "a"), (FAR, "b"))
    shop.bring_back()
    sink.close(1.0)

    def kill(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(coordinator.Coordinator, step, kill)
        with pytest.raises(Killed):
            shop.sink()
    sink = shop.sink()
    assert shop.visible() == [(NEAR, "a"), (FAR, "b")]
    shop.deliver(sink, (FAR, "c"))
    sink.close(1.0)
    shop.until_visible((NEAR, "a"), (FAR, "b"), (FAR, "c"))


def test_a_transaction_of_somebody_else(two_brokers: TwoBrokers) -> None:
    """It is neither waited for nor ended, also when a broker was away."""
    shop = Shop(two_brokers, [1])
    other = Producer(
        {"bootstrap.servers": two_brokers.bootstrap, "transactional.id": f"other-{shop.name}"}
    )
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(shop.topic, b"{}", b"x", NEAR, headers=[("id", b"other")])
    assert other.flush(10) == 0
    sink = shop.sink()
    shop.deliver(sink, (NEAR, "a"), (FAR, "b"))
    sink.close(1.0)
    sink = shop.sink()
    sink._on_loss()
    poll(sink, 3)
    shop.deliver(sink, (FAR, "c"))
    sink.close(1.0)
    other.commit_transaction(30)
    shop.until_visible((NEAR, "a"), (NEAR, "other"), (FAR, "b"), (FAR, "c"))


def test_a_living_relay_notices(two_brokers: TwoBrokers, at_commit: Any) -> None:
    """Also when nothing comes: readers would wait until something does."""
    shop = Shop(two_brokers, [1])
    sink = shop.sink()
    at_commit(lambda: shop.lose_far(sink))
    shop.deliver(sink, (NEAR, "a"), (FAR, "b"))
    shop.bring_back()
    with pytest.raises(FencedError, match="does not end"):
        poll(sink, 30)
    with pytest.raises(FencedError, match="does not end"):
        shop.deliver(sink, (FAR, "c"))
    sink.close(1.0)
    shop.sink().close(1.0)
    assert shop.visible() == [(NEAR, "a"), (FAR, "b")]


def test_a_broker_that_was_away_without_harm(two_brokers: TwoBrokers) -> None:
    shop = Shop(two_brokers, [1])
    sink = shop.sink()
    shop.deliver(sink, (NEAR, "a"), (FAR, "b"))
    shop.until_visible((NEAR, "a"), (FAR, "b"))
    shop.lose_far(sink)
    shop.bring_back()
    poll(sink, 3)  # it looks, and finds nothing amiss
    shop.deliver(sink, (NEAR, "c"), (FAR, "d"))
    shop.until_visible((NEAR, "a"), (NEAR, "c"), (FAR, "b"), (FAR, "d"))
    sink.close(1.0)


def test_what_is_whole_is_not_touched(
    two_brokers: TwoBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start after a clean end asks nobody, and loads no second client library."""
    shop = Shop(two_brokers, [1])
    sink = shop.sink()
    shop.deliver(sink, (NEAR, "a"), (FAR, "b"))
    sink.close(1.0)
    monkeypatch.delattr(markers, "Coordinator")
    shop.sink().close(1.0)


def test_a_coordinator_that_cannot_be_asked(two_brokers: TwoBrokers) -> None:
    """It is said, and a predecessor's open transaction is ended as ever: by the fence."""
    shop = Shop(two_brokers, [1])
    sink = shop.sink()
    sink._producer.begin_transaction()
    [record] = shop.records((FAR, "a"))
    checkpoint = sink._written.named(Checkpoint(NOWHERE).record(shop.name))
    for one in (record, checkpoint):
        sink._producer.produce(one.topic, one.value, one.key, one.partition, headers=one.headers)
    assert sink._producer.flush(10) == 0
    shop.settings = load(
        environ={"CDC_RELAY_KAFKA_SSL_KEYSTORE_PASSWORD": "unknown to kafka-python"},
        flags={"kafka_bootstrap": two_brokers.bootstrap, "name": shop.name},
    )
    with capture_logs() as logs:
        successor = shop.sink()
    [said] = [line for line in logs if line["event"].startswith("cannot ask how")]
    assert said["reason"] == "kafka-python does not know ssl.keystore.password"
    shop.deliver(successor, (FAR, "b"))
    successor.close(1.0)
    sink.close(1.0)
    assert shop.visible() == [(FAR, "b")]
