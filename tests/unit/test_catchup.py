"""How long a replica is waited for that has not executed what lies before the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cdc_relay import catchup
from cdc_relay.catchup import CATCH_UP_S, CatchUp
from cdc_relay.config import load
from cdc_relay.kafka.checkpoints import Checkpoint
from cdc_relay.position import Position
from fallback import coordination
from fallback.coordination import WithRelay

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


class Replica:
    """A store on a server that gets on with each look."""

    name = "shop.outbox_event"

    def __init__(self, *executed: int) -> None:
        self.executed = list(executed)

    def position(self) -> Position:
        return end(self.executed.pop(0))


def coordinated(store: Replica) -> WithRelay:
    settings = load(environ={}, flags={"kafka_bootstrap": "127.0.0.1:1", "relay_wait": "0s"})
    replica: Any = store
    return WithRelay(settings, replica, lambda: False)


def test_a_pass_in_place_of_a_dead_relay_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the dead one's marks are made up for: their rows may not be there."""
    monkeypatch.setattr(coordination, "_LOOK_S", 0.0)
    store = Replica(40, 45, 50)
    coordinated(store)._wait_for_replica(Checkpoint(CHECKPOINT))
    assert store.executed == []
    # No position, no look: a relay that polls has no grant for it.
    coordinated(store)._wait_for_replica(Checkpoint(replace(CHECKPOINT, gtids=None)))


@pytest.mark.parametrize(("executed", "sends"), [(40, False), (50, True)])
def test_a_pass_beside_a_living_relay_leaves_the_rows_to_it(
    executed: int, sends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is pending on a replica that is behind may have been sent and marked long ago."""
    last = Checkpoint(CHECKPOINT)
    monkeypatch.setattr(coordination.checkpoints, "read_last", lambda *_: last)
    replica_end = replace(end(executed), gtids=f"{OLD}:1-{executed}")
    beside = coordinated(Replica())
    assert (beside._passed(replica_end) is last) is sends
    assert beside.why_left == ("" if sends else "the server is behind the relay")
