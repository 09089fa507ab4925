"""The command line. Commands only wire objects; each is loaded when it is asked for, so that
``--help`` and ``version`` do not wait for the libraries of the others."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Final, NoReturn

import click

from cdc_relay.cli.text import printable
from cdc_relay.errors import CdcRelayError

# Name, and the line in the help; the command is ``command`` in the module of that name here.
_COMMANDS: Final = {
    "init": "Create the outbox table, or say what an existing one lacks.",
    "schema": "Print the outbox table's DDL; needs no database.",
    "doctor": "Check everything that makes relays fail, with what mends it.",
    "start": "Run the relay: binlog to Kafka, in commit order.",
    "compensate": "Send the rows that have been pending for too long.",
    "status": "Show the table's rows by status, and the checkpoint.",
    "diagnose": "Say in words what the table's picture means, and what to do next.",
    "audit": "Compare the table with the topics: missing, duplicate, out of order.",
    "tail": "Follow the records of our topics, one line each.",
    "replay": "Send chosen rows again.",
    "position": "Show or set the position from which the relay goes on.",
    "dead": "List, show, retry or discard rows that failed too often.",
    "purge": "Delete rows that were sent long ago.",
    "archive": "Move rows that were sent long ago to another table.",
    "alert": "Try the targets that hear of dead rows.",
    "inbox": "Print the DDL of a consumer's inbox, or clean it.",
    "demo": "Show on your own servers that nothing is lost, with a kill in the middle.",
    "version": "Show the versions of cdc-relay and of what it runs on.",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"cdc_relay.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(
    "cdc-relay",
    cls=_LazyGroup,
    epilog="Settings come from the file given by --config, from CDC_RELAY_* variables and from "
    "flags; later wins. `cdc-relay COMMAND --help` shows a command's flags.",
)
def cli() -> None:
    """Carry the events of a transactional outbox table from MySQL or MariaDB to Kafka."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (``cdc_relay.errors`` lists them).

    Whatever goes wrong is one line on stderr, ``error: …``. Only a bug also shows where it
    happened, and only with ``--log-level debug``.
    """
    try:
        result: Any = cli.main(
            args=None if argv is None else list(argv), prog_name="cdc-relay", standalone_mode=False
        )
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "cdc-relay"
        return _fail(f"{error.format_message()} (see {path} --help)", error.exit_code)
    except click.Abort:
        return 130
    except SystemExit as ended:  # click's own: shell completion, and 1 for a pipe nobody reads
        return 128 + signal.SIGPIPE if ended.code == 1 else int(ended.code or 0)
    except CdcRelayError as error:
        return _fail(str(error), error.exit_code)
    except Exception as error:
        return _report_bug(error)


def entry() -> NoReturn:
    """The command ``cdc-relay``: ``main``, then the end of the process without the interpreter's
    own clean-up. It frees what threads of the Kafka library still use where a client of it could
    not be closed (a broker that does not answer), and the process would die of that, whatever its
    exit code. In a container it may be process 1, which no signal ends that it has not asked for,
    and commands ask when they are loaded: until then SIGTERM ends it here."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _report_bug(error: Exception) -> int:
    from cdc_relay.telemetry import is_debugging

    if is_debugging():
        traceback.print_exc()
    return _fail(
        f"internal error, please report it: {type(error).__name__}: {error} "
        "(--log-level debug shows where)",
        1,
    )


def _fail(message: str, code: int) -> int:
    click.echo(printable(f"error: {' '.join(message.split())}"), err=True)
    return code
