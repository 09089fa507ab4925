"""A server that took over from another one and still applies what that one had committed.

Failovers do not wait for it (a virtual address that moves, MySQL's group replication with
consistency EVENTUAL). Until it is done the table is older than the checkpoint: rows that were sent
are not there, or not marked. Whoever judges a checkpoint by such a server waits for it first.
"""

from __future__ import annotations

import time
from typing import Final

from cdc_relay.position import Position

CATCH_UP_S: Final = 30.0
"""Without a step forward. A replica that applies gets on all the time, however far it is behind;
only a large transaction keeps it longer, and few take so long. Events wait as long where the
missing transactions died with the old server: so it is not minutes."""


class CatchUp:
    """How one position fares on the server that it is judged by. One thread at a time."""

    def __init__(self) -> None:
        self._missing = 0
        self._until = 0.0

    def waits(self, position: Position, end: Position) -> str:
        """Why ``position`` cannot be judged yet by the server whose log ends at ``end`` now, in
        words; empty where it can, and where nothing has got on for 30 s."""
        missing = position.missing(end)
        now = time.monotonic()
        if missing and (not self._missing or missing < self._missing):
            self._until = now + CATCH_UP_S
            self._missing = missing
        if not missing:
            self._missing = 0
        if not missing or now >= self._until:
            return ""
        return (
            f"server {end.server} has not executed {missing} of the transactions that lie before "
            f"the checkpoint, which is from {position.server}: a replica that is still applying?"
        )
