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
from typing import Any, Final

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from cdc_relay import faults
from cdc_relay.config import Settings
from cdc_relay.errors import SinkError, SinkUnavailableError
from cdc_relay.kafka.client import base_config, create, text
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
# Errors that are a topic's fault.
TOPIC_FAULTS: Final = frozenset(
    (
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
    )
)
# A record this large may be refused by its topic's own limit: it goes alone, so that what follows
# it in its aggregate has not left yet when the refusal comes.
_LARGE_BYTES: Final = 64 * 1024


class FencedError(SinkError):
    """Another member owns the shard now, or the producer cannot go on: what was not committed is
    not there, and the last checkpoint tells what is."""


class Delivery:
    """What became of the records of one ``send``. Filled while the sink is polled."""

    __slots__ = ("_waiting", "at_once", "refused")

    def __init__(self, count: int) -> None:
        self._waiting = count
        self.at_once: set[int] = set()
        """Those of ``refused`` that did not get as far as a broker."""
        self.refused: dict[int, str] = {}
        """Index in the sent sequence to the reason; only faults of the record or its topic."""

    @property
    def settled(self) -> bool:
        """Whether every record is acknowledged by all in-sync replicas, or refused."""
        return self._waiting == 0


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


class IdempotentSink:
    """An idempotent producer (``acks=all``), Java-compatible partitions (``murmur2_random``).

    Order: records of one key reach their partition in the order of ``send``, also across
    retries. Not thread-safe: one thread sends and polls. A broker outage refuses no record: they
    wait, without limit of time, in a queue of bounded size.
    """

    def __init__(self, settings: Settings, client_id: str) -> None:
        """Connects in the background; raises ``ConfigError`` for a property that is wrong."""
        self._fatal: KafkaError | None = None
        self.acknowledged: Set[int] = set()
        """Records of the last ``deliver`` that are there although it was refused, by index."""
        self._producer: Any = create(
            Producer,
            {
                **producer_config(settings, client_id),
                "message.timeout.ms": 0,
                "error_cb": self._on_error,
            },
        )
        self._topics = Topics(self._producer)

    def deliver(
        self,
        records: Sequence[Record],
        checkpoint: Record | None,
        going_on: Callable[[], bool],
    ) -> dict[int, Refusal]:
        """Send ``records`` in order, wait for their acknowledgements, then for the checkpoint's.

        An empty result: all of it is there. Otherwise the refused records by their index, and the
        checkpoint was not written; those before a refused one may be there, none behind it of its
        key. Raises ``SinkUnavailableError`` when ``going_on`` turns false while the brokers are
        away, ``FencedError`` when the producer cannot go on.
        """
        self.acknowledged = set()
        refused = self._topics.refused(records)
        if refused:
            return refused
        start = 0
        for index, record in enumerate(records):
            if record.value is not None and len(record.value) >= _LARGE_BYTES:
                for first, stop in ((start, index), (index, index + 1)):
                    refused = self._send_and_wait(records[first:stop], going_on, first)
                    if refused:
                        return refused
                start = index + 1
        refused = self._send_and_wait(records[start:], going_on, start)
        faults.point("produced")
        if not refused and checkpoint is not None:
            lost = self._send_and_wait([checkpoint], going_on, 0)
            if lost:
                raise SinkError(f"the checkpoint was refused: {lost[0].reason}")
        return refused

    def _send_and_wait(
        self, records: Sequence[Record], going_on: Callable[[], bool], first: int
    ) -> dict[int, Refusal]:
        delivery = self.send(records)
        while not delivery.settled:
            self.poll(0.05)
            if not delivery.settled and not going_on():
                raise SinkUnavailableError("stopped while the brokers do not answer")
        # Brokers refuse whole batches: unless a record went alone, another may be at fault.
        refused = {
            first + index: Refusal(reason, certain=index in delivery.at_once or len(records) == 1)
            for index, reason in delivery.refused.items()
        }
        self.acknowledged |= {
            index for index in range(first, first + len(records)) if index not in refused
        }
        return refused

    def send(self, records: Sequence[Record]) -> Delivery:
        """Queue the records in order and return at once, or, while the queue is full, as soon as
        there is room. Behind a record that is refused at once, none of its key is sent: they are
        refused with it. Raises ``SinkError`` when the producer cannot go on."""
        delivery = Delivery(len(records))
        produce, poll = self._producer.produce, self._producer.poll
        behind: set[tuple[str, bytes]] = set()
        for index, record in enumerate(records):
            report = _Report(self, delivery, index)
            if behind and (record.topic, record.key) in behind:
                delivery.at_once.add(index)
                delivery.refused[index] = "behind a refused record of its key"
                delivery._waiting -= 1
                continue
            while True:
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
                    break
                except BufferError:
                    poll(0.1)
                    self._check()
                except KafkaException as error:
                    report(error.args[0], None)
                    delivery.at_once.add(index)
                    behind.add((record.topic, record.key))
                    break
        poll(0)
        self._check()
        return delivery

    def poll(self, timeout: float = 0.0) -> None:
        """Serve delivery reports, waiting up to ``timeout`` seconds for the first one. Raises
        ``SinkError`` when the producer cannot go on."""
        self._producer.poll(timeout)
        self._check()

    def wait(self, delivery: Delivery, timeout: float) -> None:
        """Poll until ``delivery`` is settled. Raises ``SinkUnavailableError`` when it is not
        within ``timeout`` seconds; its records may still arrive."""
        deadline = time.monotonic() + timeout
        while not delivery.settled:
            left = deadline - time.monotonic()
            if left <= 0:
                raise SinkUnavailableError(
                    f"no acknowledgement from Kafka within {timeout:g} s: are the brokers up?"
                )
            self.poll(min(left, 0.1))

    def close(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for queued records, then give up those that are left."""
        self._producer.flush(timeout)
        self._producer.purge()
        self._producer.flush(1)

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            self._fatal = error

    def _check(self) -> None:
        if self._fatal is not None:
            raise FencedError(f"the Kafka producer cannot go on: {text(self._fatal)}")

    def _failed(self, delivery: Delivery, index: int, error: KafkaError) -> None:
        if error.code() in RECORD_FAULTS or error.code() in TOPIC_FAULTS:
            delivery.refused[index] = text(error)
        elif error.code() in (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT):
            return  # closing: never settled, so never marked
        else:
            self._fatal = error
            return
        delivery._waiting -= 1


class _Report:
    """The delivery report of one record (an object: cheaper than a closure per record)."""

    __slots__ = ("_delivery", "_index", "_sink")

    def __init__(self, sink: IdempotentSink, delivery: Delivery, index: int) -> None:
        self._sink = sink
        self._delivery = delivery
        self._index = index

    def __call__(self, error: KafkaError | None, _message: Message | None) -> None:
        if error is None:
            self._delivery._waiting -= 1
        else:
            self._sink._failed(self._delivery, self._index, error)
