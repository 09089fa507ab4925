"""The rows that are old enough to go, in small batches, each a transaction of its own.

A batch is found by the index on (status, created_at) without a lock, locked by key, passing over
what another session holds, and taken within one transaction. The status and the age stand in the
WHERE of the DELETE as well, so a row that became pending between the look and the delete (``dead
retry``) stays. READ COMMITTED: no gap is locked, inserts never wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Protocol

import structlog
from sqlalchemy import Connection, Engine, exc

from cdc_relay.database import TableShape, connected, database_errors, retry_locked
from cdc_relay.outbox import DEAD, PENDING, SENT

log: Any = structlog.get_logger(__name__)

# Another table refers to the row (mysqld_error.h): with, and without the right to know which.
_REFERENCED: Final = (1451, 1217)
# Each costs a transaction of its own: more of them, and something else is wrong.
_MOST_REFERENCED: Final = 1000

STATUS_NAMES: Final = {PENDING: "pending", SENT: "sent", DEAD: "dead"}


@dataclass(slots=True)
class Batch:
    """What one transaction took away."""

    status: int
    rows: int = 0
    days: Counter[str] = field(default_factory=Counter)
    """Rows by the day of ``created_at``."""


Take = Callable[[Connection, str, tuple[object, ...]], int]
"""Takes the rows that a WHERE and its parameters name, within the open transaction."""


class OldRows:
    """Sent (and with ``dead`` also dead) rows that became so more than ``older_than_s`` seconds
    ago, by the database's clock when this was made.

    The age of a sent row is that of ``sent_at``; where the column is missing or NULL, of
    ``updated_at``, which the mark sets; where that is NULL, of ``created_at``. A dead row's is that
    of ``updated_at``. One thread; errors are ``SourceError`` and ``SourceUnavailableError``.
    """

    def __init__(
        self, pool: Engine, shape: TableShape, older_than_s: float, *, dead: bool = False
    ) -> None:
        self._pool = pool
        self._shape = shape
        self.statuses = (SENT, DEAD) if dead else (SENT,)
        self.referenced = 0
        """Rows that stay because another table refers to them (a foreign key)."""
        with connected(pool) as connection:
            [(self.cutoff,)] = connection.exec_driver_sql(
                "SELECT DATE_FORMAT(UTC_TIMESTAMP(6) - INTERVAL %s MICROSECOND,"
                " '%%Y-%%m-%%d %%H:%%i:%%s.%%f')",
                (round(older_than_s * 1_000_000),),
            ).all()
        self._sql = shape.names.sql
        self._hint = shape.force_index("status", "created_at")
        if not self._hint:
            log.warning(
                "the table has no index on (status, created_at): walking all of it by primary key",
                mend=self._sql(
                    f"CREATE INDEX idx_status_created ON {shape.quoted} (status, created_at)"
                ),
            )

    def batches(
        self, limit: int, take: Take | None = None, stop: Callable[[], bool] = lambda: False
    ) -> Iterator[Batch]:
        """Take the old rows away, ``limit`` at most in a transaction, oldest ``created_at`` first
        (by primary key, where no index leads the way); give each batch after its commit.

        ``take`` is called inside the transaction and returns how many rows it took; by default
        they are deleted. Ends when none is left, or when ``stop`` says so between two batches.
        Rows that another session holds are passed over: two runs at once share the work. So are
        rows that another table refers to, up to a thousand of them; then the server's refusal is
        raised.
        """
        take = take or self.delete
        for status in self.statuses:
            walk: _Walk = (_ByAge if self._hint else _ByKey)(self, self._shape, status, limit)
            while not stop():
                batch = self._next(walk, status, take)
                if batch is None:
                    break
                yield batch

    def delete(self, connection: Connection, where: str, parameters: tuple[object, ...]) -> int:
        """Delete the rows of a batch; return how many."""
        sql = self._sql(f"{self._shape.delete} WHERE {where}")
        return connection.exec_driver_sql(sql, parameters).rowcount

    def left(self) -> dict[str, int]:
        """Count the old rows (by ``created_at``) that stay, by the name of their status; a status
        that is none of ours by its number."""
        # As two ranges of the status index: sent rows are not walked.
        with connected(self._pool) as connection:
            sql = self._sql(
                f"SELECT status, COUNT(*) FROM {self._shape.quoted}{self._hint}"
                f" WHERE (status < {SENT} OR status > {SENT}) AND created_at < %s GROUP BY status"
            )
            found = connection.exec_driver_sql(sql, (self.cutoff,)).all()
        counts = {"pending": 0, "dead": 0}
        return counts | {
            STATUS_NAMES.get(int(status), str(status)): int(count) for status, count in found
        }

    def condition(self, status: int) -> str:
        """SQL that is true for a row of this status that is old enough, with one parameter, the
        cut-off."""
        return f"status = {int(status)} AND {self.age(status)} < %s"

    def age(self, status: int) -> str:
        """SQL of the time when a row got this status."""
        names = ["updated_at", "created_at"]
        if status == SENT and "sent_at" in self._shape.columns:
            names.insert(0, "sent_at")
        return f"COALESCE({', '.join(names)})"

    def _next(self, walk: _Walk, status: int, take: Take) -> Batch | None:
        with connected(self._pool) as connection:
            seen = walk.look(connection)
        if seen is None:
            return None
        batch = Batch(status)
        with database_errors(self._pool.url):
            self._take(batch, seen, take)
        walk.advance()
        return batch

    def _take(self, batch: Batch, keys: list[int], take: Take) -> None:
        """Take the rows of ``keys`` in one transaction, or, where one of them cannot go, in smaller
        ones."""

        def once() -> list[tuple[int, Any]]:
            with self._pool.connect() as connection:
                connection.execution_options(isolation_level="READ COMMITTED")
                with connection.begin():
                    found = self._lock(connection, batch.status, keys)
                    taken = take(connection, *self._named(batch.status, found)) if found else 0
            batch.rows += taken
            return found

        if not keys:
            return
        try:
            found = retry_locked(once)
        except exc.DBAPIError as error:
            if error.orig is None or error.orig.args[0] not in _REFERENCED:
                raise
            if len(keys) == 1:
                self._refers(keys[0], error)
            else:
                self._take(batch, keys[: len(keys) // 2], take)
                self._take(batch, keys[len(keys) // 2 :], take)
        else:
            batch.days.update(_day(time) for _, time in found)

    def _refers(self, key: int, error: exc.DBAPIError) -> None:
        if self.referenced >= _MOST_REFERENCED:
            raise error
        if not self.referenced:
            log.warning(
                "rows that another table refers to stay", first_id=key, reason=str(error.orig)
            )
        self.referenced += 1

    def _lock(self, connection: Connection, status: int, keys: list[int]) -> list[tuple[int, Any]]:
        """Lock those of the rows that may go and that nobody else holds; (id, created_at) of each.

        By the primary key: along a secondary index MariaDB's SKIP LOCKED waits for an entry that
        another transaction has just removed.
        """
        sql = (
            f"SELECT id, created_at FROM {self._shape.quoted}{self._shape.force_index('id')}"
            f" WHERE id IN %s AND {self.condition(status)} FOR UPDATE SKIP LOCKED"
        )
        found = connection.exec_driver_sql(self._sql(sql), (keys, self.cutoff)).all()
        return [(int(key), time) for key, time in found]

    def _named(self, status: int, found: list[tuple[int, Any]]) -> tuple[str, tuple[object, ...]]:
        """The WHERE that names the rows of a batch, and its parameters."""
        where = f"id IN %s AND {self.condition(status)}"
        parameters: tuple[object, ...] = ([key for key, _ in found], self.cutoff)
        times = [time for _, time in found if isinstance(time, datetime)]
        if len(times) < len(found):
            return where, parameters
        # Tells a partitioned table which partitions to look into.
        return where + " AND created_at BETWEEN %s AND %s", (*parameters, min(times), max(times))


class _Walk(Protocol):
    """A way over the old rows of one status. ``look`` reads ahead, ``advance`` goes there."""

    def look(self, connection: Connection) -> list[int] | None:
        """Ids of the next rows, without locking one; None at the end."""

    def advance(self) -> None:
        """Go behind what was looked at last."""


class _ByAge:
    """Along the index on (status, created_at), each entry once."""

    def __init__(self, rows: OldRows, shape: TableShape, status: int, limit: int) -> None:
        dated = "created_at < %s"
        if shape.columns["created_at"].nullable:
            dated = f"(created_at IS NULL OR {dated})"
        hint = shape.force_index("status", "created_at")
        self._sql = shape.names.sql
        self._head = (
            f"SELECT id, created_at FROM {shape.quoted}{hint}"
            f" WHERE {rows.condition(status)} AND {dated}"
        )
        self._tail = f" ORDER BY created_at, id LIMIT {int(limit)}"
        self._cutoff = rows.cutoff
        self._place: tuple[datetime | None, int | None] = (None, None)
        self._next: tuple[datetime | None, int | None] = (None, None)

    def look(self, connection: Connection) -> list[int] | None:
        time, key = self._place
        behind = ""
        parameters: tuple[object, ...] = (self._cutoff, self._cutoff)
        if time is not None:
            behind = " AND created_at >= %s AND (created_at > %s OR id > %s)"
            parameters += (time, time, key)
        elif key is not None:  # rows without a date (NULL, zero) come first in the index, by id
            behind = " AND (created_at >= '1000-01-01' OR id > %s)"
            parameters += (key,)
        sql = self._sql(self._head + behind + self._tail)
        found = connection.exec_driver_sql(sql, parameters).all()
        if not found:
            return None
        last = found[-1]
        self._next = (last[1] if isinstance(last[1], datetime) else None, int(last[0]))
        return [int(row[0]) for row in found]

    def advance(self) -> None:
        self._place = self._next


class _ByKey:
    """Along the primary key, for a table whose indexes do not tell age: so many rows are looked
    at each time."""

    def __init__(self, rows: OldRows, shape: TableShape, status: int, limit: int) -> None:
        self._sql = shape.names.sql(
            f"SELECT id, COALESCE({rows.condition(status)}, FALSE) FROM {shape.quoted}"
            f"{shape.force_index('id')} WHERE id > %s ORDER BY id LIMIT {int(limit)}"
        )
        self._cutoff = rows.cutoff
        self._place = 0
        self._next = 0

    def look(self, connection: Connection) -> list[int] | None:
        page = connection.exec_driver_sql(self._sql, (self._cutoff, self._place)).all()
        if not page:
            return None
        self._next = int(page[-1][0])
        return [int(key) for key, is_old in page if is_old]

    def advance(self) -> None:
        self._place = self._next


def _day(time: Any) -> str:
    return time.date().isoformat() if isinstance(time, datetime) else "undated"
