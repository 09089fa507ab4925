"""How fast housekeeping goes: at most half of the time, and not while others suffer from it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import structlog
from sqlalchemy import Engine, exc

from cdc_relay.database import connected
from cdc_relay.errors import ConfigError, SourceError

log: Any = structlog.get_logger(__name__)

_SHORTEST_S: Final = 0.01
_LONGEST_REST_S: Final = 1.0
_LOOK_S: Final = 0.25
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0
# So many sessions may wait at any time on a busy server.
_MOST_WAITS: Final = 4
# A server on which sessions always wait would never be cleaned: one batch after this time.
_PATIENCE_S: Final = 5.0
_SAY_S: Final = 10.0

_WAITS: Final = (
    "Innodb_row_lock_current_waits",
    # Sessions that wait for a semi-synchronous replica to acknowledge.
    "Rpl_semi_sync_source_wait_sessions",
    "Rpl_semi_sync_master_wait_sessions",
)
_LAG: Final = ("Seconds_Behind_Source", "Seconds_Behind_Master")
_SYNTAX_ERROR: Final = 1064


class Pace:
    """Rests between batches.

    After a batch it rests as long as the batch took. It pauses while more than a few sessions wait
    for a row lock or for a semi-synchronous replica, for five seconds at most, then lets one batch
    through; and for as long as one of ``replicas`` is more than ``max_lag_s`` seconds behind, or
    does not tell. One thread; ``stop`` ends every rest.
    """

    def __init__(
        self, pool: Engine, stop: threading.Event, replicas: Sequence[Engine], max_lag_s: float
    ) -> None:
        """Asks each replica once. Raises ``SourceError`` where one cannot be asked, and
        ``ConfigError`` where it is no replica."""
        self._pool = pool
        self._stop = stop
        self._replicas = replicas
        self._max_lag_s = max_lag_s
        self._looked = 0.0
        self.paused_s = 0.0
        for replica in replicas:
            if not _channels(replica):
                raise ConfigError(f"{_address(replica)} is not a replica: it follows no server")

    def rest(self, took_s: float) -> None:
        """Rest after a batch that took so long."""
        self._stop.wait(min(max(took_s, _SHORTEST_S), _LONGEST_REST_S))
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        began, pause, said = now, _FIRST_PAUSE_S, now
        while not self._stop.is_set():
            reason = self._lagging()
            if not reason and time.monotonic() - began < _PATIENCE_S:
                reason = self._waiting()
            if not reason:
                break
            if pause == _FIRST_PAUSE_S or time.monotonic() - said > _SAY_S:
                said = time.monotonic()
                log.info("pausing", reason=reason)
            self._stop.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        self._looked = time.monotonic()
        if pause > _FIRST_PAUSE_S:
            self.paused_s += self._looked - began

    def _waiting(self) -> str:
        with connected(self._pool) as connection:
            found = connection.exec_driver_sql(
                "SHOW GLOBAL STATUS WHERE Variable_name IN %s", (list(_WAITS),)
            ).all()
        for name, value in found:
            if int(value) > _MOST_WAITS:
                return f"{name} is {value}"
        return ""

    def _lagging(self) -> str:
        for replica in self._replicas:
            try:
                channels = _channels(replica)
            except SourceError as error:
                return str(error)
            for lag_s in channels:
                if lag_s is None:
                    return f"replication on {_address(replica)} does not run"
                if lag_s > self._max_lag_s:
                    return f"replica {_address(replica)} is {lag_s} s behind"
        return ""


def _channels(replica: Engine) -> list[int | None]:
    """Seconds that each channel of a replica is behind; None where it does not run.

    MySQL manual, "SHOW REPLICA STATUS Statement" (SHOW SLAVE STATUS before 8.0.22); both needs
    REPLICATION CLIENT, MariaDB SLAVE MONITOR.
    """
    with connected(replica) as connection:
        try:
            rows = connection.exec_driver_sql("SHOW REPLICA STATUS").mappings().all()
        except exc.DBAPIError as error:
            if error.orig is None or error.orig.args[:1] != (_SYNTAX_ERROR,):
                raise
            rows = connection.exec_driver_sql("SHOW SLAVE STATUS").mappings().all()
    lags = [next((row[name] for name in _LAG if name in row), None) for row in rows]
    return [None if lag is None else int(lag) for lag in lags]


def _address(replica: Engine) -> str:
    return f"{replica.url.host}:{replica.url.port or 3306}"
