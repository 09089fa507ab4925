"""Looks at what the relay itself does not ask for: the table, the binlog's retention, the group.

Each kind has a thread of its own, so that one which hangs holds up no other. What a look costs the
database bounds how often it is taken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final, Generic, NamedTuple, TypeVar

import structlog

from cdc_relay.binlog import retention
from cdc_relay.binlog.retention import Retention
from cdc_relay.config import Settings
from cdc_relay.database import connect_arguments
from cdc_relay.errors import CdcRelayError
from cdc_relay.kafka.watch import Brokers, Member
from cdc_relay.store import Backlog, Store, Troubled

log: Any = structlog.get_logger(__name__)

_T = TypeVar("_T")

# A look takes at most this share of the time.
_SHARE: Final = 0.05
_LOG_EVERY_S: Final = 30.0
_TROUBLED: Final = 20


class Look(Generic[_T]):
    """Takes a look again and again in a thread of its own; keeps what it saw last.

    ``seen`` stays when a later look fails; ``error`` says why that failed, in one line. Errors are
    logged once each. Any thread may read.
    """

    def __init__(self, name: str, take: Callable[[], _T], interval: float) -> None:
        self.name = name
        self._take = take
        self._interval = interval
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"look at {name}", daemon=True)
        self.seen: _T | None = None
        self.seen_at = 0.0
        """When the last look that succeeded came back (``time.monotonic``)."""
        self.error = ""
        self.took_s = 0.0
        self._before_s = 0.0
        self._answered_at = time.monotonic()

    def start(self) -> None:
        """Begin, with a first look at once."""
        self._thread.start()

    def stop(self) -> None:
        """Take no other look."""
        self._ended.set()

    def trouble(self, patience: float) -> str:
        """Why nothing recent is known; empty where it is. A look may take ``patience`` seconds
        more than its turn."""
        if self.error:
            return self.error
        since = time.monotonic() - self._answered_at
        if since > self.pause_s + patience:
            return f"a look at {self.name} has not come back for {since:.0f} s"
        return ""

    @property
    def pause_s(self) -> float:
        """Seconds between two looks. The cheaper one of the last two counts: one that met a
        database which hung for a while says nothing of what looks cost."""
        cost = min(self.took_s, self._before_s)
        return self._interval if self.error else max(self._interval, cost / _SHARE)

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                self.seen = self._take()
                self.seen_at = time.monotonic()
                if self.error:
                    log.info("answers again", what=self.name)
                self.error = ""
            except CdcRelayError as error:
                self._fail(str(error))
            except Exception as error:  # a bug must not end the looks
                self._fail(f"{type(error).__name__}: {error}")
            self._answered_at = time.monotonic()
            self._before_s, self.took_s = self.took_s, self._answered_at - began
            if self._ended.wait(self.pause_s):
                return

    def _fail(self, reason: str) -> None:
        if not self.error:
            log.warning("does not answer", what=self.name, reason=reason)
        self.error = reason


class Table(NamedTuple):
    """What was seen in the database."""

    backlog: Backlog
    troubled: list[Troubled]
    clock_offset_s: float
    """The database's clock minus ours."""
    retention: Retention | None


class Looks:
    """The looks of one relay."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._store = store
        self._arguments = connect_arguments(settings)
        self._timeout = settings.read_timeout
        self._reads_log = settings.source == "binlog"
        self._retention: Retention | None = None
        self._next_log = 0.0
        self.table: Look[Table] = Look("the database", self._look, settings.sample_interval)
        brokers = Brokers(settings)
        self.group: Look[list[Member]] = Look("Kafka", brokers.members, settings.sample_interval)

    def start(self) -> None:
        """Begin looking."""
        self.table.start()
        self.group.start()

    def stop(self) -> None:
        """End looking."""
        self.table.stop()
        self.group.stop()

    def _look(self) -> Table:
        before = time.time()
        backlog = self._store.backlog()
        offset = backlog.clock - (before + time.time()) / 2
        trouble = backlog.dead or backlog.failing or backlog.failing is None
        troubled = self._store.troubled(_TROUBLED) if trouble else []
        now = time.monotonic()
        if self._reads_log and now >= self._next_log:
            self._next_log = now + _LOG_EVERY_S
            self._retention = retention.look(self._arguments, self._timeout)
        return Table(backlog, troubled, offset, self._retention)
