"""``python -m benchmarks.plots FIGURES.json... OUT``: the plots of docs/performance.md as SVG.

Needs matplotlib (``pip install 'matplotlib>=3.8'``), which nothing else here does. Takes what
``--json`` wrote; makes the plots whose figures are there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "cdc-relay"  # the same figures make the same file
mpl.rcParams["svg.fonttype"] = "none"

from matplotlib import pyplot as plt  # noqa: E402

_OURS: Final = "#1f77b4"
_THEIRS: Final = "#b0b0b0"

Figures = Mapping[str, Mapping[str, float]]
"""Medians by scenario and name."""


def main(arguments: Sequence[str]) -> int:
    """Draw; 0 done, 2 wrong use."""
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    *files, out = map(Path, arguments)
    figures: dict[str, dict[str, float]] = {}
    for file in files:
        for one in json.loads(file.read_text())["figures"]:
            figures.setdefault(one["scenario"], {})[one["name"]] = one["median"]
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in (("backlog", _backlog), ("latency", _latency), ("growth", _growth)):
        if any(scenario.startswith(name) for scenario in figures):
            figure = draw(figures)
            figure.savefig(out / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
            print(out / f"{name}.svg")
    return 0


def _sides(figures: Figures, kind: str) -> dict[str, Mapping[str, float]]:
    prefix = f"{kind}: "
    return {
        scenario.removeprefix(prefix): values
        for scenario, values in figures.items()
        if scenario.startswith(prefix)
    }


def _label(side: str) -> str:
    return side.replace("cdc-relay, ", "cdc-relay\n").replace("Debezium, ", "Debezium\n")


def _backlog(figures: Figures) -> Any:
    sides = _sides(figures, "backlog")
    panels = (
        ("first to last append in Kafka", "rows/s"),
        ("CPU of the process", "CPU s per 10⁶ rows"),
        ("largest resident size", "resident MiB"),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 3.2), sharey=True)
    for axis, (name, title) in zip(axes, panels, strict=True):
        values = [values[name] for values in sides.values()]
        bars = axis.barh([_label(side) for side in sides], values, color=_colours(sides))
        axis.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3, fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.2)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    return figure


def _latency(figures: Figures) -> Any:
    sides = _sides(figures, "latency")
    names = {name.rpartition(", ")[0] for values in sides.values() for name in values}
    paces = sorted(names, key=lambda name: int(name.split()[0].replace(",", "")))
    figure, axes = plt.subplots(1, len(paces), figsize=(12, 3.2), sharey=True)
    for axis, pace in zip(axes if len(paces) > 1 else [axes], paces, strict=True):
        for offset, label, shade in ((-0.25, "p50", 1.0), (0.0, "p95", 0.7), (0.25, "p99", 0.4)):
            values = [values[f"{pace}, {label}"] for values in sides.values()]
            places = [number + offset for number in range(len(values))]
            bars = axis.barh(places, values, 0.24, color=_colours(sides), alpha=shade)
            texts = [f"{label} {value:,.1f}" for value in values]
            axis.bar_label(bars, texts, padding=3, fontsize=7)
        axis.set_yticks(range(len(sides)), [_label(side) for side in sides], fontsize=8)
        axis.set_xscale("log")
        axis.set_xlabel("ms from COMMIT to the consumer", fontsize=8)
        axis.set_title(pace, fontsize=10)
        axis.margins(x=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    (axes[0] if len(paces) > 1 else axes).invert_yaxis()
    return figure


def _growth(figures: Figures) -> Any:
    sides = _sides(figures, "growth")
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.2))
    for axis, what in zip(axes, ("rows", "aggregates", "partitions"), strict=True):
        points = sorted(
            (int(name.split()[0].replace(",", "")), values)
            for name, values in sides.items()
            if name.endswith(what)
        )
        xs = [x for x, _ in points]
        seconds = [values["start of the process to its end"] for _, values in points]
        memory = [values["largest resident size"] for _, values in points]
        axis.plot(xs, seconds, "o-", color=_OURS, label="seconds")
        axis.plot(xs, memory, "s--", color=_THEIRS, label="resident MiB")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylim(1, 1000)
        axis.set_xlabel(what, fontsize=9)
        axis.legend(fontsize=8, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def _colours(sides: Mapping[str, object]) -> list[str]:
    return [_OURS if side.startswith("cdc-relay") else _THEIRS for side in sides]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
