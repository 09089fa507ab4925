"""``cdc-relay init``: the outbox table, created or checked."""

from __future__ import annotations

from typing import Final

import click
from sqlalchemy import Connection, MetaData
from sqlalchemy.exc import DBAPIError

from cdc_relay.cli.options import DATABASE, LOGGING, settings_options
from cdc_relay.columns import Columns
from cdc_relay.config import Settings
from cdc_relay.database import TableShape, connected, describe_table, engine
from cdc_relay.outbox import outbox_table, table_ddl

_DUPLICATE_KEY_NAME: Final = 1061


@click.command(
    "init",
    epilog="Examples: `cdc-relay init --database-url mysql+pymysql://root@db/shop`; "
    "`cdc-relay init --table shop.order_events`.",
)
@settings_options(*DATABASE, *LOGGING)
def command(settings: Settings) -> None:
    """Create the outbox table with its indexes. A table that is there already is checked and not
    changed, except that an empty one gets the indexes it lacks."""
    pool = engine(settings)
    try:
        with connected(pool) as connection:
            _init(connection, settings)
    finally:
        pool.dispose()


def _init(connection: Connection, settings: Settings) -> None:
    name = ".".join(settings.schema_and_table())
    names = Columns(settings.columns)
    ddl = [names.sql(text) for text in table_ddl(settings.table)]
    create, *_ = statements = [text.replace("%", "%%") for text in ddl]
    existed = _exists(connection, settings)
    if not existed:
        # IF NOT EXISTS: another init may be faster.
        connection.exec_driver_sql(create.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS", 1))
    shape = describe_table(connection, settings)
    missing = _missing_indexes(shape, settings.table, statements[1:])
    is_empty = bool(missing) and _is_empty(connection, shape)
    if is_empty:
        for statement in missing:
            _create_index(connection, statement)
    if not existed:
        click.echo(f"created table {name}")
    elif not missing:
        click.echo(f"table {name} is there and fits: nothing to do")
    elif is_empty:
        click.echo(f"table {name} is there and empty: created the {len(missing)} missing indexes")
    else:
        click.echo(f"table {name} is there and fits, but lacks indexes; at a quiet hour, run:")
        for statement in missing:
            click.echo(f"{statement.replace('%%', '%')};")


def _missing_indexes(shape: TableShape, table: str, statements: list[str]) -> list[str]:
    """Of our CREATE INDEX ``statements`` those whose columns no index of the table begins with,
    whatever its name is."""
    ours = sorted(outbox_table(MetaData(), table).indexes, key=lambda index: str(index.name))
    return [
        statement
        for index, statement in zip(ours, statements, strict=True)
        if not shape.force_index(*(column.name for column in index.columns))
    ]


def _create_index(connection: Connection, statement: str) -> None:
    try:
        connection.exec_driver_sql(statement)
    except DBAPIError as error:
        if error.orig is None or error.orig.args[:1] != (_DUPLICATE_KEY_NAME,):
            raise  # otherwise another init was faster


def _exists(connection: Connection, settings: Settings) -> bool:
    sql = "SELECT 1 FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s"
    return connection.exec_driver_sql(sql, settings.schema_and_table()).first() is not None


def _is_empty(connection: Connection, shape: TableShape) -> bool:
    return connection.exec_driver_sql(f"SELECT 1 FROM {shape.quoted} LIMIT 1").first() is None
