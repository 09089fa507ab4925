"""``python -m benchmarks.peers [SCENARIO...]``: we and Debezium on the same rows, in turns."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from typing import Final

from benchmarks import workload
from benchmarks.command import Plan, run
from benchmarks.figures import Figure
from benchmarks.latency import steady
from benchmarks.peers import dist
from benchmarks.peers.debezium import Debezium, Variant
from benchmarks.place import Place
from benchmarks.reader import peak_rss
from benchmarks.relay import MODES, Drain, Relay, cpu_seconds, ready
from dev.console import say

_MIB: Final = 2**20
_VARIANTS: Final[tuple[Variant, ...]] = ("defaults", "tuned", "exactly once")
_PACES: Final = (200, 1000, 2000)
_STEADY_S: Final = 20.0
# Rows that a peer carries before its latency is taken: its compiler is done by then.
_WARM_UP: Final = 120_000
_IDLE_S: Final = 20.0
_SETTLE_S: Final = 20.0

_numbers = itertools.count(1)


def backlog(place: Place, plan: Plan) -> list[Figure]:
    """Single orders, each a transaction."""
    return _carried(place, plan, "backlog", plan.orders, _transactions("orders"))


def beside(place: Place, plan: Plan) -> list[Figure]:
    """Nine row events of other tables for each of ours."""
    return _carried(place, plan, "beside", max(plan.orders // 10, 1), _transactions("mixed"))


def sizes(place: Place, plan: Plan) -> list[Figure]:
    """Events of 100 bytes to 100 kB."""
    return _carried(place, plan, "sizes", max(plan.orders // 20, 1), _transactions("sized"))


def large(place: Place, plan: Plan) -> list[Figure]:
    """One transaction of a million rows."""
    return _carried(place, plan, "large", 0, lambda place, _: workload.one_transaction(place))


def _transactions(workload_name: str) -> Callable[[Place, int], int]:
    def fill(place: Place, rows: int) -> int:
        seconds = workload.load(place, workload_name, rows)
        say(f"loaded {rows} transactions ({workload_name}), {rows / seconds:,.0f} a second")
        return rows

    return fill


def _carried(
    place: Place, plan: Plan, scenario: str, rows: int, fill: Callable[[Place, int], int]
) -> list[Figure]:
    """What ``fill`` commits, carried to Kafka by each, one after the other."""
    done: dict[str, list[Drain]] = {}
    place.clear()
    warm_up = ready(place, *MODES[1])
    workload.load(place, "orders", _WARM_UP)
    warm_up.drain(_WARM_UP)  # or the first side would meet brokers whose compiler still works
    for turn in range(plan.runs):
        place.clear()
        sides: dict[str, Relay | Debezium] = {
            **{f"Debezium, {variant}": _debezium(place, variant) for variant in _VARIANTS},
            **{f"cdc-relay, {mode[0]}, mark={mode[1]}": ready(place, *mode) for mode in MODES},
        }
        count = fill(place, rows)
        for name, side in sides.items():
            drain = side.drain(count)
            done.setdefault(name, []).append(drain)
            say(f"{scenario} {turn + 1}/{plan.runs}: {name} {drain.rate:,.0f} rows/s")
    figures = [
        Figure(f"{scenario}: {name}", what, unit, values)
        for name, drains in done.items()
        for what, unit, values in (
            ("first to last append in Kafka", "rows/s", [d.rate for d in drains]),
            ("the same, warm", "rows/s", [d.warm for d in drains]),
            ("start of the process to the first record", "s", [d.first for d in drains]),
            ("CPU of the process", "s per 10⁶ rows", [d.cpu_per_million for d in drains]),
            ("CPU of MySQL", "s per 10⁶ rows", [d.database_cpu_per_million for d in drains]),
            ("largest resident size", "MiB", [d.peak_rss / _MIB for d in drains]),
        )
    ]
    return figures + _ratios(scenario, done)


def _ratios(scenario: str, done: dict[str, list[Drain]]) -> list[Figure]:
    """Our whole rate over theirs when warm, within each turn; theirs at its best, of defaults and
    tuned."""
    pairs = list(zip(done["Debezium, defaults"], done["Debezium, tuned"], strict=True))
    best = [max(defaults.warm, tuned.warm) for defaults, tuned in pairs]
    once = [drain.warm for drain in done["Debezium, exactly once"]]
    cpu = [min(one.cpu_per_million, other.cpu_per_million) for one, other in pairs]
    rss = [min(one.peak_rss, other.peak_rss) for one, other in pairs]
    figures = []
    for mode in MODES:
        name = f"cdc-relay, {mode[0]}, mark={mode[1]}"
        ours = done[name]
        figures += [
            Figure(
                f"{scenario}, ratio: {name}",
                what,
                "×",
                [a / b for a, b in zip(top, bottom, strict=True)],
            )
            for what, top, bottom in (
                ("rate / Debezium's best warm rate", [d.rate for d in ours], best),
                ("rate / Debezium's exactly once, warm", [d.rate for d in ours], once),
                ("Debezium's least CPU / ours", cpu, [d.cpu_per_million for d in ours]),
                ("Debezium's least memory / ours", rss, [d.peak_rss for d in ours]),
            )
        ]
    return figures


def latency(place: Place, plan: Plan) -> list[Figure]:
    """From COMMIT to a read_committed consumer at a steady pace, each warm; then what it costs to
    be idle."""
    figures = []
    for name, make in (
        ("cdc-relay, at_least_once, mark=none", lambda: ready(place, "at_least_once", "none")),
        ("cdc-relay, exactly_once, mark=update", lambda: ready(place, "exactly_once", "update")),
        ("Debezium, low latency", lambda: _debezium(place, "low latency")),
        ("Debezium, defaults", lambda: _debezium(place, "defaults")),
    ):
        for rate in _PACES:
            place.clear()
            side = make()
            place.create_topic(f"{side.name}.event.warm-up")
            workload.load(place, "warm-up", _WARM_UP)
            done = steady(place, side, rate, _STEADY_S)
            figures += done.figures(f"latency: {name}", rate)
            say(f"latency: {name}, {rate}/s: {done}")
        figures += _idle(place, name, make())
    return figures


def _idle(place: Place, name: str, side: Relay | Debezium) -> list[Figure]:
    with side.running():
        time.sleep(_SETTLE_S)
        before = cpu_seconds(side.pid)
        time.sleep(_IDLE_S)
        share = (cpu_seconds(side.pid) - before) / _IDLE_S
        memory = peak_rss(side.pid) / _MIB
    say(f"idle: {name}: {share:.1%} of a core, {memory:.0f} MiB")
    return [
        Figure(f"idle: {name}", "CPU", "% of a core", [share * 100]),
        Figure(f"idle: {name}", "largest resident size", "MiB", [memory]),
    ]


def _debezium(place: Place, variant: Variant) -> Debezium:
    one = Debezium(place, f"peer-{next(_numbers)}", variant)
    one.prepare()
    return one


SCENARIOS: Final[dict[str, Callable[[Place, Plan], list[Figure]]]] = {
    "backlog": backlog,
    "latency": latency,
    "beside": beside,
    "sizes": sizes,
    "large": large,
}


if __name__ == "__main__":
    dist.fetch()
    versions = {"Debezium": dist.DEBEZIUM, "Kafka Connect": dist.CONNECT}
    sys.exit(
        run(
            "python -m benchmarks.peers",
            versions,
            SCENARIOS,
            # So many that most are carried when Java's compiler is done.
            orders=433_000,
            when_named=("beside", "sizes", "large"),
        )
    )
