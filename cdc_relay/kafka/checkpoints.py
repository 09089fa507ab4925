"""Checkpoints: where the relay goes on, kept in a compacted Kafka topic.

One topic per relay name, ``cdc-relay.<name>.checkpoints``, one partition per shard, so the user's
database needs no extra table and the checkpoint can be written in one Kafka transaction with the
records. A checkpoint's value is one line of JSON, then the owed marks: so many that they fill a
record after a large transaction, so each takes little more than five bytes.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Self

import structlog
from confluent_kafka import (
    OFFSET_BEGINNING,
    TIMESTAMP_LOG_APPEND_TIME,
    Consumer,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    NewTopic,
)

from cdc_relay.config import Settings
from cdc_relay.errors import ConfigError, SinkError, SinkUnavailableError
from cdc_relay.kafka.client import (
    SILENT,
    UNKNOWN_TOPIC,
    Complaints,
    base_config,
    create,
    final,
    sink_error,
    text,
    topic_reader_config,
)
from cdc_relay.kafka.owed import NOTHING_OWED, Owed
from cdc_relay.position import Position, from_runs, runs
from cdc_relay.router import Record

log = structlog.get_logger(__name__)

Source = Literal["binlog", "polling"]

_VERSION: Final = 2
# Compaction keeps the last value of a key; small segments let it start early. Stamped by the
# brokers: a relay whose clock is far ahead would be refused, and doctor can compare the clocks.
_TOPIC_CONFIG: Final = {
    "cleanup.policy": "compact",
    "message.timestamp.type": "LogAppendTime",
    "segment.ms": "600000",
    "segment.bytes": str(32 * 1024 * 1024),
    "min.cleanable.dirty.ratio": "0.05",
}
_LOOK_BACK: Final = 64
_PERHAPS_MISSING: Final = UNKNOWN_TOPIC | {KafkaError._UNKNOWN_PARTITION}
_MISSING_S: Final = 0.5


def topic_name(relay: str) -> str:
    """The checkpoint topic of a relay."""
    return f"cdc-relay.{relay}.checkpoints"


def fallback_topic(relay: str) -> str:
    """The topic where the compensator's passes leave what they have sent. Its own: beside the
    checkpoints of a busy relay its one record would be dear to find."""
    return f"cdc-relay.{relay}.fallback"


class UnreadableCheckpointError(SinkError):
    """A record of the checkpoint topic that this version cannot read."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything before ``position`` is acknowledged; ``owed`` of it is not yet marked as sent."""

    position: Position
    owed: Owed = NOTHING_OWED
    """Marks of acknowledged rows that are not known to be done."""
    closed: Sequence[tuple[str, str | None]] = ()
    """(aggregate_type, aggregate_id) of the aggregates that wait behind a refused row; None in
    the second place is a whole type, whose topic cannot be written to."""
    sweeping: bool = False
    """Whether pending rows of the table still have to be sent before the stream starts."""
    doubtful_until: Position | None = None
    """Up to here a row of the stream may have been sent by a sweep, a retry or the compensator:
    the table tells."""
    anchor: str = ""
    """Why the stream was anchored anew at some time, in words; empty where it never was."""
    time: float = field(default_factory=time.time)
    """When it was made, seconds since 1970."""
    held: Sequence[tuple[str, str | None, Sequence[int]]] = ()
    """Without marks the table does not tell what waits: for each of ``closed`` the ids of its rows
    that are not sent. Empty with marks."""
    source: Source = "binlog"
    """How the rows were read. Of ``polling`` the position means nothing."""
    table: str = ""
    """The table, ``schema.table``, that the rows are of; empty where it was not noted."""

    def check_table(self, relay: str, table: str) -> None:
        """Raise ``ConfigError`` where it belongs to another table than ``table``: ids, marks and
        the position mean nothing there."""
        if self.table and self.table != table:
            raise ConfigError(
                f"name: the relay named {relay} carries {self.table}, not {table}: give each "
                "table a name of its own; where the table was renamed, cdc-relay position set"
            )

    def record(self, relay: str, shard: int = 0) -> Record:
        """The record that stores it: the shard's partition, a key that compaction keeps."""
        return Record(topic_name(relay), f"shard-{shard}".encode(), self.encode(), [], 0, shard)

    def fallback_record(self, relay: str) -> Record:
        """The record that stores it as the last word of a compensator's pass: ``owed`` is what it
        has sent, ``position`` the end of the log when it last looked."""
        return Record(fallback_topic(relay), b"fallback", self.encode(), [], 0, 0)

    def encode(self) -> bytes:
        """The record's value."""
        head = {
            "version": _VERSION,
            "time": self.time,
            "position": self.position.to_json(),
            "closed": [list(aggregate) for aggregate in self.closed],
            **(
                {"held": [[kind, key, runs(ids)] for kind, key, ids in self.held]}
                if self.held
                else {}
            ),
            **({"sweeping": True} if self.sweeping else {}),
            **({"doubtful_until": self.doubtful_until.to_json()} if self.doubtful_until else {}),
            **({"anchor": self.anchor} if self.anchor else {}),
            **({"source": self.source} if self.source != "binlog" else {}),
            **({"table": self.table} if self.table else {}),
            "owed": len(self.owed),
        }
        return json.dumps(head, ensure_ascii=False).encode() + b"\n" + self.owed.packed

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Read a record's value. Raises ``UnreadableCheckpointError`` for anything else."""
        try:
            line, _, tail = value.partition(b"\n")
            head: dict[str, Any] = json.loads(line)
            if head["version"] != _VERSION:
                raise ValueError(f"version {head['version']} is not known to this relay")
            owed = Owed.unpack(tail)
            if len(owed) != head["owed"]:
                raise ValueError("the list of owed marks is cut")
            until = head.get("doubtful_until")
            return cls(
                Position.from_json(head["position"]),
                owed,
                [(kind, key) for kind, key in head["closed"]],
                bool(head.get("sweeping")),
                Position.from_json(until) if until else None,
                str(head.get("anchor", "")),
                head["time"],
                tuple((kind, key, from_runs(found)) for kind, key, found in head.get("held", ())),
                "polling" if head.get("source") == "polling" else "binlog",
                str(head.get("table", "")),
            )
        except KeyError as error:
            raise UnreadableCheckpointError(
                f"the checkpoint cannot be read: it has no {error}"
            ) from None
        except (AttributeError, RecursionError, TypeError):
            raise UnreadableCheckpointError(
                "the checkpoint cannot be read: it has not the form of one"
            ) from None
        except (ValueError, struct.error) as error:
            raise UnreadableCheckpointError(f"the checkpoint cannot be read: {error}") from None


class Stored(NamedTuple):
    """A value as the topic has it."""

    value: bytes
    appended: float | None
    """When the brokers took it, seconds since 1970 by their clock; None where the topic keeps the
    writer's time."""


def ensure_topic(settings: Settings, timeout: float = 15.0, *, fallback: bool = False) -> None:
    """Create the checkpoint topic (that of the passes, where ``fallback``) if it is not there.
    Raises ``SinkError`` if it cannot be."""
    complaints = Complaints()
    config = base_config(settings, f"cdc-relay-{settings.name}-admin")
    admin = create(AdminClient, {**config, "error_cb": complaints})
    topic = fallback_topic(settings.name) if fallback else topic_name(settings.name)
    shards = 1 if fallback else settings.shards
    new = NewTopic(topic, num_partitions=shards, replication_factor=-1, config=_TOPIC_CONFIG)
    try:
        # Not by its metadata: asking for those creates the topic, with the brokers' defaults,
        # where they create topics by themselves.
        admin.describe_topics(TopicCollection([topic]), request_timeout=timeout)[topic].result()
        return _check_policy(admin, topic)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
            reason = complaints.behind(error, admin)
            raise sink_error(reason, settings, f"cannot describe topic {topic}") from None
    try:
        admin.create_topics([new], operation_timeout=timeout, request_timeout=timeout)[
            topic
        ].result(timeout=timeout + 1)
    except KafkaException as error:
        if error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS:
            return None
        raise sink_error(error, settings, f"cannot create topic {topic}") from None
    except TimeoutError:
        raise SinkUnavailableError(
            f"Kafka at {settings.kafka_bootstrap} does not answer: cannot create topic {topic}"
        ) from None
    return None


def _check_policy(admin: Any, topic: str) -> None:
    """Say so where the topic would forget the checkpoint of a relay that is idle for long."""
    resource = ConfigResource("topic", topic)
    try:
        found = admin.describe_configs([resource], request_timeout=5.0)[resource].result()
    except KafkaException:
        return  # no grant to look, or no answer: nothing is wrong for that reason
    policy = found["cleanup.policy"].value
    if "compact" not in str(policy):
        log.warning(
            "the checkpoint topic is not compacted: after its retention time the checkpoint of "
            "an idle relay is gone, and the relay anchors anew",
            topic=topic,
            cleanup_policy=policy,
            mend=f"kafka-configs.sh --alter --topic {topic} --add-config cleanup.policy=compact",
        )


def read_fallback(
    settings: Settings, timeout: float = 15.0, *, settled: bool = False
) -> Checkpoint | None:
    """Return the last word of the compensator's passes, or None where there is none; as
    ``read_last``."""
    topic = fallback_topic(settings.name)
    found = last_value(settings, topic, 0, b"fallback", timeout, settled=settled)
    return Checkpoint.decode(found.value) if found is not None else None


def read_last(
    settings: Settings, partition: int = 0, timeout: float = 15.0, *, settled: bool = False
) -> Checkpoint | None:
    """Return the last committed checkpoint of a shard, or None where there is none.

    Reads from the end of the topic backwards, so the cost does not grow with its history. A
    transaction that is open hides what was committed after its begin: who has fenced the writer and
    goes on from what is read here asks with ``settled``, which waits for the end of every
    transaction of the topic. Without, it is the last one that can be seen. Raises
    ``SinkUnavailableError`` when Kafka does not answer, or a transaction does not end, in time.
    """
    found = read_last_timed(settings, partition, timeout, settled=settled)
    return found[0] if found is not None else None


def read_last_timed(
    settings: Settings, partition: int = 0, timeout: float = 15.0, *, settled: bool = False
) -> tuple[Checkpoint, float | None] | None:
    """``read_last``, and when the brokers took it, by their clock, where they tell."""
    key = f"shard-{partition}".encode()
    topic = topic_name(settings.name)
    found = last_value(settings, topic, partition, key, timeout, settled=settled)
    return (Checkpoint.decode(found.value), found.appended) if found is not None else None


def last_value(
    settings: Settings,
    topic: str,
    partition: int,
    key: bytes,
    timeout: float,
    *,
    settled: bool = False,
) -> Stored | None:
    """Return the last committed value of ``key`` in a partition, or None where there is none (no
    such topic included); as ``read_last``."""
    complaints = Complaints()
    consumer = create(
        Consumer,
        {
            **topic_reader_config(
                settings, f"cdc-relay-{settings.name}-checkpoints", "read_committed"
            ),
            "error_cb": complaints,
        },
    )
    try:
        bounds = _bounds(consumer, TopicPartition(topic, partition), timeout)
        if bounds is None:
            return None
        low, high = bounds
        span = _LOOK_BACK
        while high > low or settled:
            start = max(low, high - span)
            stop = None if settled else high
            found = _last_value(consumer, settings, topic, partition, key, start, stop, timeout)
            if found is not None or start == low:
                return found
            span *= 16
        return None
    except KafkaException as error:
        reason = complaints.behind(error, consumer)
        raise sink_error(reason, settings, f"cannot read {topic}") from None
    finally:
        consumer.close()


def _bounds(consumer: Any, where: TopicPartition, timeout: float) -> tuple[int, int] | None:
    """The first offset, and the one behind the last that can be seen; None where there is no such
    topic. A client that meets a broker which has just started takes a partition for unknown that is
    there: only the brokers' metadata are believed, and only when they go on to say so. A leader
    that changes is waited for."""
    deadline = time.monotonic() + timeout
    missing_since: float | None = None
    while True:
        try:
            found: tuple[int, int] = consumer.get_watermark_offsets(where, timeout=timeout)
            return found
        except KafkaException as error:
            own = error.args[0]
            if final(own) or own.code() in SILENT or time.monotonic() > deadline:
                raise
        answer = consumer.list_topics(where.topic, timeout=timeout).topics[where.topic].error
        if answer is None or answer.code() not in _PERHAPS_MISSING:
            missing_since = None
        elif missing_since is None:
            missing_since = time.monotonic()
        elif time.monotonic() - missing_since > _MISSING_S:
            return None
        time.sleep(0.1)


def _last_value(
    consumer: Any,
    settings: Settings,
    topic: str,
    partition: int,
    key: bytes,
    start: int,
    stop: int | None,
    timeout: float,
) -> Stored | None:
    """The key's last value at or after ``start``, read up to ``stop`` (a transaction's end marker
    has an offset of its own and is not handed out) or to what can be seen of the partition; with
    None to its true end, which shows when the transactions before it have ended."""
    consumer.assign([TopicPartition(topic, partition, start if start else OFFSET_BEGINNING)])
    deadline = time.monotonic() + timeout
    last: Stored | None = None
    seen: int | None = None
    end: int | None = None
    reason = "no answer from Kafka"
    while True:
        message = consumer.poll(max(0.0, deadline - time.monotonic()))
        if message is None:
            if end is not None:
                reason = (
                    f"a transaction is open since offset {seen} of {end}: if it does not end, "
                    "kafka-transactions.sh find-hanging names it"
                )
            raise SinkUnavailableError(f"cannot read {topic}: {reason}")
        error = message.error()
        if error is None:
            if message.value() is not None and message.key() == key:
                kind, stamp = message.timestamp()
                appended = stamp / 1000 if kind == TIMESTAMP_LOG_APPEND_TIME else None
                last = Stored(message.value(), appended)
            if stop is not None and message.offset() + 1 >= stop:
                return last
        elif error.code() == KafkaError._PARTITION_EOF:
            if stop is not None:
                return last
            seen = message.offset()
            if end is None:
                # What was fetched last says where the log ends; what can be seen may end before.
                known = consumer.get_watermark_offsets(
                    TopicPartition(topic, partition), cached=True
                )
                end = known[1]
            if seen >= end:
                return last
        elif final(error) or time.monotonic() > deadline:
            raise sink_error(error, settings, f"cannot read {topic}")
        else:
            reason = text(error)
