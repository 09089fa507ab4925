"""Marks, and a server that took over and does not have the rows yet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cdc_relay import marker as marker_module
from cdc_relay.kafka.owed import Owed
from cdc_relay.marker import Marker, Part
from cdc_relay.position import Position
from cdc_relay.store import Marked
from cdc_relay.vitals import Vitals

OLD, NEW = (f"00000000-0000-0000-0000-00000000000{n}" for n in (1, 2))
SENT = Position("mysql", OLD, "binlog.000001", 500, f"{OLD}:1-50")
ROWS = [(7, "event-7"), (8, "event-8")]


class Replica:
    """Executes the rows' inserts after it was asked a few times."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.pending: list[tuple[int, str]] = []

    def mark_sent(self, rows: list[tuple[int, str]], *, around: bool = False) -> Marked:
        assert not around
        marked = [row for row in rows if row in self.pending]
        self.pending = [row for row in self.pending if row not in marked]
        return Marked(len(marked), [])

    def position(self) -> Position:
        self.looks -= 1
        if not self.looks:
            self.pending = list(ROWS)
        return replace(SENT, server=NEW, gtids=f"{OLD}:1-{49 if self.looks > 0 else 50}")


def marked(store: Any, position: Position | None) -> tuple[int, bool]:
    """How many are marked, and whether nothing is owed any more."""
    vitals = Vitals()
    vitals.position = position
    marker = Marker(store, vitals)
    marker.start()
    marker.owe([Part(ROWS, Owed.of(ROWS))])
    done = marker.wait(20)
    marker.stop(10)
    assert marker.error is None
    return vitals.counters.marked, done


def test_a_mark_is_owed_until_the_server_has_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marker_module, "_PAUSE_S", 0.01)
    assert marked(Replica(looks=3), SENT) == (2, True)
    assert marked(Replica(looks=1), SENT) == (2, True)  # they came between the mark and the look


def test_rows_that_are_gone_are_owed_no_longer() -> None:
    """On the server of the checkpoint; and where no position tells."""

    class Gone(Replica):
        def position(self) -> Position:
            return SENT

    assert marked(Gone(looks=1), SENT) == (0, True)
    assert marked(Replica(looks=1), None) == (0, True)
