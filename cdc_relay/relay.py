"""The relay: the loop that carries rows from the source to Kafka, and its graceful stop.

Three threads. The reader decodes the binlog into batches (a bounded queue: when Kafka is slow, the
reader stops reading). The main thread routes, sends, collects acknowledgements in order and writes
checkpoints. The marker marks acknowledged rows as sent. The order of durability is always:
records acknowledged, then the checkpoint behind them, with the marks that it owes named in it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import structlog

from cdc_relay.binlog.rows import UnreadRow
from cdc_relay.binlog.stream import Batch
from cdc_relay.config import Settings
from cdc_relay.errors import SourceUnavailableError, UnroutableError
from cdc_relay.kafka.checkpoints import Checkpoint, fingerprint
from cdc_relay.kafka.sink import Delivery, KafkaSink
from cdc_relay.outbox import PENDING, OutboxEvent
from cdc_relay.position import Position
from cdc_relay.router import Record, Router
from cdc_relay.store import Aggregate, Store

log = structlog.get_logger(__name__)

_T = TypeVar("_T")

_QUEUED_BATCHES: Final = 16
_CHECKPOINT_PAUSE_S: Final = 0.2
_REOPEN_PAUSE_S: Final = 5.0
_PROGRESS_PAUSE_S: Final = 10.0
_MARK_ROWS: Final = 2000
_SLICE_ROWS: Final = 5000
# A row comes out of the log a moment before its own transaction becomes visible to SELECT.
_VISIBLE_WITHIN_S: Final = 5.0


class Source(Protocol):
    """Anything that gives committed rows in commit order, with the boundary behind them."""

    def batches(self, start: Position) -> Iterator[Batch]:
        """Yield batches from ``start`` on until ``stop``; runs in the reader's thread."""
        ...

    def stop(self) -> None:
        """Make ``batches`` return soon; called from another thread."""
        ...


@dataclass(slots=True)
class Counters:
    """What the relay has done since it started."""

    received: int = 0
    sent: int = 0
    marked: int = 0
    parked: int = 0
    held: int = 0
    """Rows left pending because an earlier row of their aggregate is parked."""
    gone: int = 0
    """Rows that had to be read back and were not there any more."""


@dataclass(slots=True)
class _InFlight:
    """A batch whose records are with Kafka."""

    position: Position | None
    """The boundary behind it; None where the batch goes on."""
    events: Sequence[OutboxEvent]
    delivery: Delivery


class Relay:
    """Runs once; not reusable. ``run`` belongs to one thread, ``stop`` to any."""

    def __init__(
        self, settings: Settings, source: Source, router: Router, sink: KafkaSink, store: Store
    ) -> None:
        self._settings = settings
        self._source = source
        self._router = router
        self._sink = sink
        self._store = store
        self._batches: queue.Queue[Batch | BaseException] = queue.Queue(_QUEUED_BATCHES)
        self._stopping = threading.Event()
        self._in_flight: deque[_InFlight] = deque()
        self._rows_in_flight = 0
        self._marker = Marker(store, self._stopping)
        self._closed: dict[Aggregate, None] = {}
        self._position: Position | None = None
        self._saved: Checkpoint | None = None
        self._saving: Delivery | None = None
        self.counters = Counters()

    def stop(self) -> None:
        """Ask ``run`` to finish what it holds and return; safe from a signal handler."""
        self._stopping.set()
        self._source.stop()

    def run(self, start: Checkpoint, until: Position | None = None) -> None:
        """Carry rows from ``start`` on until ``stop``, or until everything up to ``until`` is
        acknowledged, marked and checkpointed.

        Returns after a clean end. Raises the source's and the sink's errors that trying again
        cannot mend; what was acknowledged before is in the last checkpoint or will be sent again.
        """
        self._position = start.position
        self._closed = dict.fromkeys(start.closed)
        try:
            self._heal(start)
        except StopAskedError:
            return
        self._save(force=True)
        reader = threading.Thread(
            target=self._read, args=(start.position,), name="reader", daemon=True
        )
        reader.start()
        self._marker.start()
        try:
            self._loop(until)
        except StopAskedError:
            pass
        finally:
            self._stopping.set()
            self._source.stop()
            self._finish(time.monotonic() + self._settings.stop_grace)
            reader.join(timeout=5)

    # --- the reader's thread ---------------------------------------------------------------------

    def _read(self, start: Position) -> None:
        try:
            for batch in self._source.batches(start):
                while not self._stopping.is_set():
                    try:
                        self._batches.put(batch, timeout=0.5)
                        break
                    except queue.Full:
                        continue
        except BaseException as error:
            self._batches.put(error)

    # --- the main thread -------------------------------------------------------------------------

    def _loop(self, until: Position | None) -> None:
        next_reopen = next_progress = time.monotonic()
        while not self._stopping.is_set():
            batch = self._next_batch()
            if batch is not None:
                self._send(batch)
            self._settle()
            self._marker.check()
            self._save()
            now = time.monotonic()
            if now >= next_reopen:
                self._reopen()
                next_reopen = now + _REOPEN_PAUSE_S
            if now >= next_progress:
                log.info("progress", position=str(self._position), **self._numbers())
                next_progress = now + _PROGRESS_PAUSE_S
            if until is not None and self._reached(until):
                return

    def _next_batch(self) -> Batch | None:
        full = (
            self._rows_in_flight >= self._settings.queue_rows
            or self._marker.owed_count >= self._settings.queue_rows
        )
        try:
            if full:
                self._sink.poll(0.05)
                return None
            if self._in_flight:
                self._sink.poll(0)
                item = self._batches.get(timeout=0.001)
            else:
                item = self._batches.get(timeout=0.05)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        return item

    def _send(self, batch: Batch) -> None:
        last = max(0, len(batch.rows) - 1) // _SLICE_ROWS * _SLICE_ROWS
        for start in range(0, last + 1, _SLICE_ROWS):
            rows = batch.rows[start : start + _SLICE_ROWS]
            # Only the last slice stands at a boundary.
            self._send_rows(rows, batch.position if start == last else None)

    def _send_rows(
        self, rows: Sequence[OutboxEvent | UnreadRow], position: Position | None
    ) -> None:
        events: list[OutboxEvent] = []
        records: list[Record] = []
        for event in self._events(rows):
            self.counters.received += 1
            if self._closed and (event.aggregate_type, event.aggregate_id) in self._closed:
                self.counters.held += 1
                continue
            try:
                records.append(self._router.route(event))
                events.append(event)
            except UnroutableError as error:
                self._park(event, str(error))
        delivery = self._sink.send(records)
        self._rows_in_flight += len(events)
        self._in_flight.append(_InFlight(position, events, delivery))

    def _settle(self) -> None:
        """Take what is acknowledged, oldest first: only then may the position move."""
        while self._in_flight and self._in_flight[0].delivery.settled:
            done = self._in_flight.popleft()
            self._rows_in_flight -= len(done.events)
            refused = done.delivery.refused
            for index, reason in sorted(refused.items()):
                self._park(done.events[index], reason)
            sent = [
                (event.id, event.event_id)
                for index, event in enumerate(done.events)
                if index not in refused
            ]
            self.counters.sent += len(sent)
            if self._settings.mark == "update":
                self._marker.owe(sent)
            self._position = done.position or self._position

    def _save(self, *, force: bool = False) -> None:
        """Write a checkpoint when something moved, not more often than every 200 ms."""
        if self._saving is not None:
            if not self._saving.settled:
                return
            if self._saving.refused:
                log.error("the checkpoint was refused", reason=self._saving.refused[0])
            self._saving = None
        assert self._position is not None
        last = self._saved
        owed = self._marker.owed()
        moved = last is None or last.position != self._position
        moved = moved or tuple(self._closed) != tuple(last.closed if last else ())
        if not force and not moved and (not last or bool(last.owed) == bool(owed)):
            return
        if not force and last is not None and time.time() - last.time < _CHECKPOINT_PAUSE_S:
            return
        checkpoint = Checkpoint(
            self._position,
            [(row_id, fingerprint(event_id)) for row_id, event_id in owed],
            tuple(self._closed),
        )
        self._saving = self._sink.send([checkpoint.record(self._settings.name)])
        self._saved = checkpoint

    def _reached(self, until: Position) -> bool:
        return (
            not self._in_flight
            and self._position is not None
            and self._position.reached(until)
            and not self._marker.owed_count
        )

    def _finish(self, deadline: float) -> None:
        """Settle, mark and checkpoint what was sent, until ``deadline``; the rest is left in the
        table and before the checkpoint, so the next start takes it up."""
        try:
            while time.monotonic() < deadline and (
                self._in_flight or (self._marker.owed_count and self._marker.error is None)
            ):
                self._sink.poll(0.02)
                self._settle()
            self._marker.stop(max(0.1, deadline - time.monotonic()))
            self._saving = None
            self._save(force=True)
            while time.monotonic() < deadline and not self._saving_done():
                self._sink.poll(0.02)
        finally:
            self._sink.close(max(0.1, deadline - time.monotonic()))
            log.info("stopped", position=str(self._position), **self._numbers())

    def _saving_done(self) -> bool:
        return self._saving is None or self._saving.settled

    def _numbers(self) -> dict[str, int]:
        self.counters.marked = self._marker.marked
        return {
            "received": self.counters.received,
            "sent": self.counters.sent,
            "marked": self.counters.marked,
            "parked": self.counters.parked,
            "held": self.counters.held,
            "in_flight": self._rows_in_flight,
        }

    # --- rows that need the table ----------------------------------------------------------------

    def _heal(self, start: Checkpoint) -> None:
        """Mark what the predecessor had acknowledged and not marked."""
        if not start.owed or self._settings.mark != "update":
            return
        prints = dict(start.owed)
        pending = self._patiently(lambda: self._store.events(list(prints)))
        owed = [
            (found.event.id, found.event.event_id)
            for found in pending
            if fingerprint(found.event.event_id) == prints[found.event.id]
        ]
        if owed:
            self._patiently(lambda: self._store.mark_sent(owed))
        log.info("marks of the last run healed", owed=len(start.owed), marked=len(owed))

    def _events(self, rows: Sequence[OutboxEvent | UnreadRow]) -> Iterator[OutboxEvent]:
        """The events of ``rows`` in their order; those that the log alone could not give are read
        back together."""
        unread = {row.id: row.reason for row in rows if isinstance(row, UnreadRow)}
        found = self._read_back(unread) if unread else {}
        for row in rows:
            event = row if isinstance(row, OutboxEvent) else found.get(row.id)
            if event is not None:
                yield event

    def _read_back(self, unread: dict[int, str]) -> dict[int, OutboxEvent]:
        """The pending ones among these rows. Those that are not pending any more were sent, or
        given up, by somebody else."""
        found: dict[int, OutboxEvent] = {}
        missing = list(unread)
        deadline = time.monotonic() + _VISIBLE_WITHIN_S
        while missing and time.monotonic() < deadline and not self._stopping.is_set():
            rows = self._patiently(lambda ids=missing: self._store.rows(ids))  # type: ignore[misc]
            found.update({event.id: event for event, status in rows if status == PENDING})
            there = {event.id for event, _ in rows}
            missing = [row_id for row_id in missing if row_id not in there]
            if missing:
                time.sleep(0.02)
        if missing and self._stopping.is_set():
            raise StopAskedError
        if missing:
            self.counters.gone += len(missing)
            log.error(
                "rows could not be read back: they are gone",
                rows=len(missing),
                first_id=missing[0],
                reason=unread[missing[0]],
            )
        return found

    def _park(self, event: OutboxEvent, reason: str) -> None:
        """Close the event's aggregate and put the row on the ladder; the compensator sends it."""
        self._closed[event.aggregate_type, event.aggregate_id] = None
        self.counters.parked += 1
        failure = self._patiently(lambda: self._store.record_failure(event, 0, reason))
        log.error(
            "row parked; its aggregate waits",
            event_id=event.event_id,
            aggregate_type=event.aggregate_type,
            aggregate_id=event.aggregate_id,
            event_type=event.event_type,
            reason=reason,
            outcome=failure.outcome,
        )

    def _reopen(self) -> None:
        """Let the aggregates flow again whose pending rows are all sent: everything committed up
        to now is out, so what the stream brings from now on is in order."""
        for aggregate in list(self._closed):
            try:
                if not self._store.has_pending(*aggregate):
                    del self._closed[aggregate]
                    log.info(
                        "aggregate flows again",
                        aggregate_type=aggregate[0],
                        aggregate_id=aggregate[1],
                    )
            except SourceUnavailableError:
                return

    def _patiently(self, action: Callable[[], _T]) -> _T:
        return patiently(action, self._stopping)


class Marker:
    """Marks acknowledged rows as sent, in a thread of its own, in batches.

    ``owe`` and ``owed`` belong to the relay's thread. A database that is away costs nothing but
    time: the rows stay owed, and the checkpoint names them.
    """

    def __init__(self, store: Store, stopping: threading.Event) -> None:
        self._store = store
        self._stopping = stopping
        self._lock = threading.Condition()
        self._owed: dict[int, str] = {}
        self._ended = False
        self.marked = 0
        self.error: BaseException | None = None
        """Why it ended by itself; what is owed stays owed."""
        self._thread = threading.Thread(target=self._run, name="marker", daemon=True)

    def start(self) -> None:
        """Start marking."""
        self._thread.start()

    def owe(self, rows: Iterable[tuple[int, str]]) -> None:
        """Add acknowledged rows."""
        with self._lock:
            self._owed.update(rows)
            self._lock.notify()

    @property
    def owed_count(self) -> int:
        """Rows that are acknowledged and not yet marked."""
        return len(self._owed)

    def owed(self) -> list[tuple[int, str]]:
        """Those rows."""
        with self._lock:
            return list(self._owed.items())

    def check(self) -> None:
        """Raise what ended the thread: an error that trying again cannot mend."""
        if self.error is not None:
            raise self.error

    def stop(self, timeout: float) -> None:
        """End the thread after the statement it is in."""
        with self._lock:
            self._ended = True
            self._lock.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._owed and not self._ended:
                    self._lock.wait(0.5)
                if self._ended:
                    return
                rows = []
                for row in self._owed.items():
                    rows.append(row)
                    if len(rows) >= _MARK_ROWS:
                        break
            try:
                self.marked += self._store.mark_sent(rows)
            except SourceUnavailableError as error:
                log.warning("marks wait for the database", owed=len(self._owed), reason=str(error))
                self._stopping.wait(1.0)
                continue
            except BaseException as error:
                self.error = error
                return
            with self._lock:
                for row_id, event_id in rows:
                    if self._owed.get(row_id) == event_id:
                        del self._owed[row_id]


class StopAskedError(Exception):
    """The relay was asked to stop while a row was in work; the row stays before the checkpoint."""


def patiently(action: Callable[[], _T], stopping: threading.Event) -> _T:
    """Run ``action`` until the database answers, with growing pauses. Raises ``StopAskedError``
    when it does not and ``stopping`` is set."""
    pause = 0.1
    while True:
        try:
            return action()
        except SourceUnavailableError as error:
            if stopping.is_set():
                raise StopAskedError from None
            log.warning("waiting for the database", reason=str(error), retry_in_seconds=pause)
            stopping.wait(pause)
            pause = min(pause * 2, 5.0)
