"""The cache of fetched servers, outside the checkout and shared by all checkouts of a user."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


def directory() -> Path:
    """Return the cache directory, created when missing.

    $CDC_RELAY_DEV_CACHE, else $XDG_CACHE_HOME/cdc-relay, else ~/.cache/cdc-relay.
    """
    own = os.environ.get("CDC_RELAY_DEV_CACHE")
    base = os.environ.get("XDG_CACHE_HOME")
    shared = Path(base) if base else Path.home() / ".cache"
    path = Path(own) if own else shared / "cdc-relay"
    path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes and threads; the kernel frees it at death."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def artefact(name: str, build: Callable[[Path], None]) -> Path:
    """Return the cached directory `name`; when missing, let `build` fill it first.

    The directory is complete or absent: it is built beside its place and renamed. Two processes
    that want the same one build it once.
    """
    root = directory()
    final = root / name
    if final.is_dir():
        return final
    with lock(root / f"{name}.lock"):
        if final.is_dir():
            return final
        for stale in root.glob(f"{name}.partial-*"):
            shutil.rmtree(stale, ignore_errors=True)
        # A fresh name each time: a child of a killed fetch may still be writing to the old one.
        partial = Path(tempfile.mkdtemp(prefix=f"{name}.partial-", dir=root))
        try:
            build(partial)
            partial.chmod(0o755)
            partial.rename(final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return final
