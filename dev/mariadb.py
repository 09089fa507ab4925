"""MariaDB 10.11 from Debian bookworm, run from the cache without being installed."""

import platform
from pathlib import Path

from dev import apt, cache
from dev.console import run, say, size, watching
from dev.database import Database

# What mariadb-install-db feeds to the server, in its order.
_SCRIPTS = (
    "mysql_system_tables",
    "mysql_performance_tables",
    "mysql_system_tables_data",
    "fill_help_tables",
    "maria_add_gis_sp_bootstrap",
    "mysql_sys_schema",
)


def fetch() -> Path:
    """Return the unpacked server, fetched the first time."""
    return cache.artefact(f"mariadb-10.11-{platform.machine()}", _build)


def _build(into: Path) -> None:
    with watching("fetching MariaDB 10.11", into):
        version = apt.unpack("mariadb-server-core", "bookworm", into)
    say(f"fetched MariaDB {version}: {size(into)}")


class MariaDB(Database):
    """A MariaDB server with a row-based binlog, which it does not have by default."""

    title = "MariaDB"

    def tree(self) -> Path:
        return fetch()

    def binary(self, tree: Path) -> list[str]:
        share = tree / "usr/share/mysql"
        return [
            str(tree / "usr/sbin/mariadbd"),
            "--no-defaults",
            f"--basedir={tree / 'usr'}",
            f"--lc-messages-dir={share}",
            f"--character-sets-dir={share / 'charsets'}",
        ]

    def initialise(self, template: Path) -> None:
        tree = self.tree()
        data = template / "data"
        (data / "mysql").mkdir(parents=True)
        share = tree / "usr/share/mysql"
        parts = [
            # NULL: root logs in with an empty password instead of by its Unix user.
            "CREATE DATABASE IF NOT EXISTS mysql;\nUSE mysql;\nSET @auth_root_socket=NULL;\n",
            *((share / f"{name}.sql").read_text(errors="surrogateescape") for name in _SCRIPTS),
            "CREATE DATABASE shop;\n",
        ]
        run(
            [
                *self.program(tree),
                f"--datadir={data}",
                "--bootstrap",
                "--innodb-log-file-size=8M",
            ],
            stdin="".join(parts).encode(errors="surrogateescape"),
        )

    def flags(self) -> list[str]:
        return ["--log-bin=mariadb-bin", "--binlog-format=ROW"]
