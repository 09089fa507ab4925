"""Where a relay can go on: the doctor and ``position set`` say what a start would, on real servers;
and positions gain GTIDs where they are switched on later."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from sqlalchemy.engine import make_url

from cdc_relay.doctor import Finding
from cdc_relay.kafka.checkpoints import Checkpoint
from cdc_relay.owner import write_checkpoint
from cdc_relay.position import Position
from dev.mariadb import MariaDB
from dev.mysql import MySQL
from tests.support.harness import Harness
from tests.support.source import SourceUnderTest
from tests.support.sql import Database, purge_logs
from tests.support.ward import Ward

MakeHarness = Callable[..., Harness]

ANOTHER = "00000000-0000-0000-0000-000000000001"


def ward_of(shop: Harness, database: Database | None = None) -> Ward:
    return Ward(database or shop.database, shop.kafka, shop.name)


def said(ward: Ward, check: str = "position") -> Finding:
    found = ward.finding(check)
    assert found is not None
    return found


def checkpoint(shop: Harness) -> Checkpoint:
    found = shop.checkpoint()
    assert found is not None
    return found


def ids(shop: Harness) -> list[str]:
    return [message.event_id for message in shop.messages()]


class Renamed(MariaDB):
    """A replica whose binlog has a name of its own, as the one of a second machine."""

    def flags(self) -> list[str]:
        return [
            "--log-bin=second-bin",
            "--binlog-format=ROW",
            "--log-slave-updates=ON",
            "--server-id=2",
        ]


def test_a_replica_with_other_file_names(
    own_mariadb: MariaDB, tmp_path_factory: pytest.TempPathFactory, harness: MakeHarness
) -> None:
    """MariaDB resumes by GTID: the files of the server that went away are of no interest. One that
    has not applied yet what the relay has sent is waited for."""
    home = tmp_path_factory.mktemp("replica")
    with (
        Renamed(home, die_with_parent=True) as server,
        Database.create(own_mariadb.url()) as one,
        one.user("REPLICATION SLAVE ON *.*") as user,
    ):
        two = Database(one.url.set(port=server.port))
        admin = Database(make_url(server.url()).set(database="mysql"))
        admin.sql(f"CREATE DATABASE `{one.name}`")
        admin.sql("RESET MASTER")
        [(executed,)] = one.sql("SELECT @@global.gtid_binlog_pos")
        admin.sql("SET GLOBAL gtid_slave_pos = %s", (executed,))
        admin.sql(
            "CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = %s, MASTER_USER = %s,"
            " MASTER_PASSWORD = %s, MASTER_USE_GTID = slave_pos",
            (one.url.port, user.url.username, user.url.password),
        )
        admin.sql("START SLAVE")

        def caught_up() -> bool:
            return admin.sql("SELECT @@gtid_slave_pos") == one.sql("SELECT @@gtid_binlog_pos")

        shop = harness(one, MARK="none")
        relay = shop.relay()
        shop.until(caught_up)
        admin.sql("STOP SLAVE SQL_THREAD")
        expected = [shop.ins("a")]
        shop.until(lambda: ids(shop) == expected)
        assert relay.terminate() == 0
        expected.append(shop.ins("a"))
        ward = ward_of(shop, two)
        ward.set({"MARK": "none"})
        behind = said(ward)
        assert (behind.level, "still applying" in behind.text) == ("warning", True)
        shop.database = two
        relay = shop.spawn("start", MARK="none")
        shop.until(lambda: "still applying" in relay.text())
        admin.sql("START SLAVE SQL_THREAD")
        shop.until(caught_up)
        admin.sql("STOP SLAVE")
        assert said(ward).level == "ok"
        shop.until(lambda: ids(shop) == expected)
        assert relay.terminate() == 0
        assert "position lost" not in relay.text()
        two.close()
        admin.close()


@pytest.mark.parametrize(("mark", "level"), [("none", "failure"), ("update", "warning")])
def test_the_same_file_name_of_another_server(
    bare_mysql: MySQL, harness: MakeHarness, mark: str, level: str
) -> None:
    with Database.create(bare_mysql.url()) as database:
        shop = harness(database)
        assert shop.run("start", "--until-current").wait() == 0
        ward = ward_of(shop)
        ward.set({"MARK": mark})
        assert said(ward).level == "ok"
        moved = replace(checkpoint(shop).position, server=ANOTHER)
        write_checkpoint(ward.settings, Checkpoint(moved))
        lost = said(ward)
        assert (lost.level, lost.exit_code) == (level, 5 if mark == "none" else 0)
        assert f"from server {ANOTHER}" in lost.text


def test_transactions_that_the_server_never_had(own_mysql: MySQL, harness: MakeHarness) -> None:
    with Database.create(own_mysql.url()) as database:
        shop = harness(database)
        assert shop.run("start", "--until-current").wait() == 0
        ward = ward_of(shop)
        position = checkpoint(shop).position
        elsewhere = replace(position, server=ANOTHER, gtids=f"{ANOTHER}:1-7")
        write_checkpoint(ward.settings, Checkpoint(elsewhere))
        lost = said(ward)
        assert lost.level == "warning"
        assert "never executed" in lost.text


def test_a_polling_relay_has_no_position(mysql_shop: Harness) -> None:
    shop = mysql_shop
    assert shop.run("start", "--until-current", SOURCE="polling").wait() == 0
    assert checkpoint(shop).source == "polling"
    found = said(ward_of(shop))
    assert (found.level, "no position yet" in found.text) == ("ok", True)


@pytest.mark.parametrize("name", ["own_mysql", "own_mariadb"])
def test_a_set_whose_successors_were_purged(
    name: str, request: pytest.FixtureRequest, harness: MakeHarness
) -> None:
    """Each server is asked in its own way, by the dump itself."""
    server: MySQL | MariaDB = request.getfixturevalue(name)
    with Database.create(server.url()) as database:
        shop = harness(database)
        shown = "gtid_binlog_pos" if database.is_mariadb else "gtid_executed"
        [(before,)] = database.sql(f"SELECT @@global.{shown}")
        shop.ins("a")
        database.sql("FLUSH BINARY LOGS")
        shop.ins("a")
        purge_logs(database)
        process = shop.run("position", "set", "--gtids", str(before))
        assert process.wait() == 5, process.text()
        assert process.text().count("error:") == 1
        assert shop.checkpoint() is None


# --- GTIDs that are switched on later -------------------------------------------------------------


@contextmanager
def gtids_off_again(database: Database) -> Iterator[None]:
    try:
        yield
    finally:
        [(mode,)] = database.sql("SELECT @@global.gtid_mode")
        modes = ["ON", "ON_PERMISSIVE", "OFF_PERMISSIVE", "OFF"]
        for step in modes[modes.index(mode) + 1 :]:
            database.sql(f"SET GLOBAL gtid_mode = {step}")
        database.sql("SET GLOBAL enforce_gtid_consistency = OFF")
        database.sql("RESET PERSIST")


@pytest.mark.parametrize("running", [True, False])
def test_gtids_that_are_switched_on_later(
    bare_mysql: MySQL, harness: MakeHarness, running: bool
) -> None:
    """By the doctor's own statements, under a relay that runs or before it starts again: positions
    have the server's set from the file on that begins with it, which is what a replica knows."""
    with Database.create(bare_mysql.url()) as database, gtids_off_again(database):
        shop = harness(database)
        relay = shop.relay()
        expected = [shop.ins("a")]
        shop.wait_sent(1)
        if not running:
            assert relay.terminate() == 0
        assert checkpoint(shop).position.gtids is None
        if not running:
            expected.append(shop.ins("a"))
        ward = ward_of(shop)
        ward.follow(said(ward, "gtid_mode"))
        expected += [shop.ins("a", {"n": n}) for n in range(3)]
        if not running:
            # The server serves nothing any more that was committed before.
            found = said(ward)
            assert (found.level, found.mend) == ("warning", ("cdc-relay start",))
            assert "anonymous transaction" in found.text
            relay = shop.relay()

        shop.wait_sent(len(expected))

        def has_them_all() -> bool:
            [(executed,)] = database.sql("SELECT @@global.gtid_executed")
            return checkpoint(shop).position.gtids == str(executed)

        shop.until(has_them_all)
        assert ward.finding("gtids") is None
        assert relay.terminate() == 0
        expected.append(shop.ins("a"))
        relay = shop.relay()
        shop.wait_sent(len(expected))
        shop.until(has_them_all)
        assert relay.terminate() == 0
        assert ids(shop) == expected


@pytest.mark.parametrize("mended", [False, True])
def test_a_file_and_offset_gain_gtids(own_mysql: MySQL, harness: MakeHarness, mended: bool) -> None:
    """A position that was set by hand has none; the relay finds them for it, in its own file or in
    the one that the doctor has begun, also where the server has purged ones that no file's head
    lists."""
    with Database.create(own_mysql.url()) as database:
        database.sql("FLUSH BINARY LOGS")
        shop = harness(database)
        expected = [shop.ins("a")]
        first = 11 if mended else 1  # what was purged once is not purged again
        database.sql(f"SET GLOBAL gtid_purged = '+{ANOTHER}:{first}-{first + 4}'")
        [_, _, _, (_, begins, *_)] = database.sql(
            "SHOW BINLOG EVENTS IN %s LIMIT 4", (last_file(database),)
        )
        place = ("--file", last_file(database), "--offset", str(begins))
        assert shop.run("position", "set", *place).wait() == 0
        shown = json.loads(shop.run("position", "show", "--json").stdout.decode())
        assert shown["gtids"] is None
        ward = ward_of(shop)
        found = said(ward, "gtids")
        assert found.level == "warning"
        if mended:
            ward.follow(found)
        expected.append(shop.ins("a"))
        assert shop.run("start", "--until-current").wait() == 0
        [(executed,)] = database.sql("SELECT @@global.gtid_executed")
        assert checkpoint(shop).position.gtids == executed.replace("\n", "")
        assert ward.finding("gtids") is None
        assert ids(shop) == expected


def last_file(database: Database) -> str:
    return str(database.sql("SHOW BINARY LOGS")[-1][0])


def test_what_could_not_be_asked_for_by_gtids_has_none(bare_mysql: MySQL) -> None:
    """Before GTIDs are on for good, and in a file that holds a transaction without one, a set
    would not bring back what follows."""
    with (
        Database.create(bare_mysql.url()) as database,
        gtids_off_again(database),
    ):
        database.create_outbox()
        with SourceUnderTest.on(database) as under:

            def gtids(place: Position) -> bool:
                with_them = under.source()._gtids_at(place)
                if with_them is not None:
                    [(executed,)] = database.sql("SELECT @@global.gtid_executed")
                    assert str(with_them) == executed
                return with_them is not None

            def here() -> Position:
                under.ins("a")
                return replace(under.here(), gtids=None)

            assert not gtids(here())
            database.sql("SET GLOBAL enforce_gtid_consistency = ON")
            for mode in ("OFF_PERMISSIVE", "ON_PERMISSIVE"):
                database.sql(f"SET GLOBAL gtid_mode = {mode}")
                place = here()
                assert not gtids(place)
            database.sql("SET gtid_next = 'ANONYMOUS'")
            database.sql("CREATE TABLE anonymous (id INT)")
            database.sql("SET gtid_next = 'AUTOMATIC'")
            mixed = here()
            assert not gtids(mixed)
            database.sql("SET GLOBAL gtid_mode = ON")
            assert not gtids(mixed)
            assert gtids(here())
