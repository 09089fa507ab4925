"""What is declared about the packages is what is there."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
import time
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNEL = {"cdc_relay", "cdc_relay.errors", "cdc_relay.outbox"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def _modules(statement: str) -> set[str]:
    """Return the modules that a fresh interpreter has after a statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(json.loads(done.stdout))


def test_import_writer_loads_sqlalchemy_and_the_kernel_only() -> None:
    loaded = _modules("import writer") - _modules(
        "import sqlalchemy.orm, sqlalchemy.dialects.mysql"
    )
    ours = {name for name in loaded if name.partition(".")[0] == "cdc_relay"}
    foreign = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    assert ours == KERNEL
    assert foreign <= {"writer", "cdc_relay", "sqlalchemy"}


def test_every_package_is_listed(project: dict[str, Any]) -> None:
    there = {
        str(file.parent.relative_to(ROOT)).replace("/", ".")
        for top in ("cdc_relay", "fallback", "writer")
        for file in (ROOT / top).rglob("__init__.py")
    }
    assert set(project["tool"]["setuptools"]["packages"]) == there


@pytest.mark.parametrize("package", ["cdc_relay", "fallback", "writer"])
def test_packages_are_typed(project: dict[str, Any], package: str) -> None:
    assert (ROOT / package / "py.typed").exists()
    assert "py.typed" in project["tool"]["setuptools"]["package-data"][package]


def test_console_script_leads_to_a_function(project: dict[str, Any]) -> None:
    module, _, name = project["project"]["scripts"]["cdc-relay"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_console_script_is_installed() -> None:
    scripts = entry_points(group="console_scripts", name="cdc-relay")
    assert [script.value for script in scripts] == ["cdc_relay.cli:entry"]


@pytest.mark.parametrize("package", ["fallback", "writer"])
def test_packages_with_plain_names_import_themselves_relatively(package: str) -> None:
    # Where another distribution owns the name, an absolute import would reach the wrong one.
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert package not in {name.partition(".")[0] for name in names}, (
                f"{file.name}, line {getattr(node, 'lineno', '?')}: import it relatively"
            )


@pytest.mark.parametrize("checkout", [False, True])
def test_an_installation_runs_what_was_compiled(tmp_path: Path, checkout: bool) -> None:
    """pip unpacks the compiled form before its source. In a checkout a newer source is an edit."""
    package = tmp_path / "cdc_relay" / "binlog"
    package.mkdir(parents=True)
    (tmp_path / "cdc_relay" / "__init__.py").touch()
    source = (ROOT / "cdc_relay" / "binlog" / "__init__.py").read_text()
    (package / "__init__.py").write_text(source)
    if checkout:
        (tmp_path / "pyproject.toml").touch()
    for name in ("jsonb", "values", "rows", "decoder"):
        for suffix, age in ((EXTENSION_SUFFIXES[0], 10), (".py", 0)):
            (package / (name + suffix)).touch()
            os.utime(package / (name + suffix), (time.time() - age,) * 2)
    environment = {key: value for key, value in os.environ.items() if key != "CDC_RELAY_PURE"}
    done = subprocess.run(
        [sys.executable, "-c", "from cdc_relay.binlog import compiled; print(compiled())"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == str(not checkout)
