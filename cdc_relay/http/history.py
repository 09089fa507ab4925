"""The recent past, kept in rings of fixed size in memory: what the page draws."""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import structlog

from cdc_relay.http.looks import Looks
from cdc_relay.vitals import Vitals

log: Any = structlog.get_logger(__name__)

COLUMNS: Final = (
    *("time", "pending", "oldest", "dead", "received", "sent", "marked", "p50", "p99"),
)
"""Seconds since 1970; rows; seconds; rows; rows a second (three times); seconds (twice). NaN where
a value is not known."""

POINTS: Final = 720
# Five seconds apart by default: an hour; and a day.
_LONG_S: Final = 120.0
_LATE_S: Final = 5.0
_LATELY_S: Final = 60.0


class Ring:
    """The last ``size`` points; one thread writes, any may read."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._columns = [array("d") for _ in COLUMNS]
        self._next = 0

    def add(self, point: Sequence[float]) -> None:
        """Add a point, one value for each of ``COLUMNS``; the oldest one makes room."""
        with self._lock:
            if len(self._columns[0]) < self._size:
                for column, value in zip(self._columns, point, strict=True):
                    column.append(value)
                return
            for column, value in zip(self._columns, point, strict=True):
                column[self._next] = value
            self._next = (self._next + 1) % self._size

    def columns(self, since: float = 0.0) -> dict[str, list[float | None]]:
        """The points from ``since`` (seconds since 1970) on, by column, in the order of time; None
        for NaN."""
        with self._lock:
            ordered = [column[self._next :] + column[: self._next] for column in self._columns]
        first = next((i for i, at in enumerate(ordered[0]) if at >= since), len(ordered[0]))
        return {
            name: [None if math.isnan(value) else round(value, 4) for value in column[first:]]
            for name, column in zip(COLUMNS, ordered, strict=True)
        }


def percentile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """The value below which ``share`` of the counted ones lie, by their buckets; NaN for none."""
    total = sum(counts)
    if not total:
        return math.nan
    wanted = share * total
    below = 0
    for index, count in enumerate(counts[:-1]):
        if below + count >= wanted:
            low = bounds[index - 1] if index else 0.0
            return low + (bounds[index] - low) * (wanted - below) / count
        below += count
    return bounds[-1]


class Track:
    """One ring and what its last point was made of."""

    def __init__(self, interval: float, vitals: Vitals, looks: Looks) -> None:
        self.ring = Ring(POINTS)
        self.interval = interval
        self._vitals = vitals
        self._looks = looks
        self._next = 0.0
        self._before = self._counted()
        self._lag = list(vitals.lag.counts)
        steps = max(1, min(POINTS, round(_LATELY_S / interval)))
        self._lags = deque([self._lag], maxlen=steps)

    def _counted(self) -> tuple[float, int, int, int]:
        counters = self._vitals.counters
        return time.monotonic(), counters.received, counters.sent, counters.marked

    def lately(self) -> list[int]:
        """The lags of about the last minute, per bucket."""
        before = self._lags[0]
        return [new - old for new, old in zip(list(self._vitals.lag.counts), before, strict=True)]

    def note(self) -> None:
        """Add a point when it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = max(self._next + self.interval, now)
        counted, lag = self._counted(), list(self._vitals.lag.counts)
        seconds = max(counted[0] - self._before[0], 1e-6)
        rates = [(new - old) / seconds for new, old in zip(counted, self._before, strict=True)][1:]
        fresh = [new - old for new, old in zip(lag, self._lag, strict=True)]
        self._before, self._lag = counted, lag
        self._lags.append(lag)
        pending = oldest = dead = math.nan
        table = self._looks.table
        if table.seen is not None and not table.error:
            backlog = table.seen.backlog
            pending, dead = backlog.pending, backlog.dead
            oldest = oldest_s(self._looks, now) or 0.0
        bounds = self._vitals.lag.bounds
        points = [percentile(bounds, fresh, 0.5), percentile(bounds, fresh, 0.99)]
        self.ring.add([time.time(), pending, oldest, dead, *rates, *points])


def oldest_s(looks: Looks, now: float) -> float | None:
    """Age of the oldest pending row, as it was at the last look; where looks do not come back any
    more, it goes on growing. None where none was pending."""
    table = looks.table
    if table.seen is None or table.seen.backlog.oldest_pending_s is None:
        return None
    since = now - table.seen_at
    old = bool(table.error) or since > 3 * table.pause_s + _LATE_S
    return table.seen.backlog.oldest_pending_s + (since if old else 0.0)


class History:
    """An hour in small steps (with the default ``sample_interval``) and a day in larger ones."""

    def __init__(self, interval: float, vitals: Vitals, looks: Looks) -> None:
        self.short = Track(interval, vitals, looks)
        self.long = Track(max(_LONG_S, interval), vitals, looks)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)

    def start(self) -> None:
        """Begin to keep points."""
        self._thread.start()

    def stop(self) -> None:
        """Keep no more."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(min(1.0, self.short.interval)):
            self.short.note()
            self.long.note()
