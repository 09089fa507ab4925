"""The loop around a stop and around rows that wait, with a source and a sink that do as told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from cdc_relay import relay as relay_module
from cdc_relay.binlog.stream import Batch
from cdc_relay.config import load
from cdc_relay.errors import SinkUnavailableError
from cdc_relay.kafka.checkpoints import Checkpoint
from cdc_relay.kafka.topics import Refusal
from cdc_relay.outbox import OutboxEvent
from cdc_relay.position import Position
from cdc_relay.relay import Relay
from cdc_relay.router import Record, Router
from cdc_relay.store import Failure, HeldRow, PendingEvent
from cdc_relay.vitals import Vitals


def at(offset: int) -> Position:
    return Position("mysql", "server", "b.000001", offset, None)


def event(number: int, key: str) -> OutboxEvent:
    return OutboxEvent(number, f"e{number}", "order", key, "T", b"{}", None, 0, ())


class Table:
    """Row 1 waits in aggregate "a" until ``due``; nothing is marked."""

    name = "s.outbox"

    def __init__(self, *, due: bool) -> None:
        self._due_in_s = 0.0 if due else 99.0
        self.failed = 0
        self.gone: set[int] = set()

    def settle(self, _ids: Sequence[int]) -> None:
        pass

    def held(self, ids: Sequence[int]) -> list[HeldRow]:
        return [HeldRow(one, "a", 0, self._due_in_s) for one in ids if one not in self.gone]

    def events(self, ids: Sequence[int]) -> tuple[list[PendingEvent], Sequence[int]]:
        return [PendingEvent(event(one, "a"), 1) for one in ids], []

    def record_failure(self, _event: OutboxEvent, _tries: int, _reason: str) -> Failure:
        self.failed += 1
        return Failure("retry", 1, 1)

    def states(self, ids: Sequence[int]) -> dict[int, tuple[str, int]]:
        return {one: (f"e{one}", 0) for one in ids}


class Stream:
    """Gives batches, and then nothing until it is stopped."""

    def __init__(self, *batches: Batch) -> None:
        self._batches = batches
        self._stopped = threading.Event()

    def batches(self, _start: Position) -> Iterator[Batch]:
        yield from self._batches
        self._stopped.wait(30)

    def stop(self) -> None:
        self._stopped.set()

    def current(self) -> Position:
        return at(900)

    anchor = current


GoingOn = Callable[[], bool]


class Sink:
    """``on_records`` decides what becomes of a group; a checkpoint alone is always taken."""

    acknowledged: frozenset[int] = frozenset()

    def __init__(self, on_records: Callable[[list[str], GoingOn], None]) -> None:
        self._on_records = on_records
        self.sent: list[str] = []
        self.checkpoints: list[Checkpoint] = []

    def deliver(
        self, records: Sequence[Record], checkpoint: Record | None, going_on: GoingOn
    ) -> dict[int, Any]:
        ids = [dict(record.headers)["id"].decode() for record in records]
        if records:
            self._on_records(ids, going_on)
        self.sent += ids
        assert checkpoint is not None
        self.checkpoints.append(Checkpoint.decode(checkpoint.value or b""))
        return {}

    def poll(self) -> None:
        pass

    def close(self, _timeout: float) -> None:
        pass


def run(
    sink: Sink,
    batches: Iterable[Batch],
    stopping: threading.Event,
    start: Checkpoint,
    *,
    due: bool = False,
    table: Table | None = None,
) -> None:
    flags = {"database_url": "mysql://u@h/s", "mark": "none", "checkpoint_interval": "1h"}
    settings = load(environ={}, flags=flags)
    store: Any = table or Table(due=due)
    router = Router(settings.routing(), "json", "raw", "")
    relay = Relay(settings, Stream(*batches), router, sink, store, stopping, lambda: None, Vitals())
    ward = threading.Timer(30, stopping.set)
    ward.start()
    try:
        relay.run(start)
    finally:
        ward.cancel()


def test_what_is_on_its_way_when_a_stop_is_asked_is_waited_for() -> None:
    """Brokers that are well but far away answer later than at the first look."""
    stopping = threading.Event()

    def slow(_ids: list[str], going_on: GoingOn) -> None:
        stopping.set()
        for _ in range(3):
            if not going_on():
                raise SinkUnavailableError("stopped")

    sink = Sink(slow)
    run(sink, [Batch([event(2, "b")], at(200), 1)], stopping, Checkpoint(at(100)))
    assert sink.sent == ["e2"]
    assert sink.checkpoints[-1].position == at(200)


def silent(stopping: threading.Event) -> Callable[[list[str], GoingOn], None]:
    def on_records(_ids: list[str], going_on: GoingOn) -> None:
        stopping.set()
        while going_on():
            pass
        raise SinkUnavailableError("stopped")

    return on_records


def test_a_stop_does_not_wait_for_silent_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "_IN_FLIGHT_S", 0.2)
    stopping = threading.Event()
    sink = Sink(silent(stopping))
    run(sink, [Batch([event(2, "b")], at(200), 1)], stopping, Checkpoint(at(100)))
    assert sink.sent == []
    assert sink.checkpoints[-1].position == at(100)


def test_the_rows_of_a_group_that_was_given_up_are_not_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They come again with the stream: sent by what is held as well, they would be there twice."""
    monkeypatch.setattr(relay_module, "_IN_FLIGHT_S", 0.2)
    stopping = threading.Event()
    sink = Sink(silent(stopping))
    start = Checkpoint(at(100), closed=(("order", "a"),), held=(("order", "a", [1]),))
    moved = Batch([], at(200), 1)
    run(sink, [moved, Batch([event(2, "a"), event(3, "b")], at(300), 1)], stopping, start)
    last = sink.checkpoints[-1]
    assert [list(ids) for _, _, ids in last.held] == [[1]]


def test_a_retry_says_how_far_the_stream_has_come() -> None:
    """On a quiet server nothing else would say it for long."""
    start = Checkpoint(at(100), closed=(("order", "a"),), held=(("order", "a", [1]),))
    stopping = threading.Event()
    sink = Sink(lambda *_: stopping.set())
    run(sink, [Batch([], at(200), 1)], stopping, start, due=True)
    assert sink.sent == ["e1"]
    assert sink.checkpoints[-1].position == at(200)


def test_a_stop_is_heard_among_many_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """However soon each of them is answered."""
    monkeypatch.setattr(relay_module, "_IN_FLIGHT_S", 0.0)
    stopping = threading.Event()

    class Refusing(Sink):
        def deliver(
            self, records: Sequence[Record], checkpoint: Record | None, going_on: GoingOn
        ) -> dict[int, Any]:
            if not records:
                return super().deliver([], checkpoint, going_on)
            stopping.set()
            return {0: Refusal("refused")}

    sink = Refusing(lambda *_: None)
    group = Batch([event(number, f"k{number}") for number in range(2, 50)], at(200), 1)
    table = Table(due=False)
    run(sink, [group], stopping, Checkpoint(at(100)), table=table)
    assert table.failed == 1


def test_rows_that_wait_and_are_gone_are_said() -> None:
    start = Checkpoint(at(100), closed=(("order", "a"),), held=(("order", "a", [1, 5]),))
    table, stopping = Table(due=True), threading.Event()
    table.gone = {5}
    with capture_logs() as logs:
        run(Sink(lambda *_: stopping.set()), [], stopping, start, table=table)
    [said] = [line for line in logs if "are gone from the table" in line["event"]]
    assert (said["rows"], said["aggregate_id"]) == (1, "a")
