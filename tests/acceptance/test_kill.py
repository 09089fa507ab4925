"""kill -9 of the relay under load, at moments that a seed draws."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from dev.kafka import Kafka
from dev.mariadb import MariaDB
from dev.mysql import MySQL
from tests.support.harness import Harness
from tests.support.load import Load, account
from tests.support.sql import Database

KILLS = 4


@pytest.mark.parametrize(
    ("name", "delivery", "seed"),
    [
        ("bare_mysql", "exactly_once", 1),
        ("own_mysql", "exactly_once", 2),
        ("own_mariadb", "exactly_once", 3),
        ("own_mysql", "at_least_once", 4),
    ],
)
def test_kill_9_under_load_loses_nothing_and_keeps_the_order(
    name: str,
    delivery: str,
    seed: int,
    request: pytest.FixtureRequest,
    quick_kafka: Kafka,
    tmp_path: Path,
) -> None:
    server: MySQL | MariaDB = request.getfixturevalue(name)
    chance = random.Random(seed)
    settings = {"DELIVERY": delivery, "SESSION_TIMEOUT": "1s", "TRANSACTION_TIMEOUT": "5s"}
    with (
        Database.create(server.url()) as database,
        Harness(database, quick_kafka.bootstrap, tmp_path, settings) as shop,
    ):
        shop.create_topic(partitions=12)
        relay = shop.relay()
        # From the first checkpoint on everything counts.
        shop.until(shop.checkpoint)
        keys = [f"k{number}" for number in range(40)]
        moments = []
        with Load(shop, keys, pause=0.003, seed=seed) as load:
            for number in range(KILLS):
                if (
                    number % 3 == 2
                ):  # before it streams: while it joins, reads its checkpoint, heals
                    moments.append(round(chance.uniform(0.1, 2.5), 3))
                else:
                    shop.until(lambda relay=relay: '"streaming"' in relay.text())  # type: ignore[misc]
                    moments.append(round(chance.uniform(0.0, 1.0), 3))
                time.sleep(moments[-1])
                relay.kill()
                relay = shop.spawn("start")
            load.stop()
        shop.wait_all_sent(60)
        assert relay.terminate() == 0, relay.text()

        found = account(database, shop.table, "order", shop.messages())
        about = f"{found}, killed after {moments} s, {found.duplicates} duplicates"
        assert found.whole, about
        assert delivery == "at_least_once" or not found.duplicates, about
        assert found.committed > 300, about
        assert shop.count(1) == found.committed, about
        last = shop.checkpoint()
        assert last is not None
        assert not last.owed, about
