"""The wheel, what an installation of it holds, and what a service gets that installs it with
SQLAlchemy alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from dev import sbom

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cdc_relay", "fallback", "writer")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pure wheel, built from a copy: a stale build/ in the checkout must not get into it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    target = tmp_path_factory.mktemp("wheel")
    _pip(Path(sys.executable), "wheel", "--no-deps", "--wheel-dir", str(target), str(source))
    (built,) = target.glob("*.whl")
    return built


def _pip(python: Path, *arguments: str) -> None:
    done = subprocess.run(
        [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"CDC_RELAY_PURE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_wheel_holds_exactly_the_three_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    files = {
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.is_file() and file.suffix not in (".pyc", ".so")
    }
    assert names - info == files
    assert any(name.endswith("licenses/LICENSE") for name in info)


def test_writer_works_where_only_sqlalchemy_is_installed(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], timeout=120, check=True)
    python = tmp_path / "venv" / "bin" / "python"
    _pip(python, "install", "SQLAlchemy")
    _pip(python, "install", "--no-deps", str(wheel))
    code = (
        "import sys\n"
        "from sqlalchemy import MetaData, orm\n"
        "from sqlalchemy.dialects import mysql\n"
        "before = set(sys.modules)\n"
        "from writer import Inbox, NotInTransactionError, Outbox, RecordsEvents, outbox_table\n"
        "Outbox(sequences=True), Inbox('points', sequences=True)\n"
        "top = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert top - sys.stdlib_module_names <= {'cdc_relay', 'sqlalchemy', 'writer'}, top\n"
        "print(outbox_table(MetaData()).name)\n"
    )
    # -I: neither the checkout nor this environment's variables get into it.
    done = subprocess.run(
        [python, "-I", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "outbox_event\n"


# Permissive, or weak copyleft by file, as a licence's identifier or its classifier names it.
PERMITTED = re.compile(
    r"MIT|BSD|Apache|PSF|ISC|Python Software Foundation|Zope|ZPL|MPL|Mozilla Public License"
)
# Says its licence (Apache-2.0) in no field of its metadata.
SILENT = {"mysql-replication"}


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_network")
def test_an_installation_holds_what_the_bill_says_under_licences_we_may_use(
    tmp_path: Path,
) -> None:
    bill = json.loads(sbom.write(tmp_path).read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == "cdc-relay"
    parts = {part["name"].lower().replace("_", "-"): part for part in bill["components"]}
    with (ROOT / "pyproject.toml").open("rb") as file:
        wanted = tomllib.load(file)["project"]["dependencies"]
    names = {re.match(r"[\w-]+", line)[0].lower().replace("_", "-") for line in wanted}  # type: ignore[index]
    assert names <= parts.keys()
    assert not {"pytest", "mypy", "ruff"} & parts.keys()
    for name, part in parts.items():
        assert part["version"], part
        said = [
            one.get("expression") or one["license"].get("id") or one["license"]["name"]
            for one in part.get("licenses", [])
        ]
        assert said or name in SILENT, name
        assert all(PERMITTED.search(one) for one in said), (name, said)


@pytest.mark.usefixtures("no_network")
def test_advisories_that_cannot_be_asked_for_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert sbom.advisories() == 0
    assert "advisories: not asked" in capsys.readouterr().err


def test_an_advisory_that_is_known_is_said_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """In the form of pip-audit's JSON."""
    well = {"name": "click", "version": "8.1.0", "vulns": []}
    other = {"name": "own", "skip_reason": "not found on PyPI"}
    assert sbom.told([well, other]) == 0
    assert "0 known against 1 packages; not asked about 1" in capsys.readouterr().err
    found = {"id": "GHSA-x", "fix_versions": ["3.1.6"], "aliases": [], "description": "…"}
    assert sbom.told([well, {"name": "jinja2", "version": "3.1.4", "vulns": [found]}]) == 1
    assert "jinja2 3.1.4: GHSA-x, mended in 3.1.6" in capsys.readouterr().err
