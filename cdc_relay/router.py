"""From outbox event to Kafka record. Pure: no I/O, no clock, the same record for the same event.

The stream and the compensator both come through here, so a row gives the same topic, key, value,
headers and timestamp whichever way it was read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, NamedTuple

from cdc_relay import cloudevents
from cdc_relay.cloudevents import PayloadKind
from cdc_relay.errors import UnroutableError
from cdc_relay.outbox import OutboxEvent

_TOPIC_FIELDS: Final = ("aggregate_type", "event_type")
_PLACEHOLDER: Final = re.compile(r"\{([^{}]*)\}")
# https://kafka.apache.org/documentation: letters, digits, '.', '_', '-'; at most 249 characters.
_LEGAL_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
Format = Literal["raw", "cloudevents", "cloudevents-structured"]
"""Raw: the payload is the value, and the headers of ours describe it. CloudEvents in binary mode:
``ce_`` headers besides. Structured: the value is a CloudEvents document."""

_CONTENT_TYPES: Final[dict[str, bytes]] = {
    "json": b"application/json",
    "text": b"text/plain; charset=utf-8",
    "binary": b"application/octet-stream",
}
# Consumers rely on these; an entry of the row's headers may not stand beside or instead of one.
RESERVED_HEADERS: Final = frozenset(
    ("id", "event_type", "aggregate_type", "aggregate_id", "occurred_at", "content-type")
)
_CLOUDEVENTS_HEADERS: Final = frozenset(
    f"ce_{name}"
    for name in ("specversion", "id", "source", "type", "subject", "time", "aggregatetype")
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Record(NamedTuple):
    """What goes to Kafka for one event. Key and value are bytes as they will lie in the log."""

    topic: str
    key: bytes
    value: bytes | None
    """None is a tombstone."""
    headers: list[tuple[str, bytes | None]]
    timestamp_ms: int
    """Milliseconds since 1970-01-01 UTC; 0 leaves it to the producer (the row has no time)."""
    partition: int = -1
    """-1 leaves it to the partitioner, so to the key."""


def check_template(template: str) -> None:
    """Raise ``ValueError`` with one line if ``template`` can never give a topic name."""
    for field in _PLACEHOLDER.findall(template):
        if field not in _TOPIC_FIELDS:
            allowed = ", ".join("{" + name + "}" for name in _TOPIC_FIELDS)
            raise ValueError(f"{{{field}}} is not a placeholder; use {allowed}")
    rest = _PLACEHOLDER.sub("x", template)
    if _LEGAL_TOPIC.fullmatch(rest) is None:
        raise ValueError(f"{template!r} is not a topic name; letters, digits, '.', '_' and '-' are")


def topics_of(template: str, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that ``template`` can have given, sorted."""
    parts = [re.escape(part) for part in _PLACEHOLDER.split(template)[::2]]
    like = re.compile("[A-Za-z0-9._-]+".join(parts))
    return sorted(name for name in names if like.fullmatch(name))


class Router:
    """Turns events into records by a topic template.

    ``route`` raises ``UnroutableError`` for an event that Kafka could never take; the name is
    refused as it is, never cleaned, because cleaning would merge two aggregate types. One thread.
    """

    def __init__(
        self,
        topic_template: str,
        payload_kind: PayloadKind = "json",
        form: Format = "raw",
        cloudevents_source: str = "/cdc-relay",
    ) -> None:
        check_template(topic_template)
        self._template = topic_template
        self._topics: dict[tuple[str, str], str] = {}
        self._kind = payload_kind
        self._content_type = _CONTENT_TYPES[payload_kind]
        self._raw = form == "raw"
        self._structured = form == "cloudevents-structured"
        self._source = cloudevents_source
        self._second: int | None = None
        self._second_text = ""

    def route(self, event: OutboxEvent) -> Record:
        """Return the record for ``event`` (contract: docs/guarantees.md, "The message")."""
        if not event.aggregate_id:
            raise UnroutableError("aggregate_id is empty: a record without a key has no order")
        if not event.event_id:
            raise UnroutableError("event_id is empty: consumers could not tell a repetition")
        names = (event.aggregate_type, event.event_type)
        topic = self._topics.get(names)
        if topic is None:
            topic = self._topic(*names)
        key = event.aggregate_id.encode()
        headers: list[tuple[str, bytes | None]] = [
            ("id", event.event_id.encode()),
            ("event_type", event.event_type.encode()),
            ("aggregate_type", event.aggregate_type.encode()),
            ("aggregate_id", key),
        ]
        timestamp_ms = 0
        created_at = event.created_at
        time = None
        if created_at is not None:
            time = self._rfc3339(created_at)
            headers.append(("occurred_at", time))
            # To the client library 0 means now: the row would get another time each time.
            timestamp_ms = created_at // 1000 or 1
        value = event.payload
        content_type = self._content_type
        if not self._raw:
            # A tombstone has no value to hold a document: its attributes are headers in any case.
            if self._structured and value is not None:
                content_type = cloudevents.STRUCTURED_TYPE
                value = cloudevents.structured_value(
                    event, self._source, time, self._kind, self._content_type.decode()
                )
            else:
                headers += cloudevents.binary_headers(event, self._source.encode(), time)
        headers.append(("content-type", content_type))
        if event.headers is not None:
            headers += _row_headers(event.headers, () if self._raw else _CLOUDEVENTS_HEADERS)
        return Record(topic, key, value, headers, timestamp_ms)

    def _topic(self, aggregate_type: str, event_type: str) -> str:
        fields = {"aggregate_type": aggregate_type, "event_type": event_type}
        topic = _PLACEHOLDER.sub(lambda match: fields[match[1]], self._template)
        if _LEGAL_TOPIC.fullmatch(topic) is None or topic in (".", ".."):
            raise UnroutableError(
                f"topic {topic!r} is not a Kafka topic name; letters, digits, '.', '_' and '-' are"
            )
        if len(self._topics) >= 10_000:  # types are few; whoever has more must not fill memory
            self._topics.clear()
        self._topics[aggregate_type, event_type] = topic
        return topic

    def _rfc3339(self, microseconds: int) -> bytes:
        second, fraction = divmod(microseconds, 1_000_000)
        if second != self._second:
            try:
                moment = _EPOCH + timedelta(seconds=second)
            except OverflowError:
                raise UnroutableError("created_at is not in the years 1 to 9999") from None
            self._second_text = moment.strftime("%Y-%m-%dT%H:%M:%S").rjust(19, "0")
            self._second = second
        return f"{self._second_text}.{fraction:06d}Z".encode()


def _row_headers(text: bytes, ours: Collection[str] = ()) -> list[tuple[str, bytes | None]]:
    """The entries of the row's ``headers`` object: strings as they are, null as null, everything
    else as its own JSON text (``3``, ``1.50``, ``true``, ``{"a": 1}``)."""
    try:
        json_text = text.decode()
        entries = _DECODER.decode(json_text)
    except (ValueError, RecursionError):
        raise UnroutableError("headers is not JSON") from None
    if entries is None:
        return []
    if not isinstance(entries, dict):
        raise UnroutableError(f"headers is a JSON {_kind(entries)}, not an object")
    result: list[tuple[str, bytes | None]] = []
    texts: dict[str, str] = {}
    for name, value in entries.items():
        if name in RESERVED_HEADERS or name in ours:
            raise UnroutableError(f"headers holds {name!r}, a name of the record's own headers")
        # librdkafka would end the name there, and so make another name of it.
        if "\0" in name:
            raise UnroutableError(f"headers holds {name!r}, a name with a zero character")
        try:
            name.encode()  # the client library dies of a name that is no text
            if value is None:
                result.append((name, None))
            elif isinstance(value, str):
                result.append((name, value.encode()))
            else:
                texts = texts or _texts_of(json_text)
                result.append((name, texts[name].encode()))
        except UnicodeEncodeError:
            raise UnroutableError(f"headers holds half a character at {name!r}") from None
    return result


class _Number(str):
    """A JSON number, by its own digits."""


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


_DECODER: Final = json.JSONDecoder(
    parse_int=_Number, parse_float=_Number, parse_constant=_no_number
)
_SPACE: Final = re.compile(r"[ \t\n\r]*")


def _kind(value: object) -> str:
    return "number" if isinstance(value, _Number) else type(value).__name__


def _texts_of(text: str) -> dict[str, str]:
    """The JSON text of each entry of the object that ``text``, which is valid, holds."""
    texts: dict[str, str] = {}

    def word(at: int) -> int:
        space = _SPACE.match(text, at)
        return space.end() if space else at

    at = word(text.index("{") + 1)
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at)
        at = word(word(at) + 1)  # behind the colon
        end = _DECODER.raw_decode(text, at)[1]
        texts[name] = text[at:end]
        at = word(end)
        if text[at] == ",":
            at = word(at + 1)
    return texts
