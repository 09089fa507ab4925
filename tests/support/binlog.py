"""A binlog made by hand, event by event, for what no server sends on demand."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final

from cdc_relay.binlog.decoder import Decoder
from cdc_relay.binlog.layout import SchemaColumn, build, parse_table_map
from cdc_relay.binlog.rows import Layout, UnreadRow, decode_rows
from cdc_relay.outbox import OutboxEvent
from cdc_relay.position import GtidSet, MariaGtidPosition

SID: Final = bytes(range(16))
SCHEMA: Final = "shop"
TABLE: Final = "outbox_event"

_LONGLONG, _VARCHAR, _BLOB, _DATETIME2 = 8, 15, 252, 18
_NAMES: Final = ("id", "event_id", "aggregate_type", "aggregate_id", "event_type", "payload",
                 "headers", "created_at")  # fmt: skip
COLUMNS: Final = [
    SchemaColumn("id", "bigint", "bigint unsigned", None, None, 20, 0, None),
    *(
        SchemaColumn(name, "varchar", "varchar(64)", "utf8mb4", 256, None, None, None)
        for name in _NAMES[1:5]
    ),
    *(
        SchemaColumn(name, "blob", "blob", "binary", 65535, None, None, None)
        for name in ("payload", "headers")
    ),
    SchemaColumn("created_at", "datetime", "datetime(6)", None, None, None, None, 6),
]


class Shapes:
    """Resolves every shape of the table as proved; counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def resolve(self, shape: bytes) -> Layout:
        self.asked += 1
        names = {name: name for name in OutboxEvent._fields}
        layout = build(parse_table_map(shape, mariadb=False), COLUMNS, names, {})
        layout.proved = True
        return layout

    def doubtful(
        self, layout: Layout, buf: bytes, pos: int, end: int, committed: int
    ) -> list[OutboxEvent | UnreadRow]:
        found: list[OutboxEvent | UnreadRow] = []
        decode_rows(buf, pos, end, layout, found)
        return found


class Log:
    """Makes events and feeds them to a decoder, one packet each."""

    def __init__(
        self, *, mariadb: bool = False, gtids: bool = True, start: int = 4, **options: int
    ) -> None:
        self.shapes = Shapes()
        self.offset = start
        self.file = "binlog.000001"
        self.checksums = True
        self.decoder = Decoder(
            SCHEMA,
            TABLE,
            self.shapes,
            options.pop("batch_rows", 1000),
            GtidSet() if gtids and not mariadb else None,
            MariaGtidPosition() if gtids and mariadb else None,
            **options,
        )
        self.decoder.begin(self.file, start)
        self.rotate(self.file, start, made_up=True)
        self.description()
        self.rows: list[OutboxEvent | UnreadRow] = []

    @property
    def names(self) -> list[str]:
        """What came out so far: aggregate ids, ``#1`` for a row to be read back."""
        self.rows += self.decoder.take()
        return [
            row.aggregate_id if isinstance(row, OutboxEvent) else f"#{row.id}" for row in self.rows
        ]

    def event(
        self, kind: int, body: bytes, *, flags: int = 0, place: int | None = None, time: int = 0
    ) -> bytes:
        """One event with its header and, where the log has them, its checksum."""
        size = 19 + len(body) + (4 if self.checksums else 0)
        if place is None:
            self.offset += size
            place = self.offset & 0xFFFFFFFF
        head = time.to_bytes(4, "little") + bytes([kind]) + (1).to_bytes(4, "little")
        head += size.to_bytes(4, "little") + place.to_bytes(4, "little")
        event = head + flags.to_bytes(2, "little") + body
        return event + zlib.crc32(event).to_bytes(4, "little") if self.checksums else event

    def feed(self, *events: bytes) -> int:
        """Give events to the decoder; what stopped it. All keys of an XA transaction that is
        committed are taken at once."""
        data = b"".join(
            (len(event) + 1).to_bytes(3, "little") + b"\0\0" + event for event in events
        )
        at = 0
        while True:
            at = int(self.decoder.feed(data, at, len(data)))
            if self.decoder.deciding:
                continue
            if self.decoder.stopped or at == len(data):
                return int(self.decoder.stopped)

    def add(self, kind: int, body: bytes, **options: Any) -> int:
        return self.feed(self.event(kind, body, **options))

    # --- events ----------------------------------------------------------------------------------

    def description(self, *, made_up: bool = True) -> None:
        """It says which checksums the others have and always has one itself."""
        body = b"\4\0" + bytes(54) + b"\x13" + bytes([1 if self.checksums else 0])
        checksums, self.checksums = self.checksums, True
        event = self.event(15, body, place=0 if made_up else None)
        self.checksums = checksums
        self.feed(event)

    def rotate(self, file: str, offset: int = 4, *, made_up: bool = False) -> None:
        body = offset.to_bytes(8, "little") + file.encode()
        if made_up:
            checksums, self.checksums = self.checksums, False
            self.feed(self.event(4, body, flags=0x20, place=0))
            self.checksums = checksums
            self.file, self.offset = file, offset
        else:
            self.add(4, body)

    def gtid(self, number: int, *, kind: int = 33, sid: bytes = SID) -> int:
        body = b"\1" + sid + number.to_bytes(8, "little") + b"\2" + bytes(16)
        return self.add(kind, body + (1_700_000_000_000_000).to_bytes(7, "little"))

    def maria_gtid(self, number: int, flags: int = 0, domain: int = 0) -> int:
        body = number.to_bytes(8, "little") + domain.to_bytes(4, "little") + bytes([flags])
        return self.add(162, body + bytes(6))

    def query(self, text: str | bytes, status: bytes = b"") -> int:
        return self.add(2, query_body(text, status))

    def table_map(self, table: str = TABLE, number: int = 77) -> int:
        types = [_LONGLONG, *[_VARCHAR] * 4, _BLOB, _BLOB, _DATETIME2]
        metas = (256).to_bytes(2, "little") * 4 + b"\2\2\6"
        body = number.to_bytes(6, "little") + b"\1\0"
        for name in (SCHEMA, table):
            body += bytes([len(name)]) + name.encode() + b"\0"
        body += bytes([len(types)]) + bytes(types) + bytes([len(metas)]) + metas + b"\xff"
        return self.add(19, body)

    def write(
        self, *rows: tuple[int, str], number: int = 77, kind: int = 30, present: int = 0xFF
    ) -> int:
        """Insert rows, (id, aggregate id) each; ``present`` is the bitmap of their columns."""
        body = number.to_bytes(6, "little") + b"\1\0" + (b"\2\0" if kind in (30, 31, 32) else b"")
        return self.add(kind, body + b"\x08" + bytes([present]) + images(rows, present))

    def transaction(self, number: int, *rows: tuple[int, str]) -> int:
        """A whole transaction on a server with GTIDs."""
        self.gtid(number)
        self.query("BEGIN")
        self.table_map()
        self.write(*rows)
        return self.xid()

    def xid(self, time: int = 0) -> int:
        return self.add(16, bytes(8), time=time)


def query_body(text: str | bytes, status: bytes = b"") -> bytes:
    """A statement, as its event holds it."""
    text = text.encode() if isinstance(text, str) else text
    head = bytes(8) + bytes([len(SCHEMA)]) + bytes(2) + len(status).to_bytes(2, "little")
    return head + status + SCHEMA.encode() + b"\0" + text


def images(rows: Sequence[tuple[int, str]], present: int = 0xFF) -> bytes:
    """Row images: headers and created_at are NULL."""
    kept = [index for index in range(8) if present >> index & 1]
    out = b""
    for row_id, key in rows:
        texts = [f"e{row_id}", "order", key, "MADE"]
        values = [
            row_id.to_bytes(8, "little"),
            *(len(text.encode()).to_bytes(2, "little") + text.encode() for text in texts),
            b"\2\0{}",
            None,
            None,
        ]
        nulls = sum(1 << place for place, index in enumerate(kept) if values[index] is None)
        out += nulls.to_bytes((len(kept) + 7) // 8, "little")
        out += b"".join(values[index] or b"" for index in kept)
    return out
