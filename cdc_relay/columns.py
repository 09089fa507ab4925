"""What an outbox table calls its columns.

Everything in this project speaks of the columns by our names: settings, SQL text, error messages
aside. ``Columns`` is the one place that knows those of the table, and puts them into SQL text just
before it goes out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from cdc_relay.outbox import COLUMNS, DEBEZIUM_COLUMNS

PRESETS: Final[Mapping[str, Mapping[str, str]]] = {"debezium": DEBEZIUM_COLUMNS}

# What is legal in an identifier, but for what SQL text and its parameters would take for their own.
_NAME: Final = re.compile(r"[^\0`%'\"\\{}]{1,64}")


class Columns:
    """The names of one table's columns. Immutable; ``Columns()`` are our own."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        """``names``: ours to the table's, where they differ. Raises ``ValueError`` with one line
        for a word that is no column of ours, and where two of ours are one of the table's."""
        self._names = {name: name for name in COLUMNS}
        for ours, theirs in (names or {}).items():
            if ours not in self._names:
                raise ValueError(f"{ours!r} is no column of an outbox table; {', '.join(COLUMNS)}")
            if _NAME.fullmatch(theirs) is None:
                raise ValueError(f"{theirs!r} is not a column name")
            self._names[ours] = theirs.lower()  # case means nothing in a column's name
        self._ours: dict[str, str] = {}
        for ours, theirs in self._names.items():
            other = self._ours.setdefault(theirs, ours)
            if other != ours:
                raise ValueError(
                    f"{other} and {ours} would both be the column {theirs}: name another for one"
                )
        renamed = {ours: theirs for ours, theirs in self._names.items() if ours != theirs}
        self.sql: Callable[[str], str] = _Translation(renamed) if renamed else _as_it_is
        """SQL text in our names, to be sent in the table's. What stands in backticks or quotes
        stays, so to translate twice is to translate once."""

    def __getitem__(self, ours: str) -> str:
        """The table's name of a column of ours, in lower case."""
        return self._names[ours]

    def ours(self, theirs: str) -> str | None:
        """Our name of a column of the table; None where it is none of ours."""
        return self._ours.get(theirs.lower())

    def key(self, theirs: str) -> str:
        """Our name of a column of the table. One that is the service's keeps its own, in backticks
        where that is a word of ours."""
        name = theirs.lower()
        found = self._ours.get(name)
        return found or (f"`{name}`" if name in self._names else name)


class _Translation:
    def __init__(self, renamed: Mapping[str, str]) -> None:
        self._quoted = {ours: f"`{theirs}`" for ours, theirs in renamed.items()}
        # Comes to a name only outside backticks and quotes, as these are taken whole.
        self._pattern = re.compile(rf"`[^`]*`|'[^']*'|\b(?:{'|'.join(renamed)})\b")

    def __call__(self, text: str) -> str:
        return self._pattern.sub(lambda match: self._quoted.get(match[0], match[0]), text)


def _as_it_is(text: str) -> str:
    return text


def parse(value: object) -> object:
    """``columns`` as it is written (``debezium``, ``id=seq,event_type=kind``, ``debezium,id=seq``,
    or a table of the file, where ``preset`` is a key) as names, ours to the table's. Raises
    ``ValueError`` with one line."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        pairs = [part.partition("=") for part in parts]
        value = {
            (name.strip() if equals else "preset"): (theirs.strip() if equals else name)
            for name, equals, theirs in pairs
        }
        if len(value) < len(pairs):
            raise ValueError("names a column, or a preset, twice")
    if not isinstance(value, Mapping):
        return value
    given = {str(ours): theirs for ours, theirs in value.items()}
    preset = given.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        raise ValueError(
            f"{preset!r} is no preset; {', '.join(PRESETS)} is (else write ours=theirs, as in "
            "event_type=kind)"
        )
    for ours, theirs in given.items():
        if not isinstance(theirs, str):
            raise ValueError(f"the name of {ours} is not text")
    names = {**(PRESETS[preset] if preset is not None else {}), **given}
    Columns(names)
    return names
