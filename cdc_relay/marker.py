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
from cdc_relay.errors import SourceUnavailableError
from cdc_relay.store import Store
from cdc_relay.vitals import Vitals

log = structlog.get_logger(__name__)

_ROWS: Final = 2000
_PAUSE_S: Final = 1.0


class Marker:
    """Marks in a thread of its own, in batches. ``owe``, ``owed`` and ``owed_count`` belong to the
    relay's thread. A database that is away costs nothing but time."""

    def __init__(self, store: Store, vitals: Vitals) -> None:
        self._store = store
        self._vitals = vitals
        self._wake = threading.Condition()
        self._owed: dict[int, str] = {}
        self._ended = False
        self.error: BaseException | None = None
        """What trying again cannot mend (a missing grant, a bug); the relay's thread raises it."""
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

    def owed(self) -> dict[int, str]:
        """Those rows as of now: event ids by id. Who asks the table whether a row is pending takes
        this first: a mark may be done between the two."""
        with self._wake:
            return self._owed.copy()

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
                # Fewer than all is right: the others are gone, or marked by somebody else. A row
                # that comes out of the log before it is visible is still locked: it is waited for.
                self._vitals.marking_since = time.monotonic()
                self._vitals.counters.marked += self._store.mark_sent(rows)
                faults.point("marked")
            except SourceUnavailableError as error:
                log.warning("marks wait for the database", owed=len(self._owed), reason=str(error))
                with self._wake:
                    self._wake.wait_for(lambda: self._ended, _PAUSE_S)
                continue
            except BaseException as error:
                self.error = error
                return
            finally:
                self._vitals.marking_since = 0.0
            self._done(rows)

    def _next(self) -> list[tuple[int, str]] | None:
        """The rows to mark now; None at the end."""
        with self._wake:
            while not self._owed and not self._ended:
                self._wake.wait()
            if self._ended:
                return None
            found: list[tuple[int, str]] = []
            for row in self._owed.items():
                found.append(row)
                if len(found) >= _ROWS:
                    break
            return found

    def _done(self, rows: list[tuple[int, str]]) -> None:
        with self._wake:
            for row_id, event_id in rows:
                if self._owed.get(row_id) == event_id:
                    del self._owed[row_id]
