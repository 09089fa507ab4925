"""OpenTelemetry spans of what was sent (``traces = true``): a sink around another sink.

Each acknowledged record whose event carries a sampled ``traceparent`` gets a span from the
hand-over to Kafka to the acknowledgement: in the trace of the service that wrote the event, and
linked to its "create" span. The record itself keeps the service's context untouched, so a consumer
goes on from there. (Semantic conventions for messaging spans: "send" of a batch.)

Where spans go is said by OpenTelemetry's own variables, such as ``OTEL_EXPORTER_OTLP_ENDPOINT``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, Final, Self

from cdc_relay.config import Settings
from cdc_relay.errors import ConfigError
from cdc_relay.kafka.sink import Sink
from cdc_relay.kafka.topics import Refusal
from cdc_relay.router import Record

_PARENT: Final = "traceparent"
_STATE: Final = "tracestate"
_SAMPLED: Final = 1


class Spans:
    """Writes spans in the background; one for the process. Thread-safe."""

    def __init__(self, name: str) -> None:
        """``name`` is the relay's. Raises ``ConfigError`` where the extra is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"traces: {error.name} is not installed: pip install 'cdc-relay[traces]'"
            ) from None
        resource = Resource.create({"service.instance.id": name})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "cdc-relay"}))
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._provider = provider
        self._tracer: Any = provider.get_tracer("cdc-relay")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def of(cls, settings: Settings) -> Self | None:
        """Those of the settings; None without ``traces``."""
        return cls(settings.name) if settings.traces else None

    def sent(self, records: Iterable[Record], began: int, ended: int) -> None:
        """Note that ``records`` were sent between two times, nanoseconds since 1970."""
        from opentelemetry.trace import Link, SpanKind, get_current_span

        for record in records:
            carrier = _carrier(record)
            if carrier is None:
                continue
            context = self._propagator.extract(carrier)
            creator = get_current_span(context).get_span_context()
            if not creator.is_valid or not creator.trace_flags & _SAMPLED:
                continue
            self._tracer.start_span(
                f"send {record.topic}",
                context=context,
                kind=SpanKind.PRODUCER,
                attributes={
                    "messaging.system": "kafka",
                    "messaging.operation.name": "send",
                    "messaging.operation.type": "send",
                    "messaging.destination.name": record.topic,
                    "messaging.kafka.message.key": record.key.decode(errors="replace"),
                },
                links=[Link(creator)],
                start_time=began,
            ).end(ended)

    def close(self) -> None:
        """Write what is left, within the exporter's own time."""
        self._provider.shutdown()


def _carrier(record: Record) -> dict[str, str] | None:
    found = {
        name: value.decode("ascii", "replace")
        for name, value in record.headers
        if value is not None and name in (_PARENT, _STATE)
    }
    return found if _PARENT in found else None


class Traced:
    """A sink that notes what the one inside of it has sent. Order and guarantees are that one's."""

    def __init__(self, inside: Sink, spans: Spans) -> None:
        self._inside = inside
        self._spans = spans

    @property
    def acknowledged(self) -> Set[int]:
        """See the sink inside."""
        return self._inside.acknowledged

    def deliver(
        self, records: Sequence[Record], checkpoint: Record | None, going_on: Callable[[], bool]
    ) -> dict[int, Refusal]:
        """See the sink inside."""
        began = time.time_ns()
        refused = self._inside.deliver(records, checkpoint, going_on)
        ended = time.time_ns()
        there = self._inside.acknowledged if refused else range(len(records))
        self._spans.sent((records[index] for index in there), began, ended)
        return refused

    def poll(self) -> None:
        """See the sink inside."""
        self._inside.poll()

    def close(self, timeout: float) -> None:
        """See the sink inside."""
        self._inside.close(timeout)


def traced(sink: Sink, spans: Spans | None) -> Sink:
    """``sink``, with spans where they are wanted."""
    return sink if spans is None else Traced(sink, spans)
