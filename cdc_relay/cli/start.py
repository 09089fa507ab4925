"""``cdc-relay start``: wires source, router, sink and store together and runs the relay."""

from __future__ import annotations

import os
import signal
import uuid
from types import FrameType

import click
import structlog

from cdc_relay.binlog.stream import BinlogSource, Server, default_server_id
from cdc_relay.cli.options import DATABASE, KAFKA, LOGGING, settings_options
from cdc_relay.config import Settings
from cdc_relay.database import TableShape, connect_arguments, connected, describe_table, engine
from cdc_relay.errors import ConfigError, PositionLostError
from cdc_relay.kafka import checkpoints
from cdc_relay.kafka.checkpoints import Checkpoint
from cdc_relay.kafka.sink import KafkaSink
from cdc_relay.outbox import OutboxEvent
from cdc_relay.preflight import check_server
from cdc_relay.relay import Relay
from cdc_relay.router import Router
from cdc_relay.store import Store

log = structlog.get_logger(__name__)


@click.command("start")
@settings_options(
    *("topic", "delivery", "source", "mark", "shards", "http", "server_id"),
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
    ``until_current``, until it has passed the position that was current when it started."""
    settings.require("database_url", "kafka_bootstrap")
    _refuse_unavailable(settings)
    pool = engine(settings)
    try:
        with connected(pool) as connection:
            check_server(connection)
            shape = describe_table(connection, settings)
        store = Store(pool, shape, max_tries=settings.max_tries)
        if settings.mark == "update":
            store.check_update()
        source = binlog_source(settings, shape, store, idle_interval=0 if until_current else None)
        server = source.inspect()
        checkpoints.ensure_topic(settings)
        last = checkpoints.read_last(settings)
        first = last or _anchor(server)
        sink = KafkaSink(settings, f"cdc-relay-{settings.name}")
        router = Router(settings.topic, shape.payload_kind)
        relay = Relay(settings, source, router, sink, store)
        _stop_on_signals(relay)
        try:
            relay.run(first, server.position if until_current else None)
        except PositionLostError as error:
            raise PositionLostError(
                f"{error}. Rows that were not streamed are still pending in the table: run "
                "cdc-relay compensate, then start under a new --name"
            ) from None
    finally:
        pool.dispose()


def binlog_source(
    settings: Settings, shape: TableShape, store: Store, idle_interval: float | None = None
) -> BinlogSource:
    """The source for these settings. The server id and the replica uuid derive from the name, so
    a restart takes the place of its predecessor, and a second relay of the name is noticed."""
    return BinlogSource(
        connect_arguments(settings),
        shape.schema,
        shape.table,
        {field: field for field in OutboxEvent._fields},
        server_id=settings.server_id or default_server_id(settings.name),
        replica_uuid=uuid.uuid5(uuid.NAMESPACE_URL, f"cdc-relay:{settings.name}"),
        heartbeat=settings.heartbeat,
        read_timeout=settings.read_timeout,
        batch_rows=settings.batch_rows,
        idle_interval=settings.checkpoint_interval if idle_interval is None else idle_interval,
        find=store.find,
    )


def _anchor(server: Server) -> Checkpoint:
    log.warning(
        "no checkpoint: the stream starts at the server's current position; rows that are already "
        "pending are the compensator's",
        position=str(server.position),
    )
    return Checkpoint(server.position)


def _refuse_unavailable(settings: Settings) -> None:
    """Options of the contract that this version does not serve yet: a clear no, not a guess."""
    if settings.delivery == "exactly_once":
        raise ConfigError("delivery: exactly_once is not available yet; use at_least_once")
    if settings.source == "polling":
        raise ConfigError("source: polling is not available yet; use binlog")


def _stop_on_signals(relay: Relay) -> None:
    def stop(number: int, _frame: FrameType | None) -> None:
        if stopping:
            os._exit(128 + number)
        stopping.append(number)
        relay.stop()

    stopping: list[int] = []
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
