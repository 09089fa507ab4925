"""What a producer that cannot go on looks like to the relay."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from cdc_relay.config import load
from cdc_relay.errors import SinkError, SinkUnavailableError
from cdc_relay.kafka import transactions, unfinished
from cdc_relay.kafka.calls import Calls
from cdc_relay.kafka.client import served
from cdc_relay.kafka.membership import Membership
from cdc_relay.kafka.sink import Delivery, FencedError, IdempotentSink, _Warm
from cdc_relay.kafka.topics import Topics
from cdc_relay.kafka.transactions import TransactionalSink
from cdc_relay.kafka.unfinished import Look, Patience, Place
from cdc_relay.router import Record


class FencedProducer:
    """Any call that serves callbacks raises the fatal error, as confluent_kafka does it."""

    def poll(self, _timeout: float) -> int:
        raise KafkaException(KafkaError(KafkaError._FENCED, "fenced by a newer one", fatal=True))


def test_a_fatal_error_ends_the_term_and_not_the_process() -> None:
    transactional: Any = TransactionalSink.__new__(TransactionalSink)
    transactional._producers, transactional._fatal = [FencedProducer()], None
    settings = load(environ={}, flags={"kafka_bootstrap": "127.0.0.1:1"})
    idempotent: Any = IdempotentSink(settings, "test")
    idempotent._producer = FencedProducer()
    for sink in (transactional, idempotent):
        with pytest.raises(FencedError, match="fenced by a newer one"):
            sink.poll()


def test_a_fatal_error_in_the_middle_of_reports_is_raised_as_itself() -> None:
    """Python makes a ``SystemError`` of what is pending when a report is handed out, and of that
    one again at the next report."""

    def flush() -> int:
        try:
            raise SystemError("pending") from KafkaException(KafkaError(KafkaError._FENCED))
        except SystemError as error:
            raise SystemError("pending, again") from error

    for call in (served, lambda flush: Calls("test").make(flush, lambda: None, 1)):
        with pytest.raises(KafkaException) as raised:
            call(flush)
        assert raised.value.args[0].code() == KafkaError._FENCED
    with pytest.raises(SystemError, match="another"):
        served(lambda: _raise(SystemError("another")))


class TroubledConsumer:
    """Its poll leaves something pending, as it was seen when a session ended."""

    def __init__(self) -> None:
        self.paused: list[Any] = []

    def poll(self, _timeout: float) -> None:
        raise SystemError("returned a result with an exception set") from ValueError("pending")

    def assignment(self) -> list[Any]:
        return [TopicPartition("topic", 0)]

    def pause(self, partitions: list[Any]) -> None:
        self.paused += partitions


def test_trouble_in_the_group_asks_the_consumer_what_is_owned() -> None:
    member: Any = Membership.__new__(Membership)
    member._consumer, member._owned = TroubledConsumer(), frozenset({7})
    member.poll(0)
    assert member.owned == {0}
    assert member._consumer.paused


class CommittingProducer:
    """Its commit takes until it is told to end."""

    def __init__(self, _config: object) -> None:
        self.begun = 0
        self.go = threading.Event()

    def poll(self, _timeout: float) -> int:
        return 0

    def init_transactions(self, _timeout: float) -> None:
        pass

    def begin_transaction(self) -> None:
        self.begun += 1

    def commit_transaction(self, _timeout: float) -> None:
        self.go.wait(10)


def test_nothing_is_committed_behind_a_commit_that_was_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stop does not wait for a coordinator that is slow. The last checkpoint of the stop would
    stand behind the one that is on its way, and name a position before it: events came twice."""
    monkeypatch.setattr(transactions, "create", lambda kind, config: kind(config))
    monkeypatch.setattr(transactions.markers, "write_forgotten", lambda *_: {})
    monkeypatch.setattr(transactions, "Producer", CommittingProducer)
    settings = load(environ={}, flags={"kafka_bootstrap": "127.0.0.1:1"})
    sink = TransactionalSink(settings, 0, None, lambda: True)
    producers: list[Any] = list(sink._producers)
    with pytest.raises(SinkUnavailableError, match="outcome"):
        sink.deliver([], None, lambda: False)
    producers[0].go.set()
    assert sink._calls.idle(10)
    with pytest.raises(FencedError, match="not known"):
        sink.deliver([], None, lambda: True)
    assert [producer.begun for producer in producers] == [1, 0]


def test_what_is_under_way_is_not_taken_for_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit may take long when a broker was lost in the middle of it; the relay looks after
    what is open meanwhile."""
    monkeypatch.setattr(transactions, "create", lambda kind, config: kind(config))
    monkeypatch.setattr(transactions.markers, "write_forgotten", lambda *_: {})
    monkeypatch.setattr(transactions, "Producer", CommittingProducer)
    monkeypatch.setattr(transactions, "_LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(unfinished, "_FORGOTTEN_S", 0.0)
    monkeypatch.setattr(unfinished, "Partitions", OpenPartition)
    settings = load(environ={}, flags={"kafka_bootstrap": "127.0.0.1:1"})
    sink = TransactionalSink(settings, 0, None, lambda: True)
    [commits, _] = list(sink._producers)
    turns = iter(range(5))

    def going_on() -> bool:
        sink._on_loss()
        sink.poll()
        if next(turns, None) is None:
            commits.go.set()
        return True

    assert sink.deliver([], None, going_on) == {}
    sink.poll()  # sees it for the first time
    with pytest.raises(FencedError, match="does not end"):
        sink.poll()


class OpenPartition:
    """Shows an open transaction at every look."""

    def __init__(self, *_: object) -> None:
        pass

    def of(self, _topics: object) -> list[Place]:
        return []

    def look(self, places: list[Place]) -> Look:
        return Look(dict.fromkeys(places, 41), frozenset())


def test_partitions_without_a_leader_have_their_time_when_brokers_are_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long all of them were away before."""
    now = 1000.0
    monkeypatch.setattr(unfinished.time, "monotonic", lambda: now)
    ours, other = Place("checkpoints", 0), Place("t", 0)
    patience = Patience(ours)
    for silent, seconds, over in (
        ({ours, other}, 60.0, False),
        ({other}, 20.0, False),
        (set(), 1.0, False),
        ({other}, 20.0, False),
        ({other}, 11.0, False),
        ({other}, 1.0, True),
    ):
        assert patience.is_over(silent) is over
        now += seconds


def test_a_topics_fault_is_that_of_all_its_records() -> None:
    settings = load(environ={}, flags={"kafka_bootstrap": "127.0.0.1:1"})
    sink = IdempotentSink(settings, "test")
    delivery = Delivery(records("t", "u"))
    sink._failed(delivery, 0, KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    sink._failed(delivery, 1, KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), at_once=True)
    assert [delivery.refused[index].topic for index in (0, 1)] == [True, False]
    assert delivery.settled


def _raise(error: Exception) -> None:
    raise error


def test_a_key_is_warm_in_the_partition_where_something_of_it_lies() -> None:
    """A row may choose its partition: elsewhere its key may meet a cold one later."""
    topics: Any = type("ThreePartitions", (), {"partitions": lambda _self, _topic: 3})()
    warm = _Warm(topics)
    here = Record("t", b"k", b"", [], 0, 0)
    warm.add(here, 0)
    assert warm.has(here)
    assert not warm.has(here._replace(partition=1))
    for partition in (1, 2):
        warm.add(here._replace(partition=partition), partition)
    assert warm.has(Record("t", b"other", b"", [], 0))


class ToldProducer:
    """Its brokers know these topics only."""

    def __init__(self, *there: str, silent: bool = False) -> None:
        self.there = there
        self.silent = silent
        self.asked: list[str] = []

    def list_topics(self, topic: str, timeout: float) -> Any:
        self.asked.append(topic)
        if self.silent:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        known = topic in self.there
        error = None if known else KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
        found = SimpleNamespace(error=error, partitions={0: None})
        return SimpleNamespace(topics={topic: found})


def records(*topics: str) -> list[Record]:
    return [Record(topic, b"k", b"v", [], 0) for topic in topics]


def test_missing_topics_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, a first start on many of them was taken for a relay that is stuck."""
    monkeypatch.setattr("cdc_relay.kafka.topics._CREATION_S", 0.3)
    producer = ToldProducer("there")
    topics = Topics(producer)
    turns: list[str] = []

    def going_on() -> bool:
        turns.append("")
        return True

    wanted = [*(f"missing-{number}" for number in range(50)), "there", "missing-1"]
    refused = topics.refused(records(*wanted), going_on)
    assert set(refused) == set(range(52)) - {50}
    assert producer.asked.count("missing-1") <= 5
    assert len(turns) == len(producer.asked)  # the relay takes part in its group meanwhile
    before = len(producer.asked)
    assert set(topics.refused(records(*wanted))) == set(refused)
    assert len(producer.asked) == before  # believed for a while


def test_silent_brokers_are_asked_once_for_a_group() -> None:
    producer = ToldProducer(silent=True)
    assert Topics(producer).refused(records(*(f"t{number}" for number in range(300)))) == {}
    assert len(producer.asked) == 1


def test_a_stop_is_heard_while_topics_are_waited_for() -> None:
    producer = ToldProducer()
    turns = iter([True, False])
    assert Topics(producer).refused(records("a", "b", "c"), lambda: next(turns)) == {}
    assert producer.asked == ["a"]


class FullProducer(CommittingProducer):
    """Takes nothing."""

    def produce(self, *_: Any, **__: Any) -> None:
        raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))

    def abort_transaction(self, _timeout: float) -> None:
        pass

    def list_topics(self, topic: str, timeout: float) -> Any:
        return ToldProducer(topic).list_topics(topic, timeout)


def test_a_checkpoint_that_is_too_large_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying again does not make it smaller."""
    monkeypatch.setattr(transactions, "create", lambda kind, config: kind(config))
    monkeypatch.setattr(transactions.markers, "write_forgotten", lambda *_: {})
    monkeypatch.setattr(transactions, "Producer", FullProducer)
    settings = load(environ={}, flags={"kafka_bootstrap": "127.0.0.1:1"})
    sink = TransactionalSink(settings, 0, None, lambda: True)
    [checkpoint] = records("checkpoints")
    with pytest.raises(SinkError, match="refuses the checkpoint"):
        sink.deliver([], checkpoint, lambda: True)
