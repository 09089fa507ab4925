"""``cdc-relay schema``: the DDL and the grants, for whoever runs them himself."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, get_args

import click
from sqlalchemy import MetaData

from cdc_relay.cli.options import DATABASE, LOGGING, settings_options
from cdc_relay.columns import Columns
from cdc_relay.config import Settings
from cdc_relay.errors import ConfigError, SourceError
from cdc_relay.grants import ROLES, Dialect, Role, grants
from cdc_relay.outbox import (
    OPTIONAL_COLUMNS,
    SEQUENCE_TABLE,
    beside,
    ddl,
    outbox_table,
    sequence_table,
)

_ACCOUNTS: Final[dict[Role, str]] = {
    "relay": "'cdc_relay'@'%'",
    "compensator": "'cdc_compensator'@'%'",
    "housekeeping": "'cdc_housekeeping'@'%'",
    "writer": "'service'@'%'",
}


@click.command(
    "schema",
    epilog="Examples: `cdc-relay schema | mysql shop`; "
    "`cdc-relay schema --grants --table shop.outbox_event --role relay --account "
    "\"'relay'@'10.0.%'\"`.",
)
@settings_options("mark", "mark_row_image", *DATABASE, *LOGGING)
@click.option("--grants", "only_grants", is_flag=True, help="Print GRANT statements instead.")
@click.option(
    "--role", type=click.Choice(ROLES), multiple=True, help="Of this role only. [default: all]"
)
@click.option("--account", help="Account of the one role, as GRANT wants it: \"'relay'@'%'\".")
@click.option(
    "--sequences",
    is_flag=True,
    help=f"With the table {SEQUENCE_TABLE}, for a writer that numbers its events.",
)
@click.option("--dialect", type=click.Choice(get_args(Dialect)), default="mysql", show_default=True)
def command(
    settings: Settings,
    only_grants: bool,
    role: tuple[Role, ...],
    account: str | None,
    sequences: bool,
    dialect: Dialect,
) -> None:
    """Print the statements that create the outbox table (MySQL 8.0.13, MariaDB 10.6 and later) or,
    with --grants, those that give relay, compensator, housekeeping (purge and archive) and the
    writing service the least that each needs. The accounts must be there. No database is needed;
    with database_url, the grants leave out the optional columns that the table there does not
    have."""
    if not only_grants:
        if role or account:
            raise ConfigError("--role and --account go with --grants")
        names = Columns(settings.columns)
        table = outbox_table(MetaData(), settings.table)
        statements = [names.sql(statement) for statement in ddl(table)]
        if sequences:
            statements += ddl(sequence_table(MetaData(), beside(table, SEQUENCE_TABLE)))
        for statement in statements:
            click.echo(statement + ";")
        return
    if "." not in settings.table and not settings.database_url:
        raise ConfigError("--grants: which schema? write --table schema.table, or database_url")
    if account is not None and len(role) != 1:
        raise ConfigError("--account: of which role? give one --role")
    there = _there(settings) if settings.database_url else OPTIONAL_COLUMNS
    for one in role or ROLES:
        click.echo(f"-- {one}")
        who = account or _ACCOUNTS[one]
        for statement in grants(one, who, settings, dialect, there, sequences=sequences):
            click.echo(statement + ";")


def _there(settings: Settings) -> Collection[str]:
    """The columns of the table, or all where it cannot be seen or is not there yet."""
    from cdc_relay.database import connected, engine, seen_columns

    pool = engine(settings.model_copy(update={"mark_row_image": "server"}))
    try:
        with connected(pool) as connection:
            return seen_columns(connection, settings) or OPTIONAL_COLUMNS
    except SourceError as error:
        columns = Columns(settings.columns)
        optional = ", ".join(columns[name] for name in OPTIONAL_COLUMNS if name != "headers")
        click.echo(
            f"note: the table could not be looked at ({error}): leave out what it lacks of "
            f"{optional}",
            err=True,
        )
        return OPTIONAL_COLUMNS
    finally:
        pool.dispose()
