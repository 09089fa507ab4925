"""What the relay shows of itself while it works: counted and noted by the threads that do the work,
read by whoever asks (``/metrics``, ``/healthz``, the page).

Nothing here waits or locks. Each field has one writing thread; a reader sees each of them at some
moment, not all of them at the same one. Times are ``time.monotonic()`` unless they say otherwise.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from cdc_relay.position import Position

LAG_S: Final = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0),
)
GROUP_ROWS: Final = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0)
GROUP_S: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 15.0)


@dataclass(slots=True)
class Counters:
    """What the relay has done since it started."""

    received: int = 0
    sent: int = 0
    marked: int = 0
    parked: int = 0
    dead: int = 0
    """Rows that this relay gave up."""
    retries: int = 0
    """Rows that were tried again after a refusal."""
    held: int = 0
    """Rows left pending because an earlier row of their aggregate is parked."""
    dropped: int = 0
    """Rows of the stream that somebody else had sent."""
    gone: int = 0
    """Rows that had to be read back and were not there any more."""
    swept: int = 0
    """Pending rows that were sent from the table."""


class Distribution:
    """A histogram: how many values were at most each bound, their number and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        """Values per bucket, not cumulative; the last one is above every bound."""
        self.total = 0.0

    def note(self, value: float, times: int = 1) -> None:
        """Count ``value``, ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass(slots=True)
class Reading:
    """How the reader of the source fares. Written by the reader's thread."""

    heard: float = field(default_factory=time.monotonic)
    """When it last got on: the server was heard (a heartbeat, an event, a plain refusal), or what
    was read was taken over."""
    running: bool = False
    """Whether the reader is at work: not before a sweep is done, and not between two terms."""
    connected: bool = False
    """Whether a dump is running."""
    away: str = ""
    """Why the database cannot be read, by its own or the network's word; empty while it can, or
    while there is no word."""
    handing_on: bool = False
    """Whether it waits until the relay takes what it has read."""
    reconnects: int = 0

    def begin(self) -> None:
        """Note that the reader starts."""
        self.handing_on = False
        self.away = ""
        self.heard = time.monotonic()
        self.running = True

    def end(self) -> None:
        """Note that the reader is gone."""
        self.running = self.connected = False

    def handed_on(self) -> None:
        """Note that a batch was taken."""
        self.heard = time.monotonic()
        self.handing_on = False

    def lost(self, reason: str, *, silent: bool) -> None:
        """Note a lost connection, or one that could not be made. ``silent``: nothing was heard
        within the time, so nobody knows whether the database is away or the wire is."""
        self.connected = False
        self.reconnects += 1
        if not silent:
            self.away = reason
            self.heard = time.monotonic()

    def found(self) -> None:
        """Note that a dump is running."""
        self.connected = True
        self.away = ""
        self.heard = time.monotonic()


@dataclass(slots=True)
class Vitals:
    """One relay process, over all its terms. Written by the relay's thread unless a part says
    otherwise."""

    started: float = field(default_factory=time.time)
    """Seconds since 1970."""
    role: Literal["starting", "standby", "owner"] = "starting"
    turned: float = field(default_factory=time.monotonic)
    """When the loop last turned, or turned in a wait by design."""
    waiting: str = ""
    """What it waits for by design, in words; empty while it works or is idle."""
    delivering_since: float = 0.0
    """Since when a group is with the brokers; 0 while none is."""
    marking_since: float = 0.0
    """The same for the marker and the database. Written by the marker's thread."""
    owed: int = 0
    """Rows that are acknowledged and not yet marked."""
    closed: int = 0
    """Aggregates that wait behind a refused row (a whole type counts as one)."""
    terms: int = 0
    anchors: int = 0
    """How often the stream was anchored anew at the end of the log."""
    sweeping: bool = False
    position: Position | None = None
    """Of the last checkpoint."""
    saved: float = 0.0
    """When that was written, seconds since 1970; 0 before the first one."""
    commit_time: int = 0
    """Of the last transaction that was read, microseconds since 1970; 0 before the first one."""
    counters: Counters = field(default_factory=Counters)
    reading: Reading = field(default_factory=Reading)
    lag: Distribution = field(default_factory=lambda: Distribution(LAG_S))
    """Seconds from commit to acknowledgement, one value for each row."""
    group_rows: Distribution = field(default_factory=lambda: Distribution(GROUP_ROWS))
    group_seconds: Distribution = field(default_factory=lambda: Distribution(GROUP_S))

    def turn(self) -> None:
        """Note that the loop turned."""
        self.turned = time.monotonic()
