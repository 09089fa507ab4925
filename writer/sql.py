"""Pieces of SQL text whose ``%`` the driver formats."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from sqlalchemy import Table

_PLACE: Final = re.compile("%[%s]")
_INTO: Final = re.compile(r"INSERT INTO (?:`((?:[^`]|``)+)`\.(?=`))?")
_ESCAPED: Final = re.compile("[\"'\\\\\n\r\x1a]")
"""What some driver or other puts a backslash before."""


def quoted(name: str) -> str:
    """A quoted identifier."""
    return "`" + name.replace("`", "``").replace("%", "%%") + "`"


def quoted_table(table: Table) -> str:
    """A table's quoted name, with its schema where it has one."""
    schema = f"{quoted(table.schema)}." if table.schema else ""
    return f"{schema}{quoted(table.name)}"


def in_schema(sql: str, names: Mapping[str | None, str | None]) -> str:
    """The same INSERT in the schema that SQLAlchemy's ``schema_translate_map`` has for its own."""
    match = _INTO.match(sql)
    assert match is not None, sql
    schema = match[1].replace("``", "`").replace("%%", "%") if match[1] else None
    schema = names.get(schema, schema)
    into = f"{quoted(schema)}." if schema else ""
    return f"INSERT INTO {into}{sql[match.end() :]}"


def tuple_of(parts: list[str]) -> str:
    """Parts in parentheses."""
    return f"({', '.join(parts)})"


def ascii_only(
    sql: str, parameters: Sequence[object], escaped_too: bool
) -> tuple[str, tuple[object, ...]]:
    """Return the same statement with parameters that arrive as they are on any connection.

    Other characters would depend on the connection's character set, which may turn them into
    question marks, and bytes on the driver: some escape them for another ``sql_mode`` than the
    session's, or not at all. Both go as hexadecimal digits. ``escaped_too``: so does text that a
    driver escapes, for one that may do it for another ``sql_mode``.
    """

    def goes_as_digits(value: object) -> bool:
        if isinstance(value, str):
            return not value.isascii() or (escaped_too and _ESCAPED.search(value) is not None)
        return isinstance(value, bytes)

    if not any(map(goes_as_digits, parameters)):
        return sql, tuple(parameters)
    left = iter(parameters)
    sent: list[object] = []

    def place(match: re.Match[str]) -> str:
        if match[0] == "%%":
            return "%%"
        value = next(left)
        if isinstance(value, bytes):
            sent.append(value.hex())
            return "UNHEX(%s)"
        if isinstance(value, str) and goes_as_digits(value):
            sent.append(value.encode().hex())
            return "CONVERT(UNHEX(%s) USING utf8mb4)"
        sent.append(value)
        return "%s"

    return _PLACE.sub(place, sql), tuple(sent)
