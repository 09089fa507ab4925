"""What is closed, without a table."""

from __future__ import annotations

from typing import Any

import pytest

from cdc_relay.kafka.checkpoints import Checkpoint
from cdc_relay.outbox import OutboxEvent
from cdc_relay.parking import Parking
from cdc_relay.position import NOWHERE


@pytest.mark.parametrize("letter", ["k", "\U0001f600"])
def test_a_checkpoint_has_room_for_whatever_is_closed(letter: str) -> None:
    """Kafka takes a record of a megabyte by default, and owed marks stand in it as well."""
    store: Any = None  # is not asked
    parking = Parking(store, "block")
    kinds = [f"type-{number}" for number in range(10)]
    keys = [f"{number:05}{letter * 59}" for number in range(1500)]
    for kind in kinds:
        for key in keys:
            parking.close(kind, key)
    assert len(Checkpoint(NOWHERE, closed=parking.closed()).encode()) < 300_000
    for kind in kinds:
        for key in (keys[0], keys[-1]):
            assert parking.holds(OutboxEvent(1, "e", kind, key, "", b"", None, 0))
