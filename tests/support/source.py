"""The binlog source on a test's table without Kafka, and the raw events of a range of the log."""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from struct import pack
from typing import Any, Self

import pymysql
from pymysql.connections import Connection
from sqlalchemy import Engine

from cdc_relay.binlog.rows import UnreadRow
from cdc_relay.binlog.stream import Batch, BinlogSource, inspect
from cdc_relay.cli.start import binlog_source
from cdc_relay.config import load
from cdc_relay.database import describe_table, engine
from cdc_relay.outbox import OutboxEvent
from cdc_relay.position import Position
from cdc_relay.store import Store
from tests.support.sql import INSERT, Database, insert, row

_numbers = itertools.count(1)
_COM_BINLOG_DUMP = 0x12
_NON_BLOCKING = 1
_ROTATE = 4
_FILE = re.compile(rb"[\w-]+\.\d{6}")


@dataclass(slots=True)
class Reading:
    """What a source gave."""

    batches: list[Batch] = field(default_factory=list)
    reconnects: int = 0

    @property
    def rows(self) -> list[OutboxEvent | UnreadRow]:
        return [row for batch in self.batches for row in batch.rows]

    @property
    def events(self) -> list[OutboxEvent]:
        """The rows, none of which had to be read back."""
        unread = [row for row in self.rows if isinstance(row, UnreadRow)]
        assert not unread, unread[:3]
        return [row for row in self.rows if isinstance(row, OutboxEvent)]

    @property
    def keys(self) -> list[str]:
        """The aggregate ids, in order; of a row that must be read back its id, as ``#1``."""
        return [
            row.aggregate_id if isinstance(row, OutboxEvent) else f"#{row.id}" for row in self.rows
        ]


class Session:
    """One database session that writes outbox rows."""

    def __init__(self, connection: Connection[Any], table: str) -> None:
        self.connection = connection
        self.table = table

    def ins(self, *keys: str, payload: object = None) -> None:
        """Insert one row per key, one statement each."""
        for key in keys:
            self.run(INSERT.format(table=self.table), row(key, payload))

    def bulk(self, keys: Sequence[str], payload: object = None) -> None:
        """Insert one row per key in one statement."""
        self.run(*insert(self.table, [row(key, payload) for key in keys]))

    def run(self, statement: str, parameters: Sequence[object] | None = None) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(statement, parameters)

    def script(self, *statements: str) -> None:
        for statement in statements:
            self.run(statement)


class SourceUnderTest:
    """The source that ``cdc-relay start`` would make for a table, one after the other."""

    def __init__(
        self, database: Database, table: str = "outbox_event", **settings: str | int
    ) -> None:
        """``settings`` are fields of the configuration."""
        flags: dict[str, object] = {
            # A TLS context costs more than everything else here.
            "database_url": database.text + "?ssl_disabled=true",
            "table": table,
            "name": f"source-{os.getpid()}-{next(_numbers)}",
            "heartbeat": "1s",
            "read_timeout": "10s",
            **settings,
        }
        self.database = database
        self.table = table
        self.settings = load(environ={}, flags=flags)
        self.pool: Engine = engine(self.settings)
        self._end: Position | None = None

    @classmethod
    @contextmanager
    def on(
        cls, database: Database, table: str = "outbox_event", **settings: str | int
    ) -> Iterator[Self]:
        """One that closes its connections at the end; it stands at the end of the log."""
        made = cls(database, table, **settings)
        try:
            made.skip()
            yield made
        finally:
            made.pool.dispose()

    def source(self) -> BinlogSource:
        """A new source on the table as it is now."""
        with self.pool.connect() as connection:
            shape = describe_table(connection, self.settings)
        store = Store(self.pool, shape)
        return binlog_source(self.settings, shape, store, idle_interval=0)

    def here(self) -> Position:
        """The end of the server's log."""
        return self.source().inspect().position

    @property
    def position(self) -> Position:
        """Where the last reading ended."""
        assert self._end is not None
        return self._end

    def skip(self) -> None:
        """Go to the end of the log."""
        self._end = self.here()

    @contextmanager
    def session(self) -> Iterator[Session]:
        """A session that writes to the table, each statement a transaction of its own."""
        with closing(self.database.connect(autocommit=True)) as connection:
            yield Session(connection, self.table)

    def ins(self, *keys: str, payload: object = None) -> None:
        """Insert one row per key, each in a transaction of its own."""
        for key in keys:
            self.database.sql(INSERT.format(table=self.table), row(key, payload))

    def ins_with_id(self, row_id: int, key: str) -> None:
        """Insert one row with an id of its own choice."""
        sql = INSERT.format(table=self.table).replace("(event_id", "(id, event_id")
        self.database.sql(sql.replace("(%s", f"({row_id}, %s"), row(key))

    def read(
        self,
        start: Position | None = None,
        timeout: float = 60,
        source: BinlogSource | None = None,
    ) -> Reading:
        """Read from ``start``, by default from where the last reading ended, to the present end
        of the log. ``source``: a new one unless it is given."""
        until = self.here()
        source = source or self.source()
        start = start or self.position
        reading = Reading()
        last = start
        late = threading.Event()

        def stop() -> None:
            late.set()
            source.stop()

        watchdog = threading.Timer(timeout, stop)
        watchdog.start()
        try:
            if not start.reached(until):
                for batch in source.batches(start):
                    reading.batches.append(batch)
                    last = batch.position
                    if last.reached(until):
                        # The generator ends by itself, and with it its connection.
                        source.stop()
        finally:
            watchdog.cancel()
            watchdog.join()
            source.stop()
        reading.reconnects = source._reading.reconnects
        assert not late.is_set(), f"{until} not reached within {timeout} s: {last}"
        self._end = last
        return reading


def raw_events(database: Database, start: Position, until: Position) -> list[bytes]:
    """The events of the log from ``start`` to ``until`` as the server sends them, made-up ones at
    the beginning of a dump and of each file included."""
    arguments: Mapping[str, Any] = {"autocommit": True, "read_timeout": 30}
    with closing(database.connect(**arguments)) as connection:
        raw: Any = connection
        server = inspect(connection)
        with connection.cursor() as cursor:
            for role in ("master", "source"):
                cursor.execute(f"SET @{role}_binlog_checksum = @@global.binlog_checksum")
            if server.flavor == "mariadb":
                cursor.execute("SET @mariadb_slave_capability = 4")
        raw._next_seq_id = 0
        raw.write_packet(
            bytes([_COM_BINLOG_DUMP])
            + pack("<IHI", start.offset, _NON_BLOCKING, 4_000_000_000 + next(_numbers))
            + start.file.encode()
        )
        found: list[bytes] = []
        file = start.file
        while True:
            try:
                packet = raw._read_packet()
            except pymysql.err.Error as error:
                raise AssertionError(f"the dump ended: {error}") from error
            if packet.is_eof_packet():
                return found
            event = packet.get_all_data()[1:]
            place = int.from_bytes(event[13:17], "little")
            if event[4] == _ROTATE and place == 0:
                # Made up at the beginning of a file. Behind the name there may be a checksum.
                name = _FILE.match(event, 27)
                assert name is not None, event
                file = name[0].decode()
            if (file, place) > (until.file, until.offset):
                return found
            found.append(event)


def by_key(rows: Sequence[OutboxEvent]) -> dict[str, OutboxEvent]:
    """Events by their aggregate id."""
    return {row.aggregate_id: row for row in rows}
