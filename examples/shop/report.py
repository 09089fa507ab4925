"""What the demo found out, as figures and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.table import Table

from examples.shop.ledger import Book

_MIN_SAMPLES: Final = 20


@dataclass(frozen=True)
class Latency:
    """Percentiles in milliseconds; None where there were too few events to speak of."""

    p50_ms: float | None
    p99_ms: float | None

    @classmethod
    def of(cls, nanoseconds: Iterable[int]) -> Latency:
        values = sorted(nanoseconds)
        if len(values) < _MIN_SAMPLES:
            return cls(None, None)
        return cls(_percentile(values, 0.50), _percentile(values, 0.99))


@dataclass(frozen=True)
class Figures:
    """One shop's column. ``committed`` is counted in its orders table, nowhere else."""

    committed: int
    arrived: int
    lost: int
    invented: int
    """Events whose order does not exist (rolled back)."""
    duplicates: int
    out_of_order: int
    calm: Latency
    """Of the orders placed at a steady rate after the storm of kills."""
    overall: Latency

    @classmethod
    def of(cls, order_ids: set[int], book: Book, calm_ns: tuple[int, int]) -> Figures:
        arrived = set(book.orders)
        start, end = calm_ns
        calm = (
            latency
            for placed, latency in zip(book.placed_ns, book.latency_ns, strict=True)
            if start <= placed < end
        )
        return cls(
            committed=len(order_ids),
            arrived=book.distinct,
            lost=len(order_ids - arrived),
            invented=len(arrived - order_ids),
            duplicates=book.duplicates,
            out_of_order=book.steps_back,
            calm=Latency.of(calm),
            overall=Latency.of(book.latency_ns),
        )


def table(outbox: Figures, naive: Figures, rate: float) -> Table:
    """Return the closing table, the two shops side by side."""
    result = Table(title="The same shop, the same load, the same kills", title_justify="left")
    result.add_column("")
    result.add_column("outbox + cdc-relay", justify="right")
    result.add_column("commit, then send", justify="right")
    for name, values in {
        "orders committed": [f"{one.committed:,}" for one in (outbox, naive)],
        "events arrived": [f"{one.arrived:,}" for one in (outbox, naive)],
        "[bold]lost": [_bad(one.lost) for one in (outbox, naive)],
        "events without an order": [_bad(one.invented) for one in (outbox, naive)],
        "duplicates": [_bad(one.duplicates) for one in (outbox, naive)],
        "out of order": [_bad(one.out_of_order) for one in (outbox, naive)],
        f"latency p50, {rate:g} orders/s, no kills": [_ms(o.calm.p50_ms) for o in (outbox, naive)],
        f"latency p99, {rate:g} orders/s, no kills": [_ms(o.calm.p99_ms) for o in (outbox, naive)],
        "latency p50 of all, kills included": [_ms(o.overall.p50_ms) for o in (outbox, naive)],
        "latency p99 of all, kills included": [_ms(o.overall.p99_ms) for o in (outbox, naive)],
    }.items():
        result.add_row(name, *values)
    return result


def _percentile(values: Sequence[int], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))] / 1e6


def _bad(count: int) -> str:
    return f"[red]{count:,}[/red]" if count else "[green]0[/green]"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f} ms"
