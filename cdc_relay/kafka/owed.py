"""Owed marks as a checkpoint stores them: so many that they fill a record after a large
transaction, so each takes little more than five bytes, and is packed once.

A chunk is the number of its marks, the width of the steps from one id to the next, the first id,
the steps, the fingerprints. Little endian.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final, Self

_CHUNK: Final = 1000
_HEAD: Final = struct.Struct("<HcQ")
_WIDTHS: Final = ((1 << 8, "B"), (1 << 16, "H"), (1 << 32, "I"), (1 << 64, "Q"))


def fingerprint(event_id: str) -> int:
    """32 bits that tell an event from another one that was given its id later (TRUNCATE)."""
    return zlib.crc32(event_id.encode())


class Owed:
    """Owed marks, (id, fingerprint of the event id) each. Immutable; iterate to get them."""

    __slots__ = ("_count", "packed")

    def __init__(self, packed: bytes = b"", count: int = 0) -> None:
        self.packed = packed
        """The stored form."""
        self._count = count

    @classmethod
    def of(cls, rows: Sequence[tuple[int, str]]) -> Self:
        """Pack rows, (id, event id) each."""
        ordered = sorted(rows)
        out: list[bytes] = []
        for start in range(0, len(ordered), _CHUNK):
            part = ordered[start : start + _CHUNK]
            ids = [row_id for row_id, _ in part]
            steps = [after - before for before, after in pairwise(ids)]
            most = max(steps, default=0)
            width = next(code for bound, code in _WIDTHS if most < bound)
            prints = [fingerprint(event_id) for _, event_id in part]
            out.append(_HEAD.pack(len(ids), width.encode(), ids[0]))
            out.append(struct.pack(f"<{len(steps)}{width}{len(prints)}I", *steps, *prints))
        return cls(b"".join(out), len(ordered))

    @classmethod
    def together(cls, parts: Iterable[Owed]) -> Self:
        """All marks of ``parts``, packed already."""
        known = list(parts)
        return cls(b"".join([part.packed for part in known]), sum(map(len, known)))

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Read the stored form. Raises ``ValueError`` or ``struct.error`` for anything else."""
        return cls(data, sum(1 for _ in cls(data)))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        data, place = self.packed, 0
        while place < len(data):
            count, width, row_id = _HEAD.unpack_from(data, place)
            place += _HEAD.size
            form = f"<{count - 1}{width.decode('ascii')}{count}I"
            numbers = struct.unpack_from(form, data, place)
            place += struct.calcsize(form)
            ids = accumulate(numbers[: count - 1], initial=row_id)
            yield from zip(ids, numbers[count - 1 :], strict=True)

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owed) and self.packed == other.packed

    def __hash__(self) -> int:
        return hash(self.packed)


NOTHING_OWED: Final = Owed()
