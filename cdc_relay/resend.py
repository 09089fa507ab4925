"""Sending chosen rows again, whatever their status: what ``replay`` and an audit's repair do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from cdc_relay.config import Settings
from cdc_relay.errors import SinkError, UnroutableError
from cdc_relay.kafka.sink import IdempotentSink
from cdc_relay.outbox import OutboxEvent
from cdc_relay.router import Record, Router
from cdc_relay.store import Store

_BATCH: Final = 500


def resend(
    settings: Settings,
    store: Store,
    router: Router,
    ids: Iterable[int],
    progress: Callable[[int], None] = lambda _count: None,
) -> int:
    """Send the rows of ``ids`` in the order given, which should be ascending, through the relay's
    own router and an idempotent producer; return how many were acknowledged. No row is changed: a
    pending one goes out once more when its relay comes to it. Raises ``SinkError`` at the first
    record that is refused; those before it are there.
    """
    sink = IdempotentSink(settings, f"cdc-relay-{settings.name}-resend")
    sent = 0
    try:
        remaining = iter(ids)
        while batch := list(islice(remaining, _BATCH)):
            for rows in store.rows(batch):
                records = _records(router, [event for event, _ in rows])
                sent += _send(sink, records, settings.send_timeout)
            progress(sent)
    finally:
        sink.close(1)
    return sent


def _records(router: Router, events: Sequence[OutboxEvent]) -> list[Record]:
    records = []
    for event in events:
        try:
            records.append(router.route(event))
        except UnroutableError as error:
            raise SinkError(f"row {event.id} (event {event.event_id}): {error}") from None
    return records


def _send(sink: IdempotentSink, records: list[Record], timeout: float) -> int:
    refused = sink.send(records, timeout).refused
    if refused:
        index = min(refused)
        key = records[index].key.decode("utf-8", "replace")
        raise SinkError(f"{records[index].topic}, key {key}: {refused[index].reason}")
    return len(records)
