"""What was committed against what a ``read_committed`` consumer sees and what the table says."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer, TopicPartition

from cdc_relay.outbox import DEAD, PENDING, SENT
from tests.chaos.plan import Plan
from tests.chaos.writers import Event
from tests.support.harness import Harness, Message, consume

_NOTES: Final = 20
_EPOCH: Final = datetime(1970, 1, 1)


class Row(NamedTuple):
    """A row of the table, as far as the checker looks at it."""

    status: int
    tries: int
    reason: str | None
    payload: bytes | None
    headers: dict[str, bytes | None]
    timestamp_ms: int


@dataclass
class Account:
    """The result of one seed. All zero but ``events`` and ``parked`` where all is well."""

    events: int = 0
    lost: int = 0
    invented: int = 0
    inversions: int = 0
    duplicates: int = 0
    """Not allowed ones: in exactly-once mode all but those of a compensator."""
    repeats: int = 0
    """Allowed ones: at least once, or by a compensator beside a relay."""
    different: int = 0
    """Value, key, headers or time are not the row's."""
    unmarked: int = 0
    """Rows that are not marked although nothing is in their way."""
    parked: int = 0
    """Rows that no broker takes, on the ladder or dead with a reason, and those behind them."""
    unparked: int = 0
    """Rows that no broker takes and that are not parked."""
    stuck: int = 0
    """Relays that did not finish the work in time when all was healed."""
    crashes: int = 0
    """Relays that ended by themselves, other than because database or brokers were away."""
    notes: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        return (
            self.lost
            + self.invented
            + self.inversions
            + self.duplicates
            + self.different
            + self.unmarked
            + self.unparked
            + self.stuck
            + self.crashes
        )

    def note(self, line: str) -> None:
        if len(self.notes) < _NOTES:
            self.notes.append(line)

    def __str__(self) -> str:
        numbers = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "notes"}
        return " ".join(f"{name} {number}" for name, number in numbers.items())

    def add(self, other: Account) -> None:
        """Sum up."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


def blocked(committed: Iterable[Event], plan: Plan) -> dict[str, bool]:
    """Event ids that must not arrive: rows that no broker takes (True), and what waits behind
    them (False)."""
    closed: set[tuple[str, str]] = set()
    found: dict[str, bool] = {}
    for event in committed:
        aggregate = (event.kind, event.key)
        if aggregate in closed:
            found[event.event_id] = False
        elif not event.sendable:
            found[event.event_id] = True
            if plan.on_dead == "block" or plan.max_tries > 1:
                closed.add(aggregate)
    return found


def rows(shop: Harness) -> dict[str, Row]:
    """The table, by event id."""
    found = shop.database.sql(
        "SELECT event_id, aggregate_type, aggregate_id, event_type, status, retry_count,"
        f" last_error, payload, headers, created_at FROM {shop.table}"
    )
    result: dict[str, Row] = {}
    for event_id, kind, key, event_type, status, tries, reason, payload, headers, at in found:
        expected: dict[str, bytes | None] = {
            "id": event_id.encode(),
            "event_type": event_type.encode(),
            "aggregate_type": kind.encode(),
            "aggregate_id": key.encode(),
            "occurred_at": at.strftime("%Y-%m-%dT%H:%M:%S.%fZ").encode(),
            "content-type": b"application/json",
        }
        for name, value in json.loads(headers or "{}").items():
            text = value if isinstance(value, str) else json.dumps(value)
            expected[name] = None if value is None else text.encode()
        millis = (at - _EPOCH) // timedelta(milliseconds=1)
        value = None if payload is None else payload.encode()
        result[event_id] = Row(status, tries, reason, value, expected, millis)
    return result


def check(
    shop: Harness, plan: Plan, committed: Sequence[Event], kinds: Iterable[str], touched: set[str]
) -> Account:
    """Compare. ``touched`` are the events that a compensator may have sent beside the relay."""
    account = Account(events=len(committed))
    table = rows(shop)
    messages = [message for kind in kinds for message in read(shop, kind)]
    _compare_topics(account, plan, committed, messages, touched)
    _compare_contents(account, committed, messages, table)
    _compare_table(account, plan, committed, {m.event_id for m in messages}, table)
    return account


def _compare_topics(
    account: Account,
    plan: Plan,
    committed: Sequence[Event],
    messages: Sequence[Message],
    touched: set[str],
) -> None:
    by_id = {event.event_id: event for event in committed}
    waiting = blocked(committed, plan)
    arrived: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    seen: set[str] = set()
    for message in messages:
        event = by_id.get(message.event_id)
        if event is None:
            account.invented += 1
            account.note(f"invented: {message.event_id} {message.topic}@{message.offset}")
        elif message.event_id not in seen:
            arrived[event.kind, event.key][message.event_id] = None
        elif plan.delivery == "exactly_once" and message.event_id not in touched:
            account.duplicates += 1
            account.note(f"duplicate: {message.event_id} {message.topic}@{message.offset}")
        else:
            account.repeats += 1
        seen.add(message.event_id)
        if message.event_id in waiting:
            account.inversions += 1
            account.note(f"overtook a parked row: {message.event_id}")
    order: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for event in committed:
        places = order[event.kind, event.key]
        places[event.event_id] = len(places)
        if event.event_id not in seen and event.event_id not in waiting:
            account.lost += 1
            account.note(f"lost: {event.event_id} {event.kind} {event.key}")
    for aggregate, events in arrived.items():
        highest = -1
        for event_id in events:
            place = order[aggregate][event_id]
            if place < highest:
                account.inversions += 1
                account.note(f"inversion: {event_id} in {aggregate}")
            highest = max(highest, place)


def _compare_contents(
    account: Account,
    committed: Sequence[Event],
    messages: Sequence[Message],
    table: dict[str, Row],
) -> None:
    by_id = {event.event_id: event for event in committed}
    for message in messages:
        event = by_id.get(message.event_id)
        if event is None:
            continue
        row = table.get(message.event_id)
        value, payload = message.value, event.payload
        same = message.key == event.key and message.topic.endswith(f".{event.kind}")
        if row is not None:
            same = same and value == row.payload and message.headers == row.headers
            same = same and message.timestamp_ms == row.timestamp_ms
        elif value is None or payload is None:  # the row is gone: what was written is known
            same = same and (value is None) == (payload is None)
        else:
            same = same and json.loads(value) == json.loads(payload)
        if not same:
            account.different += 1
            account.note(f"different: {message} {row}")


def _compare_table(
    account: Account,
    plan: Plan,
    committed: Sequence[Event],
    arrived: set[str],
    table: dict[str, Row],
) -> None:
    waiting = blocked(committed, plan)
    for event in committed:
        row = table.get(event.event_id)
        wanted = waiting.get(event.event_id)
        if wanted is None:
            if plan.mark == "none":
                continue
            if row is not None and (row.status != SENT or plan.mark == "delete"):
                account.unmarked += 1
                came = "arrived" if event.event_id in arrived else "never arrived"
                account.note(
                    f"unmarked: {event.event_id} {event.kind} {event.key}: {came},"
                    f" status {row.status} tries {row.tries} {row.reason or ''}"
                )
            continue
        parked = row is not None and row.status in (PENDING, DEAD)
        if wanted:
            parked = parked and row is not None and row.tries > 0 and bool(row.reason)
        account.parked += 1
        if not parked:
            account.unparked += 1
            account.note(f"not parked: {event.event_id} {row and row[:3]}")


def read(shop: Harness, kind: str) -> list[Message]:
    """The topic of an aggregate type, when no transaction in it is open any more."""
    topic = shop.topic_prefix + kind
    if kind not in shop.topics():
        return []
    deadline = time.monotonic() + 30
    while _ends(shop, topic, "read_committed") != _ends(shop, topic, "read_uncommitted"):
        assert time.monotonic() < deadline, f"a transaction in {topic} stays open"
        time.sleep(0.2)
    return consume(shop.kafka, topic, 60)


def _ends(shop: Harness, topic: str, isolation: str) -> list[int]:
    consumer: Any = Consumer(
        {
            "bootstrap.servers": shop.kafka,
            "group.id": f"{shop.name}-ends",
            "isolation.level": isolation,
            "enable.auto.commit": False,
        }
    )
    try:
        partitions = sorted(consumer.list_topics(topic, timeout=20).topics[topic].partitions)
        return [
            consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=20)[1]
            for number in partitions
        ]
    finally:
        consumer.close()


def now() -> str:
    """The time as the relay's log writes it."""
    return datetime.now(UTC).strftime("%H:%M:%S.%f")[:-3]
