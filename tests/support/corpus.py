"""Recorded binlogs: what real servers sent for a history with one of everything.

``python -m tests.support.corpus`` records ``tests/data/mysql.bin`` and ``mariadb.bin`` anew. A
file is a sequence of chunks, each with its length in four bytes: a JSON head, then the events.
"""

from __future__ import annotations

import json
import tempfile
import uuid
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from cdc_relay.binlog.decoder import FORMAT_DESCRIPTION, ROTATE, Decoder
from cdc_relay.binlog.layout import LayoutResolver, SchemaColumn
from cdc_relay.binlog.rows import UnreadRow
from cdc_relay.binlog.stream import BinlogSource
from cdc_relay.errors import SourceUnavailableError
from cdc_relay.outbox import OutboxEvent
from cdc_relay.position import Flavor, GtidSet, MariaGtidPosition, Position
from dev.database import Database as DatabaseServer
from dev.mariadb import MariaDB
from dev.mysql import MySQL
from tests.support.source import Session, SourceUnderTest, raw_events
from tests.support.sql import Database

DATA: Final = Path(__file__).resolve().parents[1] / "data"
FLAVORS: Final = ("mysql", "mariadb")
_FIELDS: Final = {name: name for name in OutboxEvent._fields}


@dataclass(frozen=True)
class Corpus:
    """One recorded log, and what the table held at its end."""

    flavor: Flavor
    schema: str
    table: str
    columns: list[SchemaColumn]
    charsets: dict[int, str]
    file: str
    offset: int
    keys: list[str]
    """Aggregate ids in the order in which they come out; ``#1`` for a row to be read back."""
    stored: dict[int, OutboxEvent]
    events: list[bytes]

    @classmethod
    def load(cls, flavor: str) -> Corpus:
        """The recorded log of one server."""
        head, *events = chunks((DATA / f"{flavor}.bin").read_bytes())
        values = json.loads(head)
        values["columns"] = [SchemaColumn(**column) for column in values["columns"]]
        values["charsets"] = {int(key): value for key, value in values["charsets"].items()}
        values["stored"] = {
            row[0]: OutboxEvent(*row[:5], *[_bytes(item) for item in row[5:7]], row[7])
            for row in values["stored"]
        }
        return cls(**values, events=events)

    def save(self) -> None:
        """Write it to its file."""
        values = asdict(self)
        del values["events"]
        values["stored"] = [
            [item.decode() if isinstance(item, bytes) else item for item in row]
            for row in self.stored.values()
        ]
        head = json.dumps(values, ensure_ascii=False).encode()
        with (DATA / f"{self.flavor}.bin").open("wb") as file:
            for chunk in (head, *self.events):
                file.write(len(chunk).to_bytes(4, "little") + chunk)

    @property
    def start(self) -> Position:
        return Position(self.flavor, "server", self.file, self.offset)

    def decoder(self, hold_bytes: int | None = None, batch_rows: int = 1000) -> Decoder:
        """A decoder at the start of the log, whose layouts are proved by what the table held."""
        options = {} if hold_bytes is None else {"hold_bytes": hold_bytes}
        decoder = Decoder(
            self.schema,
            self.table,
            Resolver(self),
            batch_rows,
            GtidSet() if self.flavor == "mysql" else None,
            MariaGtidPosition() if self.flavor == "mariadb" else None,
            **options,
        )
        decoder.begin(self.file, self.offset)
        return decoder

    def read(
        self, data: bytes, decoder: Decoder | None = None, chunk: int = 1 << 18
    ) -> Iterator[OutboxEvent | UnreadRow]:
        """What the source makes of ``data`` (packets), up to its end."""
        source = self._source()
        sock: Any = Played(data, chunk)
        try:
            for batch in source._read(sock, decoder or self.decoder(), self.start):
                yield from batch.rows
        except SourceUnavailableError as error:
            if not sock.ended:
                raise AssertionError("the source gave up before the end") from error

    def read_again(
        self, hold_bytes: int, batch_rows: int = 1000
    ) -> Iterator[OutboxEvent | UnreadRow]:
        """The same with a memory of ``hold_bytes`` for an open transaction: larger ones are read
        twice, the second time in a new dump from the boundary before them."""
        source: Any = self._source()
        start = self.start
        while True:
            decoder = self.decoder(hold_bytes, batch_rows)
            decoder.begin(start.file, start.offset)
            decoder.prepared = dict(start.prepared)
            if start.partial is not None:
                again = source._again
                assert again is not None
                assert again[0] == start
                decoder.expect(*start.partial, again[1])
            source._again = None
            sock: Any = Played(packets(self._from(start)), 1 << 18)
            try:
                for batch in source._read(sock, decoder, start):
                    yield from batch.rows
            except SourceUnavailableError:
                assert sock.ended
                return
            assert source._again is not None
            start = source._again[0]

    def _from(self, start: Position) -> list[bytes]:
        """What a dump from a boundary sends: made-up events of the file, then its own."""
        file, place = self.file, self.offset
        head: list[bytes] = []
        for index, event in enumerate(self.events):
            end = int.from_bytes(event[13:17], "little")
            if event[4] == ROTATE and end == 0:
                if head:
                    file, place = event[27:].decode("latin-1"), 0
                head = [event]
            elif event[4] == FORMAT_DESCRIPTION:
                head.append(event)
            if file.startswith(start.file) and max(place, 4) >= start.offset and len(head) == 2:
                following = self.events[index:]
                return following if following[0] in head else [*head, *following]
            place = end or place
        raise AssertionError(f"{start} is no boundary of the log")

    def _source(self) -> BinlogSource:
        return BinlogSource(
            {},
            self.schema,
            self.table,
            _FIELDS,
            server_id=1,
            replica_uuid=uuid.UUID(int=1),
            heartbeat=1,
            read_timeout=5,
            batch_rows=1000,
            idle_interval=0,
            find=self.stored.get,
        )


class Resolver(LayoutResolver):
    """Proves layouts by what the table held, without waiting for rows that it did not hold."""

    def __init__(self, corpus: Corpus) -> None:
        super().__init__(
            lambda: corpus.columns,
            lambda: corpus.charsets,
            corpus.stored.get,
            _FIELDS,
            mariadb=corpus.flavor == "mariadb",
        )

    def _tries(self) -> Iterator[None]:
        yield


class Played:
    """A socket that gives what it was given, in pieces, and then its end."""

    def __init__(self, data: bytes, chunk: int) -> None:
        self._data = data
        self._chunk = chunk
        self._at = 0
        self.ended = False

    def settimeout(self, _seconds: float) -> None:
        pass

    def recv(self, size: int) -> bytes:
        start, self._at = self._at, self._at + min(size, self._chunk)
        self.ended = start >= len(self._data)
        return self._data[start : self._at]


def _bytes(value: str | None) -> bytes | None:
    return None if value is None else value.encode()


def chunks(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        yield data[at + 4 : at + 4 + size]
        at += 4 + size


def packets(events: Sequence[bytes]) -> bytes:
    """The events as the server sends them: each in a packet, behind its status byte."""
    return b"".join(
        (len(event) + 1).to_bytes(3, "little") + bytes([number & 0xFF]) + b"\0" + event
        for number, event in enumerate(events)
    )


def summed(event: bytes) -> bytes:
    """The event with its size and its checksum made right."""
    body = event[:9] + len(event).to_bytes(4, "little") + event[13:-4]
    return body + zlib.crc32(body).to_bytes(4, "little")


def names(rows: Sequence[OutboxEvent | UnreadRow]) -> list[str]:
    """Aggregate ids; ``#1`` for a row that has to be read back."""
    return [row.aggregate_id if isinstance(row, OutboxEvent) else f"#{row.id}" for row in rows]


# --- recording ------------------------------------------------------------------------------------


def record(server: DatabaseServer) -> Corpus:
    """Play the history on a server of its own and keep what it logs."""
    with Database.create(server.url(), "corpus") as database:
        database.create_outbox()
        database.sql("CREATE TABLE other (id INT AUTO_INCREMENT PRIMARY KEY, t TEXT)")
        database.sql("FLUSH BINARY LOGS")
        with SourceUnderTest.on(database) as source, source.session() as session:
            start = source.position
            keys = play(session, database, mariadb=database.is_mariadb)
            source.skip()
            raw = raw_events(database, start, source.position)
            reading = source.read(start)
            binlog = source.source()
            stored = source.source()._find
            found = database.sql("SELECT id FROM outbox_event ORDER BY id")
            events = {row_id: stored(row_id) for (row_id,) in found}
            corpus = Corpus(
                start.flavor,
                database.name,
                source.table,
                binlog._load_columns(),
                binlog._load_charsets(),
                start.file,
                start.offset,
                reading.keys,
                {row_id: event for row_id, event in events.items() if event is not None},
                raw,
            )
            ids = {row.aggregate_id: row.id for row in corpus.stored.values()}
            expected = [f"#{ids[key[1:]]}" if key.startswith("#") else key for key in keys]
            assert reading.keys == expected, (reading.keys, expected)
            replayed = names(list(corpus.read(packets(raw))))
            assert replayed == expected, replayed
            return corpus


def play(session: Session, database: Database, *, mariadb: bool) -> list[str]:
    """One of everything; returns the keys in the order of their commits, ``#`` before those that
    have to be read back."""
    run, ins = session.script, session.ins
    ins("plain", payload={"t": "😥", "n": [1, 2.5, None, -70000, 2**63]})
    session.bulk(["bulk-1", "bulk-2", "bulk-3"], payload=["x" * 50])
    run("UPDATE outbox_event SET status = 1", "DELETE FROM outbox_event WHERE id = 2")
    run("INSERT INTO other (t) VALUES ('x')", "BEGIN", "INSERT INTO other (t) VALUES ('y')")
    ins("mixed-1", "mixed-2")
    run("SAVEPOINT s")
    ins("undone")
    run("ROLLBACK TO s", "UPDATE other SET t = 'z'", "COMMIT")
    keys = ["plain", "bulk-1", "bulk-2", "bulk-3", "mixed-1", "mixed-2"]
    run("XA START 'kept', 'b', 3")
    ins("xa")
    run("XA END 'kept', 'b', 3", "XA PREPARE 'kept', 'b', 3")
    with database.connect(autocommit=True) as other:
        Session(other, session.table).ins("between")
    run("XA COMMIT 'kept', 'b', 3", "XA START 'gone'")
    ins("never")
    run("XA END 'gone'", "XA PREPARE 'gone'", "XA ROLLBACK 'gone'", "XA START 'one'")
    ins("one-phase")
    run("XA END 'one'", "XA COMMIT 'one' ONE PHASE")
    keys += ["between", "#xa", "one-phase"]
    run("SET SESSION binlog_row_image = MINIMAL")
    ins("minimal", payload=[])
    run("UPDATE outbox_event SET retry_count = 1 WHERE aggregate_id = 'minimal'")
    run("SET SESSION binlog_row_image = FULL")
    keys.append("minimal")
    if mariadb:
        run("SET GLOBAL log_bin_compress = ON", "SET GLOBAL log_bin_compress_min_len = 10")
        ins("compressed", payload=["y" * 400])
        run("UPDATE outbox_event SET payload = '[]' WHERE aggregate_id = 'compressed'")
        run("SET GLOBAL log_bin_compress = OFF")
        keys.append("compressed")
    else:
        run("SET gtid_next = 'AUTOMATIC:mytag'")
        ins("tagged")
        run("SET gtid_next = 'AUTOMATIC'", "SET SESSION binlog_transaction_compression = ON")
        run("BEGIN")
        session.bulk(["packed-1", "packed-2"], payload=["y" * 200])
        run("INSERT INTO other (t) VALUES ('w')")
        ins("packed-3")
        run("COMMIT", "SET SESSION binlog_transaction_compression = OFF")
        run("SET SESSION binlog_row_value_options = PARTIAL_JSON")
        run("UPDATE outbox_event SET payload = JSON_SET(payload, '$[0]', 1) WHERE id = 3")
        keys += ["tagged", "packed-1", "packed-2", "packed-3"]
    run("ALTER TABLE outbox_event ADD extra YEAR NULL AFTER id")
    ins("altered")
    run("ALTER TABLE outbox_event DROP extra")
    run("SET GLOBAL binlog_row_metadata = FULL", "FLUSH TABLES")
    ins("named")
    run("SET GLOBAL binlog_row_metadata = " + ("NO_LOG" if mariadb else "MINIMAL"))
    run("FLUSH BINARY LOGS", "SET GLOBAL binlog_checksum = NONE")
    ins("unsummed")
    run("SET GLOBAL binlog_checksum = CRC32")
    ins("last")
    return [*keys, "#altered", "named", "unsummed", "last"]


def main() -> None:
    """Record both servers."""
    DATA.mkdir(exist_ok=True)
    kinds: list[type[MySQL | MariaDB]] = [MySQL, MariaDB]
    for kind in kinds:
        with (
            tempfile.TemporaryDirectory() as home,
            kind(Path(home) / "server", die_with_parent=True) as server,
        ):
            corpus = record(server)
            corpus.save()
            print(corpus.flavor, len(corpus.events), "events", corpus.keys)


if __name__ == "__main__":
    main()
