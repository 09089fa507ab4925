"""The archive: a table with the same columns, to which old rows move.

A batch is inserted there and deleted here in one transaction, so a run that is killed loses
nothing and leaves nothing twice. A row is known by id and event_id together, as everywhere: ids
that were given out again after TRUNCATE do not collide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import structlog
from sqlalchemy import Connection, Engine, exc

from cdc_relay.database import TableShape, connected, quote
from cdc_relay.errors import SourceError

log: Any = structlog.get_logger(__name__)

DEFAULT_NAME: Final = "outbox_archive"
_DUPLICATE: Final = 1062
# Longer text is indexed by its beginning: two such columns fill InnoDB's 3,072 bytes of a key.
_KEY_CHARACTERS: Final = 255

_UNIQUE: Final = "uk_id_event_id"

_COLUMNS_SQL: Final = (
    "SELECT COLUMN_NAME, COLUMN_TYPE, COALESCE(CHARACTER_SET_NAME, ''), IS_NULLABLE = 'YES',"
    " COLUMN_DEFAULT IS NULL AND EXTRA NOT LIKE '%%DEFAULT_GENERATED%%', EXTRA"
    " FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s"
    " ORDER BY ORDINAL_POSITION"
)
_UNIQUE_SQL: Final = (
    "SELECT INDEX_NAME FROM information_schema.STATISTICS"
    " WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s AND NON_UNIQUE = 0 GROUP BY INDEX_NAME"
)


class Archive:
    """The archive of one outbox table. One thread; errors are the database's."""

    def __init__(self, pool: Engine, shape: TableShape, name: str = DEFAULT_NAME) -> None:
        """``name`` may be qualified with a schema; else it is the outbox table's."""
        schema, _, table = name.rpartition(".")
        self._pool = pool
        self._shape = shape
        self._place = (schema or shape.schema, table)
        self.name = ".".join(self._place)
        self._quoted = ".".join(quote(part) for part in self._place).replace("%", "%%")
        if self._place == (shape.schema, shape.table):
            raise SourceError(f"table {self.name} is the outbox itself: name another archive")
        self._columns = ""
        self._verb = "INSERT"

    def prepare(self) -> None:
        """Create the table where it is missing, or raise ``SourceError`` where it cannot take the
        outbox table's rows as they are, with the statement that mends it."""
        outbox = self._describe((self._shape.schema, self._shape.table))
        if not self._describe(self._place):
            self._create(outbox)
        there = {column.name.lower(): column for column in self._describe(self._place)}
        mend = [_mended(column, there.get(column.name.lower())) for column in outbox]
        changes = [change for change in mend if change]
        if changes:
            raise SourceError(
                f"table {self.name} does not have the columns of {self._shape.schema}."
                f"{self._shape.table}: ALTER TABLE {self.name} {', '.join(changes)}"
            )
        ours = {column.name.lower() for column in outbox}
        for column in there.values():
            if column.name.lower() not in ours and column.must_be_given:
                raise SourceError(
                    f"table {self.name}: column {column.name} is not one of the outbox table and "
                    f"has no default: ALTER TABLE {self.name} MODIFY {column.name} {column.type} "
                    "NULL"
                )
        # A generated column of the archive computes itself.
        taken = [column.name for column in outbox if not there[column.name.lower()].generated]
        self._columns = ", ".join(quote(name) for name in taken).replace("%", "%%")
        unique = self._read(_UNIQUE_SQL, self._place)
        # A row that was copied back into the outbox and sent once more replaces its older copy. A
        # unique key other than ours could make REPLACE delete another event's row.
        ours_alone = [str(name) for (name,) in unique] in (["PRIMARY"], [_UNIQUE])
        self._verb = "REPLACE" if ours_alone else "INSERT"

    def move(self, connection: Connection, where: str, parameters: tuple[object, ...]) -> int:
        """Move the rows that ``where`` names, within the open transaction; return how many."""
        table = self._shape.quoted
        where = self._shape.names.sql(where)
        try:
            inserted = connection.exec_driver_sql(
                f"{self._verb} INTO {self._quoted} ({self._columns})"
                f" SELECT {self._columns} FROM {table} WHERE {where}",
                parameters,
            ).rowcount
        except exc.DBAPIError as error:
            if error.orig is None or error.orig.args[:1] != (_DUPLICATE,):
                raise
            raise SourceError(
                f"table {self.name} has a unique key that refuses a row of the outbox: "
                f"{error.orig.args[1]}"
            ) from None
        sql = f"{self._shape.delete} WHERE {where}"
        deleted = connection.exec_driver_sql(sql, parameters).rowcount
        # REPLACE counts a row that it replaced twice.
        if inserted < deleted:
            raise SourceError(
                f"table {self.name} took {inserted} of {deleted} rows: nothing was moved"
            )
        return deleted

    def _create(self, columns: Sequence[_Column]) -> None:
        """One statement, so that a crash or a second run leaves no half-made table: CREATE …
        SELECT of no rows takes the columns with type and character set and drops AUTO_INCREMENT,
        generated columns' expressions, partitions and the outbox's own indexes."""
        names = ", ".join(quote(column.name) for column in columns).replace("%", "%%")
        key = self._key_part
        # A primary key would forbid the NULL that an existing table's event_id may be.
        nullable = self._shape.columns["event_id"].nullable
        unique = f"UNIQUE KEY {_UNIQUE}" if nullable else "PRIMARY KEY"
        with connected(self._pool) as connection:
            sql = self._shape.names.sql(
                f"CREATE TABLE IF NOT EXISTS {self._quoted} ({unique} (id, {key('event_id')}),"
                f" KEY idx_event_id ({key('event_id')}), KEY idx_aggregate"
                f" ({key('aggregate_type')}, {key('aggregate_id')}), KEY idx_created (created_at))"
                f" ENGINE = InnoDB SELECT {names} FROM {self._shape.quoted} LIMIT 0"
            )
            connection.exec_driver_sql(sql, ())
        log.info("archive table created", table=self.name)

    def _key_part(self, name: str) -> str:
        """A text column in an index."""
        column = self._shape.columns[name]
        if column.data_type in ("char", "varchar") and column.characters <= _KEY_CHARACTERS:
            return name
        # Of a TEXT the server tells the bytes, four of which may be one character.
        most = column.characters if column.data_type == "varchar" else column.characters // 4
        return f"{name}({min(_KEY_CHARACTERS, most)})"

    def _describe(self, place: tuple[str, str]) -> list[_Column]:
        return [_Column(*row) for row in self._read(_COLUMNS_SQL, place)]

    def _read(self, sql: str, parameters: tuple[object, ...]) -> list[Any]:
        with connected(self._pool) as connection:
            return list(connection.exec_driver_sql(sql, parameters).all())


class _Column:
    """A column as the server describes it."""

    def __init__(
        self, name: str, kind: str, charset: str, nullable: int, no_default: int, extra: str
    ) -> None:
        self.name = name
        self.type = kind
        self.charset = charset
        self.nullable = bool(nullable)
        # "STORED GENERATED"; "DEFAULT_GENERATED" is a default that is an expression.
        self.generated = "GENERATED" in extra.upper().replace("DEFAULT_GENERATED", "")
        self.must_be_given = not nullable and bool(no_default) and not self.generated

    def definition(self) -> str:
        """The column as ALTER TABLE takes it."""
        charset = f" CHARACTER SET {self.charset}" if self.charset else ""
        return f"{self.name} {self.type}{charset} {'NULL' if self.nullable else 'NOT NULL'}"


def _mended(column: _Column, there: _Column | None) -> str:
    """What ALTER TABLE has to do to the archive's column so that it takes the outbox's."""
    if there is None:
        return f"ADD COLUMN {column.definition()}"
    same = (column.type, column.charset) == (there.type, there.charset)
    return "" if same and there.nullable >= column.nullable else f"MODIFY {column.definition()}"
