"""Loopback ports that belong to one home directory for good."""

import random
import socket
from pathlib import Path

from dev import cache
from dev.console import DevError

# Below the kernel's ephemeral range, so that no outgoing connection takes the port of a server
# that is down for a moment.
FIRST, LAST = 20000, 31999


def is_free(port: int) -> bool:
    """Tell whether nothing is bound to the loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def kept(home: Path, name: str = "port", wanted: int | None = None) -> int:
    """Return the port kept in `home/name`, choosing a free one the first time.

    `wanted` replaces the kept one. No two living homes are given the same port.
    """
    file = home / name
    if wanted is None and file.exists():
        return int(file.read_text())
    home.mkdir(parents=True, exist_ok=True)
    claims = cache.directory() / "ports"
    with cache.lock(cache.directory() / "ports.lock"):
        if wanted is None and file.exists():
            return int(file.read_text())
        port = wanted if wanted is not None else _choose(claims)
        claims.mkdir(exist_ok=True)
        (claims / str(port)).write_text(str(file))
        partial = file.with_name(f"{name}.partial")
        partial.write_text(f"{port}\n")
        partial.replace(file)
    return port


def _choose(claims: Path) -> int:
    for port in random.sample(range(FIRST, LAST + 1), LAST + 1 - FIRST):
        claim = claims / str(port)
        if claim.exists() and _is_held(claim, port):
            continue
        if is_free(port):
            return port
    raise DevError(f"no free loopback port between {FIRST} and {LAST}")


def _is_held(claim: Path, port: int) -> bool:
    try:
        return int(Path(claim.read_text()).read_text()) == port
    except (OSError, ValueError):
        return False
