"""What ``Inbox.consume`` gives to the handler, and where it puts what cannot be handled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from confluent_kafka import Message, Producer

    from .inbox import Arrival


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
