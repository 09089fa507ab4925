"""The documentation cannot drift from the code that it describes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cdc_relay.config import ENV_PREFIX, Settings
from tests.support.configuration_doc import PAGE, render

ROOT = PAGE.parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_configuration_page_shows_the_settings_as_they_are() -> None:
    page = PAGE.read_text()
    assert page == render(page), "docs/configuration.md is out of date; run: make docs"


@pytest.mark.parametrize("field", Settings.model_fields)
def test_every_setting_says_what_it_is(field: str) -> None:
    assert Settings.model_fields[field].description


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_pages_name_only_variables_that_exist(page: Path) -> None:
    known = {f"{ENV_PREFIX}{field.upper()}" for field in Settings.model_fields}
    known |= {f"{ENV_PREFIX}CONFIG", f"{ENV_PREFIX}PURE"}
    others = (f"{ENV_PREFIX}KAFKA_", f"{ENV_PREFIX}TEST_", f"{ENV_PREFIX}DEV_")
    named = set(re.findall(rf"\b{ENV_PREFIX}[A-Z_]*[A-Z]", page.read_text()))
    assert {name for name in named if not name.startswith(others)} <= known


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{_name(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_pages_name_only_tests_that_exist(page: Path) -> None:
    for path, name in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text()):
        file = ROOT / path
        assert file.exists(), f"{_name(page)} names {path}"
        assert not name or f"def {name}(" in file.read_text(), f"{_name(page)} names {path}::{name}"
