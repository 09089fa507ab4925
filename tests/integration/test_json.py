"""What ``--json`` prints is documented: each field of each command stands in its part of
docs/operations.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from cdc_relay.position import Position
from tests.support.harness import Harness
from tests.support.webhook import Webhook

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()
# Command, and where its fields are documented: from one text to another.
COMMANDS: Final = {
    "doctor": ("`--json` prints one object: `exit_code`", "Exit code:"),
    "status": ("`cdc-relay status --json` prints", "`cdc-relay diagnose` says"),
    "diagnose": ("`cdc-relay diagnose` says", "\n## "),
    "audit --since 1h --until 0s": ("\n## Audit", "\n## "),
    "tail --since 1h --until-current": ("`tail` reads", "\n\n"),
    "replay --since 1h --dry-run": ("`replay` sends", "\n\n"),
    "dead list": ("\n## Dead rows", "\n## "),
    "position show": ("`show --json` prints", "\n\n"),
    "purge --older-than 1h": ("The summary (`--json`", "\n\n"),
    "archive --older-than 1h": ("The summary (`--json`", "\n\n"),
    "compensate --older-than 1h": ("\n## The compensator", "\n## "),
}
INBOX: Final = ("\n## Cleaning the inbox", "\n## ")
ALERTS: Final = ("`cdc-relay alert test` sends", "\n\n")
# Their keys are data: a row's headers, days, samples by kind, counts by status.
MAPS: Final = ("headers", "days", "samples", "left", "missing", "prepared")


def documented(begin: str, end: str) -> set[str]:
    """The words in backticks between two texts."""
    _, found, rest = PAGE.partition(begin)
    assert found, begin
    part, found, _ = rest.partition(end)
    assert found, end
    return set(re.findall(r"`([a-z_]+)`", begin + part))


def keys(report: Any) -> Iterator[str]:
    """The fields of an object and of those in it."""
    if isinstance(report, list):
        for one in report:
            yield from keys(one)
    elif isinstance(report, dict):
        for name, value in report.items():
            yield name
            if name not in MAPS:
                yield from keys(value)


def check(process: Any, known: set[str]) -> None:
    lines = [json.loads(line) for line in process.stdout.decode().splitlines()]
    assert lines, process.text()
    unknown = set(keys(lines)) - known
    assert not unknown, f"{process.arguments}: {unknown} are not documented"


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
    for command, part in COMMANDS.items():
        known = documented(*part)
        if command == "status":  # `last_pass` has the fields of a pass
            known |= documented(*COMMANDS["compensate --older-than 1h"])
        check(worked.run(*command.split(), "--json"), known)


def test_the_fields_of_an_alert_and_of_the_inbox(worked: Harness) -> None:
    for statement in worked.run("inbox", "schema").stdout.decode().split(";\n"):
        if statement.strip():
            worked.database.sql(statement)
    webhook = Webhook()
    with webhook.serving():
        check(worked.run("alert", "test", "--json", ALERTS=webhook.url), documented(*ALERTS))
        check(worked.run("inbox", "purge", "--json"), documented(*INBOX))


def test_the_fields_of_a_position_that_few_have() -> None:
    position = Position("mysql", "a", "f", 4, "", {"xid": (1, 2)}, 1_700_000_000, ("group", 3))
    assert set(keys(position.to_json())) <= documented(*COMMANDS["position show"])
