"""From outbox event to Kafka record. Pure: no I/O, no clock, the same record for the same event.

The stream and the compensator both come through here, so a row gives the same topic, key, value,
headers and timestamp whichever way it was read.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, NamedTuple

from cdc_relay import cloudevents
from cdc_relay.cloudevents import PayloadKind, quoted
from cdc_relay.errors import UnroutableError
from cdc_relay.outbox import OutboxEvent
from cdc_relay.routing import ExtraColumn, Routing

Format = Literal["raw", "cloudevents", "cloudevents-structured"]
"""Raw: the payload is the value, and the headers of ours describe it. CloudEvents in binary mode:
``ce_`` headers besides. Structured: the value is a CloudEvents document."""

ValueKind = Literal["text", "number", "json", "binary"]
"""What a column holds, for its place in a JSON document."""

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
# Names of CloudEvents extensions (section "Attribute Naming Convention").
_ATTRIBUTE: Final = re.compile(
    r"(?!(?:partitionkey|datacontenttype|dataschema|data)$)[a-z0-9]{1,20}"
)
# A JSON number; what ZEROFILL prints is none.
_NUMBER: Final = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?")
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


def check_extra_columns(columns: Sequence[ExtraColumn], form: Format) -> None:
    """Raise ``ValueError`` with one line for a name that a record of this form cannot carry."""
    taken: set[tuple[str, str]] = set()
    for column, place, name in columns:
        field = place == "envelope"
        if (place, name) in taken:
            raise ValueError(f"extra_columns: {place} {name!r} is there twice")
        taken.add((place, name))
        if field and form != "raw":
            if _ATTRIBUTE.fullmatch(name) is None or f"ce_{name}" in _CLOUDEVENTS_HEADERS:
                raise ValueError(
                    f"extra_columns: {name!r} is no name of a CloudEvents extension (a to z and 0 "
                    f"to 9, 20 at most, none of its own): write {column}:envelope:name"
                )
        elif field and name.startswith("payload"):
            raise ValueError(f"extra_columns: {name!r} is the envelope's own: write another name")
        elif not field and (
            name in RESERVED_HEADERS or "\0" in name or (form != "raw" and name.startswith("ce_"))
        ):
            raise ValueError(
                f"extra_columns: {name!r} is a header of the record's own: write "
                f"{column}:header:name"
            )


class Router:
    """Turns events into records.

    ``route`` raises ``UnroutableError`` for an event that Kafka could never take; the name is
    refused as it is, never cleaned, because cleaning would merge two aggregate types. One thread.
    """

    def __init__(
        self,
        routing: Routing | str,
        payload_kind: PayloadKind = "json",
        form: Format = "raw",
        cloudevents_source: str = "/cdc-relay",
    ) -> None:
        """``routing`` may be a topic template alone."""
        self._routing = Routing(routing) if isinstance(routing, str) else routing
        self._topics: dict[tuple[str, str], str] = {}
        self._kind = payload_kind
        self._content_type = _CONTENT_TYPES[payload_kind]
        self._raw = form == "raw"
        self._taken: Collection[str] = () if self._raw else _CLOUDEVENTS_HEADERS
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
            topic = self.topic(event)
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
            headers += _row_headers(event.headers, self._taken)
        return Record(topic, key, value, headers, timestamp_ms)

    @property
    def by_type(self) -> bool:
        """Whether aggregate type and event type alone decide the topic."""
        return self._routing.by_type

    def topic(self, event: OutboxEvent) -> str:
        """The topic of ``event``, as ``route`` gives it; says nothing about the rest of it."""
        topic = self._routing.topic(event)
        if self._routing.by_type:
            if len(self._topics) >= 10_000:  # types are few; whoever has more must not fill memory
                self._topics.clear()
            self._topics[event.aggregate_type, event.event_type] = topic
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


class ShapedRouter(Router):
    """A router whose records name their partition, or carry more columns."""

    def __init__(
        self,
        routing: Routing,
        payload_kind: PayloadKind,
        form: Format,
        cloudevents_source: str,
        kinds: Mapping[str, ValueKind],
    ) -> None:
        """``kinds``: of the columns in ``OutboxEvent.extra``."""
        super().__init__(routing, payload_kind, form, cloudevents_source)
        self._headers = [
            (one.name, read) for read, one in routing.extra_columns if one.place == "header"
        ]
        self._fields = [
            (one.name, read, kinds.get(one.column.lower(), "text"))
            for read, one in routing.extra_columns
            if one.place == "envelope"
        ]
        names = [name for name, _ in self._headers]
        if self._raw and self._fields:
            self._content_type = _CONTENT_TYPES["json"]
        elif not self._raw:
            names += [f"ce_{name}" for name, _, _ in self._fields]
        self._taken = frozenset((*self._taken, *names))

    def route(self, event: OutboxEvent) -> Record:
        """As ``Router.route``; what the row's own columns say comes on top."""
        topic, key, value, headers, timestamp_ms, _ = super().route(event)
        if self._fields:
            values = [(name, kind, read(event)) for name, read, kind in self._fields]
            if self._raw:
                value = None if value is None else self._enveloped(value, values)
            else:
                # Attributes are never null, and numbers only up to 32 bits: so they are text.
                texts = [(name, _plain(kind, one)) for name, kind, one in values if one is not None]
                if self._structured and value is not None:
                    fields = [_member(name, quoted(one)) for name, one in texts]
                    value = b"{" + b"".join([one + b", " for one in fields]) + value[1:]
                else:
                    headers += [(f"ce_{name}", one) for name, one in texts]
        headers += [(name, read(event)) for name, read in self._headers]
        partition = self._routing.partition(event)
        return Record(topic, key, value, headers, timestamp_ms, partition)

    def _enveloped(
        self, payload: bytes, values: Sequence[tuple[str, ValueKind, bytes | None]]
    ) -> bytes:
        """``{"payload": …, name: value, …}``; a JSON payload stands in it byte for byte."""
        if self._kind == "json":
            members = [_member("payload", payload)]
        elif self._kind == "text":
            members = [_member("payload", quoted(payload))]
        else:
            members = [_member("payload_base64", quoted(base64.b64encode(payload)))]
        for name, kind, value in values:
            if value is None:
                text = b"null"
            elif kind == "json" or (kind == "number" and _NUMBER.fullmatch(value)):
                text = value
            else:
                text = quoted(_plain(kind, value))
            members.append(_member(name, text))
        return b"{" + b", ".join(members) + b"}"


def _plain(kind: ValueKind, value: bytes) -> bytes:
    return base64.b64encode(value) if kind == "binary" else value


def _member(name: str, value: bytes) -> bytes:
    return json.dumps(name, ensure_ascii=False).encode() + b": " + value


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
