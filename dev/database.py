"""What MySQL and MariaDB have in common."""

import os
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from dev import apt, cache, handshake
from dev.console import run
from dev.server import ProcessServer


class Database(ProcessServer):
    """A database server; root has an empty password on 127.0.0.1, and database `shop` exists."""

    def url(self, database: str = "shop", user: str = "root", password: str = "") -> str:
        """Return the SQLAlchemy URL of a database on this server."""
        secret = f":{quote(password, safe='')}" if password else ""
        return f"mysql+pymysql://{quote(user, safe='')}{secret}@127.0.0.1:{self.port}/{database}"

    def command(self, options: Sequence[str]) -> list[str]:
        tree = self.tree()
        data = self.home / "data"
        if not data.is_dir():
            self._copy(cache.artefact(f"{tree.name}-data", self.initialise), data)
        # Left behind by a SIGKILL: MySQL refuses to start when the pid in the lock file exists,
        # whatever process has it now.
        for name in ("server.sock", "server.sock.lock"):
            (data / name).unlink(missing_ok=True)
        return [
            *self.program(tree),
            f"--datadir={data}",
            "--bind-address=127.0.0.1",
            f"--port={self.port}",
            f"--server-id={self.port}",
            # Relative to the data directory: the path of a socket must stay short.
            "--socket=server.sock",
            "--pid-file=server.pid",
            "--innodb-buffer-pool-size=256M",
            *self.flags(),
            *options,
        ]

    def probe(self) -> bool:
        return handshake.answers(self.port)

    @abstractmethod
    def tree(self) -> Path:
        """Return the unpacked server, fetched when missing."""

    @abstractmethod
    def binary(self, tree: Path) -> list[str]:
        """Return the server program of a tree and where its own files are."""

    @abstractmethod
    def initialise(self, template: Path) -> None:
        """Fill `template/data` with a fresh data directory that has the database `shop`."""

    @abstractmethod
    def flags(self) -> list[str]:
        """Return the flags of this kind of server beyond the common ones."""

    def program(self, tree: Path) -> list[str]:
        """Return the start of every command line of the server."""
        user = ["--user=root"] if os.geteuid() == 0 else []
        return [*apt.loader(tree), *self.binary(tree), *user]

    @staticmethod
    def _copy(template: Path, data: Path) -> None:
        partial = data.with_name("data.partial")
        run(["rm", "-rf", partial])
        # cp, not shutil: it keeps the holes in sparse files and shares blocks where it can.
        run(["cp", "-a", "--reflink=auto", template / "data", partial])
        partial.rename(data)
