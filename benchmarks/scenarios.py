"""The measurements. Each takes a place and a plan and returns figures.

What is compared runs in turns (A B A B) on the same rows, so that a busy minute of the machine
meets all of them; ratios are taken within a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from benchmarks import workload
from benchmarks.command import Plan
from benchmarks.figures import Figure
from benchmarks.growth import growth
from benchmarks.latency import steady
from benchmarks.marks import marks
from benchmarks.place import Place
from benchmarks.reader import Job, Reader, Reading, active_decoder, read
from benchmarks.relay import MODES, Drain, Relay, ready
from benchmarks.writer import measure
from cdc_relay.binlog.stream import inspect
from dev.console import say

_MIB: Final = 2**20
# Number of the first order of a second load: above those of the first.
_FAR: Final = 1_000_000_000
# Orders a second of the steady load, and for how long.
_PACES: Final = (200, 1000, 2000)
_STEADY_S: Final = 15.0

_OURS: Final[tuple[Reader, ...]] = ("ours-python", "ours")


def decode(place: Place, plan: Plan) -> list[Figure]:
    """Rows per second of the decoders alone, nothing behind them."""
    start = _backlog(place, "orders", plan.orders)
    readings = _readers()
    for turn in range(plan.runs):
        for reader, done in readings.items():
            rows = plan.orders if reader in _OURS else plan.slice
            done.append(read(Job(reader, place.url, start, rows)))
            say(f"decode {turn + 1}/{plan.runs}: {reader} {_per_second(done[-1].rate)}")
    return _compared("decode", "rows", readings)


def skip(place: Place, plan: Plan) -> list[Figure]:
    """Events per second of traffic that is not ours, and of traffic with a row of ours among it."""
    count = plan.orders
    start = _backlog(place, "orders", 1)
    # Rows of ours stand before it, after the slice and after it all, so that a reader sees where
    # it is.
    for first, last in ((1, plan.slice), (plan.slice + 1, count)):
        _load(place, "unrelated", last - first + 1, first=first)
        workload.load(place, "orders", 1, first=_FAR + last)
    readings = _readers()
    for turn in range(plan.runs):
        for reader, done in readings.items():
            whole = reader in _OURS
            events = workload.UNRELATED_EVENTS * (count if whole else plan.slice)
            reading = read(Job(reader, place.url, start, 3 if whole else 2))
            done.append(replace(reading, count=events))
            say(f"skip {turn + 1}/{plan.runs}: {reader} {_per_second(done[-1].rate)}")
    figures = _compared("skip: nothing of ours", "events", readings)

    count = max(plan.orders // 5, 1)
    start = _backlog(place, "mixed", count)
    events = count * (
        workload.ORDER_EVENTS + workload.UNRELATED_PER_ORDER * workload.UNRELATED_EVENTS
    )
    mixed: list[Reading] = []
    for turn in range(plan.runs):
        mixed.append(replace(read(Job("ours", place.url, start, count)), count=events))
        say(f"skip {turn + 1}/{plan.runs}: one in ten ours {_per_second(mixed[-1].rate)}")
    name = f"ours ({mixed[0].decoder})"
    return figures + _rates("skip: one row in ten ours", name, "events", mixed)


def relay(place: Place, plan: Plan) -> list[Figure]:
    """The whole path: binlog to records that Kafka has acknowledged, marks and checkpoint."""
    stock: dict[Reader, list[Reading]] = {"stock": [], "stock-tuned": []}
    drains: dict[tuple[str, str], list[Drain]] = {mode: [] for mode in MODES}
    for turn in range(plan.runs):
        relays = [_ready(place, *mode) for mode in drains]
        start = _backlog(place, "orders", plan.orders, clear=False)
        for reader, readings in stock.items():
            readings.append(read(Job(reader, place.url, start, plan.slice)))
        for one in relays:
            drain = one.drain(plan.orders)
            drains[one.delivery, one.mark].append(drain)
            rate = _per_second(drain.rate)
            say(f"relay {turn + 1}/{plan.runs}: {one.delivery}, mark={one.mark} {rate}")
    figures = [
        Figure("relay", f"{reader}, decoding only", "rows/s", [r.rate for r in readings])
        for reader, readings in stock.items()
    ]
    for (delivery, mark), done in drains.items():
        ratios = {
            reader: [drain.rate / one.rate for drain, one in zip(done, readings, strict=True)]
            for reader, readings in stock.items()
        }
        figures += [
            Figure(f"relay: {delivery}, mark={mark}", name, unit, values)
            for name, unit, values in (
                ("first to last append in Kafka", "rows/s", [d.rate for d in done]),
                *(
                    (f"the same / {reader}, decoding only", "×", ratio)
                    for reader, ratio in ratios.items()
                ),
                ("start of the process to its end", "s", [d.wall for d in done]),
                ("start of the process to the first record", "s", [d.first for d in done]),
                ("CPU of the process", "s per 10⁶ rows", [d.cpu_per_million for d in done]),
                ("largest resident size", "MiB", [d.peak_rss / _MIB for d in done]),
            )
        ]
    return figures


def memory(place: Place, plan: Plan) -> list[Figure]:
    """Resident size of the relay against the length of what it reads."""
    figures = []
    for kind, each in (
        ("orders", workload.ORDER_EVENTS),
        ("unrelated", workload.UNRELATED_EVENTS),
    ):
        for count in (max(plan.orders // 10, 1), plan.orders):
            one = _ready(place, "exactly_once", "none")
            _backlog(place, kind, count, clear=False)
            peak = one.run().peak_rss / _MIB
            say(f"memory: {count} {kind} {peak:.1f} MiB")
            figures.append(Figure("memory", f"{count * each:,} events, {kind}", "MiB", [peak]))
    return figures


def writer(place: Place, plan: Plan) -> list[Figure]:
    """The writer library's calls beside plain INSERTs."""
    return measure(place, plan.runs)


def latency(place: Place, plan: Plan) -> list[Figure]:
    """From commit to a read_committed consumer, at a steady pace, all on this machine."""
    figures = []
    for delivery, mark in (("at_least_once", "none"), ("exactly_once", "update")):
        for rate in _PACES:
            one = _ready(place, delivery, mark)
            done = steady(place, one, rate, _STEADY_S)
            name = f"latency: {delivery}, mark={mark}"
            figures += done.figures(name, rate)
            say(f"{name}, {rate}/s: {done}")
    return figures


def large(place: Place, plan: Plan) -> list[Figure]:
    """The same where it is large: one transaction of a million rows, and 10⁷ events. Takes
    minutes, so it runs only when it is named."""
    figures = []

    def measure(one: Relay, name: str) -> None:
        process = one.run()
        peak = process.peak_rss / _MIB
        say(f"large: {name} {peak:.1f} MiB, {process.wall:.0f} s")
        figures.append(Figure("memory", name, "MiB", [peak]))

    one = _ready(place, "exactly_once", "none")
    rows = workload.one_transaction(place)
    measure(one, f"{rows:,} rows in one transaction")
    one = _ready(place, "exactly_once", "none")
    count = 10**7 // workload.UNRELATED_EVENTS
    _load(place, "unrelated", count)
    measure(one, f"{count * workload.UNRELATED_EVENTS:,} events, unrelated")
    return figures


SCENARIOS: Final[dict[str, Callable[[Place, Plan], list[Figure]]]] = {
    "decode": decode,
    "skip": skip,
    "relay": relay,
    "memory": memory,
    "latency": latency,
    "marks": marks,
    "writer": writer,
    "large": large,
    "growth": growth,
}
WITHOUT_KAFKA: Final = ("decode", "skip", "writer")
WHEN_NAMED: Final = ("large", "growth")


def _backlog(place: Place, kind: str, count: int, *, clear: bool = True) -> dict[str, Any]:
    """Commit the transactions; returns the position before them."""
    if clear:
        place.clear()
    with place.connect() as connection:
        start = inspect(connection).position.to_json()
    _load(place, kind, count)
    return start


def _load(place: Place, kind: str, count: int, *, first: int = 1) -> None:
    seconds = workload.load(place, kind, count, first=first)
    say(f"loaded {count} transactions ({kind}), {count / seconds:,.0f} a second")


def _readers() -> dict[Reader, list[Reading]]:
    """An empty list for each reader to compare, in the order of their turns."""
    ours: tuple[Reader, ...] = ("ours",) if active_decoder() == "python" else _OURS
    return {reader: [] for reader in ("stock", "stock-tuned", *ours)}


def _ready(place: Place, delivery: str, mark: str) -> Relay:
    """A new relay whose checkpoint lies at the present end of the binlog, its topic empty."""
    place.clear()
    return ready(place, delivery, mark)


def _compared(
    scenario: str, what: str, readings: Mapping[Reader, Sequence[Reading]]
) -> list[Figure]:
    """Rates by the clock and by the process's CPU time, and ours over the others' in each turn."""
    figures = [
        figure
        for reader, done in readings.items()
        for figure in _rates(scenario, f"{reader} ({done[0].decoder})", what, done)
    ]
    ours = readings["ours"]
    for reader, done in readings.items():
        if reader not in _OURS:
            pairs = list(zip(ours, done, strict=True))
            figures += [
                Figure(scenario, f"ours / {reader}", "×", [a.rate / b.rate for a, b in pairs]),
                Figure(
                    scenario,
                    f"ours / {reader}, by CPU time",
                    "×",
                    [a.cpu_rate / b.cpu_rate for a, b in pairs],
                ),
            ]
    return figures


def _rates(scenario: str, name: str, what: str, done: Sequence[Reading]) -> list[Figure]:
    return [
        Figure(scenario, name, f"{what}/s", [r.rate for r in done]),
        Figure(scenario, f"{name}, by CPU time", f"{what}/CPU s", [r.cpu_rate for r in done]),
    ]


def _per_second(rate: float) -> str:
    return f"{rate:,.0f}/s"
