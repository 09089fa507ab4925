"""``Portions`` against a broker that refuses batches as a whole."""

from __future__ import annotations

import pytest

from cdc_relay.kafka.portions import Portions
from cdc_relay.router import Record

BYTES = 1000  # of a record


def records(count: int) -> list[Record]:
    return [Record("t", b"k%d" % number, b"x" * (BYTES - 200), [], 0) for number in range(count)]


def attempts(
    portions: Portions, group: list[Record], bad: set[int], batch: int, most: int = 10**9
) -> tuple[int | None, int, int]:
    """What the sink does: (the index that is to blame, attempts, portions acknowledged). Batches
    are of ``batch`` records, and larger than ``most`` records is refused too."""
    tries = waits = 0
    found = portions.of(group)
    while True:
        tries += 1
        assert [start for start, _ in found[1:]] == [stop for _, stop in found[:-1]]
        assert (found[0][0], found[-1][1]) == (0, len(group))
        for start, stop in found:
            waits += 1
            refused: list[int] = []
            for first in range(start, stop, batch):
                last = min(first + batch, stop)
                if last - first > most or bad & set(range(first, last)):
                    refused += range(first, last)
            if refused and stop - start == 1:
                return start, tries, waits
            if refused:
                found = portions.refused(refused)
                break
            portions.passed((start, stop))
        else:
            portions.committed()
            return None, tries, waits


def test_a_group_that_is_taken_goes_as_a_whole() -> None:
    assert attempts(Portions(), records(5000), set(), 1000) == (None, 1, 1)
    assert Portions().of([]) == []


@pytest.mark.parametrize("bad", [{0}, {4999}, {2500}, {17, 18}, {100, 4000}, set(range(5000))])
@pytest.mark.parametrize("batch", [1, 7, 1000, 5000])
def test_a_bad_record_is_found_soon(bad: set[int], batch: int) -> None:
    group, portions = records(5000), Portions()
    blamed, tries, waits = attempts(portions, group, bad, batch)
    assert blamed in bad
    assert tries <= 15
    assert waits <= 200
    rest = [record for index, record in enumerate(group) if index != blamed]
    if len(bad) == 1:
        assert attempts(portions, rest, set(), batch) == (None, 1, 1)


@pytest.mark.parametrize("most", [1, 10, 333])
def test_a_topic_of_small_batches_is_found_and_remembered(most: int) -> None:
    group, portions = records(1000), Portions()
    blamed, tries, _ = attempts(portions, group, set(), 5000, most)
    assert blamed is None
    assert tries <= 30
    blamed, tries, waits = attempts(portions, group, set(), 5000, most)
    assert (blamed, tries) == (None, 1)
    assert waits <= 4 * 1000 // most + 1
