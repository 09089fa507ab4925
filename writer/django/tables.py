"""Making the tables from within a migration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import MetaData, Table

from cdc_relay.outbox import ddl, upgrade_ddl

MakesTable = Callable[[MetaData], Table]


def create(*makers: MakesTable) -> Callable[[Any, Any], None]:
    """Return what a ``RunPython`` does: create the tables, or bring existing ones up to date."""

    def run(_apps: Any, schema_editor: Any) -> None:
        connection = schema_editor.connection
        for maker in makers:
            table = maker(MetaData())
            with connection.cursor() as cursor:
                there = table.name in connection.introspection.table_names(cursor)
                statements = ddl(table)
                if there:
                    described = connection.introspection.get_table_description(cursor, table.name)
                    columns = {column.name for column in described}
                    indexes = connection.introspection.get_constraints(cursor, table.name)
                    statements = upgrade_ddl(table, columns, indexes)
            for statement in statements:
                schema_editor.execute(statement)

    return run


def drop(*makers: MakesTable) -> Callable[[Any, Any], None]:
    """Return the way back."""

    def run(_apps: Any, schema_editor: Any) -> None:
        for maker in makers:
            schema_editor.execute(f"DROP TABLE `{maker(MetaData()).name}`")

    return run
