"""Terms of an owner: where they go on, and when the process ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cdc_relay import owner as owner_module
from cdc_relay.config import load
from cdc_relay.errors import PositionLostError, SourceUnavailableError
from cdc_relay.kafka.checkpoints import Checkpoint
from cdc_relay.owner import Owner
from cdc_relay.position import NOWHERE, Position

OLD, NEW = (f"00000000-0000-0000-0000-00000000000{n}" for n in (1, 2))


class World:
    """Brokers, a server and relays that do as they are told; what they ask is noted."""

    def __init__(self) -> None:
        self.end = Position("mysql", OLD, "binlog.000001", 4, f"{OLD}:1-10")
        self.checkpoint: Checkpoint | None = None
        self.relays: list[Callable[[Any], None]] = []
        self.looks: list[Callable[[], None]] = []
        self.starts: list[Checkpoint] = []
        self.words: list[str] = []

    # the source

    def current(self) -> Position:
        if self.looks:
            self.looks.pop(0)()
        return self.end

    anchor = current

    def waits(self, position: Position, end: Position) -> str:
        return "it is behind" if position.missing(end) else ""

    # membership and sink

    topic_gone = False
    owned = frozenset({0})

    def poll(self, _timeout: float) -> None:
        self.words.append(self.owner.vitals.waiting)

    def confirmed(self, _shard: int) -> bool:
        return True

    def close(self, _timeout: float = 0) -> None:
        pass

    def stop(self) -> None:
        pass

    owner: Owner


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()

    class FakeRelay:
        def __init__(self, *arguments: Any) -> None:
            self.vitals = arguments[7]

        def run(self, start: Checkpoint, _until: object) -> None:
            world.starts.append(start)
            self.vitals.position = start.position  # the first checkpoint of a term
            world.checkpoint = start
            world.relays.pop(0)(self.vitals)

    monkeypatch.setattr(owner_module.checkpoints, "ensure_topic", lambda _: None)
    monkeypatch.setattr(
        owner_module.checkpoints, "read_last", lambda *_, settled: settled and world.checkpoint
    )
    monkeypatch.setattr(owner_module, "Membership", lambda _: world)
    monkeypatch.setattr(owner_module, "TransactionalSink", lambda *_: world)
    monkeypatch.setattr(owner_module, "Relay", FakeRelay)
    settings = load(environ={}, flags={"kafka_bootstrap": "127.0.0.1:1"})
    nothing: Any = None
    store: Any = type("Store", (), {"name": "shop.outbox_event"})()
    source: Any = world
    world.owner = Owner(settings, lambda: source, nothing, store)
    return world


def lose(_vitals: Any) -> None:
    raise PositionLostError("gone")


def read_on_and_lose(vitals: Any) -> None:
    vitals.position = replace(vitals.position, offset=vitals.position.offset + 100)
    raise PositionLostError("gone")


def test_anchors_that_are_refused_one_behind_the_other_end_the_process(world: World) -> None:
    world.relays = [lose] * 10
    with pytest.raises(PositionLostError):
        world.owner.run()
    assert len(world.starts) == 4


def test_logs_that_begin_anew_again_and_again_do_not(world: World) -> None:
    """As often as they like, in the life of one process: the relay went on in between."""
    world.relays = [read_on_and_lose] * 9 + [lambda _: world.owner.stop()]
    world.owner.run()
    assert len(world.starts) == 10
    assert [bool(start.sweeping) for start in world.starts] == [True] * 10


def test_a_replica_that_took_over_is_waited_for(world: World) -> None:
    """It goes on from the checkpoint, without an anchor, when the replica has come to it."""
    world.checkpoint = Checkpoint(world.end)
    behind = replace(world.end, server=NEW, gtids=f"{OLD}:1-8,{NEW}:1")
    world.end = behind

    def catch_up() -> None:
        world.end = replace(behind, gtids=f"{OLD}:1-10,{NEW}:1")

    world.looks = [lambda: None, lambda: None, catch_up]
    world.relays = [lambda _: world.owner.stop()]
    world.owner.run()
    [start] = world.starts
    assert start.position == world.checkpoint.position
    assert not start.sweeping
    assert world.words.count("for the database: it is behind") == 2  # in the group all the while
    assert world.owner.vitals.waiting == ""


def test_a_term_whose_replica_is_behind_ends_and_no_anchor_follows(world: World) -> None:
    def behind(_vitals: Any) -> None:
        raise SourceUnavailableError("behind")

    world.checkpoint = Checkpoint(world.end)
    world.relays = [behind, lambda _: world.owner.stop()]
    world.owner.run()
    assert [start.sweeping for start in world.starts] == [False, False]


def test_the_words_for_a_server_that_never_comes_to_it(world: World) -> None:
    world.checkpoint = Checkpoint(world.end)
    world.end = replace(world.end, server=NEW, gtids=f"{NEW}:1")
    world.relays = [lambda _: world.owner.stop()]
    world.owner.run()
    [start] = world.starts
    assert "another one" in start.anchor
    assert "never executed" in start.anchor
    assert "begun anew" not in start.anchor


@pytest.mark.parametrize(
    ("last", "done"),
    [
        (None, False),
        (Checkpoint(Position("mysql", OLD, "binlog.000001", 4, f"{OLD}:1-9")), False),
        (Checkpoint(Position("mysql", OLD, "binlog.000001", 4, f"{OLD}:1-10")), True),
        (Checkpoint(Position("mysql", OLD, "b.000001", 4, f"{OLD}:1-10"), sweeping=True), False),
        (Checkpoint(NOWHERE, source="polling"), False),
    ],
)
def test_whether_the_relay_at_work_is_done(
    world: World, monkeypatch: pytest.MonkeyPatch, last: Checkpoint | None, done: bool
) -> None:
    """One that polls does not tell."""
    monkeypatch.setattr(owner_module.checkpoints, "read_last", lambda *_: last)
    if last is not None and last.source == "polling":
        world.end = NOWHERE
    assert world.owner._is_done_elsewhere() is done
