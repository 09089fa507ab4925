"""Trace context through OpenTelemetry, in services that have it loaded.

A service that does not import OpenTelemetry has no current context either, so nothing is loaded
here and nothing is written. (Semantic conventions for messaging spans: the producer makes a
"create" span, and its context travels with the event.)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Final

_API: Final = "opentelemetry.trace"
_SCOPE: Final = "cdc-relay.writer"


def active() -> bool:
    """Whether the process has loaded OpenTelemetry."""
    return _API in sys.modules


@contextmanager
def create_span(
    aggregate_type: object, *, events: int, event_id: object
) -> Iterator[dict[str, str]]:
    """Open a producer span around an INSERT and give the headers that carry its context
    (``traceparent``, ``tracestate``, ``baggage``); empty where no SDK is set up."""
    from opentelemetry import propagate, trace

    attributes: dict[str, str | int] = {
        "messaging.system": "kafka",
        "messaging.operation.name": "create",
        "messaging.operation.type": "create",
    }
    if event_id is not None:
        attributes["messaging.message.id"] = str(event_id)
    else:
        attributes["messaging.batch.message_count"] = events
    if isinstance(aggregate_type, Enum):
        aggregate_type = aggregate_type.value
    tracer = trace.get_tracer(_SCOPE)
    with tracer.start_as_current_span(
        f"create {aggregate_type}", kind=trace.SpanKind.PRODUCER, attributes=attributes
    ):
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        yield carrier
