"""``/metrics`` for Prometheus: read from what the relay counts anyway, at the moment of the scrape.

Nothing here is touched by the threads that do the work. What is not known is left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from cdc_relay.http.report import Report
from cdc_relay.position import GtidSet, MariaGtidPosition, Position, file_number
from cdc_relay.vitals import Distribution

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_COUNTERS: Final = {
    "received": "Rows read from the source.",
    "sent": "Rows acknowledged by Kafka.",
    "marked": "Rows marked as sent in the table.",
    "parked": "Refusals of rows, each of which parks its aggregate.",
    "dead": "Rows that this relay gave up after too many tries.",
    "retries": "Rows that were tried again after a refusal.",
    "held": "Rows left pending because an earlier row of their aggregate is parked.",
    "dropped": "Rows of the stream that somebody else had sent already.",
    "gone": "Rows that had to be read from the table, or were refused, and are not there any more.",
    "swept": "Pending rows that were sent from the table.",
}


class RelayCollector(Collector):
    """Gives the relay's metrics, made anew for each scrape."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry need not scrape to know the names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        yield from self._work()
        yield from self._condition()
        yield from self._table()
        yield from self._position()
        yield from self._about()

    def _work(self) -> Iterator[Metric]:
        vitals = self._report.vitals
        for name, words in _COUNTERS.items():
            yield _counter(name, words, getattr(vitals.counters, name))
        yield _counter(
            "reconnects", "Connections to the binlog that were lost.", vitals.reading.reconnects
        )
        yield _counter("terms", "Times that this process became the owner.", vitals.terms)
        yield _counter(
            "anchors",
            "Times that the stream was anchored anew at the end of the log.",
            vitals.anchors,
        )
        yield _histogram(
            "lag_seconds",
            "Time from commit in the database to acknowledgement by Kafka, by row.",
            vitals.lag,
        )
        yield _histogram("transaction_rows", "Rows sent together.", vitals.group_rows)
        yield _histogram(
            "transaction_seconds", "Time that sending them took.", vitals.group_seconds
        )

    def _condition(self) -> Iterator[Metric]:
        report = self._report
        vitals, now = report.vitals, time.monotonic()
        up = report.up()
        yield _gauge("reader_up", "Whether the binlog is being read.", up["reader"])
        yield _gauge("database_up", "Whether the database answers.", up["database"])
        yield _gauge("broker_up", "Whether Kafka answers.", up["broker"])
        role = GaugeMetricFamily(
            "cdc_relay_role", "What this process is: 1 for one of three.", labels=["role"]
        )
        for name in ("starting", "standby", "owner"):
            role.add_metric([name], float(vitals.role == name))
        yield role
        yield _gauge("alive", "What /healthz says.", not report.alive())
        yield _gauge("ready", "What /readyz says.", not report.ready())
        yield _gauge("loop_age_seconds", "Time since the relay's loop turned.", now - vitals.turned)
        if vitals.reading.running:
            yield _gauge(
                "heard_age_seconds",
                "Time since the database was heard of.",
                0.0 if vitals.reading.handing_on else now - vitals.reading.heard,
            )
        yield _gauge(
            "sweeping", "Whether pending rows are being sent from the table.", vitals.sweeping
        )
        yield _gauge("owed_marks", "Rows acknowledged and not yet marked.", vitals.owed)
        yield _gauge(
            "closed_aggregates", "Aggregates that wait behind a refused row.", vitals.closed
        )
        members = report.looks.group.seen
        if members is not None:
            yield _gauge("members", "Relays of this name that are alive.", len(members))

    def _table(self) -> Iterator[Metric]:
        looks = self._report.looks.table
        if looks.seen is None:
            return
        backlog = looks.seen.backlog
        yield _gauge(
            "sample_age_seconds",
            "Time since the table was looked at.",
            time.monotonic() - looks.seen_at,
        )
        yield _gauge("sample_duration_seconds", "Time that the look took.", looks.took_s)
        yield _gauge(
            "clock_offset_seconds",
            "The database's clock minus this machine's.",
            looks.seen.clock_offset_s,
        )
        yield _gauge("dead_rows", "Rows that were given up.", backlog.dead)
        if not self._report.marks:
            return  # nothing ever leaves pending
        yield _gauge("pending_rows", "Rows that are not sent.", backlog.pending)
        yield _gauge(
            "oldest_pending_age_seconds",
            "Age of the oldest pending row; 0 for none.",
            self._report.oldest_s() or 0.0,
        )
        if backlog.failing is not None:
            yield _gauge(
                "failing_rows", "Pending rows that were refused at least once.", backlog.failing
            )

    def _position(self) -> Iterator[Metric]:
        vitals = self._report.vitals
        if vitals.saved:
            yield _gauge(
                "checkpoint_age_seconds",
                "Time since a checkpoint was written; an idle relay writes none.",
                max(0.0, time.time() - vitals.saved),
            )
        if vitals.commit_time:
            yield _gauge(
                "last_commit_timestamp_seconds",
                "When the last transaction that was read had been committed, since 1970.",
                vitals.commit_time / 1e6,
            )
        position = vitals.position
        if position is None:
            return
        yield _gauge(
            "position_file_number",
            "Number of the binlog file of the checkpoint.",
            file_number(position.file),
        )
        yield _gauge(
            "position_offset_bytes", "Offset of the checkpoint in that file.", position.offset
        )
        yield from _transactions(position)
        horizon = self._report.horizon_s()
        if horizon is not None:
            yield _gauge(
                "purge_horizon_seconds",
                "Time until the server may purge the binlog that "
                "the relay has yet to read, at least.",
                horizon,
            )

    def _about(self) -> Iterator[Metric]:
        report = self._report
        yield _gauge("compiled", "Whether the decoder is compiled.", report.compiled)
        yield _gauge(
            "start_time_seconds", "When the relay started, since 1970.", report.vitals.started
        )
        yield InfoMetricFamily(
            "cdc_relay_build",
            "What runs here.",
            {
                "version": report.version,
                "python": report.python,
                "decoder": "compiled" if report.compiled else "python",
            },
        )
        settings = report.settings
        yield InfoMetricFamily(
            "cdc_relay_settings",
            "How it was set up.",
            {
                "name": settings.name,
                "table": settings.table,
                "delivery": settings.delivery,
                "source": settings.source,
                "mark": settings.mark,
            },
        )


def make_registry(report: Report) -> CollectorRegistry:
    """A registry of our own with the relay's metrics and the process's."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RelayCollector(report))
    ProcessCollector(registry=registry)
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """The text that Prometheus reads."""
    return generate_latest(registry)


def _counter(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(f"cdc_relay_{name}", words, value)


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(f"cdc_relay_{name}", words, float(value))


def _histogram(name: str, words: str, values: Distribution) -> Metric:
    counts = list(values.counts)
    buckets: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip((*values.bounds, math.inf), counts, strict=True):
        below += count
        buckets.append(("+Inf" if math.isinf(bound) else str(bound), below))
    return HistogramMetricFamily(f"cdc_relay_{name}", words, buckets, values.total)


def _transactions(position: Position) -> Iterator[Metric]:
    """The last transaction of each source of the position's GTIDs. (The GTID set itself would be a
    label that changes with every scrape: it is on the page.)"""
    if not position.gtids:
        return
    family = GaugeMetricFamily(
        "cdc_relay_position_transaction",
        "Number of the last transaction before the checkpoint, by source of GTIDs.",
        labels=["source"],
    )
    kind = MariaGtidPosition if position.flavor == "mariadb" else GtidSet
    for source, number in kind(position.gtids).last():
        family.add_metric([source], float(number))
    yield family
