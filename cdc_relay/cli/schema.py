"""``cdc-relay schema``: the DDL, for whoever runs it himself."""

from __future__ import annotations

import click

from cdc_relay.cli.options import settings_options
from cdc_relay.config import Settings
from cdc_relay.outbox import table_ddl


@click.command("schema")
@settings_options("table")
def command(settings: Settings) -> None:
    """Print the statements that create the outbox table (MySQL 8.0.13, MariaDB 10.6 and later).
    No database is needed."""
    for statement in table_ddl(settings.table):
        click.echo(statement + ";")
