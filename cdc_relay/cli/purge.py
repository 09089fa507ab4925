"""``cdc-relay purge``: deletes what was sent long ago."""

from __future__ import annotations

import json

import click

from cdc_relay.cli.housekeeping import Run, housekeeping_options, run
from cdc_relay.config import Settings
from cdc_relay.housekeeping import Partitions


@click.command(
    "purge",
    epilog="Examples: `cdc-relay purge --older-than 7d`; "
    "`cdc-relay purge --older-than 30d --dead --replicas replica-1:3306 --json`.",
)
@housekeeping_options("delete")
@click.option("--dead", is_flag=True, help="Delete dead rows of that age too.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as a JSON object.")
def command(
    settings: Settings, older_than: float, batch: int, max_lag: float, dead: bool, as_json: bool
) -> None:
    """Delete rows that were sent more than --older-than ago, in small batches; of a table with
    RANGE partitions, whole partitions in which nothing has to stay. A pending row never goes. It
    can be stopped at any point, and run twice at once."""
    with run(settings, older_than, dead=dead, max_lag_s=max_lag) as work:
        for dropped in Partitions(work.pool, work.shape, work.old).drop(work.stop.is_set):
            work.partition(dropped)
        work.through("purging", batch)
    click.echo(json.dumps(work.summary()) if as_json else _line(work))


def _line(work: Run) -> str:
    summary = work.summary()
    partitions = [part["name"] for part in summary["partitions"]]
    dropped = f", with the partitions {', '.join(partitions)}" if partitions else ""
    return f"deleted {summary['sent']} sent and {summary['dead']} dead rows{dropped}; {work.rest()}"
