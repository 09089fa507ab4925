"""Parked aggregates: an event that was refused is never overtaken by a later one of its aggregate.

A refused row closes its aggregate. Later rows of it stay pending in the table, and out of memory,
while the checkpoint moves on. The row climbs the ladder (``store.RETRY_LADDER_S``); when its time
comes the relay reads the aggregate's pending rows in id order and sends up to the first refusal.
When nothing is pending any more the aggregate flows again.

Where the topic is at fault, the whole aggregate type is closed; it stands for all its aggregates,
so none of them is closed beside it. When its other rows are sent, those that still wait are closed
one by one.

Without marks (``mark = "none"``) every row is pending for ever and the table does not tell what
waits. The ids of the rows that a closed aggregate holds are kept then, and stand in the checkpoint.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from heapq import nsmallest
from operator import itemgetter
from typing import Any, Final, Literal

import structlog

from cdc_relay.kafka.topics import Refusal
from cdc_relay.outbox import DEAD, OutboxEvent
from cdc_relay.store import Aggregate, Failure, Store

log: Any = structlog.get_logger(__name__)

Closed = tuple[str, str | None]
"""(aggregate_type, aggregate_id); None closes the whole type."""
Held = tuple[str, str | None, Sequence[int]]
"""The same with the ids of the rows that wait."""

# Rows of one trial, at most.
_ROWS: Final = 1000
_ROWS_OF_TYPE: Final = 5000
# A closed aggregate is looked at when its first row is due, but not more seldom than this:
# somebody may make a row due by hand.
_LOOK_AGAIN_S: Final = 1.0
_LONGEST_S: Final = 5.0
# Looks take the stream's time: no more than this many a second.
_LOOKS_PER_S: Final = 100
# Rows that wait where nothing is marked: their ids stand in every checkpoint.
_MOST_HELD: Final = 20_000
# Aggregates of one type that may be closed one by one; more close the type.
_MOST_AGGREGATES: Final = 5000
# Bytes of their names, of all types: they stand in every checkpoint, beside the owed marks.
_MOST_NAMES: Final = 256 * 1024


@dataclass(slots=True)
class _State:
    look_at: float
    trial: bool = False
    """Its rows are being sent: they are let through, and a checkpoint still calls it closed."""
    known: bool = False
    """Whether no pass of the compensator can hold rows of it (see ``passes_know``)."""
    held: dict[tuple[int, str], None] = field(default_factory=dict)
    """Rows that the stream has passed over since the table was asked last, with their event ids,
    the newest of them; without marks all that wait, the refused one included, by id alone."""
    aside: bool = False
    """Whether nothing of it was refused: its first row is to go alone."""
    unseen: set[int] = field(default_factory=set)
    """Rows that are written and not visible yet (see ``wait_for``)."""


class Parking:
    """The closed aggregates of one relay. One thread; database errors are the store's."""

    def __init__(
        self,
        store: Store,
        on_dead: Literal["block", "release"],
        mark: Literal["update", "delete", "none"] = "update",
    ) -> None:
        """``mark``: whether, and how, the table tells what is sent."""
        self._store = store
        self._on_dead = on_dead
        self._marks = mark != "none"
        self._stay = mark == "update"  # whether rows that were sent are there
        self._closed: dict[Closed, _State] = {}
        self._of_type: Counter[str] = Counter()  # how many are closed one by one
        self._names = 0  # bytes of what is closed, at most: what is opened is not taken off
        self.gone = 0
        """Rows that waited, or were refused, and that somebody has deleted, so far."""
        self.tries: dict[int, int] = {}
        """Failures so far of rows that came from the table, by id."""

    @property
    def any(self) -> bool:
        """Whether anything is closed (a quick look for the hot path)."""
        return bool(self._closed)

    def load(self, closed: Iterable[Closed], held: Iterable[Held] = ()) -> None:
        """Take over what a checkpoint names."""
        for kind, key in closed:
            self.close(kind, key)
        for kind, key, ids in held:
            state = self._state(kind, key)
            if state is not None:
                state.held.update(dict.fromkeys((row_id, "") for row_id in ids))

    @property
    def any_aside(self) -> bool:
        """Whether anything is closed that was not refused."""
        return any(state.aside for state in self._closed.values())

    @property
    def full(self) -> bool:
        """Whether so many rows wait, where nothing is marked, that no more can be held."""
        if self._marks or not self._closed:
            return False
        return sum(len(state.held) for state in self._closed.values()) >= _MOST_HELD

    def held(self, sent: Set[int]) -> list[Held]:
        """What is held, for the checkpoint, without the rows that are ``sent`` together with it;
        empty with marks: the table tells."""
        if self._marks:
            return []
        return [
            (kind, key, sorted({row_id for row_id, _ in state.held} - sent))
            for (kind, key), state in self._closed.items()
        ]

    def sent(self, ids: Set[int]) -> None:
        """These rows wait no longer."""
        if not self._marks:
            keys = {(row_id, "") for row_id in ids}
            for state in self._closed.values():
                for key in state.held.keys() & keys:
                    del state.held[key]

    def learn(self) -> None:
        """Close the aggregates that the compensator has parked, or left with a dead row."""
        if not self._marks:
            return  # there is no compensator then, and what is dead was dead before
        self._close_all(self._store.failing(_MOST_AGGREGATES + 1))

    def close_blocked(self) -> None:
        """Close the aggregates that a dead row keeps from flowing."""
        self._close_all(self._blocked(None, None))

    def _close_all(self, found: Sequence[Aggregate]) -> None:
        """Close these aggregates; where there are more than one look can name, type by type, and
        as a whole those types that have too many by themselves."""
        if len(found) > _MOST_AGGREGATES:
            for kind in self._store.failing_types():
                of_type = self._store.failing(_MOST_AGGREGATES + 1, kind)
                if len(of_type) > _MOST_AGGREGATES:
                    self.close(kind, None)
                else:
                    self._close_all(of_type)
        else:
            for aggregate in found:
                self.close(*aggregate)

    def wait_for(self, rows: Iterable[tuple[int, Aggregate]]) -> None:
        """Close the aggregates of these rows until they are visible, or gone: nothing tells
        whether the stream will bring them, and nothing may overtake them."""
        for row_id, (kind, key) in rows:
            self.close(kind, key)
            state = self._state(kind, key)
            if state is not None:
                state.unseen.add(row_id)

    def closed(self) -> tuple[Closed, ...]:
        """What is closed, for the checkpoint."""
        return tuple(self._closed)

    def passes_know(self) -> None:
        """What is closed now stood in a committed checkpoint, and then the passes were fenced:
        none has rows of it in hand, and the next ones see that it is closed."""
        for state in self._closed.values():
            state.known = True

    def are_known(self, aggregates: Iterable[Closed]) -> bool:
        """Whether that is so for all of these."""
        states = (self._closed.get(aggregate) for aggregate in aggregates)
        return all(state is None or state.known for state in states)

    def changed(self, since: Sequence[Closed]) -> bool:
        """Whether that is not what ``since`` says."""
        return tuple(self._closed) != tuple(since)

    def set_aside(self, event: OutboxEvent) -> None:
        """Close the event's aggregate, so that it goes alone, and soon; it has not failed."""
        self.close(event.aggregate_type, event.aggregate_id)
        state = self._state(event.aggregate_type, event.aggregate_id)
        if state is not None:
            self._hold(state, event)
            state.look_at = time.monotonic()
            state.aside = True

    def holds(self, event: OutboxEvent) -> bool:
        """Whether the event stays behind; notes that it was seen."""
        kind = event.aggregate_type
        for closed in ((kind, event.aggregate_id), (kind, None)):
            state = self._closed.get(closed)
            if state is not None and not state.trial:
                self._hold(state, event)
                return True
        return False

    def close(self, kind: str, key: str | None) -> None:
        """Close an aggregate or a type."""
        state = self._closed.get((kind, key))
        whole = self._closed.get((kind, None))
        if state is not None:
            state.trial = False
        elif whole is None or whole.trial:
            self._add(kind, key, _State(time.monotonic() + _LOOK_AGAIN_S))
            self._names += _size(kind, key)
        if key is None or self._of_type[kind] > _MOST_AGGREGATES or not self._has_room():
            if (kind, None) not in self._closed:
                self._add(kind, None, _State(time.monotonic() + _LOOK_AGAIN_S))
            self._absorb(kind, self._closed[kind, None])

    def open(self, aggregate: Closed) -> None:
        """Let the aggregate flow."""
        self._remove(aggregate)
        log.info("aggregate flows again", aggregate_type=aggregate[0], aggregate_id=aggregate[1])

    def begin_trial(self, aggregate: Closed) -> None:
        """Let the aggregate's rows through until one is refused or the trial ends. It counts as
        closed meanwhile: after a crash, what the trial has not sent is still pending."""
        self._closed[aggregate].trial = True

    def end_trial(self, aggregate: Closed, *, sent: bool) -> None:
        """Hold the aggregate's rows again; it is looked at soon where something was ``sent``."""
        state = self._closed.get(aggregate)
        if state is None:  # its type was closed
            return
        state.trial = False
        if aggregate[1] is None:
            self._absorb(aggregate[0], state)
        state.look_at = time.monotonic() + (0.0 if sent else self._pause(_LOOK_AGAIN_S))

    def park(self, event: OutboxEvent, tries: int, refusal: Refusal) -> Failure:
        """Put the row on the ladder and close its aggregate (its type, where the topic is at
        fault); return what became of the row."""
        failure = self._store.record_failure(event, tries, refusal.reason)
        told = log.bind(
            event_id=event.event_id,
            aggregate_type=event.aggregate_type,
            aggregate_id=event.aggregate_id,
            event_type=event.event_type,
            reason=refusal.reason,
        )
        if failure.outcome == "gone" and self._is_gone(event):
            self.gone += 1
            told.error("a row that was refused is gone from the table: it is not sent")
            return failure
        if failure.outcome != "dead" or self._on_dead == "block":
            self.close(event.aggregate_type, None if refusal.topic else event.aggregate_id)
            state = self._state(event.aggregate_type, event.aggregate_id)
            if state is not None:
                self._hold(state, event)
                state.aside = False
        told.error(
            "row is dead" if failure.outcome == "dead" else "row parked; its aggregate waits",
            tries=failure.tries,
            retry_in_seconds=failure.delay_s,
        )
        return failure

    def due(self) -> list[Closed]:
        """The closed aggregates to look at now, those first that wait for it longest."""
        if not self._closed:
            return []
        now = time.monotonic()
        due = [(state.look_at, one) for one, state in self._closed.items() if state.look_at <= now]
        return [one for _, one in nsmallest(50, due, key=itemgetter(0))]

    def rows(
        self, aggregate: Closed, owed: Mapping[int, str]
    ) -> list[tuple[OutboxEvent, int]] | None:
        """The rows of a closed aggregate to send now, with their failures so far; empty when it
        may flow again; None when it has to wait. ``owed`` are sent, whatever the table says."""
        state = self._closed.get(aggregate)
        if state is None:
            return None
        state.look_at = time.monotonic() + self._pause(_LONGEST_S)
        if not self._marks:
            return self._held_rows(aggregate, state)
        if state.held:
            # So that they are visible, or gone, when "nothing is pending" opens the aggregate.
            self._store.settle(sorted({row_id for row_id, _ in state.held}))
            self._say_gone(aggregate, state.held)
            state.held.clear()
        if state.unseen:
            state.unseen = set(self._store.still_unseen(sorted(state.unseen)))
            if state.unseen:
                return None
        kind, key = aggregate
        # What the database takes for equal (A and a, a and "a ") are keys of their own to Kafka.
        dead = self._blocked(kind, key)
        blocked = {name for type_, name in dead if type_ == kind and key in (None, name)}
        waits = self._due(aggregate, state, blocked, owed)
        if waits:
            # Those that are still pending; what does not fit into memory comes at the next turn.
            events, _ = self._store.events(waits)
            return [(pending.event, pending.retry_count) for pending in events] or None
        if key is not None:
            return None if blocked else []
        # Nothing of the type can be sent now: what waits for its own reasons waits alone.
        most = max(len(dead), len(blocked))  # of the dead no more than so many were named
        if most > _MOST_AGGREGATES or not self._has_room(kind, blocked):
            return None
        for name in sorted(blocked):
            self._add(kind, name, _State(time.monotonic() + self._pause(_LOOK_AGAIN_S)))
        return []

    def _due(
        self, aggregate: Closed, state: _State, blocked: set[str], owed: Mapping[int, str]
    ) -> list[int]:
        """The ids of the first rows to send. Adds the aggregates that must wait to ``blocked``."""
        kind, key = aggregate
        limit = _ROWS if key is not None else _ROWS_OF_TYPE
        due: list[int] = []
        after_id = 0
        while not due and (key is None or not blocked):
            page = self._store.waiting(kind, key, limit, after_id)
            for row in page:
                after_id = row.id
                if row.aggregate_type != kind or key not in (None, row.aggregate_id):
                    continue  # equal to the database only
                if owed.get(row.id) == row.event_id or row.aggregate_id in blocked:
                    continue
                if row.behind_dead:
                    blocked.add(row.aggregate_id)
                elif row.due_in_s > 0:
                    blocked.add(row.aggregate_id)
                    pause = self._pause(min(row.due_in_s, _LONGEST_S))
                    state.look_at = min(state.look_at, time.monotonic() + pause)
                else:
                    due.append(row.id)
            if len(page) < limit:
                break
        return due

    def _held_rows(self, aggregate: Closed, state: _State) -> list[tuple[OutboxEvent, int]] | None:
        """``rows`` by what is held."""
        kind, key = aggregate
        limit = _ROWS if key is not None else _ROWS_OF_TYPE
        held = sorted(row_id for row_id, _ in state.held)
        blocked: dict[str, set[int]] = {}
        due: list[int] = []
        gone = 0
        for start in range(0, len(held), limit):
            part = held[start : start + limit]
            self._store.settle(part)
            found = {row.id: row for row in self._store.held(part)}
            for row_id in part:
                row = found.get(row_id)
                if row is None or (row.status == DEAD and self._on_dead == "release"):
                    del state.held[row_id, ""]  # gone, or given up
                    gone += row is None
                elif row.aggregate_id in blocked:
                    blocked[row.aggregate_id].add(row_id)
                elif row.status == DEAD or row.due_in_s > 0:
                    blocked[row.aggregate_id] = {row_id}
                    if row.status != DEAD:
                        pause = self._pause(min(row.due_in_s, _LONGEST_S))
                        state.look_at = min(state.look_at, time.monotonic() + pause)
                else:
                    due.append(row_id)
            if due or (key is not None and blocked):
                break
        if gone:
            self._gone(aggregate, gone)
        if due:
            events, _ = self._store.events(due)
            return [(pending.event, pending.retry_count) for pending in events] or None
        if not state.held:
            return []
        if key is not None or len(blocked) > _MOST_AGGREGATES:
            return None
        if not self._has_room(kind, blocked):
            return None
        for name, ids in blocked.items():
            look_at = time.monotonic() + self._pause(_LOOK_AGAIN_S)
            self._add(kind, name, _State(look_at, held=dict.fromkeys((one, "") for one in ids)))
        return []

    def _is_gone(self, event: OutboxEvent) -> bool:
        """Whether the table no longer has the event: nobody can send it, or has to wait for it."""
        row = self._store.states([event.id]).get(event.id)
        return row is None or row[0] != event.event_id

    def _hold(self, state: _State, event: OutboxEvent) -> None:
        state.held[event.id, event.event_id if self._marks else ""] = None
        if self._marks and len(state.held) > _MOST_HELD:
            del state.held[next(iter(state.held))]  # visible by now, or gone

    def _say_gone(self, aggregate: Closed, held: Iterable[tuple[int, str]]) -> None:
        """Say which rows of a closed aggregate somebody has deleted."""
        if not self._stay:
            return
        there = self._store.states(sorted({row_id for row_id, _ in held}))
        gone = [one for one in held if one[1] and there.get(one[0], ("", 0))[0] != one[1]]
        if gone:
            self._gone(aggregate, len(gone), first_id=min(gone)[0], first_event_id=min(gone)[1])

    def _gone(self, aggregate: Closed, rows: int, **first: object) -> None:
        self.gone += rows
        log.error(
            "rows that waited behind a refused one are gone from the table: such as were not sent "
            "before are not sent",
            aggregate_type=aggregate[0],
            aggregate_id=aggregate[1],
            rows=rows,
            **first,
        )

    def _add(self, kind: str, key: str | None, state: _State) -> None:
        if key is not None and (kind, key) not in self._closed:
            self._of_type[kind] += 1
        self._closed[kind, key] = state

    def _remove(self, aggregate: Closed) -> _State | None:
        state = self._closed.pop(aggregate, None)
        if state is not None and aggregate[1] is not None:
            self._of_type[aggregate[0]] -= 1
        return state

    def _state(self, kind: str, key: str | None) -> _State | None:
        """What holds the rows of an aggregate: its own state, or its type's."""
        return self._closed.get((kind, key)) or self._closed.get((kind, None))

    def _blocked(self, kind: str | None, key: str | None) -> list[Aggregate]:
        """The aggregates that wait behind a dead row: all, those of a type, or this one."""
        if self._on_dead == "release":
            return []
        return self._store.dead_aggregates(kind, key, _MOST_AGGREGATES + 1)

    def _has_room(self, kind: str = "", names: Iterable[str] = ()) -> bool:
        """Whether a checkpoint has room for what is closed and for these aggregates of a type,
        which are going to be closed."""
        more = sum(_size(kind, name) for name in names)
        self._names += more
        if self._names > _MOST_NAMES:
            self._names = sum(_size(*closed) for closed in self._closed) + more
        return self._names <= _MOST_NAMES

    def _pause(self, seconds: float) -> float:
        return max(seconds, len(self._closed) / _LOOKS_PER_S)

    def _absorb(self, kind: str, whole: _State) -> None:
        """Let the closed type stand for its aggregates."""
        if not self._of_type[kind]:
            return
        for other in [closed for closed in self._closed if closed[0] == kind]:
            absorbed = self._remove(other) if other[1] is not None else None
            if absorbed is not None:
                whole.held |= absorbed.held  # of rows: each is in one of the two
                whole.unseen |= absorbed.unseen


def _size(kind: str, key: str | None) -> int:
    return len(kind.encode()) + len((key or "").encode()) + 8
