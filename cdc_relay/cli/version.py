"""``cdc-relay version``: what is running here."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

import click

_LIBRARIES: Final = (
    *("mysql-replication", "confluent-kafka", "SQLAlchemy", "PyMySQL", "cryptography"),
    *("click", "pydantic", "structlog"),
)


@click.command("version")
def command() -> None:
    """Show the versions of cdc-relay, of Python and of the libraries, and which decoder is
    active: compiled, or plain Python."""
    click.echo(f"cdc-relay {_version('cdc-relay')}")
    click.echo(f"decoder: {decoder()}")
    click.echo(f"Python {platform.python_version()} ({platform.platform()})")
    for library in _LIBRARIES:
        click.echo(f"{library} {_version(library)}")


def decoder() -> str:
    """Which form of the hot modules Python finds: ``compiled`` or ``python``."""
    spec = find_spec("cdc_relay.binlog.decoder")
    compiled = spec is not None and spec.origin is not None and not spec.origin.endswith(".py")
    return "compiled" if compiled else "python"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "(not installed)"
