"""The text of the INSERT into one outbox table, whatever its columns are called."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final, Literal, TypeAlias

from sqlalchemy import Column, String, Table, types

from cdc_relay.outbox import COLUMNS, DEBEZIUM_COLUMNS, PENDING

from .sql import quoted, quoted_table, tuple_of

KEYS: Final = ("event_id", "aggregate_type", "aggregate_id", "event_type")

Names: TypeAlias = Mapping[str, str] | Literal["debezium"]
"""Our column names to those of the table; or what Debezium's outbox router expects."""


class Insert:
    """Builds ``INSERT INTO ... (columns) VALUES (...), (...)`` with ``%s`` for the parameters:
    the keys, the payload, the headers where the table has them, the time where it is given, and
    then the table's own columns that the event gives."""

    def __init__(self, table: Table, names: Names | None) -> None:
        """Raises ``ValueError`` with one line for a table that lacks a column."""
        if not isinstance(table, Table):
            raise TypeError(f"the table is a name or a SQLAlchemy Table, not {table!r}")
        if isinstance(names, str) and names != "debezium":
            raise ValueError(f"names: {names!r} is no preset; 'debezium' is, or give a dict")
        given = dict(DEBEZIUM_COLUMNS if names == "debezium" else names or {})
        known = dict.fromkeys(COLUMNS)
        unknown = given.keys() - known.keys()
        if unknown:
            raise ValueError(f"names: {min(unknown)!r} is no column of an outbox table")
        theirs = {name: given.get(name, name) for name in known}
        if "event_id" in given and given["event_id"] == theirs["id"]:
            del theirs["id"]
        columns = {name: table.columns.get(theirs[name]) for name in theirs}
        for name in (*KEYS, "payload"):
            if columns[name] is None:
                raise ValueError(
                    f"table {table.name} has no column {theirs[name]} for {name}; "
                    "other names are given by Outbox(table, names={...})"
                )
        there = {name: column for name, column in columns.items() if column is not None}
        self.lengths = {name: _length(there[name]) for name in KEYS}
        self.has_headers = "headers" in there
        self.has_time = "created_at" in there
        self.keeps_bytes = there["payload"].type.python_type is bytes
        used = {column.name for column in there.values()} | {theirs.get("id")}
        self.own = tuple(column.name for column in table.columns if column.name not in used)
        """Columns that are no outbox table's: the service's."""
        self.defaults: dict[str, Any] = {
            name: default
            for name in self.own
            if (default := table.columns[name].default) is not None
        }
        """Of those, the ones whose default SQLAlchemy gives, not the database."""
        self._forms = _forms(there)
        if self.has_time:
            self._now = _now(there["created_at"])
            self._given = _given(there["created_at"])
        order = [*self._forms, "created_at"] if self.has_time else list(self._forms)
        names_sql = [quoted(there[name].name) for name in order] + [
            quoted(name) for name in self.own
        ]
        self.head = f"INSERT INTO {quoted_table(table)} {tuple_of(names_sql)} VALUES "
        self.usual = self.values(timed=False, own=())
        """One row's tuple where the event brings nothing unusual."""

    def values(self, *, timed: bool, own: Container[str]) -> str:
        """Return one row's tuple. ``timed``: the event brings its time; ``own``: the service's
        columns that it gives, whose parameters follow in the order of ``self.own``."""
        parts = list(self._forms.values())
        if self.has_time:
            parts.append(self._given if timed else self._now)
        parts += ["%s" if name in own else "DEFAULT" for name in self.own]
        return tuple_of(parts)


def _forms(columns: Mapping[str, Column[Any]]) -> dict[str, str]:
    forms = dict.fromkeys((*KEYS, "payload"), "%s")
    if "headers" in columns:
        forms["headers"] = "%s"
    for name, number in (("status", PENDING), ("retry_count", 0)):
        if name in columns:
            forms[name] = str(number)
    if "updated_at" in columns:
        forms["updated_at"] = _now(columns["updated_at"])
    retry_time = columns.get("next_retry_time")
    if retry_time is not None and not retry_time.nullable and retry_time.server_default is None:
        forms["next_retry_time"] = _now(retry_time)
    return forms


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
