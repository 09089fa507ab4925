"""Ownership through Kafka: relays of one name are a consumer group on their checkpoint topic.

Each partition of that topic is a shard; the member to which it is assigned owns the shard, the
others stand by. Membership, failover and the generation that fences a paused member are Kafka's
(KIP-447); there is no lock and no election of ours. The records of the topic are not consumed
here: the assigned partition is paused, only the assignment counts.
"""

from __future__ import annotations

import time
from typing import Any, Final

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from cdc_relay.config import Settings
from cdc_relay.errors import SinkError, SinkUnavailableError
from cdc_relay.kafka.checkpoints import topic_name
from cdc_relay.kafka.client import (
    SILENT,
    UNKNOWN_TOPIC,
    base_config,
    create,
    served,
    sink_error,
    text,
)

log: Any = structlog.get_logger(__name__)

_CONFIRM_TIMEOUT_S: Final = 10.0
# Codes with which a broker tells that the member is not (or no longer) of this generation.
_OUTDATED: Final = frozenset(
    (
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError._ASSIGNMENT_LOST,
        KafkaError._NO_OFFSET,
        KafkaError._STATE,
    )
)
# A cluster answers so for a moment, when it has never had a group or a broker has just started.
_SETTLING: Final = frozenset(
    (
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    )
)
_SETTLING_S: Final = 5.0
# The loop polls ten times a second, but for a statement that the database does not answer: it is
# given up after two minutes.
_ABSENT_S: Final = 130.0


def group_name(relay: str) -> str:
    """The consumer group of a relay's members."""
    return f"cdc-relay.{relay}"


def members(settings: Settings, timeout: float = 10.0) -> int:
    """How many relays of the name are alive, by the group coordinator's word; 0 where the group
    does not exist. Raises ``SinkError`` when Kafka does not tell."""
    admin = create(AdminClient, base_config(settings, f"cdc-relay-{settings.name}-admin"))
    group = group_name(settings.name)
    deadline = time.monotonic() + min(timeout, _SETTLING_S)
    while True:
        asked = admin.describe_consumer_groups([group], request_timeout=timeout)
        try:
            return len(asked[group].result().members)
        except KafkaException as error:
            code = error.args[0].code()
            if code == KafkaError.GROUP_ID_NOT_FOUND:
                return 0
            if code not in _SETTLING or time.monotonic() > deadline:
                raise sink_error(error, settings, f"cannot describe the group {group}") from None
        time.sleep(0.2)


class Membership:
    """One member of the group. One thread polls it, at least every few seconds while it owns."""

    def __init__(self, settings: Settings) -> None:
        """Joins in the background; ``poll`` brings the assignment."""
        self._settings = settings
        self._topic = topic_name(settings.name)
        self._owned: frozenset[int] = frozenset()
        self._answers: list[KafkaError | None] = []
        self._was_let_in = False
        self.topic_gone = False
        """Whether Kafka has said that the topic is not there; who makes it anew takes it back."""
        self.losses = 0
        """How often a broker was found to be away."""
        session_ms = int(settings.session_timeout * 1000)
        self._consumer: Any = create(
            Consumer,
            {
                # Nothing is fetched: no need to buffer or to wait for it.
                "queued.max.messages.kbytes": 64,
                **base_config(settings, f"cdc-relay-{settings.name}-member"),
                "on_commit": self._committed,
                "group.id": group_name(settings.name),
                "session.timeout.ms": session_ms,
                # Also how long the others wait in a rebalance for a member that is gone and that a
                # broker, which has loaded the group in the middle of its own start, has no session
                # of: with librdkafka's five minutes nobody owned the shard for so long.
                "max.poll.interval.ms": session_ms + int(_ABSENT_S * 1000),
                # The others learn by their next heartbeat that a member is gone.
                "heartbeat.interval.ms": max(100, session_ms // 20),
                # Who joins or leaves interrupts nobody else's stream.
                "partition.assignment.strategy": "cooperative-sticky",
                "enable.auto.commit": False,
                "auto.offset.reset": "latest",
                "allow.auto.create.topics": False,
            },
        )
        self._consumer.subscribe(
            [self._topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )

    @property
    def owned(self) -> frozenset[int]:
        """The shards that this member owns, as of the last ``poll``."""
        return self._owned

    def poll(self, timeout: float) -> None:
        """Take part in the group for up to ``timeout`` seconds. Raises ``SinkError`` for a group
        that lets nobody in (no grant, wrong password, ...) and for a client that cannot go on; a
        broker that is away is waited for, and so is one that did let this member in before."""
        try:
            message = served(lambda: self._consumer.poll(timeout))
        except SystemError as trouble:
            # Something is left pending in the library when a session ends in the middle of an
            # assignment, and the callback may have been cut short: the consumer knows what is true.
            log.warning("the group goes on", reason=repr(trouble.__cause__ or trouble))
            assigned = self._consumer.assignment()
            self._consumer.pause(assigned)
            self._owned = frozenset(partition.partition for partition in assigned)
            return
        if message is None or message.error() is None:
            return
        error = message.error()
        self._look_at(error)
        known = sink_error(
            error, self._settings, f"cannot join the group {group_name(self._settings.name)}"
        )
        if type(known) is SinkError:
            # What worked may work again: a token being renewed, a broker that is starting. A
            # client that calls its own error fatal does not.
            if error.fatal() or not self._was_let_in:
                raise known
            log.warning("waiting for Kafka", reason=str(known))
        else:
            log.debug("group", reason=str(known))

    def metadata(self) -> Any:
        """The member's generation, for ``send_offsets_to_transaction``."""
        return self._consumer.consumer_group_metadata()

    def offsets(self, shard: int) -> list[Any]:
        """The offset that is committed with every transaction: its value means nothing, its
        generation is what the broker checks."""
        return [TopicPartition(self._topic, shard, 0)]

    def confirmed(self, shard: int) -> bool:
        """Whether the broker agrees that this member owns ``shard`` now. A member that was paused
        or cut off learns here that it was replaced, before it fences its successor."""
        doing = "cannot confirm the ownership"
        if shard not in self._owned:
            return False
        self._answers.clear()
        try:
            self._consumer.commit(offsets=self.offsets(shard), asynchronous=True)
        except KafkaException as error:
            self._answers.append(error.args[0])
        deadline = time.monotonic() + _CONFIRM_TIMEOUT_S
        while shard in self._owned and not self._answers:
            self.poll(0.01)
            if time.monotonic() > deadline:
                raise SinkUnavailableError(f"{doing}: no answer from Kafka")
        for answer in self._answers:
            if answer is not None and answer.code() not in _OUTDATED:
                raise sink_error(answer, self._settings, doing)
        return shard in self._owned and self._answers == [None]

    def _look_at(self, error: KafkaError | None) -> None:
        if error is not None:
            self.topic_gone |= error.code() in UNKNOWN_TOPIC
            self.losses += error.code() in SILENT

    def _committed(self, error: KafkaError | None, _partitions: list[Any]) -> None:
        self._look_at(error)
        self._answers.append(error)

    def close(self) -> None:
        """Leave the group: another member takes over at once."""
        self._consumer.close()

    # What a callback raises is pending in the C code while that calls the next one: none may.

    def _assigned(self, consumer: Any, partitions: list[Any]) -> None:
        try:
            consumer.incremental_assign(partitions)
            consumer.pause(partitions)
        except KafkaException as error:  # the group has gone on meanwhile, and assigns anew
            log.debug("assignment outdated", reason=text(error))
            return
        self._was_let_in = True
        self._owned |= {partition.partition for partition in partitions}

    def _revoked(self, consumer: Any, partitions: list[Any]) -> None:
        self._owned -= {partition.partition for partition in partitions}
        try:
            consumer.incremental_unassign(partitions)
        except KafkaException as error:
            log.debug("revocation outdated", reason=text(error))
