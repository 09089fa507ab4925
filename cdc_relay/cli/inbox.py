"""``cdc-relay inbox``: the table of a consuming service, and its clean-up."""

from __future__ import annotations

import json
import time
from typing import Any

import click
import structlog
from sqlalchemy import MetaData

from cdc_relay.cli.options import DATABASE, LOGGING, duration, settings_options
from cdc_relay.config import Settings
from cdc_relay.database import engine
from cdc_relay.inbox import purge
from cdc_relay.outbox import (
    INBOX_SEQUENCE_TABLE,
    INBOX_TABLE,
    ddl,
    inbox_sequence_table,
    inbox_table,
)

_PROGRESS_S = 2.0


@click.group("inbox", help="Print the DDL of a consumer's inbox, or clean it.")
def command() -> None:
    """The group of the commands below."""


def _table_option(function: Any) -> Any:
    return click.option(
        "--inbox-table",
        default=INBOX_TABLE,
        show_default=True,
        metavar="TABLE",
        help="Inbox table, optionally schema.table.",
    )(function)


@command.command("schema", epilog="Example: `cdc-relay inbox schema | mysql points`.")
@_table_option
@click.option(
    "--sequences", is_flag=True, help=f"With the table {INBOX_SEQUENCE_TABLE}, to look for gaps."
)
def schema(inbox_table: str, sequences: bool) -> None:
    """Print the statements that create the inbox table. No database is needed."""
    for statement in _statements(inbox_table, sequences=sequences):
        click.echo(statement + ";")


def _statements(name: str, *, sequences: bool) -> list[str]:
    tables = [inbox_table(MetaData(), name)]
    if sequences:
        tables.append(inbox_sequence_table(MetaData()))
    return [statement for table in tables for statement in ddl(table)]


@command.command("purge", epilog="Example: `cdc-relay inbox purge --older-than 14d --json`.")
@settings_options(*(field for field in DATABASE if field != "table"), *LOGGING)
@_table_option
@click.option(
    "--older-than",
    default="7d",
    show_default=True,
    metavar="DURATION",
    callback=duration,
    help="Age of the claims that go. Keep them longer than Kafka keeps the records.",
)
@click.option("--consumer", metavar="NAME", help="Claims of this consumer only.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as a JSON object.")
def purge_(
    settings: Settings, inbox_table: str, older_than: float, consumer: str | None, as_json: bool
) -> None:
    """Delete old claims in batches of 1,000, oldest first. It can be stopped at any point, and
    run twice at once."""
    log = structlog.get_logger()
    began = said = time.monotonic()
    deleted = 0
    pool = engine(settings)
    try:
        for rows in purge(pool, inbox_table, older_than, consumer=consumer):
            deleted += rows
            if time.monotonic() - said > _PROGRESS_S:
                said = time.monotonic()
                log.info("purging the inbox", deleted=deleted)
    finally:
        pool.dispose()
    took = round(time.monotonic() - began, 3)
    if as_json:
        click.echo(json.dumps({"deleted": deleted, "seconds": took}))
    else:
        click.echo(f"deleted {deleted} claims from {inbox_table} in {took} s")
