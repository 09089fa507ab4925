"""A short piece of ``make chaos``: seeded faults under load, then the account."""

from __future__ import annotations

from pathlib import Path

import pytest

from dev.database import Database as Server
from tests.chaos.plan import make
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
