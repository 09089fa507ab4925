"""``cdc-relay inbox``: the table of a consuming service, and its clean-up."""

from __future__ import annotations

import json
import time
from typing import Any

import click
import structlog
from sqlalchemy import MetaData

from cdc_relay.cli.options import DATABASE, LOGGING, duration, settings_options, table
from cdc_relay.config import Settings
from cdc_relay.database import engine
from cdc_relay.errors import ConfigError
from cdc_relay.grants import consumer_grants
from cdc_relay.inbox import purge
from cdc_relay.outbox import (
    INBOX_SEQUENCE_TABLE,
    INBOX_TABLE,
    beside,
    ddl,
    inbox_sequence_table,
    inbox_table,
)

_PROGRESS_S = 2.0
_ACCOUNT = "'consumer'@'%'"


@click.group("inbox", help="Print the DDL of a consumer's inbox, or clean it.")
def command() -> None:
    """The group of the commands below."""


def _table_option(function: Any) -> Any:
    return click.option(
        "--inbox-table",
        "inbox",
        default=INBOX_TABLE,
        show_default=True,
        metavar="TABLE",
        callback=table,
        help="Inbox table, optionally schema.table.",
    )(function)


@command.command(
    "schema",
    epilog="Examples: `cdc-relay inbox schema | mysql points`; `cdc-relay inbox schema --grants "
    "--inbox-table points.inbox_event --account \"'points'@'10.0.%'\"`.",
)
@_table_option
@click.option(
    "--sequences", is_flag=True, help=f"With the table {INBOX_SEQUENCE_TABLE}, to look for gaps."
)
@click.option("--grants", "only_grants", is_flag=True, help="Print GRANT statements instead.")
@click.option(
    "--account", metavar="NAME", help="Account of the consumer, as GRANT wants it. [with --grants]"
)
def schema(inbox: str, sequences: bool, only_grants: bool, account: str | None) -> None:
    """Print the statements that create the inbox table or, with --grants, those that give the
    consuming service the least that it needs, purge included. No database is needed."""
    if only_grants:
        if "." not in inbox:
            raise ConfigError("--grants: which schema? write --inbox-table schema.table")
        click.echo("-- consumer")
        statements = consumer_grants(account or _ACCOUNT, inbox, sequences=sequences)
    elif account:
        raise ConfigError("--account goes with --grants")
    else:
        made = inbox_table(MetaData(), inbox)
        statements = ddl(made)
        if sequences:
            statements += ddl(inbox_sequence_table(MetaData(), beside(made, INBOX_SEQUENCE_TABLE)))
    for statement in statements:
        click.echo(statement + ";")


@command.command("purge", epilog="Example: `cdc-relay inbox purge --older-than 30d --json`.")
@settings_options(*(field for field in DATABASE if field != "table"), *LOGGING)
@_table_option
@click.option(
    "--older-than",
    default="30d",
    show_default=True,
    metavar="DURATION",
    callback=duration,
    help="Age of the claims that go. Keep them longer than Kafka keeps the records: its "
    "retention (7 d by default) and the time until a segment is closed (7 d more).",
)
@click.option("--consumer", metavar="NAME", help="Claims of this consumer only.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as a JSON object.")
def purge_(
    settings: Settings, inbox: str, older_than: float, consumer: str | None, as_json: bool
) -> None:
    """Delete old claims in batches of 1,000, oldest first. It can be stopped at any point, and
    run twice at once."""
    log = structlog.get_logger()
    began = said = time.monotonic()
    deleted = 0
    pool = engine(settings)
    try:
        for rows in purge(pool, inbox, older_than, consumer=consumer):
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
        click.echo(f"deleted {deleted} claims from {inbox} in {took} s")
