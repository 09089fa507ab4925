"""Real processes that can be killed one by one, and that never outlive the demo."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

# Runs between fork and the program: the kernel kills the process when the demo is gone, however
# that came about. (An own program: preexec_fn is not safe beside the progress bar's thread.)
_GUARD = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"  # PR_SET_PDEATHSIG, SIGKILL
    "os.getppid() == int(sys.argv[1]) or os._exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)


class DemoError(Exception):
    """The demo cannot go on; the text says why."""


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let a clean-up run to its end: a second Ctrl-C must not leave half of it undone."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


class Member:
    """One process and its log."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def finished(self) -> bool:
        """Tell whether it has ended well; raise DemoError when it ended in any other way."""
        code = self.process.poll()
        if code is None:
            return False
        if code != 0:
            raise DemoError(f"{self.name} ended with {code}:\n{self.log_end()}")
        return True

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self.process.kill()
        self.process.wait(10)

    def stop(self, timeout: float) -> int:
        """SIGTERM; return the exit code, or raise DemoError when it does not stop in time."""
        self.process.terminate()
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise DemoError(
                f"{self.name} did not stop within {timeout:g} s of SIGTERM:\n{self.log_end()}"
            ) from None

    def log_end(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-15:])


class Crew:
    """Starts processes and ends them all when the block is left."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._members: list[Member] = []

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        talks: bool = False,
    ) -> Member:
        """Start a process; its output goes to its log, or with ``talks`` its stdin and stdout
        are pipes.

        Each has its own session: Ctrl-C reaches the demo alone, which then ends them in order.
        """
        log = self._logs / f"{name.replace(' ', '-')}.log"
        guard = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid())]
        with log.open("a") as file:
            process = subprocess.Popen(
                [*guard, *argv] if sys.platform == "linux" else list(argv),
                env=dict(os.environ if env is None else env),
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else file,
                stderr=file,
                text=True,
                start_new_session=True,
            )
        member = Member(name, process, log)
        self._members.append(member)
        return member

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with undisturbed():
            for member in self._members:
                if member.running:
                    member.process.terminate()
            for member in self._members:
                try:
                    member.process.wait(5)
                except subprocess.TimeoutExpired:
                    member.kill()
