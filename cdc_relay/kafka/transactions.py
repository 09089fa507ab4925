"""The sink exactly once: a group of records, its checkpoint and the group offset in one Kafka
transaction.

Facts: librdkafka's INTRODUCTION.md, "Transactional Producer"; KIP-98 (transactions), KIP-447
(fencing by the group's generation).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from typing import Any

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from cdc_relay import faults
from cdc_relay.config import Settings
from cdc_relay.errors import SinkError, SinkUnavailableError
from cdc_relay.kafka.client import create, sink_error, text
from cdc_relay.kafka.membership import Membership
from cdc_relay.kafka.sink import RECORD_FAULTS, TOPIC_FAULTS, FencedError, producer_config
from cdc_relay.kafka.topics import Refusal, Topics
from cdc_relay.router import Record

log = structlog.get_logger(__name__)


class TransactionalSink:
    """A transactional producer, bound to the member's generation (KIP-447).

    Not thread-safe. ``__init__`` fences every earlier producer of the shard and ends its open
    transaction, so the last checkpoint that can be read afterwards is final.
    """

    def __init__(
        self,
        settings: Settings,
        shard: int,
        membership: Membership,
        going_on: Callable[[], bool],
    ) -> None:
        """Waits for the brokers while ``going_on``. Raises ``SinkUnavailableError`` when it turned
        false, ``SinkError`` when the producer is refused."""
        self._settings = settings
        self._membership = membership
        self._shard = shard
        self._refused: dict[tuple[str, bytes | None], KafkaError] = {}
        self.acknowledged: Set[int] = frozenset()
        """A transaction that is not committed is not there: always empty."""
        timeout_ms = int(settings.transaction_timeout * 1000)
        self._producer: Any = create(
            Producer,
            {
                **producer_config(settings, f"cdc-relay-{settings.name}-{shard}"),
                "transactional.id": f"cdc-relay.{settings.name}.{shard}",
                "transaction.timeout.ms": timeout_ms,
                "message.timeout.ms": timeout_ms,
                # The commit is the acknowledgement; only refusals are reported one by one.
                "delivery.report.only.error": True,
            },
        )
        self._topics = Topics(self._producer)
        while True:
            try:
                self._producer.init_transactions(5.0)
                return
            except KafkaException as error:
                if not error.args[0].retriable() or not going_on():
                    raise sink_error(error, self._settings, "cannot start transactions") from None
                log.warning("waiting for Kafka", reason=text(error))

    def deliver(
        self,
        records: Sequence[Record],
        checkpoint: Record | None,
        going_on: Callable[[], bool],
    ) -> dict[int, Refusal]:
        """Commit ``records`` and ``checkpoint`` in one transaction.

        An empty result: all of it is there, for ever. Otherwise the refused records by their
        index, and nothing is there. Brokers that are away are waited for; raises
        ``SinkUnavailableError`` when ``going_on`` turns false meanwhile, and ``FencedError`` when
        the producer cannot go on, in which case the last checkpoint tells whether it is there.
        """
        refused = self._topics.refused(records)
        if refused:
            return refused
        pause = 0.05
        while True:
            try:
                self._producer.begin_transaction()
                faults.point("begun")
                refused = self._produce(records)
                faults.point("produced")
                if not refused:
                    self._commit(checkpoint)
                    return {}
            except KafkaException as error:
                inner = error.args[0]
                if inner.fatal():
                    raise FencedError(f"the Kafka producer cannot go on: {text(error)}") from None
                log.warning("transaction given up", reason=text(error))
            self._abort(going_on)
            refused = refused or self._reported(records)
            if refused:
                return refused
            if not going_on():
                raise SinkUnavailableError("stopped while the brokers do not answer")
            time.sleep(pause)
            pause = min(pause * 2, 2.0)

    def _produce(self, records: Sequence[Record]) -> dict[int, Refusal]:
        self._refused.clear()
        refused: dict[int, Refusal] = {}
        produce, poll, report = self._producer.produce, self._producer.poll, self._report
        for index, record in enumerate(records):
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
                except KafkaException as error:
                    if error.args[0].code() not in RECORD_FAULTS:
                        raise
                    refused[index] = Refusal(text(error))
                    break
        return refused

    def _commit(self, checkpoint: Record | None) -> None:
        if checkpoint is not None:
            self._producer.produce(
                checkpoint.topic, checkpoint.value, checkpoint.key, checkpoint.partition
            )
        self._producer.send_offsets_to_transaction(
            self._membership.offsets(self._shard), self._membership.metadata()
        )
        faults.point("committing")
        while True:
            try:
                self._producer.commit_transaction()
                return
            except KafkaException as error:
                # The outcome is open until the coordinator has answered: ask again.
                if not error.args[0].retriable():
                    raise

    def _abort(self, going_on: Callable[[], bool]) -> None:
        while True:
            try:
                self._producer.abort_transaction()
                return
            except KafkaException as error:
                inner = error.args[0]
                if inner.fatal() or not inner.retriable():
                    raise FencedError(f"the Kafka producer cannot go on: {text(error)}") from None
                if not going_on():
                    raise SinkUnavailableError(text(error)) from None
                log.warning("waiting for Kafka", reason=text(error))

    def _report(self, error: KafkaError | None, message: Message) -> None:
        if error is not None and (error.code() in RECORD_FAULTS or error.code() in TOPIC_FAULTS):
            # A report has no headers; with topic and key it names the record well enough, because
            # whoever is refused in a group goes alone before it is blamed.
            self._refused[str(message.topic()), message.key()] = error

    def _reported(self, records: Sequence[Record]) -> dict[int, Refusal]:
        """The refusals that the brokers reported, as indices of ``records``."""
        if not self._refused:
            return {}
        certain = len(records) == 1
        result: dict[int, Refusal] = {}
        for index, record in enumerate(records):
            error = self._refused.get((record.topic, record.key))
            if error is not None:
                topic = error.code() in TOPIC_FAULTS
                result[index] = Refusal(text(error), topic, certain or topic)
                if topic:
                    self._topics.forget(record.topic)
        if not result:
            [(where, error), *_] = self._refused.items()
            raise SinkError(f"the checkpoint was refused by {where[0]}: {text(error)}")
        return result

    def poll(self) -> None:
        """Serve the client library's callbacks."""
        self._producer.poll(0)

    def close(self, timeout: float) -> None:
        """Give up what is queued; nothing of an open transaction is seen by anybody."""
        self._producer.purge()
        self._producer.flush(min(timeout, 1.0))
