"""``make chaos SEEDS=1..100``: one line per seed, a summary, exit code 1 where a promise broke."""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from dev.mariadb import MariaDB
from dev.mysql import MySQL
from tests.chaos import plan as plans
from tests.chaos.checker import Account
from tests.chaos.run import Run, tidy
from tests.chaos.stage import Stage
from tests.support.brokers import ProxiedKafka
from tests.support.servers import BareMySQL


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("seeds", help="such as 7, 1..100 or 3,8,20..30")
    parser.add_argument("--home", type=Path, help="where servers and logs live")
    parser.add_argument("--faults", help="only these faults of the plan, by number: 1,4")
    parser.add_argument("--show", action="store_true", help="print the plans and run nothing")
    parser.add_argument("--keep", action="store_true", help="keep the logs of every seed")
    options = parser.parse_args()
    made = [plans.make(seed) for seed in seeds(options.seeds)]
    if options.faults is not None:
        numbers = {int(number) for number in options.faults.split(",") if number}
        made = [plan.only(numbers) for plan in made]
    if options.show:
        for plan in made:
            print(f"seed {plan.seed}: {plan}", *plan.faults, sep="\n  ")
        return 0
    os.environ["PYTHONFAULTHANDLER"] = "1"  # a stuck relay is ended by SIGABRT
    home = (options.home or Path(tempfile.mkdtemp(prefix="cdc-relay-chaos-"))).resolve()
    return run(made, home, keep=options.keep, faults=options.faults)


def seeds(text: str) -> list[int]:
    """``7``, ``1..100``, ``3,8,20..30``."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("..")
        found += range(int(first), int(last or first) + 1)
    return found


def run(made: list[plans.Plan], home: Path, *, keep: bool, faults: str | None) -> int:
    started = time.monotonic()
    totals: dict[str, Account] = defaultdict(Account)
    counts: dict[str, int] = defaultdict(int)
    failed: list[int] = []
    with ExitStack() as stack:
        stage = stack.enter_context(
            Stage(
                {
                    "mysql": lambda: stack.enter_context(
                        MySQL(home / "mysql", die_with_parent=True)
                    ),
                    "bare": lambda: stack.enter_context(
                        BareMySQL(home / "bare", die_with_parent=True)
                    ),
                    "mariadb": lambda: stack.enter_context(
                        MariaDB(home / "mariadb", die_with_parent=True)
                    ),
                },
                lambda: stack.enter_context(ProxiedKafka(home / "kafka", die_with_parent=True)),
            )
        )
        _ = stage.broker
        for plan in made:
            stage.server(plan.server)
            where = home / f"seed-{plan.seed}"
            for number in itertools.count(1):
                if not where.exists():
                    break
                where = home / f"seed-{plan.seed}-{number}"
            where.mkdir(parents=True)
            began = time.monotonic()
            trouble = ""
            account = Account()
            try:
                account = Run(plan, stage, where).play()
            except KeyboardInterrupt:
                raise
            except Exception as error:
                trouble = f"BROKEN {type(error).__name__}: {str(error).splitlines()[0][:200]}"
                (where / "broken.txt").write_text(traceback.format_exc())
                stage.heal(plan.server)
            seconds = time.monotonic() - began
            well = not account.faults and not trouble
            print(
                f"seed {plan.seed} {plan.server} {plan.delivery} mark={plan.mark}"
                f" relays {plan.relays} faults {len(plan.faults)} {account} {seconds:.1f} s"
                f" {'ok' if well else trouble or 'FAULT'}",
                flush=True,
            )
            mode = f"{plan.delivery}, {'with' if plan.compensates else 'no'} compensator beside"
            totals[mode].add(account)
            counts[mode] += 1
            tidy(f"t{os.getpid()}-", stage.broker.bootstrap)
            if well and not keep:
                shutil.rmtree(where)
            elif not well:
                failed.append(plan.seed)
                for note in account.notes[:5]:
                    print(f"    {note[:300]}")
                print(
                    f"    logs and schedule: {where}\n"
                    f"    again: make chaos SEEDS={plan.seed}"
                    + (f" ARGS='--faults {faults}'" if faults else ""),
                    flush=True,
                )
    for mode, account in sorted(totals.items()):
        print(f"{counts[mode]} seeds {mode}: {account}")
    minutes = (time.monotonic() - started) / 60
    print(f"{len(made)} seeds in {minutes:.1f} min; failed: {failed or 'none'}")
    if not failed and not keep:
        shutil.rmtree(home, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
