"""The marker, with a double for the table: what it owes while others hold rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from cdc_relay.kafka.owed import fingerprint
from cdc_relay.marker import Marker, parts_of
from cdc_relay.store import Marked
from cdc_relay.vitals import Vitals


class Table:
    """Marks what is not ``locked``; waits while ``busy`` is set."""

    def __init__(self) -> None:
        self.marked: list[int] = []
        self.locked: set[int] = set()
        self.around: list[bool] = []
        self.free = threading.Event()
        self.free.set()

    def mark_sent(self, rows: Sequence[tuple[int, str]], *, around: bool = False) -> Marked:
        assert self.free.wait(10)
        self.around.append(around)
        held = [row for row in rows if row[0] in self.locked]
        self.marked += [row_id for row_id, _ in rows if row_id not in self.locked]
        return Marked(len(rows) - len(held), held)


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
def marker(table: Table, monkeypatch: pytest.MonkeyPatch) -> Iterator[Marker]:
    monkeypatch.setattr("cdc_relay.marker._PAUSE_S", 0.01)
    made = Marker(table, Vitals())  # type: ignore[arg-type]
    made.start()
    yield made
    table.free.set()
    made.stop(10)


def rows(*ids: int) -> list[tuple[int, str]]:
    return [(row_id, f"e-{row_id}") for row_id in ids]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_rows_that_others_hold_delay_no_marks_but_their_own(table: Table, marker: Marker) -> None:
    table.locked = {2, 4, 70}
    marker.owe(parts_of(rows(1, 2, 3, 4)))
    until(lambda: marker.owed_count == 2)
    for first in range(10, 90, 10):
        marker.owe(parts_of(rows(*range(first, first + 10))))
    until(lambda: marker.owed_count == 3)
    assert marker.owed() == dict(rows(2, 4, 70))
    stored = marker.owed_with(parts_of(rows(100)))
    assert dict(stored) == {row_id: fingerprint(f"e-{row_id}") for row_id in (2, 4, 70, 100)}
    assert not table.around[0]
    assert all(table.around[1:])  # nothing is waited for any more
    table.locked = {4}
    until(lambda: marker.owed_count == 1)
    assert marker.owed() == dict(rows(4))
    table.locked = set()
    assert marker.wait(10)
    assert sorted(table.marked) == [1, 2, 3, 4, *range(10, 90)]
    marker.owe(parts_of(rows(200)))
    assert marker.wait(10)
    assert not table.around[-1]


def test_what_is_adopted_is_owed_once(table: Table, marker: Marker) -> None:
    table.free.clear()
    marker.owe(parts_of(rows(1, 2)))
    marker.adopt(rows(2, 3))
    marker.adopt([*rows(3), (1, "another event of this id")])
    assert marker.owed_count == 4
    table.free.set()
    assert marker.wait(10)
    assert sorted(table.marked) == [1, 1, 2, 3]
