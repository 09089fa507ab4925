"""The kernel: the outbox event and its table. Standard library and SQLAlchemy only.

Everything else in the project speaks in these two words: the writer inserts rows of
``outbox_table``, the relay and the compensator read them back as ``OutboxEvent``.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, NamedTuple

from sqlalchemy import (
    JSON,
    Column,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.schema import CreateIndex, CreateTable

DEFAULT_TABLE: Final = "outbox_event"

PENDING: Final = 0
SENT: Final = 1
DEAD: Final = 2

REQUIRED_COLUMNS: Final = (
    "id",
    "event_id",
    "aggregate_type",
    "aggregate_id",
    "event_type",
    "payload",
    "status",
    "retry_count",
    "next_retry_time",
    "created_at",
    "updated_at",
)
OPTIONAL_COLUMNS: Final = ("headers", "last_error", "sent_at")


class OutboxEvent(NamedTuple):
    """One row of the outbox table, as every source gives it and every router takes it.

    Immutable, and the same value whichever way the row was read: from the binlog or by SELECT.
    It knows nothing of the machinery: no binlog position, no Kafka offset. (A named tuple, not a
    frozen dataclass: the decoder makes a hundred thousand a second, and a frozen dataclass pays
    for every field with a call.)
    """

    id: int
    """Primary key; unsigned 64 bits."""
    event_id: str
    """Global identity, the consumer's idempotency key."""
    aggregate_type: str
    aggregate_id: str
    """The Kafka key, as text; its UTF-8 bytes are the key's bytes."""
    event_type: str
    payload: bytes | None
    """Exactly the bytes that a SELECT on a utf8mb4 connection returns; None is SQL NULL."""
    headers: bytes | None
    """JSON text of the ``headers`` column; None where it is SQL NULL or the column is absent."""
    created_at: int | None
    """Microseconds since 1970-01-01 UTC; None where the column holds NULL or a zero date."""


# The server's UTC clock whatever time zone the inserting session has; CURRENT_TIMESTAMP would
# follow the session. (Expression defaults: MySQL 8.0.13 and later, MariaDB 10.2 and later.)
_UTC_NOW = text("(UTC_TIMESTAMP(6))")

# Byte-wise comparison: 'A1' and 'a1' are two Kafka keys, so they must be two aggregates in SQL.
_BINARY_TEXT = {"charset": "utf8mb4", "collation": "utf8mb4_bin"}


def outbox_table(metadata: MetaData, name: str = DEFAULT_TABLE) -> Table:
    """Return the outbox table for ``metadata``, for ``create_all``, Alembic and queries.

    ``name`` may be qualified with a schema (``"shop.outbox_event"``). All times are DATETIME(6)
    in UTC by the database's clock. Calling it again with the same metadata and name returns the
    table that is already there.
    """
    schema, _, table_name = name.rpartition(".")
    key = name if schema else table_name
    if key in metadata.tables:
        return metadata.tables[key]

    def short_text(column: str, length: int) -> Column[str]:
        kind = String(length).with_variant(
            mysql.VARCHAR(length, **_BINARY_TEXT), "mysql", "mariadb"
        )
        return Column(column, kind, nullable=False)

    def utc_time(column: str, *, default: bool) -> Column[datetime]:
        return Column(
            column,
            mysql.DATETIME(fsp=6),
            nullable=not default,
            server_default=_UTC_NOW if default else None,
        )

    return Table(
        table_name,
        metadata,
        Column("id", mysql.BIGINT(unsigned=True), primary_key=True, autoincrement=True),
        short_text("event_id", 64),
        short_text("aggregate_type", 64),
        short_text("aggregate_id", 64),
        short_text("event_type", 128),
        # none_as_null: Python's None is SQL NULL (a tombstone), never the four letters null.
        Column("payload", JSON(none_as_null=True), nullable=True),
        Column("headers", JSON(none_as_null=True), nullable=True),
        Column("status", mysql.TINYINT(), nullable=False, server_default=text("0")),
        Column("retry_count", Integer, nullable=False, server_default=text("0")),
        utc_time("next_retry_time", default=False),
        Column("last_error", String(512), nullable=True),
        utc_time("created_at", default=True),
        utc_time("updated_at", default=True),
        utc_time("sent_at", default=False),
        UniqueConstraint("event_id", name="uk_event_id"),
        # Each scan filters on status first; InnoDB appends the primary key, so rows of one
        # status come out of these in id order without a sort.
        Index("idx_status_next_retry", "status", "next_retry_time"),
        Index("idx_status_aggregate", "status", "aggregate_type", "aggregate_id"),
        Index("idx_status_created", "status", "created_at"),
        schema=schema or None,
        mysql_engine="InnoDB",
        mysql_default_charset="utf8mb4",
        mariadb_engine="InnoDB",
        mariadb_default_charset="utf8mb4",
    )


def table_ddl(name: str = DEFAULT_TABLE) -> list[str]:
    """Return the statements that create the outbox table, CREATE TABLE first, then its indexes.

    The same text serves MySQL 8.0.13 and later and MariaDB 10.6 and later. No trailing semicolons.
    """
    table = outbox_table(MetaData(), name)
    # Not the driver's %s: it would double each % of a name.
    dialect = mysql.dialect(paramstyle="named")
    statements = [str(CreateTable(table).compile(dialect=dialect))]
    indexes = sorted(table.indexes, key=lambda index: str(index.name))
    statements += [str(CreateIndex(index).compile(dialect=dialect)) for index in indexes]
    return [
        statement.strip().replace("\t", "    ").replace(", \n", ",\n") for statement in statements
    ]
