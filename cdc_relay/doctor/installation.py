"""What is installed beside us, and the relay that should be running."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import cdc_relay
from cdc_relay.binlog.probe import probe
from cdc_relay.catchup import CATCH_UP_S
from cdc_relay.config import Settings
from cdc_relay.doctor.finding import Finding
from cdc_relay.doctor.server import Server
from cdc_relay.errors import ConfigError, PositionLostError, ReplicaBehindError, SourceError
from cdc_relay.kafka.checkpoints import Checkpoint


def check_installation() -> Iterator[Finding]:
    """Whether our packages are ours, and whether the decoder is the compiled one."""
    distributions = packages_distributions()
    for package in ("writer", "fallback"):
        yield _owner_of(package, distributions.get(package, []))
    spec = find_spec("cdc_relay.binlog.decoder")
    compiled = spec is not None and spec.origin is not None and not spec.origin.endswith(".py")
    if compiled:
        yield Finding("installation", "decoder", "ok", "compiled")
    else:
        yield Finding(
            "installation",
            "decoder",
            "warning",
            "the decoder runs as plain Python, about three times slower: install with a C compiler "
            "at hand, and without CDC_RELAY_PURE",
            (f"{sys.executable} -m pip install --force-reinstall --no-deps cdc-relay",),
            "shell",
        )


def _owner_of(package: str, owners: Sequence[str]) -> Finding:
    """pip does not warn when two distributions own one name."""
    ours = Path(str(cdc_relay.__file__)).resolve().parent.parent / package
    others = sorted({name for name in owners if re.sub("[-_.]+", "-", name).lower() != "cdc-relay"})
    spec = find_spec(package)
    found = (spec.submodule_search_locations or []) if spec is not None else []
    places = [Path(place).resolve() for place in found]
    if others:
        return Finding(
            "installation",
            package,
            "failure",
            f"the distribution {', '.join(others)} installs a package {package!r} too, and one of "
            "the two is broken (the README shows how a service does without ours)",
            (
                f"{sys.executable} -m pip uninstall --yes {' '.join(others)}",
                f"{sys.executable} -m pip install --force-reinstall --no-deps cdc-relay",
            ),
            "shell",
        )
    if ours not in places:
        where = places[0] if places else Path("nowhere")
        return Finding(
            "installation",
            package,
            "failure",
            f"import {package} finds {where}, not ours",
            (f"take {where.parent} out of PYTHONPATH, or rename that package",),
            "advice",
        )
    return Finding("installation", package, "ok", f"{package} is ours")


def check_members(members: int, settings: Settings) -> Finding:
    """Whether a relay of the name runs."""
    if members:
        text = f"{members} of the name {settings.name!r} run; one works, others stand by"
        return Finding("relay", "members", "ok", text)
    return Finding(
        "relay",
        "members",
        "warning",
        f"no relay of the name {settings.name!r} is running: only the compensator sends",
        ("cdc-relay start",),
        "shell",
    )


def check_position(
    settings: Settings, server: Server, last: Checkpoint | None
) -> Iterator[Finding]:
    """Whether the server can still serve the checkpoint's position, by its own word."""
    if last is None or last.source == "polling":
        text = "no position yet: the first start sweeps the table"
        yield Finding("relay", "position", "ok", text)
        return
    ours = ".".join(settings.schema_and_table())
    try:
        # The server may write names in its own way (lower_case_table_names).
        last.check_table(settings.name, last.table if last.table.lower() == ours.lower() else ours)
    except ConfigError as error:
        yield Finding("relay", "name", "failure", str(error), code=error.exit_code)
        return
    try:
        probe(settings, last.position)
    except PositionLostError as error:
        yield _lost(settings, error)
    except ReplicaBehindError as error:
        yield Finding(
            "relay",
            "position",
            "warning",
            f"{error} A relay waits for it; where nothing gets on for {CATCH_UP_S:g} s, the "
            "position is lost",
            ("let the replica apply what it has received, then look again",),
            "advice",
        )
    except SourceError as error:
        text = f"the relay cannot go on at {last.position}: {error}"
        yield Finding("relay", "position", "failure", text, code=error.exit_code)
    else:
        yield from _held(server, last)


def _lost(settings: Settings, error: PositionLostError) -> Finding:
    if settings.mark == "none":
        return Finding(
            "relay",
            "position",
            "failure",
            f"the position is lost: {error}; with mark = none the table does not tell what was "
            "sent: compare first (cdc-relay audit), then go on at the end",
            ("cdc-relay position set --current",),
            "shell",
            code=5,
        )
    return Finding(
        "relay",
        "position",
        "warning",
        f"the position is lost: {error}; the next start sweeps the pending rows of the table and "
        "goes on; nothing is lost",
        ("cdc-relay start",),
        "shell",
    )


def _held(server: Server, last: Checkpoint) -> Iterator[Finding]:
    kept = server.kept_s()
    age = max(0.0, time.time() - last.time)
    if kept and age > kept / 2:
        yield Finding(
            "relay",
            "position",
            "warning",
            f"the checkpoint is {age:.0f} s old and binlogs are kept for {kept:.0f} s: it is about "
            "to be lost",
            (server.keep(max(7 * 86_400, 4 * int(age))),),
            "sql",
        )
    else:
        yield Finding("relay", "position", "ok", f"{last.position} is in the binlog")
    if last.position.gtids is None and server.get("gtid_mode") == "ON":
        yield Finding(
            "relay",
            "gtids",
            "warning",
            "gtid_mode is ON, but the checkpoint has no GTIDs yet: after a failover to a replica "
            "it means nothing there; a running relay takes them from the next binlog file on",
            ("FLUSH BINARY LOGS;",),
            "sql",
        )
