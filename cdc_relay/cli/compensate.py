"""``cdc-relay compensate``: the compensator's pass."""

from __future__ import annotations

import json

import click

from cdc_relay.cli.options import DATABASE, KAFKA, LOGGING, settings_options
from cdc_relay.config import Settings
from fallback import Summary, run


@click.command(
    "compensate",
    epilog="Examples: `cdc-relay compensate --json` in a CronJob; "
    "`cdc-relay compensate --older-than 0s` now, whatever the rows' age; "
    "`cdc-relay compensate --loop`.",
)
@settings_options(
    *("older_than", "batch", "max_tries", "send_timeout", "relay_wait", "topic", "delivery"),
    *("mark", "on_dead", "transaction_timeout", *DATABASE, *KAFKA, *LOGGING),
)
@click.option("--loop", is_flag=True, help="Stay, and run pass after pass until SIGTERM.")
@click.option(
    "--force",
    is_flag=True,
    help="Ask no relay: send everything that is old enough, even what a living relay is sending.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one line of JSON.")
def command(settings: Settings, loop: bool, force: bool, as_json: bool) -> int:
    """Send the rows that have been pending for longer than --older-than, in order, through the
    same router as the relay, and mark them as sent. One pass, unless --loop.

    What a living relay has not reached yet is left to it. When no relay is alive, everything is
    sent; one that comes back sends none of it again.

    Exit codes: 0 nothing left, 2 usage or configuration, 3 the database, 4 Kafka, 6 rows went
    dead or are still failing.
    """
    summary = run(settings, loop=loop, force=force)
    if as_json:
        click.echo(json.dumps(summary.as_dict()))
    elif summary.error is None or summary.batches:
        click.echo(_line(summary))
    if summary.error is not None:
        click.echo(f"error: {summary.error}", err=True)
    return summary.exit_code


def _line(summary: Summary) -> str:
    return (
        f"sent {summary.sent}, marked {summary.marked}, failed {summary.failed}, "
        f"dead {summary.dead}, left {summary.left}, left to the relay {summary.left_to_relay}, "
        f"healed {summary.healed}; relay: {summary.relay or 'not asked'}; "
        f"{summary.batches} batches in {summary.seconds:.1f} s"
    )
