"""Marks acknowledged rows as sent, off the critical path.

A mark is owed from the moment its event is acknowledged until the table says so. What is owed
stands in every checkpoint, so a crash between acknowledgement and mark is healed at the next start
without a second send.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Final, NamedTuple

import structlog

from cdc_relay import faults
from cdc_relay.catchup import CatchUp
from cdc_relay.errors import ReplicaBehindError, SourceUnavailableError
from cdc_relay.kafka.owed import Owed, fingerprint
from cdc_relay.outbox import OutboxEvent
from cdc_relay.store import Marked, Store
from cdc_relay.vitals import Vitals

log = structlog.get_logger(__name__)

_ROWS: Final = 2000
_PAUSE_S: Final = 1.0


class Part(NamedTuple):
    """Rows that are marked together, and how a checkpoint stores them."""

    rows: Sequence[tuple[int, str]]
    """(id, event_id)"""
    owed: Owed


def parts(events: Sequence[OutboxEvent]) -> list[Part]:
    """The marks that ``events`` will owe once they are acknowledged."""
    return parts_of([(event.id, event.event_id) for event in events])


def parts_of(rows: Sequence[tuple[int, str]]) -> list[Part]:
    """The same for rows, (id, event_id) each."""
    cut = [rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS)]
    return [Part(part, Owed.of(part)) for part in cut]


def heal(store: Store, owed: Owed) -> Marked:
    """Mark those of ``owed``, which were sent, that are still pending. What others hold stays owed:
    it is for the caller's marker to adopt."""
    prints = dict(owed)
    pending = [
        (row_id, event_id)
        for row_id, event_id in store.pending(list(prints))
        if fingerprint(event_id) == prints[row_id]
    ]
    return store.mark_sent(pending)


class Marker:
    """Marks in a thread of its own, in batches. ``owe``, ``adopt``, ``owed`` and ``owed_count``
    belong to the relay's thread. A database that is away costs nothing but time. Rows that other
    sessions hold are set aside and tried again: they delay no marks but their own."""

    def __init__(self, store: Store, vitals: Vitals) -> None:
        self._store = store
        self._vitals = vitals
        self._catch_up = CatchUp()
        self._wake = threading.Condition()
        self._parts: deque[Part] = deque()
        self._locked: list[Part] = []  # set aside
        self._again_at = 0.0
        self._ended = False
        self.owed_count = 0
        """Rows that are acknowledged and not yet marked."""
        self.error: BaseException | None = None
        """What trying again cannot mend (a missing grant, a bug); the relay's thread raises it."""
        self._thread = threading.Thread(target=self._run, name="marker", daemon=True)

    def start(self) -> None:
        """Start marking."""
        self._thread.start()

    def owe(self, added: Sequence[Part]) -> None:
        """Add acknowledged rows."""
        with self._wake:
            self._parts.extend(added)
            self.owed_count += sum(len(part.rows) for part in added)
            self._wake.notify()

    def adopt(self, rows: Sequence[tuple[int, str]]) -> None:
        """Add those of ``rows``, (id, event_id) each, that are not owed yet; somebody had sent them
        and could not mark them."""
        owed = self.owed()
        self.owe(parts_of([row for row in rows if owed.get(row[0]) != row[1]]))

    def owed(self) -> dict[int, str]:
        """What is owed as of now: event ids by id. Who asks the table whether a row is pending
        takes this first: a mark may be done between the two."""
        with self._wake:
            owed = chain(self._locked, self._parts)
            return {row_id: event_id for part in owed for row_id, event_id in part.rows}

    def owed_with(self, added: Sequence[Part]) -> Owed:
        """The same, and ``added``, as a checkpoint stores it."""
        with self._wake:
            owed = chain(self._locked, self._parts, added)
            return Owed.together(part.owed for part in owed)

    def wait(self, timeout: float) -> bool:
        """Wait until nothing is owed; whether that is so after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while self.owed_count and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self.owed_count

    def stop(self, timeout: float) -> None:
        """End the thread after the statement it is in."""
        with self._wake:
            self._ended = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            count, rows = self._next()
            if not rows:
                return
            began = time.monotonic()
            try:
                faults.point("marking")
                # Fewer than all is right: the others are gone, or marked by somebody else. A row
                # that comes out of the log before it is visible is still locked.
                self._vitals.marking_since = began
                marked = self._store.mark_sent(rows, around=bool(self._locked))
                self._vitals.counters.marked += marked.done
                if marked.done + len(marked.locked) < len(rows) and self._another_server():
                    marked = self._store.mark_sent(rows, around=bool(self._locked))
                    self._vitals.counters.marked += marked.done
                faults.point("marked")
            except SourceUnavailableError as error:
                log.warning("marks wait for the database", owed=self.owed_count, reason=str(error))
                with self._wake:
                    self._wake.wait_for(lambda: self._ended, _PAUSE_S)
                continue
            except BaseException as error:
                self.error = error
                return
            finally:
                self._vitals.marking_since = 0.0
            self._note(count, rows, marked.locked, time.monotonic() - began)

    def _another_server(self) -> bool:
        """Whether another server took over, which has the rows by now: a moment ago it may not have
        executed their inserts, and their marks would be lost. Raises ``ReplicaBehindError`` while
        it has not."""
        sent = self._vitals.position
        if sent is None or not sent.gtids:
            return False
        end = self._store.position()
        waits = self._catch_up.waits(sent, end)
        if waits:
            raise ReplicaBehindError(waits)
        return sent.server != end.server

    def _next(self) -> tuple[int, list[tuple[int, str]]]:
        """The rows to mark now, and how many parts they are, 0 for those that were set aside; no
        rows at the end."""
        with self._wake:
            while not self._ended:
                wait = self._again_at - time.monotonic() if self._locked else None
                if wait is not None and wait <= 0:
                    return 0, [row for part in self._locked for row in part.rows]
                if self._parts:
                    return self._first_parts()
                self._wake.wait(wait)
            return 0, []

    def _first_parts(self) -> tuple[int, list[tuple[int, str]]]:
        rows: list[tuple[int, str]] = []
        count = 0
        for part in self._parts:
            if rows and len(rows) + len(part.rows) > _ROWS:
                break
            rows += part.rows
            count += 1
        return count, rows

    def _note(
        self, count: int, rows: list[tuple[int, str]], locked: list[tuple[int, str]], took: float
    ) -> None:
        """Take off the list what is settled of ``rows``, and set aside what is ``locked``."""
        before = bool(self._locked)
        with self._wake:
            for _ in range(count):
                self._parts.popleft()
            if not count:
                self._locked = []
            if not count or not before:
                self._again_at = time.monotonic() + max(_PAUSE_S, took)
            self._locked += parts_of(locked)
            self.owed_count -= len(rows) - len(locked)
        if locked and not before:
            log.warning("rows that other sessions hold are marked later", rows=len(locked))
        elif before and not self._locked:
            log.info("rows that other sessions held are marked")
