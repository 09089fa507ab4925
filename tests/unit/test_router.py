"""Event to record: a pure function, case by case."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_kafka
from cloudevents.core.formats.json import JSONFormat
from hypothesis import given
from hypothesis import strategies as st

from cdc_relay.errors import UnroutableError
from cdc_relay.outbox import OutboxEvent
from cdc_relay.router import Record, Router
from cdc_relay.routing import check_template

EVENT = OutboxEvent(
    id=1,
    event_id="e-1",
    aggregate_type="order",
    aggregate_id="7",
    event_type="CREATED",
    payload=b'{"a": 1}',
    headers=None,
    created_at=1_772_366_400_000_001,
)


def route(template: str = "outbox.event.{aggregate_type}", **fields: Any) -> Record:
    return Router(template).route(EVENT._replace(**fields))


def headers(record: Record) -> dict[str, bytes | None]:
    return dict(record.headers)


def test_the_whole_record() -> None:
    record = route()
    assert record[:5] == (
        "outbox.event.order",
        b"7",
        b'{"a": 1}',
        [
            ("id", b"e-1"),
            ("event_type", b"CREATED"),
            ("aggregate_type", b"order"),
            ("aggregate_id", b"7"),
            ("occurred_at", b"2026-03-01T12:00:00.000001Z"),
            ("content-type", b"application/json"),
        ],
        1_772_366_400_000,
    )


@pytest.mark.parametrize(
    ("template", "topic"),
    [
        ("fixed", "fixed"),
        ("{aggregate_type}", "order"),
        ("a.{aggregate_type}.{event_type}-z_", "a.order.CREATED-z_"),
        ("{aggregate_type}{aggregate_type}", "orderorder"),
    ],
)
def test_topics(template: str, topic: str) -> None:
    assert route(template).topic == topic


@pytest.mark.parametrize("template", ["", "sp ace", "{a}{", "ä", "x" * 250])
def test_templates_that_can_never_give_a_topic(template: str) -> None:
    with pytest.raises(ValueError, match="is not a topic name"):
        check_template(template)


@pytest.mark.parametrize(
    "aggregate_type", ["Dont care/Ü", "foo@bar", "foo$bar", "a b", "ж", "x" * 249, "a\nb"]
)
def test_types_that_are_no_topic_are_refused_as_they_are(aggregate_type: str) -> None:
    """Cleaned, foo@bar and foo$bar would be one topic."""
    with pytest.raises(UnroutableError, match="is not a Kafka topic name"):
        route(aggregate_type=aggregate_type)


@pytest.mark.parametrize("aggregate_type", [".", ".."])
def test_the_two_names_that_kafka_reserves(aggregate_type: str) -> None:
    with pytest.raises(UnroutableError):
        route("{aggregate_type}", aggregate_type=aggregate_type)


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(UnroutableError, match="aggregate_id is empty"):
        route(aggregate_id="")


def test_a_tombstone_is_not_json_null() -> None:
    assert route(payload=None).value is None
    assert route(payload=b"null").value == b"null"
    assert route(payload=b"").value == b""


def test_a_row_without_a_time() -> None:
    record = route(created_at=None)
    assert record.timestamp_ms == 0
    assert "occurred_at" not in headers(record)


@pytest.mark.parametrize(
    ("created_at", "text"),
    [
        (0, b"1970-01-01T00:00:00.000000Z"),
        (-1, b"1969-12-31T23:59:59.999999Z"),
        (999_999, b"1970-01-01T00:00:00.999999Z"),
        (253_402_300_799_999_999, b"9999-12-31T23:59:59.999999Z"),
        (-62_135_596_800_000_000, b"0001-01-01T00:00:00.000000Z"),
    ],
)
def test_occurred_at(created_at: int, text: bytes) -> None:
    assert headers(route(created_at=created_at))["occurred_at"] == text


@pytest.mark.parametrize("created_at", [253_402_300_800_000_000, -62_135_596_800_000_001, -(2**62)])
def test_times_that_no_calendar_has_park_the_row(created_at: int) -> None:
    with pytest.raises(UnroutableError, match="years 1 to 9999"):
        route(created_at=created_at)


def test_the_first_millisecond_of_the_epoch_is_not_taken_for_no_time() -> None:
    assert route(created_at=999).timestamp_ms == 1
    assert route(created_at=1000).timestamp_ms == 1


def test_one_router_gives_each_event_its_own_time() -> None:
    router = Router("t")
    times = [1_000_000, 1_500_000, 2_000_000, 1_000_001]
    texts = [
        headers(router.route(EVENT._replace(created_at=time)))["occurred_at"] for time in times
    ]
    assert [text[17:26] for text in texts if text] == [
        b"01.000000",
        b"01.500000",
        b"02.000000",
        b"01.000001",
    ]


@pytest.mark.parametrize(
    ("kind", "content_type"),
    [
        ("json", b"application/json"),
        ("text", b"text/plain; charset=utf-8"),
        ("binary", b"application/octet-stream"),
    ],
)
def test_content_type(kind: str, content_type: bytes) -> None:
    record = Router("t", kind).route(EVENT)  # type: ignore[arg-type]
    assert headers(record)["content-type"] == content_type


def test_headers_of_every_shape() -> None:
    text = '{"trace": null, "retry": 3, "ok": true, "n": {"a": 1}, "ключ": "é", "s": "3", "l": [1]}'
    own = headers(route(headers=text.encode()))
    assert own["trace"] is None
    assert own["retry"] == b"3"
    assert own["ok"] == b"true"
    assert own["n"] == b'{"a": 1}'
    assert own["ключ"] == "é".encode()
    assert own["s"] == b"3"
    assert own["l"] == b"[1]"


@pytest.mark.parametrize(
    "value",
    [
        *("1.50", "1e300", "1E400", "-0.0", "0.12345678901234567890", "9" * 5000),
        *("[1.50, 1e300]", '{"b":[1,{"c":0.10}],"\\u00e9":"\\ud800"}', "[]", "{}", "false"),
    ],
)
@pytest.mark.parametrize("form", ['{"a": "}", "n": %s, "z": true}', ' { "n"\n:\t%s } ', '{"n":%s}'])
def test_what_is_no_string_keeps_its_very_text(form: str, value: str) -> None:
    assert headers(route(headers=(form % value).encode()))["n"] == value.encode()


def test_of_two_entries_of_one_name_the_last_counts() -> None:
    assert headers(route(headers=b'{"a": [1], "a": [2.0]}'))["a"] == b"[2.0]"


@pytest.mark.parametrize(
    "text",
    [
        '{"a": "\\ud800"}',
        '{"\\ud800": "a"}',
        '{"id\\u0000": "forged"}',
        '{"a": NaN}',
        '{"a": -Infinity}',
        "[" * 100_000 + "]" * 100_000,
        '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
)
def test_headers_that_no_record_can_carry_park_the_row(text: str) -> None:
    """A half character in a name would be a segmentation fault of the client library."""
    with pytest.raises(UnroutableError, match="headers"):
        route(headers=text.encode())


def test_trace_context_passes_untouched() -> None:
    value = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    own = headers(route(headers=f'{{"traceparent": "{value}", "baggage": "a=b,c=d"}}'.encode()))
    assert own["traceparent"] == value.encode()
    assert own["baggage"] == b"a=b,c=d"


@pytest.mark.parametrize("text", [b"null", b"{}"])
def test_no_headers_of_its_own(text: bytes) -> None:
    assert headers(route(headers=text)) == headers(route())


@pytest.mark.parametrize("text", [b"[]", b"3", b'"x"', b"{", b"", b"true"])
def test_headers_of_a_wrong_shape_park_the_row(text: bytes) -> None:
    with pytest.raises(UnroutableError, match="headers is"):
        route(headers=text)


@given(st.text(min_size=1, max_size=64).filter(lambda s: s.isprintable()))
def test_the_key_is_the_utf8_of_the_aggregate_id(aggregate_id: str) -> None:
    assert route(aggregate_id=aggregate_id).key == aggregate_id.encode()


def test_many_topics_do_not_fill_memory() -> None:
    router = Router("{event_type}")
    for number in range(10_050):
        router.route(EVENT._replace(event_type=f"t{number}"))
    assert len(router._topics) <= 10_000


def test_a_row_without_an_event_id_is_parked_not_sent() -> None:
    with pytest.raises(UnroutableError, match="event_id"):
        route(event_id="")


@pytest.mark.parametrize("name", ["id", "event_type", "aggregate_id", "content-type"])
def test_headers_of_the_row_do_not_repeat_the_records_own(name: str) -> None:
    with pytest.raises(UnroutableError, match="own headers"):
        route(headers=f'{{"{name}": "other"}}'.encode())


# --- CloudEvents ----------------------------------------------------------------------------------


def as_event(record: Record) -> Any:
    """The record as the CloudEvents SDK reads it."""
    assert record.value is not None
    carried = {name: value for name, value in record.headers if value is not None}
    message = KafkaMessage(headers=carried, key=record.key, value=record.value)
    return from_kafka(message, JSONFormat())


@pytest.mark.parametrize("form", ["cloudevents", "cloudevents-structured"])
@pytest.mark.parametrize(
    ("kind", "payload", "data", "content_type"),
    [
        ("json", b'{"a": 1, "b": "\xc3\xa9"}', {"a": 1, "b": "é"}, "application/json"),
        ("json", b"null", None, "application/json"),
        ("text", 'say "é"\n'.encode(), 'say "é"\n', "text/plain; charset=utf-8"),
        ("binary", b"\0\xff", b"\0\xff", "application/octet-stream"),
    ],
)
def test_a_cloudevent_of_either_form(
    form: Any, kind: Any, payload: bytes, data: object, content_type: str
) -> None:
    row = EVENT._replace(payload=payload, headers=b'{"traceparent": "00-a-b-01"}')
    record = Router("t", kind, form, "/shop").route(row)
    event = as_event(record)
    assert event.get_data() == data
    assert event.get_attributes() == {
        "specversion": "1.0",
        "id": "e-1",
        "source": "/shop",
        "type": "CREATED",
        "subject": "7",
        "time": datetime(2026, 3, 1, 12, 0, 0, 1, UTC),
        "datacontenttype": content_type,
        "aggregatetype": "order",
        "partitionkey": "7",
    }
    assert headers(record)["traceparent"] == b"00-a-b-01"
    assert headers(record)["id"] == b"e-1"
    if form == "cloudevents":
        assert record.value == payload
    elif kind == "json":
        assert payload in (record.value or b"")  # digit for digit


@pytest.mark.parametrize("form", ["cloudevents", "cloudevents-structured"])
def test_a_cloudevent_that_is_a_tombstone_or_has_no_time(form: Any) -> None:
    record = Router("t", "json", form).route(EVENT._replace(payload=None, created_at=None))
    assert record.value is None
    assert headers(record)["ce_id"] == b"e-1"
    assert headers(record)["content-type"] == b"application/json"
    assert "ce_time" not in headers(record)


@pytest.mark.parametrize("form", ["cloudevents", "cloudevents-structured"])
def test_what_cannot_be_a_cloudevent(form: Any) -> None:
    router = Router("t", "json", form)
    with pytest.raises(UnroutableError, match="event_type is empty"):
        router.route(EVENT._replace(event_type=""))
    with pytest.raises(UnroutableError, match="ce_id"):
        router.route(EVENT._replace(headers=b'{"ce_id": "x"}'))
    assert headers(Router("t").route(EVENT._replace(headers=b'{"ce_id": "x"}')))["ce_id"] == b"x"
