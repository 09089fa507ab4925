"""Topics, partitions and columns that the settings choose."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_kafka
from cloudevents.core.formats.json import JSONFormat

from cdc_relay.config import Settings, load
from cdc_relay.errors import UnroutableError
from cdc_relay.outbox import OutboxEvent
from cdc_relay.router import Record, Router, ShapedRouter, ValueKind
from cdc_relay.routing import ExtraColumn, Routing

EVENT = OutboxEvent(7, "e-1", "order", "7", "CREATED", b'{"a": 1.50}', None, 1_772_366_400_000_001)


def settings(**flags: object) -> Settings:
    return load(environ={}, flags=flags)


def route(
    *extra: bytes | None,
    kinds: dict[str, ValueKind] | None = None,
    kind: Any = "json",
    **flags: Any,
) -> Record:
    event = flags.pop("event", EVENT)
    return settings(**flags).router(kind, kinds).route(event._replace(extra=extra))


def test_the_default_router_is_the_plain_one() -> None:
    router = settings().router("json")
    assert type(router) is Router
    assert router.by_type
    assert settings().routing().used_by == {}


@pytest.mark.parametrize(
    ("template", "extra", "topic"),
    [
        ("{tenant}.{aggregate_type}", [b"acme"], "acme.order"),
        ("{tenant}-{Region}-{tenant}", [b"acme", b"eu"], "acme-eu-acme"),
        ("t.{id}.{event_id}.{aggregate_id}", [], "t.7.e-1.7"),
    ],
)
def test_a_template_over_any_column(template: str, extra: list[bytes], topic: str) -> None:
    router = settings(topic=template).router("json")
    assert not router.by_type
    event = EVENT._replace(extra=tuple(extra))
    assert router.route(event).topic == router.topic(event) == topic


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "tenant is NULL, and the topic is made of it"),
        (b"", "tenant is empty, and the topic"),
        (b"a b", "topic 'a b' is not a Kafka topic name"),
        (b"\xff", "tenant is no text"),
    ],
)
def test_a_value_that_makes_no_topic_is_the_rows_fault(value: bytes | None, why: str) -> None:
    with pytest.raises(UnroutableError, match=why):
        route(value, topic="{tenant}")


@pytest.mark.parametrize("name", ["aggregate_type", "event_type"])
def test_an_empty_name_makes_no_topic(name: str) -> None:
    """It would be that of no type: one that nobody reads."""
    router = settings(topic=f"t.{{{name}}}").router("json")
    with pytest.raises(UnroutableError, match=f"{name} is empty, and the topic"):
        router.route(EVENT._replace(**{name: ""}))


def test_names_of_the_table_and_of_ours() -> None:
    routing = settings(columns="debezium", topic="{type}.{event_type}.{id}").routing()
    assert routing.used_by == {}
    assert routing.topic(EVENT) == "CREATED.CREATED.e-1"
    own = settings(columns="status=relay_status", topic="{status}").routing()
    assert own.used_by == {"status": "topic"}


ROUTES = [
    {"column": "event_type", "match": r"Audit.*", "topic": "audit"},
    {"match": r"(?P<group>\w+)\.(\w+)", "topic": "{group}.{2}.{tenant}"},
    {"column": "tenant", "match": "acme", "topic": "vip"},
]


@pytest.mark.parametrize(
    ("fields", "tenant", "topic"),
    [
        ({"event_type": "AuditDone", "aggregate_type": "shop.order"}, b"x", "audit"),
        ({"aggregate_type": "shop.order"}, b"x", "shop.order.x"),
        ({}, b"acme", "vip"),
        ({}, b"acme2", "t.order"),
        ({}, None, "t.order"),
    ],
)
def test_routes(fields: dict[str, Any], tenant: bytes | None, topic: str) -> None:
    written = json.dumps(ROUTES)
    for routes in (ROUTES, written):
        event = EVENT._replace(**fields)
        flags = {"event": event, "routes": routes, "topic": "t.{aggregate_type}"}
        assert route(tenant, **flags).topic == topic


def test_a_group_that_took_no_part_is_empty() -> None:
    routes = [{"match": "(a)?order", "topic": "x{1}"}]
    assert route(routes=routes).topic == "x"


def test_a_topic_and_a_partition_of_the_rows_own() -> None:
    flags = {"topic_column": "goes_to", "partition_column": "part", "topic": "t"}
    record = route(b"there", b"5", **flags)
    assert (record.topic, record.partition) == ("there", 5)
    record = route(None, None, **flags)
    assert (record.topic, record.partition) == ("t", -1)
    assert route(b"", b"0", **flags)[::5] == ("t", 0)
    with pytest.raises(UnroutableError, match="topic 'no topic' is not"):
        route(b"no topic", None, **flags)
    for wrong in (b"-1", b"2147483648", b"one", b"", b"1.0", "٣".encode()):
        with pytest.raises(UnroutableError, match="which is no partition"):
            route(None, wrong, **flags)


def test_topics_that_the_templates_can_have_given() -> None:
    routing = settings(topic="t.{tenant}", routes=ROUTES).routing()
    names = ["t.x", "t.", "audit", "a.b.c", "vip", "other", "audit2"]
    assert routing.topics_of(names) == ["a.b.c", "audit", "t.x", "vip"]


KINDS: dict[str, ValueKind] = {"tenant": "text", "rev": "number", "doc": "json", "raw": "binary"}
EXTRA = "tenant:header:x-tenant,tenant:envelope,rev:envelope:v,doc:envelope,raw:envelope"


def test_columns_in_header_and_envelope() -> None:
    values = ('né"1'.encode(), b"12345678901234567890", b'{"n": 1.50}', b"\0\xff")
    record = route(*values, kinds=KINDS, extra_columns=EXTRA)
    assert record.headers[-1] == ("x-tenant", 'né"1'.encode())
    assert dict(record.headers)["content-type"] == b"application/json"
    assert record.value == (
        '{"payload": {"a": 1.50}, "tenant": "né\\"1", "v": 12345678901234567890, '
        '"doc": {"n": 1.50}, "raw": "AP8="}'.encode()
    )
    nothing = route(None, None, None, None, kinds=KINDS, extra_columns=EXTRA)
    assert nothing.headers[-1] == ("x-tenant", None)
    assert json.loads(nothing.value or b"") == {
        "payload": {"a": 1.5},
        **dict.fromkeys(("tenant", "v", "doc", "raw")),
    }


def test_a_number_that_is_none_in_json_is_text() -> None:
    record = route(b"00042", kinds={"rev": "number"}, extra_columns="rev:envelope")
    assert json.loads(record.value or b"")["rev"] == "00042"


def test_the_envelope_of_other_payloads_and_of_a_tombstone() -> None:
    flags: dict[str, Any] = {"kinds": KINDS, "extra_columns": "tenant:envelope"}
    text = route(b"a", kind="text", event=EVENT._replace(payload=b'say "x"'), **flags)
    assert json.loads(text.value or b"") == {"payload": 'say "x"', "tenant": "a"}
    binary = route(b"a", kind="binary", event=EVENT._replace(payload=b"\0\xff"), **flags)
    assert json.loads(binary.value or b"") == {
        "payload_base64": base64.b64encode(b"\0\xff").decode(),
        "tenant": "a",
    }
    assert route(b"a", event=EVENT._replace(payload=None), **flags).value is None


def test_columns_of_ours_under_another_name() -> None:
    record = route(extra_columns="event_type:header:eventType,id:envelope:seq")
    assert record.headers[-1] == ("eventType", b"CREATED")
    assert json.loads(record.value or b"") == {"payload": {"a": 1.5}, "seq": "7"}


@pytest.mark.parametrize("form", ["cloudevents", "cloudevents-structured"])
def test_the_envelope_of_a_cloudevent_is_its_attributes(form: str) -> None:
    flags: dict[str, Any] = {"extra_columns": "tenant:envelope,rev:envelope", "format": form}
    record = route("é".encode(), b"5", kinds=KINDS, **flags)
    assert record.value is not None
    carried = {name: value for name, value in record.headers if value is not None}
    event = from_kafka(KafkaMessage(carried, record.key, record.value), JSONFormat())
    assert event.get_data() == {"a": 1.5}
    attributes = event.get_attributes()
    assert (attributes["tenant"], attributes["rev"], attributes["type"]) == ("é", "5", "CREATED")
    assert "tenant" not in json.loads(route(None, b"5", kinds=KINDS, **flags).value or b"")
    tombstone = route(b"a", None, kinds=KINDS, event=EVENT._replace(payload=None), **flags)
    assert tombstone.value is None
    assert dict(tombstone.headers)["ce_tenant"] == b"a"


def test_headers_of_the_row_do_not_repeat_an_extra_one() -> None:
    event = EVENT._replace(headers=b'{"x-tenant": "other"}')
    with pytest.raises(UnroutableError, match="own headers"):
        route(b"a", event=event, extra_columns="tenant:header:x-tenant")
    with pytest.raises(UnroutableError, match="own headers"):
        route(
            b"a",
            event=EVENT._replace(headers=b'{"ce_tenant": "other"}'),
            extra_columns="tenant:envelope",
            format="cloudevents",
        )


def test_a_shaped_router_is_otherwise_the_plain_one() -> None:
    plain = settings().router("json").route(EVENT)
    shaped = settings(partition_column="part").router("json")
    assert isinstance(shaped, ShapedRouter)
    assert shaped.route(EVENT._replace(extra=(None,))) == plain


@pytest.mark.parametrize("form", ["raw", "cloudevents-structured"])
def test_text_that_is_none_is_unroutable_where_a_document_holds_it(form: Any) -> None:
    """One row waits; it used to end the relay."""
    routing = Routing("t", extra_columns=[ExtraColumn("note", "envelope", "note")])
    for payload, note in ((b"\xff", b"x"), (b"x", b"\xff")):
        router = ShapedRouter(routing, "text", form, "/s", {"note": "text"})
        with pytest.raises(UnroutableError, match="bytes that are not UTF-8"):
            router.route(EVENT._replace(payload=payload, extra=(note,)))
