"""Column layouts: from the table map of the log and the columns of the schema to a decoding plan.

The log gives each column's type and sizes; at the server's default metadata level it does not
give names. Names then come from the schema as it is now, and only if every column of the schema
has the type and the size that the log says: a layout that does not match is never guessed.
Format of table maps: MySQL source documentation, ``Table_map_event``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cdc_relay.binlog import rows
from cdc_relay.binlog.rows import SKIP, Layout
from cdc_relay.binlog.values import decimal_size
from cdc_relay.errors import SourceError
from cdc_relay.outbox import OutboxEvent

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

_UTF8: Final = ("utf8mb4", "utf8mb3", "utf8", "ascii")
# MySQL's names of character sets that Python's codecs read as MySQL does.
_CODECS: Final = {
    "latin1": "cp1252",
    "latin2": "iso8859_2",
    "latin5": "iso8859_9",
    "latin7": "iso8859_13",
    "greek": "iso8859_7",
    "hebrew": "iso8859_8",
    "cp1250": "cp1250",
    "cp1251": "cp1251",
    "cp1256": "cp1256",
    "cp1257": "cp1257",
    "koi8r": "koi8_r",
    "koi8u": "koi8_u",
    "ucs2": "utf_16_be",
    "utf16": "utf_16_be",
    "utf16le": "utf_16_le",
    "utf32": "utf_32_be",
}


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


@dataclass(frozen=True, slots=True)
class MappedColumn:
    """One column as a table map describes it."""

    type: int
    meta: int
    """Type-specific: bytes of a length prefix, fraction digits, maximum length, ..."""
    name: str | None
    """Only with ``binlog_row_metadata=FULL``."""

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


def parse_table_map(shape: bytes) -> list[MappedColumn]:
    """Return the columns of a table map, given its bytes from the schema's name on.

    Raises ``ValueError`` or ``IndexError`` for damaged bytes.
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
    names = _names(shape, pos, count)
    return [MappedColumn(k, m, n) for (k, m), n in zip(columns, names, strict=True)]


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
    width = {252: 2, 253: 3, 254: 8}[first]
    return int.from_bytes(buf[pos + 1 : pos + 1 + width], "little"), pos + 1 + width


_COLUMN_NAMES: Final = 4


def _names(shape: bytes, pos: int, count: int) -> Sequence[str | None]:
    while pos < len(shape):
        field = shape[pos]
        size, pos = _length(shape, pos + 1)
        if field == _COLUMN_NAMES:
            names: list[str | None] = []
            end = pos + size
            while pos < end:
                length, pos = _length(shape, pos)
                names.append(shape[pos : pos + length].decode())
                pos += length
            return names
        pos += size
    return [None] * count


def fits(mapped: MappedColumn, column: SchemaColumn) -> bool:
    """Whether a column of the log can be this column of the schema."""
    if mapped.type not in _DATA_TYPES.get(column.data_type, ()):
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


def build(
    mapped: Sequence[MappedColumn], schema: Sequence[SchemaColumn], names: Mapping[str, str]
) -> Layout:
    """Return the plan for rows of this shape.

    ``names`` gives the column name of each event field. Raises ``SourceError`` when the log names
    no columns and the schema's do not fit, or when a column of the event is missing.
    """
    by_name = {column.name.lower(): column for column in schema}
    if mapped and mapped[0].name is not None:
        columns = [by_name.get((column.name or "").lower()) for column in mapped]
        labels = [column.name or "" for column in mapped]
    else:
        if len(mapped) != len(schema) or not all(map(fits, mapped, schema)):
            raise SourceError(
                f"the binlog has rows of {len(mapped)} columns that are not the table's "
                f"{len(schema)} columns of today, and names none of them; "
                "SET GLOBAL binlog_row_metadata = FULL makes later rows readable"
            )
        columns = list(schema)
        labels = [column.name for column in schema]
    fields = {names[field].lower(): slot for slot, field in enumerate(OutboxEvent._fields)}
    widths, slots, kinds, arguments, codecs = [], [], [], [], []
    for mapped_column, column, label in zip(mapped, columns, labels, strict=True):
        slot = fields.pop(label.lower(), SKIP)
        kind, argument, codec = rows.READ_BACK, 0, ""
        if slot != SKIP:
            kind, argument, codec = _reading(OutboxEvent._fields[slot], mapped_column, column)
        widths.append(mapped_column.width)
        slots.append(slot)
        kinds.append(kind)
        arguments.append(argument)
        codecs.append(codec)
    fields.pop(names["headers"].lower(), None)
    if fields:
        raise SourceError(f"the table has no column {', '.join(sorted(fields))}")
    return Layout(widths, slots, kinds, arguments, codecs)


def _reading(field: str, mapped: MappedColumn, column: SchemaColumn | None) -> tuple[int, int, str]:
    """How the value of an event's field is read: kind, argument, codec or reason."""
    if column is None:
        return rows.READ_BACK, 0, "the column is not in the schema any more"
    signed = int("unsigned" not in column.column_type.lower())
    if field == "id":
        if mapped.type not in _INTEGERS:
            raise SourceError(
                f"the id column {column.name} is {column.column_type}, not an integer"
            )
        return rows.INTEGER, signed, ""
    if field == "created_at":
        if mapped.type == DATETIME2:
            return rows.DATETIME2, mapped.meta, ""
        if mapped.type == TIMESTAMP2:
            return rows.TIMESTAMP2, mapped.meta, ""
    elif mapped.type == JSON:
        if field in ("payload", "headers"):
            return rows.JSON, 0, ""
    elif mapped.type in (VARCHAR, VAR_STRING, BLOB) or (mapped.type == STRING and column.charset):
        return _text(field, column)
    elif mapped.type in _INTEGERS and field not in ("payload", "headers"):
        return rows.INTEGER_TEXT, signed, ""
    elif mapped.type == NEWDECIMAL and field not in ("payload", "headers"):
        return rows.DECIMAL_TEXT, (mapped.meta & 0xFF) << 8 | mapped.meta >> 8, ""
    return rows.READ_BACK, 0, f"{column.column_type} is read by SELECT"


def _text(field: str, column: SchemaColumn) -> tuple[int, int, str]:
    as_bytes = field in ("payload", "headers")
    if column.charset is None:  # VARBINARY and BLOB
        return (rows.RAW, 0, "") if as_bytes else (rows.TEXT, 0, "utf-8")
    if column.charset in _UTF8:
        return (rows.RAW, 0, "") if as_bytes else (rows.TEXT, 0, "utf-8")
    codec = _CODECS.get(column.charset)
    if codec is None:
        return rows.READ_BACK, 0, f"character set {column.charset} is read by SELECT"
    return (rows.RAW_CODEC if as_bytes else rows.TEXT_CODEC), 0, codec


class LayoutResolver:
    """Gives the plan for a shape. ``load_columns`` reads the schema's columns now.

    Not thread-safe; called by the decoder for shapes that it has not seen, so rarely.
    """

    def __init__(
        self, load_columns: Callable[[], Sequence[SchemaColumn]], names: Mapping[str, str]
    ) -> None:
        self._load_columns = load_columns
        self._names = names

    def resolve(self, shape: bytes) -> Layout:
        """Raises ``SourceError`` for a shape that cannot be named, ``ValueError`` for damage."""
        return build(parse_table_map(shape), self._load_columns(), self._names)
