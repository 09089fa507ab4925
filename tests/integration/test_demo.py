"""``cdc-relay demo``: the account is right, and nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable

from confluent_kafka.admin import AdminClient

from tests.support.harness import Harness
from tests.support.sql import Database


def leftovers(shop: Harness) -> tuple[list[str], list[str]]:
    topics = AdminClient({"bootstrap.servers": shop.kafka, "log_level": 4}).list_topics(timeout=15)
    found = [name for name in topics.topics if name.startswith("cdc-relay-demo-")]
    tables = [name for (name,) in shop.database.sql("SHOW TABLES") if "demo" in name]
    return found, tables


def test_it_shows_that_nothing_is_lost(
    database: Database, harness: Callable[[Database], Harness]
) -> None:
    shop = harness(database)
    process = shop.run("demo", "--orders", "200", "--json", timeout=180)
    assert process.wait() == 0, process.text()
    account = json.loads(process.stdout)
    assert (account["committed"], account["arrived"], account["rolled_back"]) == (200, 200, 20)
    assert not any(account[name] for name in ("missing", "duplicates", "out_of_order", "exit_code"))
    assert leftovers(shop)[1] == []
    shop.until(lambda: leftovers(shop)[0] == [])


def test_a_relay_that_may_not_read(mysql: Database, harness: Callable[[Database], Harness]) -> None:
    """Its reason is given, and the tables are taken away all the same."""
    shop = harness(mysql)
    with mysql.user("ALL ON {schema}.*") as user:
        process = shop.run("demo", "--orders", "20", DATABASE_URL=user.text, timeout=180)
    assert process.wait() == 3
    assert "error: the relay ended with 3: " in process.text()
    assert "REPLICATION" in process.text()
    assert leftovers(shop)[1] == []
    shop.until(lambda: leftovers(shop)[0] == [])
