"""``cdc-relay alert``: whether alerts arrive."""

from __future__ import annotations

import json

import click

from cdc_relay.alerts import Alerts
from cdc_relay.cli.options import LOGGING, settings_options
from cdc_relay.config import Settings
from cdc_relay.errors import ConfigError


@click.group("alert", help="Try the targets that hear of dead rows.")
def command() -> None:
    """The group of the commands below."""


@command.command(
    "test",
    epilog="Example: `cdc-relay alert test --alerts-file /run/secrets/alerts`.",
)
@settings_options("alerts_file", "name", *LOGGING)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a target.")
def test(settings: Settings, as_json: bool) -> int:
    """Send a test alert to each target of the settings (alerts, alerts_file).

    Exit codes: 0 each target has taken it, 2 one has not, or there is none.
    """
    settings.require_alerts()
    failed = False
    for target, failure in Alerts.of(settings).test():
        failed |= failure is not None
        if as_json:
            click.echo(json.dumps({"target": target, "error": failure}, ensure_ascii=False))
        else:
            click.echo(f"{target}: {'sent' if failure is None else 'failed: ' + failure}")
    return ConfigError.exit_code if failed else 0
