"""Users' code against our types: strict mypy and strict pyright find what is wrong, and nothing
else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests" / "data" / "typed_service.py"


@pytest.fixture
def service(tmp_path: Path) -> Path:
    """The user's file, in a place of its own."""
    return Path(shutil.copy(SOURCE, tmp_path / "service.py"))


def wrong_lines() -> set[int]:
    lines = SOURCE.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}


def test_mypy_strict(service: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary"]
    done = subprocess.run(
        [*command, "--cache-dir", str(service.parent / "cache"), str(service)],
        cwd=service.parent,
        env={"MYPYPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert not done.stderr
    found = {int(match[1]) for match in re.finditer(r"service\.py:(\d+): error", done.stdout)}
    others = [line for line in done.stdout.splitlines() if not line.startswith("service.py:")]
    assert found == wrong_lines(), done.stdout
    assert not [line for line in others if "error" in line], done.stdout


def test_pyright_strict(service: Path) -> None:
    settings = {
        "typeCheckingMode": "strict",
        "extraPaths": [str(ROOT)],
        "pythonVersion": "3.11",
        "include": [str(service)],
        # Theirs, not ours: confluent_kafka and PyMySQL are typed in part.
        "reportMissingTypeStubs": False,
    }
    (service.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(
        command, cwd=service.parent, capture_output=True, text=True, timeout=240, check=False
    )
    report = json.loads(done.stdout)
    problems = report["generalDiagnostics"]
    errors = [item for item in problems if item["severity"] in ("error", "warning")]
    found = {item["range"]["start"]["line"] + 1 for item in errors}
    text = "\n".join(f"{item['range']['start']['line'] + 1}: {item['message']}" for item in errors)
    assert found == wrong_lines(), text
