"""``cdc-relay audit``: is what the table says was sent really there?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager

import click

from cdc_relay.audit import Audit, Report, name_samples
from cdc_relay.cli.options import DATABASE, KAFKA, LOGGING, settings_options
from cdc_relay.cli.text import printable
from cdc_relay.cli.times import Moment, moment, opened, utc
from cdc_relay.config import Settings
from cdc_relay.errors import ConfigError, RowsFailingError, SinkError
from cdc_relay.kafka.reader import Read, Reader
from cdc_relay.resend import resend
from cdc_relay.router import Router
from cdc_relay.store import Store


@click.command(
    "audit",
    epilog="Examples: `cdc-relay audit --since 1h`; "
    "`cdc-relay audit --since 2026-05-01T00:00:00Z --until 2026-05-02T00:00:00Z --json`; "
    "`cdc-relay audit --since 1d --topic outbox.event.order --resend-missing`.",
)
@settings_options("format", "cloudevents_source", "send_timeout", *DATABASE, *KAFKA, *LOGGING)
@click.option(
    "--since",
    callback=moment,
    default="1d",
    show_default=True,
    metavar="WHEN",
    help="Oldest created_at: a time, or so long ago.",
)
@click.option(
    "--until",
    callback=moment,
    default="1m",
    show_default=True,
    metavar="WHEN",
    help="First created_at that is too young; leave the relay time to send.",
)
@click.option("--topic", "topics", multiple=True, help="Of this topic only; may be repeated.")
@click.option(
    "--resend-missing",
    is_flag=True,
    help="Send rows again that are marked as sent and have no record. They come late.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def command(
    settings: Settings,
    since: Moment,
    until: Moment,
    topics: tuple[str, ...],
    resend_missing: bool,
    as_json: bool,
) -> int:
    """Compare the rows of a time range (by created_at) with the records in their topics, as a
    read_committed consumer sees them: what is missing, what is there twice, what stands out of the
    order of its aggregate. Memory is bounded; about 80 bytes of temporary disk per event.

    Rows that were purged or archived cannot be missed. Exit codes: 0 nothing is missing, 6 rows
    are missing (pending and dead ones included), 2 usage, 3 the database, 4 Kafka.
    """
    with opened(settings) as (store, router), closing(Reader(settings)) as reader:
        now = store.now_us()
        begin, end = (at.at(now) for at in (since, until))
        if begin >= end:
            raise click.BadParameter("it is not before --until", param_hint="--since")

        def read(names: list[str], since_ms: int) -> Iterable[list[Read]]:
            there = reader.topics()
            for name in sorted(audit.without_rows):
                if name not in there:
                    raise ConfigError(
                        f"--topic: there is no topic {name!r}, and no row of the range goes there"
                    )
            return reader.since(names, since_ms)

        with _progress(as_json) as tell:
            audit = Audit(store, router, read, topics=frozenset(topics), progress=tell)
            report = audit.run(begin, end)
            refused = None
            if resend_missing and report.missing["sent"]:
                refused = _resend(settings, store, router, audit)
        name_samples(report, store)
    code = RowsFailingError.exit_code if report.lost else 0
    if refused is not None:
        code = refused.exit_code
    if as_json:
        fields = {"since_us": begin, "until_us": end, **report.as_dict(), "exit_code": code}
        click.echo(json.dumps(fields, ensure_ascii=False))
    else:
        _show(report, begin, end)
    if refused is not None:
        raise refused
    return code


def _resend(settings: Settings, store: Store, router: Router, audit: Audit) -> SinkError | None:
    """Send the missing rows; what was refused comes after the report of all that was found."""

    def tell(count: int) -> None:
        audit.report.resent = count

    try:
        resend(settings, store, router, audit.missing_ids(), tell)
    except SinkError as error:
        return error
    return None


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int], None]]:
    """Counts on a terminal, while they grow."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), TextColumn("{task.completed:,.0f}"))
    hidden = quiet or not console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=hidden) as bar:
        tasks = {name: bar.add_task(name, total=None) for name in ("rows", "records")}

        def tell(what: str, count: int) -> None:
            bar.update(tasks[what], completed=count)

        yield tell


def _show(report: Report, since_us: int, until_us: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    missing = sum(report.missing.values())
    since, until = (utc(us).isoformat(timespec="seconds") for us in (since_us, until_us))
    table = Table("", "count", "meaning", box=None, show_header=False)
    lines = [
        ("rows", report.rows, f"in the table, created from {since} until before {until}"),
        ("records", report.records, f"in {len(report.topics)} topics"),
        ("missing", missing, ", ".join(f"{n} {name}" for name, n in report.missing.items())),
        ("duplicates", report.duplicates, "a consumer without an inbox counts them twice"),
        ("out of order", report.out_of_order, "behind a later event of their aggregate"),
        ("foreign", report.foreign, "their rows are not in the table: purged, or not ours"),
        ("sent again", report.resent, ""),
    ]
    for name, count, meaning in lines:
        bad = count and name in ("missing", "duplicates", "out of order")
        table.add_row(name, f"{count:,}", meaning, style="red" if bad else None)
    console.print(table)
    for kind in ("missing", "duplicates", "out_of_order"):
        for sample in report.samples[kind]:
            fields = printable(" ".join(f"{name}={value}" for name, value in sample.items()))
            console.print(f"{kind}: {fields}", soft_wrap=True, markup=False)
    lost = report.missing["pending"] + report.missing["dead"]
    if missing - lost - report.resent > 0:
        console.print("next: cdc-relay audit … --resend-missing sends the missing rows again")
    if report.missing["pending"]:
        console.print("next: cdc-relay diagnose says why rows are pending")
    if report.missing["dead"]:
        console.print("next: cdc-relay dead list")
