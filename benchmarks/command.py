"""What the commands of the benchmarks have in common: options, servers, the table, the JSON."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.figures import Figure, machine, table
from benchmarks.place import METADATA, Place, place
from benchmarks.reader import active_decoder
from dev.console import DevError


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    orders: int
    runs: int
    slice: int
    """Orders that the stock library reads: its rate does not depend on how many."""


Scenarios = Mapping[str, Callable[[Place, Plan], list[Figure]]]


def run(
    program: str,
    about: Mapping[str, str],
    scenarios: Scenarios,
    *,
    orders: int = 118_402,
    when_named: Collection[str] = (),
    without_kafka: Collection[str] = (),
) -> int:
    """Measure, print the table; 0 done, 1 something failed (said on stderr). Without names on the
    command line all scenarios run but those of ``when_named``."""
    arguments = _parser(program, scenarios, orders).parse_args()
    names: list[str] = arguments.scenarios or [name for name in scenarios if name not in when_named]
    plan = Plan(arguments.orders, arguments.runs, min(arguments.slice, arguments.orders))
    # So that the servers are stopped and removed then as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    made = {**machine(), "decoder": active_decoder(), "binlog_row_metadata": METADATA, **about}
    figures: list[Figure] = []
    try:
        with place(kafka=any(name not in without_kafka for name in names)) as servers:
            made["MySQL"] = str(servers.sql("SELECT VERSION()")[0][0])
            for name in names:
                figures += scenarios[name](servers, plan)
    except (DevError, RuntimeError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    made["load at the end"] = machine()["load"]
    console = Console() if sys.stdout.isatty() else Console(width=110)
    console.print(table(figures))
    for key, value in made.items():
        console.print(f"{key}: {value}", highlight=False)
    if arguments.json:
        result = {"about": made, "plan": vars(plan), "figures": [f.to_json() for f in figures]}
        arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return 0


def _parser(program: str, scenarios: Scenarios, orders: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(scenarios))
    parser.add_argument("--orders", type=_positive, default=orders, help="orders in the backlog")
    parser.add_argument("--runs", type=_positive, default=3, help="turns of each measurement")
    parser.add_argument(
        "--slice", type=_positive, default=10_000, help="orders that the stock library reads"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run's figures")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number
