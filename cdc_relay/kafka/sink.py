"""The sink: records to Kafka, in order, each one accounted for by its delivery report.

``flush()`` returning zero does not mean delivered; only the report of each record does. Facts
about librdkafka: its INTRODUCTION.md, "Idempotent Producer" and "Message reliability".
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from cdc_relay.config import Settings
from cdc_relay.errors import SinkError, SinkUnavailableError
from cdc_relay.kafka.client import base_config, create, text
from cdc_relay.router import Record

# Errors that are one record's, or its topic's, fault: the brokers are well.
_RECORD_FAULTS: Final = frozenset(
    (
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_RECORD,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.POLICY_VIOLATION,
        KafkaError._INVALID_ARG,
    )
)


class Delivery:
    """What became of the records of one ``send``. Filled while the sink is polled."""

    __slots__ = ("_waiting", "refused")

    def __init__(self, count: int) -> None:
        self._waiting = count
        self.refused: dict[int, str] = {}
        """Index in the sent sequence to the reason; only faults of the record or its topic."""

    @property
    def settled(self) -> bool:
        """Whether every record is acknowledged by all in-sync replicas, or refused."""
        return self._waiting == 0


class KafkaSink:
    """An idempotent producer (``acks=all``), Java-compatible partitions (``murmur2_random``).

    Order: records of one key reach their partition in the order of ``send``, also across
    retries. Not thread-safe: one thread sends and polls. A broker outage refuses no record: they
    wait, without limit of time, in a queue of bounded size.
    """

    def __init__(self, settings: Settings, client_id: str) -> None:
        """Connects in the background; raises ``ConfigError`` for a property that is wrong."""
        self._fatal: KafkaError | None = None
        self._producer: Any = create(
            Producer,
            {
                # Defaults that a user may change.
                "linger.ms": 5,
                "compression.type": "lz4",
                "queue.buffering.max.kbytes": 32 * 1024,
                **base_config(settings, client_id),
                # Settings that the guarantees rest on.
                "acks": "all",
                "enable.idempotence": True,
                "partitioner": "murmur2_random",
                "message.timeout.ms": 0,
                "error_cb": self._on_error,
            },
        )

    def send(self, records: Sequence[Record]) -> Delivery:
        """Queue the records in order and return at once, or, while the queue is full, as soon as
        there is room. Raises ``SinkError`` when the producer cannot go on."""
        delivery = Delivery(len(records))
        produce, poll = self._producer.produce, self._producer.poll
        for index, record in enumerate(records):
            report = _Report(self, delivery, index)
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
                    break
        poll(0)
        self._check()
        return delivery

    def poll(self, timeout: float) -> None:
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
            raise SinkError(f"the Kafka producer cannot go on: {text(self._fatal)}")

    def _failed(self, delivery: Delivery, index: int, error: KafkaError) -> None:
        if error.code() in _RECORD_FAULTS:
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

    def __init__(self, sink: KafkaSink, delivery: Delivery, index: int) -> None:
        self._sink = sink
        self._delivery = delivery
        self._index = index

    def __call__(self, error: KafkaError | None, _message: Message | None) -> None:
        if error is None:
            self._delivery._waiting -= 1
        else:
            self._sink._failed(self._delivery, self._index, error)
