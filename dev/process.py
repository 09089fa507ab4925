"""Starting, recognising and signalling server processes by recorded pid (Linux)."""

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

# Runs between fork and the server; the setting survives exec. An own program instead of
# preexec_fn, which is not safe in a process with threads.
_GUARD = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"  # PR_SET_PDEATHSIG, SIGKILL
    "os.getppid() == int(sys.argv[1]) or os._exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)


def spawn(argv: list[str], log: Path, env: dict[str, str], *, die_with_parent: bool = False) -> int:
    """Start a server in its own session, output appended to `log`, and return its pid.

    With `die_with_parent` the kernel kills it when the thread that called this ends.
    """
    if die_with_parent:
        guard = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid())]
        argv = [*guard, *argv]
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        argv[0],
        argv,
        env,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), append, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def is_ours(pid: int, home: Path) -> bool:
    """Tell whether the pid is a living process that runs on `home`: pids are used again."""
    # A process in the middle of exec has no command line for an instant, and neither has a
    # kernel thread for good.
    deadline = time.monotonic() + 0.5
    while True:
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
        if arguments or _is_ending(pid) or time.monotonic() > deadline:
            return os.fsencode(f"{home}/") in arguments
        time.sleep(0.001)


def send(pid: int, home: Path, *signals: signal.Signals, wait: float | None = None) -> bool:
    """Signal the process if it is ours; tell whether it has ended, waiting up to `wait` seconds.

    The handle is taken before the check, so a pid used again in between is never hit.
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        if is_ours(pid, home):
            for number in signals:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, number)
        elif not _is_ending(pid):
            return True
        return _has_ended(handle, pid, 0.0 if wait is None else wait)
    finally:
        os.close(handle)


def reap(pid: int) -> None:
    """Collect the exit status if the process is our ended child, so that no zombie stays."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _is_ending(pid: int) -> bool:
    # A process on its way out has no command line any more but may still hold files and ports.
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "ZX"


def _has_ended(handle: int, pid: int, wait: float) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    if not poll.poll(wait * 1000):
        return False
    reap(pid)
    return True
