"""Blocking calls of a client library, made so that one which hangs can be left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from cdc_relay.kafka.client import served

_T = TypeVar("_T")
_Job = tuple[Callable[[], object], "Future[object]"]


class Calls:
    """One call at a time, each in the same thread beside the caller's.

    Needed because librdkafka's ``send_offsets_to_transaction`` ignores its timeout and, from 2.10
    on, may never return after the group's coordinator was away (its issues 5456 and 5511).
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._running: Future[object] | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, future = job
            try:
                result = served(call)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del job, call, future  # or they would keep a client alive until the next call

    def make(self, call: Callable[[], _T], while_waiting: Callable[[], None], pause: float) -> _T:
        """The result of ``call``. ``while_waiting`` is called every ``pause`` seconds in the
        caller's thread; what it raises ends the wait, and the call goes on by itself."""
        future: Future[_T] = Future()
        self._running = future  # type: ignore[assignment]
        self._jobs.put((call, future))  # type: ignore[arg-type]
        while True:
            try:
                return future.result(pause)
            except TimeoutError:
                if future.done():  # the call's own, or it has come to its end meanwhile
                    return future.result()
                while_waiting()

    def idle(self, timeout: float) -> bool:
        """Whether no call is running, waiting for its end up to ``timeout`` seconds."""
        if self._running is None:
            return True
        try:
            self._running.exception(timeout)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """End the thread after the call that is running."""
        self._jobs.put(None)
