"""How long a replica is waited for that has not executed what lies before the checkpoint."""

from __future__ import annotations

import pytest

from cdc_relay import catchup
from cdc_relay.catchup import CATCH_UP_S, CatchUp
from cdc_relay.position import Position

OLD, NEW = (f"00000000-0000-0000-0000-00000000000{n}" for n in (1, 2))
CHECKPOINT = Position("mysql", OLD, "binlog.000001", 500, f"{OLD}:1-50")


def end(executed: int) -> Position:
    return Position("mysql", NEW, "binlog.000007", 4, f"{OLD}:1-{executed},{NEW}:1-2")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [1000.0]
    monkeypatch.setattr(catchup.time, "monotonic", lambda: clock[0])
    return clock


def test_it_is_waited_for_while_it_gets_on(now: list[float]) -> None:
    replica = CatchUp()
    for executed in (20, 21, 30, 49):
        said = replica.waits(CHECKPOINT, end(executed))
        assert NEW in said
        assert f"has not executed {50 - executed} of" in said
        now[0] += CATCH_UP_S - 1
    assert replica.waits(CHECKPOINT, end(50)) == ""


def test_where_nothing_gets_on_it_is_judged(now: list[float]) -> None:
    """The missing transactions died with the old server: rows wait so long, and no longer."""
    replica = CatchUp()
    assert replica.waits(CHECKPOINT, end(40))
    now[0] += CATCH_UP_S / 2
    assert replica.waits(CHECKPOINT, end(40))
    now[0] += CATCH_UP_S / 2
    assert replica.waits(CHECKPOINT, end(40)) == ""
    assert replica.waits(CHECKPOINT, end(40)) == ""


def test_the_next_failover_is_waited_for_anew(now: list[float]) -> None:
    replica = CatchUp()
    assert replica.waits(CHECKPOINT, end(40))
    assert replica.waits(CHECKPOINT, end(50)) == ""
    now[0] += 10 * CATCH_UP_S
    assert replica.waits(CHECKPOINT, end(45))
