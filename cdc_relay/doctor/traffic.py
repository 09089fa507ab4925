"""What the table's most recent rows mean for Kafka: read as they are, routed as the relay does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Connection

from cdc_relay.config import Settings
from cdc_relay.database import TableShape
from cdc_relay.errors import UnroutableError
from cdc_relay.outbox import PENDING, OutboxEvent
from cdc_relay.routing import Routing

RECENT_ROWS: Final = 1000
_SAMPLES: Final = 5


@dataclass(slots=True)
class Seen:
    """What recent rows ask of one topic."""

    largest: int = 0
    """Largest payload in bytes."""
    partition: int = -1
    """Highest partition that a row names; -1 where the keys decide."""


@dataclass(slots=True)
class Traffic:
    """What recent rows ask of Kafka."""

    topics: Mapping[str, Seen]
    """By name, that of the newest row first."""
    unroutable: Sequence[str]
    """Why rows cannot be routed, some of the reasons."""
    oldest_pending_ms: int
    """Age of the oldest pending row."""
    ahead_ms: int
    """By how much the newest is stamped ahead of the database's clock; negative where it is not."""


@dataclass(slots=True)
class _Found:
    topics: dict[str, Seen] = field(default_factory=dict)
    unroutable: list[str] = field(default_factory=list)
    ahead_ms: int = -(2**62)


def look(connection: Connection, settings: Settings, shape: TableShape) -> Traffic:
    """Look at the most recent rows and at the oldest pending one."""
    recent = shape.names.sql(
        "SELECT id, event_id, aggregate_type, aggregate_id, event_type, LENGTH(payload),"
        f" TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), created_at){shape.extra_sql}"
        f" FROM {shape.quoted} ORDER BY id DESC LIMIT {RECENT_ROWS}"
    )
    routing = settings.routing()
    found = _Found()
    for number, *columns in connection.exec_driver_sql(recent):
        event_id, kind, key, event_type = (_text(one) for one in columns[:4])
        size, ahead = (int(one or 0) for one in columns[4:6])
        extra = tuple(None if one is None else _bytes(one) for one in columns[6:])
        event = OutboxEvent(int(number), event_id, kind, key, event_type, None, None, None, extra)
        found.ahead_ms = max(found.ahead_ms, ahead // 1000)
        _route(routing, event, size, found)
    sql = shape.names.sql(
        "SELECT TIMESTAMPDIFF(SECOND, MIN(created_at), UTC_TIMESTAMP(6))"
        f" FROM {shape.quoted} WHERE status = {PENDING}"
    )
    age = connection.exec_driver_sql(sql).scalar()
    oldest_ms = 1000 * max(0, int(age or 0))
    return Traffic(found.topics, found.unroutable, oldest_ms, found.ahead_ms)


def _route(routing: Routing, event: OutboxEvent, size: int, found: _Found) -> None:
    try:
        topic = routing.topic(event)
        partition = routing.partition(event)
    except UnroutableError as error:
        reason = f"aggregate_type {event.aggregate_type!r}: {error}"
        if reason not in found.unroutable and len(found.unroutable) < _SAMPLES:
            found.unroutable.append(reason)
        return
    seen = found.topics.setdefault(topic, Seen())
    seen.largest = max(seen.largest, size)
    seen.partition = max(seen.partition, partition)


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
