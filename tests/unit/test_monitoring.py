"""Alert rules, runbook and dashboard name what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "deploy/prometheus-alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_each_alert_has_a_severity_words_and_a_runbook(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"]
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^## (\w+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert rule["alert"] in headings
    assert anchor == rule["alert"].lower()


def test_each_runbook_has_its_alert() -> None:
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(rule["alert"] for rule in RULES)


def test_panels_of_the_dashboard_have_queries_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        cells = {(grid["x"] + x, grid["y"] + y) for x in range(grid["w"]) for y in range(grid["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert all(target["expr"] for target in panel["targets"])
