"""Where the relay anchors: what is written and not visible at that moment is neither lost nor
overtaken."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from dev.server import Server
from tests.support.harness import Harness, Process
from tests.support.sql import INSERT, Database, row

_Make = Callable[[Database], Harness]


def _semi_sync(database: Database, *, on: bool) -> None:
    """Let every transaction wait, written to the binlog, for a replica that there is not."""
    if database.is_mariadb:
        name = "rpl_semi_sync_master"
    else:
        name = "rpl_semi_sync_source"
        if not database.sql(f"SHOW VARIABLES LIKE '{name}_enabled'"):
            database.sql(f"INSTALL PLUGIN {name} SONAME 'semisync_source.so'")
    if on:
        database.sql(f"SET GLOBAL {name}_wait_point = 'AFTER_SYNC'")
        database.sql(f"SET GLOBAL {name}_timeout = 120000")
    database.sql(f"SET GLOBAL {name}_enabled = {int(on)}")


def _written(shop: Harness) -> int:
    """Rows that are written, visible or not."""
    with shop.database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
        cursor.execute(f"SELECT COUNT(*) FROM {shop.table}")
        [(rows,)] = cursor.fetchall()
    return int(rows)


@pytest.fixture
def shop(own_server: Server, harness: _Make) -> Iterator[Harness]:
    with Database.create(own_server.url()) as database:
        made = harness(database)
        made.create_topic()
        yield made


def test_a_transaction_that_waits_for_its_replica(shop: Harness) -> None:
    """It stands in the log, before the anchor, and no SELECT sees it."""
    shop.ins("a", 1)
    values = row("a", 2)
    _semi_sync(shop.database, on=True)
    try:
        with shop.database.connect(autocommit=True) as connection:
            writer = threading.Thread(
                target=lambda: connection.cursor().execute(INSERT.format(table=shop.table), values)
            )
            writer.start()
            shop.until(lambda: _written(shop) == 2)
            relay = shop.relay()
            assert shop.database.sql(f"SELECT COUNT(*) FROM {shop.table}") == ((1,),)
            _semi_sync(shop.database, on=False)
            writer.join(30)
            assert not writer.is_alive()
    finally:
        _semi_sync(shop.database, on=False)
    _goes_on_in_order(shop, relay)


def test_a_transaction_that_was_prepared_before(shop: Harness) -> None:
    """Its rows come out of the log without their prepare, after a restart as well."""
    with shop.database.connect(autocommit=True) as connection, connection.cursor() as cursor:
        cursor.execute("XA START 'before'")
        for number in (1, 2):
            cursor.execute(INSERT.format(table=shop.table), row("a", number))
        cursor.execute("XA END 'before'")
        cursor.execute("XA PREPARE 'before'")
        shop.relay().kill()
        relay = shop.relay()
        cursor.execute("XA COMMIT 'before'")
    _goes_on_in_order(shop, relay)


def _goes_on_in_order(shop: Harness, relay: Process) -> None:
    """A later event of the aggregate that waited comes behind its two, one of another at once."""
    shop.ins("a", 3)
    shop.ins("b", 1)
    shop.wait_sent(4)
    assert relay.terminate() == 0
    messages = shop.messages()
    assert [message.json for message in messages if message.key == "a"] == [1, 2, 3]
    assert len(messages) == 4
