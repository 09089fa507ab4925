"""Which topics can be written to, asked before the first record: a missing topic would hold up or
break the whole group that a record of it travels in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException

from cdc_relay.kafka.client import UNKNOWN_TOPIC, text
from cdc_relay.router import Record

# Where brokers create topics by themselves, a new one is there within this time.
_CREATION_S: Final = 3.0
_ANSWER_S: Final = 5.0
# How long a refusal is believed before the brokers are asked again.
_BELIEVED_S: Final = 1.0

_FAULTS: Final = frozenset(
    (
        *UNKNOWN_TOPIC,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
    )
)


class Refusal(NamedTuple):
    """Why a record was not taken."""

    reason: str
    topic: bool = False
    """Whether every record of its topic would be refused."""


class Topics:
    """What a producer knows about its topics. One thread."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer
        self._known: dict[str, int] = {}
        self._refused: dict[str, tuple[str, float]] = {}

    def refused(self, records: Sequence[Record]) -> dict[int, Refusal]:
        """Refusals of the records whose topic is not there, by index. Brokers that do not answer
        refuse nothing."""
        known = self._known
        if all(record.topic in known for record in records):
            return {}
        result: dict[int, Refusal] = {}
        for index, record in enumerate(records):
            if record.topic not in known:
                reason = self._ask(record.topic)
                if reason is not None:
                    result[index] = Refusal(reason, topic=True)
        return result

    def partitions(self, topic: str) -> int:
        """How many partitions the topic had when it was asked about; 0 where it was not."""
        return self._known.get(topic, 0)

    def forget(self, topic: str) -> None:
        """Ask about the topic again before the next record."""
        self._known.pop(topic, None)

    def _ask(self, topic: str) -> str | None:
        reason, until = self._refused.get(topic, ("", 0.0))
        if time.monotonic() < until:
            return reason
        # Only the first time is worth a wait for its creation.
        deadline = time.monotonic() + (0.0 if reason else _CREATION_S)
        while True:
            try:
                found = self._producer.list_topics(topic, timeout=_ANSWER_S).topics[topic]
            except KafkaException:
                return None  # the brokers' trouble, not the topic's
            error = found.error
            if error is None or error.code() not in _FAULTS:
                self._known[topic] = len(found.partitions)
                self._refused.pop(topic, None)
                return None
            permanent = error.code() not in UNKNOWN_TOPIC
            if permanent or time.monotonic() >= deadline:
                reason = f"topic {topic}: {text(error)}"
                self._refused[topic] = (reason, time.monotonic() + _BELIEVED_S)
                return reason
            time.sleep(0.1)
