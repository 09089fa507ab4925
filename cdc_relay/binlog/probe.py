"""Whether the server would serve a relay: it is asked for its log as by one, and left again."""

from __future__ import annotations

import uuid

from cdc_relay.binlog.stream import BinlogSource, random_server_id
from cdc_relay.config import Settings
from cdc_relay.database import connect_arguments
from cdc_relay.position import Position


def probe(settings: Settings, start: Position | None = None) -> None:
    """Begin a dump, at the end of the log unless ``start`` is given, and end it again. Raises what
    a relay that starts there would end with, or wait for: ``PositionLostError``,
    ``ReplicaBehindError``, or another ``SourceError``."""
    schema, table = settings.schema_and_table()
    BinlogSource(
        connect_arguments(settings),
        schema,
        table,
        {},
        server_id=random_server_id(),
        replica_uuid=uuid.uuid4(),
        heartbeat=settings.heartbeat,
        read_timeout=settings.read_timeout,
        batch_rows=1,
        idle_interval=1.0,
        find=lambda _: None,
    ).probe(start)
