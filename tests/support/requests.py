"""Counts what clients ask of a broker: requests by their API key, and their bytes.

Source: the Kafka protocol guide: a request is an INT32 size and, first in its header, an INT16 API
key.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.proxy import Proxy

# Those that a producer's transactions are made of; the others hang on the clock.
NAMES = {
    0: "Produce",
    22: "InitProducerId",
    24: "AddPartitionsToTxn",
    25: "AddOffsetsToTxn",
    26: "EndTxn",
    28: "TxnOffsetCommit",
}


class Requests:
    """What went through a proxy since ``watching`` began."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.bytes = 0
        """Of produce requests, frame included."""

    def stream(self) -> Callable[[bytes], None]:
        """What follows one connection."""
        rest = b""

        def look(data: bytes) -> None:
            nonlocal rest
            rest += data
            while len(rest) >= 4:
                (size,) = struct.unpack(">i", rest[:4])
                if len(rest) < size + 4:
                    return
                (key,) = struct.unpack(">h", rest[4:6])
                if key in NAMES:
                    self.counts[NAMES[key]] += 1
                if key == 0:
                    self.bytes += size + 4
                rest = rest[size + 4 :]

        return look

    def copy(self) -> Requests:
        """The counts as they are now."""
        made = Requests()
        made.counts, made.bytes = Counter(self.counts), self.bytes
        return made


@contextmanager
def watching(proxy: Proxy) -> Iterator[Requests]:
    """Count on connections that begin within the body."""
    made = Requests()
    proxy.watch = made.stream
    try:
        yield made
    finally:
        proxy.watch = None
