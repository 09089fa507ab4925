"""Reading our topics back, as a ``read_committed`` consumer does, for the commands that look."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import structlog
from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    TIMESTAMP_CREATE_TIME,
    Consumer,
    KafkaError,
    KafkaException,
    TopicPartition,
)

from cdc_relay.config import Settings
from cdc_relay.errors import SinkUnavailableError
from cdc_relay.kafka.client import base_config, create, final, sink_error, text

log: Any = structlog.get_logger(__name__)

_BATCH: Final = 5_000
_NEW_TOPICS_S: Final = 10.0


class Read(NamedTuple):
    """A record as it lies in its topic."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    created: bool
    """Whether the time is the producer's, so the row's; else that of its arrival."""
    event_id: str
    """Empty where the record names none: it is not ours."""
    key: bytes
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class Reader:
    """Reads topics without a group of its own and without committing anything. One thread. Close
    it at the end."""

    def __init__(self, settings: Settings, timeout: float = 30.0) -> None:
        """``timeout``: the longest silence of the brokers that is waited for."""
        self._settings = settings
        self._timeout = timeout
        self._trouble = ""  # what was said last that may pass
        self._consumer: Any = create(
            Consumer,
            {
                # Librdkafka would fetch 64 MB ahead: what is read is a stream, not a store.
                "queued.max.messages.kbytes": 8 * 1024,
                **base_config(settings, f"cdc-relay-{settings.name}-reader"),
                "group.id": f"cdc-relay.{settings.name}.reader",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "allow.auto.create.topics": False,
            },
        )

    def close(self) -> None:
        self._consumer.close()

    def topics(self) -> dict[str, int]:
        """All topics, with the number of their partitions."""
        try:
            found = self._consumer.list_topics(timeout=self._timeout).topics
        except KafkaException as error:
            raise sink_error(error, self._settings, "cannot list topics") from None
        return {name: len(topic.partitions) for name, topic in found.items()}

    def since(self, topics: Sequence[str], since_ms: int) -> Iterator[list[Read]]:
        """Yield everything in ``topics`` from the first record that is not older than
        ``since_ms`` to the present end, each partition in order. What was sent late is there too:
        a partition is read to its end, whatever the records' times."""
        partitions = self._partitions(lambda _: topics)
        if not partitions:
            return
        with self._errors("cannot read the topics"):
            starts = self._starts(partitions, since_ms)
            waiting = {(one.topic, one.partition) for one in starts}
            self._consumer.assign(starts)
        deadline = time.monotonic() + self._timeout
        while waiting:
            batch = self._poll(min(1.0, self._timeout), waiting.discard)
            if batch:
                yield batch
                deadline = time.monotonic() + self._timeout
            elif waiting and time.monotonic() > deadline:
                raise SinkUnavailableError(
                    f"no answer from Kafka within {self._timeout:g} s: "
                    + (self._trouble or "are the brokers up?")
                )

    def follow(
        self, choose: Callable[[dict[str, int]], Sequence[str]], since_ms: int | None
    ) -> Iterator[list[Read]]:
        """Yield what comes from now on, or from ``since_ms`` on, without end; an empty list several
        times a second while nothing does. ``choose`` names the topics among all that there are;
        it is asked again every ten seconds, and what is new is read from its first record."""
        partitions = self._partitions(choose)
        with self._errors("cannot read the topics"):
            if since_ms is None:
                starts = [
                    TopicPartition(one.topic, one.partition, OFFSET_END) for one in partitions
                ]
            else:
                starts = self._starts(partitions, since_ms)
            self._consumer.assign(starts)
        known = {(one.topic, one.partition) for one in partitions}
        due = time.monotonic() + _NEW_TOPICS_S
        while True:
            yield self._poll(1.0, lambda _: None)
            if time.monotonic() >= due:
                self._join_new(choose, known)
                due = time.monotonic() + _NEW_TOPICS_S

    def _join_new(
        self, choose: Callable[[dict[str, int]], Sequence[str]], known: set[tuple[str, int]]
    ) -> None:
        """Read partitions that were made meanwhile, too. Brokers that are away are waited for by
        who polls."""
        try:
            found = self._partitions(choose)
        except SinkUnavailableError:
            return
        new = [one for one in found if (one.topic, one.partition) not in known]
        if new:
            with self._errors("cannot read the topics"):
                self._consumer.incremental_assign(
                    [TopicPartition(one.topic, one.partition, OFFSET_BEGINNING) for one in new]
                )
            known.update((one.topic, one.partition) for one in new)

    def _partitions(self, choose: Callable[[dict[str, int]], Sequence[str]]) -> list[Any]:
        there = self.topics()
        return [
            TopicPartition(topic, number)
            for topic in choose(there)
            for number in range(there.get(topic, 0))
        ]

    def _starts(self, partitions: Sequence[Any], since_ms: int) -> list[Any]:
        """Where each partition has its first record that is not older. One whose leader changes
        says so in its own answer: it is asked again."""
        deadline = time.monotonic() + self._timeout
        asked = [TopicPartition(one.topic, one.partition, since_ms) for one in partitions]
        while True:
            starts: list[Any] = self._consumer.offsets_for_times(asked, timeout=self._timeout)
            faults = [one.error for one in starts if one.error is not None]
            if not faults:
                return starts
            if any(map(final, faults)) or time.monotonic() > deadline:
                raise KafkaException(faults[0])
            time.sleep(0.1)

    def _poll(self, timeout: float, ended: Callable[[tuple[str, int]], None]) -> list[Read]:
        with self._errors("cannot read the topics"):
            messages = self._consumer.consume(_BATCH, timeout=min(timeout, 0.2))
        batch = []
        for message in messages:
            error = message.error()
            if error is None:
                batch.append(_read(message))
            elif error.code() == KafkaError._PARTITION_EOF:
                ended((message.topic(), message.partition()))
            elif final(error):
                raise sink_error(error, self._settings, f"cannot read {message.topic()}")
            elif self._trouble != (trouble := f"{message.topic()}: {text(error)}"):
                self._trouble = trouble
                log.warning("waiting for Kafka", reason=trouble)
        return batch

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except KafkaException as error:
            raise sink_error(error, self._settings, doing) from None


def _read(message: Any) -> Read:
    headers = message.headers() or ()
    value = message.value()
    kind, timestamp = message.timestamp()
    return Read(
        message.topic(),
        message.partition(),
        message.offset(),
        timestamp,
        kind == TIMESTAMP_CREATE_TIME,
        _event_id(headers, value),
        message.key() or b"",
        value,
        headers,
    )


def _event_id(headers: Sequence[tuple[str, bytes | None]], value: bytes | None) -> str:
    structured = False
    for name, content in headers:
        if name in ("id", "ce_id") and content:
            return content.decode("utf-8", "replace")
        structured = structured or (
            name == "content-type" and (content or b"").startswith(b"application/cloudevents+json")
        )
    if structured and value:
        try:
            return str(json.loads(value)["id"])
        except (ValueError, KeyError, TypeError):
            return ""
    return ""
