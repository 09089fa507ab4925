"""One ordered pass over the rows that are pending for too long.

At least once: a crash between acknowledgement and mark sends the batch again. No database
transaction is open while Kafka is waited for. One pass at a time works on a table.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

import structlog

from cdc_relay.errors import RowsFailingError, SinkError, SinkUnavailableError, UnroutableError
from cdc_relay.outbox import OutboxEvent
from cdc_relay.router import Record, Router
from cdc_relay.store import Aggregate, PendingEvent, Store

_PROGRESS_S: Final = 5.0
_CLOSE_S: Final = 1.0

log: Any = structlog.get_logger("compensator")


class Delivery(Protocol):
    """What became of the records of one ``send``."""

    @property
    def refused(self) -> dict[int, str]:
        """Index in the sent sequence to the reason; faults of the record, not of the brokers."""


class Sink(Protocol):
    """What the compensator needs of ``cdc_relay.kafka.sink.IdempotentSink``."""

    def send(self, records: Sequence[Record]) -> Any:
        """Queue the records in order and return their delivery at once."""

    def wait(self, delivery: Any, timeout: float) -> None:
        """Return when each record is acknowledged or refused, or raise
        ``SinkUnavailableError`` after ``timeout`` seconds."""

    def close(self, timeout: float) -> None:
        """Give up what is still queued."""


@dataclass(slots=True)
class Summary:
    """What a run did. Rows are counted once per try."""

    sent: int = 0
    """Acknowledged by Kafka."""
    marked: int = 0
    """Of those, marked by us; another process may have marked the others."""
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
        open_sink: Callable[[], Sink],
        *,
        older_than_s: float,
        batch: int,
        send_timeout_s: float,
        stop: threading.Event,
    ) -> None:
        """``open_sink`` is called when there is something to send, so a pass with nothing to do
        needs no broker; and again after the brokers did not answer."""
        self._store = store
        self._router = router
        self._open_sink = open_sink
        self._sink: Sink | None = None
        self._older_than_s = older_than_s
        self._batch = batch
        self._send_timeout_s = send_timeout_s
        self._stop = stop
        self._next_progress = time.monotonic() + _PROGRESS_S
        self.summary = Summary()

    def run_pass(self) -> int:
        """Send every row that is due, lowest id first, and return how many were sent.

        Ends when none is left of those that were due at its beginning, or after the batch in hand
        when ``stop`` is set. ``summary.exit_code`` is 6 where rows failed or are left, else 0.
        Raises ``SinkError`` and ``SourceError``; what was acknowledged before is marked and
        counted, and no row is charged with a failure for it.
        """
        summary = self.summary
        sent, failed, dead = summary.sent, summary.failed, summary.dead
        scan = self._store.scan(self._older_than_s, self._batch)
        read = 0
        for batch in scan:
            read += len(batch)
            self._send_batch(batch, scan.closed)
            summary.batches += 1
            self._show_progress()
            if self._stop.is_set():
                break
        sent = summary.sent - sent
        summary.left = scan.held + read - sent - (summary.dead - dead)
        failing = summary.left or summary.failed > failed or summary.dead > dead
        summary.exit_code = RowsFailingError.exit_code if failing else 0
        return sent

    def close(self) -> None:
        """Close the sink; records that it still has queued are given up, their rows pending."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close(_CLOSE_S)

    def _send_batch(self, batch: list[PendingEvent], closed: set[Aggregate]) -> None:
        acknowledged: list[tuple[int, str]] = []
        try:
            for wave in waves(batch):
                acknowledged += self._send_wave(wave, closed)
        finally:
            # Also when Kafka fails in a later wave: what it has acknowledged it must not get
            # again. One UPDATE for the batch, not one for each wave.
            if acknowledged:
                self.summary.sent += len(acknowledged)
                self.summary.marked += self._store.mark_sent(acknowledged)

    def _send_wave(self, wave: list[PendingEvent], closed: set[Aggregate]) -> list[tuple[int, str]]:
        """Send a wave and return (id, event_id) of what Kafka acknowledged."""
        events: list[PendingEvent] = []
        records: list[Record] = []
        for pending in wave:
            if _aggregate(pending.event) in closed:
                continue
            try:
                records.append(self._router.route(pending.event))
                events.append(pending)
            except UnroutableError as error:
                self._park(pending, str(error), closed)
        if not records:
            return []
        refused = self._deliver(records).refused
        for index, reason in refused.items():
            self._park(events[index], reason, closed)
        return [
            (pending.event.id, pending.event.event_id)
            for index, pending in enumerate(events)
            if index not in refused
        ]

    def _deliver(self, records: list[Record]) -> Delivery:
        if self._sink is None:
            self._sink = self._open_sink()
        try:
            delivery: Delivery = self._sink.send(records)
            self._wait(self._sink, delivery)
        except SinkError:
            self.close()
            raise
        return delivery

    def _wait(self, sink: Sink, delivery: Delivery) -> None:
        """Wait for a delivery in short steps, so that ``stop`` is noticed."""
        deadline = time.monotonic() + self._send_timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                return sink.wait(delivery, max(0.0, min(left, 1.0)))
            except SinkUnavailableError:
                if self._stop.is_set():
                    raise
                if left <= 1.0:
                    raise SinkUnavailableError(
                        f"no acknowledgement from Kafka within {self._send_timeout_s:g} s: "
                        f"are the brokers up? (send_timeout)"
                    ) from None

    def _park(self, pending: PendingEvent, reason: str, closed: set[Aggregate]) -> None:
        """Count the failure of a row; its aggregate waits for it."""
        event = pending.event
        closed.add(_aggregate(event))
        failure = self._store.record_failure(event, pending.retry_count, reason)
        about = log.bind(
            event_id=event.event_id,
            aggregate_type=event.aggregate_type,
            aggregate_id=event.aggregate_id,
            event_type=event.event_type,
            reason=reason,
            tries=failure.tries,
        )
        if failure.outcome == "dead":
            self.summary.dead += 1
            about.error("row is dead, its aggregate is blocked")
        else:
            self.summary.failed += 1
            about.warning("row parked", next_try_s=failure.delay_s)

    def _show_progress(self) -> None:
        now = time.monotonic()
        if now >= self._next_progress:
            self._next_progress = now + _PROGRESS_S
            log.info("compensating", sent=self.summary.sent, failed=self.summary.failed)


def waves(batch: list[PendingEvent]) -> list[list[PendingEvent]]:
    """Split a batch so that no wave holds two events of one aggregate, earlier events in earlier
    waves. A wave is sent when the one before is settled: a refused event is never overtaken, and
    a batch of different aggregates is still one wave."""
    depth: Counter[Aggregate] = Counter()
    result: list[list[PendingEvent]] = []
    for pending in batch:
        aggregate = _aggregate(pending.event)
        if depth[aggregate] == len(result):
            result.append([])
        result[depth[aggregate]].append(pending)
        depth[aggregate] += 1
    return result


def _aggregate(event: OutboxEvent) -> Aggregate:
    return event.aggregate_type, event.aggregate_id
