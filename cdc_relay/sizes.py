"""Which records may be too large for their topic, judged by those that were.

A refused record costs all that travel in its transaction: it is given up, and who is at fault is
found by halves. So once a topic has refused a record for its size, what is about as large goes
alone, and the others do not wait for it.
"""

from __future__ import annotations

from typing import Any, Final

import structlog

from cdc_relay.router import Record

log: Any = structlog.get_logger(__name__)

# Compression tells: of what is half as large as a refused record some may be refused as well.
_SHARE: Final = 2


class Sizes:
    """Of one term: it begins without suspicion. One thread."""

    def __init__(self, *, table_keeps: bool = True) -> None:
        """``table_keeps``: whether what goes alone can wait in the table; else nothing does."""
        self._table_keeps = table_keeps
        self._limits: dict[str, int] = {}

    def refused(self, record: Record) -> None:
        """The topic has refused this record for its size."""
        if not self._table_keeps:
            return
        size = _size(record)
        if record.topic not in self._limits:
            log.warning(
                "a record is too large for its topic: such as are half as large go alone",
                topic=record.topic,
                bytes=size,
            )
        limit = size // _SHARE
        self._limits[record.topic] = min(limit, self._limits.get(record.topic, limit))

    def taken(self, record: Record) -> None:
        """The topic has taken this record."""
        if self.is_suspect(record):
            self._limits[record.topic] = _size(record) + 1

    def is_suspect(self, record: Record) -> bool:
        """Whether the record has to go alone."""
        limit = self._limits.get(record.topic) if self._limits else None
        return limit is not None and _size(record) >= limit


def _size(record: Record) -> int:
    headers = sum(len(name) + len(value or b"") for name, value in record.headers)
    return len(record.key) + len(record.value or b"") + headers
