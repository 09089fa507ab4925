"""Which topics can be written to, asked before the first record: a missing topic would hold up or
break the whole group that a record of it travels in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
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
    too_large: bool = False
    """Whether it is for the record's size."""


class Topics:
    """What a producer knows about its topics. One thread."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer
        self._known: dict[str, int] = {}
        self._refused: dict[str, tuple[str, float]] = {}

    def refused(
        self, records: Sequence[Record], going_on: Callable[[], bool] = lambda: True
    ) -> dict[int, Refusal]:
        """Refusals of the records whose topic is not there, by index. Brokers that do not answer
        refuse nothing. A topic that is missed for the first time is waited for a little while
        ``going_on``, all of them together: brokers may be about to create it."""
        known = self._known
        if all(record.topic in known for record in records):
            return {}
        unknown = {record.topic for record in records} - known.keys()
        missing = self._missing(sorted(unknown), going_on)
        return {
            index: Refusal(missing[record.topic], topic=True)
            for index, record in enumerate(records)
            if record.topic in missing
        }

    def partitions(self, topic: str) -> int:
        """How many partitions the topic had when it was asked about; 0 where it was not."""
        return self._known.get(topic, 0)

    def forget(self, topic: str) -> None:
        """Ask about the topic again before the next record."""
        self._known.pop(topic, None)

    def _missing(self, topics: Iterable[str], going_on: Callable[[], bool]) -> dict[str, str]:
        """Those of ``topics`` that cannot be written to, with the reason."""
        now = time.monotonic()
        refused = {topic: self._refused[topic] for topic in topics if topic in self._refused}
        missing = {topic: reason for topic, (reason, until) in refused.items() if now < until}
        deadline = now + _CREATION_S
        asked = [topic for topic in topics if topic not in missing]
        while asked:
            waiting = []
            for topic in asked:
                if not going_on():
                    return missing
                try:
                    answer = self._ask(topic)
                except KafkaException:
                    return missing  # the brokers' trouble, not a topic's
                if answer is None:
                    continue
                reason, permanent = answer
                # Only the first time is worth a wait for its creation.
                if permanent or topic in refused or time.monotonic() >= deadline:
                    self._refused[topic] = (reason, time.monotonic() + _BELIEVED_S)
                    missing[topic] = reason
                else:
                    waiting.append(topic)
            asked = waiting
            if asked:
                time.sleep(0.1)
        return missing

    def _ask(self, topic: str) -> tuple[str, bool] | None:
        """None for a topic that is there; else what is wrong, and whether waiting cannot mend it.
        Asking is what makes brokers create it, where they do so."""
        found = self._producer.list_topics(topic, timeout=_ANSWER_S).topics[topic]
        error = found.error
        if error is None or error.code() not in _FAULTS:
            self._known[topic] = len(found.partitions)
            self._refused.pop(topic, None)
            return None
        return f"topic {topic}: {text(error)}", error.code() not in UNKNOWN_TOPIC
