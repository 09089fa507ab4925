"""Poll, claim, handle, commit, commit the offset: what ``Inbox.consume`` does.

The Kafka client is loaded when the loop starts, never by ``import writer``.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import event as listeners
from sqlalchemy import exc
from sqlalchemy.orm import Session, SessionTransaction

from .outages import Rollbacks, causes, is_lost, is_outage
from .received import DeadLetters, InboxEvent, named, offset, parse, place

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message, TopicPartition
    from sqlalchemy.ext.asyncio import AsyncSession

    from .inbox import Inbox

_log = logging.getLogger("cdc_relay.inbox")

_POLL_S: Final = 0.5
_COMMIT_EVERY_S: Final = 1.0
_LAST_COMMIT_S: Final = 5.0
_OUTAGE_WAITS_S: Final = (0.2, 1.0, 5.0, 10.0)
"""The last one repeats."""

# Key of Session.info, while the handler is at work.
_HANDLING: Final = "cdc_relay_handling"
_LOSSES: Final = 5
"""So many times an event may lose the connection before that counts as a try."""

Handler = Callable[[Session, InboxEvent], object]
"""Does the business of one event in the session's transaction. Must not commit."""
AsyncHandler = Callable[["AsyncSession", InboxEvent], Awaitable[object]]
"""The same for ``Inbox.consume_async``."""


class _StoppedError(Exception):
    """``stop()`` came true while an event was waiting for its next try."""


class _UnclaimableError(ValueError):
    """The record has no event id or a wrong one, and no try will mend it."""


class _NoInboxError(Exception):
    """The session or the claim itself failed; the cause says why."""


class Loop:
    """One run of ``Inbox.consume``; see there."""

    def __init__(
        self,
        inbox: Inbox,
        consumer: Consumer,
        session_factory: Callable[[], Any],
        handler: Callable[[Any, InboxEvent], object],
        waits: Sequence[float],
        dead_letters: DeadLetters | None,
        outages: tuple[type[Exception], ...],
        stop: Callable[[], bool],
    ) -> None:
        if inspect.iscoroutinefunction(getattr(consumer, "poll", None)):
            raise TypeError(
                f"{type(consumer).__name__} is asynchronous: give a confluent_kafka.Consumer"
            )
        self._inbox = inbox
        self._consumer = consumer
        self._sessions = session_factory
        self._handler = handler
        self._waits = waits
        self._dead_letters = dead_letters
        self._outages = outages
        self._stop = stop
        self._handled: dict[tuple[str, int], int] = {}
        """The next offset of each partition, not committed yet."""
        self._asked: list[TopicPartition] = []
        self._committed_at = time.monotonic()
        self._rollbacks = Rollbacks()

    def run(self) -> None:
        try:
            while not self._stop():
                message = self._consumer.poll(_POLL_S)
                if message is not None and not self._is_error(message):
                    self._see_to(message)
                    self._handled[place(message)] = offset(message) + 1
                if message is None or time.monotonic() - self._committed_at > _COMMIT_EVERY_S:
                    self._commit_offsets()
        except _StoppedError:
            pass
        finally:
            self._rollbacks.close()
            self._commit_offsets(last=True)

    def _is_error(self, message: Message) -> bool:
        from confluent_kafka import KafkaError, KafkaException

        error = message.error()
        if error is None:
            return False
        # The client ends for good. The error that it gives out says so by its code alone.
        if error.fatal() or error.code() == KafkaError._FATAL:
            raise KafkaException(error)
        if error.code() != KafkaError._PARTITION_EOF:
            _log.warning("kafka: %s", error)
        return True

    # --- one record ----------------------------------------------------------------------------

    def _see_to(self, message: Message) -> None:
        """Handle one record, or set it aside; raises what the handler raised where it cannot."""
        if self._dead_letters is not None and self._dead_letters.has(message):
            # Handled here, it would overtake itself, fail again, and be a letter of a letter.
            _log.warning(
                "%s is a dead letter and passed over: send it back to its topic once its cause is "
                "mended; a subscription should leave the topics of dead letters out",
                named(message),
            )
            return
        tries = outages = losses = 0
        while True:
            try:
                self._once(message)
                return
            except _StoppedError:
                raise
            except _UnclaimableError as error:
                if self._dead_letters is None:
                    raise
                _log.error("%s goes to the dead letters: %s", named(message), error)
                self._dead_letters.send(message, self._inbox.consumer, str(error))
                return
            except Exception as error:
                cause = error.__cause__ if isinstance(error, _NoInboxError) else error
                # A claim that succeeds shows a database that is there: where the connection is lost
                # behind it again and again, the event loses it (by a statement that is too large).
                lost = cause is error and self._is_lost(error)
                losses += lost
                if self._is_outage(cause) and not (lost and losses >= _LOSSES):
                    delay = _OUTAGE_WAITS_S[min(outages, len(_OUTAGE_WAITS_S) - 1)]
                    outages += 1
                    _log.warning("%s waits for %s s: %s", named(message), delay, _line(cause))
                elif isinstance(error, _NoInboxError):
                    # No table, AUTOCOMMIT: every event would fail, and none is to blame.
                    raise (cause or error) from None
                elif tries < len(self._waits):
                    delay = self._waits[tries]
                    tries += 1
                    _log.warning(
                        "%s failed, try %d of %d: %s",
                        *(named(message), tries, len(self._waits) + 1, _line(error)),
                    )
                elif self._dead_letters is None:
                    raise
                else:
                    _log.exception("%s goes to the dead letters", named(message))
                    self._dead_letters.send(message, self._inbox.consumer, _line(error))
                    return
            self._wait(delay)

    def _once(self, message: Message) -> None:
        """Claim, handle and commit, or nothing of it."""
        with ExitStack() as scope:
            with _no_events_fault():
                session: Session = scope.enter_context(self._sessions())
                transaction = scope.enter_context(session.begin())
            event = self._claim(session, message)
            if event is None:
                return
            with _uncommitted(session):
                result = self._handler(session, event)
            if inspect.isawaitable(result):
                if inspect.iscoroutine(result):
                    result.close()
                raise _NoInboxError from TypeError(
                    "the handler is asynchronous: await inbox.consume_async(...)"
                )
            self._check(result, transaction)

    def _check(self, result: object, transaction: SessionTransaction | None) -> None:
        """Raise where the event would count as handled although it was not."""
        if inspect.isgenerator(result):
            raise _NoInboxError from TypeError("the handler is a generator: nothing of it has run")
        self._rollbacks.check()
        if transaction is None or not transaction.is_active:
            raise RuntimeError(
                "the handler ended the transaction (rollback, close, or an error of a flush that "
                "it caught); with session.begin_nested(): ... is what may fail alone"
            )

    def _claim(self, session: Session, message: Message) -> InboxEvent | None:
        """The event where it comes for the first time."""
        try:
            event = parse(message)
            with _no_events_fault():
                self._rollbacks.watch(session, self._inbox)
            if not self._inbox.claim(session, event.event_id):
                _log.debug("%s is a repetition", named(message))
                return None
            number = event.aggregate_seq
            if number is None or not self._inbox.looks_for_gaps:
                return event
            names = (event.aggregate_type, event.aggregate_id)
            arrival, missing = self._inbox.arrival(
                session, aggregate_type=names[0], aggregate_id=names[1], aggregate_seq=number
            )
        except ValueError as error:  # what the record says cannot be
            raise _UnclaimableError(str(error)) from error
        except _NoInboxError:
            raise
        except Exception as error:
            raise _NoInboxError from error
        if arrival.value in ("gap", "late"):
            told = f"{missing} too far" if missing else "late"
            _log.warning("%s: number %d of %s %s is %s", named(message), number, *names, told)
        return replace(event, arrival=arrival, missing=missing)

    def _is_outage(self, error: BaseException | None) -> bool:
        """Whether it is one, or came of one."""
        return any(
            isinstance(one, (*self._outages, exc.TimeoutError)) or is_outage(one)
            for one in causes(error)
        )

    def _is_lost(self, error: BaseException) -> bool:
        """Whether it came of a lost connection, and of nothing that the service calls an outage."""
        found = list(causes(error))
        return any(map(is_lost, found)) and not any(isinstance(one, self._outages) for one in found)

    def _wait(self, seconds: float) -> None:
        """Wait, polling: a consumer that does not poll is thrown out of its group."""
        from confluent_kafka import TopicPartition

        paused: dict[tuple[str, int], TopicPartition] = {}
        deadline = time.monotonic() + seconds
        try:
            while (left := deadline - time.monotonic()) > 0:
                if self._stop():
                    raise _StoppedError
                assigned = self._consumer.assignment()
                self._consumer.pause(assigned)
                paused.update(((one.topic, one.partition), one) for one in assigned)
                message = self._consumer.poll(min(left, _POLL_S))
                if message is not None and not self._is_error(message):
                    # Of a partition that has just been assigned: it comes again after the wait.
                    self._consumer.seek(TopicPartition(*place(message), offset(message)))
        finally:
            # Those that the group took away meanwhile as well: the client remembers the pause, and
            # would let such a partition stand still when it is given back.
            self._consumer.resume(list(paused.values()))

    def _commit_offsets(self, *, last: bool = False) -> None:
        """Commit what was handled. A failure costs nothing: what comes again is a repetition.

        It is not waited for, as a broker that hangs would hold up ``stop`` with it; but for the
        last time, and then not long.
        """
        from confluent_kafka import KafkaException, TopicPartition

        self._committed_at = time.monotonic()
        try:
            if self._handled:
                self._asked = [
                    TopicPartition(*where, offset) for where, offset in self._handled.items()
                ]
                self._handled.clear()
                self._consumer.commit(offsets=self._asked, asynchronous=True)
            if last and self._asked:
                # The coordinator answers in order: this answer comes behind that of the commit.
                self._consumer.committed(self._asked, timeout=_LAST_COMMIT_S)
        except KafkaException as error:
            _log.warning("offsets were not committed: %s", _line(error))


class AsyncLoop(Loop):
    """One run of ``Inbox.consume_async``: polls and waits in a thread of its own, and handles each
    event in the event loop of the caller."""

    _working: Future[None] | None = None
    """The event that is being handled."""

    async def run_async(self) -> None:
        self._events = asyncio.get_running_loop()
        asked, self._cancelled = self._stop, threading.Event()
        self._stop = lambda: self._cancelled.is_set() or asked()
        pool = ThreadPoolExecutor(1, "cdc-relay-inbox")
        running = self._events.run_in_executor(pool, self.run)
        pool.shutdown(wait=False)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            # The handler is cancelled, so rolled back. The thread has to let go of the consumer
            # before the caller closes it, however often the caller is cancelled.
            self._cancelled.set()
            if self._working is not None:
                self._working.cancel()
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            if (error := running.exception()) is not None:
                _log.error("the consumer ended: %s", _line(error))
            raise

    def _once(self, message: Message) -> None:
        self._working = asyncio.run_coroutine_threadsafe(self._once_async(message), self._events)
        if self._cancelled.is_set():
            self._working.cancel()
        try:
            self._working.result()
        except CancelledError:
            if self._cancelled.is_set():
                raise _StoppedError from None
            raise RuntimeError("the handler was cancelled") from None

    async def _once_async(self, message: Message) -> None:
        async with AsyncExitStack() as scope:
            with _no_events_fault():
                session: AsyncSession = await scope.enter_async_context(self._sessions())
                transaction = await scope.enter_async_context(session.begin())
            event = await session.run_sync(self._claim, message)
            if event is None:
                return
            with _uncommitted(session.sync_session):
                result = self._handler(session, event)
                if not inspect.isawaitable(result):
                    raise _NoInboxError from TypeError(
                        "the handler is not asynchronous: inbox.consume(...) is for such"
                    )
                result = await result
            self._check(result, transaction.sync_transaction)


@contextmanager
def _uncommitted(session: Session) -> Iterator[None]:
    """Refuse the handler a commit. The claim would be committed with the half that is done, and the
    other half, should it fail, would never be tried again: the event is a repetition then."""
    if not listeners.contains(Session, "before_commit", _refuse_commit):
        listeners.listen(Session, "before_commit", _refuse_commit)
    session.info[_HANDLING] = True
    try:
        yield
    finally:
        session.info.pop(_HANDLING, None)


def _refuse_commit(session: Session) -> None:
    if _HANDLING in session.info and not session.in_nested_transaction():
        raise RuntimeError(
            "the handler must not commit: consume does, once it has returned; "
            "with session.begin_nested(): ... is what may fail alone"
        )


@contextmanager
def _no_events_fault() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _NoInboxError from error


def _line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
