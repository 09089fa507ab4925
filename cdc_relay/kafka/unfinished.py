"""Whether transactions of ours have ended in every partition that they went to.

Brokers may forget that (``markers.py``). A partition whose last record is not visible to a
``read_committed`` reader holds a transaction that has not ended, of whomever.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, Final, NamedTuple

import structlog
from confluent_kafka import (
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from cdc_relay.config import Settings
from cdc_relay.kafka.client import UNKNOWN_TOPIC, base_config, create, final, text
from cdc_relay.kafka.sink import FencedError
from cdc_relay.router import Record

log: Any = structlog.get_logger(__name__)

_HEADER: Final = "topics"
# Different sets of topics: those of the last transaction of each of two producers, and of some that
# were given up.
_TRANSACTIONS: Final = 8
_MOST_TOPICS: Final = 200
_LOOK_S: Final = 2.0
# The markers of a transaction are written within milliseconds of its commit.
_FORGOTTEN_S: Final = 1.0
_SAY_S: Final = 5.0
_PAUSE_S: Final = 0.5
LEADERLESS_S: Final = 30.0
_NOT_THERE: Final = UNKNOWN_TOPIC | {KafkaError.TOPIC_AUTHORIZATION_FAILED}


class Place(NamedTuple):
    """A partition."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


class Written:
    """The topics of an owner's last transactions, whatever became of them. Kept over its terms."""

    def __init__(self) -> None:
        self._last: deque[Set[str]] = deque(maxlen=_TRANSACTIONS)
        self.batch_bytes = 0
        """The largest batch that every topic of theirs takes, where that turned out to be less
        than a producer makes; 0 otherwise."""

    def add(self, topics: Set[str]) -> None:
        """A transaction goes to ``topics``."""
        if not topics or (self._last and self._last[-1] == topics):
            return
        if topics in self._last:
            self._last.remove(topics)
        self._last.append(topics)

    @property
    def topics(self) -> list[str]:
        """Those of the newest transaction first; no more than 200."""
        found: dict[str, None] = {}
        for topics in reversed(self._last):
            found.update(dict.fromkeys(sorted(topics)))
        return list(found)[:_MOST_TOPICS]

    def named(self, checkpoint: Record) -> Record:
        """A checkpoint, with a header that names the topics: for who starts after a crash."""
        header = (_HEADER, ",".join(self.topics).encode())
        return checkpoint._replace(headers=[*checkpoint.headers, header])

    @staticmethod
    def read(headers: Iterable[tuple[str, bytes | None]]) -> Set[str]:
        """The topics that a checkpoint names."""
        return {
            topic
            for name, value in headers
            if name == _HEADER and value
            for topic in value.decode().split(",")
        }


class Look(NamedTuple):
    """What was seen of some partitions."""

    open: Mapping[Place, int]
    """In which a transaction has not ended, and up to which offset a reader sees."""
    silent: Set[Place]
    """Of which there is no answer now."""


class Partitions:
    """What the brokers say of partitions. One thread."""

    def __init__(self, settings: Settings, timeout: float = _LOOK_S) -> None:
        """``timeout``: of one answer, in seconds."""
        self._timeout = timeout
        self._admin: Any = create(
            AdminClient, base_config(settings, f"cdc-relay-{settings.name}-markers")
        )

    def of(self, topics: Iterable[str]) -> list[Place]:
        """The partitions of ``topics``, as far as they are there. Raises ``KafkaException``."""
        asked = sorted(set(topics))
        if not asked:
            return []
        # Not by their metadata: asking for those creates a topic, where brokers do so.
        answers = self._admin.describe_topics(TopicCollection(asked), request_timeout=self._timeout)
        found = []
        for topic in asked:
            try:
                known = self._answer(answers[topic]).partitions
            except KafkaException as error:
                if error.args[0].code() not in _NOT_THERE:
                    raise
            else:
                found += [Place(topic, one.id) for one in known]
        return found

    def look(self, places: Iterable[Place]) -> Look:
        """Raises ``KafkaException`` for what asking again cannot mend."""
        asked = set(places)
        # In this order: what others append meanwhile must not look like something open.
        ends = self._ends(asked, IsolationLevel.READ_UNCOMMITTED)
        visible = self._ends(ends, IsolationLevel.READ_COMMITTED)
        answered = {place: offset for place, offset in visible.items() if offset is not None}
        return Look(
            {place: offset for place, offset in answered.items() if offset < (ends[place] or 0)},
            frozenset(
                place
                for place in asked
                if (place in ends and ends[place] is None)
                or (place in visible and visible[place] is None)
            ),
        )

    def end(self, place: Place) -> int | None:
        """The offset behind the last record; None where there is no answer now."""
        return self._ends([place], IsolationLevel.READ_UNCOMMITTED).get(place)

    def _ends(self, places: Iterable[Place], isolation: Any) -> dict[Place, int | None]:
        """None for no answer; without those that are not there."""
        latest: Any = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        asked = {TopicPartition(*place): latest for place in places}
        if not asked:
            return {}
        answers = self._admin.list_offsets(
            asked, isolation_level=isolation, request_timeout=self._timeout
        )
        found: dict[Place, int | None] = {}
        for where, answer in answers.items():
            place = Place(where.topic, where.partition)
            try:
                found[place] = self._answer(answer).offset
            except KafkaException as error:
                if error.args[0].code() in _NOT_THERE:
                    continue
                if final(error.args[0]):
                    raise
                found[place] = None
        return found

    def _answer(self, future: Any) -> Any:
        try:
            return future.result(self._timeout + 1)
        except TimeoutError:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer")) from None


class Patience:
    """How long partitions without a leader are waited for: half a minute from when the brokers,
    who tell of the checkpoints' partition again, have no answer about them. One thread."""

    def __init__(self, checkpoints: Place) -> None:
        self._checkpoints = checkpoints
        self._since: float | None = None

    def is_over(self, silent: Set[Place]) -> bool:
        """Whether those that are ``silent`` in the last look are waited for no longer; says so."""
        now = time.monotonic()
        if not silent or self._checkpoints in silent:
            self._since = None  # all is well, or nobody answers at all
            return False
        if self._since is None:
            self._since = now
        if now - self._since <= LEADERLESS_S:
            return False
        log.warning(
            "partitions do not answer: what a broker may have left open there is ended by the next "
            "transaction",
            partitions=[str(place) for place in sorted(silent)],
        )
        self._since = None
        return True


class Ends:
    """Looks, when a broker was away, whether an owner's last transactions have ended. One thread.

    The next transaction of the same producer in a partition would end what is open there its own
    way, and the next one anywhere makes its coordinator forget how the last one was decided.
    """

    def __init__(
        self,
        settings: Settings,
        checkpoints: Place,
        written: Written,
        losses: Callable[[], int],
        foreign: Mapping[Place, int],
    ) -> None:
        """``losses``: how often a broker was found to be away, so far. ``foreign``: what was open
        when all of ours had ended, and up to which offset a reader saw."""
        self._settings = settings
        self._checkpoints = checkpoints
        self._written = written
        self._losses = losses
        self._foreign = foreign
        self._seen = losses()
        self._partitions: Partitions | None = None
        self._open: dict[Place, tuple[int, float]] = {}
        self._silent: Set[Place] = frozenset()
        self._patience = Patience(checkpoints)
        self._since = 0.0  # this doubt
        self._said = False
        self._look_at = 0.0

    def known(self) -> bool:
        """Whether all has ended, or no broker was away. False: not known now, ask again, and send
        nothing meanwhile; the coordinator forgets how the last transaction was decided.

        Raises ``FencedError`` where a transaction does not end: it is for the next term to end it.
        A partition that has had no leader for half a minute is left as it is.
        """
        losses = self._losses()
        if losses == self._seen:
            return True
        now = time.monotonic()
        if self._partitions is None:
            self._partitions, self._since, self._said = Partitions(self._settings), now, False
        if now >= self._look_at:
            self._look(self._partitions, now)
        if self._patience.is_over(self._silent):
            self._silent = frozenset()
        if not self._open and not self._silent:
            self._seen, self._partitions = losses, None
            return True
        if now - self._since > _SAY_S and not self._said:
            self._said = True
            unknown = ", ".join(map(str, sorted((*self._open, *self._silent))))
            log.warning("waiting for Kafka", reason=f"no answer about {unknown}")
        return False

    def _look(self, partitions: Partitions, now: float) -> None:
        try:
            places = [self._checkpoints, *partitions.of(self._written.topics)]
            found = partitions.look(places)
        except KafkaException as error:
            if not final(error.args[0]):
                self._silent = frozenset((*self._silent, self._checkpoints))
                self._look_at = time.monotonic() + _PAUSE_S
                return
            log.warning("cannot look for open transactions", reason=text(error))
            found = Look({}, frozenset())
        before, self._silent = self._open, found.silent
        self._open = {}
        for place, seen in found.open.items():
            if self._foreign.get(place) == seen:
                continue
            was, since = before.get(place, (seen, now))
            self._open[place] = (seen, since if was == seen else now)
            if was == seen and now - since > _FORGOTTEN_S:
                raise FencedError(
                    f"a broker was away, and a transaction does not end in {place} (at {seen})"
                )
        self._look_at = time.monotonic() + (_PAUSE_S if self._silent else 0.0)
