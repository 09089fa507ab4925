"""``cdc-relay diagnose``: what the picture means, and what to do next."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Final

import click
from sqlalchemy import Connection

from cdc_relay.cli.options import DATABASE, KAFKA, LOGGING, duration, settings_options
from cdc_relay.cli.text import printable
from cdc_relay.config import Settings
from cdc_relay.database import connected, describe_table, engine
from cdc_relay.diagnose import Diagnosis, Picture, judge, look
from cdc_relay.errors import SinkError, SourceError
from cdc_relay.position import Position
from cdc_relay.server import current_position

_NAMES: Final = ("pending", "sent", "dead")


@click.command(
    "diagnose",
    epilog="Examples: `cdc-relay diagnose`; `cdc-relay diagnose --schedule 1m --json`.",
)
@settings_options("delivery", "mark", "older_than", *DATABASE, *KAFKA, *LOGGING)
@click.option(
    "--schedule",
    callback=duration,
    default="5m",
    show_default=True,
    metavar="DURATION",
    help="How often the compensator is meant to run.",
)
@click.option(
    "--keep",
    callback=duration,
    default="14d",
    show_default=True,
    metavar="DURATION",
    help="How long sent rows are meant to stay.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def command(settings: Settings, schedule: float, keep: float, as_json: bool) -> None:
    """Group recent rows by status and number of tries, and say in words what the picture means,
    each with the next command to run. Kafka is asked where it can be reached. Exit code 0 whatever
    the picture is; 3 where the database does not answer."""
    settings.require("database_url")
    picture = _picture(settings)
    found = judge(
        picture,
        older_than_s=settings.older_than,
        schedule_s=schedule,
        keep_s=keep,
        at_least_once=settings.delivery == "at_least_once",
        marks=settings.mark != "none",
    )
    if as_json:
        groups = [{**group._asdict(), "status": _NAMES[group.status]} for group in picture.groups]
        report = {
            "groups": groups,
            "members": None if picture.kafka_error else picture.members,
            "checkpoint_age_s": picture.checkpoint_age_s,
            "pass_age_s": picture.pass_age_s,
            "kafka_error": picture.kafka_error or None,
            "findings": [one.as_dict() for one in found],
        }
        click.echo(json.dumps(report, ensure_ascii=False))
    else:
        _show(picture, found)


def _picture(settings: Settings) -> Picture:
    pool = engine(settings)
    try:
        with connected(pool) as connection:
            picture = look(connection, describe_table(connection, settings))
            end = _end(connection)
    finally:
        pool.dispose()
    if not settings.kafka_bootstrap:
        return replace(picture, kafka_error="kafka_bootstrap is not set")
    from cdc_relay.kafka.checkpoints import read_last
    from cdc_relay.kafka.membership import members
    from cdc_relay.kafka.passes import last_pass

    try:
        alive = members(settings)
        last = read_last(settings, timeout=5.0)
        passed = last_pass(settings, timeout=5.0) or {}
    except SinkError as error:
        return replace(picture, kafka_error=str(error))
    polls = last is not None and last.source == "polling"  # and so has no place in the log
    return replace(
        picture,
        members=alive,
        checkpoint_age_s=_age(last.time if last is not None else None),
        behind=not polls and (last is None or end is None or not last.position.reached(end)),
        pass_age_s=_age(passed.get("time")),
        pass_error=str(passed.get("error") or ""),
    )


def _end(connection: Connection) -> Position | None:
    """The end of the binlog; None where we may not ask for it."""
    try:
        return current_position(connection)
    except SourceError:
        return None


def _age(at: float | None) -> float | None:
    return None if at is None else max(0.0, time.time() - at)


def _show(picture: Picture, found: list[Diagnosis]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    table = Table("status", "tries", "rows", "oldest, s", box=None)
    for group in picture.groups:
        name = _NAMES[group.status]
        table.add_row(name, str(group.retry_count), f"{group.rows:,}", f"{group.oldest_s:,.0f}")
    console.print(table)
    for one in found:
        console.print(printable(f"{one.name}: {one.text}"), soft_wrap=True)
        console.print(f"    next: {one.next}", soft_wrap=True)
