"""Marks acknowledged rows as sent, off the critical path.

A mark is owed from the moment its event is acknowledged until the table says so. What is owed
stands in every checkpoint, so a crash between acknowledgement and mark is healed at the next start
without a second send.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

import structlog

from cdc_relay import faults
from cdc_relay.errors import SourceError, SourceUnavailableError
from cdc_relay.store import Store

log = structlog.get_logger(__name__)

_ROWS: Final = 2000
_PAUSE_S: Final = 1.0
# A row comes out of the log a moment before other sessions see it: marks that found less than
# they should look again after this time.
_SECOND_LOOK_S: Final = 0.5


class Marker:
    """Marks in a thread of its own, in batches. ``owe``, ``owed`` and ``owed_count`` belong to the
    relay's thread. A database that is away costs nothing but time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._wake = threading.Condition()
        self._owed: dict[int, str] = {}
        self._again: list[tuple[float, list[tuple[int, str]]]] = []
        self._ended = False
        self.marked = 0
        self.error: SourceError | None = None
        """What trying again cannot mend (a missing grant); the relay's thread raises it."""
        self._thread = threading.Thread(target=self._run, name="marker", daemon=True)

    def start(self) -> None:
        """Start marking."""
        self._thread.start()

    def owe(self, rows: Sequence[tuple[int, str]]) -> None:
        """Add acknowledged rows, (id, event_id) each."""
        with self._wake:
            self._owed.update(rows)
            self._wake.notify()

    @property
    def owed_count(self) -> int:
        """Rows that are acknowledged and not yet marked."""
        return len(self._owed)

    def owed(self) -> list[tuple[int, str]]:
        """Those rows."""
        with self._wake:
            return list(self._owed.items())

    def owes(self, row_id: int, event_id: str) -> bool:
        """Whether this row is one of them."""
        return self._owed.get(row_id) == event_id

    def wait(self, timeout: float) -> bool:
        """Wait until nothing is owed; whether that is so after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while self._owed and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self._owed

    def stop(self, timeout: float) -> None:
        """End the thread after the statement it is in."""
        with self._wake:
            self._ended = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            rows = self._next()
            if rows is None:
                return
            try:
                faults.point("marking")
                marked = self._store.mark_sent(rows)
                faults.point("marked")
            except SourceUnavailableError as error:
                log.warning("marks wait for the database", owed=len(self._owed), reason=str(error))
                with self._wake:
                    self._wake.wait_for(lambda: self._ended, _PAUSE_S)
                continue
            except SourceError as error:
                self.error = error
                return
            self.marked += marked
            self._done(rows, short=marked < len(rows))

    def _next(self) -> list[tuple[int, str]] | None:
        """The rows to mark now; None at the end."""
        with self._wake:
            while not self._owed and not self._ended:
                pause = 60.0
                if self._again:
                    due, rows = self._again[0]
                    pause = due - time.monotonic()
                    if pause <= 0:
                        del self._again[0]
                        return rows
                self._wake.wait(pause)
            if self._ended:
                return None
            found: list[tuple[int, str]] = []
            for row in self._owed.items():
                found.append(row)
                if len(found) >= _ROWS:
                    break
            return found

    def _done(self, rows: list[tuple[int, str]], *, short: bool) -> None:
        with self._wake:
            owed = False
            for row_id, event_id in rows:
                if self._owed.get(row_id) == event_id:
                    del self._owed[row_id]
                    owed = True
            if short and owed:
                self._again.append((time.monotonic() + _SECOND_LOOK_S, rows))
