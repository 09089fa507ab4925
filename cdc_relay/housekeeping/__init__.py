"""Housekeeping: what keeps the outbox table small for years. Rows that were sent go (``purge``) or
move to an archive (``archive``); a pending row never does."""

from __future__ import annotations

from cdc_relay.housekeeping.archive import Archive
from cdc_relay.housekeeping.pace import Pace
from cdc_relay.housekeeping.partitions import Partitions
from cdc_relay.housekeeping.rows import Batch, OldRows

__all__ = ["Archive", "Batch", "OldRows", "Pace", "Partitions"]
