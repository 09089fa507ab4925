"""Event ids: UUID version 7, which sort by the time they were made (RFC 9562, section 5.7)."""

from __future__ import annotations

import os
import threading
import time

_RANDOM_BITS = 74
# The first id of a millisecond leaves the highest bit free, so counting up cannot overflow.
_SEED_BITS = _RANDOM_BITS - 1
_STEP_BITS = 32


class _Clock:
    """The last id's two parts. Replaced in a forked child, whose lock might be held for ever."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.millisecond = 0
        self.tail = 0


_clock = _Clock()


def _forget() -> None:
    global _clock
    _clock = _Clock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def uuid7() -> str:
    """Return a new UUIDv7 as text, greater than every earlier one of this process.

    The first 48 bits are this machine's clock in milliseconds; within one millisecond, and while
    the clock stands before the last id, the random part counts up by a random step (RFC 9562,
    section 6.2, method 2). Threads may call it at once.
    """
    clock = _clock
    with clock.lock:
        now = time.time_ns() // 1_000_000
        if now > clock.millisecond:
            clock.millisecond = now
            clock.tail = int.from_bytes(os.urandom(10)) >> (80 - _SEED_BITS)
        else:
            clock.tail += 1 + int.from_bytes(os.urandom(_STEP_BITS // 8))
        millisecond, tail = clock.millisecond, clock.tail
    high, low = tail >> 62, tail & ((1 << 62) - 1)
    # The text of uuid.UUID, which takes three times as long to make it.
    text = f"{millisecond << 80 | 0x7 << 76 | high << 64 | 0b10 << 62 | low:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
