"""Pieces of SQL text whose ``%`` the driver formats."""

from __future__ import annotations

from sqlalchemy import Table


def quoted(name: str) -> str:
    """A quoted identifier."""
    return "`" + name.replace("`", "``").replace("%", "%%") + "`"


def quoted_table(table: Table) -> str:
    """A table's quoted name, with its schema where it has one."""
    schema = f"{quoted(table.schema)}." if table.schema else ""
    return f"{schema}{quoted(table.name)}"


def tuple_of(parts: list[str]) -> str:
    """Parts in parentheses."""
    return f"({', '.join(parts)})"
