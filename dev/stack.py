"""The servers of one home directory, as `python3 -m dev` handles them."""

import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dev import kafka, mariadb, mysql
from dev.console import DevError, say
from dev.database import Database
from dev.server import Server

NAMES = ("mysql", "kafka", "mariadb")
FETCH: dict[str, Callable[[], Path]] = {
    "mysql": mysql.fetch,
    "kafka": kafka.fetch,
    "mariadb": mariadb.fetch,
}


def server(home: Path, name: str) -> Server:
    """Return the server of that name in a home."""
    if name == "kafka":
        return kafka.Kafka(home / name)
    return mysql.MySQL(home / name) if name == "mysql" else mariadb.MariaDB(home / name)


def made(home: Path) -> list[str]:
    """Return the names of the servers that were ever started in a home."""
    return [name for name in NAMES if (home / name).is_dir()]


def fetch(names: Iterable[str]) -> None:
    """Fetch what the servers need, all at once."""
    _together(names, lambda name: str(FETCH[name]()))


def up(home: Path, names: Iterable[str]) -> None:
    """Start the servers that are not running, with the data they had."""
    home.mkdir(parents=True, exist_ok=True)
    (home / ".gitignore").write_text("*\n")

    def start(name: str) -> str:
        one = server(home, name)
        if one.alive:
            one.wait_ready()
            return f"already running on 127.0.0.1:{one.port}"
        one.start()
        return f"started on 127.0.0.1:{one.port}, pid {one.pid}"

    _together(names, start)


def down(home: Path, *, delete: bool) -> None:
    """Stop the servers of a home, and remove their data when asked."""

    def stop(name: str) -> str:
        one = server(home, name)
        one.stop()
        if delete:
            one.delete()
            return "stopped, data removed"
        return "stopped"

    _together(made(home), stop)
    if delete:
        shutil.rmtree(home, ignore_errors=True)


def environment(home: Path) -> dict[str, str]:
    """Return the variables that point `cdc-relay` and the tests at the servers of a home."""
    env: dict[str, str] = {}
    for name in made(home):
        one = server(home, name)
        if isinstance(one, Database):
            env[f"CDC_RELAY_TEST_{name.upper()}_URL"] = one.url()
        elif isinstance(one, kafka.Kafka):
            env["CDC_RELAY_TEST_KAFKA_BOOTSTRAP"] = one.bootstrap
    return complete(env)


def complete(env: dict[str, str]) -> dict[str, str]:
    """Add what `cdc-relay` itself reads: MySQL when it is there, else MariaDB; and Kafka."""
    own: dict[str, str] = {}
    for source in ("MYSQL", "MARIADB"):
        if f"CDC_RELAY_TEST_{source}_URL" in env:
            own.setdefault("CDC_RELAY_DATABASE_URL", env[f"CDC_RELAY_TEST_{source}_URL"])
    if "CDC_RELAY_TEST_KAFKA_BOOTSTRAP" in env:
        own["CDC_RELAY_KAFKA_BOOTSTRAP"] = env["CDC_RELAY_TEST_KAFKA_BOOTSTRAP"]
    return own | env


def _together(names: Iterable[str], work: Callable[[str], str]) -> None:
    """Do the work for all names at once; report each, and all failures at the end."""
    failures = []

    def one(name: str) -> None:
        try:
            say(f"{name}: {work(name)}")
        except DevError as error:
            failures.append(f"{name}: {error}")

    with ThreadPoolExecutor(len(NAMES)) as pool:
        list(pool.map(one, names))
    if failures:
        raise DevError("\n".join(failures))
