"""The hand-over from the thread that reads to the thread that sends.

Bounded by rows and bytes, not by batches: those are as small as what one read from the network
brought. The one who takes gets everything that waits, so a group is one row when it keeps up and
large when there is a backlog.
"""

from __future__ import annotations

import threading

from cdc_relay.binlog.stream import Batch


class HandOver:
    """One thread puts, one takes; either may close it. Order: as it was put."""

    def __init__(self, most_rows: int, most_bytes: int) -> None:
        """When so much waits, ``put`` does too. A single batch may be larger than that."""
        self._most_rows = most_rows
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._waiting: list[Batch] = []
        self._rows = 0
        self._bytes = 0
        self._closed = False
        self._error: BaseException | None = None

    def put(self, batch: Batch) -> bool:
        """Add a batch, as soon as there is room; False when nobody takes any more."""
        with self._changed:
            while not self._closed and self._is_full():
                self._changed.wait()
            if self._closed:
                return False
            if batch.rows or not self._waiting or self._waiting[-1].rows:
                self._waiting.append(batch)
            else:
                self._waiting[-1] = batch  # only the position moved, twice
            self._rows += len(batch.rows)
            self._bytes += batch.size
            self._changed.notify()
            return True

    def fail(self, error: BaseException) -> None:
        """Say that nothing more will come, and why; ``take`` raises it behind what was put."""
        with self._changed:
            self._error = error
            self._changed.notify()

    def take(self, timeout: float) -> list[Batch]:
        """Everything that waits; empty when nothing came within ``timeout`` seconds."""
        with self._changed:
            if not self._waiting and self._error is None:
                self._changed.wait(timeout)
            if not self._waiting and self._error is not None:
                raise self._error
            taken, self._waiting = self._waiting, []
            self._rows = self._bytes = 0
            self._changed.notify()
            return taken

    def close(self) -> None:
        """Take no more: what waits is dropped and ``put`` returns."""
        with self._changed:
            self._closed = True
            self._waiting = []
            self._changed.notify()

    def _is_full(self) -> bool:
        return self._rows >= self._most_rows or self._bytes >= self._most_bytes
