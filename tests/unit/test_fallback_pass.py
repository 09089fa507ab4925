"""One pass of the compensator, with doubles for the table and for Kafka."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from cdc_relay.errors import SinkUnavailableError, SourceError
from cdc_relay.kafka.checkpoints import Checkpoint
from cdc_relay.kafka.owed import Owed
from cdc_relay.kafka.sink import FencedError
from cdc_relay.kafka.topics import Refusal
from cdc_relay.outbox import OutboxEvent
from cdc_relay.router import Record, Router
from cdc_relay.store import Failure, Marked, PendingEvent, PendingScan, ScannedRow
from fallback.compensator import Compensator
from fallback.coordination import Relay


@dataclass
class Row:
    id: int
    key: str
    kind: str = "order"
    status: int = 0
    retry_count: int = 0
    waits: bool = False

    @property
    def event_id(self) -> str:
        return f"e-{self.id}"


class FakeStore:
    """The part of ``Store`` that a pass uses, over a list."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.rows = [Row(number, key) for number, key in enumerate(keys, start=1)]
        self.max_tries = 10
        self.down = False
        self.marks: list[int] = []
        self.locked: set[int] = set()

    def scan(self, older_than_s: float, limit: int) -> PendingScan:
        return PendingScan(self, older_than_s, limit)  # type: ignore[arg-type]

    def newest_pending(self, _older_than_s: float) -> int:
        return max((row.id for row in self.rows if row.status == 0), default=0)

    def count_pending(self, _older_than_s: float, from_id: int) -> int:
        return sum(row.status == 0 and row.id >= from_id for row in self.rows)

    def scan_rows(
        self, _older_than_s: float, limit: int, after_id: int, last_id: int
    ) -> list[ScannedRow]:
        found = [r for r in self.rows if r.status == 0 and after_id < r.id <= last_id]
        return [
            ScannedRow(r.id, (r.kind, r.key), False, r.waits, r.retry_count > 0)
            for r in found[:limit]
        ]

    def events(self, ids: Sequence[int], most: int) -> tuple[list[PendingEvent], Sequence[int]]:
        found = [
            PendingEvent(
                OutboxEvent(r.id, r.event_id, r.kind, r.key, "T", b"{}", None, 0), r.retry_count
            )
            for r in self.rows
            if r.id in ids[:most] and r.status == 0
        ]
        return found, ids[most:]

    def mark_sent(self, rows: Sequence[tuple[int, str]], *, around: bool = False) -> Marked:
        if self.down:
            raise SourceError("no grant")
        self.marks.append(len(rows))
        pending = [r for r in self.rows if (r.id, r.event_id) in rows and r.status == 0]
        held = [(r.id, r.event_id) for r in pending if r.id in self.locked]
        pending = [r for r in pending if r.id not in self.locked]
        for row in pending:
            row.status = 1
        return Marked(len(pending), held)

    def record_failure(self, event: OutboxEvent, retry_count: int, _reason: str) -> Failure:
        row = self.rows[event.id - 1]
        row.retry_count = retry_count + 1
        row.waits = True
        if row.retry_count > self.max_tries:
            row.status = 2
            return Failure("dead", row.retry_count, 0)
        return Failure("retry", row.retry_count, 1)

    def ids(self, status: int) -> list[int]:
        return [row.id for row in self.rows if row.status == status]


@dataclass
class FakeCoordination:
    """Refuses a delivery with ids of ``refuse``; answers nothing after ``down_after`` deliveries;
    is fenced at the deliveries in ``fenced``. ``reached`` is up to which id the relay has come."""

    refuse: set[str] = field(default_factory=set)
    down_after: int = 10**9
    fenced: set[int] = field(default_factory=set)
    relay: Relay | None = None
    seen: Relay = "dead"
    reached: int = 10**9
    topic_refused: bool = False
    sent: list[list[str]] = field(default_factory=list)
    tries: int = 0
    begun: int = 0
    closed: int = 0
    healed: int = 0
    locked: list[tuple[int, str]] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    why_left: str = "the relay is behind"
    owed: list[list[int]] = field(default_factory=list)

    def begin(self, scan: PendingScan) -> None:
        self.begun += 1
        self.relay = self.seen
        scan.retries = self.relay != "alive"

    def missed(self, ids: list[int], _scan: PendingScan) -> list[int] | None:
        return ids if max(ids) <= self.reached else None

    def deliver(
        self, records: Sequence[Record], owed: Owed
    ) -> tuple[dict[int, Refusal], frozenset[int]]:
        self.tries += 1
        if self.tries in self.fenced:
            raise FencedError("fenced")
        if self.tries > self.down_after:
            raise SinkUnavailableError("no answer")
        ids = [(record.headers[0][1] or b"").decode() for record in records]
        refused = {
            index: Refusal("refused", self.topic_refused)
            for index, name in enumerate(ids)
            if name in self.refuse
        }
        if not refused:
            self.sent.append(ids)
            self.owed.append([row_id for row_id, _ in owed])
        return refused, frozenset()

    def marked(self) -> None:
        self.owed.append([])

    def close(self) -> None:
        self.closed += 1

    @property
    def accepted(self) -> list[str]:
        return [name for group in self.sent for name in group]


def compensator(
    store: FakeStore, sink: FakeCoordination, batch: int = 100, **more: Any
) -> Compensator:
    return Compensator(
        store,  # type: ignore[arg-type]
        Router("t.{aggregate_type}"),
        sink,
        older_than_s=0,
        batch=batch,
        stop=more.pop("stop", threading.Event()),
        **more,
    )


def test_everything_is_sent_once_and_marked_in_one_go() -> None:
    store, sink = FakeStore("abc"), FakeCoordination()
    done = compensator(store, sink)
    assert done.run_pass() == 3
    assert sink.sent == [["e-1", "e-2", "e-3"]]
    assert store.marks == [3]
    summary = done.summary
    assert (summary.sent, summary.marked, summary.failed, summary.left) == (3, 3, 0, 0)
    assert summary.exit_code == 0
    assert done.run_pass() == 0


def test_nothing_to_do_needs_no_broker() -> None:
    sink = FakeCoordination()
    done = compensator(FakeStore(""), sink)
    assert done.run_pass() == 0
    assert (sink.begun, done.summary.relay, done.summary.exit_code) == (0, None, 0)


@pytest.mark.parametrize("batch", [1, 2, 3, 100])
@pytest.mark.parametrize("refused", ["e-1", "e-3", "e-5"])
def test_a_refused_event_is_never_overtaken(batch: int, refused: str) -> None:
    store, sink = FakeStore("ababab"), FakeCoordination(refuse={refused})
    done = compensator(store, sink, batch)
    done.run_pass()
    number = int(refused[2:])
    expected = [n for n in range(1, 7) if n % 2 == 0 or n < number]
    assert sorted(int(name[2:]) for name in sink.accepted) == expected
    assert store.ids(1) == expected
    summary = done.summary
    assert summary.failed == 1
    assert summary.left == 6 - len(expected)
    assert summary.exit_code == 6
    # The cause is mended and the time has come: the rest goes, in order.
    sink.refuse.clear()
    for row in store.rows:
        row.waits = False
    done.run_pass()
    assert store.ids(0) == []
    order_of_a = [name for name in sink.accepted if int(name[2:]) % 2]
    assert order_of_a[-3:] == sorted(order_of_a[-3:])
    assert done.summary.exit_code == 0


def test_unroutable_rows_do_not_hold_up_the_others() -> None:
    store, sink = FakeStore(["x"] * 10 + ["good"]), FakeCoordination()
    for row in store.rows[:10]:
        row.kind, row.key = "not a topic/Ü", str(row.id)
    done = compensator(store, sink, batch=10)
    done.run_pass()
    assert sink.sent == [["e-11"]]
    assert done.summary.failed == 10
    assert [row.retry_count for row in store.rows] == [1] * 10 + [0]


def test_one_failure_too_many_is_death() -> None:
    store, sink = FakeStore("ab"), FakeCoordination(refuse={"e-1"})
    store.rows[0].retry_count = 10
    done = compensator(store, sink)
    done.run_pass()
    assert store.ids(2) == [1]
    assert (done.summary.dead, done.summary.failed, done.summary.left) == (1, 0, 0)
    assert done.summary.exit_code == 6


def test_rows_that_wait_are_left_and_make_the_exit_code_6() -> None:
    store, sink = FakeStore("aab"), FakeCoordination()
    store.rows[0].waits = True
    done = compensator(store, sink)
    done.run_pass()
    assert sink.sent == [["e-3"]]
    assert done.summary.left == 2
    assert done.summary.exit_code == 6


def test_an_outage_costs_no_row_a_try_and_keeps_what_was_acknowledged() -> None:
    store, sink = FakeStore("abc"), FakeCoordination(down_after=1)
    done = compensator(store, sink, batch=1)
    with pytest.raises(SinkUnavailableError, match="no answer"):
        done.run_pass()
    done.close()
    assert sink.sent == [["e-1"]]
    assert store.ids(1) == [1]
    assert {row.retry_count for row in store.rows} == {0}
    assert sink.closed
    assert (done.summary.sent, done.summary.marked) == (1, 1)


def test_a_fenced_pass_looks_again_and_sends_nothing_twice() -> None:
    store, sink = FakeStore("abc"), FakeCoordination(fenced={2})
    done = compensator(store, sink, batch=1)
    done.run_pass()
    done.close()
    assert sink.begun == 2
    assert sink.accepted == ["e-1", "e-2", "e-3"]
    assert done.summary.exit_code == 0


def test_a_pass_that_is_fenced_again_and_again_gives_up_without_an_error() -> None:
    store, sink = FakeStore("a"), FakeCoordination(fenced={1, 2, 3})
    done = compensator(store, sink)
    assert done.run_pass() == 0
    assert (sink.begun, sink.closed >= 3) == (3, True)
    assert store.ids(0) == [1]
    assert done.summary.exit_code == 0


def test_a_pass_whose_turn_is_over_marks_what_it_sent_and_goes_on_later() -> None:
    store, sink = FakeStore("abcd"), FakeCoordination()
    over = iter([True, False, False])
    done = compensator(store, sink, batch=2, turn_over=lambda: next(over))
    assert (done.run_pass(), done.handed_over, sink.closed) == (2, True, 1)
    assert store.ids(0) == [3, 4]
    assert (done.run_pass(), done.handed_over, sink.begun) == (2, False, 2)
    done.close()
    assert store.ids(0) == []


def test_what_a_living_relay_has_not_reached_is_left_to_it() -> None:
    store, sink = FakeStore("abcd"), FakeCoordination(seen="alive", reached=2)
    done = compensator(store, sink, batch=2)
    assert done.run_pass() == 2
    done.close()
    assert store.ids(0) == [3, 4]
    summary = done.summary
    assert (summary.left_to_relay, summary.late, summary.left) == (2, 2, 0)
    assert (summary.relay, summary.exit_code) == ("alive", 0)


def test_rows_that_failed_are_the_living_relays() -> None:
    store, sink = FakeStore("aab"), FakeCoordination(seen="alive")
    store.rows[0].retry_count = 1
    done = compensator(store, sink)
    done.run_pass()
    assert sink.accepted == ["e-3"]
    assert (done.summary.left, done.summary.exit_code) == (2, 6)


def test_a_topic_at_fault_costs_one_row_a_try_and_holds_its_type() -> None:
    store = FakeStore("abcd")
    store.rows[3].kind = "other"
    sink = FakeCoordination(refuse={"e-1", "e-2", "e-3"}, topic_refused=True)
    done = compensator(store, sink)
    done.run_pass()
    assert sink.accepted == ["e-4"]
    assert [row.retry_count for row in store.rows] == [1, 0, 0, 0]
    assert (done.summary.failed, done.summary.left) == (1, 3)


def test_owed_marks_stand_in_each_delivery_and_none_at_the_end() -> None:
    store, sink = FakeStore("ab"), FakeCoordination()
    compensator(store, sink, batch=1).run_pass()
    assert sink.owed[0] == [1]
    assert 2 in sink.owed[1]
    assert sink.owed[-1] == []


def test_what_others_hold_is_not_sent_again_and_stays_owed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of an earlier pass: it was sent, and could not be marked at the beginning of this one."""
    monkeypatch.setattr("cdc_relay.marker._PAUSE_S", 0.01)
    store, sink = FakeStore("abcd"), FakeCoordination(locked=[(2, "e-2")])
    store.locked = {2, 3}
    done = compensator(store, sink)
    free = threading.Timer(0.3, store.locked.clear)
    free.start()
    assert done.run_pass() == 3
    free.join()
    assert sink.sent == [["e-1", "e-3", "e-4"]]
    assert sorted(sink.owed[0]) == [1, 2, 3, 4]
    assert sink.owed[-1] == []
    assert store.ids(0) == []
    assert done.summary.exit_code == 0


def test_marks_that_cannot_be_written_surface_and_stay_owed() -> None:
    store, sink = FakeStore("a"), FakeCoordination()
    store.down = True
    done = compensator(store, sink)
    with pytest.raises(SourceError):
        done.run_pass()
    done.close()
    assert (done.summary.sent, done.summary.marked) == (1, 0)
    assert sink.owed == [[1]]


def test_rows_marked_by_another_process_are_counted_as_sent_not_as_marked() -> None:
    class Marking(FakeCoordination):
        def deliver(
            self, records: Sequence[Record], owed: Owed
        ) -> tuple[dict[int, Refusal], frozenset[int]]:
            store.rows[0].status = 1
            return super().deliver(records, owed)

    store = FakeStore("ab")
    done = compensator(store, Marking())
    done.run_pass()
    assert (done.summary.sent, done.summary.marked) == (2, 1)


def test_stop_ends_after_the_batch_in_hand() -> None:
    store, sink, stop = FakeStore("abcd"), FakeCoordination(), threading.Event()
    stop.set()
    done = compensator(store, sink, batch=2, stop=stop)
    assert done.run_pass() == 2
    assert store.ids(0) == [3, 4]


def test_summary_as_json_has_these_fields() -> None:
    done = compensator(FakeStore("a"), FakeCoordination())
    done.run_pass()
    assert done.summary.as_dict() == {
        "relay": "dead",
        "position": None,
        "healed": 0,
        "left_to_relay": 0,
        "late": 0,
        "sent": 1,
        "marked": 1,
        "failed": 0,
        "dead": 0,
        "left": 0,
        "batches": 1,
        "seconds": 0.0,
        "exit_code": 0,
        "error": None,
    }
