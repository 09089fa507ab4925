"""How many processes the tests run in: `python3 -m dev.workers`.

Each has servers of its own, which take up to 4 GB: two of MySQL, one of MariaDB, a broker, and now
and then a cluster of three.
"""

from pathlib import Path

MOST = 3
_EACH = 4 * 1024**3


def count(root: Path = Path("/")) -> int:
    """As many as the free memory holds, one at least. ``root`` is where /proc and /sys are."""
    free = [_free(root / "proc/meminfo"), _left(root / "sys/fs/cgroup")]
    return max(1, min([MOST, *(size // _EACH for size in free if size is not None)]))


def _free(meminfo: Path) -> int | None:
    """Bytes that processes may take, as the kernel sees it."""
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left(group: Path) -> int | None:
    """Bytes up to the limit of our control group; None where there is none."""
    try:
        limit = int((group / "memory.max").read_text())
        return limit - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


if __name__ == "__main__":
    print(count())
