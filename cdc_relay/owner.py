"""Ownership over time: stand by, own the shard for a term, run the relay, stand by again.

A term begins with the fence: the transactional producer ends whatever a predecessor left open, and
only then the last checkpoint is read. It ends when the shard is lost, when the producer cannot go
on (the next term takes a new one), when the position is lost (the next term anchors anew), or when
the process is asked to stop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import structlog

from cdc_relay import faults
from cdc_relay.config import Settings
from cdc_relay.errors import (
    ConfigError,
    PositionLostError,
    SinkUnavailableError,
    SourceUnavailableError,
)
from cdc_relay.kafka import checkpoints
from cdc_relay.kafka.checkpoints import Checkpoint, UnreadableCheckpointError
from cdc_relay.kafka.markers import write_forgotten
from cdc_relay.kafka.membership import Membership, members
from cdc_relay.kafka.owed import NOTHING_OWED
from cdc_relay.kafka.sink import CheckpointTopicGoneError, FencedError, IdempotentSink, Sink
from cdc_relay.kafka.traced import Spans, traced
from cdc_relay.kafka.transactions import TransactionalSink, fence, writer_of
from cdc_relay.kafka.unfinished import LEADERLESS_S, Written
from cdc_relay.position import NOWHERE, Position
from cdc_relay.relay import Relay, Source
from cdc_relay.router import Router
from cdc_relay.store import Store
from cdc_relay.vitals import Vitals

log: Any = structlog.get_logger(__name__)

SHARD: Final = 0
_STANDBY_POLL_S: Final = 0.1
_PAUSE_S: Final = 0.5
_MOST_ANCHORS: Final = 3
_CATCH_UP_POLL_S: Final = 0.2
# Between two looks at the checkpoint of the relay at work.
_LOOK_S: Final = 1.0
_SAY_S: Final = 5.0


class LostShardError(Exception):
    """The shard belongs to another member now."""


class Owner:
    """One member of a relay's group. ``run`` belongs to one thread; ``stop`` to any."""

    def __init__(
        self,
        settings: Settings,
        make_source: Callable[[], Source],
        router: Router,
        store: Store,
        vitals: Vitals | None = None,
        spans: Spans | None = None,
    ) -> None:
        """``make_source`` gives a new source for each term; ``spans``: note what was sent."""
        self._settings = settings
        self._make_source = make_source
        self._router = router
        self._store = store
        self._stopping = threading.Event()
        self._source: Source | None = None
        self._written = Written()
        self._anchor_reason = ""
        self._wanted: Position | None = None
        self._look_at = 0.0
        self._anchor: Position | None = None
        self._anchors = 0  # one behind the other, from which the stream did not go on
        self.vitals = vitals or Vitals()
        self._spans = spans
        self.counters = self.vitals.counters

    def stop(self) -> None:
        """Ask ``run`` to finish what it holds and return."""
        self._stopping.set()
        source = self._source
        if source is not None:
            source.stop()

    def run(self, *, until_current: bool = False) -> None:
        """Take part in the group until ``stop``; with ``until_current``, until the rows are
        delivered that were committed before it owned the shard, or, while it stands by, before it
        was asked: by whoever is at work. Raises errors that trying again cannot mend, and
        ``SinkUnavailableError`` where no broker answers at the start: that may be a mistyped
        address. Later they are waited for."""
        try:
            checkpoints.ensure_topic(self._settings)
        except SinkUnavailableError:
            if self._stopping.is_set():
                return
            raise
        self.vitals.turn()
        membership = Membership(self._settings)
        try:
            standing_by = False
            while not self._stopping.is_set():
                self.vitals.turn()
                if membership.topic_gone:
                    self._make_topic(membership)
                if SHARD not in membership.owned:
                    membership.poll(_STANDBY_POLL_S)
                    if not standing_by and SHARD not in membership.owned:
                        log.info("standing by", name=self._settings.name)
                        self.vitals.role, self.vitals.waiting = "standby", ""
                        standing_by = True
                    if until_current and standing_by and self._is_done_elsewhere():
                        log.info("the relay at work has come to where the log ended")
                        return
                    continue
                standing_by = False
                if self._term(membership, until_current) and until_current:
                    return
        finally:
            membership.close()

    def _is_done_elsewhere(self) -> bool:
        """Whether the relay at work has delivered and marked what was committed when this was asked
        first. One that polls does not tell."""
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + _LOOK_S
        try:
            if self._wanted is None:
                self._wanted = self._make_source().current()
            last = checkpoints.read_last(self._settings, SHARD)
        except (SinkUnavailableError, SourceUnavailableError) as error:
            log.warning("waiting", reason=str(error))
            return False
        if last is None or last.sweeping or last.owed or last.source == "polling":
            return False
        return last.position.reached(self._wanted)

    def _make_topic(self, membership: Membership) -> None:
        """Make the checkpoint topic anew: without it nobody owns anything."""
        membership.topic_gone = False
        try:
            checkpoints.ensure_topic(self._settings)
        except SinkUnavailableError as error:
            log.warning("waiting", reason=str(error))
            membership.topic_gone = True
            self._pause(membership)

    def _going_on(self) -> bool:
        return not self._stopping.is_set()

    def _term(self, membership: Membership, until_current: bool) -> bool:
        """One term; whether it came to its own end."""
        sink: Sink | None = None

        def tick() -> None:
            self.vitals.turn()
            membership.poll(0)
            if SHARD not in membership.owned:
                raise LostShardError

        def going_on() -> bool:
            tick()
            return self._going_on()

        try:
            if not membership.confirmed(SHARD):
                membership.poll(_STANDBY_POLL_S)
                return False
            sink = traced(self._open_sink(membership, going_on), self._spans)
            self.vitals.role = "owner"
            self.vitals.terms += 1
            faults.point("fenced")
            source = self._source = self._make_source()
            start = self._start(source, tick)
            self.vitals.waiting = ""
            log.info("owning the shard", shard=SHARD, position=str(start.position))
            until = source.current() if until_current else None
            relay = Relay(
                self._settings,
                source,
                self._router,
                sink,
                self._store,
                self._stopping,
                tick,
                self.vitals,
                lambda: self._fence_pass(going_on),
            )
            if self._going_on():
                sink = None  # the relay closes it
                relay.run(start, until)
            return True
        except LostShardError:
            log.warning("the shard was taken over by another member", shard=SHARD)
        except FencedError as error:
            membership.topic_gone |= isinstance(error, CheckpointTopicGoneError)
            log.warning("starting a new term", reason=str(error))
            self.vitals.waiting = f"for a new term: {error}"
            self._pause(membership)
        except PositionLostError as error:
            if self._settings.mark == "none":
                raise PositionLostError(
                    f"{error}. Without marks the table does not tell what was sent: set the "
                    "position by hand (cdc-relay position set)"
                ) from None
            # Where the stream went on from the last anchor, this is another loss.
            went_on = self.vitals.position != self._anchor
            self._anchors = 1 if went_on else self._anchors + 1
            if self._anchors > _MOST_ANCHORS:
                raise  # fresh anchors are refused as well
            log.error("position lost: anchoring anew", reason=str(error))
            self._anchor_reason = str(error)
        except (SinkUnavailableError, SourceUnavailableError) as error:
            if self._going_on():
                log.warning("waiting", reason=str(error))
                self.vitals.waiting = f"for the next try: {error}"
                self._pause(membership)
        finally:
            self._source = None
            if sink is not None:
                sink.close(1.0)
        return False

    def _pause(self, membership: Membership) -> None:
        self._stopping.wait(_PAUSE_S)
        membership.poll(0)
        self.vitals.turn()

    def _open_sink(self, membership: Membership, going_on: Callable[[], bool]) -> Sink:
        if self._settings.delivery == "exactly_once":
            return TransactionalSink(self._settings, SHARD, membership, going_on, self._written)
        # What was left when the relay still used transactions.
        write_forgotten(self._settings, writer_of(self._settings, SHARD), (), going_on)
        return IdempotentSink(self._settings, f"cdc-relay-{self._settings.name}-{SHARD}")

    def _fence_pass(self, going_on: Callable[[], bool]) -> Checkpoint | None:
        """End what a compensator's pass has open and return its last word."""
        if self._settings.delivery != "exactly_once":
            return None
        fence(self._settings, "fallback", going_on)
        return self._ours(checkpoints.read_fallback(self._settings, settled=True))

    def _ours(self, last: Checkpoint | None) -> Checkpoint | None:
        """``last``, noted as our table's. Raises ``ConfigError`` where it is another one's."""
        if last is None:
            return None
        last.check_table(self._settings.name, self._store.name)
        return replace(last, table=self._store.name)

    def _start(self, source: Source, tick: Callable[[], None]) -> Checkpoint:
        """Where the term goes on: the last checkpoint, or a new anchor at the end of the log with
        a sweep of the rows that are pending in the table."""
        reason, self._anchor_reason = self._anchor_reason, ""
        try:
            last = self._ours(checkpoints.read_last(self._settings, SHARD, settled=True))
        except UnreadableCheckpointError as error:
            if self._settings.mark == "none":
                raise
            last, reason = None, str(error)
        if self._settings.source == "polling":
            owed = last.owed if last is not None else NOTHING_OWED
            closed = last.closed if last is not None else ()
            return Checkpoint(NOWHERE, owed, closed, source="polling", table=self._store.name)
        if last is not None and last.source == "polling":
            reason = reason or "the relay polled the table before: there is no position"
        if last is None and self.vitals.saved and not reason:
            raise PositionLostError("the checkpoint is gone: its topic was deleted")
        if last is not None and not reason:
            end = self._end(source, last.position, tick)
            beyond = last.position.is_beyond(end)
            # Too far for a dump without GTIDs is said in its own words, by the source.
            if beyond and (last.position.gtids is not None or not last.position.is_far):
                why = "its binary logs have begun anew, or are those of an older copy"
                if last.position.server != end.server:
                    why = (
                        f"it is another one ({end.server} instead of {last.position.server}) and "
                        "has never executed all of these transactions"
                    )
                raise PositionLostError(
                    f"the checkpoint is at {last.position}, but the server's log ends at {end}: "
                    f"{why}"
                )
            self._anchors = 0
            return last
        position = self._anchor = source.anchor()
        sweeping = self._settings.mark != "none"
        self.vitals.anchors += 1
        log.warning(
            "anchored at the end of the log",
            reason=reason or "no checkpoint: first start under this name",
            position=str(position),
            sweeping=sweeping,
        )
        closed = last.closed if last is not None else ()
        owed = last.owed if last is not None else NOTHING_OWED
        return Checkpoint(
            position,
            owed,
            closed,
            sweeping,
            anchor=reason or "first start under this name",
            table=self._store.name,
        )

    def _end(self, source: Source, position: Position, tick: Callable[[], None]) -> Position:
        """Where the server's log ends; waits for a replica that took over until it has executed
        what lies before ``position``, or does not get on."""
        say_at = 0.0
        while True:
            end = source.current()
            waits = source.waits(position, end)
            if not waits:
                return end
            self.vitals.waiting = f"for the database: {waits}"
            if time.monotonic() >= say_at:
                log.warning("waiting", reason=waits)
                say_at = time.monotonic() + _SAY_S
            tick()
            if self._stopping.wait(_CATCH_UP_POLL_S):
                raise SourceUnavailableError(waits)


def write_checkpoint(settings: Settings, checkpoint: Checkpoint) -> None:
    """Write a checkpoint by hand, fenced like any other. Refused while a relay of the name is
    alive."""
    checkpoints.ensure_topic(settings)
    if members(settings):
        raise ConfigError(f"a relay named {settings.name} is running: stop it first")
    membership = Membership(settings)
    deadline = time.monotonic() + 3 * settings.session_timeout
    try:
        while SHARD not in membership.owned:
            if time.monotonic() > deadline:
                raise SinkUnavailableError("the shard was not assigned: are the brokers up?")
            membership.poll(_STANDBY_POLL_S)
        deadline = time.monotonic() + LEADERLESS_S + 3 * settings.transaction_timeout
        sink = TransactionalSink(settings, SHARD, membership, lambda: time.monotonic() < deadline)
        sink.deliver([], checkpoint.record(settings.name), lambda: time.monotonic() < deadline)
        sink.close(1.0)
    finally:
        membership.close()
