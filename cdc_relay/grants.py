"""The least that each part needs of the database, as GRANT statements."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal, get_args

from cdc_relay.columns import Columns
from cdc_relay.config import Settings
from cdc_relay.database import quote
from cdc_relay.outbox import OPTIONAL_COLUMNS, marked_columns

Role = Literal["relay", "compensator", "writer"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
Dialect = Literal["mysql", "mariadb"]


def grants(
    role: Role,
    account: str,
    settings: Settings,
    dialect: Dialect,
    there: Collection[str] = OPTIONAL_COLUMNS,
) -> list[str]:
    """Return the statements, without semicolons, that let ``account`` (as GRANT wants it) work as
    ``role`` with these settings, and nothing else: UPDATE is on the columns that a mark changes (of
    the optional ones those of ``there``), never on a payload. The privileges ON *.* exist for whole
    servers only."""
    schema, table = settings.schema_and_table()
    columns = Columns(settings.columns).sql(", ".join(marked_columns(there)))
    name = f"{quote(schema)}.{quote(table)}"
    if role == "writer":
        return [f"GRANT INSERT ON {name} TO {account}"]
    # The end of the log tells the compensator what the relay must have passed.
    everywhere = ["REPLICATION CLIENT"]
    if role == "relay":
        everywhere.insert(0, "REPLICATION SLAVE")
    if settings.mark_row_image == "minimal":
        everywhere.append("SESSION_VARIABLES_ADMIN" if dialect == "mysql" else "BINLOG ADMIN")
    here = f"SELECT, UPDATE ({columns})"
    if settings.mark == "delete":
        here += ", DELETE"
    return [
        f"GRANT {', '.join(everywhere)} ON *.* TO {account}",
        f"GRANT {here} ON {name} TO {account}",
    ]
