from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_relay.errors import SinkError
from cdc_relay.kafka.checkpoints import Checkpoint
from cdc_relay.position import Position

HERE = Position("mysql", "a-server", "binlog.000042", 4711, "")

ids = st.integers(0, (1 << 64) - 1) | st.integers(1_000, 4_000)
owed_marks = st.dictionaries(ids, st.integers(0, (1 << 32) - 1), max_size=50)


@given(owed_marks)
def test_owed_marks_come_back(owed: dict[int, int]) -> None:
    made = Checkpoint(HERE, list(owed.items()))
    assert dict(Checkpoint.decode(made.encode()).owed) == owed


def test_the_owed_marks_of_a_large_transaction_fit_into_a_record() -> None:
    owed = [(1 << 60 | number * 3, number * 7919 % (1 << 32)) for number in range(150_000)]
    value = Checkpoint(HERE, owed).encode()
    assert len(value) < 800_000
    assert Checkpoint.decode(value).owed == owed


def test_everything_else_comes_back() -> None:
    made = Checkpoint(
        HERE.inside("a-server:17", 3),
        [(1, 2)],
        [("order", "k\n1"), ("Ü", None)],
        sweeping=True,
        doubtful_until=HERE,
        anchor="why",
        time=1.5,
    )
    assert Checkpoint.decode(made.encode()) == made


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_a_damaged_one_is_refused(cut: int) -> None:
    value = Checkpoint(HERE, [(1, 2), (5, 6)]).encode()
    with pytest.raises(SinkError):
        Checkpoint.decode(value[:-cut])
    with pytest.raises(SinkError):
        Checkpoint.decode(b"{}")
