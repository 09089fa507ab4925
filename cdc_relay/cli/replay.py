"""``cdc-relay replay``: rows of the table, sent once more."""

from __future__ import annotations

import json
from itertools import chain

import click

from cdc_relay.cli.options import DATABASE, KAFKA, LOGGING, settings_options
from cdc_relay.cli.text import printable
from cdc_relay.cli.times import Moment, moment, opened
from cdc_relay.config import Settings
from cdc_relay.errors import ConfigError, UnroutableError
from cdc_relay.resend import resend

_SHOWN = 20


@click.command(
    "replay",
    epilog="Examples: `cdc-relay replay --id 4711 --dry-run`; "
    "`cdc-relay replay --aggregate order/A17 --yes`; "
    "`cdc-relay replay --since 2026-05-01T12:00:00Z --until 2026-05-01T13:00:00Z`.",
)
@settings_options(
    "topic", "format", "cloudevents_source", "send_timeout", *DATABASE, *KAFKA, *LOGGING
)
@click.option("--id", "ids", multiple=True, help="A row's id or event id; may be repeated.")
@click.option("--aggregate", metavar="TYPE/ID", help="All events of this aggregate.")
@click.option("--since", callback=moment, metavar="WHEN", help="Created at this time or later.")
@click.option("--until", callback=moment, metavar="WHEN", help="Created before this time.")
@click.option("--dry-run", is_flag=True, help="Show what would be sent, and send nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def command(
    settings: Settings,
    ids: tuple[str, ...],
    aggregate: str | None,
    since: Moment | None,
    until: Moment | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Send chosen rows again, whatever their status, in id order, through the relay's own router:
    the same topics, keys, bytes and event ids. Consumers will see these events again, behind newer
    ones of their aggregates; only those with an inbox notice. No row is changed.

    WHEN is a time (2026-05-01T12:00:00Z) or so long ago (2h). All conditions given have to hold.
    Exit codes: 0 sent, 2 usage or nothing chosen, 3 the database, 4 Kafka, 130 not confirmed.
    """
    if not (ids or aggregate or since is not None or until is not None):
        raise ConfigError("give --id, --aggregate, --since or --until")
    kind, slash, key = (aggregate or "").partition("/")
    if aggregate is not None and not (kind and slash and key):
        raise ConfigError(f"--aggregate: {aggregate!r} is not TYPE/ID")
    with opened(settings) as (store, router):
        now = store.now_us()
        chosen = store.chosen(
            ids=[int(one) for one in ids if one.isdecimal() and int(one) < 1 << 64],
            event_ids=ids,
            aggregate=(kind, key) if aggregate else None,
            since_us=since.at(now) if since else None,
            until_us=until.at(now) if until else None,
        )
        if not chosen:
            raise ConfigError("no row of the table is chosen by these conditions")
        if dry_run and not as_json:
            for event, _ in chain(*store.rows(chosen[:_SHOWN])):
                try:
                    where = f"to {router.route(event).topic}"
                except UnroutableError as error:
                    where = f"cannot be sent: {error}"
                line = (
                    f"{event.id} {event.event_id} {event.aggregate_type}/{event.aggregate_id} "
                    f"{event.event_type} {where}"
                )
                click.echo(printable(line))
            if len(chosen) > _SHOWN:
                click.echo(f"… and {len(chosen) - _SHOWN} more")
        if not (dry_run or yes):
            click.confirm(
                f"Send {len(chosen)} events again? Consumers will see them again.",
                abort=True,
                err=True,
            )
        sent = 0 if dry_run else resend(settings, store, router, chosen)
    if as_json:
        click.echo(json.dumps({"chosen": len(chosen), "sent": sent, "dry_run": dry_run}))
    else:
        click.echo(f"{sent} of {len(chosen)} events sent again" + " (dry run)" * dry_run)
    return 0
