"""``cdc-relay archive``: moves what was sent long ago to another table."""

from __future__ import annotations

import json

import click

from cdc_relay.cli.housekeeping import housekeeping_options, run
from cdc_relay.cli.options import table
from cdc_relay.config import Settings
from cdc_relay.housekeeping import Archive
from cdc_relay.housekeeping.archive import DEFAULT_NAME


@click.command(
    "archive",
    epilog="Examples: `cdc-relay archive --older-than 7d`; "
    "`cdc-relay archive --older-than 1d --archive-table history.outbox_archive --json`.",
)
@housekeeping_options("move")
@click.option("--dead", is_flag=True, help="Move dead rows of that age too.")
@click.option(
    "--archive-table",
    default=DEFAULT_NAME,
    show_default=True,
    metavar="TABLE",
    callback=table,
    help="Where they go, optionally schema.table; created when it is missing.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as a JSON object.")
def command(
    settings: Settings,
    older_than: float,
    batch: int,
    max_lag: float,
    dead: bool,
    archive_table: str,
    as_json: bool,
) -> None:
    """Move rows that were sent more than --older-than ago to a table with the same columns, oldest
    day first. Each batch is one transaction: a run that is stopped or killed loses nothing and
    leaves nothing twice. A pending row never goes."""
    with run(settings, older_than, dead=dead, max_lag_s=max_lag) as work:
        archive = Archive(work.pool, work.shape, archive_table)
        archive.prepare()
        work.through("archiving", batch, archive.move)
    summary = {**work.summary(), "archive": archive.name, "days": dict(sorted(work.days.items()))}
    del summary["partitions"]
    if as_json:
        click.echo(json.dumps(summary))
        return
    for day, rows in sorted(work.days.items()):
        click.echo(f"{day}: {rows}")
    click.echo(
        f"moved {summary['sent']} sent and {summary['dead']} dead rows to {archive.name}; "
        + work.rest()
    )
