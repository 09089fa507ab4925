"""The page at ``/``: what it shows, in words and numbers. The browser only draws.

``view`` makes every text here, once for the page as it is sent and for each refresh, so both say
the same. Whatever comes from outside (ids, errors) is text: the template escapes it, the script
sets it as text. Passwords in URLs are masked.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cdc_relay.http.advice import advice, reason_advice
from cdc_relay.http.history import percentile
from cdc_relay.http.report import Report
from cdc_relay.store import Troubled
from cdc_relay.telemetry import masked

if TYPE_CHECKING:
    from jinja2 import Template

RANGES: Final = {"15m": 900.0, "1h": 3600.0, "24h": 86400.0}

_OLD_S: Final = (60.0, 600.0)
_HORIZON_S: Final = (3600.0, 86400.0)
_LAG_S: Final = (1.0, 10.0)
_LONGEST: Final = 300

Level = str
"""``ok``, ``warn``, ``bad``, or ``none`` where nothing is judged."""


class Figure(NamedTuple):
    """One thing shown: its text, the number behind it, and what to think of it."""

    text: str
    value: float | None = None
    level: Level = "none"


def render(report: Report) -> str:
    """The whole page, as HTML."""
    return _template().render(view=view(report), ranges=list(RANGES))


def data(report: Report, span: str) -> dict[str, Any]:
    """What the page refreshes itself with: figures, lists, and the history of ``span``."""
    seconds = RANGES.get(span, RANGES["1h"])
    history = report.history
    track = history.long if seconds > RANGES["1h"] else history.short
    shown = view(report)
    shown["figures"] = {name: figure._asdict() for name, figure in shown["figures"].items()}
    now = time.time()
    return {
        **shown,
        "history": track.ring.columns(now - seconds),
        "now": now,
        "span_s": seconds,
    }


def view(report: Report) -> dict[str, Any]:
    """Everything that the page says now."""
    stuck, not_ready = report.alive(), report.ready()
    reasons = [{"text": _short(one), "advice": reason_advice(one)} for one in stuck or not_ready]
    verdict = (
        Figure("Stuck: it has to be started again", level="bad")
        if stuck
        else Figure("Not carrying events", level="warn")
        if not_ready
        else Figure(
            "Standing by" if report.vitals.role == "standby" else "Carrying events", level="ok"
        )
    )
    return {
        "name": report.settings.name,
        "table": ".".join(report.settings.schema_and_table()),
        "figures": {"verdict": verdict, **_signals(report), **_flow(report), **_place(report)},
        "reasons": reasons,
        "troubled": [_troubled_row(row) for row in _troubled(report)],
        "advice": _advices(_troubled(report)),
        "members": _members(report),
        "about": {
            "version": report.version,
            "decoder": "compiled" if report.compiled else "plain Python",
            "python": report.python,
            "delivery": report.settings.delivery,
            "mark": report.settings.mark,
        },
    }


def _signals(report: Report) -> dict[str, Figure]:
    signals = _table_signals(report)
    if not report.looks.table.trouble(report.settings.silence()):
        return signals
    # Old figures are no good news.
    return {
        name: figure._replace(level="none" if figure.level == "ok" else figure.level)
        for name, figure in signals.items()
    } | {"looked": signals["looked"]._replace(level="warn")}


def _table_signals(report: Report) -> dict[str, Figure]:
    table = report.looks.table
    if table.seen is None:
        unknown = Figure("unknown", level="warn" if table.error else "none")
        return dict.fromkeys(("pending", "oldest", "dead", "failing", "looked"), unknown)
    backlog = table.seen.backlog
    age = time.monotonic() - table.seen_at
    stale = Figure(f"{duration(age)} ago", age, "warn" if table.error else "none")
    dead = Figure(number(backlog.dead), backlog.dead, "bad" if backlog.dead else "ok")
    if not report.marks:
        # Nothing is marked, so everything stays pending for ever: no signal.
        unmarked = Figure("not told without marks")
        return {
            "pending": unmarked,
            "oldest": unmarked,
            "dead": dead,
            "failing": unmarked,
            "looked": stale,
        }
    oldest = report.oldest_s()
    failing = backlog.failing
    return {
        "pending": Figure(number(backlog.pending), backlog.pending, _rising(oldest or 0.0, _OLD_S)),
        "oldest": Figure("none", 0.0, "ok")
        if oldest is None
        else Figure(duration(oldest), oldest, _rising(oldest, _OLD_S)),
        "dead": dead,
        "failing": Figure("unknown")
        if failing is None
        else Figure(number(failing), failing, "warn" if failing else "ok"),
        "looked": stale,
    }


def _flow(report: Report) -> dict[str, Figure]:
    vitals = report.vitals
    counters = vitals.counters
    recent = report.history.short.ring.columns(time.time() - 30.0)
    sent = [value for value in recent["sent"] if value is not None]
    rate = sent[-1] if sent else None
    lags = report.history.short.lately()
    p50, p99 = (percentile(vitals.lag.bounds, lags, share) for share in (0.5, 0.99))
    counted = {
        name: Figure(number(getattr(counters, name)), getattr(counters, name))
        for name in ("received", "sent", "marked", "parked", "held", "dropped", "swept", "retries")
    }
    quiet = Figure("–")
    return {
        **counted,
        "rate": Figure("no sample yet") if rate is None else Figure(f"{rate:,.1f}/s", rate),
        "p50": Figure(duration(p50), p50, _rising(p50, _LAG_S)) if any(lags) else quiet,
        "p99": Figure(duration(p99), p99, _rising(p99, _LAG_S)) if any(lags) else quiet,
        "owed": Figure(number(vitals.owed), vitals.owed),
        "closed": Figure(number(vitals.closed), vitals.closed, "warn" if vitals.closed else "ok"),
        "role": Figure({"owner": "owner", "standby": "standby"}.get(vitals.role, "starting")),
        "uptime": Figure(duration(time.time() - vitals.started)),
    }


def _place(report: Report) -> dict[str, Figure]:
    vitals = report.vitals
    position = vitals.position
    horizon = report.horizon_s()
    up = report.up()
    names = {"reader": "connected", "database": "answers", "broker": "answers"}
    ups = {
        name: Figure(
            good if up[name] else "no answer" if name != "reader" else "not connected",
            float(up[name]),
            "ok" if up[name] else "warn",
        )
        for name, good in names.items()
    }
    if vitals.role == "standby":
        ups["reader"] = Figure("stands by")
    age = time.time() - vitals.saved
    return {
        **ups,
        "position": Figure(
            "none yet" if position is None else f"{position.file}:{position.offset}"
        ),
        "gtids": Figure(
            "none" if position is None or not position.gtids else position.gtids.replace(",", ", ")
        ),
        "checkpoint": Figure(f"{duration(age)} ago", age) if vitals.saved else Figure("none yet"),
        "commit": Figure(clock(vitals.commit_time / 1e6) if vitals.commit_time else "none yet"),
        "horizon": Figure("not known, or never")
        if horizon is None
        else Figure(duration(horizon), horizon, _falling(horizon, _HORIZON_S)),
    }


def _troubled(report: Report) -> Sequence[Troubled]:
    seen = report.looks.table.seen
    return seen.troubled if seen is not None else ()


def _troubled_row(row: Troubled) -> list[str]:
    if row.due_in_s is None:
        due = "never by itself"
    else:
        due = f"in {duration(row.due_in_s)}" if row.due_in_s > 0 else "now"
    return [
        "dead" if row.dead else "parked",
        f"{row.aggregate_type} / {row.aggregate_id}",
        row.event_type,
        str(row.tries),
        due,
        _short(row.reason) or "not written down",
        row.event_id,
    ]


def _advices(rows: Sequence[Troubled]) -> list[str]:
    return list(dict.fromkeys(advice(row.reason, dead=row.dead) for row in rows))[:4]


def _members(report: Report) -> list[list[str]]:
    seen = report.looks.group.seen or []
    return [
        [
            member.id,
            member.host,
            "owns shard " + ", ".join(map(str, member.shards)) if member.shards else "stands by",
        ]
        for member in seen
    ]


def number(value: float) -> str:
    """A whole number for people."""
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """A time for people: two figures at most."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.00995 else f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    for unit, size, smaller, part in (("min", 60, "s", 1), ("h", 3600, "min", 60)):
        if seconds < size * (60 if unit == "min" else 48):
            whole, rest = divmod(int(seconds), size)
            return f"{whole} {unit} {rest // part} {smaller}" if rest // part else f"{whole} {unit}"
    days, rest = divmod(int(seconds), 86400)
    return f"{days} d {rest // 3600} h" if rest // 3600 else f"{days} d"


def clock(seconds: float) -> str:
    """A moment, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _rising(value: float, limits: tuple[float, float]) -> Level:
    return "bad" if value >= limits[1] else "warn" if value >= limits[0] else "ok"


def _falling(value: float, limits: tuple[float, float]) -> Level:
    return "bad" if value <= limits[0] else "warn" if value <= limits[1] else "ok"


def _short(text: str) -> str:
    text = str(masked(text))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("cdc_relay.http"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")
