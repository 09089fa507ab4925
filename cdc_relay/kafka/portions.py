"""How a group is cut into portions, when brokers refuse it as a whole.

Two faults look the same: one record that is refused, and a topic whose ``max.message.bytes`` is
smaller than the batches that the producer makes of records which are well by themselves. The first
is found by halves. Where portions at different places are refused, it is the second: everything is
cut as small as what was accepted, and the size is remembered for a while. Where so many portions,
one after the other, take longer than a transaction may, later producers make their batches that
small: those need not be waited for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

from cdc_relay.router import Record

Portion = tuple[int, int]
"""Index of the first record, and of the one behind the last."""

_REMEMBERED_S: Final = 600.0
# What a record costs in a batch beside its key, value and header values.
_OVERHEAD: Final = 150


class Portions:
    """The portions of one group after the other. One thread."""

    def __init__(self) -> None:
        self._limits: dict[str, tuple[int, float]] = {}
        self._records: Sequence[Record] = ()
        self._places: list[int] = []
        self._cuts: set[int] = set()
        self._accepted = 0
        self._last_refused: Portion | None = None
        self._topics: set[str] = set()
        self.limit = 0
        """Bytes to which the group's portions are cut, because a topic of it takes only small
        batches; 0 where that is not known."""

    def of(self, records: Sequence[Record]) -> list[Portion]:
        """The portions of a new group: one, unless a topic of it is known to take only small
        batches."""
        self._records = records
        self._places = []
        self._cuts = {0, len(records)}
        self._accepted = 0
        self._last_refused = None
        self._topics = set()
        self.limit = 0
        if self._limits:
            now = time.monotonic()
            self._limits = {name: found for name, found in self._limits.items() if found[1] > now}
            known = [
                self._limits[name][0]
                for name in {record.topic for record in records}
                if name in self._limits
            ]
            if known:
                self._cut(min(known))
        return self._cut_up()

    def passed(self, portion: Portion) -> None:
        """A portion was acknowledged (as far as it was waited for)."""
        if len(self._cuts) > 2:
            self._accepted = max(self._accepted, self._size(portion))

    def refused(self, suspects: Sequence[int]) -> list[Portion]:
        """Some of ``suspects``, indices within one portion, are refused, together with all others
        in their batches: the portions to try next."""
        first, stop = suspects[0], suspects[-1] + 1
        last, self._last_refused = self._last_refused, (first, stop)
        self._topics.update(self._records[index].topic for index in suspects)
        self._cuts |= {first, (first + stop) // 2, stop}
        if last is not None and not (last[0] <= first < last[1]) and self._accepted:
            self._cut(min(self._accepted, self._size((first, stop)) // 2))
        return self._cut_up()

    def committed(self) -> None:
        """The group is there, every record of it: what was refused was a size."""
        if self._last_refused is not None and self._accepted:
            until = time.monotonic() + _REMEMBERED_S
            self._limits.update(dict.fromkeys(self._topics, (self._accepted, until)))

    def _cut(self, limit: int) -> None:
        """Cut so that no portion of several records is larger than ``limit`` bytes."""
        self.limit = limit
        for start, stop in pairwise(sorted(self._cuts)):
            begin = start
            for index in range(start + 1, stop):
                if self._size((begin, index + 1)) > limit:
                    self._cuts.add(index)
                    begin = index

    def _size(self, portion: Portion) -> int:
        if not self._places:
            self._places = list(accumulate(map(_size, self._records), initial=0))
        return self._places[portion[1]] - self._places[portion[0]]

    def _cut_up(self) -> list[Portion]:
        return list(pairwise(sorted(self._cuts)))


def _size(record: Record) -> int:
    headers = sum(len(value or b"") for _, value in record.headers)
    return len(record.key) + len(record.value or b"") + headers + _OVERHEAD
