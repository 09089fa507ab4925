"""A short piece of ``make chaos``: seeded faults under load, then the account."""

from __future__ import annotations

from pathlib import Path

import pytest

from dev.database import Database as Server
from tests.chaos.plan import Fault, Plan, make
from tests.chaos.run import Run
from tests.chaos.stage import Stage
from tests.support.brokers import ProxiedKafka


def test_a_seed_is_always_the_same_plan() -> None:
    for seed in range(1, 30):
        assert make(seed) == make(seed)
    assert len({make(seed) for seed in range(1, 30)}) == 29


@pytest.mark.parametrize(("seed", "name"), [(5, "own_mysql"), (4, "own_mariadb")])
def test_nothing_is_lost_invented_or_reordered(
    seed: int, name: str, request: pytest.FixtureRequest, quick_kafka: ProxiedKafka, tmp_path: Path
) -> None:
    """Seed 5: exactly once, two relays. Seed 4: at least once, on MariaDB."""
    plan = make(seed)
    server: Server = request.getfixturevalue(name)
    with Stage({plan.server: lambda: server}, lambda: quick_kafka) as stage:
        account = Run(plan, stage, tmp_path).play()
    schedule = (tmp_path / "schedule.log").read_text()
    assert account.events > 300, schedule
    assert not account.faults, schedule


@pytest.mark.parametrize("mark", ["delete", "none"])
def test_kill_9_whatever_the_marks(
    mark: str, own_mysql: Server, quick_kafka: ProxiedKafka, tmp_path: Path
) -> None:
    times = enumerate((1.5, 2.2, 4.0, 6.5), 1)
    plan = Plan(
        seed=0,
        server="mysql",
        delivery="exactly_once",
        mark=mark,
        relays=1,
        on_dead="block",
        max_tries=10,
        batch_rows=500,
        queue_rows=2000,
        session_timeout=1.0,
        hidden=False,
        unsendable=False,
        narrow=False,
        late_topic=0.0,
        faults=tuple(Fault(number, "relay-kill", at, 0.1) for number, at in times),
        seconds=7.0,
    )
    with Stage({"mysql": lambda: own_mysql}, lambda: quick_kafka) as stage:
        account = Run(plan, stage, tmp_path).play()
    schedule = (tmp_path / "schedule.log").read_text()
    assert account.events > 200, schedule
    assert not account.faults, schedule
