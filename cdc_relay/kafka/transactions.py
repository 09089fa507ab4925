"""The sink exactly once: a group of records, its checkpoint and the group offset in one Kafka
transaction.

Facts: librdkafka's INTRODUCTION.md, "Transactional Producer"; KIP-98 (transactions), KIP-447
(fencing by the group's generation).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from typing import Any, Final, Literal

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from cdc_relay import faults
from cdc_relay.config import Settings
from cdc_relay.errors import SinkError, SinkUnavailableError
from cdc_relay.kafka import markers
from cdc_relay.kafka.calls import Calls
from cdc_relay.kafka.checkpoints import fallback_topic, topic_name
from cdc_relay.kafka.client import (
    SILENT,
    UNKNOWN_TOPIC,
    create,
    noticing,
    served,
    sink_error,
    text,
)
from cdc_relay.kafka.coordinator import timeout_ms
from cdc_relay.kafka.membership import Membership, group_name
from cdc_relay.kafka.portions import Portions
from cdc_relay.kafka.sink import (
    RECORD_FAULTS,
    SIZE_FAULTS,
    TOPIC_FAULTS,
    FencedError,
    check_is_there,
    producer_config,
    refused_checkpoint,
)
from cdc_relay.kafka.topics import Refusal, Topics
from cdc_relay.kafka.unfinished import Ends, Place, Written
from cdc_relay.router import Record

log = structlog.get_logger(__name__)

# What a transaction says that has a topic in it which was deleted: the calls behind the one that
# was told so find the transaction failed.
_MAYBE_GONE: Final = UNKNOWN_TOPIC | {KafkaError._STATE}
# Between two looks at whether to go on, while the brokers are waited for.
_LOOK_S: Final = 0.2
_PAUSE_S: Final = 0.05
# Records of a portion that are not acknowledged for so long are stuck.
_STALLED_S: Final = 1.0
# The first call begins it, so that two producers do not wait for one another; the next wait.
_BEGIN_S: Final = 0.01
_INIT_S: Final = 1.0
# After this the library is asked again.
_CALL_S: Final = 4.0
_LOOK_AGAIN_S: Final = 1.0


class TransactionalSink:
    """Transactions of one owner, one after the other; those of a shard are bound to the member's
    generation (KIP-447).

    Not thread-safe. ``__init__`` fences every earlier producer of the owner and ends its open
    transaction, so the last checkpoint that can be read afterwards is final.

    A shard has two producers that take turns. A commit is certain as soon as the coordinator has
    answered, but it still writes a marker into every partition, and refuses the next transaction of
    the same producer until that is done; the other producer need not wait for it. Order stays:
    nothing of a transaction is sent before the one before is committed, and what is behind an
    unfinished transaction in a partition is not given to a ``read_committed`` reader.

    A broker refuses a batch as a whole and does not say which record is at fault. The transaction
    is given up then, and the group is sent again in portions, each one acknowledged before the
    next, until the refused one is a single record. Nothing of this is seen by anybody.
    """

    def __init__(
        self,
        settings: Settings,
        owner: int | Literal["fallback"],
        membership: Membership | None,
        going_on: Callable[[], bool],
        written: Written | None = None,
    ) -> None:
        """For the ``owner`` of a shard, or for the compensator's pass, which is in no group and
        commits no group offset. ``written``: what the owner's terms remember of their
        transactions. Waits for the brokers while ``going_on``, not for ever. Raises
        ``SinkUnavailableError`` when the wait is over, ``SinkError`` when the producer is refused.
        """
        self._settings = settings
        self._membership = membership
        self._owner = owner
        writer = writer_of(settings, owner)
        self._written = written or Written()
        foreign = markers.write_forgotten(settings, writer, self._written.topics, going_on)
        self._losses = 0  # of brokers, as the producers noticed
        self._ends = Ends(settings, writer.checkpoints, self._written, self._all_losses, foreign)
        self._look_at = 0.0
        self._fatal: KafkaError | None = None
        self._refused: dict[tuple[str, bytes | None], KafkaError] = {}
        self.acknowledged: Set[int] = frozenset()
        """A transaction that is not committed is not there: always empty."""
        timeout = timeout_ms(settings)
        self._calls = Calls("transactions")
        self._give_up_at = 0.0
        self._unsure = False  # whether a commit was left whose outcome is not known
        self._begun = False  # whether a transaction is open that is to be open
        self._producers: deque[Any] = deque(
            create(
                Producer,
                {
                    **producer_config(settings, f"cdc-relay-{settings.name}-{owner}"),
                    "transactional.id": transactional_id,
                    "transaction.timeout.ms": timeout,
                    "message.timeout.ms": timeout,
                    # The commit is the acknowledgement; only refusals are reported one by one.
                    "delivery.report.only.error": True,
                    "error_cb": self._on_error,
                    # Brokers that go away while nothing is sent.
                    **noticing(settings, self._on_loss),
                    **self._small_batches(),
                },
            )
            for transactional_id in writer.transactional_ids
        )
        self._topics = Topics(self._producers[0])
        self._portions = Portions()
        try:
            self._init(going_on)
        except BaseException:
            self._calls.close()
            raise

    @property
    def _producer(self) -> Any:
        """Whose turn it is."""
        return self._producers[0]

    def _init(self, going_on: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + self._settings.transaction_timeout
        waiting = deque((producer, _BEGIN_S) for producer in self._producers)
        while waiting:
            producer, timeout = waiting.popleft()
            try:
                producer.poll(0)  # brings the login's token, where there is one
                producer.init_transactions(timeout)
            except KafkaException as error:
                stopped = not going_on() or time.monotonic() > give_up_at
                if not error.args[0].retriable() or stopped:
                    raise sink_error(error, self._settings, "cannot start transactions") from None
                if timeout != _BEGIN_S:
                    log.warning("waiting for Kafka", reason=text(error))
                waiting.append((producer, _INIT_S))

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
        the producer cannot go on; the last checkpoint tells whether it is there then. After
        either nothing more can be delivered where a commit was on its way.
        """
        try:
            return self._deliver(records, checkpoint, going_on)
        except FencedError:
            self._note_small_batches()
            raise

    def _note_small_batches(self) -> None:
        """Where a group went in small portions when the producer was given up: they may have taken
        longer than a transaction may, as they would the next time."""
        limit = self._portions.limit
        if limit:
            known = self._written.batch_bytes  # too large, as it turned out
            self._written.batch_bytes = min(limit, known // 2) if known > 1 else limit
            log.warning("later producers make smaller batches", bytes=self._written.batch_bytes)

    def _small_batches(self) -> dict[str, int]:
        found = self._written.batch_bytes
        return {"batch.size": found} if found else {}

    def _deliver(
        self,
        records: Sequence[Record],
        checkpoint: Record | None,
        going_on: Callable[[], bool],
    ) -> dict[int, Refusal]:
        if self._unsure:
            raise FencedError("the outcome of the last transaction is not known")
        refused = self._topics.refused(records, going_on)
        if refused:
            return refused
        portions = self._portions.of(records)
        pause = _PAUSE_S
        while True:
            self._make_sure(going_on)
            self._written.add({record.topic for record in records})
            portion = (0, 0)
            gone = False
            self._refused.clear()
            self._give_up_at = time.monotonic() + self._settings.transaction_timeout
            self._begun = True
            try:
                self._producer.begin_transaction()
                faults.point("begun")
                for portion in portions:
                    refused = self._produce(records, *portion, going_on)
                    if not refused and len(portions) > 1:
                        self._acknowledge(going_on)
                    if refused or self._refused:
                        break
                    self._portions.passed(portion)
                else:
                    faults.point("produced")
                    self._commit(checkpoint, going_on)
                    self._begun = False
                    self._portions.committed()
                    self._producers.rotate()
                    return {}
            except KafkaException as error:
                if error.args[0].fatal():
                    raise FencedError(f"the Kafka producer cannot go on: {text(error)}") from None
                if not self._refused:
                    gone = error.args[0].code() in _MAYBE_GONE
                    log.warning("transaction given up", reason=text(error))
            self._abort(going_on)
            self._begun = False
            if gone:
                refused = self._gone(records, checkpoint, going_on)
            if refused:
                return refused
            if self._refused:
                refused = self._blamed(records, portion)
                if refused:
                    return refused
                portions = self._portions.refused(self._suspects(records, portion))
                continue
            if not going_on():
                raise SinkUnavailableError("stopped while the brokers do not answer")
            time.sleep(pause)
            pause = min(pause * 2, 2.0)

    def _make_sure(self, going_on: Callable[[], bool]) -> None:
        """Where a broker was away, wait until it is known that nothing of ours is open; also
        between two tries, the first of which may be what is open."""
        self._serve()
        while not self._ends.known():
            if not going_on():
                raise SinkUnavailableError("stopped while the brokers do not answer")
            time.sleep(_PAUSE_S)

    def _produce(
        self, records: Sequence[Record], start: int, stop: int, going_on: Callable[[], bool]
    ) -> dict[int, Refusal]:
        """Queue a portion; the result is what the client library itself refuses."""
        refused: dict[int, Refusal] = {}
        for index in range(start, stop):
            try:
                self._queue(records[index], going_on)
            except KafkaException as error:
                code = error.args[0].code()
                if code not in RECORD_FAULTS:
                    raise
                refused[index] = Refusal(text(error), too_large=code in SIZE_FAULTS)
        return refused

    def _queue(self, record: Record, going_on: Callable[[], bool]) -> None:
        """Queue one record, when there is room for it."""
        while True:
            try:
                self._producer.produce(
                    record.topic,
                    record.value,
                    record.key,
                    record.partition,
                    self._report,
                    timestamp=record.timestamp_ms,
                    headers=record.headers,
                )
                return
            except BufferError:
                served(lambda: self._producer.poll(0.1))
                self._look(going_on, "stopped while the queue is full")

    def _queue_checkpoint(self, checkpoint: Record, going_on: Callable[[], bool]) -> None:
        try:
            self._queue(checkpoint, going_on)
        except KafkaException as error:
            if error.args[0].code() in RECORD_FAULTS:  # trying again does not make it smaller
                self._abort(going_on)  # what is open would hold up the topics' readers
                raise refused_checkpoint(checkpoint, text(error)) from None
            raise

    def _acknowledge(self, going_on: Callable[[], bool]) -> None:
        """Wait until everything queued is acknowledged or refused.

        A batch that stands behind a refused one of its partition is refused for its sequence
        numbers. librdkafka sends nothing more then and does not say so: what does not move is given
        up, and sent again in a new transaction.
        """
        least, moved_at = len(self._producer), time.monotonic()
        while left := served(lambda: self._producer.flush(_LOOK_S)):
            self._look(going_on, "stopped while the brokers do not answer")
            now = time.monotonic()
            if left < least:
                least, moved_at = left, now
            elif now - moved_at > _STALLED_S:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "records do not move"))

    def _commit(self, checkpoint: Record | None, going_on: Callable[[], bool]) -> None:
        if checkpoint is not None:
            self._queue_checkpoint(self._written.named(checkpoint), going_on)
        producer = self._producer
        if self._membership is not None and self._owner != "fallback":
            offsets, member = self._membership.offsets(self._owner), self._membership.metadata()
            self._insist(
                lambda: producer.send_offsets_to_transaction(offsets, member, _CALL_S), going_on
            )
        faults.point("committing")
        # The outcome is open until the coordinator has answered. Who does not wait for it must not
        # write another checkpoint: it would stand behind this one and name a position before it.
        self._unsure = True
        try:
            self._insist(lambda: producer.commit_transaction(_CALL_S), going_on)
        except KafkaException:
            self._unsure = False  # an answer: not committed
            raise
        self._unsure = False

    def _insist(self, call: Callable[[], None], going_on: Callable[[], bool]) -> None:
        """Call again while the library says that its wait may be resumed. A call that overruns its
        own timeout hangs, and its producer is given up."""
        overrun = 0.0

        def look() -> None:
            self._look(going_on, "stopped while the outcome of a transaction is open")
            if time.monotonic() > overrun:
                raise FencedError("a call of the Kafka client library does not return")

        while True:
            overrun = time.monotonic() + _CALL_S + 1.0
            try:
                return self._calls.make(call, look, _LOOK_S)
            except KafkaException as error:
                if not error.args[0].retriable():
                    raise
                log.warning("waiting for Kafka", reason=text(error))
                look()

    def _look(self, going_on: Callable[[], bool], stopped: str) -> None:
        """Between two waits. When the coordinator must have ended the transaction by itself, the
        producer is given up: the next term asks for the outcome."""
        if not going_on():
            raise SinkUnavailableError(stopped)
        if time.monotonic() > self._give_up_at:
            limit = self._settings.transaction_timeout
            raise FencedError(f"the Kafka producer did not end its transaction within {limit:g} s")

    def _abort(self, going_on: Callable[[], bool]) -> None:
        producer = self._producer
        self._give_up_at = time.monotonic() + self._settings.transaction_timeout
        try:
            self._insist(lambda: producer.abort_transaction(_CALL_S), going_on)
        except KafkaException as error:
            raise FencedError(f"the Kafka producer cannot go on: {text(error)}") from None

    def _report(self, error: KafkaError | None, message: Message) -> None:
        if error is not None and (error.code() in RECORD_FAULTS or error.code() in TOPIC_FAULTS):
            # A report has no headers; with topic and key it names the record well enough, because
            # whoever is refused in a group goes alone before it is blamed.
            self._refused[str(message.topic()), message.key()] = error

    def _gone(
        self, records: Sequence[Record], checkpoint: Record | None, going_on: Callable[[], bool]
    ) -> dict[int, Refusal]:
        """Ask anew which topics are there. Raises ``CheckpointTopicGoneError``."""
        if checkpoint is not None:
            self._topics.forget(checkpoint.topic)
            check_is_there(self._topics, checkpoint)
        for topic in {record.topic for record in records}:
            self._topics.forget(topic)
        return self._topics.refused(records, going_on)

    def _suspects(self, records: Sequence[Record], portion: tuple[int, int]) -> list[int]:
        """The indices in ``portion`` of the records that were refused, together with others."""
        refused = self._refused
        return [
            index
            for index in range(*portion)
            if (records[index].topic, records[index].key) in refused
        ]

    def _blamed(self, records: Sequence[Record], portion: tuple[int, int]) -> dict[int, Refusal]:
        """What is certain: a record that went alone, or the topic of several."""
        suspects = self._suspects(records, portion)
        if not suspects:
            [(where, error), *_] = self._refused.items()
            raise SinkError(f"the checkpoint was refused by {where[0]}: {text(error)}")
        result: dict[int, Refusal] = {}
        for index in suspects:
            record = records[index]
            error = self._refused[record.topic, record.key]
            topic = error.code() in TOPIC_FAULTS
            if topic:
                self._topics.forget(record.topic)
            if topic or portion[1] - portion[0] == 1:
                result[index] = Refusal(text(error), topic, error.code() in SIZE_FAULTS)
        return result

    def poll(self) -> None:
        """Serve the client library's callbacks, and look after what a broker may have forgotten.
        Raises ``FencedError`` when the producer cannot go on."""
        self._serve()
        now = time.monotonic()
        # Nothing may come for long, and readers wait. What we have open ourselves is not forgotten.
        if now >= self._look_at and not self._begun:
            self._look_at = now + _LOOK_AGAIN_S
            self._ends.known()

    def _serve(self) -> None:
        try:
            for producer in self._producers:
                served(lambda one=producer: one.poll(0))  # type: ignore[misc]
        except KafkaException as error:
            # Only a fatal error comes this way, and it does so whether or not there is an error_cb.
            raise FencedError(f"the Kafka producer cannot go on: {text(error)}") from None
        if self._fatal is not None:
            raise FencedError(f"the Kafka producer cannot go on: {text(self._fatal)}")

    def close(self, timeout: float) -> None:
        """Give up what is queued; nothing of an open transaction is seen by anybody."""
        self._calls.close()
        if not self._calls.idle(min(timeout, 1.0)):
            # It hangs: left behind with its thread, and fenced by the next producer.
            self._producers.clear()
            self._portions = Portions()
            return
        for producer in self._producers:
            with suppress(Exception):  # a fenced one answers every call with its fatal error
                producer.purge()
                producer.flush(min(timeout, 1.0))

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            self._fatal = error
        self._losses += error.code() in SILENT

    def _on_loss(self) -> None:
        self._losses += 1

    def _all_losses(self) -> int:
        return self._losses + (self._membership.losses if self._membership is not None else 0)


def writer_of(settings: Settings, owner: int | Literal["fallback"]) -> markers.Writer:
    """The producers of the ``owner``, and where their checkpoints are."""
    first = f"cdc-relay.{settings.name}.{owner}"
    if owner == "fallback":
        # A pass carries what was left behind: large transactions, whose markers do not matter.
        return markers.Writer([first], Place(fallback_topic(settings.name), 0), "")
    place = Place(topic_name(settings.name), owner)
    return markers.Writer([first, f"{first}.second"], place, group_name(settings.name))


def fence(
    settings: Settings, owner: int | Literal["fallback"], going_on: Callable[[], bool]
) -> None:
    """End what a producer of ``owner`` has open: from here on it can commit nothing that it began
    before. Errors as those of ``TransactionalSink``."""
    TransactionalSink(settings, owner, None, going_on).close(0.0)
