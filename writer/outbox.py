"""``Outbox``: the INSERT of outbox events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import Enum
from typing import Any, Final, NamedTuple, NotRequired, TypedDict
from uuid import UUID

from sqlalchemy import Column, MetaData, String, Table, types

from cdc_relay.outbox import DEFAULT_TABLE, PENDING, outbox_table

from .ids import uuid7
from .payload import encode_headers, encode_payload, utc
from .targets import executor

# One INSERT stays far below max_allowed_packet (MariaDB: 16 MB) unless a single event does not.
_INSERT_ROWS: Final = 1000
_INSERT_SIZE: Final = 1_000_000

_KEYS: Final = ("event_id", "aggregate_type", "aggregate_id", "event_type")


class EventFields(TypedDict):
    """One event for ``Outbox.add_all``: the keywords of ``Outbox.add``."""

    aggregate_type: str
    aggregate_id: str | int | UUID
    event_type: str
    payload: Any
    headers: NotRequired[Mapping[str, object] | None]
    event_id: NotRequired[str | UUID | None]
    occurred_at: NotRequired[datetime | None]


class _Row(NamedTuple):
    event_id: str
    values_sql: str
    parameters: list[object]
    size: int


class Outbox:
    """Writes events into one outbox table, in the caller's transaction.

    Never commits, never opens a connection, and keeps nothing between calls: the event is a row
    at once, and a rollback, of a savepoint as well, takes it away. Threads may share an instance.
    """

    def __init__(self, table: str | Table = DEFAULT_TABLE) -> None:
        """``table`` is a name (``table`` or ``schema.table``) or a SQLAlchemy ``Table``: that of
        ``outbox_table(metadata)`` for a session with several binds, or a reflected one where an
        older table differs from ours (lengths, no ``headers``, NOT NULL ``next_retry_time``).
        """
        self._table = outbox_table(MetaData(), table) if isinstance(table, str) else table
        columns = self._table.columns
        self._lengths = {name: _length(columns[name]) for name in _KEYS}
        self._has_headers = "headers" in columns
        values = dict.fromkeys((*_KEYS, "payload"), "%s")
        if self._has_headers:
            values["headers"] = "%s"
        values |= {"status": str(PENDING), "retry_count": "0"}
        values["updated_at"] = _now(columns["updated_at"])
        retry_time = columns["next_retry_time"]
        if not retry_time.nullable and retry_time.server_default is None:
            values["next_retry_time"] = _now(retry_time)
        created_at = columns["created_at"]
        self._values_now = _tuple([*values.values(), _now(created_at)])
        self._values_given = _tuple([*values.values(), _given(created_at)])
        names = _tuple([_quote(name) for name in (*values, "created_at")])
        schema = f"{_quote(self._table.schema)}." if self._table.schema else ""
        self._insert = f"INSERT INTO {schema}{_quote(self._table.name)} {names} VALUES "

    def add(
        self,
        target: Any,
        *,
        aggregate_type: str,
        aggregate_id: str | int | UUID,
        event_type: str,
        payload: Any,
        headers: Mapping[str, object] | None = None,
        event_id: str | UUID | None = None,
        occurred_at: datetime | None = None,
    ) -> str:
        """Insert one event in the transaction of ``target`` and return its event id.

        ``target`` is a SQLAlchemy ``Session`` or ``Connection`` or a DB-API connection (PyMySQL,
        mysqlclient, MySQL Connector, Django's ``connection``). A session is flushed first (not
        within ``no_autoflush``). ``payload``: see ``writer.payload``; None is a tombstone, a str
        is JSON text already, bytes are for a BLOB column. ``event_id`` is a new UUIDv7 and
        ``occurred_at``, an aware datetime, the database's clock unless given.

        Raises ``NotInTransactionError`` where the target would commit by itself, ``ValueError``
        or ``TypeError`` for a wrong field, both before anything is written; the driver's own
        errors (a duplicate event id, for one) pass through.
        """
        row = self._row(
            aggregate_type=aggregate_type,
            aggregate_id=aggregate_id,
            event_type=event_type,
            payload=payload,
            headers=headers,
            event_id=event_id,
            occurred_at=occurred_at,
        )
        executor(target, self._table)(self._insert + row.values_sql, row.parameters)
        return row.event_id

    def add_all(self, target: Any, events: Iterable[EventFields]) -> list[str]:
        """Insert ``events`` in their order, many in one INSERT, and return their event ids.

        All are checked before the first is written; otherwise as ``add``.
        """
        rows = [self._row(**event) for event in events]
        execute = executor(target, self._table)
        chunk: list[_Row] = []
        size = 0
        for row in rows:
            if chunk and (len(chunk) == _INSERT_ROWS or size + row.size > _INSERT_SIZE):
                execute(*self._statement(chunk))
                chunk, size = [], 0
            chunk.append(row)
            size += row.size
        if chunk:
            execute(*self._statement(chunk))
        return [row.event_id for row in rows]

    def _statement(self, rows: list[_Row]) -> tuple[str, list[object]]:
        values = ", ".join([row.values_sql for row in rows])
        return self._insert + values, [value for row in rows for value in row.parameters]

    def _row(
        self,
        *,
        aggregate_type: str,
        aggregate_id: str | int | UUID,
        event_type: str,
        payload: Any,
        headers: Mapping[str, object] | None = None,
        event_id: str | UUID | None = None,
        occurred_at: datetime | None = None,
    ) -> _Row:
        if aggregate_id is None:
            raise ValueError(
                "aggregate_id is None: where the database gives the object its id, call "
                "session.flush() before adding the event"
            )
        key = self._text("event_id", uuid7() if event_id is None else event_id)
        body = encode_payload(payload)
        parameters: list[object] = [
            key,
            self._text("aggregate_type", aggregate_type),
            self._text("aggregate_id", aggregate_id),
            self._text("event_type", event_type),
            body,
        ]
        size = 500 + len(body or "")
        if self._has_headers:
            text = encode_headers(headers)
            parameters.append(text)
            size += len(text or "")
        elif headers is not None:
            raise ValueError(f"table {self._table.name} has no column headers to keep them in")
        if occurred_at is None:
            return _Row(key, self._values_now, parameters, size)
        parameters.append(utc(occurred_at).strftime("%Y-%m-%d %H:%M:%S.%f"))
        return _Row(key, self._values_given, parameters, size)

    def _text(self, name: str, value: object) -> str:
        """``value`` as the text of column ``name``, checked against the column's length."""
        if isinstance(value, Enum):
            value = value.value
        if isinstance(value, UUID) or (type(value) is int and name == "aggregate_id"):
            value = str(value)
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a str, not {type(value).__name__}")
        if not value:
            raise ValueError(f"{name} is empty")
        longest = self._lengths[name]
        if longest is not None and len(value) > longest:
            raise ValueError(f"{name} has {len(value)} characters; the column takes {longest}")
        return value


def _length(column: Column[Any]) -> int | None:
    return column.type.length if isinstance(column.type, String) else None


# A DATETIME column holds UTC as it is. A TIMESTAMP column, which an older table may have, takes
# times in the session's zone, whatever that is.


def _now(column: Column[Any]) -> str:
    is_timestamp = isinstance(column.type, types.TIMESTAMP)
    return "CURRENT_TIMESTAMP(6)" if is_timestamp else "UTC_TIMESTAMP(6)"


def _given(column: Column[Any]) -> str:
    if isinstance(column.type, types.TIMESTAMP):
        return "FROM_UNIXTIME(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', %s) * 0.000001)"
    return "%s"


def _tuple(parts: list[str]) -> str:
    return f"({', '.join(parts)})"


def _quote(name: str) -> str:
    """A quoted SQL identifier, in a text whose ``%`` the driver formats."""
    return "`" + name.replace("`", "``").replace("%", "%%") + "`"
