"""``Outbox``: the INSERT of outbox events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Final, NamedTuple, NotRequired, TypeAlias, TypedDict, Unpack
from uuid import UUID

from sqlalchemy import MetaData, Table

from cdc_relay.errors import EventTooLargeError
from cdc_relay.outbox import DEFAULT_TABLE, SEQUENCE_TABLE, beside, outbox_table

from . import trace
from .ids import uuid7
from .insert import KEYS, Insert, Names
from .payload import Default, Json, utc, value_size
from .sequences import HEADER, Sequences
from .targets import AsyncTarget, Target, Transaction, run_sync, savepoint, transaction

# A statement up to this many bytes goes out unasked; for more, the server is asked what it takes.
_UNASKED: Final = 500_000
# Larger statements are no faster, and the server keeps each in memory as a whole.
_INSERT_SIZE: Final = 4_000_000
_INSERT_ROWS: Final = 1000
_STATEMENT_SIZE: Final = 1000
"""Bytes of a statement beside its rows, generously."""
_ROW_SIZE: Final = 500
"""Bytes of a row beside payload and headers, generously."""
_SAVEPOINT: Final = "cdc_relay_add_all"

# What a driver sends as it is, for columns of the service's own.
_OWN: Final = (str, int, float, bytes, Decimal, datetime, date, time, timedelta)

Text: TypeAlias = str | Enum
Id: TypeAlias = str | int | UUID | Enum


class EventInfo(NamedTuple):
    """What a serializer is told about the event whose payload it is given."""

    event_id: str
    aggregate_type: str
    aggregate_id: str
    event_type: str


Serializer: TypeAlias = Callable[[Any, EventInfo], "bytes | str | None"]
"""Turns a payload into what is stored; ``writer.registry`` has one for a schema registry."""


class EventFields(TypedDict):
    """One event: the keywords of ``Outbox.add``.

    ``aggregate_id``, the Kafka key, may be a str, int, UUID or Enum and is stored as text.
    ``payload``: see ``writer.payload``; None is a tombstone, a str is JSON text already (JSON's
    null is ``"null"``), bytes are a finished value. ``headers`` go to the record's headers.
    ``event_id`` is a new UUIDv7, and ``occurred_at``, an aware datetime, the database's clock
    unless given. ``aggregate_seq`` is the caller's own number of the event in its aggregate (its
    version), for consumers that look for gaps. ``columns`` are values for columns that the service
    added to the table.
    """

    aggregate_type: Text
    aggregate_id: Id
    event_type: Text
    payload: Any
    headers: NotRequired[Mapping[str, object] | None]
    event_id: NotRequired[str | UUID | None]
    occurred_at: NotRequired[datetime | None]
    aggregate_seq: NotRequired[int | None]
    columns: NotRequired[Mapping[str, object] | None]


_FIELDS: Final = EventFields.__annotations__.keys()
_REQUIRED: Final = frozenset(("aggregate_type", "aggregate_id", "event_type", "payload"))


class _Row(NamedTuple):
    info: EventInfo
    values_sql: str
    parameters: list[object]
    headers: Mapping[str, object] | None
    numbered: bool
    size: int


class Outbox:
    """Writes events into one outbox table, in the caller's transaction.

    Never commits, never opens a connection, and keeps nothing between calls: the event is a row
    at once, and a rollback, of a savepoint as well, takes it away. Threads and tasks may share an
    instance.
    """

    def __init__(
        self,
        table: str | Table = DEFAULT_TABLE,
        *,
        names: Names | None = None,
        serializer: Serializer | None = None,
        default: Default | None = None,
        max_payload_bytes: int | None = None,
        sequences: bool | str | Table = False,
    ) -> None:
        """``table`` is a name (``table`` or ``schema.table``) or a SQLAlchemy ``Table``: that of
        ``outbox_table(metadata)`` for a session with several binds, or a reflected one where an
        older table differs from ours (lengths, no ``headers``, a BLOB payload).

        ``names`` are other names of its columns, ours first (``{"event_type": "kind"}``), or
        ``"debezium"`` for a table such as Debezium's outbox router expects.

        ``serializer`` makes the payload instead of JSON. ``default`` gives JSON a form for types
        of your own, as that of ``json.dumps`` does. ``max_payload_bytes`` refuses larger payloads
        before anything is written; set it below the topic's ``max.message.bytes`` with room for
        key and headers. ``sequences`` numbers the events of each aggregate (header
        ``aggregate_seq``): True for the table ``outbox_sequence`` beside it, or that table.
        """
        if isinstance(table, str) and names:
            raise ValueError(
                f"names: what else {table!r} has cannot be told from its name: give Outbox the "
                f"table, Table({table!r}, MetaData(), autoload_with=engine)"
            )
        if max_payload_bytes is not None and max_payload_bytes < 1:
            raise ValueError(f"max_payload_bytes must be at least 1, not {max_payload_bytes}")
        self._table = outbox_table(MetaData(), table) if isinstance(table, str) else table
        self._json = Json(default)
        self._serializer = serializer
        self._limit = max_payload_bytes
        self._sequences: Sequences | None = None
        if sequences is not False:
            self._sequences = Sequences(
                beside(self._table, SEQUENCE_TABLE) if sequences is True else sequences
            )
        self._insert = Insert(self._table, names)
        if self._sequences is not None and not self._insert.has_headers:
            raise ValueError(f"table {self._table.name} has no column headers for aggregate_seq")

    def add(
        self,
        target: Target,
        *,
        aggregate_type: Text,
        aggregate_id: Id,
        event_type: Text,
        payload: Any,
        headers: Mapping[str, object] | None = None,
        event_id: str | UUID | None = None,
        occurred_at: datetime | None = None,
        aggregate_seq: int | None = None,
        columns: Mapping[str, object] | None = None,
    ) -> str:
        """Insert one event in the transaction of ``target`` and return its event id.

        ``target`` is a SQLAlchemy ``Session`` or ``Connection`` or a DB-API connection (PyMySQL,
        mysqlclient, MySQL Connector, Django's ``connection``). A session is flushed first (not
        within ``no_autoflush``). The fields are those of ``EventFields``.

        Raises ``NotInTransactionError`` where the target would commit by itself, ``TypeError``,
        ``ValueError`` or ``EventTooLargeError`` for a wrong field, all before anything is
        written; the driver's own errors (a duplicate event id, for one) pass through.
        """
        if trace.active():
            event: EventFields = {
                "aggregate_type": aggregate_type,
                "aggregate_id": aggregate_id,
                "event_type": event_type,
                "payload": payload,
                "headers": headers,
                "event_id": uuid7() if event_id is None else event_id,
                "occurred_at": occurred_at,
                "aggregate_seq": aggregate_seq,
                "columns": columns,
            }
            return self._write_traced(target, [event], "outbox.add")[0]
        row = self._row(
            aggregate_type,
            aggregate_id,
            event_type,
            payload,
            headers,
            event_id,
            occurred_at,
            aggregate_seq,
            columns,
        )
        inside = transaction(target, self._table, "outbox.add")
        if row.size > _UNASKED or self._sequences is not None:
            self._insert_rows(inside, [row])
        else:  # the common case, without a detour
            inside.insert(self._insert.head + row.values_sql, row.parameters)
        return row.info.event_id

    def add_all(self, target: Target, events: Iterable[EventFields]) -> list[str]:
        """Insert ``events`` in their order, up to 1,000 in one INSERT, and return their event ids.

        All are checked before the first is written; an INSERT never exceeds the server's
        ``max_allowed_packet``. All are written or, where it raises, none: several INSERTs are
        within a savepoint. Otherwise as ``add``.
        """
        events = [_checked(event) for event in events]
        if not events:
            return []
        if trace.active():
            return self._write_traced(target, events, "outbox.add_all")
        rows = [self._row_of(event) for event in events]
        self._insert_rows(transaction(target, self._table, "outbox.add_all"), rows)
        return [row.info.event_id for row in rows]

    async def add_async(self, target: AsyncTarget, **event: Unpack[EventFields]) -> str:
        """``add`` for an ``AsyncSession`` or ``AsyncConnection``."""
        return await run_sync(target, "outbox.add", lambda inner: self.add(inner, **event))

    async def add_all_async(self, target: AsyncTarget, events: Iterable[EventFields]) -> list[str]:
        """``add_all`` for an ``AsyncSession`` or ``AsyncConnection``."""
        return await run_sync(target, "outbox.add_all", lambda inner: self.add_all(inner, events))

    def _write_traced(self, target: Target, events: Sequence[EventFields], call: str) -> list[str]:
        """In one producer span; its context goes into the headers of events that bring none."""
        first = events[0]
        span = trace.create_span(
            first.get("aggregate_type"),
            events=len(events),
            event_id=first.get("event_id") if len(events) == 1 else None,
        )
        with span as carrier:
            rows = [self._row_of(self._with_context(event, carrier)) for event in events]
            self._insert_rows(transaction(target, self._table, call), rows)
        return [row.info.event_id for row in rows]

    def _with_context(self, event: EventFields, carrier: Mapping[str, str]) -> EventFields:
        headers = event.get("headers")
        if not carrier or not self._insert.has_headers or "traceparent" in (headers or ()):
            return event
        fields = event.copy()
        fields["headers"] = {**carrier, **(headers or {})}
        return fields

    # --- rows to statements --------------------------------------------------------------------

    def _insert_rows(self, inside: Transaction, rows: list[_Row]) -> None:
        size = _STATEMENT_SIZE + sum([row.size for row in rows])
        room = size
        if size > _UNASKED:
            room = inside.number("SELECT @@max_allowed_packet")
            if inside.hexadecimal:
                room //= 2
            self._refuse_too_large(rows, room)
            room = min(room, _INSERT_SIZE)
        chunks = list(_chunks(rows, room))
        # One INSERT is all or nothing by itself, but for the numbers of several events.
        several = len(chunks) > 1 or (self._sequences is not None and len(rows) > 1)
        with savepoint(inside, _SAVEPOINT) if several else nullcontext():
            if self._sequences is not None:
                self._number(self._sequences, inside, rows)
            for chunk in chunks:
                values = ", ".join([row.values_sql for row in chunk])
                inside.insert(
                    self._insert.head + values, [part for row in chunk for part in row.parameters]
                )

    def _refuse_too_large(self, rows: list[_Row], packet: int) -> None:
        for row in rows:
            if row.size + _STATEMENT_SIZE > packet:
                raise EventTooLargeError(
                    f"{_named(row.info)} needs {row.size} bytes of SQL; "
                    f"with the server's max_allowed_packet a statement takes {packet}"
                )

    def _number(self, sequences: Sequences, inside: Transaction, rows: list[_Row]) -> None:
        without = [row for row in rows if not row.numbered]
        numbers = sequences.take(
            inside, [(row.info.aggregate_type, row.info.aggregate_id) for row in without]
        )
        for row, number in zip(without, numbers, strict=True):
            # The headers' place in the statement: behind the keys and the payload.
            text = self._json.headers({**(row.headers or {}), HEADER: number})
            row.parameters[len(KEYS) + 1] = text

    # --- one event to a row --------------------------------------------------------------------

    def _row_of(self, event: EventFields) -> _Row:
        if not _REQUIRED <= event.keys() <= _FIELDS:
            raise TypeError(_wrong_fields(event))
        return self._row(**event)

    def _row(
        self,
        aggregate_type: Text,
        aggregate_id: Id,
        event_type: Text,
        payload: Any,
        headers: Mapping[str, object] | None = None,
        event_id: str | UUID | None = None,
        occurred_at: datetime | None = None,
        aggregate_seq: int | None = None,
        columns: Mapping[str, object] | None = None,
    ) -> _Row:
        if aggregate_id is None:
            raise ValueError(
                "aggregate_id is None: where the database gives the object its id, call "
                "session.flush() before adding the event"
            )
        info = EventInfo(
            uuid7() if event_id is None else self._event_id(event_id),
            self._text("aggregate_type", aggregate_type),
            self._text("aggregate_id", aggregate_id),
            self._text("event_type", event_type),
        )
        body = self._body(payload, info)
        try:
            return self._filled(info, body, headers, occurred_at, aggregate_seq, columns)
        except (TypeError, ValueError) as error:
            error.add_note(f"in {_named(info)}")
            raise

    def _filled(
        self,
        info: EventInfo,
        body: str | bytes | None,
        headers: Mapping[str, object] | None,
        occurred_at: datetime | None,
        aggregate_seq: int | None,
        columns: Mapping[str, object] | None,
    ) -> _Row:
        parameters: list[object] = [*info, body]
        size = _ROW_SIZE + _escaped(body)
        if not "".join(info).isascii():  # eight digits for a character
            size += 4 * _ROW_SIZE
        if aggregate_seq is not None:
            headers = {**(headers or {}), HEADER: _whole_number(aggregate_seq)}
        insert = self._insert
        if insert.has_headers:
            text = None if headers is None else self._json.headers(headers)
            parameters.append(text)
            size += _escaped(text)
        elif headers is not None:
            raise ValueError(f"table {self._table.name} has no column headers to keep them in")
        if occurred_at is not None:
            if not insert.has_time:
                raise ValueError(f"table {self._table.name} has no column created_at")
            parameters.append(utc(occurred_at).strftime("%Y-%m-%d %H:%M:%S.%f"))
        if insert.defaults:
            columns = {**self._own_defaults(columns or {}), **(columns or {})}
        if columns:
            own = self._own(columns)
            parameters += own
            size += sum([_escaped(one if isinstance(one, bytes) else str(one)) for one in own])
        values_sql = insert.usual
        if columns or occurred_at is not None:
            values_sql = insert.values(timed=occurred_at is not None, own=columns or ())
        return _Row(info, values_sql, parameters, headers, aggregate_seq is not None, size)

    def _own(self, columns: Mapping[str, object]) -> list[object]:
        """The parameters of the service's own columns, in the statement's order."""
        unknown = columns.keys() - set(self._insert.own)
        if unknown:
            raise ValueError(
                f"columns: table {self._table.name} has no column {min(unknown)!r} of the "
                "service's own (give Outbox the table as it is, reflected or declared)"
            )
        return [
            self._own_value(name, columns[name]) for name in self._insert.own if name in columns
        ]

    def _own_defaults(self, given: Mapping[str, object]) -> dict[str, object]:
        """What SQLAlchemy would give for the service's columns that the event does not."""
        values: dict[str, object] = {}
        for name, default in self._insert.defaults.items():
            if name in given:
                continue
            if default.is_scalar:
                values[name] = default.arg
            elif default.is_callable:
                values[name] = default.arg(None)  # no context: the row is not SQLAlchemy's
            else:
                raise ValueError(
                    f"columns: the default of {name!r} is an SQL expression of SQLAlchemy's: make "
                    "it a server_default, or give a value"
                )
        return values

    def _own_value(self, name: str, value: object) -> object:
        if isinstance(value, Enum):
            value = value.value
        if value is None or isinstance(value, _OWN):
            return value
        if isinstance(value, UUID):
            return str(value)
        if isinstance(value, (bytearray, memoryview)):
            return bytes(value)
        if isinstance(value, (dict, list)):
            return self._json.text(value)
        # What a driver makes of other things is seldom what was meant: of a tuple, several values.
        raise TypeError(f"columns: {name} cannot be a {type(value).__name__}")

    def _body(self, payload: object, info: EventInfo) -> str | bytes | None:
        body: str | bytes | None
        try:
            if self._serializer is not None and payload is not None:
                body = self._serializer(payload, info)
            else:
                body = self._json.payload(payload)
        except (TypeError, ValueError) as error:
            error.add_note(f"in the payload of {_named(info)}")
            raise
        if isinstance(body, str):
            if not body.isascii():
                _refuse_half_characters(f"payload of {_named(info)}", body)
            if self._insert.keeps_bytes:
                body = body.encode()
        elif body is not None and not self._insert.keeps_bytes:
            try:
                body = body.decode()
            except UnicodeDecodeError:
                raise ValueError(
                    f"payload of {_named(info)} is bytes that are not UTF-8 text, and the column "
                    "takes text: make it outbox_table(metadata, payload='binary') and give that "
                    "table to Outbox"
                ) from None
        if self._limit is not None and body is not None:
            size = value_size(body, self._limit)
            if size > self._limit:
                raise EventTooLargeError(
                    f"payload of {_named(info)} has {size} bytes; max_payload_bytes is "
                    f"{self._limit}"
                )
        return body

    def _event_id(self, value: object) -> str:
        text = self._text("event_id", value)
        if text.endswith(" "):
            # To a unique index it is the same as one without.
            raise ValueError(f"event_id {text!r} ends with a blank")
        return text

    def _text(self, name: str, value: object) -> str:
        """``value`` as the text of column ``name``, checked against the column's length."""
        if type(value) is not str:
            value = _plain(value, name)
        if not value:
            raise ValueError(f"{name} is empty")
        if not value.isascii():
            _refuse_half_characters(name, value)
        longest = self._insert.lengths[name]
        if longest is not None and len(value) > longest:
            raise ValueError(f"{name} has {len(value)} characters; the column takes {longest}")
        return value


def _checked(event: EventFields) -> EventFields:
    if not isinstance(event, Mapping):
        raise TypeError(f"an event is a mapping of its fields, not {type(event).__name__}")
    return event


def _wrong_fields(event: Mapping[str, object]) -> str:
    unknown = event.keys() - _FIELDS
    if unknown:
        return f"an event has no field {min(unknown)!r}"
    return f"an event needs the field {min(_REQUIRED - event.keys())!r}"


def _plain(value: object, name: str) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, UUID) or (type(value) is int and name == "aggregate_id"):
        return str(value)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    return value


def _named(info: EventInfo) -> str:
    return f"{info.event_type} of {info.aggregate_type} {info.aggregate_id}"


def _whole_number(number: object) -> int:
    if type(number) is not int or not 0 <= number < 1 << 63:
        raise ValueError(f"aggregate_seq must be a whole number of 63 bits, not {number!r}")
    return number


def _refuse_half_characters(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} holds half a character (a lone surrogate)") from None


_ESCAPED: Final = ('"', "'", "\\", "\0", "\n", "\r", "\x1a")


def _escaped(body: str | bytes | None) -> int:
    """Bytes of a literal of ``body`` in a statement, at most: quotes and backslashes double; bytes
    and other characters go as hexadecimal digits (``ascii_only``)."""
    if body is None:
        return 4
    if isinstance(body, bytes):
        return 2 * len(body)
    if not body.isascii():
        return 2 * len(body.encode())
    if len(body) < 10_000:
        return 2 * len(body)
    return len(body) + sum([body.count(character) for character in _ESCAPED])


def _chunks(rows: list[_Row], room: int) -> Iterator[list[_Row]]:
    chunk: list[_Row] = []
    size = _STATEMENT_SIZE
    for row in rows:
        if chunk and (len(chunk) == _INSERT_ROWS or size + row.size > room):
            yield chunk
            chunk, size = [], _STATEMENT_SIZE
        chunk.append(row)
        size += row.size
    if chunk:
        yield chunk
