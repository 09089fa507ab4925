"""All SQL on the outbox table except the INSERT: mark, scan, park, count.

Every statement is a transaction of its own (the engine is in autocommit; the two that mark around
locked rows are one), so no method leaves a transaction, a lock or a read view behind. Ages and
retry times are measured by the database's clock, in UTC. Errors are ``SourceError`` and
``SourceUnavailableError``, one line each.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import structlog
from sqlalchemy import Connection, Engine

from cdc_relay.database import TableShape, connected, database_errors, retry_locked, streamed
from cdc_relay.errors import (
    ChangedTableError,
    LockedError,
    SourceError,
    SourceUnavailableError,
)
from cdc_relay.outbox import DEAD, PENDING, SENT, OutboxEvent, marked_columns
from cdc_relay.position import Position
from cdc_relay.server import current_position

log: Any = structlog.get_logger(__name__)

# Waiting times after the first, second, … failure; the last one repeats.
RETRY_LADDER_S: Final = (1, 5, 30, 120, 900, 3600, 21600)

# One UPDATE of this many rows is about 250 kB of SQL, far below any max_allowed_packet.
_MARK_ROWS: Final = 5000

# Of rows some of which others hold: what cannot be told apart within a statement is little.
_AROUND_ROWS: Final = 500
# What a lock is asked for with, so that locked rows are left out instead of waited for.
_AROUND: Final = "FOR UPDATE SKIP LOCKED"

# A row whose mark is owed, beside its id.
_OWED: Final = f" AND event_id IN %s AND status = {PENDING}"

# What one read of whole rows aims at; twice as much ends it. A single row may be larger.
_READ_BYTES: Final = 8 * 1024 * 1024
# Rows of a read before anything is known of their size.
_FIRST_ROWS: Final = 100
# What a row costs beside payload and headers.
_ROW_BYTES: Final = 200
# Columns of such a read, before those of the service's that the settings ask for.
_OWN_COLUMNS: Final = 10

_REASON_CHARACTERS: Final = 512
# What fits into the column retry_count, whatever its sign.
_MOST: Final = {"tinyint": 2**7 - 1, "smallint": 2**15 - 1, "mediumint": 2**23 - 1}
_HIGHEST_ID: Final = 2**64 - 1
_SPAN_IDS: Final = 100_000
_SLICE_ROWS: Final = 200_000
# What the database takes for equal (A and a, a and "a ") are keys of their own to Kafka.
_DISTINCT_AGGREGATES: Final = (
    "DISTINCT aggregate_type, aggregate_id,"
    " CAST(aggregate_type AS BINARY), CAST(aggregate_id AS BINARY)"
)


Aggregate = tuple[str, str]
"""(aggregate_type, aggregate_id)"""


class PendingEvent(NamedTuple):
    """A pending row: the event, and how often sending it has failed so far."""

    event: OutboxEvent
    retry_count: int


class ScannedRow(NamedTuple):
    """What the scan needs to know of a pending row. One that is young or waits must not be sent
    now, and neither must any later row of its aggregate."""

    id: int
    aggregate: Aggregate
    young: bool
    """Not pending for long enough."""
    waits: bool
    """Its next try is later, or a dead row of its aggregate stands before it."""
    tried: bool = False
    """It has failed before."""


class WaitingRow(NamedTuple):
    """What a parked aggregate needs to know of a pending row."""

    id: int
    event_id: str
    aggregate_type: str
    aggregate_id: str
    due_in_s: float
    """Seconds until its next try; 0 when it may be sent now."""
    behind_dead: bool
    """Whether a dead row of its aggregate blocks it."""


class HeldRow(NamedTuple):
    """What a parked aggregate needs to know of a row that it holds, where nothing is marked."""

    id: int
    aggregate_id: str
    status: int
    due_in_s: float
    """Seconds until its next try; 0 when it may be sent now."""


class Marked(NamedTuple):
    """What became of rows that were to be marked."""

    done: int
    """Marked now. Others need no mark: they are not pending any more, or gone."""
    locked: list[tuple[int, str]]
    """(id, event_id) of those that other sessions hold. Their marks are still owed."""


class Failure(NamedTuple):
    """What became of a row whose sending failed."""

    outcome: Literal["retry", "dead", "gone"]
    """``gone``: another process sent, parked or deleted the row meanwhile; nothing was written."""
    tries: int
    delay_s: int
    """Seconds until the next try; 0 unless the outcome is ``retry``."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The table at a glance."""

    pending: int
    failing: int
    """Pending rows that have failed at least once."""
    sent: int
    dead: int
    oldest_pending_s: float | None
    """Age of the oldest pending row in seconds; None where nothing is pending."""


class Backlog(NamedTuple):
    """What is not sent, at a glance and cheaply."""

    pending: int
    failing: int | None
    """Pending rows that were refused at least once; None where the index does not tell."""
    dead: int
    oldest_pending_s: float | None
    """Age of the pending row with the lowest id, by the database's clock."""
    clock: float
    """The database's clock, seconds since 1970."""


class Troubled(NamedTuple):
    """A row that was refused, or given up."""

    event_id: str
    aggregate_type: str
    aggregate_id: str
    event_type: str
    tries: int
    dead: bool
    due_in_s: float | None
    """Seconds until the next try; None for a dead row."""
    reason: str


def retry_delay_s(tries: int) -> int:
    """Seconds to wait after failure number ``tries`` (from 1)."""
    return RETRY_LADDER_S[min(tries, len(RETRY_LADDER_S)) - 1]


class Store:
    """The SQL of one outbox table. Threads may share it; each call takes its own connection."""

    def __init__(
        self,
        engine: Engine,
        shape: TableShape,
        *,
        max_tries: int = 10,
        on_dead: Literal["block", "release"] = "block",
        mark: Literal["update", "delete"] = "update",
        tell: Callable[[OutboxEvent, int, str], None] = lambda _event, _tries, _reason: None,
        describe: Callable[[Connection], TableShape] | None = None,
    ) -> None:
        """``max_tries`` failures are forgiven, the next one makes a row dead; ``on_dead`` decides
        whether a dead row keeps later events of its aggregate back. ``tell`` is called, with tries
        and reason, for each row that was made dead here. With ``describe`` the table may change:
        it is looked at anew when a statement finds it so."""
        self._engine = engine
        self._describe = describe
        self._max_tries = max_tries
        self._on_dead = on_dead
        self._mark = mark
        self._tell = tell
        self._rows_at_once = _FIRST_ROWS
        self._goes_around = True  # until the server refuses
        self._work_by(shape)

    def _work_by(self, shape: TableShape) -> None:
        self._shape = shape
        self._table = shape.quoted
        self._sql = shape.names.sql
        self._most_tries = _MOST.get(shape.columns["retry_count"].data_type, 2**31 - 1)
        sent_at = ", sent_at = UTC_TIMESTAMP(6)" if "sent_at" in shape.columns else ""
        # Driven by the primary key whatever the optimizer's statistics say: rows are locked in
        # id order, the same in every session, so two of them wait instead of deadlocking.
        change = (
            shape.delete
            if self._mark == "delete"
            else f"UPDATE {self._table}{shape.force_index('id')}"
            f" SET status = {SENT}{sent_at}, updated_at = UTC_TIMESTAMP(6)"
        )
        self._mark_head = change + " WHERE id IN ("
        self._mark_tail = ")" + _OWED

    @property
    def name(self) -> str:
        """The table as ``schema.table``."""
        return f"{self._shape.schema}.{self._shape.table}"

    def mark_sent(self, rows: Sequence[tuple[int, str]], *, around: bool = False) -> Marked:
        """Mark the pending rows among ``rows``, (id, event_id) each, as sent (or delete them, as
        ``mark`` says).

        One UPDATE, one transaction, for up to 5,000 rows; more are split. A row is known by id
        and event_id together, so an id that was given out again after TRUNCATE is left alone.
        Rows that are no longer pending, or gone, are passed over. Deadlocks are tried again. Rows
        that others hold are passed over as well and returned: once a lock was waited for, for a
        second, or at once where ``around`` says that such are to be expected. (A server that
        cannot leave them out has their locks waited for.) Rows marked before an error stay marked:
        calling again is safe.
        """
        ordered = sorted(rows)
        done, locked = 0, list[tuple[int, str]]()
        start = 0
        while start < len(ordered):
            around = around and self._goes_around
            part = ordered[start : start + (_AROUND_ROWS if around else _MARK_ROWS)]
            try:
                found = self._mark_around(part) if around else self._mark_all(part)
            except LockedError:
                if not self._goes_around:
                    raise
                if around:  # a gap: the others would wait for it as well, each a second
                    return Marked(done, locked + ordered[start:])
                around = True
                continue
            done += found.done
            locked += found.locked
            start += len(part)
        return Marked(done, locked)

    def _mark_all(self, rows: Sequence[tuple[int, str]]) -> Marked:
        """Mark ``rows`` in one statement, or raise ``LockedError``."""
        return Marked(self._update(*self._mark_these(rows), waits=not self._goes_around), [])

    def _mark_around(self, rows: Sequence[tuple[int, str]]) -> Marked:
        """Mark those of ``rows`` that nobody else holds; all of them, where the server turns out
        not to be able to leave out locked rows.

        They are locked by the primary key and then marked in one transaction. It may still meet a
        lock, on an index entry or on a gap that an entry is to go into: nothing is marked then, and
        it raises ``LockedError``.
        """
        by_key = f"{self._table}{self._shape.force_index('id')} WHERE id IN ({_numbers(rows)})"
        free_sql = self._sql(f"SELECT id FROM {by_key} {_AROUND}")

        def once() -> tuple[int, set[int]]:
            with self._engine.connect() as connection:
                connection.execution_options(isolation_level="READ COMMITTED")
                with connection.begin():
                    free = {row[0] for row in connection.exec_driver_sql(free_sql, ())}
                    found = [row for row in rows if row[0] in free]
                    if not found:
                        return 0, free
                    sql, parameters = self._mark_these(found)
                    return connection.exec_driver_sql(self._sql(sql), parameters).rowcount, free

        try:
            with self._noticing_changes(), database_errors(self._engine.url):
                done, free = retry_locked(once, waits=False)
        except SourceUnavailableError:
            raise
        except SourceError as error:
            self._goes_around = False
            log.warning("marks cannot pass over locked rows", reason=str(error))
            return self._mark_all(rows)
        return Marked(done, self._still_pending([row for row in rows if row[0] not in free]))

    def _mark_these(self, rows: Sequence[tuple[int, str]]) -> tuple[str, tuple[object, ...]]:
        """The statement that marks ``rows``, and its parameters."""
        # Numbers go into the text as they are; the driver escapes the list of event ids.
        sql = self._mark_head + _numbers(rows) + self._mark_tail
        return sql, ([event_id for _, event_id in rows],)

    def _still_pending(self, rows: list[tuple[int, str]]) -> list[tuple[int, str]]:
        """Those of ``rows`` that are pending for anybody. What is not committed counts either way:
        a row that others have inserted and not committed, and one that they may yet not delete."""
        if not rows:
            return rows
        sql = (
            f"SELECT id FROM {self._table}{self._shape.force_index('id')}"
            f" WHERE id IN ({_numbers(rows)}){_OWED}"
        )
        event_ids = ([event_id for _, event_id in rows],)
        # In this order: a row that becomes visible in between is seen by the second.
        there = {row[0] for row in self._read(sql, event_ids, uncommitted=True)}
        there |= {row[0] for row in self._read(sql, event_ids)}
        return [row for row in rows if row[0] in there]

    def check_update(self) -> None:
        """Raise ``SourceError`` where sent and failed rows could not be written down: found out
        after the first record, that would mean sending it again and again. Changes no row."""
        same = ", ".join(f"{name} = {name}" for name in marked_columns(self._shape.columns))
        # No row has that status; the grant is asked for all the same.
        self._update(f"UPDATE {self._table} SET {same} WHERE id = 0 AND status = -1", ())
        if self._mark == "delete":
            self._update(f"DELETE FROM {self._table} WHERE id = 0 AND status = -1", ())

    def scan(self, older_than_s: float, limit: int) -> PendingScan:
        """Return a scan over the rows that are pending for longer than ``older_than_s`` seconds
        (0: all of them), in batches of at most ``limit``. Nothing is read yet."""
        return PendingScan(self, older_than_s, limit)

    def position(self) -> Position:
        """Return the end of the server's binlog now."""
        with connected(self._engine) as connection:
            return current_position(connection)

    def pending(self, ids: Sequence[int]) -> list[tuple[int, str]]:
        """Return (id, event_id) of the rows of ``ids`` that are pending."""
        found: list[tuple[int, str]] = []
        for part in _lists(ids):
            sql = (
                f"SELECT id, event_id FROM {self._table}{self._shape.force_index('id')}"
                f" WHERE id IN ({part}) AND status = {PENDING}"
            )
            found += [(row_id, event_id or "") for row_id, event_id in self._read(sql)]
        return found

    def count_pending(self, older_than_s: float, from_id: int) -> int:
        """Count the rows from ``from_id`` on that are pending for longer than ``older_than_s``."""
        where = f"status = {PENDING} AND id >= {int(from_id)}"
        return int(self._read(self._aged("COUNT(*)", where, older_than_s))[0][0])

    def newest_pending(self, older_than_s: float) -> int:
        """Return the highest id among the rows pending for longer than ``older_than_s`` seconds,
        0 where there is none."""
        sql = self._aged("COALESCE(MAX(id), 0)", f"status = {PENDING}", older_than_s)
        return int(self._read(sql)[0][0])

    def _aged(self, what: str, where: str, older_than_s: float) -> str:
        """A SELECT over rows of one status and an age. By the index of times, where there is one:
        the optimizer may take another that begins with the status, and then reads millions of rows
        for their time."""
        if older_than_s <= 0:
            return f"SELECT {what} FROM {self._table} WHERE {where}"
        return (
            f"SELECT {what} FROM {self._table}{self._shape.force_index('status', 'created_at')}"
            f" WHERE {where} AND (created_at IS NULL OR created_at <= {_ago(older_than_s)})"
        )

    def scan_rows(
        self, older_than_s: float, limit: int, after_id: int, last_id: int
    ) -> list[ScannedRow]:
        """Return the pending rows in ``after_id`` < id <= ``last_id``, in id order, ``limit`` at
        most, without what makes rows large."""
        rows = self._read(self._scan_sql(older_than_s, limit, after_id, last_id))
        return [
            ScannedRow(row[0], _aggregate(row[1:3]), bool(row[3]), bool(row[4]), row[5] > 0)
            for row in rows
        ]

    def events(
        self, ids: Sequence[int], most: int = _MARK_ROWS
    ) -> tuple[list[PendingEvent], Sequence[int]]:
        """Return the first of the rows of ``ids`` (ascending) that are still pending, ``most`` or
        about 8 MiB of them at most, in id order, and the ids behind them, which the caller asks for
        next. Payload and headers are byte for byte what the server's SELECT gives on a utf8mb4
        connection."""
        found, rest = self._events(ids, most)
        pending = [
            PendingEvent(event, tries) for event, tries, status in found if status == PENDING
        ]
        return pending, rest

    def find(self, row_id: int) -> OutboxEvent | None:
        """Return the row with this id, whatever its status; None where there is none."""
        return next((event for part in self.rows([row_id]) for event, _ in part), None)

    def rows(self, ids: Sequence[int]) -> Iterator[list[tuple[OutboxEvent, int]]]:
        """Yield the rows of ``ids`` that exist, in id order, each with its status, in parts of
        about 8 MiB at most. Nothing is open between two parts."""
        rest: Sequence[int] = sorted(ids)
        while rest:
            found, rest = self.first_rows(rest)
            if found:
                yield found

    def first_rows(self, ids: Sequence[int]) -> tuple[list[tuple[OutboxEvent, int]], Sequence[int]]:
        """Return those that exist of the first rows of ``ids`` (in any order), each with its
        status, as many as about 8 MiB hold, in id order, and the ids that come next."""
        found, rest = self._events(ids, _MARK_ROWS)
        return [(event, status) for event, _, status in found], rest

    def states(self, ids: Sequence[int]) -> dict[int, tuple[str, int]]:
        """Return event id and status, by id, of the rows of ``ids`` that exist."""
        found: dict[int, tuple[str, int]] = {}
        for part in _lists(ids):
            sql = f"SELECT id, event_id, status FROM {self._table} WHERE id IN ({part})"
            for row_id, event_id, status in self._read(sql):
                found[row_id] = (event_id or "", int(status))
        return found

    def keys(self, since_us: int, until_us: int, limit: int) -> Iterator[list[Any]]:
        """Yield (id, event_id, aggregate_type, aggregate_id, event_type, status, and the extra
        columns) of the rows of any status with ``since_us`` <= created_at < ``until_us``
        (microseconds since 1970), in id order, from at most ``limit`` ids' worth of the table at a
        time. No read view outlives a step."""
        within = _within(since_us, until_us)
        bounds = self._id_bounds(since_us, until_us)
        if bounds is None:
            return
        low, high = bounds
        after_id = low - 1
        while after_id < high:
            # By ids: a single statement must not look for long where few rows are of that time.
            last_id = min(high, after_id + _SPAN_IDS)
            rows = self._read(
                "SELECT id, event_id, aggregate_type, aggregate_id, event_type, status"
                f"{self._shape.extra_sql} FROM {self._table}{self._shape.force_index('id')}"
                f" WHERE id > {after_id} AND id <= {last_id} AND {within}"
                f" ORDER BY id LIMIT {int(limit)}"
            )
            if rows:
                yield rows
            if len(rows) >= limit:
                after_id = int(rows[-1][0])
                continue
            after_id = last_id
            if not rows:  # over a gap in the ids, however wide
                [(next_id,)] = self._read(
                    f"SELECT MIN(id) FROM {self._table} WHERE id > {after_id}"
                )
                if next_id is None:
                    return
                after_id = int(next_id) - 1

    def _id_bounds(self, since_us: int, until_us: int) -> tuple[int, int] | None:
        """The lowest and the highest id of these times, by steps through the index that has them:
        no statement reads more than ``_SLICE_ROWS``, and what came at one instant."""
        index = self._shape.force_index("status", "created_at")
        found = []
        for status in (PENDING, SENT, DEAD):
            at: int | None = since_us
            while at is not None:
                where = f"FROM {self._table}{index} WHERE status = {status} AND "
                then = None
                if index:  # without it each step would read the whole table
                    rows = self._read(
                        f"SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', created_at) {where}"
                        f"{_within(at, until_us)} ORDER BY created_at LIMIT 1 OFFSET {_SLICE_ROWS}"
                    )
                    then = max(int(rows[0][0]), at + 1) if rows else None
                found += self._read(
                    f"SELECT MIN(id), MAX(id) {where}"
                    f"{_within(at, until_us if then is None else then)}"
                )
                at = then
        lows, highs = zip(*found, strict=True)
        there = [int(low) for low in lows if low is not None]
        return (min(there), max(int(high) for high in highs if high is not None)) if there else None

    def chosen(
        self,
        *,
        ids: Sequence[int] = (),
        event_ids: Sequence[str] = (),
        aggregate: Aggregate | None = None,
        since_us: int | None = None,
        until_us: int | None = None,
    ) -> array[int]:
        """Return the ids of the rows that satisfy all conditions given, ascending: 8 bytes each."""
        conditions, parameters = [], list[object]()
        if ids or event_ids:
            numbers = ",".join([str(int(row_id)) for row_id in ids]) or "0"
            conditions.append(f"(id IN ({numbers}) OR event_id IN %s)")
            parameters.append(list(event_ids) or [""])
        if aggregate is not None:
            conditions.append("aggregate_type = %s AND aggregate_id = %s")
            parameters += aggregate
        for sign, at in ((">=", since_us), ("<", until_us)):
            if at is not None:
                conditions.append(f"created_at {sign} '1970-01-01' + INTERVAL {at} MICROSECOND")
        found = array("Q")
        while True:
            after = found[-1] if found else 0
            rows = self._read(
                f"SELECT id FROM {self._table} WHERE {' AND '.join(conditions)} AND id > {after}"
                " ORDER BY id LIMIT 100000",
                tuple(parameters),
            )
            if not rows:
                return found
            found.extend(int(row[0]) for row in rows)

    def now_us(self) -> int:
        """The database's clock, microseconds since 1970."""
        sql = "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
        return int(self._read(sql)[0][0])

    def unseen(self, after_id: int) -> tuple[list[tuple[int, Aggregate]], int | None]:
        """Return (id, aggregate) of the pending rows that are written and not visible yet: their
        transactions are open, prepared (XA), or stand in the binlog already and wait for something
        (a semi-synchronous replica). Of the first 5,000 pending rows behind ``after_id`` only, with
        the id behind which to go on; None at the end. Waits for no lock."""
        sql = self._scan_sql(0, _MARK_ROWS, after_id, _HIGHEST_ID)
        written = self._read(sql, uncommitted=True)
        if not written:
            return [], None
        last_id = int(written[-1][0])
        seen = {row.id for row in self.scan_rows(0, _MARK_ROWS, after_id, last_id)}
        there = {row[0]: _aggregate(row[1:3]) for row in written if row[0] not in seen}
        found = [(row_id, there[row_id]) for row_id in self.still_unseen(sorted(there))]
        return found, last_id

    def still_unseen(self, ids: Sequence[int]) -> list[int]:
        """Return those of ``ids``, in their order, that are written and not visible yet."""
        found: list[int] = []
        for start in range(0, len(ids), _MARK_ROWS):
            part = ids[start : start + _MARK_ROWS]
            sql = (
                f"SELECT id FROM {self._table}{self._shape.force_index('id')}"
                f" WHERE id IN ({','.join([str(int(row_id)) for row_id in part])})"
            )
            # In this order: what becomes visible in between counts as visible.
            written = {row[0] for row in self._read(sql, uncommitted=True)}
            seen = {row[0] for row in self._read(sql)}
            found += [row_id for row_id in part if row_id in written - seen]
        return found

    def settle(self, ids: Sequence[int]) -> None:
        """Return when the rows of ``ids``, which came out of the binlog this moment, are visible
        to SELECT. Until they are, they are locked: their locks are waited for. What is missing
        then is gone."""
        for part in _lists(ids):
            self._read(f"SELECT id FROM {self._table} WHERE id IN ({part}) LOCK IN SHARE MODE")

    def _events(
        self, ids: Sequence[int], most: int
    ) -> tuple[list[tuple[OutboxEvent, int, int]], Sequence[int]]:
        """(event, retry_count, status) of the first rows of ``ids`` that exist, by id, and the ids
        that were not looked at, in their order.

        Nothing tells beforehand how large rows are, so they are read one by one, and as many as
        the sizes seen last allow; where they turn out to be much larger, the rest is not read.
        """
        part = ids[: min(most, self._rows_at_once)]
        if not part:
            return [], part
        headers = "headers" if "headers" in self._shape.columns else "NULL"
        sql = (
            "SELECT id, event_id, aggregate_type, aggregate_id, event_type, payload,"
            # Computed by the server: a zero date has no Python value, and gives NULL here.
            f" {headers}, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', created_at),"
            f" COALESCE(retry_count, 0), status{self._shape.extra_sql} FROM {self._table}"
            f" WHERE id IN ({','.join([str(int(row_id)) for row_id in part])}) ORDER BY id"
        )
        found: list[tuple[OutboxEvent, int, int]] = []
        size = 0
        rest = ids[len(part) :]
        with (
            self._noticing_changes(),
            connected(self._engine) as connection,
            streamed(connection, self._sql(sql)) as rows,
        ):
            for row in rows:
                # NULL in a column of an existing table reads as empty: the router judges it.
                names = [name or "" for name in row[1:5]]
                payload, also = _bytes(row[5]), _bytes(row[6])
                size += _ROW_BYTES + len(payload or b"") + len(also or b"")
                extra: tuple[bytes | None, ...] = ()
                if len(row) > _OWN_COLUMNS:
                    extra = tuple([_bytes(value) for value in row[_OWN_COLUMNS:]])
                    size += sum([len(value or b"") for value in extra])
                event = OutboxEvent._make((row[0], *names, payload, also, row[7], extra))
                found.append((event, row[8], row[9]))
                if size > 2 * _READ_BYTES:
                    rest = [*(row_id for row_id in part if row_id > event.id), *rest]
                    break
        if found:
            self._rows_at_once = max(1, _READ_BYTES * len(found) // size)
        return found, rest

    def record_failure(self, event: OutboxEvent, retry_count: int, reason: str) -> Failure:
        """Count a failure of ``event``, whose row had ``retry_count`` failures when it was read.

        Sets the next try on the ladder, or makes the row dead after more than ``max_tries``
        failures, and keeps ``reason`` where the table has ``last_error``. Two processes that saw
        the same failure count it once.
        """
        tries = min(retry_count + 1, self._most_tries)
        dead = tries > min(self._max_tries, self._most_tries - 1)
        delay_s = 0 if dead else retry_delay_s(tries)
        changes = [f"status = {DEAD if dead else PENDING}", f"retry_count = {tries}"]
        if not dead:
            changes.append(f"next_retry_time = UTC_TIMESTAMP(6) + INTERVAL {delay_s} SECOND")
        parameters: tuple[object, ...] = (event.event_id,)
        if "last_error" in self._shape.columns:
            changes.append("last_error = %s")
            parameters = (self._fitting(reason), event.event_id)
        sql = (
            f"UPDATE {self._table} SET {', '.join(changes)}, updated_at = UTC_TIMESTAMP(6)"
            # NULL was read as empty, and as no failure.
            f" WHERE id = {int(event.id)} AND COALESCE(event_id, '') = %s AND status = {PENDING}"
            f" AND COALESCE(retry_count, 0) = {int(retry_count)}"
        )
        if self._update(sql, parameters) == 0:
            return Failure("gone", retry_count, 0)
        if dead:
            self._tell(event, tries, reason)
        return Failure("dead" if dead else "retry", tries, delay_s)

    def waiting(
        self, aggregate_type: str, aggregate_id: str | None, limit: int, after_id: int = 0
    ) -> list[WaitingRow]:
        """Return the first pending rows of an aggregate (of a whole type where ``aggregate_id`` is
        None) behind ``after_id``, in id order, without what makes rows large. Rows of others that
        the database takes for equal are among them."""
        condition, parameters = _of(aggregate_type, aggregate_id, "outbox.")
        hint = self._shape.force_index("status", "aggregate_type", "aggregate_id")
        later = "TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), outbox.next_retry_time)"
        behind, dead = self._behind_dead()
        found = self._read(
            "SELECT outbox.id, outbox.event_id, outbox.aggregate_type, outbox.aggregate_id,"
            f" COALESCE({later}, 0), {behind} FROM {self._table} AS outbox{hint}{dead}"
            f" WHERE outbox.status = {PENDING}{condition}"
            f" AND outbox.id > {int(after_id)} ORDER BY outbox.id LIMIT {int(limit)}",
            parameters,
        )
        return [
            WaitingRow(row[0], row[1] or "", *_aggregate(row[2:4]), _seconds(row[4]), bool(row[5]))
            for row in found
        ]

    def held(self, ids: Sequence[int]) -> list[HeldRow]:
        """Return the rows of ``ids`` that exist, in id order, without what makes rows large."""
        later = "TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), next_retry_time)"
        found = self._read(
            f"SELECT id, aggregate_id, status, COALESCE({later}, 0) FROM {self._table}"
            f" WHERE id IN ({','.join([str(int(row_id)) for row_id in ids])}) ORDER BY id"
        )
        return [
            HeldRow(row_id, key or "", int(status), _seconds(microseconds))
            for row_id, key, status, microseconds in found
        ]

    def dead_aggregates(
        self, aggregate_type: str | None, aggregate_id: str | None, limit: int
    ) -> list[Aggregate]:
        """Return the aggregates that have a dead row: all, those of a type, or this one; others
        that the database takes for equal are among them."""
        where, parameters = _of(aggregate_type, aggregate_id)
        found = self._read(
            f"SELECT {_DISTINCT_AGGREGATES} FROM {self._table}"
            f" WHERE status = {DEAD}{where} LIMIT {int(limit)}",
            parameters,
        )
        return [_aggregate(row[:2]) for row in found]

    def dead(
        self, limit: int, *, event_ids: Sequence[str] | None = None, payload: bool = False
    ) -> list[dict[str, Any]]:
        """Return dead rows as dictionaries, lowest id first, with or without payload."""
        names = ["id", "event_id", "aggregate_type", "aggregate_id", "event_type"]
        names += ["retry_count", "created_at", "updated_at"]
        names += ["last_error"] * ("last_error" in self._shape.columns)
        if payload:
            names += ["payload"] + ["headers"] * ("headers" in self._shape.columns)
        which, parameters = _which(event_ids)
        dead = f" FROM {self._table} WHERE status = {DEAD}"
        tail = f" ORDER BY id LIMIT {int(limit)}"
        if payload:
            # By their ids, which come in order: the server has no room to sort large payloads.
            ids = [
                str(int(row_id))
                for [row_id] in self._read(f"SELECT id{dead}{which}{tail}", parameters)
            ]
            which, parameters = f" AND id IN ({','.join(ids) or '0'})", ()
        rows = self._read(f"SELECT {', '.join(names)}{dead}{which}{tail}", parameters)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def revive(self, event_ids: Sequence[str] | None) -> int:
        """Make dead rows (all of them where None) pending, as if they had never failed; return
        how many."""
        nullable = self._shape.columns["next_retry_time"].nullable
        due = "NULL" if nullable else "UTC_TIMESTAMP(6)"
        which, parameters = _which(event_ids)
        return self._update(
            f"UPDATE {self._table} SET status = {PENDING}, retry_count = 0,"
            f" next_retry_time = {due}, updated_at = UTC_TIMESTAMP(6)"
            f" WHERE status = {DEAD}{which}",
            parameters,
        )

    def discard_dead(self, event_ids: Sequence[str] | None) -> int:
        """Delete dead rows (all of them where None); return how many."""
        which, parameters = _which(event_ids)
        return self._update(f"DELETE FROM {self._table} WHERE status = {DEAD}{which}", parameters)

    def failing(self, limit: int, aggregate_type: str | None = None) -> list[Aggregate]:
        """Return aggregates, of all types or one, that must wait: those with a row on the ladder
        or, where dead rows block, with a dead one."""
        of_type, parameters = _of(aggregate_type, None)
        found = self._read(
            f"SELECT {_DISTINCT_AGGREGATES}{self._failing}{of_type} LIMIT {int(limit)}", parameters
        )
        return [_aggregate(row[:2]) for row in found]

    def failing_types(self) -> list[str]:
        """Return the types of the aggregates that must wait."""
        found = self._read(
            f"SELECT DISTINCT aggregate_type, CAST(aggregate_type AS BINARY){self._failing}"
        )
        return [name or "" for name, _ in found]

    @property
    def _failing(self) -> str:
        """Where the rows are that make their aggregates wait."""
        condition = f"(status = {PENDING} AND {self._has_failed})"
        if self._on_dead == "block":
            condition = f"({condition} OR status = {DEAD})"
        hint = self._shape.force_index("status", "next_retry_time")
        return f" FROM {self._table}{hint} WHERE {condition}"

    @property
    def _has_failed(self) -> str:
        """The condition on a pending row. Each failure sets a time, by which it is found quickly;
        where services set one themselves, or every row has one, the tries are read."""
        nullable = self._shape.columns["next_retry_time"].nullable
        return "next_retry_time IS NOT NULL AND retry_count > 0" if nullable else "retry_count > 0"

    def backlog(self) -> Backlog:
        """Count what is pending and dead. Reads those entries of the status index and one row, so
        a large table of sent rows costs nothing."""
        by_status = self._shape.force_index("status", "next_retry_time")
        nullable = self._shape.columns["next_retry_time"].nullable
        failing = "NULL"
        if nullable:
            failing = (
                f"(SELECT COUNT(*) FROM {self._table}{by_status}"
                f" WHERE status = {PENDING} AND {self._has_failed})"
            )
        [(pending, failing_count, dead, age, clock)] = self._read(
            f"SELECT found.pending, {failing},"
            f" (SELECT COUNT(*) FROM {self._table}{by_status} WHERE status = {DEAD}),"
            " TIMESTAMPDIFF(MICROSECOND, oldest.created_at, UTC_TIMESTAMP(6)),"
            " TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
            " FROM (SELECT COUNT(*) AS pending, MIN(id) AS id"
            f" FROM {self._table}{by_status} WHERE status = {PENDING}) AS found"
            f" LEFT JOIN {self._table} AS oldest ON oldest.id = found.id"
        )
        return Backlog(
            int(pending),
            None if failing_count is None else int(failing_count),
            int(dead),
            None if age is None else max(0, int(age)) / 1e6,
            int(clock) / 1e6,
        )

    def troubled(self, limit: int) -> list[Troubled]:
        """Return up to ``limit`` dead rows and as many that were refused and wait, those first
        whose next try comes first, without what makes rows large."""
        reason = "COALESCE(last_error, '')" if "last_error" in self._shape.columns else "''"
        by_status = self._shape.force_index("status", "next_retry_time")
        later = "TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), next_retry_time)"

        def part(status: int) -> str:
            refused = " AND next_retry_time IS NOT NULL" if status == PENDING else ""
            return (
                "(SELECT event_id, aggregate_type, aggregate_id, event_type,"
                " COALESCE(retry_count, 0), status,"
                f" {later}, {reason} FROM {self._table}{by_status} WHERE status = {status}{refused}"
                f" ORDER BY next_retry_time LIMIT {int(limit)})"
            )

        return [
            Troubled(
                row[0] or "",
                row[1] or "",
                row[2] or "",
                row[3] or "",
                int(row[4]),
                row[5] == DEAD,
                None if row[5] == DEAD else max(0, int(row[6] or 0)) / 1e6,
                str(row[7]),
            )
            for row in self._read(f"{part(DEAD)} UNION ALL {part(PENDING)}")
            if row[4] or row[5] == DEAD
        ]

    def counts(self) -> Counts:
        """Count the rows by status. Walks the status index: about a second for ten million."""
        groups = self._read(f"SELECT status, COUNT(*) FROM {self._table} GROUP BY status")
        by_status = {int(status): int(count) for status, count in groups}
        [(failing_count, oldest)] = self._read(
            f"SELECT (SELECT COUNT(*) FROM {self._table}"
            f" WHERE status = {PENDING} AND {self._has_failed}),"
            " TIMESTAMPDIFF(MICROSECOND, MIN(created_at), UTC_TIMESTAMP(6))"
            f" FROM {self._table} WHERE status = {PENDING}"
        )
        return Counts(
            pending=by_status.get(PENDING, 0),
            failing=int(failing_count),
            sent=by_status.get(SENT, 0),
            dead=by_status.get(DEAD, 0),
            oldest_pending_s=None if oldest is None else max(0, int(oldest)) / 1e6,
        )

    def _scan_sql(self, older_than_s: float, limit: int, after_id: int, last_id: int) -> str:
        young = "FALSE"
        if older_than_s > 0:
            young = f"COALESCE(outbox.created_at > {_ago(older_than_s)}, FALSE)"
        behind, dead = self._behind_dead()
        waits = f"COALESCE(outbox.next_retry_time > UTC_TIMESTAMP(6), FALSE) OR {behind}"
        by_retry = self._shape.force_index("status", "next_retry_time")

        def part(condition: str) -> str:
            return (
                f"SELECT outbox.id, outbox.aggregate_type, outbox.aggregate_id, {young}, {waits},"
                f" COALESCE(outbox.retry_count, 0) FROM {self._table} AS outbox{by_retry}{dead}"
                f" WHERE outbox.status = {PENDING}{condition} AND outbox.id > {after_id}"
                f" AND outbox.id <= {last_id} ORDER BY outbox.id LIMIT {limit}"
            )

        if not self._shape.columns["next_retry_time"].nullable:
            # Takes no IS NULL: of a zero date in a NOT NULL column MySQL says that it is both.
            return part("")
        # Rows that never failed come out of (status, next_retry_time) in id order without a
        # sort; only the few that failed are sorted.
        due = " AND outbox.next_retry_time IS"
        fresh, failed = part(f"{due} NULL"), part(f"{due} NOT NULL")
        return f"({fresh}) UNION ALL ({failed}) ORDER BY id LIMIT {limit}"

    def _behind_dead(self) -> tuple[str, str]:
        """Whether a dead row of its aggregate blocks a row of ``outbox``: a condition, and what is
        to be joined for it."""
        if self._on_dead == "release":
            return "FALSE", ""
        # The same bytes: what the database takes for equal are different keys to Kafka.
        names = ("aggregate_type", "aggregate_id")
        by_aggregate = self._shape.force_index("status", *names)
        if by_aggregate:
            same = "".join(
                f" AND dead.{name} = outbox.{name}"
                f" AND CAST(dead.{name} AS BINARY) = CAST(outbox.{name} AS BINARY)"
                for name in names
            )
            return (
                f"EXISTS (SELECT 1 FROM {self._table} AS dead{by_aggregate}"
                f" WHERE dead.status = {DEAD}{same} AND dead.id < outbox.id)"
            ), ""
        # Without that index the table would be walked for each row: once for all instead.
        bytes_ = ", ".join(f"CAST({name} AS BINARY) AS {name}" for name in names)
        same = " AND ".join(f"dead.{name} = CAST(outbox.{name} AS BINARY)" for name in names)
        return "dead.id IS NOT NULL", (
            f" LEFT JOIN (SELECT {bytes_}, MIN(id) AS id FROM {self._table}"
            f" WHERE status = {DEAD} GROUP BY 1, 2) AS dead ON {same} AND dead.id < outbox.id"
        )

    def _fitting(self, reason: str) -> str:
        """``reason`` as the column ``last_error`` can hold it."""
        column = self._shape.columns["last_error"]
        if column.charset != "utf8mb4":
            reason = reason.encode("ascii", "backslashreplace").decode()
        return reason[: min(column.characters, _REASON_CHARACTERS)]

    def _read(
        self, sql: str, parameters: tuple[object, ...] = (), *, uncommitted: bool = False
    ) -> list[Any]:
        with self._noticing_changes(), connected(self._engine) as connection:
            if uncommitted:  # of the next transaction only
                connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
            return list(connection.exec_driver_sql(self._sql(sql), parameters).all())

    def _update(self, sql: str, parameters: tuple[object, ...], *, waits: bool = True) -> int:
        sql = self._sql(sql)

        def once() -> int:
            with self._engine.connect() as connection:
                return connection.exec_driver_sql(sql, parameters).rowcount

        with self._noticing_changes(), database_errors(self._engine.url):
            return retry_locked(once, waits=waits)

    @contextmanager
    def _noticing_changes(self) -> Iterator[None]:
        """Where the body's statement does not fit the table any more (a column or an index was
        dropped), work by the table as it is now, and raise ``SourceUnavailableError``: the next try
        makes another statement. Raises ``SourceError`` where nobody can work with that table."""
        shape = self._shape
        try:
            yield
        except ChangedTableError as error:
            if self._describe is None:
                raise
            if self._shape is shape:  # else another thread was faster
                with connected(self._engine) as connection:
                    now = self._describe(connection)
                if now.columns == shape.columns and now.indexes == shape.indexes:
                    raise  # it is as it was: this statement will never do
                self._work_by(now)
            raise SourceUnavailableError(f"table {self.name} was changed: {error}") from error


class PendingScan:
    """One walk over the pending rows, lowest id first, that never lets an event overtake an
    earlier one of its aggregate.

    Iterate to get batches of events to send. A row that must wait closes its aggregate for the
    rest of the walk; the caller adds to ``closed`` the aggregate of each event that it could not
    send. The walk ends at the highest id that was due when it began, so it ends. Between batches
    nothing is open: no transaction, no connection. One thread.
    """

    def __init__(self, store: Store, older_than_s: float, limit: int) -> None:
        self._store = store
        self._older_than_s = older_than_s
        self.limit = limit
        """Rows of the next batch, at most; may be changed on the way."""
        self.retries = True
        """Whether rows that have failed before are sent when their time has come; otherwise they
        close their aggregates."""
        self.closed: set[tuple[str, str | None]] = set()
        """Aggregates that wait; None in the second place is a whole type."""
        self.kept: set[tuple[str, str | None]] = set()
        """Those that another process keeps back: they wait as well, and are its business."""
        self._after_id = 0
        self._last_id: int | None = None
        self.held = 0
        """Rows passed over so far, old enough but with an earlier failure in their way."""
        self.held_by_others = 0
        """Rows passed over so far because their aggregate is ``kept``."""

    def __iter__(self) -> Iterator[list[PendingEvent]]:
        for ids in self.ids():
            rest: Sequence[int] = ids
            while rest:
                events, rest = self._store.events(rest)
                if events:
                    yield events

    def ids(self) -> Iterator[list[int]]:
        """Iterate like this to get the ids only."""
        while (ids := self.next_ids()) is not None:
            yield ids

    def next_ids(self) -> list[int] | None:
        """The ids of the next batch; None at the end. After an error it may be called again."""
        if self._last_id is None:
            self._last_id = self._store.newest_pending(self._older_than_s)
        while self._after_id < self._last_id:
            rows = self._store.scan_rows(
                self._older_than_s, self.limit, self._after_id, self._last_id
            )
            if not rows:
                break
            self._after_id = rows[-1].id
            if due := self._due(rows):
                return due
        return None

    def holds(self, aggregate: Aggregate) -> bool:
        """Whether the aggregate waits."""
        return _among(self.closed, aggregate) or _among(self.kept, aggregate)

    def others(self, aggregate: Aggregate) -> bool:
        """Whether it waits for another process only."""
        return _among(self.kept, aggregate) and not _among(self.closed, aggregate)

    def _due(self, rows: list[ScannedRow]) -> list[int]:
        due = []
        for row in rows:
            if row.young or row.waits or (row.tried and not self.retries):
                self.closed.add(row.aggregate)
            if not self.holds(row.aggregate):
                due.append(row.id)
            elif self.others(row.aggregate):
                self.held_by_others += 1
            elif not row.young:
                self.held += 1
        return due


def _among(closed: set[tuple[str, str | None]], aggregate: Aggregate) -> bool:
    return bool(closed) and (aggregate in closed or (aggregate[0], None) in closed)


def _which(event_ids: Sequence[str] | None) -> tuple[str, tuple[object, ...]]:
    """A condition on event ids and its parameters; none where all rows are meant."""
    return ("", ()) if event_ids is None else (" AND event_id IN %s", (list(event_ids),))


def _numbers(rows: Sequence[tuple[int, str]]) -> str:
    """The ids of rows as a text for IN (...)."""
    return ",".join([str(int(row_id)) for row_id, _ in rows])


def _lists(ids: Sequence[int]) -> Iterator[str]:
    """The ids as texts for IN (...), each of bounded length."""
    for start in range(0, len(ids), _MARK_ROWS):
        yield ",".join([str(int(row_id)) for row_id in ids[start : start + _MARK_ROWS]])


def _aggregate(names: Sequence[str | None]) -> Aggregate:
    """An aggregate as it is read: NULL, which a column of an existing table may be, is empty."""
    kind, key = names
    return kind or "", key or ""


def _of(
    aggregate_type: str | None, aggregate_id: str | None, prefix: str = ""
) -> tuple[str, tuple[object, ...]]:
    """A condition on the rows of an aggregate and its parameters, the other way round; None for
    any. As the database compares: what it takes for equal is found too."""
    where, parameters = "", list[object]()
    for name, value in (("aggregate_type", aggregate_type), ("aggregate_id", aggregate_id)):
        if value:
            where += f" AND {prefix}{name} = %s"
            parameters.append(value)
        elif value is not None:
            where += f" AND ({prefix}{name} = '' OR {prefix}{name} IS NULL)"
    return where, tuple(parameters)


def _within(since_us: int, until_us: int) -> str:
    ends = [f"'1970-01-01' + INTERVAL {int(at)} MICROSECOND" for at in (since_us, until_us)]
    return f"created_at >= {ends[0]} AND created_at < {ends[1]}"


def _seconds(microseconds: int) -> float:
    """Until a time: 0 where it is past."""
    return max(0.0, int(microseconds) / 1e6)


def _ago(seconds: float) -> str:
    return f"UTC_TIMESTAMP(6) - INTERVAL {int(seconds * 1_000_000)} MICROSECOND"


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
