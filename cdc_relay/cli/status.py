"""``cdc-relay status``: the table and the checkpoint at a glance."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

import click

from cdc_relay.cli.options import DATABASE, KAFKA, LOGGING, duration, settings_options
from cdc_relay.config import Settings
from cdc_relay.database import connected, describe_table, engine
from cdc_relay.errors import SinkError, SourceUnavailableError
from cdc_relay.store import Counts, Store

_KAFKA_TIMEOUT_S: Final = 5.0


@click.command(
    "status",
    epilog="Examples: `cdc-relay status`; `cdc-relay status --watch --every 5s`; "
    "`cdc-relay status --json | jq .oldest_pending_s`.",
)
@settings_options(*DATABASE, *KAFKA, *LOGGING)
@click.option("--watch", is_flag=True, help="Show it anew every --every, until Ctrl-C.")
@click.option(
    "--every",
    callback=duration,
    default="2s",
    show_default=True,
    metavar="DURATION",
    help="Pause of --watch.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one line of JSON; with --watch, each time."
)
def command(settings: Settings, watch: bool, every: float, as_json: bool) -> None:
    """Show how many rows are pending, sent and dead, the age of the oldest pending one in
    seconds, and, where Kafka can be reached, the relay's checkpoint. Counting walks an index: for
    tables of many millions of rows, let --every be long. While the database does not answer,
    --watch shows that and goes on."""
    try:
        while True:
            try:
                report = _report(settings)
            except SourceUnavailableError as error:
                if not watch:
                    raise
                report = {"name": settings.name, "error": str(error)}
            if watch and not as_json and sys.stdout.isatty():
                click.clear()
            _show(report, as_json)
            if not watch:
                return
            sys.stdout.flush()
            time.sleep(max(0.1, every))
    except (KeyboardInterrupt, BrokenPipeError):
        return


def _report(settings: Settings) -> dict[str, Any]:
    counts = _counts(settings)
    return {
        "name": settings.name,
        "table": ".".join(settings.schema_and_table()),
        "pending": counts.pending,
        "failing": counts.failing,
        "sent": counts.sent,
        "dead": counts.dead,
        "oldest_pending_s": counts.oldest_pending_s,
        **_checkpoint(settings),
    }


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report, ensure_ascii=False))
    else:
        for name, value in report.items():
            fields = value if isinstance(value, dict) else {"": value}
            for field, item in fields.items():
                click.echo(f"{name} {field}".rstrip() + f": {'-' if item is None else item}")


def _counts(settings: Settings) -> Counts:
    pool = engine(settings)
    try:
        with connected(pool) as connection:
            shape = describe_table(connection, settings)
        return Store(pool, shape).counts()
    finally:
        pool.dispose()


def _checkpoint(settings: Settings) -> dict[str, Any]:
    """The checkpoint's fields, or why there are none: Kafka may be down or not be set, and the
    table's figures are worth showing all the same."""
    if not settings.kafka_bootstrap:
        return {
            "checkpoint": None,
            "checkpoint_error": "kafka_bootstrap is not set",
            "last_pass": None,
        }
    from cdc_relay.kafka.checkpoints import read_last

    try:
        checkpoint = read_last(settings, timeout=_KAFKA_TIMEOUT_S)
        last_pass = _last_pass(settings)
    except SinkError as error:
        return {"checkpoint": None, "checkpoint_error": str(error), "last_pass": None}
    if checkpoint is None:
        return {"checkpoint": None, "checkpoint_error": None, "last_pass": last_pass}
    fields = {
        "position": str(checkpoint.position),
        "age_s": round(max(0.0, time.time() - checkpoint.time), 3),
        "closed_aggregates": len(checkpoint.closed),
        "owed_marks": len(checkpoint.owed),
        "sweeping": checkpoint.sweeping,
        "anchor": checkpoint.anchor or None,
    }
    return {"checkpoint": fields, "checkpoint_error": None, "last_pass": last_pass}


def _last_pass(settings: Settings) -> dict[str, Any] | None:
    """What the compensator's last pass found, and how many seconds ago."""
    from cdc_relay.kafka.passes import last_pass

    found = last_pass(settings, _KAFKA_TIMEOUT_S)
    if found is None:
        return None
    return {"age_s": round(max(0.0, time.time() - found.pop("time")), 3), **found}
