"""The source for databases that grant no replication: the table itself.

There is no log and no position. The relay walks over the pending rows from the lowest id, again and
again (``Relay``), so that a row which was committed late is found whatever its id.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from cdc_relay.binlog.stream import Batch
from cdc_relay.position import NOWHERE, Position


class PollingSource:
    """A source without a stream."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def batches(self, start: Position) -> Iterator[Batch]:
        """Nothing, until ``stop``."""
        self._stopped.wait()
        return iter(())

    def stop(self) -> None:
        """Make ``batches`` return."""
        self._stopped.set()

    def current(self) -> Position:
        """Nowhere."""
        return NOWHERE

    anchor = current

    def waits(self, position: Position, end: Position) -> str:
        """Nothing: there is no position to judge."""
        return ""
