"""How this package speaks: progress on stderr, and errors a person can act on."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class DevError(Exception):
    """Something the user has to mend; the text says what is wrong and what to do."""


def say(message: str) -> None:
    """Print one progress line to stderr; stdout belongs to the environment."""
    print(message, file=sys.stderr, flush=True)


def run(argv: Sequence[str | Path], *, cwd: Path | None = None, stdin: bytes | None = None) -> str:
    """Run a command to its end and return its stdout.

    Raises DevError with the last lines of its output when it fails or does not exist.
    """
    try:
        done = subprocess.run(
            [str(arg) for arg in argv],
            cwd=cwd,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        raise DevError(f"{argv[0]} is not installed") from None
    out = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        lines = (out + done.stderr.decode(errors="replace")).strip().splitlines()[-12:]
        raise DevError(f"{argv[0]} failed with exit code {done.returncode}:\n" + "\n".join(lines))
    return out


def size(path: Path) -> str:
    """Return the disk size of a file or tree in words, such as "12 MB"."""
    files = path.rglob("*") if path.is_dir() else [path]
    blocks = sum(file.lstat().st_blocks for file in files if not file.is_dir())
    return f"{blocks * 512 / 1_000_000:.0f} MB"
