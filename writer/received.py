"""What ``Inbox.consume`` gives to the handler, and where it puts what cannot be handled."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from confluent_kafka import Message, Producer

    from .inbox import Arrival

_POLL_S: Final = 0.1
_SOURCE: Final = "dead_letter_source"


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


class DeadLetters:
    """Where records go that could not be handled.

    The record keeps its key, value and headers and gets ``dead_letter_consumer``,
    ``dead_letter_reason`` and ``dead_letter_source`` (topic, partition, offset). It is not claimed:
    sent back to its topic once the cause is mended, it is handled.

    Where that is larger than producer or topic takes, the value stays behind: it is empty, and
    ``dead_letter_value_left_out`` is the size of what is still at the source.
    """

    def __init__(
        self, producer: Producer, topic: str = "{topic}.dead", *, timeout_s: float = 30.0
    ) -> None:
        """``producer`` is a ``confluent_kafka.Producer``, which others may use too; in ``topic``,
        ``{topic}`` is the record's own."""
        self._producer = producer
        self._topic = topic
        self._timeout_s = timeout_s

    def has(self, message: Message) -> bool:
        """Whether ``message`` is a dead letter, of any consumer's, that was read from where these
        go: a subscription by pattern takes such topics in. One that was sent back to its topic is
        none any more."""
        read_from = str(message.topic())
        headers: Any = message.headers() or []
        for name, value in headers:
            if name == _SOURCE and isinstance(value, bytes):
                topic = value.decode(errors="replace").rsplit("/", 2)[0]
                if topic != read_from and self._topic.format(topic=topic) == read_from:
                    return True
        return False

    def send(self, message: Message, consumer: str, reason: str) -> None:
        """Send and wait for the broker's word, ``timeout_s`` at most, in which a full queue may
        empty; raises ``RuntimeError`` without it."""
        from confluent_kafka import KafkaError

        source = f"{message.topic()}/{message.partition()}/{message.offset()}"
        headers: list[tuple[str, Any]] = [
            *(message.headers() or []),
            ("dead_letter_consumer", consumer.encode()),
            ("dead_letter_reason", reason.encode()[:2000]),
            (_SOURCE, source.encode()),
        ]
        deadline = time.monotonic() + self._timeout_s
        value = message.value()
        error = self._sent(message, value, headers, deadline)
        if isinstance(error, KafkaError) and error.code() in (
            KafkaError.MSG_SIZE_TOO_LARGE,
            KafkaError.RECORD_LIST_TOO_LARGE,
        ):
            # Empty, as None would be a tombstone to whoever reads it.
            headers.append(("dead_letter_value_left_out", b"%d" % len(value or b"")))
            error = self._sent(message, b"", headers, deadline)
        if error is not None:
            raise RuntimeError(f"dead letter of {source} was not taken: {error}")

    def _sent(
        self, message: Message, value: Any, headers: list[tuple[str, Any]], deadline: float
    ) -> object:
        """Send one record; returns why it was not taken, or None."""
        from confluent_kafka import KafkaException

        reports: list[object] = []
        while True:
            try:
                self._producer.produce(
                    self._topic.format(topic=message.topic()),
                    key=message.key(),
                    value=value,
                    headers=headers,
                    on_delivery=lambda error, _: reports.append(error),
                )
                break
            except KafkaException as error:
                return error.args[0]
            except BufferError:
                if time.monotonic() >= deadline:
                    return "the producer's queue is full"
                self._producer.poll(_POLL_S)
        # Not flush(): others may send by this producer all the time.
        while not reports and time.monotonic() < deadline:
            self._producer.poll(_POLL_S)
        return reports[0] if reports else "time-out"


def parse(message: Message) -> InboxEvent:
    """The event that a record is. Raises ``ValueError`` where it cannot be handled."""
    headers: dict[str, bytes | None] = dict(message.headers() or [])  # type: ignore[arg-type]
    event_id = _text(headers, "id", "ce_id")
    if not event_id:
        raise ValueError("the record has no header id: a repetition could not be told")
    occurred_at = _text(headers, "occurred_at", "ce_time")
    number = int(_text(headers, "aggregate_seq") or -1)
    key, value = message.key(), message.value()
    topic, partition = place(message)
    return InboxEvent(
        event_id=event_id,
        event_type=_text(headers, "event_type", "ce_type"),
        aggregate_type=_text(headers, "aggregate_type"),
        aggregate_id=_text(headers, "aggregate_id"),
        occurred_at=datetime.fromisoformat(occurred_at) if occurred_at else None,
        aggregate_seq=number if number >= 0 else None,
        arrival=None,
        missing=0,
        value=value.encode() if isinstance(value, str) else value,
        key=key.encode() if isinstance(key, str) else key,
        headers=headers,
        topic=topic,
        partition=partition,
        offset=offset(message),
    )


def place(message: Message) -> tuple[str, int]:
    return str(message.topic()), int(message.partition() or 0)


def offset(message: Message) -> int:
    return int(message.offset() or 0)


def named(message: Message) -> str:
    return f"{message.topic()}/{message.partition()}/{message.offset()}"


def _text(headers: Mapping[str, bytes | None], *names: str) -> str:
    for name in names:
        value = headers.get(name)
        if value is not None:
            return value.decode() if isinstance(value, bytes) else str(value)
    return ""
