"""What tests and commands can do with a server, whatever it serves."""

import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM, Signals
from types import TracebackType
from typing import Self

from dev import cache, ports, process
from dev.console import DevError


class Server(ABC):
    """A server on a loopback port with all its state in one home directory.

    Another object on the same home, in this process or another, controls the same server.
    """

    home: Path

    @property
    @abstractmethod
    def port(self) -> int:
        """The client port, chosen once per home."""

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The pid of the living process, or None."""

    @property
    def alive(self) -> bool:
        """Whether the process lives (ready or not, paused or not)."""
        return self.pid is not None

    @abstractmethod
    def start(
        self, options: Sequence[str] = (), port: int | None = None, *, wait: float | None = 90
    ) -> None:
        """Start on the data of the home, created the first time, and wait until ready.

        `wait=None` returns at once; call `wait_ready` then. A living server is left as it is
        when `options` is empty, and is an error otherwise.
        """

    @abstractmethod
    def wait_ready(self, timeout: float = 90) -> None:
        """Return when clients are served; raise DevError with the log's end otherwise."""

    @abstractmethod
    def stop(self, timeout: float = 30) -> None:
        """SIGTERM, and SIGKILL after `timeout` seconds. No error when it is not running."""

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""

    @abstractmethod
    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""

    @abstractmethod
    def resume(self) -> None:
        """SIGCONT."""

    def delete(self) -> None:
        """Kill the server and remove its home."""
        self.kill()
        shutil.rmtree(self.home, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class ProcessServer(Server):
    """A server that is one process; subclasses say how to prepare, run and probe it."""

    title = "server"

    def __init__(self, home: Path, *, die_with_parent: bool = False) -> None:
        self.home = Path(home).resolve()
        self.log = self.home / "server.log"
        self.die_with_parent = die_with_parent
        self._log_start = 0

    @property
    def port(self) -> int:
        return ports.kept(self.home)

    @property
    def pid(self) -> int | None:
        pid = self._recorded_pid()
        if pid is None or process.is_ours(pid, self.home):
            return pid
        process.reap(pid)
        return None

    def start(
        self, options: Sequence[str] = (), port: int | None = None, *, wait: float | None = 90
    ) -> None:
        with cache.lock(self.home / "lock"):
            if self.alive:
                if options:
                    raise DevError(f"{self.title} in {self.home} is already running; stop it first")
            else:
                self._settle()
                if port is not None:
                    ports.kept(self.home, wanted=port)
                self.launch(self.command(options))
        if wait is not None:
            self.wait_ready(wait)

    def wait_ready(self, timeout: float = 90) -> None:
        deadline = time.monotonic() + timeout
        while True:
            # Asked before the probe: an answer then cannot be another server's.
            alive = self.alive
            if alive and self.probe():
                return
            if not alive:
                raise DevError(f"{self.title} in {self.home} ended:\n{self._log_end()}")
            if time.monotonic() > deadline:
                raise DevError(
                    f"{self.title} in {self.home} does not answer on 127.0.0.1:{self.port} "
                    f"after {timeout:g} s:\n{self._log_end()}"
                )
            time.sleep(0.05)

    def stop(self, timeout: float = 30) -> None:
        # SIGCONT: a paused process would not see the SIGTERM.
        if not self._send(SIGTERM, SIGCONT, wait=timeout):
            self.kill()

    def terminate(self) -> None:
        """Send SIGTERM without waiting for the end."""
        self._send(SIGTERM, SIGCONT)

    def kill(self) -> None:
        if not self._send(SIGKILL, wait=30):
            raise DevError(f"{self.title} (pid {self._recorded_pid()}) does not die")

    def pause(self) -> None:
        self._send(SIGSTOP)

    def resume(self) -> None:
        self._send(SIGCONT)

    @abstractmethod
    def command(self, options: Sequence[str]) -> list[str]:
        """Prepare the home where needed and return the command line to run."""

    @abstractmethod
    def probe(self) -> bool:
        """Ask the server over its port whether it serves; False when it does not (yet)."""

    def launch(self, argv: list[str]) -> None:
        """Run a command line as this server and record its pid."""
        self.home.mkdir(parents=True, exist_ok=True)
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        pid = process.spawn(argv, self.log, dict(os.environ), die_with_parent=self.die_with_parent)
        partial = self.home / "pid.partial"
        partial.write_text(f"{pid}\n")
        partial.replace(self.home / "pid")

    def _settle(self) -> None:
        pid = self._recorded_pid()
        if pid is not None:
            process.send(pid, self.home, wait=10)

    def _send(self, *signals: Signals, wait: float | None = None) -> bool:
        pid = self._recorded_pid()
        return pid is None or process.send(pid, self.home, *signals, wait=wait)

    def _recorded_pid(self) -> int | None:
        try:
            return int((self.home / "pid").read_text())
        except (OSError, ValueError):
            return None

    def _log_end(self) -> str:
        try:
            with self.log.open("rb") as file:
                file.seek(self._log_start)
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            lines = []
        return "\n".join([*lines[-15:], f"(log: {self.log})"])
