"""``cdc-relay doctor``: everything that makes relays fail in production, looked at beforehand.

Reads only: what it tries of the relay's own statements touches no row. Each check is one
``Finding``; what stands behind it is in the modules beside this one.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator

from sqlalchemy import Engine

from cdc_relay.config import Settings
from cdc_relay.database import connected, describe_table, engine
from cdc_relay.doctor.brokers import check_brokers, check_clock, check_topics
from cdc_relay.doctor.finding import Finding, How, literal
from cdc_relay.doctor.installation import check_installation, check_members, check_position
from cdc_relay.doctor.server import ask, check_grants, check_server
from cdc_relay.doctor.table import check_table
from cdc_relay.doctor.traffic import Traffic, look
from cdc_relay.errors import ConfigError, SinkError, SinkUnavailableError, SourceError
from cdc_relay.kafka.checkpoints import Checkpoint, read_last_timed
from cdc_relay.kafka.cluster import Cluster
from cdc_relay.kafka.membership import members

__all__ = ["Finding", "examine", "exit_code"]


def examine(settings: Settings) -> Iterator[Finding]:
    """Yield the outcome of each check as it comes. A server that does not answer is a finding."""
    settings.require("database_url", "kafka_bootstrap")
    yield from check_installation()
    cluster, alive, stored, troubles = _kafka(settings)
    last, appended = stored or (None, None)
    # The row image of marks is tried like the other grants, not asked of each connection.
    pool = engine(settings.model_copy(update={"mark_row_image": "server"}))
    try:
        rows = yield from _database(pool, settings, alive, last)
    finally:
        pool.dispose()
    yield from troubles
    if cluster is not None:
        yield from check_brokers(cluster, settings)
        ahead = appended - last.time if last is not None and appended is not None else None
        yield check_clock(ahead, settings)
        yield from check_topics(cluster, settings, rows)
    if alive is not None:
        yield check_members(alive, settings)


def exit_code(findings: list[Finding]) -> int:
    """The smallest exit code that a failure among ``findings`` calls for; 0 without one."""
    return min((finding.exit_code for finding in findings if finding.exit_code), default=0)


def _kafka(
    settings: Settings,
) -> tuple[Cluster | None, int | None, tuple[Checkpoint, float | None] | None, list[Finding]]:
    """The cluster, how many relays run, the last checkpoint with the brokers' time of it, and what
    went wrong."""
    try:
        cluster = Cluster(settings)
    except (SinkError, ConfigError) as error:
        return None, None, None, [Finding("kafka", "connection", "failure", str(error))]
    troubles = []
    alive: int | None = None
    last: tuple[Checkpoint, float | None] | None = None
    try:
        alive = _members(settings)
        last = read_last_timed(settings)
    except SinkError as error:
        troubles.append(Finding("kafka", "checkpoint", "failure", str(error)))
    return cluster, alive, last, troubles


def _members(settings: Settings, tries: int = 10) -> int:
    """On a cluster that has never had a group, the first question begets the coordinator."""
    for _ in range(tries - 1):
        try:
            return members(settings)
        except SinkUnavailableError:
            time.sleep(0.5)
    return members(settings)


def _database(
    pool: Engine, settings: Settings, alive: int | None, last: Checkpoint | None
) -> Generator[Finding, None, Traffic | None]:
    try:
        with connected(pool) as connection:
            server = ask(connection)
            yield Finding("database", "connection", "ok", f"logged in as {server.account}")
            yield from check_server(connection, settings, server, alive)
            logged = server.get("log_bin") in ("ON", "1")
            if logged:
                yield from check_grants(connection, settings, server)
            yield from check_table(connection, settings)
            if logged:
                yield from check_position(settings, server, last)
            try:
                shape = describe_table(connection, settings)
            except (ConfigError, SourceError):
                return None  # said above
            return look(connection, settings, shape)
    except SourceError as error:
        yield _login(error, settings)
        return None


def _login(error: SourceError, settings: Settings) -> Finding:
    text = str(error)
    schema, _ = settings.schema_and_table()
    # Which of its accounts the server took us for, it does not say.
    account = f"{literal(settings.url().username or '')}@'%'"
    mend: tuple[str, ...] = ()
    how: How = ""
    if "has no schema" in text:
        mend, how = (f"CREATE DATABASE `{schema}` CHARACTER SET utf8mb4;",), "sql"
    elif "refused the login" not in text:
        pass
    elif "is locked" in text:
        mend, how = (f"ALTER USER {account} ACCOUNT UNLOCK;",), "sql"
    elif "expired" in text:
        how = "advice"
        mend = (f"ALTER USER {account} IDENTIFIED BY '…'; with the new password in our settings",)
    else:
        how = "advice"
        mend = (
            "set user and password in database_url, or database_password_file",
            "an account that is made with REQUIRE SSL takes no ssl_disabled in the URL, one with "
            "REQUIRE X509 also takes database_tls_cert and database_tls_key",
        )
    return Finding("database", "connection", "failure", text, mend, how)
