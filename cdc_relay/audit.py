"""The audit: the table's rows of a time range against the records in the topics.

Memory does not grow with the range: rows and records are written, packed, into temporary files by
a hash of the aggregate's id, and then compared one file at a time; a file that is large, because a
few aggregates have most of the events, in parts by a hash of the event's id. (Sorting them, or a
database of their ids, costs several times as much; a row and its record take 80 bytes of disk
together.) The table is read in short steps by primary key, so no read view stays open; the topics
as a ``read_committed`` consumer.
"""

from __future__ import annotations

import heapq
import struct
import tempfile
import time
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import IO, Any, Final

from cdc_relay.errors import UnroutableError
from cdc_relay.kafka.reader import Read
from cdc_relay.outbox import DEAD, PENDING, SENT, OutboxEvent
from cdc_relay.router import Router
from cdc_relay.store import Store

# 10 million events: 40,000 in each file, about 15 MB while it is compared.
_FILES: Final = 256
_PART_ROWS: Final = 100_000
_STEP_ROWS: Final = 10_000
_SAMPLES: Final = 10
# Digests of event id and aggregate, id, status, number of the topic.
_ROW: Final = struct.Struct("<16sQQBH")
# Digest of the event id, number of the topic, partition, offset.
_RECORD: Final = struct.Struct("<16sHIQ")
# The same behind its number in the file.
_NUMBERED: Final = struct.Struct("<Q16sHIQ")
# A record that names no event.
_NAMELESS: Final = blake2b(digest_size=16).digest()
_NAMES: Final = {PENDING: "pending", SENT: "sent", DEAD: "dead"}


@dataclass(slots=True)
class Report:
    """What the audit found. Samples are the first few of each kind."""

    rows: int = 0
    records: int = 0
    missing: dict[str, int] = field(default_factory=lambda: {"sent": 0, "pending": 0, "dead": 0})
    """Rows without a record, by their status."""
    duplicates: int = 0
    """Records beyond the first of their event."""
    out_of_order: int = 0
    """Records that come after a later row of their aggregate."""
    foreign: int = 0
    """Records of the range whose row is not in the table (deleted, or not ours)."""
    unroutable: int = 0
    """Rows that no topic can take; they count as missing."""
    topics: list[str] = field(default_factory=list)
    samples: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {"missing": [], "duplicates": [], "out_of_order": [], "foreign": []}
    )
    resent: int = 0
    seconds: float = 0.0

    @property
    def lost(self) -> int:
        """Rows without a record that was not sent afterwards."""
        return sum(self.missing.values()) - self.resent

    def as_dict(self) -> dict[str, Any]:
        """The object of ``--json``."""
        return asdict(self)


class Audit:
    """One audit of one table. ``run`` once; one thread."""

    def __init__(
        self,
        store: Store,
        router: Router,
        read: Callable[[list[str], int], Iterable[list[Read]]],
        *,
        topics: frozenset[str] = frozenset(),
        progress: Callable[[str, int], None] = lambda _what, _count: None,
    ) -> None:
        """``read`` gives the records of topics from a time (ms) on; ``topics`` limits the audit to
        these; ``progress`` is told what has been read so far."""
        self._store = store
        self._router = router
        self._read = read
        self._only = topics
        self._progress = progress
        self.without_rows: Collection[str] = ()
        """Of the topics asked for, those where no row of the range goes; known when the records are
        read."""
        self._numbers: dict[str, int] = {}
        self._by_type: dict[tuple[str, str], int | None] = {}
        self.report = Report()
        self._missing: list[array[int]] = []

    def run(self, since_us: int, until_us: int) -> Report:
        """Compare the rows with ``since_us`` <= created_at < ``until_us`` (microseconds since
        1970). Whole milliseconds: records know no finer time."""
        started = time.monotonic()
        with ExitStack() as stack:
            rows, records = (
                [
                    stack.enter_context(tempfile.TemporaryFile(buffering=1 << 14))
                    for _ in range(_FILES)
                ]
                for _ in range(2)
            )
            self._write_rows(rows, since_us, until_us)
            # Topics asked for by name are read also where no row goes to them.
            self.without_rows = self._only - self._numbers.keys()
            for topic in sorted(self._only):
                self._number(topic)
            self.report.topics = sorted(self._numbers)
            self._write_records(records, since_us // 1000, until_us // 1000)
            for row_file, record_file in zip(rows, records, strict=True):
                self._compare(row_file, record_file)
        self.report.seconds = round(time.monotonic() - started, 3)
        return self.report

    def missing_ids(self) -> Iterator[int]:
        """The ids of the rows marked as sent that have no record, ascending; of those that a topic
        can take. 8 bytes of memory each."""
        return heapq.merge(*self._missing)

    def _write_rows(self, files: list[IO[bytes]], since_us: int, until_us: int) -> None:
        by_type = self._router.by_type
        for chunk in self._store.keys(since_us, until_us, _STEP_ROWS):
            for row_id, *names, status, extra in ((*row[:6], row[6:]) for row in chunk):
                # NULL, which columns of an existing table may be, is empty.
                event_id, kind, key, event_type = (one or "" for one in names)
                if by_type:
                    topic = self._topic(kind, event_type)
                else:
                    # The text of a column is bytes in an event.
                    values = [one.encode() if isinstance(one, str) else one for one in extra]
                    event = OutboxEvent(
                        *(row_id, event_id, kind, key, event_type, None, None, None, tuple(values))
                    )
                    topic = self._topic_of(event)
                if topic is None:
                    if not self._only:
                        self.report.rows += 1
                        self.report.unroutable += 1
                        self._miss(row_id, status, routable=False)
                    continue
                self.report.rows += 1
                raw = key.encode()
                digest = blake2b(kind.encode() + b"\0" + raw, digest_size=8).digest()
                aggregate = int.from_bytes(digest, "little")
                files[zlib.crc32(raw) % _FILES].write(
                    _ROW.pack(_digest(event_id), aggregate, row_id, status, topic)
                )
            self._progress("rows", self.report.rows)

    def _write_records(self, files: list[IO[bytes]], since_ms: int, until_ms: int) -> None:
        numbers = self._numbers
        for batch in self._read(list(numbers), since_ms):
            for one in batch:
                if one.created and not since_ms <= one.timestamp_ms < until_ms:
                    continue
                self.report.records += 1
                files[zlib.crc32(one.key) % _FILES].write(
                    _RECORD.pack(
                        _digest(one.event_id), numbers[one.topic], one.partition, one.offset
                    )
                )
            self._progress("records", self.report.records)

    def _compare(self, row_file: IO[bytes], record_file: IO[bytes]) -> None:
        counts = row_file.tell() // _ROW.size, record_file.tell() // _RECORD.size
        # Of each record the row's id, 0 where it has none that counts, and its aggregate.
        ids, aggregates = (array("Q", bytes(8 * counts[1])) for _ in range(2))
        with _parts(row_file, record_file, 1 + max(counts) // _PART_ROWS) as parts:
            for rows, records in parts:
                self._match(rows, records, ids, aggregates)
        report, names = self.report, list(self._numbers)
        last: dict[tuple[int, int, int], int] = {}
        for number, (_, *place) in enumerate(_unpack(_RECORD, record_file)):
            row_id = ids[number]
            stream = (aggregates[number], place[0], place[1])
            before = last.get(stream, 0)
            if row_id >= before:
                last[stream] = row_id
            elif row_id:
                report.out_of_order += 1
                at = _place(names, place)
                self._sample("out_of_order", id=row_id, after_id=before, at=at)

    def _match(
        self,
        found: Iterable[Any],
        records: Iterable[Any],
        ids: array[int],
        aggregates: array[int],
    ) -> None:
        """Match records with their rows: both are those of a part of the event ids."""
        report, names = self.report, list(self._numbers)
        rows = {digest: rest for digest, *rest in found}
        seen: dict[bytes, Sequence[int]] = {}
        for number, digest, *place in records:
            if digest == _NAMELESS:
                report.foreign += 1
                self._sample("foreign", at=_place(names, place))
                continue
            row = rows.get(digest)
            if digest in seen:
                report.duplicates += 1
                self._sample(
                    "duplicates",
                    id=row[1] if row else None,
                    first=_place(names, seen[digest]),
                    again=_place(names, place),
                )
                continue
            seen[digest] = place
            if row is None:
                report.foreign += 1
                self._sample("foreign", at=_place(names, place))
                continue
            aggregates[number], ids[number] = row[0], row[1]
        self._missing.append(array("Q"))
        for digest, (_, row_id, status, _) in rows.items():
            if digest not in seen:
                self._miss(row_id, status)

    def _miss(self, row_id: int, status: int, *, routable: bool = True) -> None:
        name = _NAMES.get(status, "sent")
        self.report.missing[name] += 1
        self._sample("missing", id=row_id, status=name)
        if name == "sent" and routable:
            self._missing[-1].append(row_id)

    def _sample(self, kind: str, **fields: Any) -> None:
        samples = self.report.samples[kind]
        if len(samples) < _SAMPLES:
            samples.append(fields)

    def _topic(self, kind: str, event_type: str) -> int | None:
        """The number of the topic that a row goes to; None where there is none, or where it is
        not one of those that are wanted."""
        names = (kind, event_type)
        if names not in self._by_type:
            event = OutboxEvent(1, "-", kind, "-", event_type, None, None, None)
            self._by_type[names] = self._topic_of(event)
        return self._by_type[names]

    def _topic_of(self, event: OutboxEvent) -> int | None:
        try:
            topic = self._router.topic(event)
        except UnroutableError:
            return None
        return self._number(topic) if not self._only or topic in self._only else None

    def _number(self, topic: str) -> int:
        return self._numbers.setdefault(topic, len(self._numbers))


def name_samples(report: Report, store: Store) -> None:
    """Add event id, aggregate and event type to the samples that have a row."""
    wanted = [one for kind in report.samples.values() for one in kind if one.get("id")]
    parts = store.rows([one["id"] for one in wanted])
    found = {event.id: event for part in parts for event, _ in part}
    for sample in wanted:
        event = found.get(sample["id"])
        if event is not None:
            sample |= {
                "event_id": event.event_id,
                "aggregate_type": event.aggregate_type,
                "aggregate_id": event.aggregate_id,
                "event_type": event.event_type,
            }


def _digest(event_id: str) -> bytes:
    return blake2b(event_id.encode(), digest_size=16).digest()


def _place(names: list[str], place: Sequence[int]) -> str:
    return f"{names[place[0]]}[{place[1]}]@{place[2]}"


@contextmanager
def _parts(
    row_file: IO[bytes], record_file: IO[bytes], count: int
) -> Iterator[Iterator[tuple[Iterable[Any], Iterable[Any]]]]:
    """Rows and numbered records in so many parts by the digest of the event id, one after the
    other; more than one lie in files of their own meanwhile."""
    numbered = ((number, *fields) for number, fields in enumerate(_unpack(_RECORD, record_file)))
    if count == 1:
        yield iter([(_unpack(_ROW, row_file), numbered)])
        return
    count = min(count, _FILES)
    with ExitStack() as stack:
        rows, records = (
            [stack.enter_context(tempfile.TemporaryFile(buffering=1 << 14)) for _ in range(count)]
            for _ in range(2)
        )
        for row in _unpack(_ROW, row_file):
            rows[row[0][0] % count].write(_ROW.pack(*row))
        for record in numbered:
            records[record[1][0] % count].write(_NUMBERED.pack(*record))
        yield (
            (_unpack(_ROW, one), _unpack(_NUMBERED, other))
            for one, other in zip(rows, records, strict=True)
        )


def _unpack(form: struct.Struct, file: IO[bytes]) -> Iterator[Any]:
    file.seek(0)
    while part := file.read(form.size * 4096):
        yield from form.iter_unpack(part)
