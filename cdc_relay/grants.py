"""The least that each part needs of the database, as GRANT statements."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, Literal, get_args

from cdc_relay.columns import Columns
from cdc_relay.config import Settings
from cdc_relay.database import quote
from cdc_relay.housekeeping.archive import DEFAULT_NAME as ARCHIVE
from cdc_relay.outbox import (
    INBOX_SEQUENCE_TABLE,
    OPTIONAL_COLUMNS,
    SEQUENCE_TABLE,
    marked_columns,
)

Role = Literal["relay", "compensator", "housekeeping", "writer"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
Dialect = Literal["mysql", "mariadb"]
# The end of the log tells the compensator what the relay must have passed.
_EVERYWHERE: Final[dict[Role, tuple[str, ...]]] = {
    "relay": ("REPLICATION SLAVE", "REPLICATION CLIENT"),
    "compensator": ("REPLICATION CLIENT",),
    "housekeeping": (),
    "writer": (),
}
# For INSERT … ON DUPLICATE KEY UPDATE, which reads what it changes. MariaDB asks for UPDATE on the
# columns that are inserted as well.
_UPSERT: Final = "SELECT, INSERT, UPDATE"


def grants(
    role: Role,
    account: str,
    settings: Settings,
    dialect: Dialect,
    there: Collection[str] = OPTIONAL_COLUMNS,
    *,
    sequences: bool = False,
) -> list[str]:
    """Return the statements, without semicolons, that let ``account`` (as GRANT wants it) work as
    ``role`` with these settings, and nothing else: UPDATE is on the columns that a mark changes (of
    the optional ones those of ``there``), never on a payload. ``sequences``: the writer numbers
    its events. The privileges ON *.* exist for whole servers only."""
    schema, table = settings.schema_and_table()
    columns = Columns(settings.columns).sql(", ".join(marked_columns(there)))
    if role == "writer":
        here = {table: "INSERT"} | ({SEQUENCE_TABLE: _UPSERT} if sequences else {})
    elif role == "housekeeping":
        # `archive` creates its table and may replace a row there that comes a second time.
        here = {table: "SELECT, DELETE", ARCHIVE: "CREATE, SELECT, INSERT, DELETE"}
    else:
        deletes = ", DELETE" if settings.mark == "delete" else ""
        here = {table: f"SELECT, UPDATE ({columns}){deletes}"}
    everywhere = [*_EVERYWHERE[role]]
    if settings.mark_row_image == "minimal" and role != "writer":
        everywhere.append("SESSION_VARIABLES_ADMIN" if dialect == "mysql" else "BINLOG ADMIN")
    statements = [f"GRANT {', '.join(everywhere)} ON *.* TO {account}"] if everywhere else []
    return statements + _on(schema, here, account)


def consumer_grants(account: str, table: str, *, sequences: bool = False) -> list[str]:
    """Return the statements that let ``account`` claim events in the inbox ``table``
    (``schema.table``), and clean it; with ``sequences`` look for gaps, too."""
    schema, _, name = table.rpartition(".")
    here = {name: f"{_UPSERT}, DELETE"}
    return _on(schema, here | ({INBOX_SEQUENCE_TABLE: _UPSERT} if sequences else {}), account)


def _on(schema: str, privileges: Mapping[str, str], account: str) -> list[str]:
    return [
        f"GRANT {what} ON {quote(schema)}.{quote(table)} TO {account}"
        for table, what in privileges.items()
    ]
