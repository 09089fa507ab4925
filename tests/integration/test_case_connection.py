"""Faults that users of binlog readers met with connections, restarts and failovers, each as the
smallest input that shows it, on real servers.

Clean restarts, outages of the database and killed dumps: ``tests/acceptance/test_restart.py``;
authentication at the first login and TLS with the server's CA: ``test_relay.py``.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import requires

import pytest

from cdc_relay.config import load
from cdc_relay.owner import write_checkpoint
from dev.database import Database as DatabaseServer
from dev.kafka import Kafka
from dev.mysql import MySQL
from tests.support.harness import Harness
from tests.support.proxy import Proxy
from tests.support.sql import Database, purge_logs

MakeHarness = Callable[..., Harness]

GRANTS = ("REPLICATION SLAVE, REPLICATION CLIENT ON *.*", "SELECT, UPDATE ON {schema}.*")


@pytest.fixture
def own_shop(own_server: DatabaseServer, harness: MakeHarness) -> Iterator[Harness]:
    with Database.create(own_server.url()) as database:
        yield harness(database)


def ids(shop: Harness) -> list[str]:
    return [message.event_id for message in shop.messages()]


# --- positions ------------------------------------------------------------------------------------


def test_the_checkpoint_of_an_idle_outbox_moves_with_its_neighbours(own_shop: Harness) -> None:
    """A position that is saved only with events of its own table names a file that is gone by the
    next start."""
    shop, database = own_shop, own_shop.database
    relay = shop.relay()
    database.sql("CREATE TABLE neighbour (id INT AUTO_INCREMENT PRIMARY KEY, t VARCHAR(40))")
    with database.connect(autocommit=True) as connection, connection.cursor() as cursor:
        for _ in range(4):
            for _ in range(10):
                cursor.execute(
                    "INSERT INTO neighbour (t) VALUES " + ", ".join(["(REPEAT('x', 40))"] * 250)
                )
            cursor.execute("FLUSH BINARY LOGS")
    newest = str(database.sql("SHOW BINARY LOGS")[-1][0])

    def moved() -> bool:
        last = shop.checkpoint()
        return last is not None and last.position.file == newest

    shop.until(moved)
    assert relay.terminate() == 0
    purge_logs(shop.database)
    relay = shop.relay()
    event = shop.ins("a")
    shop.wait_sent(1)
    assert relay.terminate() == 0
    assert ids(shop) == [event]
    assert "position lost" not in relay.text()


def test_a_purged_position_loses_no_row(own_shop: Harness) -> None:
    """Never a silent jump, never a crash loop: what is pending in the table is swept."""
    shop, database = own_shop, own_shop.database
    relay = shop.relay()
    expected = [shop.ins("a", {"n": 0})]
    shop.wait_sent(1)
    assert relay.terminate() == 0
    expected += [shop.ins("a", {"n": n}) for n in range(1, 4)]
    database.sql("FLUSH BINARY LOGS")
    purge_logs(shop.database)
    expected.append(shop.ins("a", {"n": 4}))
    relay = shop.relay()
    shop.wait_sent(5)
    expected.append(shop.ins("a", {"n": 5}))
    shop.wait_sent(6)
    assert relay.terminate() == 0
    assert "position lost" in relay.text()
    assert ids(shop) == expected


def test_a_log_that_was_reset_loses_no_row(own_shop: Harness) -> None:
    """The old checkpoint compares as behind the new end; the table tells what is pending, also
    to a relay that is asked to end there."""
    shop, database = own_shop, own_shop.database
    database.sql("FLUSH BINARY LOGS")
    relay = shop.relay()
    expected = [shop.ins("a", {"n": 0})]
    shop.wait_sent(1)
    assert relay.terminate() == 0
    if database.is_mariadb:
        database.sql("RESET MASTER")
    else:
        database.sql("RESET BINARY LOGS AND GTIDS")
    expected += [shop.ins("a", {"n": n}) for n in range(1, 4)]
    relay = shop.spawn("start", "--until-current")
    assert relay.wait() == 0
    assert "position lost" in relay.text()
    assert ids(shop) == expected
    expected.append(shop.ins("a", {"n": 4}))
    assert shop.spawn("start", "--until-current").wait() == 0
    assert ids(shop) == expected


def test_a_log_that_was_reset_before_anything_was_read(own_shop: Harness) -> None:
    """The relay knows its anchor's file again, however little it lived."""
    shop, database = own_shop, own_shop.database
    reset = "RESET MASTER" if database.is_mariadb else "RESET BINARY LOGS AND GTIDS"
    database.sql(reset)
    relay = shop.spawn("start", TEST_FAULT="saved:1")
    assert relay.wait() == -signal.SIGKILL, relay.text()
    expected = [shop.ins("a", {"n": n}) for n in range(5)]
    time.sleep(1.1)  # what tells the files apart are the seconds of their beginning
    database.sql(reset)
    expected += [shop.ins("a", {"n": n}) for n in range(5, 10)]
    relay = shop.spawn("start", "--until-current")
    assert relay.wait() == 0, relay.text()
    assert "position lost" in relay.text()
    assert ids(shop) == expected


def test_an_older_copy_that_was_put_back(own_shop: Harness, own_server: DatabaseServer) -> None:
    """It was taken of a running server, and goes on in files, and with GTIDs, that the relay has
    seen with other transactions in them."""
    shop, data = own_shop, own_server.home / "data"
    copy = own_server.home / "copy"
    relay = shop.relay()
    expected = [shop.ins("a", {"n": n}) for n in range(5)]
    shop.wait_sent(5)
    assert relay.terminate() == 0
    own_server.pause()
    try:
        shutil.copytree(data, copy, ignore=shutil.ignore_patterns("*.sock*"))
    finally:
        own_server.resume()
    relay = shop.relay()
    lost = [shop.ins("a", {"n": n}) for n in range(5, 10)]
    shop.wait_sent(10)
    assert relay.terminate() == 0
    shop.database.close()
    own_server.kill()
    shutil.rmtree(data)
    copy.rename(data)
    own_server.start()
    new = [shop.ins("a", {"n": n}) for n in range(20, 40)]
    relay = shop.spawn("start", "--until-current")
    assert relay.wait() == 0, relay.text()
    assert "position lost" in relay.text()
    assert ids(shop) == [*expected, *lost, *new]
    assert shop.count(1) == 25


@pytest.mark.parametrize("files", [1, 3])
def test_logs_begun_anew_that_are_as_long_again(files: int, own_shop: Harness) -> None:
    """Files, offsets and GTIDs are given again after RESET: they look like the old ones. In a file
    of another number the dump does not go on with heartbeats but ends with an error."""
    shop, database = own_shop, own_shop.database
    reset = "RESET MASTER" if database.is_mariadb else "RESET BINARY LOGS AND GTIDS"
    for statement in (reset, *["FLUSH BINARY LOGS"] * (files - 1)):
        database.sql(statement)
    relay = shop.relay()
    for number in range(3):
        shop.ins("a", {"n": number})
    shop.wait_sent(3)
    # Under the running relay: its dump goes on with heartbeats of a log that is gone.
    database.sql(reset)
    for number in range(3, 6):
        shop.ins("a", {"n": number})
    shop.wait_sent(6)
    shop.ins("a", {"n": 6})
    shop.wait_sent(7)
    assert relay.terminate() == 0
    # While it is down, and the new log is longer when it comes back.
    database.sql("CREATE TABLE filler (id INT PRIMARY KEY AUTO_INCREMENT, filling TEXT)")
    database.sql(reset)
    for number in range(7, 10):
        shop.ins("a", {"n": number})
    for _ in range(100):
        database.sql("INSERT INTO filler (filling) VALUES (REPEAT('x', 1000))")
    relay = shop.relay()
    shop.wait_sent(10)
    shop.ins("a", {"n": 10})
    shop.wait_sent(11)
    assert relay.terminate() == 0, relay.text()
    assert [message.json["n"] for message in shop.messages()] == list(range(11))
    assert relay.text().count("begun anew") >= 1


def test_a_position_where_no_event_begins(bare_mysql: DatabaseServer, harness: MakeHarness) -> None:
    """Another log of the same name: the server cannot read on from there, at any start."""
    with Database.create(bare_mysql.url()) as database:
        shop = harness(database)
        relay = shop.relay()
        shop.ins("a", {"n": 0})
        shop.wait_sent(1)
        assert relay.terminate() == 0
        last = shop.checkpoint()
        assert last is not None
        inside = replace(last.position, offset=last.position.offset - 7)
        shop.ins("a", {"n": 1})
        ours = {k: v for k, v in shop.environment().items() if k.startswith("CDC_RELAY_")}
        write_checkpoint(load(environ=ours), replace(last, position=inside))
        relay = shop.relay()
        shop.wait_sent(2)
        shop.ins("a", {"n": 2})
        shop.wait_sent(3)
        assert relay.terminate() == 0, relay.text()
        assert [message.json["n"] for message in shop.messages()] == [0, 1, 2]
        assert "position lost" in relay.text()


def test_the_end_of_the_log_is_reached_after_a_crash_of_the_server(
    own_server: DatabaseServer, harness: MakeHarness
) -> None:
    """The file that the crash ended has no rotate event."""
    with Database.create(own_server.url()) as database:
        shop = harness(database)
        relay = shop.relay()
        shop.ins("a", {"n": 0})
        shop.wait_sent(1)
        own_server.kill()
        own_server.start()
        database.close()
        shop.until(lambda: len(relay.logged("streaming")) > 1)
        assert relay.terminate() == 0, relay.text()
        until = shop.spawn("start", "--until-current")
        assert until.wait(40) == 0, until.text()
        before = shop.checkpoint()
        assert before is not None
        [*_, (newest, *_)] = database.sql("SHOW BINARY LOGS")
        assert before.position.file == newest
        shop.ins("a", {"n": 1})
        until = shop.spawn("start", "--until-current")
        assert until.wait(40) == 0, until.text()
        assert [message.json["n"] for message in shop.messages()] == [0, 1]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("bare_mysql", "own_mysql"),
        ("own_mysql", "mysql_url"),
        ("own_mariadb", "mariadb_url"),
        ("own_mysql", "own_mariadb"),
    ],
)
def test_a_position_of_another_server_is_not_used(
    first: str, second: str, request: pytest.FixtureRequest, kafka: str, harness: MakeHarness
) -> None:
    """The same file name and offset mean something else there, and a GTID that the server never
    had means nothing: said loudly, and what is pending in that table goes out."""
    urls = []
    for name in (first, second):
        found = request.getfixturevalue(name)
        urls.append(found if isinstance(found, str) else found.url())
    with Database.create(urls[0]) as one, Database.create(urls[1], one.name) as two:
        shop = harness(one)
        two.create_outbox()
        relay = shop.relay()
        expected = [shop.ins("a")]
        shop.wait_sent(1)
        assert relay.terminate() == 0
        shop.database = two
        expected.append(shop.ins("b"))
        relay = shop.relay()
        shop.wait_sent(1)
        expected.append(shop.ins("c"))
        shop.wait_sent(2)
        assert relay.terminate() == 0
        assert "position lost" in relay.text()
        assert ids(shop) == expected


def test_a_replica_takes_over_by_gtid(
    own_mysql: DatabaseServer, tmp_path_factory: pytest.TempPathFactory, harness: MakeHarness
) -> None:
    """The promoted replica holds the same transactions under other files and offsets. The address
    moves before it has applied what the relay has sent: it is waited for."""
    home = tmp_path_factory.mktemp("replica")
    with (
        MySQL(home, die_with_parent=True) as replica,
        Database.create(own_mysql.url()) as one,
        one.user("REPLICATION SLAVE ON *.*") as user,
    ):
        two = Database(one.url.set(port=replica.port))
        admin = Database(two.url.set(database="mysql"))
        admin.sql("RESET BINARY LOGS AND GTIDS")
        # Everything before is of no interest; some of it is purged by now.
        [(executed,)] = one.sql("SELECT @@global.gtid_executed")
        admin.sql("SET GLOBAL gtid_purged = %s", (executed,))
        admin.sql(f"CREATE DATABASE {one.name}")
        admin.sql(
            "CHANGE REPLICATION SOURCE TO SOURCE_HOST = '127.0.0.1', SOURCE_PORT = %s,"
            " SOURCE_USER = %s, SOURCE_PASSWORD = %s, SOURCE_AUTO_POSITION = 1,"
            " GET_SOURCE_PUBLIC_KEY = 1",
            (one.url.port, user.url.username, user.url.password),
        )
        # The schema's own creation, made by hand above, is no transaction of the source.
        admin.sql("RESET BINARY LOGS AND GTIDS")
        admin.sql("SET GLOBAL gtid_purged = %s", (executed,))
        admin.sql("START REPLICA")
        with Proxy(one.url.port or 0) as address:
            moving = one.url.set(port=address.port).render_as_string(hide_password=False)
            shop = harness(one, DATABASE_URL=moving)
            relay = shop.relay()
            expected = [shop.ins("a", {"n": n}) for n in range(2)]
            shop.wait_sent(2)
            shop.until(lambda: applied(admin, one))
            admin.sql("STOP REPLICA SQL_THREAD")
            expected += [shop.ins("a", {"n": n}) for n in range(2, 4)]
            shop.wait_sent(4)
            shop.until(lambda: received(admin, one))
            address.cut()
            address.lead_to(replica.port)
            address.mend()
            shop.until(lambda: "still applying" in relay.text())
            assert ids(shop) == expected
            admin.sql("START REPLICA SQL_THREAD")
            shop.until(lambda: applied(admin, one))
            admin.sql("STOP REPLICA")
            admin.sql("RESET REPLICA ALL")
            shop.database = two
            expected.append(shop.ins("a", {"n": 4}))
            shop.wait_sent(5)
            assert relay.terminate() == 0
        assert "position lost" not in relay.text()
        assert len(relay.logged("anchored at the end of the log")) == 1
        assert ids(shop) == expected
        two.close()
        admin.close()


def applied(replica: Database, source: Database) -> bool:
    """Whether the replica has executed what its source has."""
    [(executed,)] = source.sql("SELECT @@global.gtid_executed")
    return bool(replica.sql("SELECT GTID_SUBSET(%s, @@global.gtid_executed)", (executed,))[0][0])


def received(replica: Database, source: Database) -> bool:
    """Whether the replica has at least been sent it."""
    [(executed,)] = source.sql("SELECT @@global.gtid_executed")
    sql = (
        "SELECT GTID_SUBSET(GTID_SUBTRACT(%s, @@global.gtid_executed), received_transaction_set) "
        "FROM performance_schema.replication_connection_status"
    )
    return bool(replica.sql(sql, (executed,))[0][0])


# --- two readers ----------------------------------------------------------------------------------


def test_two_relays_of_one_name(shop: Harness) -> None:
    """They share a group: one works, the other stands by; no reconnect storm, no duplicate."""
    first = shop.relay()
    second = shop.spawn("start")
    shop.until(lambda: "standing by" in second.text() or "streaming" in second.text())
    expected = [shop.ins("a", {"n": n}) for n in range(100)]
    shop.wait_sent(100)
    assert first.running
    assert second.running
    streams = len(first.logged("streaming")) + len(second.logged("streaming"))
    assert streams <= 3
    assert ids(shop) == expected
    for process in (second, first):
        assert process.terminate() == 0


def test_two_readers_with_one_server_id(database: Database, harness: MakeHarness) -> None:
    """MariaDB throws the older one out; it must not come back and throw the newer one out. MySQL
    goes by the replica's uuid, which differs, and serves both."""
    first = harness(database, SERVER_ID="777001", MARK="none")
    relay = first.relay()
    with Harness(database, first.kafka, first.home, {"SERVER_ID": "777001"}, create=False) as other:
        second = other.relay()
        if database.is_mariadb:
            assert relay.wait(30) == 3
            assert "uses server id 777001" in relay.text()
            assert "Traceback" not in relay.text()
        event = first.ins("a")
        other.until(lambda: ids(other) == [event])
        assert len(second.logged("streaming")) == 1
        assert second.terminate() == 0
        assert database.is_mariadb or relay.terminate() == 0


def test_a_relay_that_stands_by_leaves_the_one_at_work_alone(
    database: Database, harness: MakeHarness
) -> None:
    """Both have the server id that the settings give; only one may use it."""
    shop = harness(database, SERVER_ID="777002")
    relay = shop.relay()
    expected = [shop.ins("a", {"n": 0})]
    second = shop.spawn("start")
    shop.until(lambda: "standing by" in second.text())
    expected.append(shop.ins("a", {"n": 1}))
    shop.wait_all_sent()
    assert ids(shop) == expected
    assert len(relay.logged("streaming")) == 1
    for process in (second, relay):
        assert process.terminate() == 0


# --- dead and idle connections --------------------------------------------------------------------


def test_a_half_open_connection_is_noticed(database: Database, harness: MakeHarness) -> None:
    """The network dies without a reset: heartbeats stop, so the silence is no idleness."""
    port = database.url.port
    assert port is not None
    with Proxy(port) as proxy:
        url = database.url.set(port=proxy.port).render_as_string(hide_password=False)
        shop = harness(database, DATABASE_URL=url, HEARTBEAT="1s", READ_TIMEOUT="3s")
        relay = shop.relay()
        expected = [shop.ins("a", {"n": 0})]
        shop.wait_sent(1)
        proxy.swallow()
        expected += [shop.ins("a", {"n": n}) for n in range(1, 4)]
        shop.until(lambda: "nothing was heard for 3 s" in relay.text())
        assert shop.count(1) == 1
        proxy.restore()
        shop.wait_sent(4)
        assert ids(shop) == expected

        # Idle, for longer than the timeout: the heartbeats keep it.
        streams = len(relay.logged("streaming"))
        time.sleep(5)
        assert len(relay.logged("streaming")) == streams
        accepted = proxy.accepted
        expected.append(shop.ins("a", {"n": 4}))
        shop.wait_sent(5)
        assert ids(shop) == expected
        # What is asked per row goes over connections that are there.
        assert proxy.accepted <= accepted + 1
        assert relay.terminate() == 0


# --- logging in -----------------------------------------------------------------------------------


def test_a_client_certificate(bare_mysql: DatabaseServer, harness: MakeHarness) -> None:
    """One TLS setting serves the stream and every other connection."""
    data = bare_mysql.home / "data"
    with (
        Database.create(bare_mysql.url()) as database,
        database.user(*GRANTS, require="X509") as user,
    ):
        # The certificate that MySQL makes for itself names no host.
        user.url = user.url.update_query_string("ssl_check_hostname=false")
        shop = harness(
            database,
            DATABASE_URL=user.text,
            DATABASE_TLS_CA=str(data / "ca.pem"),
            DATABASE_TLS_CERT=str(data / "client-cert.pem"),
            DATABASE_TLS_KEY=str(data / "client-key.pem"),
        )
        relay = shop.relay()
        shop.ins("a")
        shop.wait_sent(1)
        # Both the stream and the marks are encrypted, or the server had refused them.
        assert relay.terminate() == 0
        shop.database.sql(f"UPDATE {shop.table} SET status = 0")
        assert shop.compensate()["sent"] == 1
        refused = shop.run("start", DATABASE_TLS_CERT="", DATABASE_TLS_KEY="")
        assert refused.wait() in (2, 3)
        assert "Traceback" not in refused.text()


def test_the_package_brings_what_the_default_authentication_needs() -> None:
    """caching_sha2_password without TLS encrypts the password with the server's key."""
    needed = " ".join(item for item in requires("cdc-relay") or [] if "extra" not in item)
    assert "cryptography" in needed
    assert "PyMySQL" in needed


def test_a_password_that_changes_under_the_relay(database: Database, harness: MakeHarness) -> None:
    """The connections that stand go on; the next one is refused, and that is said once."""
    with database.user(*GRANTS) as user:
        shop = harness(database, DATABASE_URL=user.text)
        relay = shop.relay()
        event = shop.ins("a")
        shop.wait_sent(1)
        database.sql(f"ALTER USER {user.url.username}@'%%' IDENTIFIED BY 'n3w'", ())
        for number, name in database.sql(
            "SELECT id, user FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'"
        ):
            if name == user.url.username:
                database.sql(f"KILL {number}")
        assert relay.wait(30) == 3
        assert "Access denied" in relay.text()
        assert "Traceback" not in relay.text()
        assert "s3cret" not in relay.text()
        assert ids(shop) == [event]


# --- open transactions ----------------------------------------------------------------------------


def test_no_transaction_of_ours_stays_open(
    mysql: Database, harness: MakeHarness, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A forgotten read view makes the server keep the history of every row."""
    with (
        Kafka(tmp_path_factory.mktemp("kafka"), die_with_parent=True) as broker,
        mysql.user(*GRANTS) as user,
        Harness(mysql, broker.bootstrap, tmp_path_factory.mktemp("idle")) as shop,
    ):
        settings = {"DATABASE_URL": user.text}
        relay = shop.relay(**settings)
        loop = shop.spawn("compensate", "--loop", "--older-than", "0s", **settings)
        watch(shop, str(user.url.username), 2, lambda: shop.ins("a"))
        watch(shop, str(user.url.username), 2, lambda: None)
        broker.pause()
        try:
            watch(shop, str(user.url.username), 4, lambda: shop.ins("a"))
        finally:
            broker.resume()
        shop.wait_all_sent(60)
        assert relay.terminate() == 0, relay.text()
        assert loop.terminate() == 0, loop.text()


def watch(shop: Harness, user: str, seconds: float, action: Callable[[], object]) -> None:
    """Look at the open transactions of ``user`` for a while; none is older than two looks."""
    seen: dict[str, int] = {}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        action()
        open_now = {
            str(number): int(age)
            for number, age in shop.database.sql(
                "SELECT trx_id, TIMESTAMPDIFF(SECOND, trx_started, NOW())"
                " FROM information_schema.innodb_trx AS t JOIN information_schema.processlist AS p"
                " ON p.id = t.trx_mysql_thread_id WHERE p.user = %s",
                (user,),
            )
        }
        seen = {number: seen.get(number, 0) + 1 for number in open_now}
        assert not [age for age in open_now.values() if age > 2], open_now
        time.sleep(0.1)
    assert not [count for count in seen.values() if count > 10], seen
