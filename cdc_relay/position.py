"""Positions in a binlog, as values.

A ``Position`` names a boundary between transactions on one server: the file and offset that the
server itself gave for the end of a commit, and, where the server keeps GTIDs, the set of
transactions that lie before it. It is what a checkpoint stores and what a dump starts from.

Formats: MySQL manual, "GTID Format and Storage" (sets with tags since 8.3); MariaDB knowledge
base, "Global Transaction ID".
"""

from __future__ import annotations

import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from struct import pack
from typing import Any, Final, Literal, Self

Flavor = Literal["mysql", "mariadb"]

_UUID: Final = re.compile(r"[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}")
_TAG: Final = re.compile(r"[a-z_][a-z0-9_]{0,31}")
_INTERVAL: Final = re.compile(r"(\d+)(?:-(\d+))?")
_MAX_GNO: Final = (1 << 63) - 1
# Ranges of keys of one prepared transaction, more than which are packed.
_MOST_RANGES: Final = 1000


class GtidSet:
    """A set of MySQL GTIDs. Mutable: the reader adds each committed transaction; not thread-safe.

    Sources are ``(uuid bytes, tag)``; intervals are sorted, disjoint and half-open.
    """

    __slots__ = ("_sources",)

    def __init__(self, text: str = "") -> None:
        """Parse the server's text form. Raises ``ValueError`` for anything else."""
        self._sources: dict[tuple[bytes, str], list[tuple[int, int]]] = {}
        for source in text.replace("\n", "").replace(" ", "").split(","):
            if source:
                self._parse(source)

    def _parse(self, source: str) -> None:
        uuid, *parts = source.split(":")
        if _UUID.fullmatch(uuid) is None or not parts:
            raise ValueError(f"{source!r} is not part of a GTID set")
        sid = bytes.fromhex(uuid.replace("-", ""))
        tag = lonely = ""
        for part in parts:
            if _TAG.fullmatch(part.lower()) and not part.isdigit() and not lonely:
                tag = lonely = part.lower()
                continue
            match = _INTERVAL.fullmatch(part)
            if match is None:
                raise ValueError(f"{part!r} is not an interval of a GTID set")
            first, last = int(match[1]), int(match[2] or match[1])
            if not 1 <= first <= last <= _MAX_GNO:
                raise ValueError(f"{part!r} is not an interval of a GTID set")
            self.add_range(sid, tag, first, last + 1)
            lonely = ""
        if lonely:
            raise ValueError(f"tag {lonely!r} of a GTID set has no interval")

    def add_range(self, sid: bytes, tag: str, first: int, stop: int) -> None:
        """Add the transactions ``first`` to ``stop - 1`` of a source. Amortised constant when
        they extend the last interval, as they do while reading a binlog."""
        intervals = self._sources.setdefault((sid, tag), [])
        if intervals and first >= intervals[-1][0]:
            start, end = intervals[-1]
            if first <= end:
                intervals[-1] = (start, max(end, stop))
            else:
                intervals.append((first, stop))
            return
        intervals.append((first, stop))
        intervals.sort()
        merged = [intervals[0]]
        for start, end in intervals[1:]:
            if start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        intervals[:] = merged

    def add(self, other: Self) -> None:
        """Add the transactions of another set."""
        for (sid, tag), intervals in other._sources.items():
            for first, stop in intervals:
                self.add_range(sid, tag, first, stop)

    def contains(self, other: Self) -> bool:
        """Whether every transaction of ``other`` is in this set."""
        for source, intervals in other._sources.items():
            mine = self._sources.get(source, [])
            for first, stop in intervals:
                if not any(start <= first and stop <= end for start, end in mine):
                    return False
        return True

    def missing(self, other: Self) -> int:
        """How many transactions of ``other`` are not in this set."""
        count = 0
        for source, intervals in other._sources.items():
            mine = self._sources.get(source, [])
            for first, stop in intervals:
                there = (max(0, min(stop, end) - max(first, start)) for start, end in mine)
                count += stop - first - sum(there)
        return count

    def is_akin(self, other: Self) -> bool:
        """Whether both hold transactions that began on one server."""
        return not {sid for sid, _ in self._sources}.isdisjoint(sid for sid, _ in other._sources)

    def last(self) -> list[tuple[str, int]]:
        """The highest transaction number of each source (``uuid`` or ``uuid:tag``)."""
        return [
            (f"{_uuid_text(sid)}:{tag}" if tag else _uuid_text(sid), intervals[-1][1] - 1)
            for (sid, tag), intervals in sorted(self._sources.items())
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GtidSet) and self._sources == other._sources

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return bool(self._sources)

    def __str__(self) -> str:
        """The server's own text form (sources sorted, tags under their source)."""
        by_sid: dict[bytes, list[str]] = {}
        for (sid, tag), intervals in sorted(self._sources.items()):
            parts = by_sid.setdefault(sid, [])
            if tag:
                parts.append(tag)
            parts += [f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in intervals]
        return ",".join(":".join([_uuid_text(sid), *parts]) for sid, parts in by_sid.items())

    def encode(self) -> bytes:
        """The binary form that COM_BINLOG_DUMP_GTID takes: version 0 without tags, version 1
        (format byte in the count's last byte, a tag after each uuid) with them."""
        tagged = any(tag for _, tag in self._sources)
        count = len(self._sources)
        # Version 1 keeps the format in the lowest and the highest byte, the count between them.
        out = [pack("<Q", (1 << 56 | count << 8 | 1) if tagged else count)]
        for (sid, tag), intervals in sorted(self._sources.items()):
            out.append(sid)
            if tagged:
                # The tag's length is a variable-length integer; below 64 it is one byte, doubled.
                out.append(bytes([len(tag) << 1]) + tag.encode())
            out.append(pack("<Q", len(intervals)))
            out += [pack("<QQ", first, stop) for first, stop in intervals]
        return b"".join(out)


def _uuid_text(sid: bytes) -> str:
    text = sid.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class MariaGtidPosition:
    """A MariaDB GTID position: the last transaction seen of each domain. Mutable, not
    thread-safe."""

    __slots__ = ("_domains",)

    def __init__(self, text: str = "") -> None:
        """Parse ``domain-server-sequence,...``. Raises ``ValueError`` for anything else."""
        self._domains: dict[int, tuple[int, int]] = {}
        for gtid in text.replace(" ", "").split(","):
            if gtid:
                parts = gtid.split("-")
                if len(parts) != 3 or not all(part.isdigit() for part in parts):
                    raise ValueError(f"{gtid!r} is not a MariaDB GTID")
                self._domains[int(parts[0])] = (int(parts[1]), int(parts[2]))

    def add(self, domain: int, server: int, sequence: int) -> None:
        """Move the domain to this transaction."""
        self._domains[domain] = (server, sequence)

    def contains(self, other: Self) -> bool:
        """Whether every domain of ``other`` has come at least as far here."""
        return all(
            domain in self._domains and self._domains[domain][1] >= sequence
            for domain, (_, sequence) in other._domains.items()
        )

    def missing(self, other: Self) -> int:
        """By how many sequence numbers this position is behind ``other``, in the domains where it
        follows the same server."""
        return sum(
            max(0, sequence - self._domains[domain][1])
            for domain, (server, sequence) in other._domains.items()
            if domain in self._domains and self._domains[domain][0] == server
        )

    def last(self) -> list[tuple[str, int]]:
        """The sequence number of each domain."""
        return [(str(domain), number) for domain, (_, number) in sorted(self._domains.items())]

    def __bool__(self) -> bool:
        return bool(self._domains)

    def __str__(self) -> str:
        return ",".join(f"{d}-{s}-{n}" for d, (s, n) in sorted(self._domains.items()))


@dataclass(frozen=True, slots=True)
class Position:
    """A boundary between transactions in one server's binlog.

    ``gtids`` is None where the server keeps no GTIDs; then only file and offset resume, and only on
    the same ``server``. An empty text is the empty set: a server that has executed nothing yet.
    """

    flavor: Flavor
    server: str
    """MySQL: server_uuid. MariaDB has no such thing: ``server_id``."""
    file: str
    offset: int
    """Bytes from the start of the file; not limited to 32 bits."""
    gtids: str | None = None
    prepared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Keys of rows in XA transactions prepared before this place and not yet decided, by xid."""

    born: int = 0
    """When the server began ``file``, seconds since 1970; 0 is not known. RESET begins files of the
    same names anew."""
    partial: tuple[str, int] | None = None
    """The transaction that follows, by its name, and how many of its rows are done: set only for
    a committed transaction too large for one hand-over."""

    def __str__(self) -> str:
        where = f"{self.file}:{self.offset}"
        return f"{where} ({self.gtids})" if self.gtids else where

    def at(self, file: str, offset: int, gtids: str | None, born: int = 0) -> Position:
        """The same server's position elsewhere, at a boundary."""
        return replace(self, file=file, offset=offset, gtids=gtids, born=born, partial=None)

    def inside(self, group: str, done: int) -> Position:
        """The same boundary, with ``done`` rows of the transaction that follows."""
        return replace(self, partial=(group, done))

    def with_prepared(self, prepared: Mapping[str, tuple[int, ...]]) -> Position:
        """The same place with these undecided XA transactions."""
        return replace(self, prepared=dict(prepared)) if prepared or self.prepared else self

    def reached(self, other: Position) -> bool:
        """Whether this position lies at or after ``other``: by GTIDs where both have them, else by
        file number and offset on the same server. False when they cannot be compared."""
        if self.flavor != other.flavor:
            return False
        if self.gtids is not None and other.gtids is not None:
            if self.flavor == "mysql":
                return GtidSet(self.gtids).contains(GtidSet(other.gtids))
            return MariaGtidPosition(self.gtids).contains(MariaGtidPosition(other.gtids))
        if self.server != other.server:
            return False
        return (file_number(self.file), self.offset) >= (file_number(other.file), other.offset)

    @property
    def is_far(self) -> bool:
        """Whether the offset takes more than the 32 bits of the dump command: only GTIDs resume
        here."""
        return self.offset > 0xFFFFFFFF

    def is_beyond(self, end: Position) -> bool:
        """Whether this position lies behind ``end``, the end of the log on the same server: its
        logs have begun anew since then (RESET, a restored copy). The same GTIDs may stand for
        other transactions there. For another server, whether it has never executed what lies
        before this position, as far as GTIDs tell."""
        executed = end.gtids if self.flavor == end.flavor == "mysql" else None
        if (
            self.gtids
            and executed is not None
            and not GtidSet(executed).contains(GtidSet(self.gtids))
        ):
            return True
        if (self.flavor, self.server) != (end.flavor, end.server):
            return False
        if self.file.rpartition(".")[0] != end.file.rpartition(".")[0]:
            return False
        return (file_number(self.file), self.offset) > (file_number(end.file), end.offset)

    def missing(self, end: Position) -> int:
        """How many of the transactions before this position are missing on another server, whose
        log ends at ``end``, where it may be a replica that has still to execute them: it has
        executed earlier ones of the same origin. 0 where it may not, and where none is missing."""
        if self.flavor != end.flavor or self.server == end.server:
            return 0
        if not self.gtids or not end.gtids:
            return 0
        if self.flavor == "mariadb":
            return MariaGtidPosition(end.gtids).missing(MariaGtidPosition(self.gtids))
        wanted, executed = GtidSet(self.gtids), GtidSet(end.gtids)
        return executed.missing(wanted) if executed.is_akin(wanted) else 0

    def passed(self, end: Position) -> bool:
        """Whether everything that was visible to SELECT before ``end`` was read as the end of the
        log lies before this position.

        A row is visible a moment before its GTID counts as executed (MySQL's commit stage), but
        not before it is in the file: within one file the offset must be reached as well.
        """
        behind = self.server == end.server and self.file == end.file and self.offset < end.offset
        return self.reached(end) and not behind

    def to_json(self) -> dict[str, Any]:
        """The form in which a checkpoint stores it."""
        value: dict[str, Any] = {
            "flavor": self.flavor,
            "server": self.server,
            "file": self.file,
            "offset": self.offset,
            "gtids": self.gtids,
        }
        if self.prepared:
            value["prepared"] = {xid: _stored(ids) for xid, ids in self.prepared.items()}
        if self.born:
            value["born"] = self.born
        if self.partial is not None:
            value["partial"] = list(self.partial)
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read ``to_json``'s form back. Raises ``ValueError`` or ``KeyError`` for others."""
        flavor = value["flavor"]
        if flavor not in ("mysql", "mariadb"):
            raise ValueError(f"unknown flavor {flavor!r}")
        gtids = value["gtids"]
        if gtids is not None:
            (GtidSet if flavor == "mysql" else MariaGtidPosition)(gtids)  # can it be read?
        if int(value["offset"]) < 0:
            raise ValueError(f"offset {value['offset']} of a binlog file")
        partial = value.get("partial")
        return cls(
            flavor,
            str(value["server"]),
            str(value["file"]),
            int(value["offset"]),
            gtids,
            {xid: tuple(_keys(stored)) for xid, stored in value.get("prepared", {}).items()},
            int(value.get("born", 0)),
            (str(partial[0]), int(partial[1])) if partial else None,
        )


NOWHERE: Final = Position("mysql", "", "", 0)
"""Stands where there is no log: never reached, and it reaches nothing."""


def runs(ids: Iterable[int]) -> list[list[int]]:
    """Ids in order as [first, last] pairs: the keys of one transaction mostly follow each other."""
    result: list[list[int]] = []
    for row_id in ids:
        if result and row_id == result[-1][1] + 1:
            result[-1][1] = row_id
        else:
            result.append([row_id, row_id])
    return result


def from_runs(pairs: Iterable[Sequence[int]]) -> list[int]:
    """The ids again."""
    return [row_id for first, last in pairs for row_id in range(first, last + 1)]


@lru_cache(maxsize=2)  # every checkpoint until the decision holds the same ones
def _stored(ids: tuple[int, ...]) -> list[list[int]] | str:
    """The keys of a prepared transaction as a checkpoint stores them: ranges; where they are many,
    because ids go by more than one or others wrote in between, the steps from each key to the
    next, packed: less than a byte each."""
    ranges = runs(ids)
    if len(ranges) <= _MOST_RANGES:
        return ranges
    steps = ",".join([str(later - id_) for id_, later in pairwise((0, *ids))])
    return b64encode(zlib.compress(steps.encode())).decode()


def _keys(stored: Sequence[Sequence[int]] | str) -> Iterable[int]:
    """The keys again. Raises ``ValueError`` for what cannot be unpacked."""
    if not isinstance(stored, str):
        return from_runs(stored)
    try:
        return accumulate(map(int, zlib.decompress(b64decode(stored)).split(b",")))
    except zlib.error as error:
        raise ValueError(f"keys of a prepared transaction: {error}") from None


def file_number(file: str) -> int:
    """The running number of a binlog file (``binlog.000042`` is 42; names may outgrow six
    digits, so text order is not file order)."""
    suffix = file.rpartition(".")[2]
    return int(suffix) if suffix.isdigit() else -1
