"""All SQL on the outbox table except the INSERT: mark, scan, park, count.

Every statement is a transaction of its own (the engine is in autocommit), so no method leaves a
transaction, a lock or a read view behind. Ages and retry times are measured by the database's
clock, in UTC. Errors are ``SourceError`` and ``SourceUnavailableError``, one line each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from sqlalchemy import Engine

from cdc_relay.database import TableShape, database_errors, retry_locked
from cdc_relay.outbox import DEAD, PENDING, SENT, OutboxEvent

# Waiting times after the first, second, … failure; the last one repeats.
RETRY_LADDER_S: Final = (1, 5, 30, 120, 900, 3600, 21600)

# One UPDATE of this many rows is about 250 kB of SQL, far below any max_allowed_packet.
_MARK_ROWS: Final = 5000

Aggregate = tuple[str, str]
"""(aggregate_type, aggregate_id)"""


class PendingEvent(NamedTuple):
    """A pending row: the event, and how often sending it has failed so far."""

    event: OutboxEvent
    retry_count: int


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
    ) -> None:
        """``max_tries`` failures are forgiven, the next one makes a row dead; ``on_dead`` decides
        whether a dead row keeps later events of its aggregate back."""
        self._engine = engine
        self._shape = shape
        self._table = shape.quoted
        self._max_tries = max_tries
        self._on_dead = on_dead
        sent_at = ", sent_at = UTC_TIMESTAMP(6)" if "sent_at" in shape.columns else ""
        # Driven by the primary key whatever the optimizer's statistics say: rows are locked in
        # id order, the same in every session, so two of them wait instead of deadlocking.
        self._mark_head = (
            f"UPDATE {self._table} FORCE INDEX (PRIMARY)"
            f" SET status = {SENT}{sent_at}, updated_at = UTC_TIMESTAMP(6) WHERE id IN ("
        )
        self._mark_tail = f") AND event_id IN %s AND status = {PENDING}"

    def mark_sent(self, rows: Sequence[tuple[int, str]]) -> int:
        """Mark the pending rows among ``rows``, (id, event_id) each, as sent; return how many.

        One UPDATE, one transaction, for up to 5,000 rows; more are split. A row is known by id
        and event_id together, so an id that was given out again after TRUNCATE is left alone.
        Rows that are no longer pending, or gone, are passed over. Deadlocks and lock waits are
        tried again. Rows marked before an error stay marked: calling again is safe.
        """
        ordered = sorted(rows)
        marked = 0
        for start in range(0, len(ordered), _MARK_ROWS):
            part = ordered[start : start + _MARK_ROWS]
            # Numbers go into the text as they are; the driver escapes the list of event ids.
            ids = ",".join([str(int(row_id)) for row_id, _ in part])
            sql = self._mark_head + ids + self._mark_tail
            marked += self._update(sql, ([event_id for _, event_id in part],))
        return marked

    def _update(self, sql: str, parameters: tuple[object, ...]) -> int:
        def once() -> int:
            with self._engine.connect() as connection:
                return connection.exec_driver_sql(sql, parameters).rowcount

        with database_errors(self._engine.url):
            return retry_locked(once)
