"""What ``purge`` and ``archive`` have in common: options, progress, summary."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

import click
import structlog
from sqlalchemy import Engine

from cdc_relay.cli.options import DATABASE, KAFKA, LOGGING, duration, settings_options
from cdc_relay.config import Settings
from cdc_relay.database import TableShape, connected, describe_table, engine, replica_engine
from cdc_relay.housekeeping import OldRows, Pace
from cdc_relay.housekeeping.partitions import Dropped
from cdc_relay.housekeeping.rows import STATUS_NAMES, Take
from cdc_relay.signals import stop_on_signal

_PROGRESS_S: Final = 2.0

log: Any = structlog.get_logger(__name__)


def housekeeping_options(verb: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the settings of a database and the options of a clean-up."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        options = [
            settings_options(*DATABASE, *KAFKA, "replicas", *LOGGING),
            click.option(
                "--older-than",
                default="7d",
                show_default=True,
                metavar="DURATION",
                callback=duration,
                help=f"Age of the rows to {verb}, since they were sent.",
            ),
            click.option(
                "--batch",
                default=1000,
                show_default=True,
                type=click.IntRange(1, 10_000),
                metavar="N",
                help="Rows of one transaction, at most.",
            ),
            click.option(
                "--max-lag",
                default="10s",
                show_default=True,
                metavar="DURATION",
                callback=duration,
                help="Pause while one of --replicas is further behind.",
            ),
        ]
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


class Run:
    """One run of a clean-up: what it works with and what it has done."""

    def __init__(
        self, pool: Engine, shape: TableShape, old: OldRows, pace: Pace, stop: threading.Event
    ) -> None:
        self.pool = pool
        self.shape = shape
        self.old = old
        self.stop = stop
        self.days: Counter[str] = Counter()
        self._pace = pace
        self.kept_since: float | None = None
        """Rows that were sent after this, in seconds since 1970, stay for a relay that is away."""
        self._rows: Counter[str] = Counter()
        self._partitions: list[Dropped] = []
        self._batches = 0
        self._left: dict[str, int] = {}
        self._began = time.monotonic()
        self._took = 0.0

    def partition(self, dropped: Dropped) -> None:
        """Note a partition that was dropped."""
        self._partitions.append(dropped)
        self._rows.update(dropped.rows)
        log.info("partition dropped", **asdict(dropped))

    def through(self, doing: str, limit: int, take: Take | None = None) -> None:
        """Take the old rows away, batch after batch, with progress in the log."""
        began = said = time.monotonic()
        for batch in self.old.batches(limit, take, self.stop.is_set):
            now = time.monotonic()
            self._rows[STATUS_NAMES[batch.status]] += batch.rows
            self.days.update(batch.days)
            self._batches += bool(batch.rows)
            if now - said > _PROGRESS_S:
                said = now
                log.info(doing, rows=self._rows.total(), day=max(batch.days, default=None))
            self._pace.rest(now - began)
            began = time.monotonic()

    def end(self) -> None:
        """Count what stays."""
        self._left = self.old.left()
        self._took = time.monotonic() - self._began
        if self._left["pending"]:
            log.warning(
                "rows of that age are still pending, and stay: is the relay running?",
                pending=self._left["pending"],
            )

    def summary(self) -> dict[str, Any]:
        """What was done, and what is as old and stays."""
        return {
            "sent": self._rows["sent"],
            "dead": self._rows["dead"],
            "partitions": [asdict(dropped) for dropped in self._partitions],
            "left": self._left,
            "kept_since": self.kept_since,
            "referenced": self.old.referenced,
            "batches": self._batches,
            "paused_s": round(self._pace.paused_s, 3),
            "seconds": round(self._took, 3),
            "stopped": self.stop.is_set(),
        }

    def rest(self) -> str:
        """The end of the summary in words."""
        left = ", ".join(f"{count} {name}" for name, count in self._left.items())
        if self.old.referenced:
            left += f", {self.old.referenced} that another table refers to"
        stopped = ", stopped by a signal" if self.stop.is_set() else ""
        return f"of that age stay {left}; {self._batches} batches in {self._took:.1f} s{stopped}"


def _kept(settings: Settings) -> tuple[float | None, float]:
    """Since when, in seconds since 1970, rows stay whatever their age, and how old they are now: a
    relay that comes back over them asks the table whether they were sent, and sends again what it
    does not find."""
    if not settings.kafka_bootstrap or settings.mark == "none":
        return None, 0.0
    from cdc_relay.kafka.passes import CLOCKS_S, sent_ahead_since

    since = sent_ahead_since(settings)
    if since is None:
        return None, 0.0
    log.warning(
        "rows stay that the relay has still to come over: it would send again what is gone; start "
        "it, or cdc-relay position set --current",
        sent_since=datetime.fromtimestamp(since, UTC).isoformat(timespec="seconds"),
    )
    return since, time.time() - since + CLOCKS_S


@contextmanager
def run(settings: Settings, older_than_s: float, *, dead: bool, max_lag_s: float) -> Iterator[Run]:
    """Give a run over the table of these settings, which SIGTERM stops after the batch in hand."""
    with ExitStack() as stack:
        stop = stack.enter_context(stop_on_signal())
        pool = engine(settings)
        stack.callback(pool.dispose)
        with connected(pool) as connection:
            shape = describe_table(connection, settings)
        replicas = [replica_engine(settings, address) for address in settings.replicas]
        for replica in replicas:
            stack.callback(replica.dispose)
        pace = Pace(pool, stop, replicas, max_lag_s)
        kept_since, kept_s = _kept(settings)
        older_than_s = max(older_than_s, kept_s)
        work = Run(pool, shape, OldRows(pool, shape, older_than_s, dead=dead), pace, stop)
        work.kept_since = kept_since
        yield work
        work.end()
