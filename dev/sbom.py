"""What an installation of cdc-relay holds: a bill of materials (CycloneDX), and what is publicly
known against it.

    python -m dev.sbom DIRECTORY [--advisories]   # of the environment with the development tools

An environment of its own is made for it: the development one holds far more.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from dev.console import DevError, run, say

ROOT = Path(__file__).resolve().parent.parent


def write(into: Path) -> Path:
    """Install the package as users do, without its extras, and write ``cdc-relay.cdx.json``."""
    into.mkdir(parents=True, exist_ok=True)
    bill = into.resolve() / "cdc-relay.cdx.json"
    with tempfile.TemporaryDirectory() as home:
        python = _install(Path(home))
        command = [sys.executable, "-m", "cyclonedx_py", "environment", str(python)]
        command += ["--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible"]
        run([*command, "--validate", "-o", str(bill)], cwd=into)
    return bill


def advisories() -> int:
    """Ask the public database of advisories about the same; 1 where it knows of any."""
    with tempfile.TemporaryDirectory() as home:
        python = _install(Path(home))
        [packages] = python.parent.parent.glob("lib/python*/site-packages")
        command = [sys.executable, "-m", "pip_audit", "--path", str(packages), "--strict"]
        return subprocess.run([*command, "--skip-editable"], check=False).returncode


def _install(home: Path) -> Path:
    venv.create(home / "venv", with_pip=True)
    python = home / "venv" / "bin" / "python"
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run([*pip, "install", str(ROOT)], cwd=home)
    run([*pip, "uninstall", "--yes", "pip", "setuptools"], cwd=home)
    return python


def main(arguments: list[str]) -> int:
    """Write the bill into the directory given; with ``--advisories`` ask about it as well."""
    try:
        bill = write(Path(arguments[0]))
    except DevError as error:
        print(f"sbom: {error}", file=sys.stderr)
        return 1
    say(f"wrote {bill}")
    return advisories() if "--advisories" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
