"""A consumer that keeps books on what arrives: ``python -m examples.shop.ledger``.

It reads one topic from its beginning, read_committed, and counts like an idempotent consumer: the
header ``id`` tells a duplicate, and a customer's order number that falls behind one seen before
is a step back. One JSON line of counts on stdout, four times a second; the whole book goes to
``--book`` on SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition


class Arrival(Protocol):
    """What of a consumed message goes into a book; confluent_kafka's Message is one."""

    def headers(self) -> Any: ...

    def value(self) -> bytes | None: ...


@dataclass
class Book:
    """What one consumer saw of one topic."""

    messages: int = 0
    steps_back: int = 0
    orders: list[int] = field(default_factory=list)
    """Order ids of the distinct events, as they arrived; the two lists below go with it."""
    placed_ns: list[int] = field(default_factory=list)
    latency_ns: list[int] = field(default_factory=list)
    """From just before COMMIT to the consumer's poll; CLOCK_MONOTONIC of the host."""

    @property
    def distinct(self) -> int:
        return len(self.orders)

    @property
    def duplicates(self) -> int:
        return self.messages - self.distinct

    @classmethod
    def read(cls, path: Path) -> Book:
        """Return the book that a consumer left in ``path``."""
        return cls(**json.loads(path.read_text()))


class Reader:
    """Enters messages of one topic into a book."""

    def __init__(self) -> None:
        self.book = Book()
        self._seen: set[str | bytes] = set()
        self._numbers: dict[int, int] = {}

    def enter(self, message: Arrival, now_ns: int) -> None:
        book = self.book
        book.messages += 1
        event_id = dict(message.headers() or [])["id"]
        value = message.value()
        assert event_id is not None
        assert value is not None
        if event_id in self._seen:
            return
        self._seen.add(event_id)
        order = json.loads(value)
        book.orders.append(order["order_id"])
        book.placed_ns.append(order["placed_ns"])
        book.latency_ns.append(now_ns - order["placed_ns"])
        customer, number = order["customer_id"], order["number"]
        highest = self._numbers.get(customer, 0)
        if number < highest:
            book.steps_back += 1
        self._numbers[customer] = max(highest, number)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    stopped = False

    def stop(_signal: int, _frame: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    consumer = _consumer(arguments.kafka_bootstrap, arguments.topic)
    reader = Reader()
    told = 0.0
    while not stopped:
        message = consumer.poll(0.1)
        now_ns = time.monotonic_ns()
        if message is not None:
            if message.error():
                # librdkafka goes on by itself; whoever waits for the events bounds the time.
                print(message.error(), file=sys.stderr, flush=True)
            else:
                reader.enter(message, now_ns)
        if now_ns / 1e9 - told >= 0.25:
            told = now_ns / 1e9
            counts = {"messages": reader.book.messages, "distinct": reader.book.distinct}
            print(json.dumps(counts), flush=True)
    consumer.close()
    partial = arguments.book.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(reader.book)))
    partial.replace(arguments.book)
    return 0


def _consumer(bootstrap: str, topic: str) -> Consumer:
    config: dict[str, Any] = {
        "bootstrap.servers": bootstrap,
        "group.id": f"ledger-{uuid.uuid4()}",
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
    }
    consumer = Consumer(config)
    partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
    return consumer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.shop.ledger", description=__doc__)
    parser.add_argument("--kafka-bootstrap", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--book", type=Path, required=True, help="file for the result")
    return parser


if __name__ == "__main__":
    sys.exit(main())
