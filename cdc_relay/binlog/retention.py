"""How long the server keeps its binlog, and which of its files is the one being written.

Facts: MySQL manual, "Binary Logging Options and Variables" (``binlog_expire_logs_seconds``,
``binlog_expire_logs_auto_purge``); MariaDB knowledge base, "Using and Maintaining the Binary Log".
A file is purged when nothing was written into it for that long, and never while it is the last one.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from cdc_relay.binlog.stream import _unavailable, inspect, open_connection
from cdc_relay.position import Position


class Retention(NamedTuple):
    """What the server says of its binlog."""

    end: Position
    """The end of the log now."""
    keeps_s: int | None
    """Seconds after which a file is purged; None where files are not purged by age."""

    def horizon_s(self, position: Position, commit_time_s: float, now_s: float) -> float | None:
        """Seconds until the file of ``position`` may be purged, at least; None where that is not
        known. ``commit_time_s`` is the time of the last commit before it (0: not known): its file
        was still being written then."""
        if self.keeps_s is None or position.server != self.end.server:
            return None
        if position.file == self.end.file:
            return float(self.keeps_s)
        if not commit_time_s:
            return None
        return max(0.0, commit_time_s + self.keeps_s - now_s)


def look(arguments: dict[str, Any], timeout: float) -> Retention:
    """Ask the server, on a connection of its own. Raises ``SourceError``."""
    with contextlib.closing(open_connection(arguments, timeout)) as connection:
        server = inspect(connection)
        with _unavailable(), connection.cursor() as cursor:
            cursor.execute(
                "SHOW GLOBAL VARIABLES WHERE variable_name IN"
                " ('binlog_expire_logs_seconds', 'binlog_expire_logs_auto_purge')"
            )
            found = {str(name): str(value) for name, value in cursor.fetchall()}
    seconds = int(float(found.get("binlog_expire_logs_seconds", "0")))
    purges = found.get("binlog_expire_logs_auto_purge", "ON") == "ON"
    return Retention(server.position, seconds if purges and seconds else None)
