"""What an installation of cdc-relay holds: a bill of materials (CycloneDX), and what is publicly
known against it.

    python -m dev.sbom DIRECTORY [--advisories]   # of the environment with the development tools

The development environment holds far more: only what the package needs, without its extras, counts,
in the versions that are here. So no index has to answer, except for advisories.
"""

import json
import subprocess
import sys
import tempfile
import venv
from importlib import metadata
from pathlib import Path
from typing import Any

# Both come with pip-audit.
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dev.console import DevError, run, say

ROOT = Path(__file__).resolve().parent.parent
_PACKAGE = "cdc-relay"
_PATIENCE_S = 120


def write(into: Path) -> Path:
    """Write ``cdc-relay.cdx.json``: each package with its version and licence."""
    into.mkdir(parents=True, exist_ok=True)
    bill = into.resolve() / "cdc-relay.cdx.json"
    with tempfile.TemporaryDirectory() as home:
        packages = _records(Path(home))
        python = Path(home) / "venv" / "bin" / "python"
        command = [sys.executable, "-m", "cyclonedx_py", "environment", str(python)]
        command += ["--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible"]
        run([*command, "--validate", "-o", str(bill)], cwd=packages.parent)
    return bill


def advisories() -> int:
    """Ask the public database of advisories about what it needs, and say what it knows: 1 where it
    knows of any. A database that does not answer is said and no fault."""
    with tempfile.TemporaryDirectory() as home:
        packages = _records(Path(home), without=_PACKAGE)
        command = [sys.executable, "-m", "pip_audit", "--path", str(packages), "--format", "json"]
        command += ["--progress-spinner", "off", "--timeout", "10"]
        command += ["--cache-dir", str(Path(home) / "cache")]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
            )
            answer = json.loads(done.stdout)["dependencies"]
        except (subprocess.TimeoutExpired, ValueError):
            say("advisories: not asked, the public database does not answer")
            return 0
    return told(answer)


def told(answer: list[dict[str, Any]]) -> int:
    """Say what the database knows of each package, as pip-audit gives it."""
    asked = [one for one in answer if "skip_reason" not in one]
    known = [
        f"{one['name']} {one['version']}: {found['id']}, mended in "
        + (", ".join(found["fix_versions"]) or "none")
        for one in asked
        for found in one["vulns"]
    ]
    for line in known:
        say(f"advisories: {line}")
    unknown = len(answer) - len(asked)
    say(f"advisories: {len(known)} known against {len(asked)} packages; not asked about {unknown}")
    return int(bool(known))


def _records(home: Path, without: str = "") -> Path:
    """Make an environment that holds the metadata, and no more, of the package and of all that it
    needs; return its directory of packages."""
    venv.create(home / "venv")
    [packages] = home.glob("venv/lib/python*/site-packages")
    for name in {name for name, *_ in _needed(Requirement(_PACKAGE), set())} - {without}:
        one = metadata.distribution(name)
        record = packages / f"{name.replace('-', '_')}-{one.version}.dist-info"
        record.mkdir(exist_ok=True)
        # The second is that of a checkout.
        said = one.read_text("METADATA") or one.read_text("PKG-INFO")
        (record / "METADATA").write_text(str(said))
    return packages


def _needed(wanted: Requirement, found: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Add a package that is installed here, by name and extras, and all that it needs."""
    key = (canonicalize_name(wanted.name), *sorted(wanted.extras))
    if key not in found:
        found.add(key)
        for one in map(Requirement, metadata.requires(wanted.name) or ()):
            extras = ("", *wanted.extras)
            if one.marker is None or any(one.marker.evaluate({"extra": name}) for name in extras):
                _needed(one, found)
    return found


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
