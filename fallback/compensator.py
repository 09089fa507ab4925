"""One ordered pass over the rows that are pending for too long.

Rows are read in rounds: ``batch`` rows at first, more under a backlog, so that a Kafka transaction
is worth its price. While one round is on its way, the marks of the last one are written. (Reading
ahead in a thread of its own was slower: 13,100 rows/s against 17,000.) No database transaction is
open while Kafka is waited for. One pass at a time works on a table; several take turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import structlog

from cdc_relay import faults
from cdc_relay.errors import (
    RowsFailingError,
    SinkError,
    SourceUnavailableError,
    UnroutableError,
)
from cdc_relay.kafka.sink import FencedError
from cdc_relay.kafka.topics import Refusal
from cdc_relay.marker import Marker, parts
from cdc_relay.outbox import OutboxEvent
from cdc_relay.router import Record, Router
from cdc_relay.store import PendingEvent, PendingScan, Store
from cdc_relay.vitals import Vitals

from .coordination import Coordination

_PROGRESS_S: Final = 5.0
# Rows of one Kafka transaction under a backlog.
_ROUND_ROWS: Final = 4000
# Sent rows whose marks may be outstanding; the record that names them is bounded as well.
_MOST_OWED: Final = 20_000
_MARKS_S: Final = 30.0
# How often a pass that was fenced begins again.
_TURNS: Final = 3

log: Any = structlog.get_logger("compensator")

_Item = tuple[PendingEvent, Record]


@dataclass(slots=True)
class Summary:
    """What a run did. Rows are counted once per try."""

    relay: str | None = None
    """What was seen of the relay: ``alive``, ``dead``, ``none`` (no checkpoint yet), ``forced``
    (not looked for); None where nothing was to do."""
    position: str | None = None
    """Where the relay stood."""
    sent: int = 0
    """Acknowledged by Kafka."""
    marked: int = 0
    """Of those, marked by us; another process may have marked the others."""
    healed: int = 0
    """Marked without being sent: an earlier pass, or the dead relay, had sent them."""
    left_to_relay: int = 0
    """Old enough, but a living relay has not reached them, is about to mark them, or keeps their
    aggregate back."""
    late: int = 0
    """Of those, what the relay did not reach within ``relay_wait``, or has not come to although it
    reads the table itself."""
    failed: int = 0
    """Refused, and parked for a later try."""
    dead: int = 0
    """Refused once too often."""
    left: int = 0
    """Old enough, yet still pending after the last pass: parked, or behind a row that is."""
    batches: int = 0
    seconds: float = 0.0
    exit_code: int = 0
    error: str | None = None

    def as_dict(self) -> dict[str, object]:
        """The fields by name, as ``--json`` prints them."""
        return asdict(self) | {"seconds": round(self.seconds, 3)}


class Compensator:
    """Runs passes. One thread; ``stop`` may be set from another or from a signal handler."""

    def __init__(
        self,
        store: Store,
        router: Router,
        coordination: Coordination,
        *,
        older_than_s: float,
        batch: int,
        stop: threading.Event,
        turn_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """``coordination`` is asked only when there is something to send, so a pass with nothing
        to do needs no broker. ``turn_over`` says when another pass has to have its turn."""
        self._store = store
        self._router = router
        self._coordination = coordination
        self._older_than_s = older_than_s
        self._batch = batch
        self._stop = stop
        self._turn_over = turn_over
        self._marker: Marker | None = None
        self._vitals = Vitals()
        self._handled = 0
        self._next_progress = time.monotonic() + _PROGRESS_S
        self.summary = Summary()
        self.handed_over = False
        """Whether the last pass ended early, for another one's turn."""

    def run_pass(self) -> int:
        """Send every row that is due and the pass's to send, lowest id first per aggregate, mark
        it, and return how many were sent.

        Ends when none is left of those that were due at its beginning, or after the round in hand
        when ``stop`` is set or its turn is over. ``summary.exit_code`` is 6 where rows failed or
        are left behind such, else 0: rows that are left to a living relay are its own. A pass that
        is fenced looks again who else there is. Raises ``SinkError`` and ``SourceError``; what was
        acknowledged before is marked or owed, and no row is charged with a failure for it.
        """
        summary = self.summary
        before, failed = summary.sent, summary.failed + summary.dead
        self.handed_over = False
        for turn in range(1, _TURNS + 1):
            scan = self._store.scan(self._older_than_s, self._batch)
            try:
                self._turn(scan)
                break
            except FencedError as error:
                log.warning("a relay or another pass took over", reason=str(error), turn=turn)
                self.release()
                if self._stop.is_set() or self._hands_over():
                    break
            finally:
                self._count(scan)
        else:
            log.warning("rows are left: others keep taking over", turns=_TURNS)
        failing = summary.left or summary.failed + summary.dead > failed
        summary.exit_code = RowsFailingError.exit_code if failing else 0
        return summary.sent - before

    def close(self) -> None:
        """Give up what is open; rows that are not acknowledged stay pending."""
        if self._marker is not None:
            self._marker.wait(_MARKS_S / 10)
            self._marker.stop(1.0)
            self.summary.marked = self._vitals.counters.marked
        self._coordination.close()

    def _turn(self, scan: PendingScan) -> None:
        self.summary.left = self.summary.left_to_relay = self.summary.late = 0
        if not self._store.newest_pending(self._older_than_s):
            return
        self._coordination.begin(scan)
        if self._coordination.locked:
            self._ready_marker().adopt(self._coordination.locked)
        log.info("pass begins", relay=self._coordination.relay)
        for round_ in self._rounds(scan):
            self._send(round_, scan)
            self._show_progress()
            if self._stop.is_set() or self._hands_over():
                break
        self._finish_marks()
        if self.handed_over:
            self.release()

    def _hands_over(self) -> bool:
        self.handed_over = self._turn_over()
        return self.handed_over

    def release(self) -> None:
        """Give up the producer: another pass takes it over now, and the next one of ours asks
        around anew."""
        self._coordination.close()

    # --- reading ---------------------------------------------------------------------------------

    def _rounds(self, scan: PendingScan) -> Iterator[list[PendingEvent]]:
        """The events that are the pass's, in rounds."""
        for found in scan.ids():
            scan.limit = max(self._batch, min(scan.limit * 2, _ROUND_ROWS))
            owed = self._marker.owed() if self._marker is not None else {}
            ids = [row_id for row_id in found if row_id not in owed]
            if not ids:
                continue
            mine = self._coordination.missed(ids, scan)
            if mine is None and self._stop.is_set():
                return
            if mine is None:
                left = self._store.count_pending(self._older_than_s, ids[0])
                self.summary.left_to_relay += left
                self.summary.late += left
                log.warning(f"{self._coordination.why_left}: rows are left to it", rows=left)
                return
            self.summary.left_to_relay += len(ids) - len(mine)
            rest: Sequence[int] = mine
            while rest:
                events, rest = self._store.events(rest, _ROUND_ROWS)
                if events:
                    yield events

    # --- sending ---------------------------------------------------------------------------------

    def _send(self, events: list[PendingEvent], scan: PendingScan) -> None:
        """Deliver a round. Refused rows are parked, and everything of their aggregates stays
        behind them."""
        sent = self.summary.sent
        dead = self.summary.dead
        relays = 0
        items: list[_Item] = []
        for pending in events:
            aggregate = _aggregate(pending.event)
            if scan.holds(aggregate):
                relays += scan.others(aggregate)
                continue
            try:
                items.append((pending, self._router.route(pending.event)))
            except UnroutableError as error:
                self._park(pending, Refusal(str(error)), scan)
        while items:
            refused, there = self._deliver(items)
            if not refused:
                break
            # In their order: what stands before a refused event of its aggregate goes again.
            again: list[_Item] = []
            for index, item in enumerate(items):
                if index in there or scan.holds(_aggregate(item[0].event)):
                    continue
                if index in refused:
                    self._park(item[0], refused[index], scan)
                else:
                    again.append(item)
            items = again
        summary = self.summary
        summary.left += len(events) - (summary.sent - sent) - (summary.dead - dead) - relays
        summary.left_to_relay += relays
        self._handled += len(events)
        summary.batches = -(-self._handled // self._batch)

    def _deliver(self, items: list[_Item]) -> tuple[dict[int, Refusal], frozenset[int]]:
        """What was refused and, if anything was, what is there nevertheless, by index."""
        events = [pending.event for pending, _ in items]
        marker = self._ready_marker()
        marks = parts(events)
        owed = marker.owed_with(marks)
        try:
            refused, there = self._coordination.deliver([record for _, record in items], owed)
        except SinkError:
            self._coordination.close()
            raise
        sent = events if not refused else [events[index] for index in sorted(there)]
        if sent:
            faults.point("pass_delivered")
            self.summary.sent += len(sent)
            marker.owe(parts(sent) if refused else marks)
        return refused, there

    def _ready_marker(self) -> Marker:
        """The marker, when it is not too far behind."""
        if self._marker is None:
            self._marker = Marker(self._store, self._vitals)
            self._marker.start()
        give_up_at = time.monotonic() + _MARKS_S
        while self._marker.owed_count >= _MOST_OWED:
            self._check(self._marker, give_up_at)
            time.sleep(0.01)
        return self._marker

    def _finish_marks(self) -> None:
        """Wait for the marks and say that none is owed."""
        marker = self._marker
        if marker is not None:
            give_up_at = time.monotonic() + _MARKS_S
            while not marker.wait(0.2):
                self._check(marker, give_up_at)
        faults.point("pass_marked")
        self._coordination.marked()
        faults.point("pass_done")

    @staticmethod
    def _check(marker: Marker, give_up_at: float) -> None:
        if marker.error is not None:
            raise marker.error
        if time.monotonic() > give_up_at:
            raise SourceUnavailableError(
                f"{marker.owed_count} sent rows could not be marked within {_MARKS_S:g} s; the "
                "next pass marks them without sending them again"
            )

    def _park(self, pending: PendingEvent, refusal: Refusal, scan: PendingScan) -> None:
        """Count the failure of a row; its aggregate waits for it (its type, where the topic is at
        fault)."""
        event = pending.event
        scan.closed.add((event.aggregate_type, None if refusal.topic else event.aggregate_id))
        faults.point("pass_parking")
        failure = self._store.record_failure(event, pending.retry_count, refusal.reason)
        about = log.bind(
            event_id=event.event_id,
            aggregate_type=event.aggregate_type,
            aggregate_id=event.aggregate_id,
            event_type=event.event_type,
            reason=refusal.reason,
            tries=failure.tries,
        )
        if failure.outcome == "dead":
            self.summary.dead += 1
            about.error("row is dead, its aggregate is blocked")
        else:
            self.summary.failed += 1
            about.warning("row parked", next_try_s=failure.delay_s)

    # --- the account -----------------------------------------------------------------------------

    def _count(self, scan: PendingScan) -> None:
        summary, coordination = self.summary, self._coordination
        summary.left += scan.held
        summary.left_to_relay += scan.held_by_others
        summary.healed = coordination.healed
        summary.relay = coordination.relay or summary.relay
        if coordination.checkpoint is not None:
            summary.position = str(coordination.checkpoint.position)
        summary.marked = self._vitals.counters.marked

    def _show_progress(self) -> None:
        now = time.monotonic()
        if now >= self._next_progress:
            self._next_progress = now + _PROGRESS_S
            log.info("compensating", sent=self.summary.sent, failed=self.summary.failed)


def _aggregate(event: OutboxEvent) -> tuple[str, str]:
    return event.aggregate_type, event.aggregate_id
