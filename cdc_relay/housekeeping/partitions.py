"""Whole partitions: dropping one costs nothing beside deleting its rows, so the proof that it may
go has to be good.

A partition is dropped when it is one of RANGE, is not the last one, a later one holds rows (so it
is no partition of the future), and each of its rows may go. The proof walks it without a lock;
then, under a short table lock, what could have changed since is asked again, by index. A LIST,
HASH or KEY partition, and the last RANGE one, take new rows, so their rows go in batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
from sqlalchemy import Connection, Engine

from cdc_relay.database import TableShape, connected, database_errors, quote
from cdc_relay.errors import SourceError, SourceUnavailableError
from cdc_relay.housekeeping.rows import STATUS_NAMES, OldRows

log: Any = structlog.get_logger(__name__)

_PROOF_ROWS: Final = 50_000
# Whoever wants the table while a lock on it is waited for waits as well: not for long.
_LOCK_WAIT_S: Final = 2

_PARTITIONS_SQL: Final = (
    "SELECT PARTITION_NAME FROM information_schema.PARTITIONS"
    " WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s AND PARTITION_METHOD LIKE 'RANGE%%'"
    " GROUP BY PARTITION_NAME ORDER BY MIN(PARTITION_ORDINAL_POSITION)"
)


@dataclass(slots=True)
class Dropped:
    """A partition that is gone, and what it held."""

    name: str
    rows: dict[str, int] = field(default_factory=dict)
    """Rows by the name of their status."""


class Partitions:
    """The RANGE partitions of the outbox table. One thread; errors are the database's."""

    def __init__(self, pool: Engine, shape: TableShape, old: OldRows) -> None:
        self._pool = pool
        self._shape = shape
        self._table = shape.quoted
        self._old = old
        self._sql = shape.names.sql
        self._by_status = shape.force_index("status")

    def drop(self, stop: Callable[[], bool] = lambda: False) -> Iterator[Dropped]:
        """Drop the partitions that may go, oldest first; give each after it is gone.

        Needs the grants ALTER, DROP and LOCK TABLES; without them, or where the table is busy,
        says so and leaves the rows to the batches.
        """
        names = self._names()
        if len(names) < 2 or not self._by_status:
            return
        for place, name in enumerate(names[:-1]):
            if stop() or not self._has_rows(names[place + 1 :]):
                return
            highest = self._highest(name)
            held = self._proof(name, stop)
            if held is None:
                continue
            try:
                if self._drop(name, highest):
                    yield Dropped(name, held)
            except SourceUnavailableError as error:
                log.warning("partition not dropped", partition=name, reason=str(error))
            except SourceError as error:
                log.warning(
                    "partition not dropped, its rows go in batches",
                    partition=name,
                    reason=str(error),
                    needs="ALTER, DROP, LOCK TABLES",
                )
                return

    def _names(self) -> list[str]:
        rows = self._read(_PARTITIONS_SQL, (self._shape.schema, self._shape.table))
        return [str(row[0]) for row in rows]

    def _has_rows(self, names: list[str]) -> bool:
        return bool(self._read(f"SELECT 1 FROM {self._table} {_partition(*names)} LIMIT 1"))

    def _highest(self, name: str) -> int:
        sql = f"SELECT COALESCE(MAX(id), 0) FROM {self._table} {_partition(name)}"
        return int(self._read(sql)[0][0])

    def _foreign(self, name: str) -> str:
        """SQL that finds a row of a status that has to stay, by the status index."""
        gaps = [f"status < {self._old.statuses[0]}", f"status > {self._old.statuses[-1]}"]
        return (
            f"SELECT 1 FROM {self._table} {_partition(name)}{self._by_status}"
            f" WHERE {' OR '.join(gaps)} LIMIT 1"
        )

    def _proof(self, name: str, stop: Callable[[], bool]) -> dict[str, int] | None:
        """How many rows of each status the partition holds, where all may go; else None."""
        if self._read(self._foreign(name)):
            return None
        may_go = " OR ".join(f"({self._old.condition(status)})" for status in self._old.statuses)
        sql = (
            "SELECT MAX(id), status, COUNT(*), SUM(old) FROM"
            f" (SELECT id, status, COALESCE({may_go}, FALSE) AS old"
            f" FROM {self._table} {_partition(name)}{self._shape.force_index('id')}"
            f" WHERE id > %s ORDER BY id LIMIT {_PROOF_ROWS}) AS part GROUP BY status"
        )
        cutoffs = (self._old.cutoff,) * len(self._old.statuses)
        held: dict[str, int] = {}
        after = 0
        while not stop():
            found = self._read(sql, (*cutoffs, after))
            if not found:
                return held
            for highest, status, count, old in found:
                if int(old) < int(count):
                    return None
                after = max(after, int(highest))
                key = STATUS_NAMES[int(status)]
                held[key] = held.get(key, 0) + int(count)
        return None

    def _drop(self, name: str, highest: int) -> bool:
        """Drop a partition that was proved, unless it changed since; False where it did."""
        with database_errors(self._pool.url), self._pool.connect() as connection:
            before = _setting(connection, "lock_wait_timeout")
            connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {_LOCK_WAIT_S}")
            try:
                # Waits for every transaction that has written to the table: none is open then.
                connection.exec_driver_sql(f"LOCK TABLES {self._table} WRITE")
                highest_sql = f"SELECT COALESCE(MAX(id), 0) FROM {self._table} {_partition(name)}"
                now = connection.exec_driver_sql(self._sql(highest_sql)).scalar_one()
                foreign = self._sql(self._foreign(name))
                if int(now) != highest or connection.exec_driver_sql(foreign).all():
                    log.info("partition kept, rows came meanwhile", partition=name)
                    return False
                dropped = quote(name).replace("%", "%%")
                connection.exec_driver_sql(f"ALTER TABLE {self._table} DROP PARTITION {dropped}")
                return True
            finally:
                # Where the connection is lost, so are its locks.
                if not connection.invalidated:
                    connection.exec_driver_sql("UNLOCK TABLES")
                    connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {before}")

    def _read(self, sql: str, parameters: tuple[object, ...] = ()) -> list[Any]:
        with connected(self._pool) as connection:
            return list(connection.exec_driver_sql(self._sql(sql), parameters).all())


def _partition(*names: str) -> str:
    quoted = ", ".join(quote(name) for name in names)
    return f"PARTITION ({quoted})".replace("%", "%%")


def _setting(connection: Connection, name: str) -> int:
    return int(connection.exec_driver_sql(f"SELECT @@SESSION.{name}").scalar_one())
