"""End markers that the brokers forgot: a transaction that is decided and stays open in a partition.

A transaction is committed when its coordinator has noted it; then the coordinator writes a marker
into each partition. Kafka 4 leaves out every partition that has no leader at that moment
(KAFKA-20734; seen with 4.3.1), and calls the transaction complete. So it goes when a lone broker is
killed between the two, or when all replicas of a partition are away. A ``read_committed`` reader is
given nothing behind it then, and it ends as the next transaction of the same producer ends there.

Therefore, before a predecessor is taken over, which makes the coordinator forget how its last
transaction was decided, what is still open in our partitions is ended as was decided: by a
transaction of the same producer, without records, in those partitions (``coordinator.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import closing
from typing import Any, Final, NamedTuple

import structlog
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from cdc_relay.config import Settings
from cdc_relay.kafka.client import create, final, sink_error, text, topic_reader_config
from cdc_relay.kafka.coordinator import CannotAskError, Coordinator
from cdc_relay.kafka.unfinished import Look, Partitions, Patience, Place, Written

log: Any = structlog.get_logger(__name__)

# Two producers take turns, and each transaction takes two offsets of the checkpoints' partition.
_LOOK_BACK: Final = 16
_ANSWER_S: Final = 5.0
_PAUSE_S: Final = 0.1
_MISSING_S: Final = 0.5
_DOING: Final = "cannot look for open transactions"


class Writer(NamedTuple):
    """Who wrote what may be open."""

    transactional_ids: Sequence[str]
    checkpoints: Place
    group: str
    """Whose offset was in its transactions; empty where none was."""


def write_forgotten(
    settings: Settings, writer: Writer, topics: Iterable[str], going_on: Callable[[], bool]
) -> Mapping[Place, int]:
    """End what the brokers have left open of the last transactions of ``writer``, as it was
    decided, and abort one that is not decided. To be called before its producers are taken over.

    Looks at ``topics`` and at those that the last checkpoints name. Waits for the brokers while
    ``going_on``, not for ever: raises ``SinkUnavailableError``. Where only the coordinator cannot
    be asked (no grant, an older broker, a login that ``kafka-python`` does not know), it says so
    and leaves things as they are. Returns what is still open, and up to which offset a reader
    sees: it is not ours.
    """
    partitions = Partitions(settings, _ANSWER_S)
    places, found = _places(settings, partitions, writer, set(topics), going_on)
    if not found:
        return {}
    log.info("a transaction is open: asking how the last ones were decided")
    ours = set(found)

    def still_open() -> Mapping[Place, int]:
        look = partitions.look(places)
        if away := look.silent & ours:
            # Who took over now would have what is noted forgotten.
            raise sink_error(_no_leader(min(away)), settings, _DOING)
        return look.open

    try:
        with closing(Coordinator(settings, going_on)) as coordinator:
            decisions = {}
            for transactional_id in writer.transactional_ids:
                decisions[transactional_id], went_to = coordinator.decision(transactional_id)
                ours |= {place for place in went_to if not place.topic.startswith("__")}
            places |= ours
            for transactional_id, committed in decisions.items():
                found = still_open()
                if not found:
                    return {}
                if committed is not None:
                    coordinator.end(transactional_id, committed, sorted(found), writer.group)
                    _say(transactional_id, committed, found, still_open())
            return still_open()
    except CannotAskError as error:
        found = still_open()
        log.warning(
            "cannot ask how the last transactions were decided: if a broker has left one open, "
            "readers wait behind it",
            reason=str(error),
            partitions=[str(place) for place in sorted(found)],
        )
        return found
    except KafkaException as error:
        raise sink_error(error, settings, _DOING) from None


def _say(
    transactional_id: str, committed: bool, before: Iterable[Place], after: Mapping[Place, int]
) -> None:
    if ended := set(before) - after.keys():
        log.warning(
            "a transaction that the brokers had left open is ended as it was decided",
            transactional_id=transactional_id,
            committed=committed,
            partitions=[str(place) for place in sorted(ended)],
        )


def _places(
    settings: Settings,
    partitions: Partitions,
    writer: Writer,
    topics: Set[str],
    going_on: Callable[[], bool],
) -> tuple[set[Place], Mapping[Place, int]]:
    """Where something may be open, as far as it answers, and where something is."""
    began, said = time.monotonic(), False
    patience = Patience(writer.checkpoints)
    while True:
        waited = time.monotonic() - began
        give_up = waited > settings.transaction_timeout
        try:
            places, look = _candidates(settings, partitions, writer, topics)
            if not places:
                # A pass may never have run; the relay's own topic was there a moment ago.
                if not writer.group or waited > _MISSING_S:
                    return places, {}
                reason = _no_leader(writer.checkpoints)
            elif not look.silent:
                return places, look.open
            else:
                reason = _no_leader(min(look.silent))
                if patience.is_over(look.silent):
                    return places - look.silent, look.open
                if writer.checkpoints not in look.silent:
                    give_up = False
        except KafkaException as error:
            if final(error.args[0]):
                raise sink_error(error, settings, _DOING) from None
            reason = error
        if give_up or not going_on():
            raise sink_error(reason, settings, _DOING) from None
        if waited > 1.0 and not said:
            said = True
            log.warning("waiting for Kafka", reason=text(reason))
        time.sleep(_PAUSE_S)


def _candidates(
    settings: Settings, partitions: Partitions, writer: Writer, topics: Set[str]
) -> tuple[set[Place], Look]:
    """Where something may be open, and what is seen there; nothing where there are no
    checkpoints."""
    where = writer.checkpoints
    if where not in partitions.of([where.topic]):
        return set(), Look({}, frozenset())
    end = partitions.end(where)
    if end is None:
        raise _no_leader(where)
    places = {where, *partitions.of(topics | _last_topics(settings, where, end))}
    return places, partitions.look(places)


def _no_leader(place: Place) -> KafkaException:
    return KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE, f"no answer about {place}"))


def _last_topics(settings: Settings, where: Place, end: int) -> Set[str]:
    """The topics that the last checkpoints before offset ``end`` name, committed or not."""
    topics: set[str] = set()
    if end == 0:
        return topics
    consumer: Any = create(
        Consumer,
        topic_reader_config(settings, f"cdc-relay-{settings.name}-markers", "read_uncommitted"),
    )
    try:
        # Who assigns what a client has not heard of yet waits half a second for it.
        consumer.list_topics(where.topic, timeout=_ANSWER_S)
        start = max(0, end - _LOOK_BACK)
        consumer.assign([TopicPartition(*where, start or OFFSET_BEGINNING)])
        deadline = time.monotonic() + _ANSWER_S
        while True:
            message = consumer.poll(max(0.0, deadline - time.monotonic()))
            if message is None:
                raise _no_leader(where)
            said = message.error()
            if said is None:
                topics |= Written.read(message.headers() or ())
            elif said.code() == KafkaError._PARTITION_EOF:
                return topics
            elif final(said):
                raise KafkaException(said)
    finally:
        consumer.close()
