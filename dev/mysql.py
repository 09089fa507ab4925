"""MySQL 9.7 LTS from Debian sid, run from the cache without being installed."""

import os
import platform
from pathlib import Path

from dev import apt, cache
from dev.console import run, say, size, watching
from dev.database import Database


def fetch() -> Path:
    """Return the unpacked server, fetched the first time."""
    return cache.artefact(f"mysql-9.7-{platform.machine()}", _build)


def _build(into: Path) -> None:
    with watching("fetching MySQL 9.7", into):
        version = apt.unpack("mysql-server-core", "sid", into, keep=("mysqlbinlog",))
    say(f"fetched MySQL {version}: {size(into)}")


class MySQL(Database):
    """A MySQL server with GTIDs; what else concerns the binlog is the server's own default."""

    title = "MySQL"

    def tree(self) -> Path:
        return fetch()

    def binary(self, tree: Path) -> list[str]:
        share = tree / "usr/share/mysql"
        return [
            str(tree / "usr/sbin/mysqld"),
            "--no-defaults",
            f"--basedir={tree / 'usr'}",
            f"--lc-messages-dir={share}",
            f"--character-sets-dir={share / 'charsets'}",
            f"--plugin-dir={tree / 'usr/lib/mysql/plugin'}",
            "--secure-file-priv=NULL",
        ]

    def initialise(self, template: Path) -> None:
        init = template / "init.sql"
        init.write_text("CREATE DATABASE shop;\n")
        data = template / "data"
        run(
            [
                *self.program(self.tree()),
                f"--datadir={data}",
                "--initialize-insecure",
                f"--init-file={init}",
                # Less to copy for every new home; the server grows it to its default at start.
                "--innodb-redo-log-capacity=8M",
            ]
        )
        # Every copy draws its own server UUID, or two of them could not replicate.
        os.remove(data / "auto.cnf")

    def flags(self) -> list[str]:
        return ["--mysqlx=OFF", "--gtid-mode=ON", "--enforce-gtid-consistency=ON"]
