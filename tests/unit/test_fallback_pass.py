"""One pass of the compensator, with doubles for the table and for Kafka."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from cdc_relay.errors import SinkError, SinkUnavailableError, SourceUnavailableError
from cdc_relay.outbox import OutboxEvent
from cdc_relay.router import Record, Router
from cdc_relay.store import Failure, PendingEvent, PendingScan, ScannedRow
from fallback.compensator import Compensator, waves


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

    def scan(self, older_than_s: float, limit: int) -> PendingScan:
        return PendingScan(self, older_than_s, limit)  # type: ignore[arg-type]

    def newest_pending(self, _older_than_s: float) -> int:
        return max((row.id for row in self.rows if row.status == 0), default=0)

    def scan_rows(
        self, _older_than_s: float, limit: int, after_id: int, last_id: int
    ) -> list[ScannedRow]:
        found = [r for r in self.rows if r.status == 0 and after_id < r.id <= last_id]
        return [ScannedRow(r.id, (r.kind, r.key), False, r.waits) for r in found[:limit]]

    def events(self, ids: Sequence[int]) -> list[PendingEvent]:
        return [
            PendingEvent(
                OutboxEvent(r.id, r.event_id, r.kind, r.key, "T", b"{}", None, 0), r.retry_count
            )
            for r in self.rows
            if r.id in ids and r.status == 0
        ]

    def mark_sent(self, rows: Sequence[tuple[int, str]]) -> int:
        if self.down:
            raise SourceUnavailableError("the database went away")
        self.marks.append(len(rows))
        pending = [r for r in self.rows if (r.id, r.event_id) in rows and r.status == 0]
        for row in pending:
            row.status = 1
        return len(pending)

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
class FakeDelivery:
    refused: dict[int, str]


@dataclass
class FakeSink:
    """Refuses the ids in ``refuse``; answers nothing while ``down``."""

    refuse: set[str] = field(default_factory=set)
    down_after: int = 10**9
    sent: list[list[str]] = field(default_factory=list)
    closed: bool = False

    def send(self, records: Sequence[Record]) -> FakeDelivery:
        ids = [(record.headers[0][1] or b"").decode() for record in records]
        self.sent.append(ids)
        return FakeDelivery({n: "refused" for n, name in enumerate(ids) if name in self.refuse})

    def wait(self, _delivery: Any, timeout: float) -> None:
        if len(self.sent) > self.down_after:
            raise SinkUnavailableError("no answer")

    def close(self, _timeout: float) -> None:
        self.closed = True

    @property
    def accepted(self) -> list[str]:
        return [name for wave in self.sent for name in wave if name not in self.refuse]


def compensator(store: FakeStore, sink: FakeSink, batch: int = 100, **more: Any) -> Compensator:
    return Compensator(
        store,  # type: ignore[arg-type]
        Router("t.{aggregate_type}"),
        lambda: sink,
        older_than_s=0,
        batch=batch,
        send_timeout_s=more.pop("send_timeout_s", 0.0),
        stop=more.pop("stop", threading.Event()),
    )


def test_everything_is_sent_once_and_marked_in_one_go() -> None:
    store, sink = FakeStore("abc"), FakeSink()
    done = compensator(store, sink)
    assert done.run_pass() == 3
    assert sink.sent == [["e-1", "e-2", "e-3"]]
    assert store.marks == [3]
    summary = done.summary
    assert (summary.sent, summary.marked, summary.failed, summary.left) == (3, 3, 0, 0)
    assert summary.exit_code == 0
    assert done.run_pass() == 0


def test_nothing_to_do_needs_no_broker() -> None:
    def no_sink() -> FakeSink:
        raise AssertionError("opened")

    done = Compensator(
        FakeStore(""),  # type: ignore[arg-type]
        Router("t"),
        no_sink,
        older_than_s=0,
        batch=1,
        send_timeout_s=0,
        stop=threading.Event(),
    )
    assert done.run_pass() == 0
    assert done.summary.exit_code == 0


@pytest.mark.parametrize("batch", [1, 2, 3, 100])
@pytest.mark.parametrize("refused", ["e-1", "e-3", "e-5"])
def test_a_refused_event_is_never_overtaken(batch: int, refused: str) -> None:
    store, sink = FakeStore("ababab"), FakeSink(refuse={refused})
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
    store, sink = FakeStore(["x"] * 10 + ["good"]), FakeSink()
    for row in store.rows[:10]:
        row.kind, row.key = "not a topic/Ü", str(row.id)
    done = compensator(store, sink, batch=10)
    done.run_pass()
    assert sink.sent == [["e-11"]]
    assert done.summary.failed == 10
    assert [row.retry_count for row in store.rows] == [1] * 10 + [0]


def test_one_failure_too_many_is_death() -> None:
    store, sink = FakeStore("ab"), FakeSink(refuse={"e-1"})
    store.rows[0].retry_count = 10
    done = compensator(store, sink)
    done.run_pass()
    assert store.ids(2) == [1]
    assert (done.summary.dead, done.summary.failed, done.summary.left) == (1, 0, 0)
    assert done.summary.exit_code == 6


def test_rows_that_wait_are_left_and_make_the_exit_code_6() -> None:
    store, sink = FakeStore("aab"), FakeSink()
    store.rows[0].waits = True
    done = compensator(store, sink)
    done.run_pass()
    assert sink.sent == [["e-3"]]
    assert done.summary.left == 2
    assert done.summary.exit_code == 6


def test_an_outage_costs_no_row_a_try_and_keeps_what_was_acknowledged() -> None:
    store, sink = FakeStore("aaab"), FakeSink(down_after=1)
    done = compensator(store, sink)
    with pytest.raises(SinkUnavailableError, match="are the brokers up"):
        done.run_pass()
    assert sink.sent == [["e-1", "e-4"], ["e-2"]]
    assert store.ids(1) == [1, 4]
    assert {row.retry_count for row in store.rows} == {0}
    assert sink.closed
    assert (done.summary.sent, done.summary.marked) == (2, 2)


def test_a_producer_that_cannot_go_on_is_replaced() -> None:
    class Broken(FakeSink):
        def send(self, records: Sequence[Record]) -> FakeDelivery:
            raise SinkError("fatal")

    store, broken, whole = FakeStore("a"), Broken(), FakeSink()
    sinks: list[FakeSink] = [broken, whole]
    done = compensator(store, whole)
    done._open_sink = lambda: sinks.pop(0)
    with pytest.raises(SinkError, match="fatal"):
        done.run_pass()
    assert broken.closed
    done.run_pass()
    assert store.ids(1) == [1]


def test_a_lost_database_surfaces_after_the_acknowledgement() -> None:
    store, sink = FakeStore("a"), FakeSink()
    store.down = True
    done = compensator(store, sink)
    with pytest.raises(SourceUnavailableError):
        done.run_pass()
    assert (done.summary.sent, done.summary.marked) == (1, 0)


def test_rows_marked_by_another_process_are_counted_as_sent_not_as_marked() -> None:
    store, sink = FakeStore("ab"), FakeSink()
    done = compensator(store, sink)
    real_send = sink.send

    def send(records: Sequence[Record]) -> FakeDelivery:
        store.rows[0].status = 1
        return real_send(records)

    sink.send = send  # type: ignore[method-assign]
    done.run_pass()
    assert (done.summary.sent, done.summary.marked) == (2, 1)


def test_stop_ends_after_the_batch_in_hand() -> None:
    store, sink, stop = FakeStore("abcd"), FakeSink(), threading.Event()
    stop.set()
    done = compensator(store, sink, batch=2, stop=stop)
    assert done.run_pass() == 2
    assert store.ids(0) == [3, 4]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("", []),
        ("abc", [[1, 2, 3]]),
        ("aaa", [[1], [2], [3]]),
        ("abacab", [[1, 2, 4], [3, 6], [5]]),
    ],
)
def test_waves(keys: str, expected: list[list[int]]) -> None:
    store = FakeStore(keys)
    batch = store.events(range(1, len(keys) + 1))
    assert [[pending.event.id for pending in wave] for wave in waves(batch)] == expected


def test_two_types_of_one_key_are_two_aggregates() -> None:
    store = FakeStore("aa")
    store.rows[1].kind = "refund"
    assert len(waves(store.events([1, 2]))) == 1


def test_summary_as_json_has_these_fields() -> None:
    done = compensator(FakeStore("a"), FakeSink())
    done.run_pass()
    assert done.summary.as_dict() == {
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
