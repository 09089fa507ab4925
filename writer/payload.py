"""The JSON form of payloads and headers.

=====================================  =====================================================
Python                                 JSON
=====================================  =====================================================
dict, list, tuple, str, int, bool      as ``json`` writes them; an int of more than 64 bits is
                                       refused (MySQL's JSON would lose digits of it)
float                                  as ``json`` writes it; NaN and infinities are refused
dataclass, pydantic model              an object of its fields
``Decimal``                            a string with all its digits: ``"12.50"``
aware ``datetime``                     RFC 3339 in UTC: ``"2026-03-01T09:30:00.000000Z"``
``date``                               ``"2026-03-01"``
``UUID``                               ``"0195d2c4-…"``
``Enum``                               the form of its value
anything else, a naive ``datetime``    refused
=====================================  =====================================================

The text is pure ASCII (``\\u`` escapes), so it survives a connection of any character set; MySQL's
JSON type keeps the characters, not the escapes.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from uuid import UUID

# The record's own headers (docs/guarantees.md); the relay would park a row that repeats one.
_RESERVED = ("id", "event_type", "aggregate_type", "aggregate_id", "occurred_at", "content-type")


def encode_payload(payload: object) -> str | bytes | None:
    """Return what is stored for ``payload``.

    None is SQL NULL (a tombstone in Kafka). A str is JSON text already, bytes are a finished
    message for a BLOB column: both are stored as they are. All else becomes JSON text; raises
    ``TypeError`` or ``ValueError`` for what has no form above.
    """
    if payload is None or isinstance(payload, (str, bytes)):
        # A member of a str Enum is a value to encode, not JSON text.
        return to_json(payload) if isinstance(payload, Enum) else payload
    if isinstance(payload, (bytearray, memoryview)):
        return bytes(payload)
    return to_json(payload)


def encode_headers(headers: Mapping[str, object] | None) -> str | None:
    """Return the JSON object for ``headers``; None is SQL NULL."""
    if headers is None:
        return None
    if not isinstance(headers, Mapping):
        raise TypeError(f"headers must be a mapping of names to values, not {_kind(headers)}")
    for name in headers:
        if not isinstance(name, str):
            raise TypeError(f"headers: the name {name!r} is not a str")
        if name in _RESERVED:
            raise ValueError(f"headers: {name!r} is a header of the record's own")
    return to_json(dict(headers))


def to_json(value: object) -> str:
    """Return ``value`` as JSON text in the forms of this module."""
    text = json.dumps(value, default=_form, allow_nan=False, separators=(",", ":"))
    if _LONG_NUMBER.search(text):
        json.loads(text, parse_int=_within_64_bits)
    return text


# Nineteen digits in a row: perhaps an integer that does not fit, perhaps digits in a string.
_LONG_NUMBER = re.compile(r"\d{19}")


def _within_64_bits(digits: str) -> None:
    if not -(1 << 63) <= int(digits) < 1 << 64:
        raise ValueError(f"{digits} has more than 64 bits; give it as a str or a Decimal")


def utc(moment: datetime) -> datetime:
    """Return ``moment`` in UTC; a naive one could mean any place and is refused."""
    if not isinstance(moment, datetime):
        raise TypeError(f"{moment!r} is not a datetime")
    if moment.tzinfo is None or moment.utcoffset() is None:
        raise ValueError(f"{moment!r} has no time zone; give an aware datetime")
    return moment.astimezone(UTC)


def _form(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (Decimal, UUID)):
        if isinstance(value, Decimal) and not value.is_finite():
            raise ValueError(f"{value} is not a JSON number")
        return str(value)
    if isinstance(value, datetime):
        return utc(value).isoformat(timespec="microseconds").replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    dump = getattr(value, "model_dump", None)
    if callable(dump) and not isinstance(value, type):
        return dump()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{_kind(value)} has no JSON form; see writer.payload")


def _kind(value: object) -> str:
    return type(value).__name__
