"""What came out: figures of several runs, as a table and as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One thing that was measured, once per run."""

    scenario: str
    name: str
    unit: str
    values: Sequence[float]

    @property
    def median(self) -> float:
        return median(self.values)

    def to_json(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario,
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "runs": list(self.values),
        }


def table(figures: Sequence[Figure]) -> Table:
    """Medians, and the lowest and highest run beside them."""
    made = Table(box=box.SIMPLE_HEAD)
    made.add_column("what")
    for column in ("median", "lowest", "highest"):
        made.add_column(column, justify="right")
    made.add_column("unit")
    scenario = ""
    for figure in figures:
        if figure.scenario != scenario:
            scenario = figure.scenario
            made.add_section()
            made.add_row(f"[bold]{scenario}[/bold]")
        numbers = (figure.median, min(figure.values), max(figure.values))
        made.add_row(figure.name, *map(_text, numbers), figure.unit)
    return made


def _text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def machine() -> dict[str, str]:
    """What it ran on, and how busy that was."""
    cpus = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": f"{os.cpu_count()} × {cpus[0] if cpus else platform.machine()}",
        "memory": f"{memory / 2**30:.0f} GiB",
        "system": platform.platform(),
        "load": f"{os.getloadavg()[0]:.1f} in the last minute",
        "Python": platform.python_version(),
        **{name: version(name) for name in ("confluent-kafka", "PyMySQL", "mysql-replication")},
    }
