"""How this package speaks: progress on stderr, and errors a person can act on."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
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
    blocks = 0
    for file in path.rglob("*") if path.is_dir() else [path]:
        # Files come and go while a download is watched.
        with contextlib.suppress(OSError):
            blocks += file.lstat().st_blocks
    return f"{blocks * 512 / 1_000_000:.0f} MB"


@contextlib.contextmanager
def watching(label: str, path: Path, every: float = 3.0) -> Iterator[None]:
    """Say the label, and how the tree under `path` grows for as long as the body runs."""
    say(label)
    done = threading.Event()

    def report() -> None:
        while not done.wait(every):
            say(f"{label} ... {size(path)}")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
