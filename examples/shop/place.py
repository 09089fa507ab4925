"""Where the demo runs: servers, and names on them that nobody else uses."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import make_url

from examples.shop.crew import DemoError, undisturbed
from examples.shop.model import outbox_events

PARTITIONS: Final = 12
_CHECKOUT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Place:
    """Servers, and names on them that nobody else uses."""

    server_url: str
    bootstrap: str
    prefix: str

    @classmethod
    def of(cls, env: Mapping[str, str], prefix: str) -> Place:
        return cls(env["CDC_RELAY_DATABASE_URL"], env["CDC_RELAY_KAFKA_BOOTSTRAP"], prefix)

    def url(self, shop: str) -> str:
        schema = f"{self.prefix}{shop}".replace("-", "_")
        return make_url(self.server_url).set(database=schema).render_as_string(hide_password=False)

    @property
    def outbox_topic(self) -> str:
        return f"{self.prefix}outbox.event.customer"

    @property
    def naive_topic(self) -> str:
        return f"{self.prefix}sent.event.customer"

    def environment(self) -> dict[str, str]:
        """What `cdc-relay` reads, and nothing that was set for another one."""
        own = {key: value for key, value in os.environ.items() if not key.startswith("CDC_RELAY_")}
        own |= {
            "CDC_RELAY_DATABASE_URL": self.url("shop"),
            "CDC_RELAY_KAFKA_BOOTSTRAP": self.bootstrap,
            "CDC_RELAY_NAME": f"{self.prefix}shop",
            "CDC_RELAY_TOPIC": f"{self.prefix}outbox.event.{{aggregate_type}}",
            "CDC_RELAY_TABLE": outbox_events.name,
            "CDC_RELAY_HTTP": "off",
        }
        return own


def create_schema(engine: Engine) -> None:
    server = create_engine(engine.url.set(database=""))
    with server.begin() as connection:
        connection.execute(text(f"CREATE DATABASE `{engine.url.database}`"))
    server.dispose()


def _admin(place: Place) -> AdminClient:
    # log_level: librdkafka's notes on its own shutdown are no news.
    return AdminClient({"bootstrap.servers": place.bootstrap, "log_level": 3})


def create_topics(place: Place) -> None:
    admin = _admin(place)
    topics = [NewTopic(name, PARTITIONS, 1) for name in (place.outbox_topic, place.naive_topic)]
    for future in admin.create_topics(topics, operation_timeout=30).values():
        future.result(30)


def _remove(place: Place) -> None:
    """Remove what the demo made on servers that others use too."""
    engine = create_engine(make_url(place.server_url).set(database=""))
    with engine.begin() as connection:
        for shop in ("shop", "naive"):
            schema = make_url(place.url(shop)).database
            connection.execute(text(f"DROP DATABASE IF EXISTS `{schema}`"))
    engine.dispose()
    admin = _admin(place)
    ours = [name for name in admin.list_topics(timeout=30).topics if place.prefix in name]
    if ours:
        for future in admin.delete_topics(ours, operation_timeout=30).values():
            future.result(30)


@contextlib.contextmanager
def servers(own: bool, keep: bool, say: Callable[[str], None]) -> Iterator[Place]:
    """Give the demo its servers: this checkout's, started when they are down, or those of the
    environment. Afterwards they are as they were before.
    """
    prefix = f"demo-{secrets.token_hex(3)}-"
    if not own:
        try:
            place = Place.of(os.environ, prefix)
        except KeyError as missing:
            raise DemoError(f"--servers environment needs {missing.args[0]}") from None
        yield from _used(place, keep)
        return
    home = _CHECKOUT / ".dev"
    home.mkdir(exist_ok=True)
    with (home / "demo.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoError("another demo runs in this checkout") from None
        status = _dev("status", may_fail=True)
        running, existing = " running" in status, " down" in status
        try:
            say("MySQL and Kafka come up (the first time they are downloaded)")
            env = _variables(_dev("up", "--only", "mysql,kafka"))
            yield from _used(Place.of(env, prefix), keep)
        finally:
            if keep:
                say("servers and data stay; python3 -m dev env, python3 -m dev down")
            elif not running:
                with undisturbed():
                    _dev("down", *["--delete"] * (not existing))


def _used(place: Place, keep: bool) -> Iterator[Place]:
    try:
        yield place
    finally:
        if not keep:
            with undisturbed():
                _remove(place)


def _dev(*arguments: str, may_fail: bool = False) -> str:
    """Run `python -m dev`, whose progress goes to stderr, and return its stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "dev", *arguments],
        cwd=_CHECKOUT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0 and not may_fail:
        raise DemoError(f"the servers cannot be run: dev {arguments[0]} failed (see above)")
    return done.stdout


def _variables(exports: str) -> dict[str, str]:
    variables = {}
    for line in exports.splitlines():
        if line.startswith("export "):
            key, _, value = line.removeprefix("export ").partition("=")
            variables[key] = "".join(shlex.split(value))
    return variables
