"""What `make page` needs beside the servers: a Chromium, and Prometheus's promtool.

`python3 -m dev.browser` prints where they are, as shell exports. What the machine has is taken;
on Debian, what is missing is installed (Chromium, by root) or unpacked into the cache (promtool).
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from dev import apt, cache
from dev.console import DevError, run, say


def chromium() -> str:
    """The path of a Chromium."""
    for name in (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name) if name else None
        if found:
            return found
    if not apt.is_debian() or os.geteuid() != 0:
        raise DevError("no Chromium here: install one, or name it in CHROMIUM")
    say("installing chromium")
    wanted = ["chromium", "fonts-dejavu-core"]
    run(["apt-get", "update", "-qq"])
    run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *wanted])
    return str(shutil.which("chromium"))


def promtool() -> str:
    """The path of promtool."""
    found = shutil.which(os.environ.get("PROMTOOL") or "promtool")
    if found:
        return found

    def build(tree: Path) -> None:
        if not apt.is_debian():
            raise DevError("no promtool here: install Prometheus, or name it in PROMTOOL")
        say("unpacking prometheus")
        run(["apt-get", "download", "-qq", "prometheus"], cwd=tree)
        [deb] = tree.glob("*.deb")
        run(["dpkg-deb", "-x", deb, tree])
        deb.unlink()

    return str(cache.artefact("prometheus", build) / "usr" / "bin" / "promtool")


def main() -> int:
    """Print the exports; 1 where something is missing (said on stderr)."""
    try:
        print(f"export CHROMIUM={Path(chromium())} PROMTOOL={Path(promtool())}")
    except DevError as error:
        say(f"dev: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
