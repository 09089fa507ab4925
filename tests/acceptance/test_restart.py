"""Clean stops and starts, outages of the database, and what the compensator finds afterwards.

Each server kind in turn: MySQL with no binlog option at all (positions are file and offset),
MySQL with GTIDs, MariaDB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cdc_relay.kafka.checkpoints import read_last
from cdc_relay.position import Position
from dev.server import Server
from tests.support.harness import Harness
from tests.support.load import Load, account
from tests.support.sql import INSERT, Database, row

MakeHarness = Callable[..., Harness]


@pytest.fixture
def own_shop(own_server: Server, harness: MakeHarness) -> Iterator[Harness]:
    """A shop on a server that the test may restart."""
    with Database.create(own_server.url()) as database:  # type: ignore[attr-defined]
        yield harness(database)


def ids(shop: Harness) -> list[str]:
    return [message.event_id for message in shop.messages()]


def checkpoint_position(shop: Harness) -> Position:
    last = shop.checkpoint()
    assert last is not None
    return last.position


# --- clean stops ---------------------------------------------------------------------------------


def test_a_restart_sends_nothing_again_and_loses_nothing(own_shop: Harness) -> None:
    shop = own_shop
    expected = []
    by_gtid = shop.database.is_mariadb or shop.database.sql("SELECT @@gtid_mode")[0][0] == "ON"
    for turn in range(3):
        if turn:  # rows of the time between
            expected += [shop.ins(f"k{n}", {"turn": turn}) for n in range(20)]
        relay = shop.relay()
        expected += [shop.ins(f"k{n}", {"turn": turn}) for n in range(20)]
        shop.wait_sent(len(expected))
        assert relay.terminate() == 0

        last = read_last(shop.settings(), settled=True)
        assert last is not None
        assert not last.owed
        assert not last.closed
        assert (last.position.gtids is not None) == by_gtid
        assert "error" not in relay.text()
        [stopped] = relay.logged("stopped")
        # Also a count of what was read again: nothing.
        assert stopped["received"] == stopped["marked"] == (40 if turn else 20)
        assert ids(shop) == expected
        assert shop.count(1) == len(expected)


def test_a_stop_under_load_neither_loses_nor_doubles(shop: Harness) -> None:
    shop.create_topic(partitions=12)
    relay = shop.relay()
    with Load(shop, [f"k{n}" for n in range(30)], pause=0.002, seed=3) as load:
        for number in range(2):
            sent = shop.count(1)
            shop.until(lambda sent=sent: shop.count(1) > sent + 50)  # type: ignore[misc]
            assert relay.terminate() == 0
            # A commit is certain before its marker is in the topic, so before readers see it.
            last = read_last(shop.settings(), settled=True)
            assert last is not None
            assert not last.owed, f"stop {number}"
            relay = shop.relay()
        load.stop()
    shop.wait_all_sent()
    assert relay.terminate() == 0

    found = account(shop.database, shop.table, "order", shop.messages())
    assert found.whole, found
    assert found.duplicates == 0, found
    assert found.committed > 200


def test_until_current_drains_what_is_there_and_exits(own_shop: Harness) -> None:
    shop = own_shop
    # Nothing to do is done at once; it leaves a position to go on from.
    assert shop.run("start", "--until-current").wait() == 0
    expected = []
    with shop.database.connect() as connection, connection.cursor() as cursor:
        for turn in range(200):
            values = [row(f"k{n}", {"turn": turn}) for n in range(5)]
            cursor.executemany(INSERT.format(table=shop.table), values)
            connection.commit()
            expected += [str(one[0]) for one in values]
    process = shop.run("start", "--until-current")
    assert process.wait() == 0, process.text()
    assert ids(shop) == expected
    assert shop.count(1) == len(expected)
    assert shop.run("start", "--until-current").wait() == 0
    assert len(ids(shop)) == len(expected)


def test_a_quiet_table_in_a_busy_database_keeps_its_checkpoint_young(shop: Harness) -> None:
    shop.database.sql("CREATE TABLE noise (id INT PRIMARY KEY AUTO_INCREMENT, text VARCHAR(99))")
    relay = shop.relay()
    shop.until(shop.checkpoint)
    before = checkpoint_position(shop)

    def moved() -> bool:
        shop.database.sql("INSERT INTO noise (text) VALUES (REPEAT('x', 99))")
        position = checkpoint_position(shop)
        return (position.file, position.offset) > (before.file, before.offset)

    shop.until(moved)
    assert relay.terminate() == 0
    assert ids(shop) == []


# --- outages of the database ---------------------------------------------------------------------


def test_the_relay_outlives_its_database(own_server: Server, own_shop: Harness) -> None:
    shop, database = own_shop, own_shop.database
    keys = [f"k{n}" for n in range(10)]
    relay = shop.relay()
    with Load(shop, keys, pause=0.005) as load:

        def goes_on() -> None:
            # Rows of the new life arrive, so the relay is connected again.
            database.close()
            sent = shop.count(1)
            shop.until(lambda: shop.count(1) > sent + 20)
            database.close()

        goes_on()
        own_server.stop()
        own_server.start()
        goes_on()
        own_server.kill()
        own_server.start()
        goes_on()
        # Only the dump thread dies, the way an operator would do it.
        # (The marks of the old life alone may have been what arrived: wait for the dump.)
        dumps = "SELECT id FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'"
        shop.until(lambda: len(database.sql(dumps)) == 1)
        database.sql(f"KILL {database.sql(dumps)[0][0]}")
        goes_on()
        load.stop()
    shop.wait_all_sent()
    assert relay.running
    assert relay.terminate() == 0

    found = account(database, shop.table, "order", shop.messages())
    assert found.whole, found
    assert "Traceback" not in relay.text()
    # A connection begins behind the last transaction that was read: the process goes on, and so
    # do its positions.
    assert found.duplicates == 0, found


# --- the compensator -----------------------------------------------------------------------------


def test_the_compensator_delivers_what_an_outage_left(shop: Harness) -> None:
    relay = shop.relay()
    first = [shop.ins("a", {"n": n}) for n in range(3)]
    shop.wait_sent(3)
    assert relay.terminate() == 0

    missed = [shop.ins(key, {"n": n}) for n in range(30) for key in "abc"]
    summary = shop.compensate("--batch", "7")
    assert summary["sent"] == summary["marked"] == len(missed), summary
    assert (summary["left"], summary["exit_code"]) == (0, 0), summary
    assert ids(shop) == first + missed
    assert shop.count(1) == len(first) + len(missed)
    # A second pass finds nothing.
    assert shop.compensate()["sent"] == 0
    assert len(ids(shop)) == len(first) + len(missed)

    # The relay goes on where it was. It may send those rows again (at least once), it may not
    # lose or reorder one.
    relay = shop.relay()
    last = shop.ins("a", {"n": 99})
    shop.until(lambda: last in ids(shop))
    assert relay.terminate() == 0
    assert list(dict.fromkeys(ids(shop))) == [*first, *missed, last]
    assert shop.count(0) == 0


def test_the_compensator_delivers_rows_that_the_binlog_never_held(shop: Harness) -> None:
    relay = shop.relay()
    streamed = [shop.ins("a", {"n": 1})]
    shop.wait_sent(1)
    hidden = []
    with shop.database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET sql_log_bin = 0")
        for number in range(10):
            values = row("b", {"n": number}, headers={"traceparent": "00-x"})
            cursor.execute(INSERT.format(table=shop.table), values)
            hidden.append(str(values[0]))
        connection.commit()
    streamed.append(shop.ins("a", {"n": 2}))
    shop.wait_sent(2)
    assert shop.count(0) == 10
    # They are young: a pass with its usual age leaves them alone.
    process = shop.run("compensate", "--older-than", "10m")
    assert process.wait() == 0
    assert shop.count(0) == 10

    summary = shop.compensate()
    assert summary["sent"] == summary["marked"] == 10, summary
    streamed.append(shop.ins("a", {"n": 3}))
    shop.wait_sent(13)
    assert relay.terminate() == 0
    assert ids(shop) == [*streamed[:2], *hidden, streamed[2]]
    assert shop.compensate()["sent"] == 0
