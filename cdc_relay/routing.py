"""Which topic and partition an event goes to, and which columns its record carries besides.

The settings ``topic``, ``routes``, ``topic_column``, ``partition_column`` and ``extra_columns``,
checked and compiled once at start. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple

from cdc_relay.columns import Columns
from cdc_relay.errors import UnroutableError
from cdc_relay.outbox import OutboxEvent

# https://kafka.apache.org/documentation: letters, digits, '.', '_', '-'; at most 249 characters.
_LEGAL_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_PLACEHOLDER: Final = re.compile(r"\{([^{}]*)\}")
_COLUMN: Final = re.compile(r"[^\0`%'\"\\{}:,\s]{1,64}")
_MOST_PARTITIONS: Final = 2**31 - 1
_MOST_TOPICS: Final = 10_000
# Columns of ours that a record may be routed by. The others are in the record already, or change
# after the INSERT, so that stream and compensator would not agree on them.
_FIXED: Final = ("id", "event_id", "aggregate_type", "aggregate_id", "event_type")

Value = Callable[[OutboxEvent], bytes | None]
_Part = str | Callable[[OutboxEvent, "re.Match[str] | None"], str]


Place = Literal["header", "envelope"]
_PLACES: Final[dict[str, Place]] = {"header": "header", "envelope": "envelope"}


class Route(NamedTuple):
    """Events whose ``column`` matches, as a whole, the regular expression ``match`` go to the topic
    that the template ``topic`` gives; its placeholders are columns and the groups of ``match``."""

    match: str
    topic: str
    column: str = "aggregate_type"

    @classmethod
    def parse(cls, value: object) -> Route:
        """A table of the configuration file. Raises ``ValueError`` with one line."""
        fields = dict(value) if isinstance(value, dict) else {}
        if not {"match", "topic"} <= fields.keys() <= {"column", "match", "topic"} or not all(
            isinstance(field, str) for field in fields.values()
        ):
            raise ValueError(
                "a route is a table with match (a regular expression), topic (a template) and "
                "column (by default aggregate_type)"
            )
        return cls(**fields)


class ExtraColumn(NamedTuple):
    """A column that goes out as header ``name``, or as field ``name`` of the envelope."""

    column: str
    place: Place
    name: str

    @classmethod
    def parse(cls, text: object) -> ExtraColumn:
        """``column:header`` or ``column:envelope``, with another name behind it where there is
        one. Raises ``ValueError`` with one line."""
        column, _, rest = str(text).partition(":")
        where, _, name = rest.partition(":")
        place = _PLACES.get(where.strip())
        if not column.strip() or place is None:
            raise ValueError(
                f"{text!r} is not column:header or column:envelope, or column:header:name"
            )
        return cls(column.strip(), place, name.strip() or column.strip())


def check_template(template: str) -> None:
    """Raise ``ValueError`` with one line if ``template`` can never give a topic name."""
    if _LEGAL_TOPIC.fullmatch(_PLACEHOLDER.sub("x", template)) is None:
        raise ValueError(
            f"{template!r} is not a topic name; letters, digits, '.', '_', '-' and {{column}} are"
        )


class Routing:
    """The five settings, compiled. One thread."""

    def __init__(
        self,
        topic: str,
        routes: Sequence[Route] = (),
        topic_column: str = "",
        partition_column: str = "",
        extra_columns: Sequence[ExtraColumn] = (),
        names: Columns | None = None,
    ) -> None:
        """``names`` are the table's; the settings may use them or ours. Raises ``ValueError`` with
        one line that begins with the setting."""
        self._names = names or Columns()
        self._fields: set[str] = set()
        self.used_by: dict[str, str] = {}
        """The columns that are not ours, in the order of ``OutboxEvent.extra``, and the setting
        that names each first."""
        self.topic_column = topic_column
        self.partition_column = partition_column
        self.templates = (topic, *(route.topic for route in routes))
        self._parts = self._template("topic", topic)
        self._routes = [self._route(route) for route in routes]
        self._own_topic = self.value("topic_column", topic_column) if topic_column else None
        self.by_type = (
            not topic_column
            and not self.used_by
            and self._fields <= {"aggregate_type", "event_type"}
        )
        """Whether aggregate type and event type alone decide the topic."""
        self._partition = (
            self.value("partition_column", partition_column) if partition_column else None
        )
        self.extra_columns = [
            (self.value("extra_columns", one.column), one) for one in extra_columns
        ]
        """What reads each, and where it goes."""
        self._legal: set[str] = set()

    # --- asked for each event --------------------------------------------------------------------

    def topic(self, event: OutboxEvent) -> str:
        """The topic of ``event``. Raises ``UnroutableError`` where Kafka could never take it; the
        name is refused as it is, never cleaned, because cleaning would merge two topics."""
        topic = self._topic(event)
        if topic not in self._legal:
            if _LEGAL_TOPIC.fullmatch(topic) is None or topic in (".", ".."):
                raise UnroutableError(
                    f"topic {topic!r} is not a Kafka topic name; letters, digits, '.', '_' and "
                    "'-' are"
                )
            if len(self._legal) >= _MOST_TOPICS:  # topics are few; more must not fill memory
                self._legal.clear()
            self._legal.add(topic)
        return topic

    def _topic(self, event: OutboxEvent) -> str:
        own = None if self._own_topic is None else self._own_topic(event)
        if own:
            return _text(own, self.topic_column)
        for column, read, pattern, parts in self._routes:
            match = pattern.fullmatch(_text(read(event) or b"", column))
            if match is not None:
                return _filled(parts, event, match)
        return _filled(self._parts, event, None)

    def partition(self, event: OutboxEvent) -> int:
        """The partition that the row names; -1 where it names none, so that its key decides."""
        value = None if self._partition is None else self._partition(event)
        if value is None:
            return -1
        number = int(value) if value.isdigit() else -1
        if not 0 <= number <= _MOST_PARTITIONS:
            text = value.decode(errors="backslashreplace")
            raise UnroutableError(f"{self.partition_column} is {text!r}, which is no partition")
        return number

    def topics_of(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that the templates can have given, sorted."""
        like = []
        for template in self.templates:
            parts = [re.escape(part) for part in _PLACEHOLDER.split(template)[::2]]
            like.append(re.compile("[A-Za-z0-9._-]+".join(parts)))
        return sorted(name for name in names if any(one.fullmatch(name) for one in like))

    # --- compiling -------------------------------------------------------------------------------

    def value(self, setting: str, name: str) -> Value:
        """What reads the column's bytes."""
        place = self._place(setting, name)
        if isinstance(place, int):
            return lambda event: event.extra[place]
        if place == "id":
            return lambda event: str(event.id).encode()
        field: Callable[[OutboxEvent], str] = itemgetter(OutboxEvent._fields.index(place))
        return lambda event: field(event).encode()

    def _place(self, setting: str, name: str) -> str | int:
        """A field of the event, or a place in ``OutboxEvent.extra``."""
        wanted = name.lower()
        ours = self._names.ours(wanted) or (wanted if wanted in _FIXED else None)
        if ours in _FIXED:
            self._fields.add(ours)
            return ours
        if ours is not None:
            why = (
                "is in the record already"
                if ours in ("payload", "headers", "created_at")
                else "changes after the INSERT, so two readers would not agree"
            )
            raise ValueError(f"{setting}: column {name} cannot be used here: it {why}")
        if _COLUMN.fullmatch(wanted) is None:
            raise ValueError(f"{setting}: {name!r} is not a column name")
        self.used_by.setdefault(wanted, setting)
        return list(self.used_by).index(wanted)

    def _template(
        self, setting: str, template: str, pattern: re.Pattern[str] | None = None
    ) -> list[_Part]:
        """The parts of a topic's name."""
        try:
            check_template(template)
        except ValueError as error:
            raise ValueError(f"{setting}: {error}") from None
        parts: list[_Part] = []
        for index, part in enumerate(_PLACEHOLDER.split(template)):
            if index % 2 == 0:
                parts.append(part)
            elif pattern is not None and (part.isdigit() or part in pattern.groupindex):
                group: int | str = int(part) if part.isdigit() else part
                if isinstance(group, int) and group > pattern.groups:
                    raise ValueError(f"{setting}: match has no group {group}")
                parts.append(_group(group))
            else:
                parts.append(self._column(setting, part))
        return parts

    def _column(self, setting: str, name: str) -> _Part:
        place = self._place(setting, name)
        if isinstance(place, str):
            field: Callable[[Any], object] = itemgetter(OutboxEvent._fields.index(place))

            def ours(event: OutboxEvent, _match: object) -> str:
                value = str(field(event))
                if not value:
                    raise UnroutableError(f"{name} is empty, and the topic is made of it")
                return value

            return ours

        def text(event: OutboxEvent, _match: object) -> str:
            value = event.extra[place]
            if not value:
                what = "NULL" if value is None else "empty"
                raise UnroutableError(f"{name} is {what}, and the topic is made of it")
            return _text(value, name)

        return text

    def _route(self, route: Route) -> tuple[str, Value, re.Pattern[str], list[_Part]]:
        try:
            pattern = re.compile(route.match)
        except re.error as error:
            raise ValueError(
                f"routes: {route.match!r} is not a regular expression: {error}"
            ) from None
        read = self.value("routes", route.column)
        return route.column, read, pattern, self._template("routes", route.topic, pattern)


def _group(group: int | str) -> _Part:
    return lambda _event, match: (match[group] or "") if match is not None else ""


def _filled(parts: Sequence[_Part], event: OutboxEvent, match: re.Match[str] | None) -> str:
    return "".join([part if isinstance(part, str) else part(event, match) for part in parts])


def _text(value: bytes, name: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise UnroutableError(f"{name} is no text, so no topic can be made of it") from None
