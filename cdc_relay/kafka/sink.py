"""The sink at least once: records to Kafka, in order, each one accounted for.

Two sinks with one promise, ``deliver``: all of a group or none of it, and the checkpoint behind it.
``TransactionalSink`` keeps it also when the process is killed: group, checkpoint and the group
offset are one Kafka transaction. ``IdempotentSink`` acknowledges the group first and writes the
checkpoint then, so a crash in between sends the group again.

Facts about librdkafka: its INTRODUCTION.md, "Idempotent Producer", "Transactional Producer" and
"Message reliability". ``flush()`` returning zero does not mean delivered; only the delivery report
of each record, or the commit of the transaction, does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from typing import Any, Final, Protocol

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from cdc_relay import faults
from cdc_relay.config import Settings
from cdc_relay.errors import SinkError, SinkUnavailableError
from cdc_relay.kafka.client import base_config, create, served, text
from cdc_relay.kafka.topics import Refusal, Topics
from cdc_relay.router import Record

log = structlog.get_logger(__name__)

# Errors that are one record's fault: the brokers and the topic are well.
RECORD_FAULTS: Final = frozenset(
    (
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.POLICY_VIOLATION,
        KafkaError._INVALID_ARG,
    )
)
# Of these, what is said of a record that is too large.
SIZE_FAULTS: Final = frozenset((KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE))
# Errors that are a topic's fault.
TOPIC_FAULTS: Final = frozenset(
    (
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
    )
)
# Nothing is wrong with the record, it is just not there.
_NOT_SENT: Final = frozenset(
    (
        KafkaError._PURGE_QUEUE,
        KafkaError._PURGE_INFLIGHT,
        KafkaError._FATAL,
        KafkaError._GAPLESS_GUARANTEE,
        KafkaError._INVALID_DIFFERENT_RECORD,
    )
)
# Keys that are known to be at home in a partition that is warm; all are forgotten at more.
_MOST_KEYS: Final = 100_000


class FencedError(SinkError):
    """Another member owns the shard now, or the producer cannot go on: what was not committed is
    not there, and the last checkpoint tells what is."""


class CheckpointTopicGoneError(FencedError):
    """The checkpoint topic was deleted: the next term makes it anew."""


class Delivery:
    """What became of records that were sent together. Filled while the sink is polled."""

    __slots__ = (
        "_flying",
        "_going_on",
        "_later",
        "_open",
        "_records",
        "_waiting",
        "behind",
        "refused",
    )

    def __init__(
        self, records: Sequence[Record], going_on: Callable[[], bool] = lambda: True
    ) -> None:
        self._records = records
        self._going_on = going_on
        self._flying = 0
        self._later = False
        self._open = bytearray(b"\1") * len(records)
        self._waiting = len(records)
        self.refused: dict[int, Refusal] = {}
        """By index in the sent sequence; only faults of the record or its topic."""
        self.behind: set[int] = set()
        """What was not sent because it stands behind such a record of its topic and key."""

    @property
    def settled(self) -> bool:
        """Whether every record is acknowledged by all in-sync replicas, refused, or behind one that
        was refused."""
        return self._waiting == 0

    def _refuse(self, index: int, refusal: Refusal) -> None:
        self.refused[index] = refusal
        self._close(index)

    def _pass_over(self, index: int) -> None:
        self.behind.add(index)
        self._close(index)

    def _close(self, index: int) -> None:
        if self._open[index]:
            self._open[index] = 0
            self._waiting -= 1


def check_is_there(topics: Topics, checkpoint: Record) -> None:
    """Raise ``CheckpointTopicGoneError`` where the checkpoint's topic is not there."""
    for refusal in topics.refused([checkpoint]).values():
        raise CheckpointTopicGoneError(refusal.reason)


def refused_checkpoint(checkpoint: Record, reason: str) -> SinkError:
    """The error for a checkpoint that Kafka does not take."""
    size = len(checkpoint.value or b"")
    return SinkError(f"{checkpoint.topic} refuses the checkpoint ({size} bytes): {reason}")


def producer_config(settings: Settings, client_id: str) -> dict[str, Any]:
    return {
        # Defaults that a user may change. Who sends a group waits for it: lingering only delays.
        "linger.ms": 1,
        # A transaction that begins while the markers of the last one are being written is told to
        # try again: at librdkafka's 100 ms that was a median of 100 ms from commit to consumer
        # at 200 events/s, at 5 ms it was 13 ms. It grows by itself where brokers are away.
        "retry.backoff.ms": 2,
        "compression.type": "lz4",
        "queue.buffering.max.kbytes": 32 * 1024,
        **base_config(settings, client_id),
        # Settings that the guarantees rest on.
        "acks": "all",
        "enable.idempotence": True,
        "partitioner": "murmur2_random",
    }


class Sink(Protocol):
    """Delivers groups: ``IdempotentSink``, ``transactions.TransactionalSink``."""

    @property
    def acknowledged(self) -> Set[int]:
        """Of the last group, where some of it was refused: the records that are there
        nevertheless, by index."""
        ...

    def deliver(
        self, records: Sequence[Record], checkpoint: Record | None, going_on: Callable[[], bool]
    ) -> dict[int, Refusal]:
        """All of ``records`` and the checkpoint, or the refused ones by index."""
        ...

    def poll(self) -> None:
        """Serve the client library's callbacks (a token to renew, an error to report)."""
        ...

    def close(self, timeout: float) -> None:
        """Give up what is left."""
        ...


class IdempotentSink:
    """An idempotent producer (``acks=all``), Java-compatible partitions (``murmur2_random``).

    Order: records of one key reach their partition in the order of ``send``, also across retries
    and refusals: behind a refused record nothing of its key is sent. Not thread-safe: one thread
    sends and polls, one delivery at a time. A broker outage refuses no record: they wait, without
    limit of time, in a queue of bounded size.

    A broker refuses a batch as a whole, does not say which record is at fault, and librdkafka
    would go on with the batches behind it. So a refusal stops the producer
    (``enable.gapless.guarantee``; the broker takes nothing of the partition behind the gap), and a
    new one sends what is open record by record, until each is judged by itself. What a broker has
    taken without an answer may be there twice then.

    A broker that knows nothing of the producer in a partition takes what comes second when the
    first is refused. So until a partition is warm, that is until something of this producer is
    there, a key's second record waits for the acknowledgement of its first.
    """

    def __init__(self, settings: Settings, client_id: str) -> None:
        """Connects in the background; raises ``ConfigError`` for a property that is wrong."""
        self._fatal: KafkaError | None = None
        self._gap = False
        self._singly = False
        self._delivery = Delivery(())
        self.acknowledged: Set[int] = set()
        """Records of the last ``deliver`` that are there although it was refused, by index."""
        self._config = {
            **producer_config(settings, client_id),
            "enable.gapless.guarantee": True,
            "message.timeout.ms": 0,
            "error_cb": self._on_error,
        }
        self._producer: Any = create(Producer, self._config)
        self._topics = Topics(self._producer)
        self._warm = _Warm(self._topics)

    def deliver(
        self,
        records: Sequence[Record],
        checkpoint: Record | None,
        going_on: Callable[[], bool],
    ) -> dict[int, Refusal]:
        """Send ``records`` in order, wait for their acknowledgements, then for the checkpoint's.

        An empty result: all of it is there. Otherwise the refused records by their index, and the
        checkpoint was not written; ``acknowledged`` says what is there, the rest stands behind a
        refused record of its topic and key. Raises ``SinkUnavailableError`` when
        ``going_on`` turns false while the brokers are away, ``FencedError`` when the producer
        cannot go on.
        """
        self.acknowledged = set()
        refused = self._topics.refused(records, going_on)
        if refused:
            return refused
        sent = self._send_and_wait(records, going_on)
        faults.point("produced")
        if sent.refused:
            self.acknowledged = set(range(len(records))) - sent.refused.keys() - sent.behind
        elif checkpoint is not None:
            saved = self._send_and_wait([checkpoint], going_on)
            if saved.refused:
                self._topics.forget(checkpoint.topic)
                check_is_there(self._topics, checkpoint)
                raise refused_checkpoint(checkpoint, saved.refused[0].reason)
        return sent.refused

    def send(self, records: Sequence[Record], timeout: float) -> Delivery:
        """Send the records in order and wait until each is acknowledged or refused. Raises
        ``SinkUnavailableError`` when that is not so within ``timeout`` seconds (they may still
        arrive), ``SinkError`` when the producer cannot go on."""
        deadline = time.monotonic() + timeout
        try:
            return self._send_and_wait(records, lambda: time.monotonic() < deadline)
        except SinkUnavailableError:
            raise SinkUnavailableError(
                f"no acknowledgement from Kafka within {timeout:g} s: are the brokers up?"
            ) from None

    def _send_and_wait(self, records: Sequence[Record], going_on: Callable[[], bool]) -> Delivery:
        if self._singly:
            self._start(singly=False)
        self._delivery = delivery = Delivery(records, going_on)
        self._produce(delivery)
        self.poll(0)
        while not delivery.settled:
            self.poll(0.05)
            if not delivery.settled and not going_on():
                raise SinkUnavailableError("stopped while the brokers do not answer")
        return delivery

    def poll(self, timeout: float = 0.0) -> None:
        """Serve delivery reports, waiting up to ``timeout`` seconds for the first one. Raises
        ``SinkError`` when the producer cannot go on."""
        self._serve(timeout)
        if self._gap:
            if not self._singly:
                log.info(
                    "a batch was refused: its records are sent one by one",
                    records=self._delivery._waiting,
                )
            self._start(singly=True)
            self._produce(self._delivery)
        elif self._delivery._later and not self._delivery._flying:
            self._produce(self._delivery)

    def close(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for queued records, then give up those that are left."""
        producer = self._producer
        for step in (lambda: producer.flush(timeout), producer.purge, lambda: producer.flush(1)):
            with suppress(KafkaException):  # a fatal one: what is left is given up anyway
                served(step)

    def _start(self, *, singly: bool) -> None:
        """Take a new producer. What the old one has on its way is waited for: acknowledged, it
        need not be sent again."""
        self._producer.purge(in_flight=False)
        self.close(1)
        self._gap = False
        self._singly = singly
        one_by_one = {"batch.num.messages": 1, "linger.ms": 0} if singly else {}
        self._producer = create(Producer, {**self._config, **one_by_one})
        self._topics = Topics(self._producer)
        self._warm = _Warm(self._topics)

    def _produce(self, delivery: Delivery) -> None:
        """Queue what is open of ``delivery``, up to a gap; what stands behind a refused record of
        its key is passed over, what stands behind a cold one waits. Nothing is on its way."""
        records, open_ = delivery._records, delivery._open
        delivery._flying = 0
        delivery._later = False
        warm, cold = self._warm, set[tuple[str, bytes]]()
        # A partition may become warm in the middle of this walk (reports are served while the
        # queue is full); a key of which something was passed over still waits for the next one.
        passed: set[tuple[str, bytes]] = set()
        behind: dict[tuple[str, bytes], int] = {}
        for index in sorted(delivery.refused, reverse=True):
            behind[records[index].topic, records[index].key] = index
        produce = self._producer.produce
        for index, record in enumerate(records):
            if not open_[index]:
                continue
            if behind and behind.get((record.topic, record.key), index) < index:
                delivery._pass_over(index)
                continue
            if passed and (record.topic, record.key) in passed:
                continue
            if not warm.has(record):
                key = (record.topic, record.key)
                if key in cold:
                    passed.add(key)
                    delivery._later = True
                    continue
                cold.add(key)
            report = _Report(self, delivery, index)
            while not self._gap:
                try:
                    produce(
                        record.topic,
                        record.value,
                        record.key,
                        record.partition,
                        report,
                        timestamp=record.timestamp_ms,
                        headers=record.headers,
                    )
                    delivery._flying += 1
                    break
                except BufferError:
                    self._serve(0.1)
                    if not delivery._going_on():
                        raise SinkUnavailableError("stopped while the queue is full") from None
                except KafkaException as error:
                    if error.args[0].code() == KafkaError._FATAL:
                        self._serve(0.1)  # which brings the reason
                        continue
                    self._failed(delivery, index, error.args[0], at_once=True)
                    behind.setdefault((record.topic, record.key), index)
                    break
            if self._gap:
                return

    def _serve(self, timeout: float) -> None:
        try:
            served(lambda: self._producer.poll(timeout))
        except KafkaException as error:  # a fatal one
            self._on_error(error.args[0])
        if self._fatal is not None:
            raise FencedError(f"the Kafka producer cannot go on: {text(self._fatal)}")

    def _on_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._GAPLESS_GUARANTEE:
            self._gap = True
        elif error.fatal():
            self._fatal = error

    def _failed(
        self, delivery: Delivery, index: int, error: KafkaError, *, at_once: bool = False
    ) -> None:
        code = error.code()
        if code in TOPIC_FAULTS:
            self._topics.forget(delivery._records[index].topic)
            delivery._refuse(index, Refusal(text(error), topic=True))
        elif code in RECORD_FAULTS and (at_once or self._singly):
            delivery._refuse(index, Refusal(text(error), too_large=code in SIZE_FAULTS))
        elif code not in RECORD_FAULTS and code not in _NOT_SENT:
            self._fatal = error
        # A broker's word on a record leaves a gap; in a batch it says nothing about this one.
        self._gap = self._gap or (code in RECORD_FAULTS and not at_once)


class _Report:
    """The delivery report of one record (an object: cheaper than a closure per record)."""

    __slots__ = ("_delivery", "_index", "_sink")

    def __init__(self, sink: IdempotentSink, delivery: Delivery, index: int) -> None:
        self._sink = sink
        self._delivery = delivery
        self._index = index

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        delivery = self._delivery
        delivery._flying -= 1
        if error is not None:
            self._sink._failed(delivery, self._index, error)
            return
        delivery._close(self._index)
        if not self._sink._warm.has(delivery._records[self._index]):
            self._sink._warm.add(delivery._records[self._index], message.partition())


class _Warm:
    """Where something of one producer is acknowledged."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._whole: set[str] = set()
        self._partitions: dict[str, set[int | None]] = {}
        # With the partition, where a row chooses its own: a key may meet a cold one later.
        self._keys: set[tuple[str, bytes, int]] = set()

    def has(self, record: Record) -> bool:
        """Whether the record's partition is known to be warm."""
        key = (record.topic, record.key, record.partition)
        return record.topic in self._whole or key in self._keys

    def add(self, record: Record, partition: int | None) -> None:
        """The record was acknowledged."""
        topic = record.topic
        partitions = self._partitions.setdefault(topic, set())
        partitions.add(partition)
        if len(partitions) == self._topics.partitions(topic):
            self._whole.add(topic)
        if len(self._keys) >= _MOST_KEYS:
            self._keys.clear()
        self._keys.add((topic, record.key, record.partition))
