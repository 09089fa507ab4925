"""What is in deploy/ through the tools that will read it: ``make manifests``.

Each tool that is here is asked: kubectl (or kustomize), systemd-analyze, docker compose, promtool,
Grafana's models. What could not be asked is said; it is red only where a tool refuses something.
The unit tests look at the same files without any tool.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from dev.browser import promtool
from dev.console import DevError

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


class NotHereError(Exception):
    """The tool is not on this machine."""


def kustomize() -> str:
    """The kustomization builds, and what it builds is valid."""
    if shutil.which("kubectl"):
        text = run("kubectl", "kustomize", str(DEPLOY / "k8s"))
    else:
        text = run("kustomize", "build", str(DEPLOY / "k8s"))
    objects = list(yaml.safe_load_all(text))
    for one in objects:
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
        if "image: cdc-relay\n" in yaml.safe_dump(one):
            raise ValueError(f"{one['kind']} {one['metadata']['name']}: its image has no tag")
    return f"{len(objects)} objects"


def systemd() -> str:
    """The units are what systemd understands."""
    units = sorted((DEPLOY / "systemd").iterdir())
    with tempfile.TemporaryDirectory() as directory:
        for unit in units:
            # The program is where the unit says only after an installation.
            text = unit.read_text().replace("/opt/cdc-relay/bin/cdc-relay", "/bin/true")
            (Path(directory) / unit.name).write_text(text)
        copies = [str(Path(directory) / unit.name) for unit in units]
        said = run("systemd-analyze", "--man=no", "verify", *copies)
    ours = [line for line in said.splitlines() if "cdc-relay" in line]
    if ours:
        raise ValueError("; ".join(ours))
    return f"{len(units)} units"


def compose() -> str:
    """The Compose file is what Compose understands."""
    try:
        run("docker", "compose", "version")
    except ValueError:
        raise NotHereError("docker compose") from None
    run("docker", "compose", "--file", str(ROOT / "docker-compose.yml"), "config", "--quiet")
    return "docker-compose.yml"


def rules() -> str:
    """The alert rules are what Prometheus understands."""
    try:
        tool = promtool()
    except DevError:
        raise NotHereError("promtool") from None
    return run(tool, "check", "rules", str(DEPLOY / "prometheus-alerts.yml")).split(":")[-1]


def dashboard() -> str:
    """The dashboard is what Grafana's own models know, field for field (`pip install
    grafana-foundation-sdk`)."""
    try:
        models = import_module("grafana_foundation_sdk.models.dashboard")
        encoder = import_module("grafana_foundation_sdk.cog.encoder").JSONEncoder
        import_module("grafana_foundation_sdk.cog.plugins").register_default_plugins()
    except ImportError:
        raise NotHereError("grafana-foundation-sdk") from None
    written = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    known = json.loads(json.dumps(models.Dashboard.from_json(written), cls=encoder))
    # The text of a variable's query as the editor shows it; the query itself is beside it.
    lost = [path for path in _lost(written, known, "") if not path.endswith(".definition")]
    if lost:
        raise ValueError(f"not in Grafana's model: {', '.join(lost)}")
    return f"{len(written['panels'])} panels"


def _lost(written: Any, known: Any, path: str) -> Iterator[str]:
    if isinstance(written, dict) and isinstance(known, dict):
        for name, value in written.items():
            yield from _lost(value, known.get(name), f"{path}.{name}")
    elif isinstance(written, list) and isinstance(known, list):
        for number, (one, other) in enumerate(zip_longest(written, known)):
            yield from _lost(one, other, f"{path}[{number}]")
    elif written != known:
        yield path


CHECKS: Sequence[Callable[[], str]] = (kustomize, systemd, compose, rules, dashboard)


def run(*command: str) -> str:
    """What the tool says. Raises ``NotHereError``, or ``ValueError`` where it refuses."""
    if shutil.which(command[0]) is None:
        raise NotHereError(command[0])
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise ValueError((done.stderr or done.stdout).strip())
    return done.stdout + done.stderr


def main() -> int:
    """Print a line for each; 1 where a tool refuses something."""
    code = 0
    for check in CHECKS:
        try:
            print(f"ok           {check.__name__}: {check().strip()}")
        except NotHereError as error:
            print(f"not checked  {check.__name__}: no {error} here")
        except (ValueError, kubernetes_validate.ValidationError) as error:
            code = 1
            print(f"WRONG        {check.__name__}: {error}")
    return code


if __name__ == "__main__":
    sys.exit(main())
