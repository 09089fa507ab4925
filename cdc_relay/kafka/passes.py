"""The record that every pass of the compensator leaves, so that its absence is noticed.

It lies under a key of its own in the topic of the passes, ``cdc-relay.<name>.fallback``, which is
compacted: the last one stays, and the user's database needs no table for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Final

import structlog

from cdc_relay.config import Settings
from cdc_relay.errors import SinkError
from cdc_relay.kafka.checkpoints import (
    ensure_topic,
    fallback_topic,
    last_value,
    read_fallback,
    read_last,
)
from cdc_relay.kafka.sink import IdempotentSink
from cdc_relay.router import Record

log: Any = structlog.get_logger(__name__)

_KEY: Final = b"pass"
# By how much the clocks of relay, database and clean-up may differ.
CLOCKS_S: Final = 600.0
_TIMEOUT_S: Final = 10.0


def record_pass(settings: Settings, found: Mapping[str, object]) -> None:
    """Write down that a pass ended now, and what it found. Where Kafka does not take it, that is
    logged: the pass itself is not at fault."""
    value = json.dumps({"time": time.time(), **found}, ensure_ascii=False).encode()
    record = Record(fallback_topic(settings.name), _KEY, value, [], 0, 0)
    try:
        ensure_topic(settings, _TIMEOUT_S, fallback=True)
        sink = IdempotentSink(settings, f"cdc-relay-{settings.name}-pass")
        try:
            refused = sink.send([record], _TIMEOUT_S).refused
        finally:
            sink.close(1.0)
        if refused:
            raise SinkError(refused[0].reason)
    except SinkError as error:
        log.warning("the pass left no record of itself", reason=str(error))


def last_pass(settings: Settings, timeout: float = 15.0) -> dict[str, Any] | None:
    """Return what the last pass found: ``time``, when it ended in seconds since 1970, and the
    fields of its summary; None where there was none yet. Raises ``SinkError``."""
    stored = last_value(settings, fallback_topic(settings.name), 0, _KEY, timeout)
    if stored is None:
        return None
    try:
        found: dict[str, Any] = json.loads(stored.value)
        return {**found, "time": float(found["time"])}
    except (ValueError, KeyError, TypeError) as error:
        raise SinkError(f"the record of the last pass cannot be read: {error}") from None


def sent_ahead_since(settings: Settings, shard: int = 0) -> float | None:
    """Return since when, in seconds since 1970, rows may have been sent that the relay's stream has
    still to come over; None where there are none. The stream asks the table about them, so they
    must not go before. Raises ``SinkError``.

    A relay in doubt (after a sweep, a retry, another's pass) may have any of them before it: 0.
    Behind its last checkpoint are those that a pass has sent since, while it was away.
    """
    last = read_last(settings, shard)
    if last is None or last.source == "polling":
        return None
    doubt = last.doubtful_until
    if last.sweeping or (doubt is not None and not last.position.passed(doubt)):
        return 0.0
    word = read_fallback(settings)
    # A word from before the checkpoint was taken over when the relay's term began.
    since = word is not None and word.time > last.time - CLOCKS_S
    return last.time if word and since and not last.position.passed(word.position) else None
