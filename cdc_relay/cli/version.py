"""``cdc-relay version``: what is running here."""

from __future__ import annotations

import platform
from typing import Final

import click

from cdc_relay.about import decoder, version

_LIBRARIES: Final = (
    *("mysql-replication", "confluent-kafka", "kafka-python"),
    *("SQLAlchemy", "PyMySQL", "cryptography"),
    *("click", "pydantic", "structlog"),
)


@click.command("version")
def command() -> None:
    """Show the versions of cdc-relay, of Python and of the libraries, and which decoder is
    active: compiled, or plain Python."""
    click.echo(f"cdc-relay {version()}")
    click.echo(f"decoder: {decoder()}")
    click.echo(f"Python {platform.python_version()} ({platform.platform()})")
    for library in _LIBRARIES:
        click.echo(f"{library} {version(library)}")
