"""The relay: the loop that carries rows from the source to Kafka while this process owns the shard.

Three threads. The reader decodes the binlog into batches (the hand-over is bounded: when Kafka is
slow, the reader stops reading). The relay's own thread takes what is waiting as one group, routes
it and delivers it with the checkpoint behind it. The marker marks what was delivered. So a group
is large when much is waiting and one row when the relay keeps up.

With ``source = "polling"`` there is no reader: the same thread walks over the pending rows.

Who may have sent a row already (a sweep, a retry of a parked aggregate, the compensator) is asked
of the table: up to the position ``doubtful_until`` a row of the stream goes out only if the table
still has it pending.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Final, Protocol, TypeVar

import structlog

from cdc_relay import faults
from cdc_relay.binlog.rows import UnreadRow
from cdc_relay.binlog.stream import Batch
from cdc_relay.config import Settings
from cdc_relay.errors import SinkUnavailableError, SourceUnavailableError, UnroutableError
from cdc_relay.handover import HandOver
from cdc_relay.kafka.checkpoints import Checkpoint
from cdc_relay.kafka.sink import CheckpointTopicGoneError, Sink
from cdc_relay.kafka.topics import Refusal
from cdc_relay.marker import Marker, Part, heal, parts
from cdc_relay.outbox import PENDING, OutboxEvent
from cdc_relay.parking import Closed, Parking
from cdc_relay.position import Position
from cdc_relay.router import Record, Router
from cdc_relay.sizes import Sizes
from cdc_relay.store import Aggregate, PendingEvent, PendingScan, Store
from cdc_relay.vitals import Vitals

log = structlog.get_logger(__name__)

_T = TypeVar("_T")
_Item = tuple[OutboxEvent, Record]

# What may wait while a group is on its way, and so the size of the next one: a Kafka transaction
# costs as much as some hundred rows.
_GROUP_ROWS: Final = 1000
_GROUP_BYTES: Final = 8 * 1024 * 1024
_SWEEP_ROWS: Final = 5000
_TICK_S: Final = 0.1
_PROGRESS_PAUSE_S: Final = 10.0
_LEARN_PAUSE_S: Final = 5.0
_FENCE_PAUSE_S: Final = 1.0
# Parked aggregates are tried for so long, then it is the stream's turn.
_RETRIES_S: Final = 0.2
# A stream that is behind for longer than this no longer holds up the parked aggregates.
_BEHIND_S: Final = 300.0
# Owed marks stand in every checkpoint, and a Kafka record holds a megabyte by default: these, and
# those of one more group, however large its transactions are.
_MOST_OWED: Final = 50_000
# Rows of open transactions at the anchor, more than which are left to the compensator.
_MOST_UNSEEN: Final = 100_000
# Of the time to stop, what is kept for the last checkpoint.
_LAST_SAVE_S: Final = 3.0
# What a group that is on its way may take, in all, when a stop is asked.
_IN_FLIGHT_S: Final = 5.0
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

    def current(self) -> Position:
        """The end of the source now."""
        ...

    def anchor(self) -> Position:
        """The same, with what tells a log that has begun anew from this one."""
        ...

    def waits(self, position: Position, end: Position) -> str:
        """Why ``position`` cannot be judged yet by a source that ends at ``end`` now, in words;
        empty where it can."""
        ...


class StopAskedError(Exception):
    """The relay was asked to stop while rows were in work; they stay before the checkpoint."""


class Relay:
    """One term of ownership; not reusable. ``run`` belongs to one thread, ``stop`` to any.

    ``tick`` is called several times a second from ``run``'s thread; it takes part in the group and
    raises when the shard is lost.
    """

    def __init__(
        self,
        settings: Settings,
        source: Source,
        router: Router,
        sink: Sink,
        store: Store,
        stopping: threading.Event,
        tick: Callable[[], None],
        vitals: Vitals,
        fence_pass: Callable[[], Checkpoint | None] = lambda: None,
    ) -> None:
        """``fence_pass`` ends what a compensator's pass has open and returns its last word."""
        self._settings = settings
        self._source = source
        self._router = router
        self._sink = sink
        self._store = store
        self._stopping = stopping
        self._told: dict[str, object] = {}
        self._tick = tick
        self._next_tick = 0.0
        self._next_learn = 0.0
        self._next_fence = 0.0
        self._hand_over = HandOver(min(settings.queue_rows, _GROUP_ROWS), _GROUP_BYTES)
        self._marks = settings.mark != "none"
        self._most_owed = min(settings.queue_rows, _MOST_OWED)
        self._marker = Marker(store, vitals)
        self._parking = Parking(store, settings.on_dead, settings.mark)
        self._sizes = Sizes(table_keeps=self._marks)
        self._under_way = 0.0  # since when there is something to deliver
        self._behind: tuple[Position, float] | None = None
        self._caught_up = False
        self._checkpoint: Checkpoint = None  # type: ignore[assignment]
        self._moved: Position | None = None
        self._saved_at = 0.0
        self._finish_by = 0.0
        self._in_flight_s = max(0.0, min(_IN_FLIGHT_S, settings.stop_grace - _LAST_SAVE_S))
        self._half = False  # whether a group of the stream is in work
        self._vitals = vitals
        self.counters = vitals.counters
        self._end_pass = fence_pass
        self._polling = settings.source == "polling"
        self._full = False

    def run(self, start: Checkpoint, until: Position | None = None) -> None:
        """Carry rows from ``start`` on until ``stopping``, or until everything up to ``until`` is
        delivered and marked.

        Returns after a clean end. Raises what ``tick``, the source and the sink raise; what was
        delivered before is in the last checkpoint.
        """
        self._checkpoint = start
        self._parking.load(start.closed, start.held)
        reader: threading.Thread | None = None
        orderly = False
        try:
            if start.sweeping or self._polling:
                # A pass that looks from now on leaves the table to the sweep, or to the polls.
                record = replace(start, time=time.time()).record(self._settings.name)
                self._sink.deliver([], record, self._going_on)
            else:
                reader = self._begin_to_read()  # what follows does not keep it waiting
            self._heal(start)
            self._fence_pass()
            self._marker.start()
            if start.sweeping:
                self._sweep()
            else:
                if start.closed and start.anchor and not self._polling:
                    self._wait_for_unseen(set(start.closed))
                self._delivered_checkpoint(self._next_checkpoint([], [], None))
            if self._polling:
                self._poll(once=until is not None)
                orderly = True
                return
            reader = reader or self._begin_to_read()
            self._loop(until)
            orderly = True
        except CheckpointTopicGoneError:
            # What is owed stands nowhere now, and the next term would send it again.
            self._marker.wait(self._settings.stop_grace)
            raise
        except (StopAskedError, SinkUnavailableError) as error:
            orderly = self._stopping.is_set()
            if not orderly and isinstance(error, SinkUnavailableError):
                raise
        finally:
            self._hand_over.close()
            self._source.stop()
            self._finish(time.monotonic() + self._settings.stop_grace, orderly)
            if reader is not None:
                reader.join(timeout=5)

    # --- the reader's thread ---------------------------------------------------------------------

    def _begin_to_read(self) -> threading.Thread:
        reader = threading.Thread(target=self._read, name="reader", daemon=True)
        reader.start()
        return reader

    def _read(self) -> None:
        reading = self._vitals.reading
        reading.begin()
        try:
            for batch in self._source.batches(self._checkpoint.position):
                reading.handing_on = True
                if not self._hand_over.put(batch):
                    return
                reading.handed_on()
        except BaseException as error:
            self._hand_over.fail(error)
        finally:
            reading.end()

    # --- the loop --------------------------------------------------------------------------------

    def _loop(self, until: Position | None) -> None:
        next_progress = time.monotonic()
        while not self._stopping.is_set():
            self._keep_up()
            group = self._gather()
            if group:
                self._carry(group)
            else:
                self._save()
            self._retry_parked()
            if time.monotonic() >= next_progress:
                self._log_progress()
                next_progress = time.monotonic() + _PROGRESS_PAUSE_S
            if until is not None and self._reached(until):
                return

    def _keep_up(self) -> None:
        """Take part in the group; raise what the marker cannot mend."""
        now = self._vitals.turned = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + _TICK_S
            self._vitals.owed = self._marker.owed_count
            self._tick()
            self._sink.poll()
            if self._marker.error is not None:
                raise self._marker.error

    def _gather(self) -> list[Batch]:
        """Everything that waits; waits a little when nothing does. Nothing while too much is owed,
        or held where nothing is marked: both stand in every checkpoint."""
        full = self._parking.full
        if full:
            self._vitals.waiting = "for refused rows: too many wait behind them"
        if full != self._full:
            self._full = full
            if full:
                log.error("too many rows wait behind refused ones: the relay reads no further")
            else:
                self._vitals.waiting = ""
        if full or self._marker.owed_count >= self._most_owed:
            time.sleep(0.01)
            return []
        return self._hand_over.take(_TICK_S / 2)

    def _carry(self, group: Sequence[Batch]) -> None:
        self._vitals.commit_time = group[-1].commit_time
        if not any(batch.rows for batch in group):
            self._moved = group[-1].position  # past other tables only: saved now and then
            return self._save()
        faults.point("gathered")
        for part, events in self._in_parts(group):
            self._half = True
            items = self._route(events)
            faults.point("routed")
            # As a whole, with the position behind it: a piece alone would come again after a crash.
            before = self.counters.sent
            position = part[-1].position
            self._deliver(items, position)
            self._half = False
            self._note_lag(part, self.counters.sent - before)
            until = self._checkpoint.doubtful_until
            if until is not None and position.passed(until):
                self._checkpoint = replace(self._checkpoint, doubtful_until=None)
        return None

    def _route(self, events: Iterable[OutboxEvent]) -> list[_Item]:
        """Records of the events whose aggregate is open."""
        items: list[_Item] = []
        parking = self._parking
        for event in events:
            self.counters.received += 1
            if parking.any and parking.holds(event):
                self.counters.held += 1
                continue
            try:
                record = self._router.route(event)
            except UnroutableError as error:
                self._park(event, 0, Refusal(str(error)))
                continue
            if self._sizes.is_suspect(record):
                parking.set_aside(event)
                self.counters.held += 1
            else:
                items.append((event, record))
        return items

    def _deliver(self, items: Sequence[_Item], position: Position | None) -> None:
        """Deliver ``items``, of aggregates that flow, and move to ``position``. Refused rows are
        parked, and what stands behind them in their aggregates is held; so is what may be too large
        as well."""
        self._under_way = time.monotonic()
        while items or position is not None:
            events = [event for event, _ in items]
            marks = self._owing(events)
            checkpoint = self._next_checkpoint(events, marks, position)
            refused = self._to_kafka([record for _, record in items], checkpoint)
            if not refused:
                faults.point("delivered")
                self._saved(checkpoint)
                self._sent(events, marks)
                return
            for index, refusal in refused.items():
                if refusal.too_large:
                    self._sizes.refused(items[index][1])
            there = self._sink.acknowledged
            if there:
                sent = [event for index, (event, _) in enumerate(items) if index in there]
                self._sent(sent, self._owing(sent))
            items = self._park_refused(
                [(item, refused.get(n)) for n, item in enumerate(items) if n not in there]
            )
            if not self._going_on():
                raise StopAskedError

    def _park_refused(self, items: Iterable[tuple[_Item, Refusal | None]]) -> list[_Item]:
        """Park the refused rows of a group, the first of each aggregate, and hold what stands
        behind them; what stands before a refused row of its aggregate goes again, unless it is to
        go alone."""
        left: list[_Item] = []
        closed: set[Closed] = set()  # by this group: what was closed before let its rows through
        for item, refusal in items:
            event = item[0]
            whole, own = (event.aggregate_type, None), (event.aggregate_type, event.aggregate_id)
            if (own in closed or whole in closed) and self._is_held(event):
                continue
            if refusal is None and self._sizes.is_suspect(item[1]):
                self._parking.set_aside(event)
                closed.add(own)
                continue
            if refusal is None:
                left.append(item)
                continue
            self._park(event, 0, refusal)
            closed.add(whole if refusal.topic else own)
        return left

    def _to_kafka(self, records: Sequence[Record], checkpoint: Checkpoint) -> dict[int, Refusal]:
        """Give a group to the sink, timed."""
        vitals = self._vitals
        vitals.delivering_since = began = time.monotonic()
        try:
            refused = self._sink.deliver(
                records, checkpoint.record(self._settings.name), self._going_on
            )
        finally:
            vitals.delivering_since = 0.0
        if records and not refused:
            vitals.group_rows.note(len(records))
            vitals.group_seconds.note(time.monotonic() - began)
        return refused

    def _note_lag(self, group: Sequence[Batch], sent: int) -> None:
        """Count the time from commit to acknowledgement, for ``sent`` rows of the group: by the
        last transaction of each batch, the database's clock against ours."""
        now = time.time()
        for batch in group:
            rows = min(len(batch.rows), sent)
            if rows:
                self._vitals.lag.note(max(0.0, now - batch.commit_time / 1e6), rows)
                sent -= rows

    def _is_held(self, event: OutboxEvent) -> bool:
        return self._parking.any and self._parking.holds(event)

    def _going_on(self) -> bool:
        """For waits inside the sink: whether to wait on. When a stop is asked, what is on its way
        has the time that brokers which are well take: given up, it would come again."""
        self._keep_up()
        until = max(self._finish_by, self._under_way + self._in_flight_s)
        return not self._stopping.is_set() or time.monotonic() < until

    def _owing(self, events: Sequence[OutboxEvent]) -> list[Part]:
        return parts(events) if self._marks else []

    def _next_checkpoint(
        self, events: Sequence[OutboxEvent], marks: Sequence[Part], to: Position | None
    ) -> Checkpoint:
        return replace(
            self._checkpoint,
            position=to or self._moved or self._checkpoint.position,
            owed=self._marker.owed_with(marks),
            closed=self._parking.closed(),
            held=self._parking.held({event.id for event in events}) if self._parking.any else (),
            time=time.time(),
        )

    def _saved(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._moved = None
        self._saved_at = time.monotonic()
        self._vitals.position, self._vitals.saved = checkpoint.position, checkpoint.time
        self._vitals.closed = len(checkpoint.closed)
        self._vitals.sweeping = checkpoint.sweeping

    def _sent(self, events: Sequence[OutboxEvent], marks: Sequence[Part]) -> None:
        self.counters.sent += len(events)
        if marks:
            self._marker.owe(marks)
        if self._parking.any:
            self._parking.sent({event.id for event in events})

    def _save(self, *, force: bool = False) -> None:
        """Write a checkpoint without records when something but the clock has moved, not more
        often than ``checkpoint_interval``."""
        last = self._checkpoint
        moved = self._moved is not None or self._parking.changed(last.closed)
        moved = moved or bool(last.owed) != bool(self._marker.owed_count)
        since = time.monotonic() - self._saved_at
        if not moved or (not force and since < self._settings.checkpoint_interval):
            return
        to = self._moved
        if to is not None and last.doubtful_until is not None and to.passed(last.doubtful_until):
            self._checkpoint = replace(last, doubtful_until=None)
        self._delivered_checkpoint(self._next_checkpoint([], [], to))

    def _delivered_checkpoint(self, checkpoint: Checkpoint) -> None:
        faults.point("saving")
        self._under_way = time.monotonic()
        self._to_kafka([], checkpoint)
        faults.point("saved")
        self._saved(checkpoint)

    def _reached(self, until: Position) -> bool:
        position = self._moved or self._checkpoint.position
        if self._marker.owed_count or not position.reached(until):
            return False
        return not self._parking.any_aside

    def _finish(self, deadline: float, orderly: bool) -> None:
        """At an orderly end, mark what was delivered, until ``deadline``, and say so in a last
        checkpoint; what is not finished is left to the next start. At any other end the shard may
        be somebody else's: nothing is written any more."""
        try:
            if orderly:
                self._marker.wait(max(0.0, deadline - _LAST_SAVE_S - time.monotonic()))
            self._marker.stop(max(0.1, deadline - _LAST_SAVE_S - time.monotonic()))
            # Without marks, what the checkpoint says of held rows must go with its position: those
            # of a group that was given up come again.
            if orderly and (self._marks or not self._half):
                self._finish_by = deadline  # a rebalance of the group may refuse it at first
                self._save(force=True)
        except Exception as error:
            log.warning("the last checkpoint was not written", reason=str(error))
        finally:
            self._sink.close(max(0.1, deadline - time.monotonic()))
            log.info("stopped", **self._figures())

    def _log_progress(self) -> None:
        """Say how far it is, where that is not what was said last: an idle relay is silent."""
        figures = self._figures()
        if figures != self._told:
            self._told = figures
            log.info("progress", **figures)

    def _figures(self) -> dict[str, object]:
        counters = self.counters
        return {
            "position": str(self._checkpoint.position),
            "received": counters.received,
            "sent": counters.sent,
            "marked": counters.marked,
            "owed": self._marker.owed_count,
            "parked": counters.parked,
            "held": counters.held,
            "dropped": counters.dropped,
            "swept": counters.swept,
        }

    # --- rows that need the table ----------------------------------------------------------------

    def _heal(self, start: Checkpoint) -> None:
        """Mark what the predecessor, or a compensator's pass, had delivered and not marked. Rows
        that others hold are ours to mark from here on."""
        if not start.owed or not self._marks:
            return
        healed = self._patiently(lambda: heal(self._store, start.owed))
        self.counters.marked += healed.done
        self._marker.adopt(healed.locked)
        faults.point("healed")
        log.info(
            "marks of the last run healed",
            owed=len(start.owed),
            marked=healed.done,
            locked=len(healed.locked),
        )

    def _fence_pass(self) -> None:
        """From here on a pass commits nothing that it began before. What it has sent is marked,
        and doubtful in the stream where it was sent ahead of it."""
        last = self._end_pass() if self._marks else None  # without marks there is no compensator
        faults.point("pass_fenced")
        self._parking.passes_know()
        if last is None:
            return
        self._heal(last)
        if not self._polling and not self._checkpoint.position.passed(last.position):
            self._doubt(last.position)

    def _doubt(self, until: Position) -> None:
        """Ask the table for rows of the stream up to ``until``, or to where they are asked for
        already, whichever comes later."""
        end = self._patiently(self._source.current)
        known = self._checkpoint.doubtful_until
        if known is not None and known.passed(until):
            return
        if not end.passed(until) or (known is not None and not until.passed(known)):
            until = end  # of another server, or not comparable
        self._checkpoint = replace(self._checkpoint, doubtful_until=until)

    def _sweep(self) -> None:
        """Send what is pending in the table, in id order, before the stream starts from the anchor.

        Rows committed after the anchor may be among them: up to where the log ends now, the
        stream asks the table. A crash begins the sweep again with what is still pending.
        """
        log.warning("sweeping the pending rows of the table", anchor=self._checkpoint.anchor)
        self._vitals.sweeping = True
        self._wait_for_unseen()
        self._walk(self._store.scan(0, _SWEEP_ROWS))
        self._patiently(self._parking.close_blocked)
        faults.point("swept")
        end = self._patiently(self._source.current)
        self._checkpoint = replace(self._checkpoint, sweeping=False, doubtful_until=end)
        self._delivered_checkpoint(self._next_checkpoint([], [], None))
        log.warning("sweep done; the stream starts", rows=self.counters.swept, until=str(end))

    def _wait_for_unseen(self, of: Set[Closed] | None = None) -> None:
        """Rows that are written but not visible may stand in the log before the anchor: the sweep
        does not see them and the stream does not bring them. Their aggregates (those ``of`` them,
        where given) wait until they are visible. Such are a transaction that a semi-synchronous
        replica has not acknowledged yet, and a prepared one (XA)."""
        if not self._marks:
            return  # what waits is known by its ids then, and the table is not asked
        rows: list[tuple[int, Aggregate]] = []
        after: int | None = 0
        while after is not None and len(rows) < _MOST_UNSEEN:
            self._keep_up()
            if self._stopping.is_set():
                raise StopAskedError
            page, after = self._patiently(
                lambda a=after: self._store.unseen(a)  # type: ignore[misc]
            )
            rows += page
        if of is not None:
            rows = [row for row in rows if row[1] in of or (row[1][0], None) in of]
        if rows:
            self._parking.wait_for(rows)
            log.warning("rows that are not visible yet are waited for", rows=len(rows))

    def _walk(self, scan: PendingScan) -> int:
        """Send what ``scan`` finds, in id order; how many rows. Each batch is read anew, and what
        is sent but not marked yet is left out."""
        before = self.counters.swept
        scan.closed.update(self._parking.closed())
        while (ids := self._patiently(scan.next_ids)) is not None:
            if len(ids) == scan.limit:
                scan.limit = max(scan.limit, min(2 * scan.limit, _SWEEP_ROWS))
            self._keep_up()
            owed = self._marker.owed()
            ids = [row_id for row_id in ids if row_id not in owed]
            rest: Sequence[int] = ids
            while rest:
                self._keep_up()
                if self._stopping.is_set():
                    raise StopAskedError
                batch, rest = self._patiently(
                    lambda r=rest: self._store.events(r, _GROUP_ROWS)  # type: ignore[misc]
                )
                self._send_pending(batch)
                scan.closed.update(self._parking.closed())
        for kind, key in scan.closed - set(self._parking.closed()):
            self._parking.close(kind, key)
        return self.counters.swept - before

    def _send_pending(self, batch: list[PendingEvent]) -> None:
        """Send rows that were read from the table, and wait where too many marks are owed."""
        for event, tries in batch:
            if tries:
                self._parking.tries[event.id] = tries
        items = self._route(pending.event for pending in batch)
        self._deliver(items, None)
        for event, _ in batch:
            self._parking.tries.pop(event.id, None)
        self.counters.swept += len(items)
        while self._marker.owed_count >= self._most_owed:
            self._keep_up()
            if self._stopping.wait(0.01):
                raise StopAskedError

    def _poll(self, *, once: bool) -> None:
        """The loop without a stream: walk over the pending rows from the lowest id, again and
        again; with ``once`` until what was pending at its beginning is sent and marked.

        While there is a backlog the batches grow and nothing is waited for. A walk that finds
        nothing, though many rows wait, is not begun again sooner than it took.
        """
        settings = self._settings
        next_progress = time.monotonic()
        while not self._stopping.is_set():
            self._keep_up()
            begun = time.monotonic()
            sent = self._walk(self._store.scan(0, settings.poll_batch))
            self._save()
            self._retry_parked()
            now = time.monotonic()
            if now >= next_progress:
                self._log_progress()
                next_progress = now + _PROGRESS_PAUSE_S
            if once:
                while not self._stopping.wait(0.01):
                    self._keep_up()
                    if self._parking.any_aside:
                        self._retry_parked()
                    elif not self._marker.owed_count:
                        return
                return
            if sent < settings.poll_batch:
                self._idle(max(settings.poll_interval, now - begun))

    def _idle(self, seconds: float) -> None:
        """Wait, and take part in the group meanwhile; shorter when a stop is asked."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._stopping.wait(min(left, _TICK_S)):
                return
            self._keep_up()

    def _in_parts(
        self, group: Sequence[Batch]
    ) -> Iterator[tuple[Sequence[Batch], list[OutboxEvent]]]:
        """The group and its events, without those that somebody else has sent. In one part, unless
        it has rows to read back and they are large: then a part ends where about 8 MiB of them
        are read and a position is known."""
        left = list(group)
        rows = [row for batch in left for row in batch.rows]
        unread = {row.id: row.reason for row in rows if isinstance(row, UnreadRow)}
        rest: Sequence[int] = list(unread)
        found: dict[int, OutboxEvent] = {}
        deadline = time.monotonic() + _VISIBLE_WITHIN_S
        while left:
            if rest:
                self._keep_up()
                more, rest = self._read_back(rest, unread, deadline)
                found.update(more)
            part, left = _up_to(left, set(rest))
            if part:
                events = [
                    event
                    for batch in part
                    for row in batch.rows
                    if (event := found.pop(row.id, None) if isinstance(row, UnreadRow) else row)
                    is not None
                ]
                yield part, self._unsent(events)

    def _unsent(self, events: list[OutboxEvent]) -> list[OutboxEvent]:
        """``events`` without those that somebody else has sent."""
        if self._checkpoint.doubtful_until is None or not events:
            return events
        owed = self._marker.owed()
        there = self._patiently(lambda: self._look_up([event.id for event in events]))
        wanted = [event for event in events if self._is_wanted(event, there, owed)]
        self.counters.dropped += len(events) - len(wanted)
        return wanted

    def _look_up(self, ids: list[int]) -> dict[int, tuple[str, int]]:
        """Event id and status by id, of the rows that are there."""
        there = self._store.states(ids)
        missing = [row_id for row_id in ids if row_id not in there]
        if missing and self._marks:
            self._store.settle(missing)
            there |= self._store.states(missing)
        return there

    def _is_wanted(
        self, event: OutboxEvent, there: dict[int, tuple[str, int]], owed: dict[int, str]
    ) -> bool:
        if owed.get(event.id) == event.event_id:
            return False
        row = there.get(event.id)
        if row is None or row[0] != event.event_id:
            # Gone: marked by deletion, or deleted by the service, which takes nothing back.
            return self._settings.mark != "delete"
        return row[1] == PENDING

    def _read_back(
        self, ids: Sequence[int], reasons: Mapping[int, str], deadline: float
    ) -> tuple[dict[int, OutboxEvent], Sequence[int]]:
        """The pending ones among the first of these rows, about 8 MiB of them, and the ids that
        come next. Those that are not pending any more were sent, or given up, by somebody else;
        those that are missing at the ``deadline``, and not written either, are gone."""
        found: dict[int, OutboxEvent] = {}
        missing, rest = ids, list[int]()
        while missing and not self._stopping.is_set():
            # Whatever its transaction waits for, it is written; only what is gone is not.
            last = time.monotonic() > deadline and not self._patiently(
                lambda ids=missing: self._store.still_unseen(ids)  # type: ignore[misc]
            )
            rows, later = self._patiently(
                lambda ids=missing: self._store.first_rows(ids)  # type: ignore[misc]
            )
            found.update({event.id: event for event, status in rows if status == PENDING})
            known = {event.id for event, _ in rows}.union(later)
            missing = [row_id for row_id in missing if row_id not in known]
            rest = [*later, *rest]
            if last:
                break
            if missing:
                self._keep_up()
                time.sleep(0.02)
        if missing and self._stopping.is_set():
            raise StopAskedError
        if missing:
            self.counters.gone += len(missing)
            log.error(
                "rows could not be read back: they are gone",
                rows=len(missing),
                first_id=missing[0],
                reason=reasons[missing[0]],
            )
        return found, rest

    # --- parked rows -----------------------------------------------------------------------------

    def _park(self, event: OutboxEvent, tries: int, refusal: Refusal) -> None:
        self.counters.parked += 1
        faults.point("parking")
        tries, gone = self._parking.tries.pop(event.id, tries), self._parking.gone
        failure = self._patiently(lambda: self._parking.park(event, tries, refusal))
        self.counters.gone += self._parking.gone - gone
        self.counters.dead += failure.outcome == "dead"

    def _retry_parked(self) -> None:
        """Try the aggregates again whose time has come, and let those flow that have nothing
        pending any more."""
        begun = time.monotonic()
        if begun >= self._next_learn:
            self._patiently(self._parking.learn)
            now = time.monotonic()
            # Slow where very many rows are pending: it takes a twentieth of the time at most.
            self._next_learn = now + max(_LEARN_PAUSE_S, 20 * (now - begun))
        due = self._parking.due()
        if due and not self._caught_up and not self._is_caught_up():
            return
        if due and not self._parking.are_known(due) and time.monotonic() >= self._next_fence:
            # A pass may hold rows of an aggregate that was open when it looked. The checkpoint
            # tells the next one.
            self._next_fence = time.monotonic() + _FENCE_PAUSE_S
            self._save(force=True)
            self._fence_pass()
        stop_at = time.monotonic() + _RETRIES_S
        for aggregate in due:
            if time.monotonic() > stop_at:
                break
            if not self._parking.are_known([aggregate]):
                continue
            owed, gone = self._marker.owed(), self._parking.gone
            rows = self._patiently(
                lambda a=aggregate, o=owed: self._parking.rows(a, o)  # type: ignore[misc]
            )
            self.counters.gone += self._parking.gone - gone
            if rows is None:
                continue
            if rows:
                self._retry(aggregate, rows)
            else:
                # What was committed until now is sent, or in the table for the stream to ask.
                if not self._polling:
                    end = self._patiently(self._source.current)
                    self._checkpoint = replace(self._checkpoint, doubtful_until=end)
                self._parking.open(aggregate)

    def _retry(
        self, aggregate: tuple[str, str | None], rows: list[tuple[OutboxEvent, int]]
    ) -> None:
        """Send the pending rows of a parked aggregate in order, up to the first refusal."""
        self._parking.begin_trial(aggregate)
        self.counters.retries += sum(tries > 0 for _, tries in rows)
        items: list[_Item] = []
        alone: list[_Item] = []
        for event, tries in rows:
            if tries:
                self._parking.tries[event.id] = tries
            if self._is_held(event):
                continue
            try:
                record = self._router.route(event)
            except UnroutableError as error:
                self._park(event, tries, Refusal(str(error)))
                continue
            if aggregate[1] is None and self._sizes.is_suspect(record):
                self._parking.set_aside(event)  # what follows it in its own aggregate waits
                alone.append((event, record))
            else:
                items.append((event, record))
        if aggregate[1] is not None:
            items = self._alone(items)
        before = self.counters.sent
        faults.point("retrying")
        try:
            self._deliver(items, None)
            if aggregate[1] is not None and self.counters.sent > before and len(items) == 1:
                self._sizes.taken(items[0][1])
            self._deliver_alone(alone)
        finally:
            sent = self.counters.sent > before
            # It flows again only when nothing of it is pending (checked at the next turn).
            self._parking.end_trial(aggregate, sent=sent)
        faults.point("retried")
        for event, _ in rows:
            self._parking.tries.pop(event.id, None)

    def _deliver_alone(self, items: Sequence[_Item]) -> None:
        """Deliver one after the other, for as long as retries have time; one at least."""
        stop_at = time.monotonic() + _RETRIES_S
        for item in items:
            before = self.counters.sent
            self._deliver([item], None)
            if self.counters.sent > before:
                self._sizes.taken(item[1])
            if time.monotonic() > stop_at:
                return

    def _alone(self, items: list[_Item]) -> list[_Item]:
        """The first of ``items``: up to one that may be too large, or that one alone."""
        suspects = (n for n, (_, record) in enumerate(items) if self._sizes.is_suspect(record))
        return items[: max(1, next(suspects, len(items)))]

    def _is_caught_up(self) -> bool:
        """Whether the stream has passed, since this was asked first, what was the end of the log
        then. Until it has, rows that are gone from the table (TRUNCATE) may stand in the log before
        those that are there: a retry, which reads the table, must not overtake them."""
        if self._polling or not self._marks:  # no stream; or only rows that it has passed
            return True
        if self._behind is None:
            self._behind = self._patiently(self._source.current), time.monotonic() + _BEHIND_S
        end, give_up_at = self._behind
        position = self._moved or self._checkpoint.position
        self._caught_up = position.passed(end) or time.monotonic() > give_up_at
        return self._caught_up

    def _patiently(self, action: Callable[[], _T]) -> _T:
        """Run ``action`` until the database answers, with growing pauses. Raises
        ``StopAskedError`` when it does not and the relay is asked to stop."""
        pause = 0.1
        while True:
            try:
                result = action()
                self._vitals.waiting = ""
                return result
            except SourceUnavailableError as error:
                self._vitals.waiting = f"for the database: {error}"
                log.warning("waiting for the database", reason=str(error), retry_in_seconds=pause)
                self._idle(pause)
                if self._stopping.is_set():
                    raise StopAskedError from None
                pause = min(pause * 2, 5.0)


def _up_to(batches: list[Batch], waiting: Set[int]) -> tuple[list[Batch], list[Batch]]:
    """The batches before the first one that holds an unread row of ``waiting``, that one's rows
    before it where it may be cut, and the others."""
    for index, batch in enumerate(batches if waiting else ()):
        for place, row in enumerate(batch.rows):
            if isinstance(row, UnreadRow) and row.id in waiting:
                if place == 0 or batch.before is None:
                    return batches[:index], batches[index:]
                head, tail = batch.cut(place)
                return [*batches[:index], head], [tail, *batches[index + 1 :]]
    return batches, []
