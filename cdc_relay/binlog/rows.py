"""Row images of the outbox table, from bytes to ``OutboxEvent``.

Hot: typed for mypyc, running unchanged as plain Python. A ``Layout`` is the plan for one shape of
the table as the log describes it: for each column how many bytes it takes and, for the eight that
make an event, where the value goes and how it is read. Format: MySQL internals manual,
"ROWS_EVENT"; MariaDB knowledge base, "Rows_event_v1/v2".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from mypy_extensions import i64

from cdc_relay.binlog.jsonb import json_text
from cdc_relay.binlog.values import NO_TIME, datetime2_micros, timestamp2_micros
from cdc_relay.errors import DecodeError
from cdc_relay.outbox import OutboxEvent

# Where a value goes: the fields of OutboxEvent in their order, the extra ones, or nowhere.
SKIP: Final = -1
SLOT_ID: Final = 0
FIELDS: Final = OutboxEvent._fields[:8]
# Behind the place of ``extra`` itself, one for each value that it is made of.
FIRST_EXTRA: Final = 9

# How a wanted value is read.
INTEGER: Final = 0  # -> int; argument 1: signed
TEXT: Final = 1  # UTF-8 -> str
TEXT_CODEC: Final = 2  # another character set -> str
RAW: Final = 3  # bytes as they are
RAW_CODEC: Final = 4  # text in another character set -> UTF-8 bytes
RAW_PADDED: Final = 5  # BINARY(argument): the log drops trailing zero bytes
JSON: Final = 6  # binary JSON -> its text
DATETIME2: Final = 7  # argument: fraction digits -> microseconds
TIMESTAMP2: Final = 8  # argument: fraction digits -> microseconds
READER: Final = 9  # any other type -> str, by the column's reader
READ_BACK: Final = 10  # cannot be read from the log alone; the codec says why

Reader = Callable[[bytes, int, int], str]
"""Text of the value in ``buf[pos:pos + width]`` as SELECT prints it."""


# As OutboxEvent._make does it, without its detour through Python.
_new: Final = tuple.__new__
_EVENT: Final = OutboxEvent


class UnreadRow(NamedTuple):
    """A committed row that the log alone cannot give: only its key is known. It is read back by
    SELECT before it goes on, in its place in the stream."""

    id: int
    reason: str


class Column(NamedTuple):
    """What a plan needs to know of one column."""

    width: int
    """Bytes of a fixed-width value, or minus the bytes of the length prefix of a variable one."""
    slot: int = SKIP
    kind: int = RAW
    argument: int = 0
    codec: str = ""
    reader: Reader | None = None


class Layout:
    """The plan for one shape of the table. Built once per shape, shared by all its rows."""

    def __init__(
        self, columns: list[Column], *, named: bool, proved: bool, extras: tuple[str, ...] = ()
    ) -> None:
        self.columns = columns
        self.extras = extras
        """The names of the extra columns, from ``FIRST_EXTRA`` on."""
        self.widths = [column.width for column in columns]
        self.slots = [column.slot for column in columns]
        self.kinds = [column.kind for column in columns]
        self.arguments = [column.argument for column in columns]
        self.named = named
        """Whether every field of an event has its column; else rows are only walked over."""
        self.proved = proved
        """Whether names are certain: logged, or confirmed by a row that SELECT gives equal."""
        self.missing = ""
        """Why rows of this shape have to be read back; empty where they need not."""
        self._subsets: dict[bytes, Layout] = {}

    def subset(self, present: bytes) -> Layout:
        """The plan for images that hold only some columns (``binlog_row_image`` other than FULL).

        ``present`` is the image's column bitmap. Kept per bitmap.
        """
        found = self._subsets.get(present)
        if found is None:
            keep = [c for i, c in enumerate(self.columns) if present[i >> 3] & (1 << (i & 7))]
            kept = {column.slot for column in keep}
            absent = sorted(slot for slot in self.slots if slot != SKIP and slot not in kept)
            found = Layout(keep, named=self.named, proved=True, extras=self.extras)
            if absent:
                names = ", ".join(self.name(slot) for slot in absent)
                found.missing = f"the row image lacks {names}"
            self._subsets[present] = found
        return found

    def name(self, slot: int) -> str:
        """What goes there."""
        return FIELDS[slot] if slot < FIRST_EXTRA else self.extras[slot - FIRST_EXTRA]


def decode_rows(
    buf: bytes, pos: i64, end: i64, layout: Layout, out: list[OutboxEvent | UnreadRow]
) -> None:
    """Append the rows of a WRITE_ROWS body to ``out``, in their order.

    ``pos`` is at the column count, ``end`` after the last row (before a checksum). Raises
    ``ValueError`` or ``IndexError`` for bytes that do not fit the plan; then nothing that was
    appended may be used.
    """
    columns: i64 = buf[pos]
    pos += 1
    if columns >= 251:
        if columns != 252:
            raise ValueError("column count")
        low: i64 = buf[pos]
        high: i64 = buf[pos + 1]
        columns = low | high << 8
        pos += 2
    if columns != len(layout.widths):
        raise ValueError(f"{columns} columns where the table map has {len(layout.widths)}")
    bitmap: i64 = (columns + 7) >> 3
    full = True
    index: i64 = 0
    while index < columns:
        byte: i64 = buf[pos + (index >> 3)]
        if byte & (1 << (index & 7)) == 0:
            full = False
            break
        index += 1
    if not full:
        layout = layout.subset(buf[pos : pos + bitmap])
    pos += bitmap
    while pos < end:
        pos = _row(buf, pos, end, layout, out)
    if pos != end:
        raise ValueError("the last row reaches beyond the event")


def _row(buf: bytes, pos: i64, end: i64, layout: Layout, out: list[OutboxEvent | UnreadRow]) -> i64:
    widths = layout.widths
    slots = layout.slots
    columns: i64 = len(widths)
    nulls: i64 = pos
    pos += (columns + 7) >> 3
    values: list[object] = [None, None, None, None, None, None, None, None, ()]
    if layout.extras:
        values += [None] * len(layout.extras)
    unread = layout.missing
    index: i64 = 0
    while index < columns:
        byte: i64 = buf[nulls + (index >> 3)]
        if byte & (1 << (index & 7)):
            index += 1
            continue
        width: i64 = widths[index]
        if width < 0:
            length: i64 = buf[pos]
            if width < -1:
                second: i64 = buf[pos + 1]
                length |= second << 8
                if width < -2:
                    third: i64 = buf[pos + 2]
                    length |= third << 16
                    if width < -3:
                        fourth: i64 = buf[pos + 3]
                        length |= fourth << 24
            pos -= width
            width = length
        if pos + width > end:
            raise ValueError("a value reaches beyond the event")
        slot: i64 = slots[index]
        if slot >= 0:
            kind: i64 = layout.kinds[index]
            if kind == TEXT:
                try:
                    values[slot] = buf[pos : pos + width].decode()
                except UnicodeDecodeError as error:
                    unread = unread or f"{layout.name(slot)} is not UTF-8: {error.reason}"
            elif kind == INTEGER:
                values[slot] = _integer(buf, pos, width, layout.arguments[index])
            elif kind == JSON:
                values[slot] = json_text(buf, pos, pos + width)
            elif kind == DATETIME2:
                micros: i64 = datetime2_micros(buf, pos, layout.arguments[index])
                if micros != NO_TIME:
                    values[slot] = micros
            elif kind == RAW:
                values[slot] = buf[pos : pos + width]
            else:
                column = layout.columns[index]
                if kind == READ_BACK:
                    unread = unread or f"{layout.name(slot)}: {column.codec}"
                else:
                    try:
                        values[slot] = _other(buf, pos, width, column)
                    except UnicodeDecodeError as error:
                        unread = unread or (
                            f"{layout.name(slot)} is not {column.codec}: {error.reason}"
                        )
        pos += width
        index += 1
    key = values[0]
    if not isinstance(key, int):
        raise DecodeError("the row image holds no id, so the row cannot be found again")
    if unread:
        out.append(UnreadRow(key, unread))
    else:
        for slot in range(1, 5):
            if values[slot] is None:
                values[slot] = ""  # NULL in a column of an existing table: the router judges it
        if layout.extras:
            values = _with_extra(values)
        out.append(_new(_EVENT, values))
    return pos


def _with_extra(values: list[object]) -> list[object]:
    """The fields, the extra values as one of them."""
    extra = [value.encode() if isinstance(value, str) else value for value in values[FIRST_EXTRA:]]
    return [*values[: FIRST_EXTRA - 1], tuple(extra)]


def _integer(buf: bytes, pos: i64, width: i64, signed: i64) -> int:
    if width > 4:
        return int.from_bytes(buf[pos : pos + width], "little", signed=signed != 0)
    value: i64 = 0
    index: i64 = width - 1
    while index >= 0:
        byte: i64 = buf[pos + index]
        value = value << 8 | byte
        index -= 1
    if signed:
        # Never shift a constant: mypyc writes it as C's 32-bit int, also by way of a variable.
        sign: i64 = value >> (8 * width - 1)
        value -= sign << (8 * width)
    return value


def _other(buf: bytes, pos: i64, width: i64, column: Column) -> object:
    kind: i64 = column.kind
    if kind == TIMESTAMP2:
        micros: i64 = timestamp2_micros(buf, pos, column.argument)
        return None if micros == NO_TIME else micros
    value = buf[pos : pos + width]
    if kind == TEXT_CODEC:
        return value.decode(column.codec)
    if kind == RAW_CODEC:
        return value.decode(column.codec).encode()
    if kind == RAW_PADDED:
        return value.ljust(column.argument, b"\0")
    reader = column.reader
    if reader is None:
        raise ValueError("a column without a reader")
    return reader(buf, pos, width)
