"""MySQL's binary JSON to the text that MySQL prints for it, byte for byte.

Hot: pure functions on bytes, typed for mypyc, running unchanged as plain Python.

Layout of the value (MySQL source documentation, ``json_binary.h``): one type byte, then the value.
Objects and arrays hold a count, their size in bytes, then entries with offsets relative to the
start of the container; small containers use 2-byte numbers, large ones 4-byte numbers. Object
keys lie in the order in which MySQL prints them. The text form (``json_dom.cc``): ``", "`` and
``": "`` between parts, strings escaped as JSON asks and nothing more, doubles in the shortest
form that reads back equal, DECIMAL as a number, DATE, TIME and DATETIME as strings, every other
opaque value as ``"base64:type<N>:<data>"``.
"""

from __future__ import annotations

from binascii import b2a_base64
from json.encoder import encode_basestring
from math import isfinite
from struct import Struct
from typing import Final

from mypy_extensions import i64

from cdc_relay.binlog.values import decimal_text, double_text

_SMALL_OBJECT: Final = 0x00
_LARGE_OBJECT: Final = 0x01
_SMALL_ARRAY: Final = 0x02
_LARGE_ARRAY: Final = 0x03
_LITERAL: Final = 0x04
_INT16: Final = 0x05
_UINT16: Final = 0x06
_INT32: Final = 0x07
_UINT32: Final = 0x08
_INT64: Final = 0x09
_UINT64: Final = 0x0A
_DOUBLE: Final = 0x0B
_STRING: Final = 0x0C
_OPAQUE: Final = 0x0F

# Field types of opaque values (``enum_field_types``).
_TIMESTAMP: Final = 7
_DATE: Final = 10
_TIME: Final = 11
_DATETIME: Final = 12
_NEWDECIMAL: Final = 246

# The server refuses deeper documents (JSON_DOCUMENT_MAX_DEPTH); damaged bytes must not recurse on.
_MAX_DEPTH: Final = 100

_LITERALS: Final = ("null", "true", "false")

# Documents of one outbox share their keys: the text before each value, by the bytes that hold the
# object's keys (their entries, then their names), is made once and kept.
_OBJECTS: Final[dict[bytes, list[str]]] = {}
_MAX_OBJECTS: Final = 1000
_MAX_SHAPE: Final = 2048

_NO_NAMES: Final[list[str]] = []

# Hundredths as they follow the point: "0", "01", ... "1", ... "99".
_CENTS: Final = [f"{n:02d}".rstrip("0") or "0" for n in range(100)]

# Compiled code finds a Final of its own module without a look-up.
_double_at: Final = Struct("<d").unpack_from
_quote: Final = encode_basestring


def json_text(buf: bytes, start: i64, end: i64) -> bytes:
    """Return the text of the binary JSON value in ``buf[start:end]``, as UTF-8 bytes.

    An empty value (``start == end``) is JSON null: the server logs it so when an invalid value
    was stored under a lax SQL mode. Raises ``ValueError`` for bytes that are not such a value.
    """
    if start == end:
        return b"null"
    parts: list[str] = []
    try:
        _value(parts, buf, buf[start], start + 1, end, 0)
    except (IndexError, OverflowError) as error:
        raise ValueError(f"damaged JSON value: {error}") from None
    text = "".join(parts)
    result = text.encode("latin-1")
    if not text.isascii():
        result.decode()  # only looks whether it is UTF-8
    return result


def _value(parts: list[str], buf: bytes, kind: i64, pos: i64, end: i64, depth: i64) -> None:
    if kind == _STRING:
        length: i64 = 0
        shift: i64 = 0
        while True:
            byte: i64 = buf[pos]
            pos += 1
            length |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 28:
                raise ValueError("damaged JSON value: length of a string")
        if pos + length > end:
            raise ValueError("damaged JSON value: a string reaches beyond its end")
        # A character per byte: what has to be escaped is ASCII, the rest goes through as it is.
        parts.append(_quote(buf[pos : pos + length].decode("latin-1")))
    elif kind <= _LARGE_ARRAY:
        _container(parts, buf, kind, pos, end, depth + 1)
    elif kind == _LITERAL:
        parts.append(_LITERALS[buf[pos]])
    elif kind == _DOUBLE:
        _bound(pos + 8, end)
        parts.append(_double(_double_at(buf, pos)[0]))
    elif kind == _OPAQUE:
        _opaque(parts, buf, pos, end)
    else:
        parts.append(str(_integer(buf, kind, pos, end)))


def _bound(pos: i64, end: i64) -> None:
    if pos > end:
        raise ValueError("damaged JSON value: it reaches beyond its end")


def _integer(buf: bytes, kind: i64, pos: i64, end: i64) -> int:
    low: i64
    if kind == _INT16 or kind == _UINT16:
        _bound(pos + 2, end)
        low = buf[pos] | buf[pos + 1] << 8
        if kind == _INT16 and low >= 0x8000:
            low -= 0x10000
        return low
    if kind == _INT32 or kind == _UINT32:
        _bound(pos + 4, end)
        low = _u32(buf, pos)
        if kind == _INT32 and low >= 0x80000000:
            low -= 0x100000000
        return low
    if kind == _INT64 or kind == _UINT64:
        _bound(pos + 8, end)
        return int.from_bytes(buf[pos : pos + 8], "little", signed=kind == _INT64)
    raise ValueError(f"damaged JSON value: unknown type {kind}")


def _u16(buf: bytes, pos: i64) -> i64:
    low: i64 = buf[pos]
    high: i64 = buf[pos + 1]
    return low | high << 8


def _u32(buf: bytes, pos: i64) -> i64:
    a: i64 = buf[pos]
    b: i64 = buf[pos + 1]
    c: i64 = buf[pos + 2]
    d: i64 = buf[pos + 3]
    return a | b << 8 | c << 16 | d << 24


def _container(parts: list[str], buf: bytes, kind: i64, base: i64, end: i64, depth: i64) -> None:
    if depth > _MAX_DEPTH:
        raise ValueError("damaged JSON value: nested too deeply")
    large = kind == _LARGE_OBJECT or kind == _LARGE_ARRAY
    is_object = kind == _SMALL_OBJECT or kind == _LARGE_OBJECT
    width: i64 = 4 if large else 2
    _bound(base + 2 * width, end)
    count: i64 = _u32(buf, base) if large else _u16(buf, base)
    size: i64 = _u32(buf, base + width) if large else _u16(buf, base + width)
    stop: i64 = base + size
    keys: i64 = base + 2 * width
    values: i64 = keys
    if is_object:
        values += count * (width + 2)
    if stop > end or values + count * (width + 1) > stop:
        raise ValueError("damaged JSON value: a container reaches beyond its end")
    if count == 0:
        parts.append("{}" if is_object else "[]")
        return
    before = _before(buf, base, keys, count, large, stop) if is_object else _NO_NAMES
    most: i64 = len(parts) + 2 * size
    index: i64 = 0
    while index < count:
        if len(parts) > most:
            # Values lie apart from each other: damage that shares them would double at each level.
            raise ValueError("damaged JSON value: more values than bytes")
        if is_object:
            parts.append(before[index])
        else:
            parts.append(", " if index else "[")
        entry: i64 = values + index * (width + 1)
        child: i64 = buf[entry]
        a: i64 = buf[entry + 1]
        b: i64 = buf[entry + 2]
        low: i64 = a | b << 8
        # Values that fit into the offset's own bytes stand there.
        if child == _LITERAL:
            parts.append(_LITERALS[a])
        elif child == _INT16:
            parts.append(str(low - 0x10000 if low >= 0x8000 else low))
        elif child == _UINT16 or (large and (child == _INT32 or child == _UINT32)):
            parts.append(str(_integer(buf, child, entry + 1, stop)))
        else:
            if large:
                low = _u32(buf, entry + 1)
            at: i64 = base + low
            _bound(at + 1, stop)
            length: i64 = buf[at]
            if child == _STRING and length < 0x80 and at + length < stop:
                parts.append(_quote(buf[at + 1 : at + 1 + length].decode("latin-1")))
            else:
                _value(parts, buf, child, at, stop, depth)
        index += 1
    parts.append("}" if is_object else "]")


def _before(buf: bytes, base: i64, keys: i64, count: i64, large: bool, stop: i64) -> list[str]:
    """The text before each value of an object: brace or comma, the key, the colon."""
    if large:
        return _names(buf, base, keys, count, 4, base, stop)
    values: i64 = keys + 4 * count
    first: i64 = base + _u16(buf, keys)
    last: i64 = base + _u16(buf, values - 4) + _u16(buf, values - 2)
    if first > last or last > stop:
        raise ValueError("damaged JSON value: keys that reach beyond its end")
    if last - first + values - keys > _MAX_SHAPE:
        return _names(buf, base, keys, count, 2, first, last)
    shape = buf[keys:values] + buf[first:last]
    found = _OBJECTS.get(shape)
    if found is None or len(found) != count:
        found = _names(buf, base, keys, count, 2, first, last)
        if len(_OBJECTS) >= _MAX_OBJECTS:
            _OBJECTS.clear()
        _OBJECTS[shape] = found
    return found


def _names(
    buf: bytes, base: i64, keys: i64, count: i64, width: i64, first: i64, last: i64
) -> list[str]:
    result: list[str] = []
    comma = "{"
    index: i64 = 0
    while index < count:
        entry: i64 = keys + index * (width + 2)
        key: i64 = base + (_u16(buf, entry) if width == 2 else _u32(buf, entry))
        length: i64 = _u16(buf, entry + width)
        if key < first or key + length > last:
            raise ValueError("damaged JSON value: a key that is not among the keys")
        result.append(comma + _quote(buf[key : key + length].decode("latin-1")) + ": ")
        comma = ", "
        index += 1
    return result


def _double(value: float) -> str:
    """Return ``value`` as MySQL prints it inside JSON: shortest form that reads back equal;
    plain notation where the decimal point falls between 14 zeros before and 15 digits after
    (``my_gcvt``), ``.0`` appended to whole numbers."""
    magnitude = -value if value < 0 else value
    if 0.1 <= magnitude < 1e12:
        # Amounts of money. Division rounds correctly, so whole / 100 reads back as value; a
        # decimal of 15 digits or less is the only one of that length that does.
        whole: i64 = int(magnitude * 100.0 + 0.5)
        if float(whole) / 100.0 == magnitude:
            cents: i64 = whole % 100
            sign = "-" if value < 0 else ""
            return f"{sign}{whole // 100}.{_CENTS[cents]}"
    if 1e-4 <= magnitude < 1e15:
        return repr(value)
    if not isfinite(value):
        raise ValueError("damaged JSON value: a number that is not finite")
    text = double_text(value)
    return text if "." in text or "e" in text else text + ".0"


def _opaque(parts: list[str], buf: bytes, pos: i64, end: i64) -> None:
    kind: i64 = buf[pos]
    pos += 1
    length: i64 = 0
    shift: i64 = 0
    while True:
        byte: i64 = buf[pos]
        pos += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 28:
            raise ValueError("damaged JSON value: length of an opaque value")
    _bound(pos + length, end)
    data = buf[pos : pos + length]
    if kind == _NEWDECIMAL:
        if length < 2:
            raise ValueError("damaged JSON value: DECIMAL")
        parts.append(decimal_text(data, 2, data[0], data[1]))
    elif kind == _DATE or kind == _DATETIME or kind == _TIMESTAMP:
        parts.append(f'"{_packed_datetime(data, kind == _DATE)}"')
    elif kind == _TIME:
        parts.append(f'"{_packed_time(data)}"')
    else:
        parts.append(f'"base64:type{kind}:{_base64(data)}"')


def _base64(data: bytes) -> str:
    """The server breaks base64 into lines of 76 characters; a line break in JSON is ``\\n``."""
    lines = [
        b2a_base64(data[at : at + 57], newline=False).decode() for at in range(0, len(data), 57)
    ]
    return "\\n".join(lines)


def _packed(data: bytes) -> int:
    if len(data) != 8:
        raise ValueError("damaged JSON value: a time that is not 8 bytes")
    return int.from_bytes(data, "little", signed=True)


def _packed_datetime(data: bytes, date_only: bool) -> str:
    packed = abs(_packed(data))
    micros = packed & 0xFFFFFF
    packed >>= 24
    second, minute, hour = packed & 63, packed >> 6 & 63, packed >> 12 & 31
    day, month = packed >> 17 & 31, packed >> 22
    year, month = divmod(month, 13)
    text = f"{year:04d}-{month:02d}-{day:02d}"
    return text if date_only else f"{text} {hour:02d}:{minute:02d}:{second:02d}.{micros:06d}"


def _packed_time(data: bytes) -> str:
    packed = _packed(data)
    sign = "-" if packed < 0 else ""
    packed = abs(packed)
    micros = packed & 0xFFFFFF
    packed >>= 24
    second, minute, hour = packed & 63, packed >> 6 & 63, packed >> 12 & 1023
    return f"{sign}{hour:02d}:{minute:02d}:{second:02d}.{micros:06d}"
