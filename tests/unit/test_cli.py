"""The command line: one line for everything wrong, and the right exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.shell_completion import ShellComplete

from cdc_relay import cli, telemetry
from cdc_relay.about import decoder
from cdc_relay.cli import main
from cdc_relay.cli.text import printable
from cdc_relay.cli.times import moment
from cdc_relay.errors import SinkError, SourceError

Capture = pytest.CaptureFixture[str]
MARKS = "SELECT, UPDATE (status, retry_count, next_retry_time, updated_at, last_error, sent_at)"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("CDC_RELAY_"):
            monkeypatch.delenv(name)


def error_of(capsys: Capture) -> str:
    """The only line of stderr."""
    output = capsys.readouterr()
    assert output.out == ""
    [line] = output.err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def test_help_names_each_command(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("init", "schema", "start", "compensate", "status", "version"):
        assert f"\n  {name} " in text


@pytest.mark.parametrize("name", cli._COMMANDS)
def test_each_command_has_help(name: str, capsys: Capture) -> None:
    assert main([name, "--help"]) == 0
    assert f"Usage: cdc-relay {name} [OPTIONS]" in capsys.readouterr().out


def every_command() -> list[tuple[str, ...]]:
    """Commands, and those of groups, by the words that call them."""
    context = click.Context(cli.cli)
    found: list[tuple[str, ...]] = []
    for name in cli._COMMANDS:
        command = cli.cli.get_command(context, name)
        if isinstance(command, click.Group):
            found += [(name, one) for one in command.list_commands(context)]
        else:
            found.append((name,))
    return found


@pytest.mark.parametrize("words", every_command(), ids=" ".join)
def test_the_help_has_an_example_and_its_own_flags_first(
    words: tuple[str, ...], capsys: Capture
) -> None:
    assert main([*words, "--help"]) == 0
    text = capsys.readouterr().out
    if words != ("version",):
        assert f"`cdc-relay {' '.join(words)}" in " ".join(text.split())
    assert "Pydantic" not in text
    if "--json" in text and "--config" in text:
        assert text.index("\n  --json") < text.index("\n  --config")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["dea"], ["dead"]),
        (["dead", "re"], ["retry"]),
        (["start", "--deli"], ["--delivery"]),
        (["start", "--delivery", "at"], ["at_least_once"]),
        (["compensate", "--mark", ""], ["update", "delete", "none"]),
    ],
)
def test_shells_complete_commands_flags_and_choices(words: list[str], offered: list[str]) -> None:
    *before, begun = words
    completion = ShellComplete(cli.cli, {}, "cdc-relay", "_CDC_RELAY_COMPLETE")
    assert [item.value for item in completion.get_completions(before, begun)] == offered


def test_shells_complete_files() -> None:
    completion = ShellComplete(cli.cli, {}, "cdc-relay", "_CDC_RELAY_COMPLETE")
    [item] = completion.get_completions(["start", "--database-tls-ca"], "/etc")
    assert item.type == "file"


def test_no_command_shows_the_help(capsys: Capture) -> None:
    assert main([]) == 2
    assert "Commands:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nope"], "No such command 'nope'. (see cdc-relay --help)"),
        (["schema", "--tabel", "x"], "No such option"),
        (["schema", "extra"], "unexpected extra argument"),
        (["init"], "database_url is not set: pass --database-url"),
        (["init", "--database-url", "nonsense"], "--database-url: database_url: is not a"),
        (["compensate", "--older-than", "5"], "--older-than: older_than: '5' is not a duration"),
        (["compensate", "--batch", "many"], "--batch: batch: Input should be a valid integer"),
        (["compensate", "--database-url", "mysql://h/d"], "kafka_bootstrap is not set"),
        (["schema", "--config", "/no/such.toml"], "/no/such.toml: cannot read the configuration"),
    ],
)
def test_usage_and_configuration_errors(arguments: list[str], line: str, capsys: Capture) -> None:
    assert main(arguments) == 2
    assert line in error_of(capsys)


@pytest.mark.parametrize(
    "words",
    [
        *(["init"], ["status"], ["diagnose"], ["audit"], ["replay", "--id", "1", "--yes"]),
        *(["dead", "list"], ["dead", "retry", "--all"], ["purge"], ["archive"]),
        *(["inbox", "purge"], ["position", "set", "--current"]),
    ],
    ids=" ".join,
)
def test_a_database_that_is_away(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("CDC_RELAY_DATABASE_URL", "mysql+pymysql://relay:s3cret@127.0.0.1:1/shop")
    monkeypatch.setenv("CDC_RELAY_KAFKA_BOOTSTRAP", "127.0.0.1:1")
    assert main(words) == 3
    line = error_of(capsys)
    assert line.startswith("the database at 127.0.0.1:1 does not answer: ")
    assert "s3cret" not in line


def test_schema_prints_statements(capsys: Capture) -> None:
    assert main(["schema", "--table", "shop.events"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("CREATE TABLE shop.events (")
    assert output.count(";\n") == 4
    assert main(["schema", "--table", "shop.events", "--sequences"]) == 0
    more = capsys.readouterr().out
    assert more.startswith(output)
    assert more.removeprefix(output).startswith("CREATE TABLE shop.outbox_sequence (")


def test_schema_prints_the_grants_of_each_role(capsys: Capture) -> None:
    assert main(["schema", "--grants", "--table", "shop.events"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "-- relay",
        "GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO 'cdc_relay'@'%';",
        f"GRANT {MARKS} ON `shop`.`events` TO 'cdc_relay'@'%';",
        "-- compensator",
        "GRANT REPLICATION CLIENT ON *.* TO 'cdc_compensator'@'%';",
        f"GRANT {MARKS} ON `shop`.`events` TO 'cdc_compensator'@'%';",
        "-- housekeeping",
        "GRANT SELECT, DELETE ON `shop`.`events` TO 'cdc_housekeeping'@'%';",
        "GRANT CREATE, SELECT, INSERT, DELETE ON `shop`.`outbox_archive` "
        "TO 'cdc_housekeeping'@'%';",
        "-- writer",
        "GRANT INSERT ON `shop`.`events` TO 'service'@'%';",
    ]


def test_config_by_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    file = tmp_path / "relay.toml"
    file.write_text('table = "from_file"\n')
    monkeypatch.setenv("CDC_RELAY_CONFIG", str(file))
    assert main(["schema"]) == 0
    assert "CREATE TABLE from_file" in capsys.readouterr().out


def test_version(capsys: Capture) -> None:
    assert main(["version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("cdc-relay 0.")
    assert lines[1] == f"decoder: {decoder()}"
    assert decoder() in ("python", "compiled")
    assert any(line.startswith("SQLAlchemy 2.") for line in lines)


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    @click.command("version")
    def command() -> None:
        raise error

    monkeypatch.setattr(cli, "import_module", lambda _name: SimpleNamespace(command=command))


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (SourceError("no table\nat all"), 3, "no table at all"),
        (SinkError("no broker"), 4, "no broker"),
        (ZeroDivisionError("by zero"), 1, "please report it: ZeroDivisionError: by zero"),
    ],
)
def test_errors_are_one_line(
    error: Exception, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    raising(monkeypatch, error)
    assert main(["version"]) == code
    assert line in error_of(capsys)


def test_a_bug_shows_where_when_debugging(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    raising(monkeypatch, ZeroDivisionError())
    monkeypatch.setattr(telemetry, "_level", 10)
    assert main(["version"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, KeyboardInterrupt())
    assert main(["version"]) == 130


def test_help_and_version_load_no_library_of_the_others() -> None:
    code = (
        "import sys\n"
        "from cdc_relay.cli import main\n"
        "main(['--help']); main(['version'])\n"
        "heavy = {'sqlalchemy', 'pydantic', 'confluent_kafka', 'pymysql', 'pymysqlreplication'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_a_closed_pipe_is_met_in_silence() -> None:
    code = "import sys; from cdc_relay.cli import main; sys.exit(main(['schema']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (128 + signal.SIGPIPE, b"")


def test_start_loads_nothing_that_draws() -> None:
    """rich is for the commands that people read."""
    code = "import sys, cdc_relay.cli.start; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_text_of_rows_gives_a_terminal_no_orders() -> None:
    assert printable("a\x1b[31m\n\t\x7f\x9b é 漢") == r"a\x1b[31m\x0a\x09\x7f\x9b é 漢"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(shell: str) -> None:
    environment = {**os.environ, "_CDC_RELAY_COMPLETE": f"{shell}_source"}
    command = [sys.executable, "-m", "cdc_relay"]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert b"_CDC_RELAY_COMPLETE" in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1970-01-01", 0),
        ("1969-01-01T00:00:00Z", 0),
        ("1970-01-01T00:00:01.0019", 1_001_000),
        ("2026-05-01T12:00:00+02:00", 1_777_629_600_000_000),
        ("2s", 8_000_000),
        ("2h", 0),
    ],
)
def test_a_time_is_not_taken_for_a_duration(text: str, expected: int) -> None:
    found = moment(None, click.Option(["--since"]), text)
    assert found is not None
    assert found.at(10_000_000) == expected
