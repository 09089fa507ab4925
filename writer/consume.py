"""Poll, claim, handle, commit, commit the offset: what ``Inbox.consume`` does.

The Kafka client is loaded when the loop starts, never by ``import writer``.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import exc
from sqlalchemy.orm import Session

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message, Producer

    from .inbox import Arrival, Inbox

_log = logging.getLogger("cdc_relay.inbox")

_POLL_S: Final = 0.5
_COMMIT_EVERY_S: Final = 1.0
_OUTAGE_WAITS_S: Final = (0.2, 1.0, 5.0, 10.0)
"""The last one repeats."""

# Errors of the server that say nothing about the statement: too many connections, shutdown, lost
# connections, lock timeout, deadlock, read-only during a failover, idle time-out.
_OUTAGE_CODES: Final = frozenset(
    [
        *(1040, 1053, 1077, 1079, 1152, 1158, 1159, 1160, 1161, 1184, 1203, 1205, 1213),
        *(1290, 1836, 1927, 2002, 2003, 2006, 2013, 2055, 4031),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxEvent:
    """An event as its consumer gets it."""

    event_id: str
    event_type: str
    aggregate_type: str
    aggregate_id: str
    occurred_at: datetime | None
    aggregate_seq: int | None
    """The number of the event in its aggregate, where its writer gives one."""
    arrival: Arrival | None
    """How the number follows; None without a number or without ``sequences``."""
    missing: int
    """How many numbers a gap leaves out."""
    value: bytes | None
    """None is a tombstone."""
    key: bytes | None
    headers: Mapping[str, bytes | None] = field(repr=False)
    topic: str
    partition: int
    offset: int

    def json(self) -> Any:
        """The value, parsed; None for a tombstone. Raises ``ValueError`` where it is no JSON."""
        return None if self.value is None else json.loads(self.value)


Handler = Callable[[Session, InboxEvent], object]
"""Does the business of one event in the session's transaction. Must not commit."""


class DeadLetters:
    """Where records go that could not be handled.

    The record keeps its key, value and headers and gets ``dead_letter_consumer``,
    ``dead_letter_reason`` and ``dead_letter_source`` (topic, partition, offset). It is not claimed:
    sent back to its topic once the cause is mended, it is handled.
    """

    def __init__(
        self, producer: Producer, topic: str = "{topic}.dead", *, timeout_s: float = 30.0
    ) -> None:
        """``producer`` is a ``confluent_kafka.Producer``; in ``topic``, ``{topic}`` is the
        record's own."""
        self._producer = producer
        self._topic = topic
        self._timeout_s = timeout_s

    def send(self, message: Message, consumer: str, reason: str) -> None:
        """Send and wait for the broker's word; raises ``RuntimeError`` without it."""
        failures: list[object] = []
        source = f"{message.topic()}/{message.partition()}/{message.offset()}"
        self._producer.produce(
            self._topic.format(topic=message.topic()),
            key=message.key(),
            value=message.value(),
            headers=[
                *(message.headers() or []),
                ("dead_letter_consumer", consumer.encode()),
                ("dead_letter_reason", reason.encode()[:2000]),
                ("dead_letter_source", source.encode()),
            ],
            on_delivery=lambda error, _: failures.append(error) if error else None,
        )
        left = self._producer.flush(self._timeout_s)
        if failures or left:
            raise RuntimeError(f"dead letter of {source} was not taken: {failures or 'time-out'}")


class _StoppedError(Exception):
    """``stop()`` came true while an event was waiting for its next try."""


class Loop:
    """One run of ``Inbox.consume``; see there."""

    def __init__(
        self,
        inbox: Inbox,
        consumer: Consumer,
        session_factory: Callable[[], Session],
        handler: Handler,
        waits: Sequence[float],
        dead_letters: DeadLetters | None,
        outages: tuple[type[Exception], ...],
        stop: Callable[[], bool],
    ) -> None:
        self._inbox = inbox
        self._consumer = consumer
        self._sessions = session_factory
        self._handler = handler
        self._waits = waits
        self._dead_letters = dead_letters
        self._outages = outages
        self._stop = stop
        self._handled: dict[tuple[str, int], int] = {}
        """The next offset of each partition, not committed yet."""
        self._committed_at = time.monotonic()

    def run(self) -> None:
        try:
            while not self._stop():
                message = self._consumer.poll(_POLL_S)
                if message is not None and not self._is_error(message):
                    self._see_to(message)
                    self._handled[_place(message)] = _offset(message) + 1
                if message is None or time.monotonic() - self._committed_at > _COMMIT_EVERY_S:
                    self._commit_offsets()
        except _StoppedError:
            pass
        finally:
            self._commit_offsets()

    def _is_error(self, message: Message) -> bool:
        error = message.error()
        if error is None:
            return False
        if error.fatal():
            from confluent_kafka import KafkaException

            raise KafkaException(error)
        _log.warning("kafka: %s", error)
        return True

    # --- one record ----------------------------------------------------------------------------

    def _see_to(self, message: Message) -> None:
        """Handle one record, or set it aside; raises what the handler raised where it cannot."""
        tries = outages = 0
        while True:
            try:
                self._once(message)
                return
            except Exception as error:
                cause = error.__cause__ if isinstance(error, _NoInboxError) else error
                if self._is_outage(cause):
                    delay = _OUTAGE_WAITS_S[min(outages, len(_OUTAGE_WAITS_S) - 1)]
                    outages += 1
                    _log.warning("%s waits for %s s: %s", _named(message), delay, _line(cause))
                elif isinstance(error, _NoInboxError):
                    # No table, AUTOCOMMIT: every event would fail, and none is to blame.
                    raise (cause or error) from None
                elif tries < len(self._waits) and not isinstance(error, _UnclaimableError):
                    delay = self._waits[tries]
                    tries += 1
                    _log.warning(
                        "%s failed, try %d of %d: %s",
                        *(_named(message), tries, len(self._waits) + 1, _line(error)),
                    )
                elif self._dead_letters is None:
                    raise
                else:
                    _log.exception("%s goes to the dead letters", _named(message))
                    reason = str(error) if isinstance(error, _UnclaimableError) else _line(error)
                    self._dead_letters.send(message, self._inbox.consumer, reason)
                    return
            self._wait(delay)

    def _once(self, message: Message) -> None:
        """Claim, handle and commit, or nothing of it."""
        with self._sessions() as session, session.begin():
            try:
                event = self._claim(session, message)
            except ValueError as error:
                raise _UnclaimableError(str(error)) from error
            except Exception as error:
                raise _NoInboxError from error
            if event is None:
                _log.debug("%s is a repetition", _named(message))
            else:
                self._handler(session, event)

    def _claim(self, session: Session, message: Message) -> InboxEvent | None:
        """The event where it comes for the first time. ``ValueError`` is the record's fault."""
        headers: dict[str, bytes | None] = dict(message.headers() or [])  # type: ignore[arg-type]
        event_id = _text(headers, "id", "ce_id")
        if not event_id:
            raise ValueError("the record has no header id: a repetition could not be told")
        kind, aggregate_id = _text(headers, "aggregate_type"), _text(headers, "aggregate_id")
        occurred_at = _text(headers, "occurred_at", "ce_time")
        key, value = message.key(), message.value()
        event = InboxEvent(
            event_id=event_id,
            event_type=_text(headers, "event_type", "ce_type"),
            aggregate_type=kind,
            aggregate_id=aggregate_id,
            occurred_at=datetime.fromisoformat(occurred_at) if occurred_at else None,
            aggregate_seq=int(_text(headers, "aggregate_seq") or -1),
            arrival=None,
            missing=0,
            value=value.encode() if isinstance(value, str) else value,
            key=key.encode() if isinstance(key, str) else key,
            headers=headers,
            topic=str(message.topic()),
            partition=_place(message)[1],
            offset=_offset(message),
        )
        if not self._inbox.claim(session, event_id):
            return None
        number = event.aggregate_seq
        if number is None or number < 0:
            return replace(event, aggregate_seq=None)
        if not self._inbox.looks_for_gaps:
            return event
        arrival, missing = self._inbox.arrival(
            session, aggregate_type=kind, aggregate_id=aggregate_id, aggregate_seq=number
        )
        if arrival.value in ("gap", "late"):
            told = f"{missing} too far" if missing else "late"
            _log.warning(
                "%s: number %d of %s %s is %s", _named(message), number, kind, aggregate_id, told
            )
        return replace(event, arrival=arrival, missing=missing)

    def _is_outage(self, error: BaseException | None) -> bool:
        if isinstance(error, self._outages):
            return True
        if isinstance(error, exc.DBAPIError):
            code = error.orig.args[0] if error.orig is not None and error.orig.args else None
            return error.connection_invalidated or code in _OUTAGE_CODES
        return isinstance(error, exc.TimeoutError)

    def _wait(self, seconds: float) -> None:
        """Wait, polling: a consumer that does not poll is thrown out of its group."""
        from confluent_kafka import TopicPartition

        paused: list[Any] = []
        deadline = time.monotonic() + seconds
        try:
            while (left := deadline - time.monotonic()) > 0:
                if self._stop():
                    raise _StoppedError
                paused = self._consumer.assignment()
                self._consumer.pause(paused)
                message = self._consumer.poll(min(left, _POLL_S))
                if message is not None and message.error() is None:
                    # Of a partition that has just been assigned: it comes again after the wait.
                    self._consumer.seek(TopicPartition(*_place(message), _offset(message)))
        finally:
            self._consumer.resume(paused)

    def _commit_offsets(self) -> None:
        """Commit what was handled. A failure costs nothing: what comes again is a repetition."""
        from confluent_kafka import KafkaException, TopicPartition

        self._committed_at = time.monotonic()
        if not self._handled:
            return
        offsets = [TopicPartition(*place, offset) for place, offset in self._handled.items()]
        self._handled.clear()
        try:
            self._consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            _log.warning("offsets were not committed: %s", _line(error))


class _UnclaimableError(Exception):
    """The record has no event id or a wrong one, and no try will mend it."""


class _NoInboxError(Exception):
    """The claim itself failed; the cause says why."""


def _place(message: Message) -> tuple[str, int]:
    return str(message.topic()), int(message.partition() or 0)


def _offset(message: Message) -> int:
    return int(message.offset() or 0)


def _named(message: Message) -> str:
    return f"{message.topic()}/{message.partition()}/{message.offset()}"


def _text(headers: Mapping[str, bytes | None], *names: str) -> str:
    for name in names:
        value = headers.get(name)
        if value is not None:
            return value.decode() if isinstance(value, bytes) else str(value)
    return ""


def _line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
