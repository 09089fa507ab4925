"""Parked aggregates: an event that was refused is never overtaken by a later one of its aggregate.

A refused row closes its aggregate. Later rows of it stay pending in the table, and out of memory,
while the checkpoint moves on. The row climbs the ladder (``store.RETRY_LADDER_S``); when its time
comes the relay reads the aggregate's pending rows in id order and sends up to the first refusal.
When nothing is pending any more the aggregate flows again. Where the topic is at fault, the whole
aggregate type is closed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import structlog

from cdc_relay.kafka.topics import Refusal
from cdc_relay.outbox import OutboxEvent
from cdc_relay.store import Store

log: Any = structlog.get_logger(__name__)

Closed = tuple[str, str | None]
"""(aggregate_type, aggregate_id); None closes the whole type."""

_ROWS: Final = 1000
_LOOK_AGAIN_S: Final = 1.0
_BLOCKED_LOOK_S: Final = 10.0
# Rows that the stream has just passed over may not be visible to SELECT yet.
_VISIBLE_WITHIN_S: Final = 1.0
# Aggregates of one type that may be closed one by one; more close the type.
_MOST_AGGREGATES: Final = 5000


@dataclass(slots=True)
class _State:
    look_at: float
    held_at: float = 0.0


class Parking:
    """The closed aggregates of one relay. One thread; database errors are the store's."""

    def __init__(self, store: Store, on_dead: Literal["block", "release"]) -> None:
        self._store = store
        self._on_dead = on_dead
        self._closed: dict[Closed, _State] = {}
        self.tries: dict[int, int] = {}
        """Failures so far of rows that came from the table, by id."""

    @property
    def any(self) -> bool:
        """Whether anything is closed (a quick look for the hot path)."""
        return bool(self._closed)

    def load(self, closed: Iterable[Closed]) -> None:
        """Take over what a checkpoint names."""
        for kind, key in closed:
            self.close(kind, key)

    def closed(self) -> tuple[Closed, ...]:
        """What is closed, for the checkpoint."""
        return tuple(self._closed)

    def changed(self, since: Sequence[Closed]) -> bool:
        """Whether that is not what ``since`` says."""
        return tuple(self._closed) != tuple(since)

    def holds(self, kind: str, key: str) -> bool:
        """Whether events of this aggregate stay behind; notes that one was seen."""
        state = self._closed.get((kind, key)) or self._closed.get((kind, None))
        if state is None:
            return False
        state.held_at = time.monotonic()
        return True

    def close(self, kind: str, key: str | None, *, sent: bool = True) -> None:
        """Close an aggregate; ``sent`` looks at it again soon."""
        if (kind, key) not in self._closed:
            pause = 0.0 if sent else _LOOK_AGAIN_S
            self._closed[kind, key] = _State(time.monotonic() + pause)
            of_type = sum(k == kind for k, _ in self._closed)
            if of_type > _MOST_AGGREGATES:
                for other in [c for c in self._closed if c[0] == kind]:
                    del self._closed[other]
                self._closed[kind, None] = _State(time.monotonic() + _LOOK_AGAIN_S)

    def open(self, aggregate: Closed, *, quietly: bool = False) -> None:
        """Let the aggregate flow."""
        self._closed.pop(aggregate, None)
        if not quietly:
            log.info(
                "aggregate flows again", aggregate_type=aggregate[0], aggregate_id=aggregate[1]
            )

    def park(self, event: OutboxEvent, tries: int, refusal: Refusal) -> None:
        """Put the row on the ladder and close its aggregate (its type, where the topic is at
        fault)."""
        failure = self._store.record_failure(event, tries, refusal.reason)
        if failure.outcome == "dead" and self._on_dead == "release":
            pass
        else:
            self.close(event.aggregate_type, None if refusal.topic else event.aggregate_id)
        log.error(
            "row is dead" if failure.outcome == "dead" else "row parked; its aggregate waits",
            event_id=event.event_id,
            aggregate_type=event.aggregate_type,
            aggregate_id=event.aggregate_id,
            event_type=event.event_type,
            reason=refusal.reason,
            tries=failure.tries,
            retry_in_seconds=failure.delay_s,
        )

    def due(self) -> list[Closed]:
        """The closed aggregates to look at now."""
        if not self._closed:
            return []
        now = time.monotonic()
        return [aggregate for aggregate, state in self._closed.items() if state.look_at <= now][:50]

    def rows(self, aggregate: Closed) -> list[tuple[OutboxEvent, int]] | None:
        """The rows of a closed aggregate to send now, with their failures so far; empty when it
        may flow again; None when it has to wait."""
        state = self._closed[aggregate]
        state.look_at = time.monotonic() + _LOOK_AGAIN_S
        kind, key = aggregate
        waiting = self._store.waiting(kind, key, _ROWS)
        names = {pending.event.aggregate_id for pending, _ in waiting}
        blocked = {name for name in names if self._is_blocked(kind, name)}
        due: list[tuple[OutboxEvent, int]] = []
        for pending, later in waiting:
            name = pending.event.aggregate_id
            if later:
                blocked.add(name)
            if name not in blocked:
                due.append((pending.event, pending.retry_count))
        if due:
            return due
        if waiting:
            return None
        if key is not None and self._is_blocked(kind, key):
            state.look_at = time.monotonic() + _BLOCKED_LOOK_S
            return None
        if time.monotonic() - state.held_at < _VISIBLE_WITHIN_S:
            return None
        return []

    def _is_blocked(self, kind: str, key: str) -> bool:
        return self._on_dead == "block" and self._store.has_dead(kind, key)
