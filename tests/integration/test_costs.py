"""What carrying an event costs, in things that are counted: requests, transactions, statements,
bytes. A change that makes any of them grow shows here on any machine, however busy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.brokers import ProxiedKafka
from tests.support.harness import Harness
from tests.support.requests import Requests, watching
from tests.support.sql import Database, insert, row

GRANTS = (
    "REPLICATION SLAVE, REPLICATION CLIENT ON *.*",
    "SELECT, UPDATE, DELETE ON {schema}.*",
)


class Side:
    """A relay whose requests and statements are counted."""

    def __init__(self, shop: Harness, user: Database, requests: Requests) -> None:
        self.shop = shop
        self.user = user
        self.requests = requests

    def statements(self) -> dict[str, int]:
        """Statements of the relay's user so far, by kind. What a statement did is seen before it is
        counted, which is when it has ended; so this asks until nothing is added any more."""
        found = [self._counted()]

        def stands_still() -> bool:
            time.sleep(0.3)
            found.append(self._counted())
            return found[-1] == found[-2]

        self.shop.until(stands_still)
        return found[-1]

    def _counted(self) -> dict[str, int]:
        rows = self.shop.database.sql(
            "SELECT event_name, count_star FROM"
            " performance_schema.events_statements_summary_by_account_by_event_name"
            " WHERE user = %s AND count_star > 0",
            (self.user.url.username,),
        )
        return {str(name).rpartition("/")[2]: int(count) for name, count in rows}

    def fill(self, transactions: int, rows: int) -> None:
        """Commit so many transactions of so many rows."""
        for number in range(transactions):
            made = [row(f"k{n % 50}", {"n": number}) for n in range(rows)]
            self.shop.database.sql(*insert("outbox_event", made))


@pytest.fixture
def side(mysql: Database, quick_kafka: ProxiedKafka, tmp_path: Path) -> Iterator[Side]:
    with (
        mysql.user(*GRANTS) as user,
        watching(quick_kafka.proxy) as requests,
        Harness(
            mysql,
            quick_kafka.bootstrap,
            tmp_path,
            {
                "DATABASE_URL": user.text,
                "KAFKA_BOOTSTRAP": quick_kafka.proxied,
                "CHECKPOINT_INTERVAL": "60s",
            },
        ) as shop,
    ):
        shop.create_topic(partitions=6)
        yield Side(shop, user, requests)


def used(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in now.items() if count > 0}


def test_a_backlog(side: Side) -> None:
    """10,000 rows in 50 transactions, with a start and an end of the relay. As few groups as the
    rows come in, so the bounds leave room for a server that is slow to send."""
    shop = side.shop
    assert shop.run("start", "--until-current").wait() == 0
    before, asked = side.statements(), side.requests.copy()
    side.fill(50, 200)
    assert shop.run("start", "--until-current").wait() == 0
    assert shop.count(1) == 10_000
    statements = used(side.statements(), before)
    requests = side.requests.counts - asked.counts
    assert requests["InitProducerId"] == 3, requests  # the shard's two, the pass's to fence it
    assert 5 <= requests["EndTxn"] <= 40, requests  # seen: 11
    assert requests["TxnOffsetCommit"] == requests["EndTxn"], requests
    assert requests["Produce"] <= 300, requests  # seen: 65
    assert side.requests.bytes - asked.bytes < 800_000  # seen: 622,472
    assert 5 <= statements["update"] <= 40, statements  # seen: 9
    assert statements["select"] <= 60, statements  # seen: 22
    assert statements.get("rollback", 0) == 0, statements
    assert sum(statements.values()) <= 200, statements  # seen: 91


def test_one_event_after_the_other(side: Side) -> None:
    """Each waits until the one before is marked: a transaction of two records, and a mark."""
    shop = side.shop
    relay = shop.spawn("start")
    for number in range(40):
        if number == 20:
            before, asked = side.statements(), side.requests.copy()
        shop.ins("a", {"n": number})
        shop.wait_all_sent()
    requests = side.requests.counts - asked.counts
    assert requests["TxnOffsetCommit"] == requests["EndTxn"] == 20, requests
    assert requests["Produce"] == 40, requests
    # Twice where the second record comes when the first one's partition was asked for already, or
    # where markers of the last transaction but one are still being written.
    assert 20 <= requests["AddPartitionsToTxn"] <= 40, requests
    statements = used(side.statements(), before)
    assert statements["update"] == statements["Ping"] == 20, statements
    assert sum(statements.values()) <= 41, statements
    assert relay.terminate() == 0
