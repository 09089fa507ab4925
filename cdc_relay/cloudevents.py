"""The two CloudEvents forms of a record. Pure.

Specification: CloudEvents 1.0.2, "Kafka Protocol Binding" and "JSON Event Format".

| attribute | from |
|---|---|
| ``id`` | event_id |
| ``source`` | setting ``cloudevents_source`` |
| ``type`` | event_type |
| ``subject`` | aggregate_id |
| ``time`` | created_at; absent where the row has none |
| ``datacontenttype`` | the kind of the payload column |
| ``aggregatetype`` (extension) | aggregate_type |
| ``partitionkey`` (extension) | aggregate_id, in the structured form; else it is the record's key |
"""

from __future__ import annotations

import base64
import json
from typing import Final, Literal

from cdc_relay.errors import UnroutableError
from cdc_relay.outbox import OutboxEvent

PayloadKind = Literal["json", "text", "binary"]
"""What the payload column holds: JSON, other text (sent as UTF-8), or bytes."""

STRUCTURED_TYPE: Final = b"application/cloudevents+json; charset=UTF-8"


def binary_headers(
    event: OutboxEvent, source: bytes, time: bytes | None
) -> list[tuple[str, bytes]]:
    """The attributes of ``event`` as headers; the payload stays the record's value. Raises
    ``UnroutableError`` for an event that has no type, which the specification demands."""
    _check(event)
    headers = [
        ("ce_specversion", b"1.0"),
        ("ce_id", event.event_id.encode()),
        ("ce_source", source),
        ("ce_type", event.event_type.encode()),
        ("ce_subject", event.aggregate_id.encode()),
        ("ce_aggregatetype", event.aggregate_type.encode()),
    ]
    if time is not None:
        headers.append(("ce_time", time))
    return headers


def structured_value(
    event: OutboxEvent, source: str, time: bytes | None, kind: PayloadKind, content_type: str
) -> bytes:
    """``event`` as one JSON document. A JSON payload stands in it byte for byte as the server
    gives it; other text is a JSON string, bytes are ``data_base64``."""
    _check(event)
    attributes = {
        "specversion": "1.0",
        "id": event.event_id,
        "source": source,
        "type": event.event_type,
        "subject": event.aggregate_id,
        "aggregatetype": event.aggregate_type,
        "partitionkey": event.aggregate_id,
        "datacontenttype": content_type,
    }
    if time is not None:
        attributes["time"] = time.decode()
    payload = event.payload or b""
    if kind == "json":
        name, data = "data", payload
    elif kind == "text":
        name, data = "data", quoted(payload)
    else:
        name, data = "data_base64", b'"' + base64.b64encode(payload) + b'"'
    head = json.dumps(attributes, ensure_ascii=False).encode()
    return head[:-1] + b', "' + name.encode() + b'": ' + data + b"}"


def quoted(text: bytes) -> bytes:
    """UTF-8 text as a JSON string. Raises ``UnroutableError`` for what is no text."""
    try:
        return json.dumps(text.decode(), ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise UnroutableError("a column of text holds bytes that are not UTF-8") from None


def _check(event: OutboxEvent) -> None:
    if not event.event_type:
        raise UnroutableError("event_type is empty: a CloudEvent must have a type")
