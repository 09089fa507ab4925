"""``cdc-relay start``: wires source, router, sink and store together and runs the relay."""

from __future__ import annotations

import cdc_relay.lean  # noqa: F401

# isort: split
import gc
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from types import FrameType
from typing import Final

import click

from cdc_relay.alerts import Alerts
from cdc_relay.binlog.rows import FIELDS
from cdc_relay.binlog.stream import BinlogSource, random_server_id
from cdc_relay.cli.options import DATABASE, KAFKA, LOGGING, settings_options
from cdc_relay.config import Settings
from cdc_relay.database import TableShape, connect_arguments, connected, describe_table, engine
from cdc_relay.errors import ConfigError
from cdc_relay.http.server import Listener, Served
from cdc_relay.kafka.traced import Spans
from cdc_relay.owner import Owner
from cdc_relay.polling import PollingSource
from cdc_relay.preflight import check_server
from cdc_relay.store import Store
from cdc_relay.vitals import Reading, Vitals

# The page is loaded when the first record is out: it has no part in the time until then.
_FIRST_RECORD_S: Final = 1.0


@click.command(
    "start",
    epilog="Examples: `cdc-relay start --config relay.toml`; "
    "`cdc-relay start --http 0.0.0.0:8080` in a pod; "
    "`cdc-relay start --until-current --http off` to drain and end.",
)
@settings_options(
    *("topic", "delivery", "source", "mark", "mark_row_image", "on_dead", "shards"),
    *("http", "http_token_file", "health_timeout", "sample_interval"),
    *("poll_batch", "poll_interval", "server_id", "session_timeout", "transaction_timeout"),
    *("batch_rows", "queue_rows", "heartbeat", "read_timeout", "checkpoint_interval"),
    *("stop_grace", "max_tries", *DATABASE, *KAFKA, *LOGGING),
)
@click.option(
    "--until-current",
    is_flag=True,
    help="End when the position that was current at the start has been passed.",
)
def command(settings: Settings, until_current: bool) -> None:
    """Carry committed rows of the outbox table to Kafka until SIGTERM; a second signal stops at
    once."""
    start(settings, until_current=until_current)


def start(settings: Settings, *, until_current: bool = False) -> None:
    """Run the relay until SIGTERM or SIGINT (a second one ends the process at once), or, with
    ``until_current``, until it has delivered and marked what was committed when it owned the
    shard."""
    settings.require("database_url", "kafka_bootstrap")
    polling = settings.source == "polling"
    if polling and settings.mark == "none":
        raise ConfigError(
            'mark: "none" leaves no trace of what was sent, so polling would send it again and '
            "again; set update or delete"
        )
    alerts = Alerts.of(settings)
    address = settings.http_address()
    settings.page_token()  # a wrong one is said before anything is begun
    spans = Spans.of(settings)
    listener = Listener(*address) if address is not None else None
    pool = engine(settings)
    try:
        with connected(pool) as connection:
            if not polling:
                check_server(connection)
            shape = describe_table(connection, settings)
        store = Store(
            pool,
            shape,
            max_tries=settings.max_tries,
            on_dead=settings.on_dead,
            mark="delete" if settings.mark == "delete" else "update",
            tell=alerts.dead,
            describe=lambda connection: describe_table(connection, settings),
        )
        if settings.mark != "none":
            store.check_update()
        if not polling:
            binlog_source(settings, shape, store).probe()  # grants, before anything is promised
        vitals = Vitals()
        idle_interval = 0.0 if until_current else None
        owner = Owner(
            settings,
            lambda: (
                PollingSource()
                if polling
                else binlog_source(settings, shape, store, idle_interval, vitals.reading)
            ),
            settings.router(shape.payload_kind, shape.extra),
            store,
            vitals,
            spans,
        )
        alerts.start()
        _run(owner, until_current, lambda: _served(listener, settings, vitals, store))
    finally:
        alerts.close()
        pool.dispose()
        if spans is not None:
            spans.close()
        if listener is not None:
            listener.close()


def _served(
    listener: Listener | None, settings: Settings, vitals: Vitals, store: Store
) -> Served | None:
    return None if listener is None else Served(listener, settings, vitals, store)


def binlog_source(
    settings: Settings,
    shape: TableShape,
    store: Store,
    idle_interval: float | None = None,
    reading: Reading | None = None,
) -> BinlogSource:
    """The source for these settings: a replica of its own, with an id of its own unless one is
    given."""
    return BinlogSource(
        connect_arguments(settings),
        shape.schema,
        shape.table,
        {field: shape.names[field] for field in FIELDS},
        server_id=settings.server_id or random_server_id(),
        replica_uuid=uuid.uuid4(),
        heartbeat=settings.heartbeat,
        read_timeout=settings.read_timeout,
        batch_rows=settings.batch_rows,
        idle_interval=settings.checkpoint_interval if idle_interval is None else idle_interval,
        find=store.find,
        extras=tuple(shape.extra),
        reading=reading,
    )


def _run(owner: Owner, until_current: bool, serve: Callable[[], Served | None]) -> None:
    """Run in a thread of its own: waits inside the Kafka library do not let signals through.
    ``serve`` is called when the first record is out, or could not be soon."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            owner.run(until_current=until_current)
        except BaseException as error:
            failure.append(error)

    def stop(number: int, _frame: FrameType | None) -> None:
        if stopping:
            os._exit(128 + number)
        stopping.append(number)
        owner.stop()

    stopping: list[int] = []
    # What the start has made stays to the end. The collector would walk through all of it whenever
    # some ten thousand rows have passed: a sixth of the relay's CPU time.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    thread = threading.Thread(target=run, name="relay")
    thread.start()
    deadline = time.monotonic() + _FIRST_RECORD_S
    while thread.is_alive() and time.monotonic() < deadline and not owner.counters.sent:
        thread.join(0.05)
    try:
        served = serve() if thread.is_alive() else None
    except BaseException:
        owner.stop()
        thread.join()
        raise
    while thread.is_alive():
        thread.join(0.5)
    if served is not None:
        served.close()
    if failure:
        raise failure[0]
