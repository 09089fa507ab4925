"""``cdc-relay doctor``: what would make the relay fail, and what mends it."""

from __future__ import annotations

import json
from typing import Final

import click

from cdc_relay.cli.options import DATABASE, KAFKA, LOGGING, settings_options
from cdc_relay.cli.text import printable
from cdc_relay.config import Settings

_WHERE: Final = {
    "sql": "run in the database, as its administrator",
    "shell": "run in a shell",
    "my.cnf": "write into the server's option file and restart it",
    "advice": "to do",
}
_SIGNS: Final = {
    "ok": ("ok", "green"),
    "warning": ("warning", "yellow"),
    "failure": ("FAILURE", "red"),
}


@click.command(
    "doctor",
    epilog="Examples: `cdc-relay doctor --config relay.toml` before the first start; "
    "`cdc-relay doctor --json | jq '.findings[] | select(.level != \"ok\")'` in a pipeline.",
)
@settings_options(
    *(
        "topic",
        "delivery",
        "mark",
        "mark_row_image",
        "server_id",
        "session_timeout",
        "transaction_timeout",
    ),
    *(*DATABASE, *KAFKA, *LOGGING),
)
@click.option("--quiet", "-q", is_flag=True, help="Leave out what is well.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def command(settings: Settings, quiet: bool, as_json: bool) -> int:
    """Check the database, the table, the brokers, the topics and the installation for what makes
    relays fail. Each line is ok, a warning or a failure, says what it means, and is followed by
    the exact statement or command that mends it. Nothing is changed.

    Exit codes: 0 no failure (warnings do not count), 2 the installation or a setting, 3 the
    database or its table, 4 Kafka, 5 the position is lost; of several the smallest.
    """
    from cdc_relay.doctor import Finding, examine, exit_code

    found: list[Finding] = []
    if as_json:
        found = list(examine(settings))
        report = {
            "exit_code": exit_code(found),
            "findings": [finding.as_dict() for finding in found],
        }
        click.echo(json.dumps(report, ensure_ascii=False))
        return exit_code(found)
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=False)
    for finding in examine(settings):
        found.append(finding)
        if quiet and finding.level == "ok":
            continue
        sign, colour = _SIGNS[finding.level]
        console.print(f"{sign:8}", style=f"bold {colour}", end="")
        console.print(f"{finding.area} {finding.check}: {printable(finding.text)}")
        if finding.mend:
            console.print(f"         {_WHERE[finding.how]}:", style="dim")
            for line in finding.mend:
                console.print(f"             {printable(line)}")
    levels = [finding.level for finding in found]
    console.print(
        f"{levels.count('failure')} failures, {levels.count('warning')} warnings, "
        f"{levels.count('ok')} ok"
    )
    return exit_code(found)
