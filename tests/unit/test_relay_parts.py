"""The relay's own thread, without servers: groups that are cut, and walks that are stopped."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from cdc_relay.binlog.rows import UnreadRow
from cdc_relay.binlog.stream import Batch, BinlogSource
from cdc_relay.config import Settings
from cdc_relay.errors import SourceUnavailableError
from cdc_relay.kafka.checkpoints import Checkpoint
from cdc_relay.outbox import PENDING, SENT, OutboxEvent
from cdc_relay.position import Position
from cdc_relay.relay import Relay, StopAskedError
from cdc_relay.vitals import Vitals
from tests.support.binlog import SID, Log, query_body
from tests.support.corpus import Played, packets

START = Position("mysql", "server", "binlog.000001", 4, "")


def event(row_id: int) -> OutboxEvent:
    return OutboxEvent(row_id, f"e{row_id}", "order", "a", "MADE", b"{}", None, 0)


class Table:
    """Rows by id; three at a time are as many as are read at once."""

    def __init__(self, *ids: int, sent: Sequence[int] = ()) -> None:
        self.rows = {row_id: SENT if row_id in sent else PENDING for row_id in ids}
        self.pages: list[int] = []

    def first_rows(self, ids: Sequence[int]) -> tuple[list[tuple[OutboxEvent, int]], Sequence[int]]:
        there = [row_id for row_id in sorted(ids[:3]) if row_id in self.rows]
        return [(event(row_id), self.rows[row_id]) for row_id in there], ids[3:]

    def still_unseen(self, _ids: Sequence[int]) -> list[int]:
        return []

    def unseen(self, after_id: int) -> tuple[list[Any], int | None]:
        self.pages.append(after_id)
        return [], after_id + 5000


class Brokers:
    """A sink that is only polled."""

    def poll(self) -> None:
        pass


def relay(table: Table, **settings: Any) -> tuple[Relay, threading.Event]:
    """A relay over ``table``, and what stops it."""
    stopping = threading.Event()
    store: Any = table
    sink: Any = Brokers()
    other: Any = None
    made = Relay(Settings(**settings), other, other, sink, store, stopping, lambda: None, Vitals())
    made._checkpoint = Checkpoint(START)
    return made, stopping


def batches(log: Log, events: Sequence[bytes]) -> list[Batch]:
    """What the source makes of these events."""
    source: Any = BinlogSource(
        {}, "shop", "outbox", {}, server_id=1, replica_uuid=uuid.UUID(int=1), heartbeat=1,
        read_timeout=5, batch_rows=1000, idle_interval=0, find=lambda _: None,
    )  # fmt: skip
    found = []
    with suppress(SourceUnavailableError):  # at the end of the log
        for batch in source._read(Played(packets(events), 1 << 18), log.decoder, START):
            found.append(batch)
    return [batch for batch in found if batch.rows]


def test_keys_of_a_prepared_transaction_are_cut_where_enough_is_read() -> None:
    """Each part with the place behind it, what was committed before with the first one."""
    log = Log(batch_rows=5)
    log.decoder.prepared = {"78::1": tuple(range(1, 9))}
    gtid = log.event(33, b"\1" + SID + (1).to_bytes(8, "little") + b"\2" + bytes(23))
    commit = log.event(2, query_body("XA COMMIT X'78',X'',1"))
    keys = batches(log, [gtid, commit])
    assert [len(batch.rows) for batch in keys] == [5, 3]
    boundary = START.at("binlog.000001", 90, "")
    group = [Batch([event(20), event(21)], boundary, 0), *keys]

    table = Table(*range(1, 9), sent=[2])
    made, _ = relay(table)
    parts = list(made._in_parts(group))
    assert [[row.id for row in events] for _, events in parts] == [
        [20, 21, 1, 3],
        [4, 5, 6],
        [7, 8],
    ]
    places = [part[-1].position for part, _ in parts]
    assert [place.partial and place.partial[1] for place in places] == [3, 6, None]
    assert {place.partial[0] for place in places if place.partial} == {f"{SID.hex()}::1"}
    inside = {place.offset for place in places[:2]}
    assert inside == {keys[0].position.offset}
    assert all(place.prepared == {"78::1": tuple(range(1, 9))} for place in places[:2])
    assert places[2] == keys[1].position
    assert places[2].prepared == {}
    assert places[2].gtids == f"{uuid.UUID(bytes=SID)}:1"


def test_a_batch_without_places_inside_is_read_to_its_end() -> None:
    first, second = START.at("binlog.000001", 90, ""), START.at("binlog.000001", 190, "")
    rows = [UnreadRow(row_id, "made") for row_id in (9, 1, 8, 2, 7)]
    group = [Batch([event(30)], first, 0), Batch([*rows, event(31)], second, 0)]
    made, _ = relay(Table(1, 2, 7, 8, 9))
    parts = [([row.id for row in events], part[-1].position) for part, events in
             made._in_parts(group)]  # fmt: skip
    assert parts == [([30], first), ([9, 1, 8, 2, 7, 31], second)]


def test_rows_that_are_gone_hold_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdc_relay.relay._VISIBLE_WITHIN_S", 0.0)
    place = START.inside("group", 0)
    keys = [UnreadRow(row_id, "made") for row_id in range(1, 9)]
    made, _ = relay(Table(1, 5, 8))
    parts = list(made._in_parts([Batch(keys, START.at("binlog.000001", 90, ""), 0, 0, place)]))
    assert [[row.id for row in events] for _, events in parts] == [[1], [5], [8]]
    assert made.counters.gone == 5


def test_a_stop_is_heard_while_unseen_rows_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two pages of a walk that may take long; it takes part in the group as well."""
    monkeypatch.setattr("cdc_relay.relay._TICK_S", 0.0)
    table = Table()
    made, stopping = relay(table)
    ticks: list[int] = []

    def tick() -> None:
        ticks.append(len(table.pages))
        if len(table.pages) == 3:
            stopping.set()

    made._tick = tick
    with pytest.raises(StopAskedError):
        made._wait_for_unseen()
    assert table.pages == [0, 5000, 10_000]
    assert ticks == [0, 1, 2, 3]


def test_unseen_rows_are_not_looked_for_without_marks() -> None:
    """What waits is known by its ids then: nobody would ask."""
    table = Table()
    made, _ = relay(table, mark="none")
    made._wait_for_unseen()
    assert table.pages == []
