"""Column layouts: from the table map of the log and the columns of the schema to a decoding plan.

The log gives each column's type and sizes; at the server's default metadata level it does not
give names. Names then come from the schema as it is now, and only if every column of the schema
has the type and the size that the log says: a layout that does not match is never guessed.
Format of table maps: MySQL source documentation, ``Table_map_event``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import unpack_from
from typing import Final, Self

import structlog

from cdc_relay.binlog import rows, values
from cdc_relay.binlog.charsets import codec_of
from cdc_relay.binlog.rows import (
    FIELDS,
    FIRST_EXTRA,
    SKIP,
    Column,
    Layout,
    UnreadRow,
    decode_rows,
)
from cdc_relay.binlog.values import decimal_size
from cdc_relay.errors import SourceError
from cdc_relay.outbox import OutboxEvent

log = structlog.get_logger(__name__)

# Type codes of the log (``enum_field_types``), with MariaDB's compressed columns.
TINY, SHORT, LONG, FLOAT, DOUBLE = 1, 2, 3, 4, 5
TIMESTAMP, LONGLONG, INT24, DATE, TIME, DATETIME, YEAR = 7, 8, 9, 10, 11, 12, 13
NEWDATE, VARCHAR, BIT, TIMESTAMP2, DATETIME2, TIME2 = 14, 15, 16, 17, 18, 19
MARIA_BLOB_COMPRESSED, MARIA_VARCHAR_COMPRESSED = 140, 141
VECTOR, JSON, NEWDECIMAL, ENUM, SET = 242, 245, 246, 247, 248
BLOB, VAR_STRING, STRING, GEOMETRY = 252, 253, 254, 255

_INTEGERS: Final = {TINY: 1, SHORT: 2, INT24: 3, LONG: 4, LONGLONG: 8}
_FIXED: Final = {
    **_INTEGERS,
    FLOAT: 4,
    DOUBLE: 8,
    TIMESTAMP: 4,
    DATE: 3,
    TIME: 3,
    DATETIME: 8,
    YEAR: 1,
    NEWDATE: 3,
}
_ONE_META_BYTE: Final = frozenset(
    (
        FLOAT,
        DOUBLE,
        TIMESTAMP2,
        DATETIME2,
        TIME2,
        JSON,
        BLOB,
        GEOMETRY,
        VECTOR,
        MARIA_BLOB_COMPRESSED,
    )
)
_TWO_META_BYTES: Final = frozenset(
    (VARCHAR, VAR_STRING, STRING, BIT, NEWDECIMAL, ENUM, SET, MARIA_VARCHAR_COMPRESSED)
)

# Types by their names in information_schema.
_DATA_TYPES: Final = {
    "tinyint": (TINY,),
    "smallint": (SHORT,),
    "mediumint": (INT24,),
    "int": (LONG,),
    "bigint": (LONGLONG,),
    "float": (FLOAT,),
    "double": (DOUBLE,),
    "decimal": (NEWDECIMAL,),
    "bit": (BIT,),
    "year": (YEAR,),
    "date": (DATE, NEWDATE),
    "time": (TIME2, TIME),
    "datetime": (DATETIME2, DATETIME),
    "timestamp": (TIMESTAMP2, TIMESTAMP),
    "varchar": (VARCHAR, MARIA_VARCHAR_COMPRESSED),
    "varbinary": (VARCHAR, MARIA_VARCHAR_COMPRESSED),
    "char": (STRING,),
    "binary": (STRING,),
    "tinytext": (BLOB, MARIA_BLOB_COMPRESSED),
    "text": (BLOB, MARIA_BLOB_COMPRESSED),
    "mediumtext": (BLOB, MARIA_BLOB_COMPRESSED),
    "longtext": (BLOB, MARIA_BLOB_COMPRESSED),
    "tinyblob": (BLOB, MARIA_BLOB_COMPRESSED),
    "blob": (BLOB, MARIA_BLOB_COMPRESSED),
    "mediumblob": (BLOB, MARIA_BLOB_COMPRESSED),
    "longblob": (BLOB, MARIA_BLOB_COMPRESSED),
    "json": (JSON, BLOB),
    "enum": (ENUM,),
    "set": (SET,),
    "vector": (VECTOR,),
}
_BLOB_PREFIX: Final = {
    "tinytext": 1, "tinyblob": 1, "text": 2, "blob": 2, "mediumtext": 3, "mediumblob": 3,
    "longtext": 4, "longblob": 4, "json": 4,
}  # fmt: skip

# What a column with a reader has to be, for the reason why a row is read back.
_LABELS: Final = "one of its labels"
# Character sets whose bytes go on as they are.
_PLAIN: Final = ("binary", "utf8mb4", "utf8mb3", "utf8")


@dataclass(frozen=True, slots=True)
class SchemaColumn:
    """One column as information_schema describes it now."""

    name: str
    data_type: str
    column_type: str
    charset: str | None
    octets: int | None
    precision: int | None
    scale: int | None
    fraction: int | None

    @classmethod
    def unknown(cls, name: str) -> Self:
        """A column that the log names and the schema does not have any more."""
        return cls(name, "", "", None, None, None, None, None)

    @property
    def unsigned(self) -> bool:
        return "unsigned" in self.column_type.lower()

    @property
    def labels(self) -> list[str]:
        """The labels of an ENUM or SET."""
        if self.data_type not in ("enum", "set"):
            return []
        return [_ESCAPED.sub(_unescaped, label) for label in _LABEL.findall(self.column_type)]


_LABEL: Final = re.compile(r"'((?:[^']|'')*)'")
# The server writes labels with these escapes (``append_unescaped``).
_ESCAPED: Final = re.compile(r"''|\\(.)", re.DOTALL)
_ESCAPES: Final = {"0": "\0", "n": "\n", "r": "\r"}


def _unescaped(match: re.Match[str]) -> str:
    letter = match[1]
    return "'" if letter is None else _ESCAPES.get(letter, letter)


@dataclass(frozen=True, slots=True)
class MappedColumn:
    """One column as a table map describes it."""

    type: int
    meta: int
    """Type-specific: bytes of a length prefix, fraction digits, maximum length, ..."""
    name: str | None = None
    """Only with ``binlog_row_metadata=FULL``."""
    unsigned: bool | None = None
    """For numbers; None where the log does not tell (MariaDB by default)."""
    collation: int | None = None
    """For strings, and for ENUM and SET; None where the log does not tell."""
    labels: tuple[bytes, ...] | None = None
    """Of an ENUM or SET, in its character set; None where the log does not tell."""

    @property
    def width(self) -> int:
        """Bytes of the value, or minus the bytes of its length prefix."""
        kind, meta = self.type, self.meta
        if kind in _FIXED:
            return _FIXED[kind]
        if kind in (VARCHAR, VAR_STRING, STRING, MARIA_VARCHAR_COMPRESSED):
            return -2 if meta > 255 else -1
        if kind in (BLOB, JSON, GEOMETRY, VECTOR, MARIA_BLOB_COMPRESSED):
            return -meta
        if kind in (ENUM, SET):
            return meta
        if kind == BIT:
            return ((meta >> 8) * 8 + (meta & 0xFF) + 7) // 8
        if kind == NEWDECIMAL:
            return int(decimal_size(meta & 0xFF, meta >> 8))
        base = {TIMESTAMP2: 4, DATETIME2: 5, TIME2: 3}.get(kind)
        if base is None:
            raise SourceError(f"the binlog names a column type that is not known: {kind}")
        return base + (meta + 1) // 2


def parse_table_map(shape: bytes, *, mariadb: bool) -> list[MappedColumn]:
    """Return the columns of a table map, given its bytes from the schema's name on.

    The two servers do not agree which types have a character set. Raises ``ValueError`` or
    ``IndexError`` for damaged bytes.
    """
    pos = 1 + shape[0] + 1
    pos += 1 + shape[pos] + 1
    count, pos = _length(shape, pos)
    types = shape[pos : pos + count]
    pos += count
    size, pos = _length(shape, pos)
    metas, pos = shape[pos : pos + size], pos + size
    pos += (count + 7) // 8  # which columns may be NULL
    columns: list[tuple[int, int]] = []
    at = 0
    for code in types:
        kind, meta = code, 0
        if code in _ONE_META_BYTE:
            meta = metas[at]
            at += 1
        elif code in _TWO_META_BYTES:
            low, high = metas[at], metas[at + 1]
            at += 2
            if code == STRING:
                kind, meta = _string_meta(low, high)
            else:
                meta = low | high << 8
        columns.append((kind, meta))
    optional = dict(_optional(shape, pos))
    names = _names(optional.get(_COLUMN_NAMES))
    signs = _signs(optional.get(_SIGNEDNESS))
    text_types = _MARIA_STRINGS if mariadb else _MYSQL_STRINGS
    strings = sum(kind in text_types for kind, _ in columns)
    labelled = sum(kind in (ENUM, SET) for kind, _ in columns)
    collations = iter(_collations(optional, _DEFAULT_CHARSET, _COLUMN_CHARSET, strings))
    enum_and_set = iter(_collations(optional, _LABELS_DEFAULT, _LABELS_COLUMN, labelled))
    enums, sets = _labels(optional.get(_ENUM_LABELS)), _labels(optional.get(_SET_LABELS))
    found: list[MappedColumn] = []
    for kind, meta in columns:
        name = next(names, None)
        unsigned = next(signs, None) if kind in _NUMBERS else None
        collation, labels = None, None
        if kind in text_types:
            collation = next(collations, None)
        elif kind in (ENUM, SET):
            collation = next(enum_and_set, None)
            labels = next(enums if kind == ENUM else sets, None)
        found.append(MappedColumn(kind, meta, name, unsigned, collation, labels))
    return found


def _string_meta(low: int, high: int) -> tuple[int, int]:
    """CHAR, BINARY, ENUM and SET share a code; the first byte holds the real type and, for CHAR,
    two bits of the length."""
    if low & 0x30 != 0x30:
        return STRING, high | ((low & 0x30) ^ 0x30) << 4
    return (low, high) if low in (ENUM, SET) else (STRING, high)


def _length(buf: bytes, pos: int) -> tuple[int, int]:
    """A length-encoded integer and the position behind it."""
    first = buf[pos]
    if first < 251:
        return first, pos + 1
    width = {252: 2, 253: 3, 254: 8}.get(first)
    if width is None:
        raise ValueError(f"{first} begins no length")
    return int.from_bytes(buf[pos + 1 : pos + 1 + width], "little"), pos + 1 + width


# Fields of a table map's optional metadata.
_SIGNEDNESS: Final = 1
_DEFAULT_CHARSET: Final = 2
_COLUMN_CHARSET: Final = 3
_COLUMN_NAMES: Final = 4
_SET_LABELS: Final = 5
_ENUM_LABELS: Final = 6
_LABELS_DEFAULT: Final = 10
_LABELS_COLUMN: Final = 11

# Columns that have a bit in the signs, and those that have an entry in the character sets.
_NUMBERS: Final = frozenset((*_INTEGERS, YEAR, FLOAT, DOUBLE, NEWDECIMAL))
_STRINGS: Final = frozenset((VARCHAR, VAR_STRING, STRING, BLOB))
_MYSQL_STRINGS: Final = _STRINGS | {VECTOR}
_MARIA_STRINGS: Final = _STRINGS | {GEOMETRY, MARIA_BLOB_COMPRESSED, MARIA_VARCHAR_COMPRESSED}


def _optional(shape: bytes, pos: int) -> Iterator[tuple[int, bytes]]:
    while pos < len(shape):
        field = shape[pos]
        size, pos = _length(shape, pos + 1)
        if pos + size > len(shape):
            raise ValueError("optional metadata reaches beyond the table map")
        yield field, shape[pos : pos + size]
        pos += size


def _names(value: bytes | None) -> Iterator[str]:
    pos = 0
    while value is not None and pos < len(value):
        length, pos = _length(value, pos)
        yield value[pos : pos + length].decode()
        pos += length


def _signs(value: bytes | None) -> Iterator[bool]:
    """One bit per numeric column, the first in the highest bit: unsigned."""
    for byte in value or b"":
        for place in range(7, -1, -1):
            yield bool(byte >> place & 1)


def _labels(value: bytes | None) -> Iterator[tuple[bytes, ...]]:
    """For each column the number of its labels, then the labels."""
    pos = 0
    while value is not None and pos < len(value):
        count, pos = _length(value, pos)
        labels: list[bytes] = []
        for _ in range(count):
            length, pos = _length(value, pos)
            labels.append(value[pos : pos + length])
            pos += length
        yield tuple(labels)


def _collations(
    optional: Mapping[int, bytes], for_all: int, for_each: int, columns: int
) -> Sequence[int]:
    """The collation of each column: one for all with exceptions, or one for each."""
    numbers: list[int] = []
    default = optional.get(for_all)
    value = default if default is not None else optional.get(for_each, b"")
    pos = 0
    while pos < len(value):
        number, pos = _length(value, pos)
        numbers.append(number)
    if default is None:
        return numbers
    result = [numbers[0]] * columns
    for index, collation in zip(numbers[1::2], numbers[2::2], strict=True):
        result[index] = collation
    return result


def fits(mapped: MappedColumn, column: SchemaColumn) -> bool:
    """Whether a column of the log can be this column of the schema."""
    if mapped.type not in _DATA_TYPES.get(column.data_type, ()):
        # Types of MariaDB's plugins (uuid, inet6, ...) are logged as fixed strings.
        return column.data_type not in _DATA_TYPES and mapped.type in (STRING, GEOMETRY)
    if mapped.type in (VARCHAR, STRING):
        return column.octets is None or mapped.meta == column.octets
    if mapped.type in (BLOB, JSON):
        return mapped.meta == _BLOB_PREFIX[column.data_type]
    if mapped.type in (DATETIME2, TIMESTAMP2, TIME2):
        return mapped.meta == (column.fraction or 0)
    if mapped.type == NEWDECIMAL:
        return (mapped.meta & 0xFF, mapped.meta >> 8) == (column.precision, column.scale or 0)
    return True


def assign(
    mapped: Sequence[MappedColumn], schema: Sequence[SchemaColumn]
) -> tuple[Sequence[SchemaColumn | None], bool] | None:
    """Give each column of the log its column of the schema: by name where the log has names,
    else by place. The flag says whether that is certain. None where it cannot be."""
    if mapped and mapped[0].name is not None:
        by_name = {column.name.lower(): column for column in schema}
        return [
            by_name.get((column.name or "").lower()) or SchemaColumn.unknown(column.name or "")
            for column in mapped
        ], True
    extra = len(mapped) - len(schema)
    if extra < 0:
        return None
    # Columns that only the log shows stand at the end (MariaDB's hash of a long unique key) or at
    # the start (a generated invisible primary key that the server hides).
    for before in {0, extra}:
        inner = mapped[before : before + len(schema)]
        if all(map(fits, inner, schema)):
            return [*[None] * before, *schema, *[None] * (extra - before)], False
    return None


def build(
    mapped: Sequence[MappedColumn],
    schema: Sequence[SchemaColumn],
    names: Mapping[str, str],
    charsets: Mapping[int, str],
    extras: Sequence[str] = (),
) -> Layout:
    """Return the plan for rows of this shape.

    ``names`` gives the column name of each event field, ``charsets`` the character set of each
    collation, ``extras`` the names of ``OutboxEvent.extra``. A shape whose columns cannot be told
    gives a plan that is not ``named``.
    """
    assigned = assign(mapped, schema)
    if assigned is None:
        return Layout([Column(column.width) for column in mapped], named=False, proved=False)
    columns, certain = assigned
    fields = {names[field].lower(): slot for slot, field in enumerate(FIELDS)}
    fields |= {name.lower(): slot for slot, name in enumerate(extras, FIRST_EXTRA)}
    plan: list[Column] = []
    for logged, column in zip(mapped, columns, strict=True):
        slot = fields.pop(column.name.lower(), SKIP) if column is not None else SKIP
        if column is None or slot == SKIP:
            plan.append(Column(logged.width))
        elif slot >= FIRST_EXTRA:
            plan.append(reading_extra(logged, column, charsets)._replace(slot=slot))
        else:
            plan.append(reading(FIELDS[slot], logged, column, charsets)._replace(slot=slot))
    fields.pop(names["headers"].lower(), None)
    if fields:
        # An old shape without a column of ours (it was added or renamed since).
        return Layout([Column(column.width) for column in mapped], named=False, proved=False)
    return Layout(plan, named=True, proved=certain, extras=tuple(extras))


def reading(
    field: str, logged: MappedColumn, column: SchemaColumn, charsets: Mapping[int, str]
) -> Column:
    """How the value of an event's field is read."""
    width, kind = logged.width, logged.type
    unsigned = column.unsigned if logged.unsigned is None else logged.unsigned
    as_bytes = field in ("payload", "headers")
    if field == "id":
        if kind not in _INTEGERS:
            raise SourceError(f"the id column {column.name} is not an integer")
        return Column(width, kind=rows.INTEGER, argument=int(not unsigned))
    if field == "created_at":
        if kind in (DATETIME2, TIMESTAMP2):
            reader = rows.DATETIME2 if kind == DATETIME2 else rows.TIMESTAMP2
            return Column(width, kind=reader, argument=logged.meta)
    elif kind == JSON and as_bytes:
        return Column(width, kind=rows.JSON)
    elif kind in (VARCHAR, VAR_STRING, BLOB, STRING) and column.data_type in _DATA_TYPES:
        charset = _charset(logged, column, charsets)
        if charset == "binary" and kind == STRING:
            return Column(width, kind=rows.RAW_PADDED, argument=logged.meta)
        if charset in _PLAIN:
            return Column(width, kind=rows.RAW if as_bytes else rows.TEXT)
        codec = codec_of(charset)
        if codec is not None:
            return Column(width, kind=rows.RAW_CODEC if as_bytes else rows.TEXT_CODEC, codec=codec)
        return Column(width, kind=rows.READ_BACK, codec=f"character set {charset}")
    elif not as_bytes:
        text = reader_for(logged, column, charsets)
        if text is not None:
            return Column(width, kind=rows.READER, codec=_LABELS, reader=text)
    return Column(width, kind=rows.READ_BACK, codec=f"type {column.column_type or kind}")


def _charset(logged: MappedColumn, column: SchemaColumn, charsets: Mapping[int, str]) -> str:
    """The character set by the log, or by the schema where the log does not tell."""
    if logged.collation is not None:
        return charsets.get(logged.collation, "unknown")
    return column.charset or "binary"


def reading_extra(
    logged: MappedColumn, column: SchemaColumn, charsets: Mapping[int, str]
) -> Column:
    """How the value of an extra column is read: bytes, or the text that SELECT prints."""
    plan = reading("payload", logged, column, charsets)
    # The log does not know of the zeros that SELECT prints before a number.
    if plan.kind == rows.READ_BACK and "zerofill" not in column.column_type.lower():
        reader = reader_for(logged, column, charsets)
        if reader is not None:
            return Column(logged.width, kind=rows.READER, codec=_LABELS, reader=reader)
    return plan


def reader_for(
    logged: MappedColumn, column: SchemaColumn, charsets: Mapping[int, str]
) -> rows.Reader | None:
    """A reader of the column's text as SELECT prints it (a session in UTC), for the types that
    are not strings; None where the log alone cannot tell."""
    kind, meta = logged.type, logged.meta
    unsigned = column.unsigned if logged.unsigned is None else logged.unsigned
    simple: dict[int, rows.Reader] = {
        **dict.fromkeys(
            _INTEGERS, lambda buf, pos, width: values.integer_text(buf, pos, width, unsigned)
        ),
        NEWDECIMAL: lambda buf, pos, _: values.decimal_text(buf, pos, meta & 0xFF, meta >> 8),
        YEAR: lambda buf, pos, _: values.year_text(buf[pos]),
        DATE: lambda buf, pos, _: values.date_text(buf, pos),
        NEWDATE: lambda buf, pos, _: values.date_text(buf, pos),
        TIME2: lambda buf, pos, _: values.time2_text(buf, pos, meta),
        DATETIME2: lambda buf, pos, _: values.datetime2_text(buf, pos, meta),
        TIMESTAMP2: lambda buf, pos, _: values.timestamp2_text(buf, pos, meta),
    }
    if kind in simple:
        return simple[kind]
    if kind in (FLOAT, DOUBLE) and column.scale is None:
        if kind == FLOAT:
            return lambda buf, pos, _: values.float_text(unpack_from("<f", buf, pos)[0])
        return lambda buf, pos, _: values.double_text(unpack_from("<d", buf, pos)[0])
    labels = _labels_of(logged, column, charsets)
    if kind == ENUM and labels:
        return lambda buf, pos, width: _enum(
            labels, int.from_bytes(buf[pos : pos + width], "little")
        )
    if kind == SET and labels:
        return lambda buf, pos, width: _set(
            labels, int.from_bytes(buf[pos : pos + width], "little")
        )
    return None


def _labels_of(
    logged: MappedColumn, column: SchemaColumn, charsets: Mapping[int, str]
) -> Sequence[str]:
    """The labels by the log: those of the schema may have been changed since. Without names in the
    log there are no labels either, and the schema's have to do. Empty where they cannot be read."""
    if logged.labels is None:
        return column.labels
    charset = _charset(logged, column, charsets)
    codec = "utf-8" if charset in _PLAIN else codec_of(charset)
    if codec is None:
        return []
    try:
        return [label.decode(codec) for label in logged.labels]
    except UnicodeDecodeError:
        return []


def _enum(labels: Sequence[str], number: int) -> str:
    """0 is the empty text that a lax SQL mode stores for an unknown label."""
    if number > len(labels):
        raise _no_label(number, labels)
    return labels[number - 1] if number else ""


def _set(labels: Sequence[str], bits: int) -> str:
    if bits >> len(labels):
        raise _no_label(bits, labels)
    return ",".join(label for place, label in enumerate(labels) if bits >> place & 1)


def _no_label(number: int, labels: Sequence[str]) -> UnicodeDecodeError:
    """The schema has fewer labels now, and the log has none: as with text that cannot be decoded,
    the row is read back."""
    value = number.to_bytes(8, "little")
    return UnicodeDecodeError("labels", value, 0, 8, f"number {number} of {len(labels)}")


class LayoutResolver:
    """Gives the plan for a shape of the table, and the rows of shapes that are in doubt.

    Not thread-safe; called by the decoder, and rarely: once per shape and until it is proved.
    """

    def __init__(
        self,
        load_columns: Callable[[], Sequence[SchemaColumn]],
        load_charsets: Callable[[], Mapping[int, str]],
        find: Callable[[int], OutboxEvent | None],
        names: Mapping[str, str],
        extras: Sequence[str] = (),
        *,
        mariadb: bool,
    ) -> None:
        """``find`` reads a row of any status by its key, None where there is none."""
        self._mariadb = mariadb
        self._load_columns = load_columns
        self._load_charsets = load_charsets
        self._find = find
        self._names = names
        self._extras = extras
        self._patience = _VISIBLE_WITHIN_S
        self._said = False
        self.lost = 0
        """Rows of unknown shape that the table does not hold any more."""

    def resolve(self, shape: bytes) -> Layout:
        """Return the plan for a table map (its bytes from the schema's name on). Raises
        ``ValueError`` or ``IndexError`` for damaged bytes."""
        mapped = parse_table_map(shape, mariadb=self._mariadb)
        columns, charsets = self._load_columns(), self._load_charsets()
        return build(mapped, columns, self._names, charsets, self._extras)

    def doubtful(
        self, layout: Layout, buf: bytes, pos: int, end: int, committed: int = 0
    ) -> list[OutboxEvent | UnreadRow]:
        """Return the rows of an event whose layout is not proved. ``committed``: when, microseconds
        since 1970; 0 where that is not known.

        Names that came from today's schema are proved by the first row that SELECT gives back
        equal. A row of the table that was changed since proves nothing, and is read back. One that
        is not the same event shows that the names are wrong: then, as for a shape without names,
        each row is looked for by the numbers in it, and is the one that has both the key and the
        event id of a row of the table; it is read back. Rows that the table does not hold any more
        cannot be told and are counted as lost.
        """
        images = list(row_images(buf, pos, end, layout.widths))
        if layout.named:
            candidates: list[OutboxEvent | UnreadRow] = []
            decode_rows(buf, pos, end, layout, candidates)
            old = 0 < committed < (time.time() - _OLD_S) * 1e6
            verdict, changed = self._verdict(candidates, images, old)
            if verdict is not False:
                layout.proved = verdict is True
                return self._without_changed(candidates) if changed else candidates
            layout.named = False
        found: list[OutboxEvent | UnreadRow] = []
        for image in images:
            row = None
            for _ in self._tries():
                row = self._row_in(image)
                if row is not None:
                    break
            if row is None:
                self.lost += 1
                log.error(
                    "a row of the log cannot be told: the log does not name its columns, they are "
                    "not those of the table now, and the table does not hold it any more",
                    rows=self.lost,
                )
            else:
                found.append(UnreadRow(row.id, "the log does not name the columns of this row"))
        return found

    def _verdict(
        self,
        candidates: Sequence[OutboxEvent | UnreadRow],
        images: Sequence[Sequence[bytes | None]],
        old: bool,
    ) -> tuple[bool | None, bool]:
        """True: a row of the table is equal. False: one is not. None: the table holds none that
        tells, and whether it holds one that was changed since, or whose payload and headers have
        changed places."""
        waits = not old and any(isinstance(candidate, OutboxEvent) for candidate in candidates)
        for _ in self._tries() if waits else range(1):
            changed = False
            for candidate, image in list(zip(candidates, images, strict=True))[:10]:
                row = self._find(candidate.id)
                if row is None or (row != candidate and row.event_id.encode() not in image):
                    # Gone, or another row that was given its id (TRUNCATE), or it is no id.
                    row = self._row_in(image)
                if row is None:
                    continue
                self._patience = _VISIBLE_WITHIN_S
                if isinstance(candidate, UnreadRow):
                    return row.id == candidate.id, False
                if row == candidate:
                    return True, False
                if row[:_IDENTITY] != candidate[:_IDENTITY]:
                    return False, False
                changed = True
            if changed:
                return None, True
        if not self._said and any(isinstance(one, OutboxEvent) for one in candidates):
            self._said = True
            log.warning(
                "rows of the log are not in the table any more, and the log does not name its "
                "columns: each is looked for, some hundred a second at most; with "
                "binlog_row_metadata = FULL none has to be"
            )
        return None, False

    def _without_changed(
        self, candidates: Sequence[OutboxEvent | UnreadRow]
    ) -> list[OutboxEvent | UnreadRow]:
        """The rows, those that the table holds with other contents to be read back."""
        result: list[OutboxEvent | UnreadRow] = []
        for candidate in candidates:
            if isinstance(candidate, OutboxEvent):
                row = self._find(candidate.id)
                if row is not None and row != candidate and row.event_id == candidate.event_id:
                    result.append(UnreadRow(row.id, "the row was changed since"))
                    continue
            result.append(candidate)
        return result

    def _row_in(self, image: Sequence[bytes | None]) -> OutboxEvent | None:
        """The row of the table whose key and event id are among the values."""
        numbers = [value for value in image if value is not None and 0 < len(value) <= 8]
        for number in dict.fromkeys(int.from_bytes(value, "little") for value in numbers):
            row = self._find(number)
            if row is not None and row.event_id.encode() in image:
                self._patience = _VISIBLE_WITHIN_S
                return row
        return None

    def _tries(self) -> Iterator[None]:
        """Try again for a while: the log is a moment ahead of what other sessions see. After a
        vain wait the next ones are short: a history of deleted rows must not cost a second each.
        """
        deadline = time.monotonic() + self._patience
        yield
        while time.monotonic() < deadline:
            time.sleep(0.005)
            yield
        self._patience = 0.02


_VISIBLE_WITHIN_S: Final = 1.0
# What was committed so long ago is visible, or gone, whatever the clocks differ.
_OLD_S: Final = 60.0
# Fields that make an event the same one: id, event_id, aggregate_type, aggregate_id, event_type.
_IDENTITY: Final = 5


def row_images(
    buf: bytes, pos: int, end: int, widths: Sequence[int]
) -> Iterator[list[bytes | None]]:
    """The raw values of each row of a WRITE_ROWS body; None is NULL or not in the image."""
    count, pos = _length(buf, pos)
    if count != len(widths):
        raise ValueError(f"{count} columns where the table map has {len(widths)}")
    present = [bool(buf[pos + (i >> 3)] & (1 << (i & 7))) for i in range(count)]
    pos += (count + 7) // 8
    kept = [i for i in range(count) if present[i]]
    while pos < end:
        nulls, pos = pos, pos + (len(kept) + 7) // 8
        image: list[bytes | None] = [None] * count
        for place, index in enumerate(kept):
            if buf[nulls + (place >> 3)] & (1 << (place & 7)):
                continue
            width = widths[index]
            if width < 0:
                prefix = -width
                width = int.from_bytes(buf[pos : pos + prefix], "little")
                pos += prefix
            image[index] = buf[pos : pos + width]
            pos += width
        if pos > end:
            raise ValueError("a row reaches beyond the event")
        yield image
