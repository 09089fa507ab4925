"""The hand-over between reader and relay: order, bounds, the end."""

from __future__ import annotations

import threading

import pytest

from cdc_relay.binlog.rows import UnreadRow
from cdc_relay.binlog.stream import Batch
from cdc_relay.errors import SourceError
from cdc_relay.handover import HandOver
from cdc_relay.position import Position

_START = Position("mysql", "server", "binlog.000001", 4)


def batch(offset: int, rows: int = 1, size: int = 100) -> Batch:
    return Batch(
        [UnreadRow(offset + number, "made") for number in range(rows)],
        _START.at("binlog.000001", offset, None),
        0,
        size,
    )


def offsets(batches: list[Batch]) -> list[int]:
    return [one.position.offset for one in batches]


def test_what_waits_is_taken_as_a_whole_and_in_order() -> None:
    hand_over = HandOver(100, 10_000)
    assert hand_over.take(0) == []
    for offset in (10, 20, 30):
        assert hand_over.put(batch(offset))
    assert offsets(hand_over.take(0)) == [10, 20, 30]
    assert hand_over.take(0) == []


def test_positions_without_rows_between_do_not_pile_up() -> None:
    hand_over = HandOver(100, 10_000)
    hand_over.put(batch(10))
    for offset in range(20, 2000):
        hand_over.put(batch(offset, rows=0, size=0))
    hand_over.put(batch(2000))
    assert offsets(hand_over.take(0)) == [10, 1999, 2000]


@pytest.mark.parametrize(("most_rows", "most_bytes"), [(5, 10_000), (1000, 500)])
def test_a_full_hand_over_waits_for_the_one_who_takes(most_rows: int, most_bytes: int) -> None:
    hand_over = HandOver(most_rows, most_bytes)
    done = threading.Event()

    def put() -> None:
        for number in range(50):
            assert hand_over.put(batch(number))
        done.set()

    thread = threading.Thread(target=put)
    thread.start()
    taken: list[Batch] = []
    while len(taken) < 50:
        some = hand_over.take(10)
        assert 0 < len(some) <= 5
        taken += some
    thread.join(10)
    assert done.is_set()
    assert offsets(taken) == list(range(50))


def test_a_batch_larger_than_the_bounds_passes() -> None:
    hand_over = HandOver(5, 500)
    assert hand_over.put(batch(10, rows=1000, size=1_000_000))
    assert len(hand_over.take(0)[0].rows) == 1000


def test_an_error_comes_behind_what_was_read_before_it() -> None:
    hand_over = HandOver(5, 500)
    hand_over.put(batch(10))
    hand_over.fail(SourceError("the end"))
    assert offsets(hand_over.take(0)) == [10]
    for _ in range(2):
        with pytest.raises(SourceError, match="the end"):
            hand_over.take(0)


def test_closing_ends_a_waiting_put() -> None:
    hand_over = HandOver(1, 500)
    hand_over.put(batch(10))
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(hand_over.put(batch(20))))
    thread.start()
    hand_over.close()
    thread.join(10)
    assert answers == [False]
    assert hand_over.put(batch(30)) is False
    assert hand_over.take(0) == []
