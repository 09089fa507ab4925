"""``Inbox``: an event counts once, however often it is delivered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final
from uuid import UUID

from sqlalchemy import MetaData, Table
from sqlalchemy.orm import Session

from cdc_relay.outbox import (
    INBOX_SEQUENCE_TABLE,
    INBOX_TABLE,
    beside,
    inbox_sequence_table,
    inbox_table,
)

from . import consume as loop
from .received import DeadLetters
from .sql import quoted_table
from .targets import AsyncTarget, Target, run_sync, transaction

if TYPE_CHECKING:
    from confluent_kafka import Consumer
    from sqlalchemy.ext.asyncio import AsyncSession

_LONGEST: Final = 64


class Arrival(Enum):
    """How an event's ``aggregate_seq`` follows the highest one seen of its aggregate."""

    FIRST = "first"
    """None of the aggregate was seen before."""
    NEXT = "next"
    """The number that was due."""
    GAP = "gap"
    """Numbers in between have not been seen."""
    LATE = "late"
    """A number that was seen or passed over already."""


class Inbox:
    """Remembers which events one consumer has handled, in that consumer's own transaction.

    Never commits, never connects, and keeps nothing between calls. Threads, tasks and processes
    may use the same name; a service with several consumers gives each a name of its own, because
    each handles every event once.
    """

    def __init__(
        self,
        consumer: str,
        table: str | Table = INBOX_TABLE,
        *,
        sequences: bool | str | Table = False,
    ) -> None:
        """``consumer`` names the consumer (64 characters), ``table`` the table of
        ``inbox_table(metadata)``. ``sequences`` looks for gaps in ``aggregate_seq``: True for the
        table ``inbox_sequence`` beside it, or that table."""
        if not isinstance(consumer, str) or not 0 < len(consumer) <= _LONGEST:
            raise ValueError(f"a consumer's name has 1 to {_LONGEST} characters: {consumer!r}")
        self.consumer = consumer
        """The name."""
        self.table = inbox_table(MetaData(), table) if isinstance(table, str) else table
        # A duplicate is an update that changes a row, which the server reports as two affected
        # rows, whatever the driver's flags. No error has to be raised and caught, and the row is
        # locked for writing at once, so two redeliveries wait instead of ending in a deadlock.
        self._claim = (
            f"INSERT INTO {quoted_table(self.table)} (consumer, event_id) VALUES (%s, %s) "
            "ON DUPLICATE KEY UPDATE repeats = repeats + 1"
        )
        self._sequences: Table | None = None
        self._arrive = ""
        if sequences is not False:
            name = beside(self.table, INBOX_SEQUENCE_TABLE) if sequences is True else sequences
            made = inbox_sequence_table(MetaData(), name) if isinstance(name, str) else name
            self._sequences = made
            # The old number plus one comes back as the last insert id; an INSERT gives 0.
            self._arrive = (
                f"INSERT INTO {quoted_table(made)} "
                "(consumer, aggregate_type, aggregate_id, last_seq) "
                "VALUES (%s, %s, %s, %s + LAST_INSERT_ID(0)) ON DUPLICATE KEY UPDATE "
                "last_seq = IF(LAST_INSERT_ID(last_seq + 1) <= %s, %s, last_seq)"
            )

    def claim(self, target: Target, event_id: str | UUID) -> bool:
        """Return True the first time ``event_id`` comes, False for a duplicate.

        The claim lives and dies with the transaction of ``target`` (as for ``Outbox.add``): when
        the handling is rolled back, so is the claim, and the redelivered event is claimed anew.
        While another transaction holds the claim this one waits for its outcome, at most
        ``innodb_lock_wait_timeout``.

        Raises ``NotInTransactionError`` for a target that would commit by itself; the drivers'
        errors pass through.
        """
        text = str(event_id)
        if not 0 < len(text) <= _LONGEST:
            raise ValueError(f"an event id has 1 to {_LONGEST} characters: {text!r}")
        if text.endswith(" "):
            # To the index it is the same as one without, which may be another event's.
            raise ValueError(f"an event id must not end with a blank: {text!r}")
        inside = transaction(target, self.table, "inbox.claim")
        affected, _ = inside.upsert(self._claim, (self.consumer, text))
        return affected == 1

    async def claim_async(self, target: AsyncTarget, event_id: str | UUID) -> bool:
        """``claim`` for an ``AsyncSession`` or ``AsyncConnection``."""
        return await run_sync(target, "inbox.claim", lambda inner: self.claim(inner, event_id))

    def arrival(
        self, target: Target, *, aggregate_type: str, aggregate_id: str, aggregate_seq: int
    ) -> tuple[Arrival, int]:
        """Note ``aggregate_seq`` as seen; return how it follows the highest one seen of the
        aggregate, and for a gap how many are missing.

        To be called once for each claimed event, in the same transaction. Needs ``sequences``.
        """
        if self._sequences is None:
            raise TypeError("this inbox has no sequences: Inbox(..., sequences=True)")
        if not 0 <= aggregate_seq < 1 << 63:
            raise ValueError(f"aggregate_seq {aggregate_seq} is no number of 63 bits")
        for name, text in (("aggregate_type", aggregate_type), ("aggregate_id", aggregate_id)):
            if not 0 < len(text) <= _LONGEST:
                raise ValueError(f"{name} has 1 to {_LONGEST} characters: {text!r}")
        inside = transaction(target, self._sequences, "inbox.arrival")
        key = (self.consumer, aggregate_type, aggregate_id)
        _, due = inside.upsert(self._arrive, (*key, aggregate_seq, aggregate_seq, aggregate_seq))
        if due == 0:
            return Arrival.FIRST, 0
        if aggregate_seq < due:
            return Arrival.LATE, 0
        missing = aggregate_seq - due
        return (Arrival.GAP, missing) if missing else (Arrival.NEXT, 0)

    async def arrival_async(
        self, target: AsyncTarget, *, aggregate_type: str, aggregate_id: str, aggregate_seq: int
    ) -> tuple[Arrival, int]:
        """``arrival`` for an ``AsyncSession`` or ``AsyncConnection``."""
        return await run_sync(
            target,
            "inbox.arrival",
            lambda inner: self.arrival(
                inner,
                aggregate_type=aggregate_type,
                aggregate_id=aggregate_id,
                aggregate_seq=aggregate_seq,
            ),
        )

    @property
    def looks_for_gaps(self) -> bool:
        """Whether ``arrival`` can be called."""
        return self._sequences is not None

    def consume(
        self,
        consumer: Consumer,
        session_factory: Callable[[], Session],
        handler: loop.Handler,
        *,
        waits: Sequence[float] = (0.1, 1.0, 5.0, 15.0),
        dead_letters: DeadLetters | None = None,
        outages: tuple[type[Exception], ...] = (),
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Handle each event that a ``confluent_kafka`` consumer receives exactly once.

        For each record, in this order: claim its id in a session of ``session_factory``, call
        ``handler(session, event)``, commit the session, and only then commit the offset. A crash
        anywhere in between delivers the event again, and the claim tells it apart.

        ``consumer`` is subscribed by the caller and must have ``enable.auto.commit`` off (with it
        on, offsets are committed for events that were never handled) and ``isolation.level``
        ``read_committed``, its default. The caller closes it.

        A handler that raises, or that ends the transaction (a commit raises), is rolled back and
        called again after each of ``waits`` (seconds); the record's partition stands still
        meanwhile, the group membership is kept. After the last one the record goes to
        ``dead_letters``, unclaimed, and the next one follows; without ``dead_letters`` the error is
        raised and the offset stays, so that nothing is passed over. A dead letter is not handled in
        the topic of ``dead_letters``. A database that is away (lost connection, deadlock, lock
        timeout) and an error of ``outages`` are waited out without end: they are not the event's
        fault. But from the fifth time that the connection is lost behind the event's claim, each
        is a try: the database is there, and the event loses the connection. A session that cannot
        begin, a claim that fails and a handler that is asynchronous are raised at once: they would
        fail each event. A dead letter that is not taken is a ``RuntimeError``, a fatal error of the
        Kafka client a ``KafkaException``.

        Returns when ``stop()`` says so, asked at least twice a second. One thread.
        """
        loop.Loop(
            self, consumer, session_factory, handler, waits, dead_letters, outages, stop
        ).run()

    async def consume_async(
        self,
        consumer: Consumer,
        session_factory: Callable[[], AsyncSession],
        handler: loop.AsyncHandler,
        *,
        waits: Sequence[float] = (0.1, 1.0, 5.0, 15.0),
        dead_letters: DeadLetters | None = None,
        outages: tuple[type[Exception], ...] = (),
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """``consume`` for asyncio: ``await handler(session, event)`` with an ``AsyncSession``.

        ``consumer`` is a ``confluent_kafka.Consumer`` as for ``consume`` (not an ``AIOConsumer``);
        until this returns it belongs to a thread that polls, waits and asks ``stop()``, so the
        event loop stands still for none of it. Events are handled one at a time in the event loop
        of the caller.

        Cancelling it cancels the handler, which is rolled back, so that its event comes again, and
        raises ``CancelledError`` as soon as the thread has let go of the consumer (a second, or
        five where the broker does not answer).
        """
        await loop.AsyncLoop(
            self, consumer, session_factory, handler, waits, dead_letters, outages, stop
        ).run_async()
