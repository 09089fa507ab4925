"""``cdc-relay position``: where the relay goes on, shown and set."""

from __future__ import annotations

import json
from typing import Any

import click
import pymysql
from pymysql.constants import ER

from cdc_relay.binlog.probe import probe
from cdc_relay.binlog.stream import inspect
from cdc_relay.cli.options import DATABASE, KAFKA, LOGGING, settings_options
from cdc_relay.config import Settings
from cdc_relay.database import connected, engine
from cdc_relay.errors import ConfigError, PositionLostError
from cdc_relay.kafka import checkpoints
from cdc_relay.kafka.checkpoints import Checkpoint, UnreadableCheckpointError
from cdc_relay.kafka.owed import NOTHING_OWED
from cdc_relay.owner import SHARD, write_checkpoint
from cdc_relay.position import GtidSet, MariaGtidPosition, Position, file_number


@click.group("position", help="Show or set the position from which the relay goes on.")
def command() -> None:
    """The group of the two commands below."""


@command.command("show", epilog="Example: `cdc-relay position show --json | jq .gtids`.")
@settings_options(*KAFKA, *LOGGING)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def show(settings: Settings, as_json: bool) -> None:
    """Show the last committed checkpoint."""
    settings.require("kafka_bootstrap")
    last = checkpoints.read_last(settings, SHARD)
    if as_json:
        click.echo(json.dumps(None if last is None else _fields(last), ensure_ascii=False))
    elif last is None:
        click.echo("no checkpoint: the relay has never run under this name")
    else:
        for name, value in _fields(last).items():
            click.echo(f"{name}: {'-' if value is None else value}")


@command.command(
    "set",
    epilog="Examples: `cdc-relay position set --current`; "
    "`cdc-relay position set --file binlog.000042 --offset 157`.",
)
@settings_options("delivery", "transaction_timeout", "session_timeout", *DATABASE, *KAFKA, *LOGGING)
@click.option("--current", is_flag=True, help="The end of the server's binlog now.")
@click.option(
    "--gtids",
    help="Behind these transactions (MySQL GTID set, MariaDB GTID position); '': before all.",
)
@click.option("--file", "file", help="Binlog file; with --offset, where GTIDs are off.")
@click.option("--offset", type=click.IntRange(4), help="Offset of a transaction's start in it.")
def set_(
    settings: Settings, current: bool, gtids: str | None, file: str | None, offset: int | None
) -> None:
    """Set the position. Refused while a relay of the name runs.

    Rows between the position and the end of the binlog that the table shows as sent are not sent
    again.
    """
    settings.require("database_url", "kafka_bootstrap")
    pool = engine(settings)
    try:
        with connected(pool) as session:
            connection: Any = session.connection.driver_connection
            server = inspect(connection)
            position = _wanted(server.position, current, gtids, file, offset)
            _check(connection, position, server.position)
        probe(settings, position)
    finally:
        pool.dispose()
    last = _last(settings)
    write_checkpoint(
        settings,
        Checkpoint(
            position,
            owed=last.owed if last else NOTHING_OWED,
            closed=last.closed if last else (),
            held=last.held if last else (),
            doubtful_until=server.position,
            anchor="position set by hand",
        ),
    )
    click.echo(f"position set {_place(position, by_gtids=gtids is not None)}")


def _place(position: Position, *, by_gtids: bool) -> str:
    """Where a position is, in words: by a set of transactions it has nothing to do with the file
    and offset that stand beside it."""
    if not by_gtids:
        return f"to {position}"
    if position.gtids:
        return f"behind {position.gtids}"
    return "to the very beginning: before every transaction (an empty set of GTIDs)"


def _last(settings: Settings) -> Checkpoint | None:
    """The last checkpoint, of which all but the position stays. One that cannot be read keeps the
    relay from starting: setting the position is how it is replaced."""
    try:
        return checkpoints.read_last(settings, SHARD)
    except UnreadableCheckpointError as error:
        click.echo(f"warning: {error}; nothing of it is kept", err=True)
        return None


def _wanted(
    end: Position, current: bool, gtids: str | None, file: str | None, offset: int | None
) -> Position:
    given = [current, gtids is not None, file is not None or offset is not None]
    if sum(given) != 1 or (file is None) != (offset is None):
        raise ConfigError("give one of --current, --gtids, or --file with --offset")
    if current:
        return end
    if gtids is not None:
        if end.gtids is None:
            raise ConfigError("--gtids: the server keeps no GTIDs; give --file and --offset")
        read = GtidSet if end.flavor == "mysql" else MariaGtidPosition
        try:
            return end.at(end.file, end.offset, str(read(gtids)))
        except ValueError as error:
            raise ConfigError(f"--gtids: {error}") from None
    # Without a set of GTIDs the dump starts at the offset, on any server.
    return end.at(file or "", offset or 0, None)


def _check(connection: Any, position: Position, end: Position) -> None:
    """Raise for what cannot be a position of this server; that it can be served from there is the
    server's to say."""
    if position.gtids is not None:
        if not end.reached(position):
            raise ConfigError("--gtids: the server has not executed all of these transactions")
    else:
        with connection.cursor() as cursor:
            cursor.execute("SHOW BINARY LOGS")
            sizes = {str(row[0]): int(row[1]) for row in cursor.fetchall()}
        if position.file not in sizes:
            first = min(sizes, key=file_number, default="none")
            raise PositionLostError(
                f"--file: the server has no binlog {position.file}; its first is {first}"
            )
        if position.offset > sizes[position.file]:
            raise ConfigError(
                f"--offset: {position.file} has {sizes[position.file]} bytes, not {position.offset}"
            )
        if position.offset < sizes[position.file] and not _begins(connection, position):
            raise ConfigError(f"--offset: no event of {position.file} begins at {position.offset}")


def _begins(connection: Any, position: Position) -> bool:
    """Whether an event begins at the place: the server's dump would end there with an error."""
    with connection.cursor() as cursor:
        try:
            cursor.execute(
                f"SHOW BINLOG EVENTS IN %s FROM {position.offset:d} LIMIT 1", (position.file,)
            )
        except pymysql.MySQLError as error:
            if error.args[0] == ER.ERROR_WHEN_EXECUTING_COMMAND:
                return False
            raise
        found = cursor.fetchone()
    return found is not None and int(found[1]) == position.offset


def _fields(last: Checkpoint) -> dict[str, Any]:
    return {
        **last.position.to_json(),
        "time": last.time,
        "owed_marks": len(last.owed),
        "closed_aggregates": len(last.closed),
        "sweeping": last.sweeping,
        "doubtful_until": str(last.doubtful_until) if last.doubtful_until else None,
        "anchor": last.anchor or None,
    }
