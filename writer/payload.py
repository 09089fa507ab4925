"""The JSON form of payloads and headers.

=====================================  =====================================================
Python                                 JSON
=====================================  =====================================================
dict, list, tuple, str, int, bool      as ``json`` writes them; an int of more than 64 bits
                                       (MySQL's JSON would lose digits of it), a str with a lone
                                       surrogate, half a character, and keys that are the same as
                                       text (``1`` and ``"1"``) are refused
float                                  as ``json`` writes it; NaN and infinities are refused
dataclass, attrs class                 an object of its fields
pydantic model                         an object, as ``model_dump()`` gives it
msgspec Struct                         as ``msgspec.to_builtins`` gives it (renamed, tagged)
``Decimal``                            a string with all its digits: ``"12.50"``
aware ``datetime``                     RFC 3339 in UTC: ``"2026-03-01T09:30:00.000000Z"``
``date``                               ``"2026-03-01"``
``UUID``                               ``"0195d2c4-…"``
``Enum``                               the form of its value
bytes                                  base64 (RFC 4648, section 4): ``"AP8="``
anything else, a naive ``datetime``    refused, unless the outbox has a ``default`` for it
=====================================  =====================================================

The text is pure ASCII (``\\u`` escapes), so it survives a connection of any character set; MySQL's
JSON type keeps the characters, not the escapes.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, Final
from uuid import UUID

# The record's own headers (docs/guarantees.md); the relay would park a row that repeats one.
_RESERVED = ("id", "event_type", "aggregate_type", "aggregate_id", "occurred_at", "content-type")

Default = Callable[[Any], object]
"""What ``json.dumps`` calls a ``default``: a value without a form to one that has one; raises
``TypeError`` for what it does not know either."""


_SCALARS: Final = (bytes, bytearray, datetime, date, Decimal, UUID)


class Json:
    """Values to JSON text, in the forms of this module and those of ``default``."""

    def __init__(self, default: Default | None = None) -> None:
        self._default = default
        self._encode = json.JSONEncoder(
            default=self._form, allow_nan=False, separators=(",", ":")
        ).encode

    def text(self, value: object) -> str:
        """Return ``value`` as JSON text; raises ``TypeError`` or ``ValueError`` where it has no
        form."""
        try:
            return self._text(value)
        except RecursionError:
            raise ValueError("the value is nested too deeply for JSON") from None

    def _text(self, value: object) -> str:
        text = self._encode(value)
        if _MADE_KEY.search(text):
            json.loads(text, object_pairs_hook=_each_once)
        if _LONG_NUMBER.search(text):
            json.loads(text, parse_int=_within_64_bits)
        if "\\ud" in text:
            try:
                json.dumps(json.loads(text), ensure_ascii=False).encode()
            except UnicodeEncodeError:
                raise ValueError("a text holds half a character (a lone surrogate)") from None
        return text

    def payload(self, payload: object) -> str | bytes | None:
        """Return what is stored for ``payload``.

        None is SQL NULL (a tombstone in Kafka). A str is JSON text already, bytes are a finished
        value: both are stored as they are. All else becomes JSON text.
        """
        if payload is None or isinstance(payload, (str, bytes)):
            # A member of a str Enum is a value to encode, not JSON text.
            return self.text(payload) if isinstance(payload, Enum) else payload
        if isinstance(payload, (bytearray, memoryview)):
            return bytes(payload)
        return self.text(payload)

    def headers(self, headers: Mapping[str, object] | None) -> str | None:
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
            if "\0" in name:
                raise ValueError(f"headers: the name {name!r} holds a zero character")
        return self.text(dict(headers))

    def _form(self, value: object) -> object:
        if hasattr(type(value), "__struct_fields__"):
            # Whoever has a Struct has loaded msgspec. Scalars stay, for the forms below.
            msgspec: Any = sys.modules["msgspec"]
            return msgspec.to_builtins(value, builtin_types=_SCALARS, enc_hook=self._form)
        try:
            return _form(value)
        except TypeError:
            if self._default is None:
                raise
            return self._default(value)


def value_size(body: str | bytes, enough: int) -> int:
    """Return how many bytes the record's value will have at most; not exact up to ``enough``.

    MySQL prints a JSON column with a blank after each colon and comma and without ``\\u`` escapes,
    MariaDB gives the text as it came: what counts is the text with both.
    """
    if isinstance(body, bytes):
        return len(body)
    bound = len(body.encode()) + body.count(":") + body.count(",")
    if bound <= enough:
        return bound
    try:
        return len(json.dumps(json.loads(body), ensure_ascii=body.isascii()).encode())
    except (ValueError, RecursionError):  # no JSON, or none that MySQL takes: a TEXT column may
        return len(body.encode())


# Nineteen digits in a row: perhaps an integer that does not fit, perhaps digits in a string.
_LONG_NUMBER: Final = re.compile(r"\d{19}")


def _within_64_bits(digits: str) -> None:
    if not -(1 << 63) <= int(digits) < 1 << 64:
        raise ValueError(f"{digits} has more than 64 bits; give it as a str or a Decimal")


# A key that may have been a number, a bool or None, beside which its text may be a key as well.
_MADE_KEY: Final = re.compile(r'"(?:-?\d[-+.e\d]*|true|false|null)":')


def _each_once(pairs: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {key!r} is in one object twice: as text and as a number")
        seen.add(key)


def utc(moment: datetime) -> datetime:
    """Return ``moment`` in UTC; a naive one could mean any place and is refused."""
    if not isinstance(moment, datetime):
        raise TypeError(f"{moment!r} is not a datetime")
    if moment.tzinfo is None or moment.utcoffset() is None:
        raise ValueError(f"{moment!r} has no time zone; give an aware datetime")
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"{moment!r} is in no year from 1 to 9999 in UTC") from None


def _form(value: Any) -> object:
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
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, type):
        if dataclasses.is_dataclass(value):
            return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if callable(getattr(value, "model_dump", None)):
            return value.model_dump()
        if hasattr(type(value), "__attrs_attrs__"):
            return {field.name: getattr(value, field.name) for field in value.__attrs_attrs__}
    raise TypeError(f"{_kind(value)} has no JSON form: convert it, or give Outbox a default")


def _kind(value: object) -> str:
    return type(value).__name__
