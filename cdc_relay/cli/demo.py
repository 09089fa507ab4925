"""``cdc-relay demo``: orders and their events on your own servers, a relay that is killed, and the
account at the end."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final

import click
from sqlalchemy import Engine

from cdc_relay.audit import Audit, Report
from cdc_relay.cli.options import DATABASE, LOGGING, settings_options
from cdc_relay.cli.times import opened
from cdc_relay.config import ENV_PREFIX, Settings, load
from cdc_relay.database import connected, engine, quote
from cdc_relay.errors import (
    CdcRelayError,
    ConfigError,
    RowsFailingError,
    SinkError,
    SourceError,
)
from cdc_relay.kafka.checkpoints import fallback_topic, topic_name
from cdc_relay.kafka.cluster import Cluster
from cdc_relay.kafka.reader import Read, Reader
from cdc_relay.outbox import table_ddl

_ROLLED_BACK: Final = 10  # one order in so many
_SHOPS: Final = 50
_WAIT_S: Final = 120
# What the relay of the demonstration needs to know of the servers.
_SERVERS: Final = (
    *(field for field in DATABASE if field not in ("table", "columns")),
    *("kafka_bootstrap", "kafka_password_file", "delivery"),
)


@click.command(
    "demo",
    epilog="Examples: `cdc-relay demo --config relay.toml`; `cdc-relay demo --orders 100000`; "
    "`cdc-relay demo --keep --json`.",
)
@settings_options("delivery", *_SERVERS[:-3], "kafka_bootstrap", *LOGGING)
@click.option(
    "--orders",
    type=click.IntRange(2, 10_000_000),
    metavar="N",
    default=1000,
    show_default=True,
    help="Orders that are committed; one more in ten is rolled back.",
)
@click.option("--keep", is_flag=True, help="Leave tables and topics to be looked at.")
@click.option("--json", "as_json", is_flag=True, help="Print the account as one line of JSON.")
def command(settings: Settings, orders: int, keep: bool, as_json: bool) -> int:
    """Write orders and their events on your own servers while a relay carries the events to Kafka,
    kill the relay half way (kill -9), start another, and compare: each committed order has to have
    arrived, once and in order, and none that was rolled back.

    Two tables and three topics of its own names are made and taken away again; nothing else is
    touched. The user needs CREATE, DROP, INSERT and DELETE there, beside a relay's grants. Exit
    codes: 0 all is as it should be, 6 it is not, 2 usage, 3 the database, 4 Kafka.
    """
    settings.require("database_url", "kafka_bootstrap")
    name = f"cdc-relay-demo-{secrets.token_hex(3)}"
    environment = _environment(settings, name)
    ours = load(environ=environment)

    def say(text: str) -> None:
        if not as_json:
            click.echo(text)

    with ExitStack() as stack:
        pool = engine(ours)
        stack.callback(pool.dispose)
        cluster = Cluster(ours)
        topic = f"{name}.order"
        _make(pool, ours)
        stack.callback(_unmake, pool, ours, keep)
        cluster.create(topic, 3)
        if not keep:
            stack.callback(cluster.delete, [topic, topic_name(name), fallback_topic(name)])
        say(f"table {ours.table}, topic {topic}")
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "relay.log"
        began = time.monotonic()
        rolled_back = _write(pool, ours, orders, environment, log, say)
        say("waiting until everything has arrived")
        _finish(environment, log)
        report = _account(ours)
        account = {
            **{"committed": orders, "rolled_back": rolled_back, "kills": 1},
            **{"arrived": report.records, "missing": sum(report.missing.values())},
            **{"duplicates": report.duplicates, "out_of_order": report.out_of_order},
            "seconds": round(time.monotonic() - began, 3),
        }
    wrong = any(account[one] for one in ("missing", "duplicates", "out_of_order"))
    code = RowsFailingError.exit_code if wrong or report.records != orders else 0
    if as_json:
        click.echo(json.dumps({**account, "exit_code": code}))
    else:
        words = ("missing", "duplicates", "out_of_order")
        found = ", ".join(f"{account[one]} {one.replace('_', ' ')}" for one in words)
        say(f"committed {orders}, rolled back {rolled_back}, the relay killed once")
        say(f"arrived {report.records}: {found}")
    return code


def _environment(settings: Settings, name: str) -> dict[str, str]:
    """Settings of the demonstration's own on the servers of ``settings``."""
    given: dict[str, Any] = {field: getattr(settings, field) for field in _SERVERS}
    given |= {f"kafka_{key.replace('.', '_')}": value for key, value in settings.kafka.items()}
    given |= {"name": name, "table": name.replace("-", "_"), "topic": name + ".{aggregate_type}"}
    given |= {"http": "off", "log_format": "console", "log_level": "warning"}
    return {f"{ENV_PREFIX}{key.upper()}": str(value) for key, value in given.items() if value}


def _orders(settings: Settings) -> str:
    schema, table = settings.schema_and_table()
    return f"{quote(schema)}.{quote(table + '_order')}"


def _make(pool: Engine, settings: Settings) -> None:
    with connected(pool) as connection:
        for statement in table_ddl(settings.table):
            connection.exec_driver_sql(statement)
        connection.exec_driver_sql(
            f"CREATE TABLE {_orders(settings)} (id BIGINT AUTO_INCREMENT PRIMARY KEY,"
            " shop INT NOT NULL, total DECIMAL(10, 2) NOT NULL)"
        )


def _unmake(pool: Engine, settings: Settings, keep: bool) -> None:
    if keep:
        return
    schema, table = settings.schema_and_table()
    with connected(pool) as connection:
        for name in (f"{quote(schema)}.{quote(table)}", _orders(settings)):
            connection.exec_driver_sql(f"DROP TABLE IF EXISTS {name}")


def _write(
    pool: Engine,
    settings: Settings,
    orders: int,
    environment: Mapping[str, str],
    log: Path,
    say: Callable[[str], None],
) -> int:
    """Commit the orders, each with its event, and roll others back; kill the relay in the middle.
    Returns how many were rolled back."""
    from writer import Outbox

    outbox = Outbox(table=settings.table)
    committing = pool.execution_options(isolation_level="READ COMMITTED")
    insert = f"INSERT INTO {_orders(settings)} (shop, total) VALUES (%s, %s)"
    rolled_back = 0
    with ExitStack() as stack:
        relay = stack.enter_context(_relay(environment, log))
        for number in range(orders):
            if number == orders // 2:
                _await_a_mark(committing, settings, relay, log)
                relay.kill()
                say(f"killed the relay after {number} orders; another one takes over")
                stack.enter_context(_relay(environment, log))
            doomed = number % _ROLLED_BACK == _ROLLED_BACK - 1
            for rollback in (True, False) if doomed else (False,):
                with connected(committing) as connection, connection.begin() as transaction:
                    shop, total = number % _SHOPS, f"{number % 1000}.95"
                    order = connection.exec_driver_sql(insert, (shop, total)).lastrowid
                    outbox.add(
                        connection,
                        aggregate_type="order",
                        aggregate_id=shop,
                        event_type="ORDER_CREATED",
                        payload={"id": order, "shop": shop, "total": total},
                    )
                    if rollback:
                        transaction.rollback()
                        rolled_back += 1
    return rolled_back


@contextmanager
def _relay(
    environment: Mapping[str, str], log: Path, *arguments: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A relay as a process; stopped at the end where it still runs."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "cdc_relay", "start", *arguments],
            env={**clean, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _finish(environment: Mapping[str, str], log: Path) -> None:
    """Run a relay up to the end of the log. Raises what it ended with."""
    with _relay(environment, log, "--until-current") as relay:
        try:
            code = relay.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            raise RowsFailingError(f"the relay has not ended within {_WAIT_S} s") from None
    if code:
        raise _reason(code, log)


def _await_a_mark(
    pool: Engine, settings: Settings, relay: subprocess.Popen[bytes], log: Path
) -> None:
    """Until the relay has sent something: killed before, it would show nothing."""
    schema, table = settings.schema_and_table()
    sql = f"SELECT COUNT(*) FROM {quote(schema)}.{quote(table)} WHERE status = 1"
    deadline = time.monotonic() + _WAIT_S
    while True:
        with connected(pool) as connection:
            if connection.exec_driver_sql(sql).scalar_one():
                return
        code = relay.poll()
        if code:
            raise _reason(code, log)
        if time.monotonic() > deadline:
            raise RowsFailingError(f"the relay has sent nothing within {_WAIT_S} s")
        time.sleep(0.1)


def _reason(code: int, log: Path) -> CdcRelayError:
    """What a relay ended with."""
    lines = log.read_text(errors="replace").splitlines() or ["it said nothing"]
    kinds = {kind.exit_code: kind for kind in (ConfigError, SourceError, SinkError)}
    text = lines[-1].removeprefix("error: ")
    return kinds.get(code, RowsFailingError)(f"the relay ended with {code}: {text}")


def _account(settings: Settings) -> Report:
    """Table and topic, compared."""
    with opened(settings) as (store, router), closing(Reader(settings)) as reader:

        def read(names: list[str], since_ms: int) -> Iterable[list[Read]]:
            return reader.since(names, since_ms)

        return Audit(store, router, read).run(0, store.now_us() + 1_000_000)
