"""SIGTERM and SIGINT as an event: the first one asks to stop, the second one ends the process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Give an event that the first SIGTERM or SIGINT sets; the second one has its usual effect.
    In the main thread only; elsewhere the event is never set."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)

    for number in numbers:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        for number, former in zip(numbers, before, strict=True):
            signal.signal(number, former)
