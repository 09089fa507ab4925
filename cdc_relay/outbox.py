"""The kernel: the outbox event and its table. Standard library and SQLAlchemy only.

Everything else in the project speaks in these two words: the writer inserts rows of
``outbox_table``, the relay and the compensator read them back as ``OutboxEvent``. The small tables
beside it (sequences, the consumer's inbox) stand here too, so that there is one place for DDL.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple

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
from sqlalchemy.schema import CreateColumn, CreateIndex, CreateTable, conv

DEFAULT_TABLE: Final = "outbox_event"
SEQUENCE_TABLE: Final = "outbox_sequence"
INBOX_TABLE: Final = "inbox_event"
INBOX_SEQUENCE_TABLE: Final = "inbox_sequence"

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
COLUMNS: Final = (*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS)
# All else of a row is the service's.
_MARKED: Final = ("status", "retry_count", "next_retry_time", "updated_at")
_MARKED_TOO: Final = ("last_error", "sent_at")

DEBEZIUM_COLUMNS: Final[Mapping[str, str]] = {
    "id": "outbox_id",
    "event_id": "id",
    "aggregate_type": "aggregatetype",
    "aggregate_id": "aggregateid",
    "event_type": "type",
}
"""Our columns in a table such as Debezium's outbox router expects. Its ``id`` is the event's; the
number that gives rows their order is a column beside it."""


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
    extra: tuple[bytes | None, ...] = ()
    """Columns of the service's that the settings ask for, in the order of the settings, each as
    the bytes of the text that a SELECT prints, or as its own bytes where it is binary."""


# The server's UTC clock whatever time zone the inserting session has; CURRENT_TIMESTAMP would
# follow the session. (Expression defaults: MySQL 8.0.13 and later, MariaDB 10.2 and later.)
_UTC_NOW = text("(UTC_TIMESTAMP(6))")

# Byte-wise comparison: 'A1' and 'a1' are two Kafka keys, so they must be two aggregates in SQL.
_BINARY_TEXT = {"charset": "utf8mb4", "collation": "utf8mb4_bin"}


# Names in conv() stand as they are; a naming convention of the service's metadata may make others
# of the rest.

_OPTIONS: Final[dict[str, Any]] = {
    "mysql_engine": "InnoDB",
    "mysql_default_charset": "utf8mb4",
    "mariadb_engine": "InnoDB",
    "mariadb_default_charset": "utf8mb4",
}

PayloadColumn = Literal["json", "text", "binary"]
"""What the payload column is: JSON, LONGTEXT, or LONGBLOB (Avro, Protobuf)."""


def marked_columns(there: Collection[str] = OPTIONAL_COLUMNS) -> tuple[str, ...]:
    """What marking and parking change in a table that has the columns ``there``."""
    return (*_MARKED, *(name for name in _MARKED_TOO if name in there))


def outbox_table(
    metadata: MetaData, name: str = DEFAULT_TABLE, *, payload: PayloadColumn = "json"
) -> Table:
    """Return the outbox table for ``metadata``, for ``create_all``, Alembic and queries.

    ``name`` may be qualified with a schema (``"shop.outbox_event"``). ``payload`` is the kind of
    the payload column; ``binary`` is for serializers that give bytes. All times are DATETIME(6)
    in UTC by the database's clock. Calling it again with the same metadata and name returns the
    table that is already there. Raises ``ValueError`` for another ``payload`` than it has.
    """
    types: Any = {
        # none_as_null: Python's None is SQL NULL (a tombstone), never the four letters null.
        "json": JSON(none_as_null=True),
        "text": mysql.LONGTEXT(charset="utf8mb4"),
        "binary": mysql.LONGBLOB(),
    }
    if payload not in types:
        raise ValueError(f"payload: {payload!r} is none of {', '.join(types)}")
    payload_type = types[payload]
    there, schema, table_name = _find(metadata, name)
    if there is not None:
        kind = type(there.columns["payload"].type)
        if payload != "json" and not issubclass(kind, type(payload_type)):
            raise ValueError(
                f"payload: table {there.name} is in this metadata already, with {kind.__name__}"
            )
        return there
    return Table(
        table_name,
        metadata,
        Column("id", mysql.BIGINT(unsigned=True), primary_key=True, autoincrement=True),
        _short_text("event_id", 64),
        _short_text("aggregate_type", 64),
        _short_text("aggregate_id", 64),
        _short_text("event_type", 128),
        Column("payload", payload_type, nullable=True),
        Column("headers", JSON(none_as_null=True), nullable=True),
        Column("status", mysql.TINYINT(), nullable=False, server_default=text("0")),
        Column("retry_count", Integer, nullable=False, server_default=text("0")),
        _utc_time("next_retry_time", default=False),
        Column("last_error", String(512), nullable=True),
        _utc_time("created_at", default=True),
        _utc_time("updated_at", default=True),
        _utc_time("sent_at", default=False),
        UniqueConstraint("event_id", name=conv("uk_event_id")),
        # Each scan filters on status first; InnoDB appends the primary key, so rows of one
        # status come out of these in id order without a sort.
        Index(conv("idx_status_next_retry"), "status", "next_retry_time"),
        Index(conv("idx_status_aggregate"), "status", "aggregate_type", "aggregate_id"),
        Index(conv("idx_status_created"), "status", "created_at"),
        schema=schema,
        **_OPTIONS,
    )


def sequence_table(metadata: MetaData, name: str = SEQUENCE_TABLE) -> Table:
    """Return the table of the last ``aggregate_seq`` that was given out, a row per aggregate.

    Only a service that lets the writer number its events needs it (``Outbox(sequences=...)``).
    """
    there, schema, table_name = _find(metadata, name)
    if there is not None:
        return there
    return Table(
        table_name,
        metadata,
        _short_text("aggregate_type", 64, primary_key=True),
        _short_text("aggregate_id", 64, primary_key=True),
        Column("last_seq", mysql.BIGINT(unsigned=True), nullable=False),
        schema=schema,
        **_OPTIONS,
    )


def inbox_table(metadata: MetaData, name: str = INBOX_TABLE) -> Table:
    """Return the inbox of a consuming service: one row per event that a consumer has handled.

    The primary key (consumer, event_id) is what makes an event count once. ``repeats`` counts the
    deliveries after the first. ``claimed_at`` is the database's clock in UTC; ``cdc-relay inbox
    purge`` goes by it.
    """
    there, schema, table_name = _find(metadata, name)
    if there is not None:
        return there
    return Table(
        table_name,
        metadata,
        _short_text("consumer", 64, primary_key=True),
        _short_text("event_id", 64, primary_key=True),
        Column("repeats", mysql.INTEGER(unsigned=True), nullable=False, server_default=text("0")),
        _utc_time("claimed_at", default=True),
        Index(conv("idx_claimed_at"), "claimed_at"),
        schema=schema,
        **_OPTIONS,
    )


def inbox_sequence_table(metadata: MetaData, name: str = INBOX_SEQUENCE_TABLE) -> Table:
    """Return the table of the highest ``aggregate_seq`` that a consumer has seen, a row per
    aggregate. Only ``Inbox(..., sequences=...)`` needs it."""
    there, schema, table_name = _find(metadata, name)
    if there is not None:
        return there
    return Table(
        table_name,
        metadata,
        _short_text("consumer", 64, primary_key=True),
        _short_text("aggregate_type", 64, primary_key=True),
        _short_text("aggregate_id", 64, primary_key=True),
        Column("last_seq", mysql.BIGINT(unsigned=True), nullable=False),
        schema=schema,
        **_OPTIONS,
    )


def beside(table: Table, name: str) -> str:
    """Return ``name`` as the name of a table in the schema of ``table``."""
    return f"{table.schema}.{name}" if table.schema else name


def table_ddl(name: str = DEFAULT_TABLE) -> list[str]:
    """Return the statements that create the outbox table, CREATE TABLE first, then its indexes.

    The same text serves MySQL 8.0.13 and later and MariaDB 10.6 and later. No trailing semicolons.
    """
    return ddl(outbox_table(MetaData(), name))


def ddl(table: Table) -> list[str]:
    """Return the statements that create one of the tables of this module, as ``table_ddl``."""
    # Not the driver's %s: it would double each % of a name.
    dialect = mysql.dialect(paramstyle="named")
    statements = [str(CreateTable(table).compile(dialect=dialect))]
    indexes = sorted(table.indexes, key=lambda index: str(index.name))
    statements += [str(CreateIndex(index).compile(dialect=dialect)) for index in indexes]
    return [
        statement.strip().replace("\t", "    ").replace(", \n", ",\n") for statement in statements
    ]


def upgrade_ddl(table: Table, columns: Collection[str], indexes: Collection[str]) -> list[str]:
    """Return the statements that bring an existing table, which has ``columns`` and ``indexes``
    (their names), up to one of this module: the optional columns and the indexes it lacks."""
    dialect = mysql.dialect(paramstyle="named")
    name = dialect.identifier_preparer.format_table(table)
    added = [
        f"ALTER TABLE {name} ADD COLUMN {CreateColumn(column).compile(dialect=dialect)}"
        for column in table.columns
        if column.name not in columns
    ]
    missing = [index for index in table.indexes if index.name not in indexes]
    missing.sort(key=lambda index: str(index.name))
    return added + [str(CreateIndex(index).compile(dialect=dialect)) for index in missing]


def _find(metadata: MetaData, name: str) -> tuple[Table | None, str | None, str]:
    """The table that is there already, the schema, the name."""
    schema, _, table_name = name.rpartition(".")
    if not table_name:
        raise ValueError(f"{name!r} is no table's name")
    schema_name = schema or metadata.schema
    key = f"{schema_name}.{table_name}" if schema_name else table_name
    return metadata.tables.get(key), schema or None, table_name


def _short_text(column: str, length: int, *, primary_key: bool = False) -> Column[str]:
    kind = String(length).with_variant(mysql.VARCHAR(length, **_BINARY_TEXT), "mysql", "mariadb")
    return Column(column, kind, nullable=False, primary_key=primary_key)


def _utc_time(column: str, *, default: bool) -> Column[datetime]:
    return Column(
        column,
        mysql.DATETIME(fsp=6),
        nullable=not default,
        server_default=_UTC_NOW if default else None,
    )
