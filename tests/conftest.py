"""Real servers for the tests that need them, one of each per run, on free loopback ports.

``CDC_RELAY_TEST_MYSQL_URL``, ``CDC_RELAY_TEST_MARIADB_URL`` and ``CDC_RELAY_TEST_KAFKA_BOOTSTRAP``
point a run at servers that already exist; tests that kill or reconfigure a server always start
one of their own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import structlog

from cdc_relay import telemetry
from dev.kafka import Kafka
from dev.mariadb import MariaDB
from dev.mysql import MySQL
from dev.server import Server
from tests.support.brokers import ProxiedKafka, TwoBrokers
from tests.support.harness import Harness
from tests.support.servers import BareMySQL
from tests.support.sql import Database


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Commands set the process's logging up, on a stderr that ends with their test; what runs in
    the process later must not write there."""
    root = logging.getLogger()
    handlers, level, ours = root.handlers[:], root.level, telemetry._level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    telemetry._level = ours
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def servers_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def mysql_url(servers_home: Path) -> Iterator[str]:
    """MySQL with the server's defaults for everything about the binlog, GTIDs on."""
    given = os.environ.get("CDC_RELAY_TEST_MYSQL_URL")
    if given:
        yield given
        return
    with MySQL(servers_home / "mysql", die_with_parent=True) as server:
        yield server.url()


@pytest.fixture(scope="session")
def mariadb_url(servers_home: Path) -> Iterator[str]:
    """MariaDB with a binlog in ROW format, else its defaults."""
    given = os.environ.get("CDC_RELAY_TEST_MARIADB_URL")
    if given:
        yield given
        return
    with MariaDB(servers_home / "mariadb", die_with_parent=True) as server:
        yield server.url()


@pytest.fixture(scope="session")
def bare_mysql(servers_home: Path) -> Iterator[MySQL]:
    """A MySQL of the run's own that tests may restart and reconfigure, without GTIDs."""
    with BareMySQL(servers_home / "bare-mysql", die_with_parent=True) as server:
        yield server


@pytest.fixture(scope="session")
def own_mysql(servers_home: Path) -> Iterator[MySQL]:
    """The same with GTIDs."""
    with MySQL(servers_home / "own-mysql", die_with_parent=True) as server:
        yield server


@pytest.fixture(scope="session")
def own_mariadb(servers_home: Path) -> Iterator[MariaDB]:
    """A MariaDB that tests may restart and reconfigure."""
    with MariaDB(servers_home / "own-mariadb", die_with_parent=True) as server:
        yield server


@pytest.fixture(params=["bare_mysql", "own_mysql", "own_mariadb"])
def own_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server to restart and reconfigure, running again afterwards: MySQL without and with
    GTIDs, MariaDB."""
    server: Server = request.getfixturevalue(request.param)
    yield server
    if not server.alive:
        server.start()


@pytest.fixture(scope="session")
def kafka(servers_home: Path) -> Iterator[str]:
    """Bootstrap address of one real broker."""
    given = os.environ.get("CDC_RELAY_TEST_KAFKA_BOOTSTRAP")
    if given:
        yield given
        return
    with Kafka(servers_home / "kafka", die_with_parent=True) as broker:
        yield broker.bootstrap


@pytest.fixture(scope="session")
def quick_kafka(servers_home: Path) -> Iterator[ProxiedKafka]:
    """A broker of the run's own that tests may pause, kill, start again and cut off."""
    with ProxiedKafka(servers_home / "quick-kafka", die_with_parent=True) as broker:
        yield broker


@pytest.fixture(scope="module")
def two_brokers(servers_home: Path) -> Iterator[TwoBrokers]:
    with TwoBrokers(servers_home / "two-brokers", die_with_parent=True) as cluster:
        yield cluster


@pytest.fixture(params=["mysql", "mariadb"])
def server_url(request: pytest.FixtureRequest) -> str:
    """Both databases, one after the other."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def database(server_url: str) -> Iterator[Database]:
    """A fresh schema on each server; the test runs once per server."""
    with Database.create(server_url) as fresh:
        yield fresh


@pytest.fixture
def mysql(mysql_url: str) -> Iterator[Database]:
    """A fresh schema on MySQL."""
    with Database.create(mysql_url) as fresh:
        yield fresh


@pytest.fixture
def mariadb(mariadb_url: str) -> Iterator[Database]:
    """A fresh schema on MariaDB."""
    with Database.create(mariadb_url) as fresh:
        yield fresh


@pytest.fixture
def harness(kafka: str, tmp_path: Path) -> Iterator[Callable[[Database], Harness]]:
    """Makes a ``Harness`` (outbox table, relay, compensator, topics) on a database; everything it
    started is ended with the test."""
    with ExitStack() as stack:

        def make(database: Database, **environment: str) -> Harness:
            return stack.enter_context(Harness(database, kafka, tmp_path, environment))

        yield make


@pytest.fixture
def shop(database: Database, harness: Callable[[Database], Harness]) -> Harness:
    """An outbox table with a relay at hand, on MySQL and on MariaDB."""
    return harness(database)


@pytest.fixture
def mysql_shop(mysql: Database, harness: Callable[[Database], Harness]) -> Harness:
    """The same on MySQL only."""
    return harness(mysql)


@pytest.fixture
def mariadb_shop(mariadb: Database, harness: Callable[[Database], Harness]) -> Harness:
    """The same on MariaDB only."""
    return harness(mariadb)
