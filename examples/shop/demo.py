"""The demo: ``make demo``. The shop with its outbox beside the shop that commits and then sends.

Both run in several processes on one real MySQL and one real Kafka. The relay and the clerks are
killed with -9 while they work, the clerks of both shops at the same moments. Some orders are
written with the binlog off, so that only the compensator can find them. At the end the orders
tables say what was committed, and two consumers say what arrived.

Exit codes: 0 each event arrived once and in order through the outbox, 1 one did not or something
broke, 2 wrong option, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import select as polling
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, Literal

from confluent_kafka import Consumer, KafkaException, TopicPartition
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from sqlalchemy import create_engine, func, insert, select
from sqlalchemy.exc import SQLAlchemyError

from examples.shop.crew import Crew, DemoError, Member
from examples.shop.ledger import Book
from examples.shop.model import Base, Customer, Order, outbox_events
from examples.shop.place import Place, create_schema, create_topics, servers
from examples.shop.plan import CALM_RATE, Kill, Plan, Task
from examples.shop.report import Figures, table

_LEAST_RELAY_KILLS: Final = 2
_IDLE_S: Final = 30.0
"""Events or orders that have not moved for so long will not come."""


class Stage:
    """Says what goes on: bars on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description:34}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._bars: list[TaskID] = []
        self._told = 0.0

    def say(self, line: str) -> None:
        self._console.print(f"[dim]{time.monotonic() - self._start:6.1f} s[/dim]  {line}")

    @contextlib.contextmanager
    def bars(self, total: int) -> Iterator[None]:
        self._bars = [
            self._progress.add_task(f"{shop}: {what}", total=total)
            for what in ("orders committed", "events arrived")
            for shop in ("outbox", "commit, then send")
        ]
        with self._progress:
            yield

    def show(self, orders: tuple[int, int], events: tuple[int, int]) -> None:
        """Show how far the two shops are; outbox first."""
        for bar, count in zip(self._bars, (*orders, *events), strict=True):
            self._progress.update(bar, completed=count)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._told > 3:
            self._told = now
            self.say(
                f"outbox: {orders[0]:,} orders, {events[0]:,} events; "
                f"commit, then send: {orders[1]:,} orders, {events[1]:,} events"
            )


class Ledger:
    """The consumer process of one topic, and how many distinct events it has told of."""

    def __init__(self, member: Member, book: Path) -> None:
        self.member = member
        self.distinct = 0
        self._book = book
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.member.process.stdout is not None
        for line in self.member.process.stdout:
            self.distinct = json.loads(line)["distinct"]

    def close(self) -> Book:
        if self.member.stop(30) != 0:
            raise DemoError(f"{self.member.name} failed:\n{self.member.log_end()}")
        return Book.read(self._book)


Kind = Literal["outbox", "naive"]


class Office:
    """The clerks of one shop."""

    def __init__(self, kind: Kind, crew: Crew, place: Place, plan: Plan) -> None:
        self.title = "outbox" if kind == "outbox" else "commit, then send"
        url = place.url("shop" if kind == "outbox" else "naive")
        self.engine = create_engine(url)
        self._options = ["--database-url", url, "--seed", str(plan.seed)]
        if kind == "naive":
            self._options += ["--kafka-bootstrap", place.bootstrap, "--topic", place.naive_topic]
        self._crew = crew
        self._plan = plan
        self._clerks: dict[Task, Member] = {}

    def hire(self, task: Task, *, wait: bool = False) -> Member:
        """Start the clerk of a task; it does what is left of it."""
        argv = [sys.executable, "-m", "examples.shop.clerk", *self._options]
        argv += ["--first", str(task.first), "--last", str(task.last)]
        argv += ["--orders", str(task.orders), "--rate", str(task.rate)]
        argv += ["--unlogged"] * task.unlogged + ["--wait"] * wait
        member = self._crew.start(f"{self.title} clerk {task.first}", argv, talks=wait)
        self._clerks[task] = member
        return member

    def kill(self, numbers: Sequence[int]) -> list[Task]:
        """kill -9 the clerks that are still at work, all before waiting; return their tasks."""
        storm = [self._plan.storm[number] for number in numbers]
        tasks = [task for task in storm if self._clerks[task].running]
        for task in tasks:
            self._clerks[task].process.kill()
        for task in tasks:
            self._clerks[task].kill()
        return tasks

    def finished(self) -> bool:
        return all(clerk.finished() for clerk in self._clerks.values())

    def committed(self) -> int:
        """Orders so far; cheap enough to ask often."""
        with self.engine.connect() as connection:
            return int(connection.scalar(select(func.sum(Customer.orders))) or 0)

    def order_ids(self) -> set[int]:
        with self.engine.connect() as connection:
            return set(connection.scalars(select(Order.id)))


class Demo:
    """One run on servers that are up."""

    def __init__(self, plan: Plan, place: Place, stage: Stage, crew: Crew, folder: Path) -> None:
        self._plan = plan
        self._place = place
        self._stage = stage
        self._crew = crew
        self._folder = folder
        self._outbox = Office("outbox", crew, place, plan)
        self._naive = Office("naive", crew, place, plan)
        self._calm_ns = (0, 0)
        self._relay: Member | None = None
        self._relay_kills = 0
        self._delivered_at_start = 0
        self._delivers_since = math.inf
        self._relay_due = 0.0
        self._last_committed = (0, 0)
        self._last_commit = 0.0

    def run(self) -> tuple[Figures, Figures]:
        self._prepare()
        self._outbox_ledger = self._open_ledger("outbox", self._place.outbox_topic)
        self._naive_ledger = self._open_ledger("naive", self._place.naive_topic)
        self._start_relay()
        with self._stage.bars(self._plan.orders):
            self._await_relay()
            self._warm_up()
            self._storm()
            self._calm()
            self._drain()
            self._compensate()
            self._stop_relay()
        books = self._outbox_ledger.close(), self._naive_ledger.close()
        return (
            Figures.of(self._outbox.order_ids(), books[0], self._calm_ns),
            Figures.of(self._naive.order_ids(), books[1], self._calm_ns),
        )

    # -- the parts, in the order in which they happen

    def _prepare(self) -> None:
        create_topics(self._place)
        tables = [Base.metadata.tables[name] for name in ("customers", "orders")]
        for office in (self._outbox, self._naive):
            create_schema(office.engine)
            Base.metadata.create_all(office.engine, tables=tables)
            rows = [{"id": number} for number in range(1, self._plan.customers + 1)]
            with office.engine.begin() as connection:
                connection.execute(insert(Customer), rows)
        self._command("init")
        self._stage.say("shop tables made; outbox table made by [bold]cdc-relay init[/bold]")

    def _open_ledger(self, name: str, topic: str) -> Ledger:
        book = self._folder / f"{name}.json"
        argv = [sys.executable, "-m", "examples.shop.ledger"]
        argv += ["--kafka-bootstrap", self._place.bootstrap, "--topic", topic, "--book", str(book)]
        return Ledger(self._crew.start(f"{name} consumer", argv, talks=True), book)

    def _start_relay(self) -> None:
        self._relay = self._crew.start(
            "relay", [_cdc_relay(), "start"], env=self._place.environment()
        )
        self._delivered_at_start = self._outbox_ledger.distinct

    def _await_relay(self) -> None:
        """Wait until it owns its shard and has written its first checkpoint."""
        started = time.monotonic()
        topic = f"cdc-relay.{self._place.prefix}shop.checkpoints"
        consumer = Consumer(
            {"bootstrap.servers": self._place.bootstrap, "group.id": "none", "log_level": 3}
        )

        def anchored() -> bool:
            if topic not in consumer.list_topics(timeout=10).topics:
                return False
            return bool(consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=10)[1])

        self._wait("the relay's first checkpoint", anchored, timeout=60)
        consumer.close()
        self._stage.say(f"relay at its post after {time.monotonic() - started:.1f} s")

    def _warm_up(self) -> None:
        """Some orders through the whole path: from here on everybody is warm and listening."""
        started = time.monotonic()
        orders = self._plan.warm_up.orders
        for office in (self._outbox, self._naive):
            office.hire(self._plan.warm_up)
        self._wait(
            f"the first {orders} orders to arrive",
            lambda: orders == self._outbox_ledger.distinct == self._naive_ledger.distinct,
            timeout=60,
        )
        self._stage.say(
            f"first {orders} orders in both topics after {time.monotonic() - started:.1f} s"
        )

    def _storm(self) -> None:
        """Most of the orders, as fast as they go, with the kills of the plan."""
        plan = self._plan
        offices = (self._outbox, self._naive)
        self._open_the_doors(plan.storm)
        self._stage.say(f"{len(plan.storm)} clerks in each shop at work, flat out")
        kills = list(plan.kills)
        unlogged = plan.unlogged.orders > 0
        everyone_left = False
        asked = 0.0
        while unlogged or kills or not everyone_left:
            self._tend_relay()
            self._relay_delivered_for(0)
            if time.monotonic() - asked < 0.1:
                time.sleep(0.02)
                continue
            committed = self._show()
            self._require_progress(committed)
            done = max(committed) / plan.orders
            asked = time.monotonic()
            everyone_left = all(office.finished() for office in offices)
            if kills and (done >= kills[0].at or everyone_left):
                self._kill(kills.pop(0))
            if unlogged and (done >= plan.unlogged_at or everyone_left):
                unlogged = False
                for office in offices:
                    office.hire(plan.unlogged)
                self._stage.say(f"{plan.unlogged.orders} orders written with sql_log_bin = 0")
        # Two kills of the relay at least, whatever the moments of the plan were.
        while self._relay_kills < _LEAST_RELAY_KILLS:
            self._bury_relay(self._relay_back(), 0.5)
            self._stage.say("[red]kill -9[/red] the relay; it comes back")

    def _calm(self) -> None:
        """The rest of the orders at a steady rate, nobody killed: latency is measured here."""
        self._catch_up()
        begin = self._open_the_doors(self._plan.calm)
        self._calm_ns = (begin, begin + int(self._plan.calm_s * 1e9))
        self._stage.say(f"calm: {CALM_RATE:g} orders/s in each shop, nobody is killed")
        while not all(office.finished() for office in (self._outbox, self._naive)):
            self._tend_relay()
            self._require_progress(self._show())
            time.sleep(0.25)

    def _open_the_doors(self, tasks: Sequence[Task]) -> int:
        """Start clerks in both shops, all at one moment; return it, in CLOCK_MONOTONIC ns."""
        offices = (self._outbox, self._naive)
        clerks = [office.hire(task, wait=True) for task in tasks for office in offices]
        for clerk in clerks:
            _await_ready(clerk)
        for clerk in clerks:
            _send_line(clerk)
        return time.monotonic_ns()

    def _kill(self, kill: Kill) -> None:
        relay = self._relay if self._relay_delivered_for(kill.patience_s) else None
        # All signals before any wait: the same moment for the relay and both shops.
        if relay is not None:
            relay.process.kill()
        tasks = [(office, office.kill(kill.clerks)) for office in (self._outbox, self._naive)]
        killed = [f"{len(some)} clerks ({office.title})" for office, some in tasks if some]
        if relay is not None:
            self._bury_relay(relay, kill.silence_s)
            killed.insert(0, "the relay")
        if killed:
            self._stage.say(f"[red]kill -9[/red] {', '.join(killed)}; all come back")
        for office, some in tasks:
            for task in some:
                office.hire(task)

    def _bury_relay(self, relay: Member, silence_s: float) -> None:
        relay.kill()
        self._relay_kills += 1
        self._relay = None
        self._relay_due = time.monotonic() + silence_s

    def _relay_delivered_for(self, seconds: float) -> bool:
        """Tell whether the relay's first delivery since its start is so long ago."""
        if self._relay is None or self._outbox_ledger.distinct <= self._delivered_at_start:
            self._delivers_since = math.inf
        elif self._delivers_since == math.inf:
            self._delivers_since = time.monotonic()
        return time.monotonic() - self._delivers_since >= seconds

    def _tend_relay(self) -> None:
        if self._relay is None:
            if time.monotonic() >= self._relay_due:
                self._start_relay()
        elif not self._relay.running:
            raise DemoError(
                f"the relay ended by itself with {self._relay.process.returncode}:\n"
                f"{self._relay.log_end()}"
            )

    def _catch_up(self) -> None:
        """Wait for all events that are under way."""
        self._relay_back()
        logged = self._outbox.committed() - self._plan.unlogged.orders
        self._wait_for_events(lambda: self._outbox_ledger.distinct >= logged, "outbox")

    def _drain(self) -> None:
        self._stage.say("all orders are committed; waiting for the events under way")
        self._catch_up()
        self._wait_for_events(lambda: False, "naive", idle_s=3)
        with contextlib.suppress(DemoError):
            # Marks follow the events; the compensator copes with those that are still owed.
            self._wait(
                "the marks", lambda: self._pending() <= self._plan.unlogged.orders, timeout=15
            )

    def _relay_back(self) -> Member:
        """Wait until the relay has been started again and return it."""
        while self._relay is None:
            time.sleep(0.05)
            self._tend_relay()
        return self._relay

    def _compensate(self) -> None:
        pending = self._pending()
        self._stage.say(f"{pending} rows pending that the relay never saw; now the compensator")
        time.sleep(1.2)  # they have to be older than --older-than
        output = self._command("compensate", "--older-than", "1s", "--json")
        summary = json.loads(output.strip().splitlines()[-1]) if output.strip() else {}
        self._stage.say(f"cdc-relay compensate: sent {summary.get('sent', '?')}")
        committed = self._outbox.committed()
        self._wait_for_events(
            lambda: self._outbox_ledger.distinct >= committed, "outbox", idle_s=10
        )
        left = self._pending()
        if left:
            self._stage.say(f"[red]{left} rows are still pending[/red]")

    def _stop_relay(self) -> None:
        assert self._relay is not None
        began = time.monotonic()
        code = self._relay.stop(40)
        if code != 0:
            raise DemoError(f"the relay ended with {code} on SIGTERM:\n{self._relay.log_end()}")
        self._stage.say(
            f"relay stopped by SIGTERM in {time.monotonic() - began:.1f} s; it had been killed "
            f"{self._relay_kills} times"
        )

    # -- helpers

    def _show(self) -> tuple[int, int]:
        committed = self._outbox.committed(), self._naive.committed()
        events = self._outbox_ledger.distinct, self._naive_ledger.distinct
        self._stage.show(committed, events)
        return committed

    def _require_progress(self, committed: tuple[int, int]) -> None:
        """Raise DemoError when no shop has committed anything for too long."""
        now = time.monotonic()
        if committed != self._last_committed:
            self._last_committed, self._last_commit = committed, now
        elif now - self._last_commit > _IDLE_S:
            raise DemoError(f"no order was committed for {_IDLE_S:g} s")

    def _wait(self, what: str, done: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not done():
            self._tend_relay()
            self._check_ledgers()
            if time.monotonic() > deadline:
                log = self._relay.log_end() if self._relay is not None else ""
                raise DemoError(f"waited {timeout:g} s for {what} in vain; the relay says:\n{log}")
            self._show()
            time.sleep(0.1)

    def _wait_for_events(
        self, done: Callable[[], bool], kind: Kind, idle_s: float = _IDLE_S
    ) -> None:
        """Wait until ``done``, or until no new event has come for ``idle_s``."""
        ledger = self._outbox_ledger if kind == "outbox" else self._naive_ledger
        seen, since = ledger.distinct, time.monotonic()
        while not done() and time.monotonic() - since < idle_s:
            self._tend_relay()
            self._check_ledgers()
            self._show()
            time.sleep(0.1)
            if ledger.distinct != seen:
                seen, since = ledger.distinct, time.monotonic()

    def _check_ledgers(self) -> None:
        for ledger in (self._outbox_ledger, self._naive_ledger):
            if ledger.member.finished():
                raise DemoError(f"{ledger.member.name} ended:\n{ledger.member.log_end()}")

    def _pending(self) -> int:
        query = select(func.count()).where(outbox_events.c.status == 0)
        with self._outbox.engine.connect() as connection:
            return int(connection.scalar(query) or 0)

    def _command(self, *arguments: str) -> str:
        """Run cdc-relay to its end and return its stdout."""
        done = subprocess.run(
            [_cdc_relay(), *arguments],
            env=self._place.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode != 0:
            raise DemoError(
                f"cdc-relay {shlex.join(arguments)} ended with {done.returncode}:\n"
                f"{done.stdout}{done.stderr}".rstrip()
            )
        return done.stdout


def _cdc_relay() -> str:
    command = Path(sys.executable).with_name("cdc-relay")
    if not command.exists():
        raise DemoError(f"{command} does not exist; run: make venv")
    return str(command)


def _await_ready(clerk: Member) -> None:
    pipe = clerk.process.stdout
    assert pipe is not None
    answered, _, _ = polling.select([pipe], [], [], _IDLE_S)
    if not answered or pipe.readline() != "ready\n":
        raise DemoError(f"{clerk.name} did not start:\n{clerk.log_end()}")


def _send_line(clerk: Member) -> None:
    assert clerk.process.stdin is not None
    clerk.process.stdin.write("go\n")
    clerk.process.stdin.flush()


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    kills = arguments.kills or max(5, arguments.orders // 10_000)
    plan = Plan.draw(arguments.orders, arguments.seed, kills)
    stage = Stage(console)
    stage.say(f"{plan.orders:,} orders in each shop, {kills} kills, seed {plan.seed}")
    try:
        with (
            _folder(arguments.keep, stage) as folder,
            servers(arguments.servers == "own", arguments.keep, stage.say) as place,
            Crew(folder) as crew,
        ):
            outbox, naive = Demo(plan, place, stage, crew, folder).run()
    except KeyboardInterrupt:
        console.print("interrupted; everything was stopped")
        return 130
    except (DemoError, SQLAlchemyError, KafkaException, OSError) as error:
        console.print(f"demo: {error}", markup=False, style="red")
        return 1
    console.print()
    console.print(table(outbox, naive, CALM_RATE))
    if arguments.json is not None:
        result = {"seed": plan.seed, "outbox": asdict(outbox), "naive": asdict(naive)}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return _verdict(console, outbox, naive)


def _verdict(console: Console, outbox: Figures, naive: Figures) -> int:
    console.print(
        "Latency is from just before COMMIT to a read_committed consumer. Out of order counts "
        "what an idempotent consumer sees: first arrivals only.",
        style="dim",
    )
    if naive.lost == 0:
        console.print("Commit-then-send was lucky this time; try another SEED.", style="dim")
    bad = outbox.lost or outbox.invented or outbox.duplicates or outbox.out_of_order
    return 1 if bad else 0


@contextlib.contextmanager
def _folder(keep: bool, stage: Stage) -> Iterator[Path]:
    """Give a folder for logs and books; it is there afterwards only with ``keep``."""
    folder = Path(tempfile.mkdtemp(prefix="cdc-relay-demo-"))
    try:
        yield folder
    finally:
        if keep:
            stage.say(f"logs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--orders", type=_at_least(100), default=10_000, help="in each shop")
    parser.add_argument("--seed", type=int, default=7, help="of the kills and the load")
    parser.add_argument("--kills", type=_at_least(1), help="moments of kill -9")
    parser.add_argument(
        "--servers",
        choices=("own", "environment"),
        default="own",
        help="this checkout's, or those of CDC_RELAY_DATABASE_URL (user with all "
        "rights) and CDC_RELAY_KAFKA_BOOTSTRAP",
    )
    parser.add_argument("--keep", action="store_true", help="leave servers, data and logs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def check(value: str) -> int:
        number = int(value)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is too small; at least {least}")
        return number

    check.__name__ = "number"
    return check


if __name__ == "__main__":
    sys.exit(main())
