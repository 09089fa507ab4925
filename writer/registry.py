"""Payloads through a schema registry: Avro, Protobuf or JSON Schema.

    from confluent_kafka.schema_registry import SchemaRegistryClient
    from confluent_kafka.schema_registry.avro import AvroSerializer
    from writer.registry import RegistrySerializer

    client = SchemaRegistryClient({"url": "http://registry:8081"})
    outbox = Outbox(
        outbox_table(metadata, payload="binary"),
        serializer=RegistrySerializer({"ORDER_PLACED": AvroSerializer(client, order_placed)}),
    )

Needs the extra ``schema-registry``. The registry is asked when a schema is used for the first
time, which is inside the caller's transaction: serialize one event at start-up, or have short
``timeout`` s, where that matters. The bytes need a binary payload column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from confluent_kafka.serialization import MessageField, SerializationContext

from .outbox import EventInfo

ValueSerializer: TypeAlias = Callable[[Any, SerializationContext], "bytes | None"]
"""An ``AvroSerializer``, ``ProtobufSerializer`` or ``JSONSerializer`` of confluent_kafka."""

DEFAULT_TOPIC: Final = "outbox.event.{aggregate_type}"


class RegistrySerializer:
    """A serializer for ``Outbox`` that gives each payload to one of confluent_kafka.

    Those may be used by several threads at once, and so may this. Their errors
    (``SerializationError``, ``SchemaRegistryError``) pass through; nothing has been written then.
    """

    def __init__(
        self,
        serializers: ValueSerializer | Mapping[str, ValueSerializer],
        *,
        topic: str | Callable[[EventInfo], str] = DEFAULT_TOPIC,
    ) -> None:
        """``serializers``: one for all events, or one for each event type. ``topic`` is the
        relay's topic template, from which the registry's subject derives; where that names other
        columns than those of ``EventInfo``, a function that gives the topic. Raises ``ValueError``
        for a template that cannot be filled."""
        self._serializers = serializers
        if isinstance(topic, str):
            template = topic
            try:
                template.format_map(dict.fromkeys(EventInfo._fields, ""))
            except (KeyError, ValueError, IndexError, AttributeError) as error:
                known = ", ".join(EventInfo._fields)
                raise ValueError(
                    f"topic: {template!r} cannot be filled ({error}); {known} are known, or give "
                    "a function of an EventInfo"
                ) from None
            self._topic: Callable[[EventInfo], str] = lambda event: template.format_map(
                event._asdict()
            )
        else:
            self._topic = topic

    def __call__(self, payload: Any, event: EventInfo) -> bytes | None:
        if isinstance(self._serializers, Mapping):
            serializer = self._serializers.get(event.event_type)
            if serializer is None:
                raise ValueError(f"no serializer for the event type {event.event_type!r}")
        else:
            serializer = self._serializers
        return serializer(payload, SerializationContext(self._topic(event), MessageField.VALUE))
