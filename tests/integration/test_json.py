"""What ``--json`` prints is documented: each field of each command stands in docs/operations.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import Harness
from tests.support.webhook import Webhook

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()
DOCUMENTED = set(re.findall(r"`([a-z_]+)`", PAGE))


@pytest.fixture
def worked(shop: Harness) -> Harness:
    """A shop with a sent, a dead and a pending row, a checkpoint and a pass."""
    shop.ins("a", {"n": 1})
    assert shop.run("start", "--until-current").wait() == 0
    shop.compensate()
    shop.ins("b", {"n": 2})
    shop.ins("c", {"n": 3})
    shop.database.sql(f"UPDATE {shop.table} SET status = 2 WHERE aggregate_id = 'b'")
    return shop


def test_each_field_is_documented(worked: Harness) -> None:
    for words in (
        ["doctor"],
        ["status"],
        ["diagnose"],
        ["audit", "--since", "1h", "--until", "0s"],
        ["tail", "--since", "1h", "--until-current"],
        ["replay", "--since", "1h", "--dry-run"],
        ["dead", "list"],
        ["position", "show"],
        ["purge", "--older-than", "1h"],
        ["archive", "--older-than", "1h"],
        ["compensate", "--older-than", "1h"],
    ):
        process = worked.run(*words, "--json")
        found: list[Any] = [json.loads(line) for line in process.stdout.decode().splitlines()]
        assert found, process.text()
        for report in found:
            missing = set(report) - DOCUMENTED
            assert not missing, f"{' '.join(words)} --json: {missing} are not documented"


def test_the_fields_of_an_alert_and_of_the_inbox(worked: Harness) -> None:
    for statement in worked.run("inbox", "schema").stdout.decode().split(";\n"):
        if statement.strip():
            worked.database.sql(statement)
    webhook = Webhook()
    with webhook.serving():
        for words, extra in (
            (["alert", "test"], {"ALERTS": webhook.url}),
            (["inbox", "purge"], {}),
        ):
            process = worked.run(*words, "--json", **extra)
            [report] = [json.loads(line) for line in process.stdout.decode().splitlines()]
            assert not set(report) - DOCUMENTED, report
