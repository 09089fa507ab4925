"""What marking costs the database: bytes of binlog and CPU time, for each way to mark."""

from __future__ import annotations

from typing import Final

from benchmarks import workload
from benchmarks.command import Plan
from benchmarks.figures import Figure
from benchmarks.place import Place
from benchmarks.relay import ready
from dev.console import say

_MODES: Final = (
    ("none", "server"),
    ("update", "server"),
    ("update", "minimal"),
    ("delete", "server"),
    ("delete", "minimal"),
)


def marks(place: Place, plan: Plan) -> list[Figure]:
    """Each mode on a backlog of its own of the same kind; the server writes whole row images
    (``binlog_row_image=FULL``, its default)."""
    figures = []
    for mark, image in _MODES:
        written, database = [], []
        for turn in range(plan.runs):
            place.clear()
            one = ready(place, "exactly_once", mark, mark_row_image=image)
            workload.load(place, "orders", plan.orders)
            before = place.binlog_bytes()
            done = one.drain(plan.orders)
            written.append((place.binlog_bytes() - before) / plan.orders)
            database.append(done.database_cpu_per_million)
            say(f"marks {turn + 1}/{plan.runs}: {mark}, {image}: {written[-1]:.1f} bytes a row")
        name = f"marks: mark={mark}, mark_row_image={image}"
        figures += [
            Figure(name, "binlog", "bytes per row", written),
            Figure(name, "CPU of MySQL", "s per 10⁶ rows", database),
        ]
    return figures
