"""What a pass may send: agreed with the relay through positions and fencing, never by ages.

A relay is alive when its group has a member. It will send what its checkpoint has not passed, and
what it keeps back itself; what it has passed and what is still pending then was missed, and is the
pass's. A relay that is dead is fenced as a successor would fence it, and everything is the pass's.

The pass delivers through a transactional producer of its own. Each of its transactions holds the
events and one more record, in a topic of its own: which marks are owed, and where the log ended
when it looked. A relay fences that producer when its term begins, before it reads the table; so
who comes second always knows what the first one has sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, Protocol, TypeVar

import structlog

from cdc_relay import faults
from cdc_relay.catchup import CatchUp
from cdc_relay.config import Settings
from cdc_relay.errors import SinkUnavailableError
from cdc_relay.kafka import checkpoints
from cdc_relay.kafka.checkpoints import Checkpoint
from cdc_relay.kafka.membership import members
from cdc_relay.kafka.owed import NOTHING_OWED, Owed
from cdc_relay.kafka.sink import IdempotentSink, Sink
from cdc_relay.kafka.topics import Refusal
from cdc_relay.kafka.traced import Spans, traced
from cdc_relay.kafka.transactions import TransactionalSink, fence
from cdc_relay.kafka.unfinished import Written
from cdc_relay.marker import heal
from cdc_relay.position import NOWHERE, Position
from cdc_relay.router import Record
from cdc_relay.store import PendingScan, Store

log: Any = structlog.get_logger("compensator")

_T = TypeVar("_T")

Relay = Literal["alive", "dead", "none", "forced"]

# Between two looks at the relay's checkpoint.
_LOOK_S: Final = 0.25
_SAY_S: Final = 5.0
# After this a stop is no longer delayed by brokers that do not answer.
_STOP_S: Final = 2.0
# For one answer.
_ANSWER_S: Final = 15.0
_SHARD: Final = 0


class Coordination(Protocol):
    """What a pass needs to know and to say; ``WithRelay`` is the real one."""

    relay: Relay | None
    healed: int
    locked: list[tuple[int, str]]
    """Rows, (id, event_id) each, that an earlier pass or a dead relay had sent and that could not
    be marked in ``begin``, because others hold them: to be marked, and not to be sent."""
    checkpoint: Checkpoint | None
    why_left: str
    """Why the relay was left alone with rows last."""

    def begin(self, scan: PendingScan) -> None:
        """Start a pass: fence, heal, look; say to ``scan`` what waits."""

    def missed(self, ids: list[int], scan: PendingScan) -> list[int] | None:
        """The ids among ``ids`` that the pass may send; None when the relay has to be left alone
        with these and all that follow."""

    def deliver(
        self, records: Sequence[Record], owed: Owed
    ) -> tuple[dict[int, Refusal], frozenset[int]]:
        """Deliver all of ``records`` and say that ``owed`` are sent and not yet marked. Returns
        what was refused and, where something was, what is there nevertheless, by index."""

    def marked(self) -> None:
        """Say that nothing is owed any more."""

    def close(self) -> None:
        """Give up what is open."""


class WithRelay:
    """The coordination with the relay of the same name. One thread at a time.

    Errors: ``SinkError``, ``SourceError``, and ``FencedError`` when a relay, or another pass, took
    over: nothing that was not committed is there, and ``begin`` may be called again.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        stopping: Callable[[], bool],
        *,
        force: bool = False,
        spans: Spans | None = None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._stopping = stopping
        self._force = force
        self._spans = spans
        self._exactly_once = settings.delivery == "exactly_once"
        self._sink: Sink | None = None
        self._until: Position = NOWHERE
        self._said = False
        self._deadline = 0.0
        self._written = Written()
        self.relay: Relay | None = None
        self.checkpoint: Checkpoint | None = None
        self.why_left = ""
        self.healed = 0
        self.locked: list[tuple[int, str]] = []

    # --- the beginning of a pass -----------------------------------------------------------------

    def begin(self, scan: PendingScan) -> None:
        """Start a pass. Afterwards no earlier pass, and no relay that is not alive, can commit
        anything, and what they have sent is marked, or ``locked``."""
        self.locked = []
        self._expect(self._settings.send_timeout)
        if self._sink is None:
            self._sink = traced(self._open(), self._spans)
            self.relay = None
            self._expect(self._settings.send_timeout)  # each may wait for a partition
        # Who has fenced a dead relay owns the table until he is fenced himself.
        if self.relay not in ("dead", "none") or not self._exactly_once:
            self.relay = self._look()
        scan.retries = self.relay != "alive"
        faults.point("pass_begun")

    def _open(self) -> TransactionalSink | IdempotentSink:
        if not self._exactly_once:
            return IdempotentSink(self._settings, f"cdc-relay-{self._settings.name}-compensator")
        settings = self._settings
        self._insist(lambda left: checkpoints.ensure_topic(settings, left, fallback=True))
        sink = self._insist(
            lambda _: TransactionalSink(settings, "fallback", None, self._going_on, self._written)
        )
        faults.point("pass_fenced")
        last = self._insist(
            lambda left: self._ours(checkpoints.read_fallback(settings, left, settled=True))
        )
        if last is not None and last.owed:
            self._until = last.position
            self._said = True
            self._wait_for_replica(last)
            self._heal(last)
        return sink

    def _look(self) -> Relay:
        """Who else there is; a dead relay is fenced."""
        if self._force:
            log.warning("forced: rows that a living relay is about to send may arrive twice")
            return "forced"
        settings = self._settings
        if self._insist(lambda left: members(settings, left)):
            return "alive"
        if self._exactly_once:
            # One that is only paused could still commit what it has open.
            self._insist(lambda _: fence(settings, _SHARD, self._going_on))
            faults.point("relay_fenced")
        self.checkpoint = self._insist(
            lambda left: self._ours(checkpoints.read_last(settings, _SHARD, left, settled=True))
        )
        if self.checkpoint is None:
            return "none"
        self._wait_for_replica(self.checkpoint)
        self._heal(self.checkpoint)
        return "dead"

    def _ours(self, last: Checkpoint | None) -> Checkpoint | None:
        """``last``. Raises ``ConfigError`` where it is another table's."""
        if last is not None:
            last.check_table(self._settings.name, self._store.name)
        return last

    def _wait_for_replica(self, last: Checkpoint) -> None:
        """Let a server that took over come to where ``last`` was written, for a while: its table
        is older, and would show as pending, or not at all, what was sent."""
        if not last.position.gtids:
            return  # nothing tells; a relay that polls has no position, and no grant to ask for one
        catch_up = CatchUp()
        say_at = 0.0
        while not self._stopping():
            waits = catch_up.waits(last.position, self._store.position())
            if not waits:
                return
            if time.monotonic() >= say_at:
                log.warning("waiting for the database", reason=waits)
                say_at = time.monotonic() + _SAY_S
            time.sleep(_LOOK_S)

    def _heal(self, last: Checkpoint) -> None:
        healed = heal(self._store, last.owed)
        self.healed += healed.done
        self.locked += healed.locked
        if healed.done or healed.locked:
            log.info(
                "marks healed",
                owed=len(last.owed),
                marked=healed.done,
                locked=len(healed.locked),
            )

    # --- what may be sent ------------------------------------------------------------------------

    def missed(self, ids: list[int], scan: PendingScan) -> list[int] | None:
        """What of ``ids`` is the pass's. With a living relay this waits, up to ``relay_wait``, for
        it to pass the end of the log as of now."""
        if self.relay != "alive":
            self._until = self._end()
            return ids
        end = self._store.position()
        last = self._passed(end)
        if last is None:
            return None
        self._until = end
        self.checkpoint = last
        scan.kept.update(last.closed)
        sent = {row_id for row_id, _ in last.owed}
        return [row_id for row_id in ids if row_id not in sent]

    def _end(self) -> Position:
        """Where a relay that comes back may stop asking the table."""
        if self.checkpoint is None or self.checkpoint.source == "polling":
            return NOWHERE  # it will ask the table for everything
        return self._store.position()

    def _passed(self, end: Position) -> Checkpoint | None:
        """The relay's checkpoint, when it has passed ``end``; None when it does not in time, or
        reads the table itself."""
        give_up_at = time.monotonic() + self._settings.relay_wait
        while True:
            last = self._ours(checkpoints.read_last(self._settings, _SHARD))
            self.checkpoint = last or self.checkpoint
            if last is not None and (last.sweeping or last.source == "polling"):
                how = "sweeps the table" if last.sweeping else "polls"
                self.why_left = f"the relay {how}"
                return None
            # A relay whose server is behind its checkpoint waits for it, or anchors.
            if last is not None and last.position.passed(end) and not last.position.missing(end):
                return last
            if self._stopping() or time.monotonic() > give_up_at:
                lacks = last is not None and last.position.missing(end)
                self.why_left = "the server is behind the relay" if lacks else "the relay is behind"
                return None
            time.sleep(_LOOK_S)

    # --- sending ---------------------------------------------------------------------------------

    def deliver(
        self, records: Sequence[Record], owed: Owed
    ) -> tuple[dict[int, Refusal], frozenset[int]]:
        """See ``Coordination``. All or nothing where delivery is exactly once."""
        assert self._sink is not None
        self._expect(self._settings.send_timeout)
        word = self._word(owed) if self._exactly_once else None
        try:
            refused = self._sink.deliver(records, word, self._going_on)
        except SinkUnavailableError as error:
            raise self._no_answer(error) from None
        self._said = self._said or not refused
        return refused, frozenset(self._sink.acknowledged)

    def marked(self) -> None:
        """Say that nothing is owed any more, where it was said that something is."""
        if self._exactly_once and self._said and self._sink is not None:
            self._expect(self._settings.send_timeout)
            self._sink.deliver([], self._word(NOTHING_OWED), self._going_on)
            self._said = False

    def _word(self, owed: Owed) -> Record:
        word = Checkpoint(self._until, owed, table=self._store.name)
        return word.fallback_record(self._settings.name)

    def _insist(self, action: Callable[[float], _T]) -> _T:
        """Run ``action``, which takes the seconds it may wait, until the brokers answer, for
        ``send_timeout`` in all."""
        while True:
            try:
                return action(max(1.0, min(_ANSWER_S, self._deadline - time.monotonic())))
            except SinkUnavailableError as error:
                if not self._going_on():
                    raise self._no_answer(error) from None
                log.warning("waiting for Kafka", reason=str(error))
                time.sleep(_LOOK_S)

    def _no_answer(self, error: SinkUnavailableError) -> SinkUnavailableError:
        limit = self._settings.send_timeout
        return SinkUnavailableError(
            f"no answer from Kafka within {limit:g} s: are the brokers up? (send_timeout; {error})"
        )

    def _expect(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def _going_on(self) -> bool:
        if self._stopping():
            self._deadline = min(self._deadline, time.monotonic() + _STOP_S)
        return time.monotonic() < self._deadline

    def close(self) -> None:
        """Give up what is open; ``begin`` opens it again."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close(1.0)
