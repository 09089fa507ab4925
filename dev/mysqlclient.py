"""mysqlclient (the driver MySQLdb), built against client headers that are fetched, not installed.

PyPI has no wheel of it for Linux, and a C compiler alone is not enough: it needs the headers and
the library of a MySQL client.
"""

import platform
import sys
from pathlib import Path

from dev import apt, cache
from dev.console import run, say, watching

VERSION = "2.2.7"


def fetch() -> Path:
    """Return a directory to put on ``sys.path``; built the first time, then from the cache."""
    python = f"{sys.implementation.cache_tag}-{platform.machine()}"
    return cache.artefact(f"mysqlclient-{VERSION}-{python}", _build)


def plugins() -> Path:
    """Return the client library's plugins, where MySQL's default authentication is
    (``MARIADB_PLUGIN_DIR``)."""
    [found] = _library().glob("usr/lib/*/libmariadb3/plugin")
    return found


def _library() -> Path:
    """Return the tree with the client library; the driver's run path leads to it."""
    return cache.artefact(f"libmariadb-{platform.machine()}", _unpack)


def _unpack(into: Path) -> None:
    with watching("fetching the MariaDB client library", into):
        apt.unpack("libmariadb-dev", "bookworm", into)


def _build(into: Path) -> None:
    tree = _library()
    [library] = tree.glob("usr/lib/*/libmariadb.so.3")
    flags = [
        f"MYSQLCLIENT_CFLAGS=-I{tree}/usr/include/mariadb",
        f"MYSQLCLIENT_LDFLAGS=-L{library.parent} -lmariadb -Wl,-rpath,{library.parent}",
    ]
    say(f"building mysqlclient {VERSION}")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    run(["env", *flags, *pip, "--no-deps", "--target", into, f"mysqlclient=={VERSION}"])
