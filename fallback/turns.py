"""Passes on one table take turns, by the server's named locks.

Who holds ``work`` works. Who waits for it holds ``next``: so the one at work sees that somebody
waits, hands over after a slice of time, and waits in his turn. A lock ends with its connection: at
once where the process is killed, and by the server's clock after the lease where the server hears
nothing of it (a machine without power, a process that stands still). Who comes next then fences
him. No transaction is open meanwhile.
"""

from __future__ import annotations

import math
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

import structlog
from sqlalchemy import Connection, Engine

from cdc_relay.database import connected, database_errors
from cdc_relay.errors import SourceError, SourceUnavailableError

# The server ends a session that it has not heard of for so long, and its locks.
_LEASE_S: Final = 10
_LOOK_S: Final = 1.0
# A turn begins with a few tenths of a second of asking around: it has to be worth that.
_SLICE_S: Final = 2.0

log: Any = structlog.get_logger("compensator")


class Turns:
    """The turns of one pass on ``table``. One thread; it starts one of its own while it has the
    turn, which keeps the lease and looks whether somebody waits."""

    def __init__(self, engine: Engine, table: str, going_on: Callable[[], bool]) -> None:
        """``table`` is its quoted name, with schema; ``going_on`` ends a wait for the turn."""
        self._engine = engine
        self._going_on = going_on
        # Names are limited to 64 characters.
        self._work = f"cdc-relay.{zlib.crc32(table.encode()):08x}.compensator"
        self._next = f"{self._work}.next"
        self._since = self._heard = 0.0
        self._wanted = self._lost = False

    @contextmanager
    def take(self, timeout: float) -> Iterator[bool]:
        """Have the turn in the body; False where it does not come within ``timeout`` seconds. On a
        server that gives no named locks there are no turns: the last one to begin fences the
        others. Raises ``SourceUnavailableError``."""
        with ExitStack() as stack:
            connection = stack.enter_context(connected(self._engine))
            connection.detach()  # never lent to anybody else: it ends with its locks
            connection.exec_driver_sql(f"SET SESSION wait_timeout = {_LEASE_S}")
            deadline = time.monotonic() + timeout
            try:
                mine = self._lock(connection, self._next, deadline) and self._lock(
                    connection, self._work, deadline
                )
            except SourceUnavailableError:
                raise
            except SourceError as error:
                # Percona XtraDB Cluster, for one, in its strict mode.
                log.warning("the server gives no named locks: no turns", reason=str(error))
                connection.close()  # or the server does, in the middle of the body
                self._wanted = self._lost = False
                self._heard = math.inf
                mine = True
            else:
                if mine:
                    self._release(connection, self._next)
                    stack.enter_context(self._kept(connection))
            yield mine

    def over(self) -> bool:
        """Whether the turn has to be given up: another pass waits, and this one has had its time;
        or the server may have given it to another one already."""
        now = time.monotonic()
        self._lost = self._lost or now - self._heard > _LEASE_S
        return self._lost or (self._wanted and now - self._since > _SLICE_S)

    def _lock(self, connection: Connection, name: str, deadline: float) -> bool:
        while True:
            wait = max(0.0, min(1.0, deadline - time.monotonic()))
            if _ask(connection, "SELECT GET_LOCK(%s, %s)", name, wait):
                return True
            if time.monotonic() >= deadline or not self._going_on():
                return False

    def _release(self, connection: Connection, name: str) -> None:
        _ask(connection, "SELECT RELEASE_LOCK(%s)", name)

    @contextmanager
    def _kept(self, connection: Connection) -> Iterator[None]:
        """Keep the lease, and look who waits, while the body runs; give the turn up then."""
        self._since = self._heard = time.monotonic()
        self._wanted = self._lost = False
        done = threading.Event()
        keeper = threading.Thread(target=self._keep, args=(connection, done), daemon=True)
        keeper.start()
        try:
            yield
        finally:
            done.set()
            keeper.join(_LEASE_S)
            if self._lost or keeper.is_alive():
                connection.invalidate()  # a polite end would wait for a server that is gone
            else:
                with suppress(SourceError):
                    self._release(connection, self._work)

    def _keep(self, connection: Connection, done: threading.Event) -> None:
        while not done.wait(_LOOK_S):
            try:
                self._wanted = bool(_ask(connection, "SELECT IS_USED_LOCK(%s)", self._next))
                self._heard = time.monotonic()
            except SourceError as error:
                log.warning("the turn on the table is lost", reason=str(error))
                self._lost = True
                return


def _ask(connection: Connection, sql: str, *parameters: object) -> Any:
    with database_errors(connection.engine.url):
        return connection.exec_driver_sql(sql, parameters).scalar()
