"""What is running here: our own version and the form of the decoder."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version
from importlib.util import find_spec


def decoder() -> str:
    """Which form of the hot modules Python finds: ``compiled`` or ``python``."""
    spec = find_spec("cdc_relay.binlog.decoder")
    compiled = spec is not None and spec.origin is not None and not spec.origin.endswith(".py")
    return "compiled" if compiled else "python"


def version(distribution: str = "cdc-relay") -> str:
    """The version of an installed distribution, in words where there is none."""
    try:
        return _version(distribution)
    except PackageNotFoundError:
        return "(not installed)"
