"""The command line: `python3 -m dev up`, `down`, `env`, `status`, `fetch`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dev import docker, stack
from dev.console import DevError, say

_CHECKOUT = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 done, 1 something to mend (said on stderr)."""
    arguments = _parser().parse_args(argv)
    home: Path = arguments.home.resolve()
    try:
        return _run(arguments, home)
    except DevError as error:
        say(f"dev: {error}")
        return 1
    except KeyboardInterrupt:
        say("dev: interrupted")
        return 130


def _run(arguments: argparse.Namespace, home: Path) -> int:
    if arguments.command == "up":
        stack.up(home, arguments.only, with_docker=arguments.docker)
        _print(stack.environment(home))
    elif arguments.command == "down":
        stack.down(home, delete=arguments.delete)
    elif arguments.command == "env":
        env = stack.environment(home)
        if not env:
            raise DevError(f"no servers in {home}; run: python3 -m dev up")
        _print(env)
    elif arguments.command == "status":
        return _status(home)
    else:
        stack.fetch(arguments.only)
    return 0


def _status(home: Path) -> int:
    if stack.in_docker(home):
        running = docker.addresses(stack.NAMES)
        for name, address in running.items():
            print(f"{name:8} {address} running in Docker")
        return 0 if running else 1
    down = False
    for name in stack.NAMES:
        if name not in stack.made(home):
            print(f"{name:8} never started")
            continue
        one = stack.server(home, name)
        pid = one.pid
        down |= pid is None
        state = "down" if pid is None else f"running, pid {pid}"
        print(f"{name:8} 127.0.0.1:{one.port} {state}")
    return 1 if down else 0


def _print(env: dict[str, str]) -> None:
    for key, value in env.items():
        print(f"export {key}={value}")


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in stack.NAMES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(stack.NAMES)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m dev", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("up", 'start the servers; use it as: eval "$(python3 -m dev up)"'),
        ("down", "stop the servers"),
        ("env", "print the environment that up prints"),
        ("status", "show the servers; exit code 1 when one is down"),
        ("fetch", "only download"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "--home", type=Path, default=_CHECKOUT / ".dev", help="where the servers live"
        )
        if name in ("up", "fetch"):
            command.add_argument(
                "--only",
                type=_names,
                default=list(stack.NAMES),
                metavar="NAMES",
                help="comma-separated, of " + ", ".join(stack.NAMES),
            )
        if name == "up":
            command.add_argument(
                "--docker", action="store_true", help="run the servers in containers"
            )
        if name == "down":
            command.add_argument("--delete", action="store_true", help="remove the data too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
