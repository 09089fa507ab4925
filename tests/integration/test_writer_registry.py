"""Avro, Protobuf and JSON Schema through a schema registry: from ``add`` to the consumer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext, SerializationError
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from sqlalchemy import MetaData, create_engine

from cdc_relay.outbox import ddl
from tests.support.harness import Harness
from tests.support.registry import SchemaRegistry
from tests.support.sql import Database
from writer import Outbox, outbox_table
from writer.registry import RegistrySerializer

SUBJECT = "outbox.event.order-value"
AVRO = json.dumps(
    {
        "type": "record",
        "name": "OrderPlaced",
        "fields": [{"name": "id", "type": "long"}, {"name": "total", "type": "string"}],
    }
)
JSON_SCHEMA = json.dumps(
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "OrderPlaced",
        "type": "object",
        "properties": {"id": {"type": "integer"}, "total": {"type": "string"}},
        "required": ["id", "total"],
    }
)
PAYLOAD = {"id": 7, "total": "12.50"}


def order_placed_message() -> Any:
    """What protoc makes of ``message OrderPlaced { int64 id = 1; string total = 2; }``."""
    file = descriptor_pb2.FileDescriptorProto(
        name="tests/order_placed.proto", package="tests", syntax="proto3"
    )
    message = file.message_type.add(name="OrderPlaced")
    field = descriptor_pb2.FieldDescriptorProto
    message.field.add(name="id", number=1, type=field.TYPE_INT64, label=field.LABEL_OPTIONAL)
    message.field.add(name="total", number=2, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tests.OrderPlaced"))


@pytest.fixture
def registry() -> Iterator[SchemaRegistry]:
    with SchemaRegistry.running() as made:
        yield made


@pytest.fixture
def client(registry: SchemaRegistry) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"url": registry.url}) as made:
        yield made


@pytest.fixture
def binary(database: Database) -> Database:
    for statement in ddl(outbox_table(MetaData(), payload="binary")):
        database.sql(statement)
    return database


def write(database: Database, serializer: Any, payload: object, **fields: Any) -> bytes:
    """Add one event and return the bytes of its payload column."""
    outbox = Outbox(outbox_table(MetaData(), payload="binary"), serializer=serializer)
    engine = create_engine(database.url)
    event = {"aggregate_type": "order", "aggregate_id": 7, "event_type": "ORDER_PLACED", **fields}
    with engine.begin() as connection:
        event_id = outbox.add(connection, **event, payload=payload)
    engine.dispose()
    stored: bytes = database.sql(
        "SELECT payload FROM outbox_event WHERE event_id = %s", (event_id,)
    )[0][0]
    return stored


CONTEXT = SerializationContext("outbox.event.order", MessageField.VALUE)


def test_avro(binary: Database, registry: SchemaRegistry, client: SchemaRegistryClient) -> None:
    serializer = RegistrySerializer(AvroSerializer(client, AVRO))
    stored = write(binary, serializer, PAYLOAD)
    assert stored[0] == 0  # the magic byte of the registry's format
    assert AvroDeserializer(client)(stored, CONTEXT) == PAYLOAD
    assert f"POST /subjects/{SUBJECT}/versions" in registry.requests
    asked = len(registry.requests)
    write(binary, serializer, PAYLOAD)
    assert len(registry.requests) == asked


def test_json_schema(binary: Database, client: SchemaRegistryClient) -> None:
    serializer = RegistrySerializer(JSONSerializer(JSON_SCHEMA, client))
    stored = write(binary, serializer, PAYLOAD)
    assert JSONDeserializer(JSON_SCHEMA, schema_registry_client=client)(stored, CONTEXT) == PAYLOAD
    with pytest.raises(SerializationError):
        write(binary, serializer, {"id": "seven"})


def test_protobuf(binary: Database, client: SchemaRegistryClient) -> None:
    message = order_placed_message()
    serializer = RegistrySerializer(
        ProtobufSerializer(message, client, {"use.deprecated.format": False})
    )
    stored = write(binary, serializer, message(**PAYLOAD))
    read = ProtobufDeserializer(message, {"use.deprecated.format": False}, client)(stored, CONTEXT)
    assert read == message(**PAYLOAD)


def test_one_serializer_for_each_event_type(binary: Database, client: SchemaRegistryClient) -> None:
    serializer = RegistrySerializer(
        {"ORDER_PLACED": AvroSerializer(client, AVRO)}, topic="shop.{aggregate_type}.{event_type}"
    )
    write(binary, serializer, PAYLOAD)
    assert client.get_subjects() == ["shop.order.ORDER_PLACED-value"]
    with pytest.raises(ValueError, match="no serializer for the event type 'OTHER'"):
        write(binary, serializer, PAYLOAD, event_type="OTHER")


def test_a_registry_that_refuses_leaves_nothing_written(
    binary: Database, client: SchemaRegistryClient
) -> None:
    serializer = AvroSerializer(client, AVRO, conf={"auto.register.schemas": False})
    with pytest.raises(SchemaRegistryError, match="40401"):
        write(binary, RegistrySerializer(serializer), PAYLOAD)
    assert binary.sql("SELECT COUNT(*) FROM outbox_event") == ((0,),)


def test_the_consumer_reads_what_was_added(
    binary: Database,
    client: SchemaRegistryClient,
    kafka: str,
    tmp_path: Path,
) -> None:
    """Through the relay, byte for byte."""
    with Harness(binary, kafka, tmp_path, create=False) as shop:
        shop.create_topic()
        topic = f"{shop.topic_prefix}{{aggregate_type}}"
        stored = write(
            binary, RegistrySerializer(AvroSerializer(client, AVRO), topic=topic), PAYLOAD
        )
        shop.relay()
        shop.wait_sent(1)
        [record] = shop.messages()
    assert record.value == stored
    assert record.headers["content-type"] == b"application/octet-stream"
    assert AvroDeserializer(client)(record.value, CONTEXT) == PAYLOAD
