"""``cdc-relay dead``: rows that failed too often, and what becomes of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import click

from cdc_relay.cli.options import DATABASE, LOGGING, settings_options
from cdc_relay.cli.text import printable
from cdc_relay.config import Settings
from cdc_relay.database import connected, describe_table, engine
from cdc_relay.errors import ConfigError
from cdc_relay.store import Store

_WIDE: Final = 4096


@click.group("dead", help="List, show, retry or discard rows that failed too often.")
def command() -> None:
    """The group of the commands below."""


@command.command(
    "list",
    epilog="Examples: `cdc-relay dead list`; "
    "`cdc-relay dead list --limit 1000 --json | jq -r .event_type | sort | uniq -c`.",
)
@settings_options(*DATABASE, *LOGGING)
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def list_(settings: Settings, limit: int, as_json: bool) -> None:
    """List dead rows, lowest id first."""
    with _store(settings) as store:
        rows = store.dead(limit + 1)
    more = len(rows) > limit
    rows = rows[:limit]
    if as_json:
        for row in rows:
            click.echo(json.dumps(row, ensure_ascii=False, default=str))
        return
    if not rows:
        click.echo("no row is dead")
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:  # whole lines for grep, however wide
        console = Console(markup=False, highlight=False, width=_WIDE)
    table = Table("id", box=None)
    table.add_column("event_id", no_wrap=True)
    for name in ("aggregate", "event_type", "tries", "last_error"):
        table.add_column(name, overflow="fold")
    for row in rows:
        aggregate = f"{row['aggregate_type']}/{row['aggregate_id']}"
        texts = (row["id"], row["event_id"], aggregate, row["event_type"], row["retry_count"])
        cells = (*map(str, texts), str(row.get("last_error") or ""))
        table.add_row(*map(printable, cells))
    console.print(table)
    if more:
        click.echo(f"and more: these are the first {limit} (--limit)")


@command.command("show", epilog="Example: `cdc-relay dead show EVENT_ID | jq -r .payload`.")
@settings_options(*DATABASE, *LOGGING)
@click.argument("event_id")
def show(settings: Settings, event_id: str) -> None:
    """Show a dead row with its payload, as JSON."""
    with _store(settings) as store:
        rows = store.dead(1, event_ids=[event_id], payload=True)
    if not rows:
        raise ConfigError(f"no dead row has the event id {event_id!r}")
    row = rows[0]
    for name in ("payload", "headers"):
        if isinstance(row.get(name), bytes):
            row[name] = row[name].decode("utf-8", "backslashreplace")
    click.echo(json.dumps(row, ensure_ascii=False, default=str, indent=2))


@command.command(
    "retry",
    epilog="Examples: `cdc-relay dead retry EVENT_ID`; `cdc-relay dead retry --all`, once "
    "the cause is mended.",
)
@settings_options(*DATABASE, *LOGGING)
@click.argument("event_ids", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All dead rows.")
def retry(settings: Settings, event_ids: tuple[str, ...], everything: bool) -> None:
    """Make dead rows pending again, with a fresh ladder; relay or compensator sends them."""
    _require(event_ids, everything)
    with _store(settings) as store:
        _look(store, event_ids)
        click.echo(f"{store.revive(None if everything else event_ids)} rows are pending again")


@command.command(
    "discard",
    epilog="Examples: `cdc-relay dead discard EVENT_ID`; `cdc-relay dead discard --all --yes`.",
)
@settings_options(*DATABASE, *LOGGING)
@click.argument("event_ids", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All dead rows.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def discard(settings: Settings, event_ids: tuple[str, ...], everything: bool, yes: bool) -> None:
    """Delete dead rows: their events will never be sent, and their aggregates flow again."""
    _require(event_ids, everything)
    with _store(settings) as store:
        _look(store, event_ids)
        if not yes:
            if not sys.stdin.isatty():
                raise ConfigError("nobody can be asked here: --yes deletes without asking")
            what = "all dead rows" if everything else f"{len(event_ids)} rows"
            click.confirm(f"Delete {what}? Their events will never be sent.", abort=True)
        click.echo(f"{store.discard_dead(None if everything else event_ids)} rows deleted")


def _require(event_ids: tuple[str, ...], everything: bool) -> None:
    if bool(event_ids) == everything:
        raise ConfigError("give event ids, or --all")


def _look(store: Store, event_ids: tuple[str, ...]) -> None:
    """Raise ``ConfigError`` where one of these is not the event id of a dead row."""
    if not event_ids:
        return
    found = {row["event_id"] for row in store.dead(len(event_ids), event_ids=event_ids)}
    for event_id in event_ids:
        if event_id not in found:
            raise ConfigError(f"no dead row has the event id {event_id!r}")


@contextmanager
def _store(settings: Settings) -> Iterator[Any]:
    settings.require("database_url")
    pool = engine(settings)
    try:
        with connected(pool) as connection:
            shape = describe_table(connection, settings)
        yield Store(pool, shape, max_tries=settings.max_tries)
    finally:
        pool.dispose()
