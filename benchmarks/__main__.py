"""``python -m benchmarks [SCENARIO...]``: by default all that take no more than minutes."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.figures import Figure, machine, table
from benchmarks.place import METADATA, place
from benchmarks.reader import active_decoder
from benchmarks.scenarios import NEED_KAFKA, SCENARIOS, WHEN_NAMED, Plan
from dev.console import DevError


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table; 0 done, 1 something failed (said on stderr)."""
    arguments = _parser().parse_args(argv)
    scenarios: list[str] = arguments.scenarios or [
        name for name in SCENARIOS if name not in WHEN_NAMED
    ]
    plan = Plan(arguments.orders, arguments.runs, min(arguments.slice, arguments.orders))
    # So that the servers are stopped and removed then as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    about = machine() | {"decoder": active_decoder(), "binlog_row_metadata": METADATA}
    figures: list[Figure] = []
    try:
        with place(kafka=any(name in NEED_KAFKA for name in scenarios)) as servers:
            about["MySQL"] = str(servers.sql("SELECT VERSION()")[0][0])
            for name in scenarios:
                figures += SCENARIOS[name](servers, plan)
    except (DevError, RuntimeError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    console = Console() if sys.stdout.isatty() else Console(width=110)
    console.print(table(figures))
    for key, value in (about | {"load at the end": machine()["load"]}).items():
        console.print(f"{key}: {value}", highlight=False)
    if arguments.json:
        result = {"about": about, "plan": vars(plan), "figures": [f.to_json() for f in figures]}
        arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--orders", type=_positive, default=118_402, help="orders in the backlog")
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


if __name__ == "__main__":
    sys.exit(main())
