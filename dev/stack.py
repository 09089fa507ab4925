"""The servers of one home directory, as `python3 -m dev` handles them."""

import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dev import apt, docker, kafka, kafka_dist, mariadb, mysql
from dev.console import DevError, say
from dev.database import Database
from dev.server import Server

NAMES = ("mysql", "kafka", "mariadb")
_DOCKER = "in-docker"
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


def obstacle(names: Iterable[str]) -> str | None:
    """Return why the servers cannot be fetched on this machine, or None."""
    if not apt.is_debian():
        return "the servers can only be fetched on Debian"
    if "kafka" in names and not kafka_dist.can_fetch():
        return "Kafka needs Java 17 and Maven, which only root can install"
    return None


def in_docker(home: Path) -> bool:
    """Tell whether the servers of a home run in containers."""
    return (home / _DOCKER).exists()


def fetch(names: Iterable[str]) -> None:
    """Fetch what the servers need, all at once."""
    _together(names, lambda name: str(FETCH[name]()))


def up(home: Path, names: Iterable[str], *, with_docker: bool = False) -> None:
    """Start the servers that are not running, with the data they had.

    In containers when asked, or when there is no other way and a Docker daemon answers.
    """
    why_not = None if with_docker else obstacle(names)
    if why_not is not None and not docker.answers():
        raise DevError(
            f"{why_not}; install Docker and use --docker, "
            "or point the CDC_RELAY_TEST_* variables at existing servers"
        )
    home.mkdir(parents=True, exist_ok=True)
    (home / ".gitignore").write_text("*\n")
    if with_docker or why_not is not None or in_docker(home):
        docker.up(names)
        (home / _DOCKER).touch()
        return

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
    if in_docker(home):
        docker.down(delete=delete)
        (home / _DOCKER).unlink()

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
    env = docker.environment(NAMES) if in_docker(home) else {}
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
