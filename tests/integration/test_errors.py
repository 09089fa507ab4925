"""Wrong input of every kind: one clear line, the right exit code, in bounded time, half of
nothing done. Bad rows: parked, and nobody overtakes them."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dev.mariadb import MariaDB
from dev.mysql import MySQL
from dev.server import Server
from tests.support.harness import Harness, Process
from tests.support.sql import INSERT, Database, row

MakeHarness = Callable[..., Harness]

_LONGEST_S = 45
REPLICATION = "REPLICATION SLAVE, REPLICATION CLIENT ON *.*"
TABLE = "SELECT, UPDATE ON {schema}.*"


def error_of(process: Process, code: int) -> str:
    """The one line that a failed command leaves on stderr, with its exit code checked."""
    assert process.wait(_LONGEST_S) == code, process.text()
    text = process.text()
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, text
    assert lines[0].startswith("error: "), text
    assert "internal error" not in lines[0]
    return lines[0]


def free_port() -> int:
    """A port on which nobody listens."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])


# --- configuration: nothing is asked of any server ------------------------------------------------


class Commands:
    """Runs commands with settings of their own and no server behind them."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._number = 0

    def run(self, *arguments: str, **variables: str) -> Process:
        """Run a command to its end with these ``CDC_RELAY_*`` variables and a sane rest."""
        given = {
            "DATABASE_URL": f"mysql+pymysql://relay:s3cret@127.0.0.1:{free_port()}/shop",
            "KAFKA_BOOTSTRAP": f"127.0.0.1:{free_port()}",
            "LOG_FORMAT": "json",
            "HTTP": "off",
            **variables,
        }
        clean = {k: v for k, v in os.environ.items() if not k.startswith("CDC_RELAY_")}
        clean |= {f"CDC_RELAY_{name}": value for name, value in given.items()}
        self._number += 1
        process = Process(list(arguments), clean, self._home / f"{self._number}.log")
        process.wait(_LONGEST_S)
        return process


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"DATABASE_URL": "localhost:3306"}, ["DATABASE_URL", "mysql+pymysql://"]),
        ({"DATABASE_URL": "postgresql://relay@localhost/shop"}, ["postgresql"]),
        ({"DATABASE_URL": "mysql+pymysql://relay@localhost"}, ["schema"]),
        ({"DATABASE_URL": "mysql+pymysql://relay:s3cret@localhost/shop?sslca=x"}, ["sslca"]),
        ({"DATABASE_TLS_CA": "/nowhere/ca.pem"}, ["database_tls_ca", "/nowhere/ca.pem"]),
        ({"DATABASE_PASSWORD_FILE": "/nowhere/pw"}, ["database_password_file", "/nowhere/pw"]),
        ({"KAFKA_BOOTSTRAP": ""}, ["kafka_bootstrap", "--kafka-bootstrap"]),
        ({"TOPIC": "orders {aggregate_type}"}, ["TOPIC", "topic"]),
        ({"TABLE": "a.b.c"}, ["TABLE", "a.b.c"]),
        ({"BATCH_ROWS": "many"}, ["BATCH_ROWS"]),
        ({"BATCH_ROWS": "0"}, ["BATCH_ROWS"]),
        ({"HEARTBEAT": "5"}, ["HEARTBEAT", "30s"]),
        ({"HEARTBEAT": "60s"}, ["heartbeat"]),
        ({"NAME": "my relay"}, ["NAME"]),
        ({"TOPICS": "x"}, ["CDC_RELAY_TOPICS", "CDC_RELAY_TOPIC?"]),
        ({"KAFKA_ACKS": "1"}, ["acks"]),
    ],
    ids=lambda value: "-".join(value.keys()) if isinstance(value, dict) else "",
)
def test_a_wrong_setting_is_refused_by_name(
    variables: dict[str, str], words: list[str], commands: Commands
) -> None:
    line = error_of(commands.run("start", **variables), 2)
    for word in words:
        assert word in line
    assert "s3cret" not in line


def test_a_wrong_configuration_file_is_refused_by_name(commands: Commands, tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text('older_then = "10m"\n')
    line = error_of(commands.run("compensate", "--config", str(file)), 2)
    assert "older_then" in line
    assert "did you mean older_than?" in line
    file.write_text("older_than = 10m\n")
    assert "TOML" in error_of(commands.run("compensate", "--config", str(file)), 2)
    missing = str(tmp_path / "missing.toml")
    assert missing in error_of(commands.run("start", "--config", missing), 2)
    for arguments in (["strat"], ["start", "--until-curent"], ["compensate", "--batch", "x"]):
        error_of(commands.run(*arguments), 2)


# --- the database ---------------------------------------------------------------------------------


def refused(
    shop: Harness, words: list[str], commands: Sequence[str] = ("start", "compensate"), **extra: str
) -> None:
    """The commands end with one line that holds ``words``."""
    for process in [shop.spawn(command, **extra) for command in commands]:
        line = error_of(process, 3)
        for word in words:
            assert word in line
        assert "s3cret" not in process.text()


def test_a_database_that_is_not_there(mysql_shop: Harness) -> None:
    shop = mysql_shop
    url = shop.database.url.set(password="s3cret")
    for host, port in (("127.0.0.1", free_port()), ("no-such-host.invalid", 3306)):
        text = url.set(host=host, port=port).render_as_string(hide_password=False)
        refused(shop, [host, str(port)], DATABASE_URL=text)


def test_a_wrong_login_schema_or_table(shop: Harness) -> None:
    def text(**parts: Any) -> str:
        return shop.database.url.set(**parts).render_as_string(hide_password=False)

    with shop.database.user(REPLICATION, TABLE) as user:
        name = str(user.url.username)
        wrong = text(username=name, password="s3cret-wrong")
        refused(shop, ["login", name], DATABASE_URL=wrong)
    refused(shop, ["no_such_schema"], ["start"], DATABASE_URL=text(database="no_such_schema"))
    refused(shop, ["no_such_table", "cdc-relay init"], TABLE="no_such_table")
    shop.database.sql("CREATE VIEW a_view AS SELECT * FROM outbox_event")
    refused(shop, ["a_view", "view"], ["start"], TABLE="a_view")
    refused(shop, ["information_schema"], ["start"], TABLE="information_schema.tables")
    shop.database.sql("CREATE TABLE narrow (id BIGINT PRIMARY KEY, event_id VARCHAR(64))")
    refused(shop, ["narrow", "aggregate_type"], ["start"], TABLE="narrow")


@pytest.mark.parametrize(
    ("grants", "words"),
    [
        (["REPLICATION CLIENT ON *.*", TABLE], ["GRANT REPLICATION SLAVE"]),
        # MariaDB calls it BINLOG MONITOR.
        (["REPLICATION SLAVE ON *.*", TABLE], ["REPLICATION CLIENT|BINLOG MONITOR"]),
        ([REPLICATION, "UPDATE ON {schema}.*"], ["SELECT"]),
        ([REPLICATION, "SELECT ON {schema}.*"], ["UPDATE"]),
        ([REPLICATION], ["missing grant"]),
    ],
    ids=["replication-slave", "replication-client", "select", "update", "schema"],
)
def test_a_missing_grant_is_named(grants: list[str], words: list[str], shop: Harness) -> None:
    with shop.database.user(*grants) as user:
        # A row that waits for its mark: not every grant is missed before it is used.
        process = shop.spawn("start", DATABASE_URL=user.text)
        shop.until(lambda: "streaming" in process.text() or not process.running)
        shop.ins("a", {})
        line = error_of(process, 3)
        for word in words:
            assert re.search(word, line), line
        assert str(user.url.password) not in process.text()
        if "REPLICATION" not in words[0]:
            line = error_of(shop.run("compensate", "--older-than", "0s", DATABASE_URL=user.text), 3)
            for word in words:
                assert word in line, line


@pytest.mark.parametrize("name", ["own_mysql", "own_mariadb"])
@pytest.mark.parametrize("default", ["autocommit = 0", "sql_select_limit = 3"])
def test_a_server_with_defaults_of_its_own(
    default: str, name: str, request: pytest.FixtureRequest, harness: MakeHarness
) -> None:
    """What is marked and deleted is committed, and what is read is whole."""
    server: MySQL | MariaDB = request.getfixturevalue(name)
    with Database.create(server.url()) as database:
        shop = harness(database)
        ids = [shop.ins(f"k{number}") for number in range(8)]
        setting = default.partition(" ")[0]
        [(usual,)] = database.sql(f"SELECT @@GLOBAL.{setting}")
        try:
            database.sql(f"SET GLOBAL {default}")
            assert shop.compensate()["sent"] == 8
            assert shop.compensate()["sent"] == 0
            assert shop.count(1) == 8
            assert shop.run("purge", "--older-than", "0s").wait() == 0
            assert shop.count(1) == 0
            ids += [shop.ins(f"k{number}") for number in range(8)]
            relay = shop.relay()
            shop.wait_sent(8)
            ids += [shop.ins(f"k{number}") for number in range(8)]
            shop.wait_sent(16)
            assert relay.terminate() == 0
        finally:
            database.sql(f"SET GLOBAL {setting} = {usual}")
        assert sorted(message.event_id for message in shop.messages()) == sorted(ids)


@pytest.mark.parametrize("name", ["own_mysql", "own_mariadb"])
def test_a_binlog_without_rows(
    name: str, request: pytest.FixtureRequest, harness: MakeHarness
) -> None:
    server: MySQL | MariaDB = request.getfixturevalue(name)
    with Database.create(server.url()) as database:
        shop = harness(database)
        for row_format in ("STATEMENT", "MIXED"):
            database.sql(f"SET GLOBAL binlog_format = {row_format}")
            line = error_of(shop.run("start"), 3)
            assert row_format in line
            assert "SET GLOBAL binlog_format = 'ROW'" in line
        database.sql("SET GLOBAL binlog_format = ROW")


class Unlogged(MariaDB):
    """MariaDB as it comes: no binlog."""

    def flags(self) -> list[str]:
        return []


@pytest.fixture(params=["mysql", "mariadb"])
def unlogged(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server that writes no binlog."""
    if request.param == "mysql":
        server: MySQL | MariaDB = MySQL(tmp_path / "server", die_with_parent=True)
        server.start(["--skip-log-bin"])
    else:
        server = Unlogged(tmp_path / "server", die_with_parent=True)
        server.start()
    yield server
    server.delete()


def test_a_server_without_a_binlog(unlogged: MySQL, harness: MakeHarness) -> None:
    with Database.create(unlogged.url()) as database:
        shop = harness(database)
        assert "log_bin" in error_of(shop.run("start"), 3)
        # The compensator needs none.
        shop.ins("a", {"n": 1})
        assert shop.compensate()["sent"] == 1


# --- Kafka ----------------------------------------------------------------------------------------


def test_a_property_that_librdkafka_does_not_know(mysql_shop: Harness) -> None:
    assert "no.such.thing" in error_of(mysql_shop.run("start", KAFKA_NO_SUCH_THING="1"), 2)
    wrong = mysql_shop.run("start", KAFKA_COMPRESSION_TYPE="zip")
    assert "compression" in error_of(wrong, 2)


def test_a_session_timeout_that_the_brokers_refuse(mysql_shop: Harness) -> None:
    line = error_of(mysql_shop.run("start", SESSION_TIMEOUT="1s"), 4)
    assert "session_timeout" in line
    assert "group.min.session.timeout.ms" in line


def test_no_broker(mysql_shop: Harness) -> None:
    shop = mysql_shop
    shop.ins("a", {"n": 1})
    nobody = f"127.0.0.1:{free_port()}"
    start = shop.spawn("start", KAFKA_BOOTSTRAP=nobody)
    arguments = ("--older-than", "0s", "--send-timeout", "2s", "--json")
    compensate = shop.spawn("compensate", *arguments, KAFKA_BOOTSTRAP=nobody)
    assert "Kafka" in error_of(compensate, 4)
    summary = json.loads(compensate.stdout)
    assert (summary["sent"], summary["failed"], summary["exit_code"]) == (0, 0, 4)
    line = error_of(start, 4)
    assert nobody in line
    # No broker is no row's fault.
    [counted] = shop.database.sql("SELECT status, retry_count, last_error FROM outbox_event")
    assert counted == (0, 0, None)
    assert shop.compensate()["sent"] == 1


# --- rows that Kafka refuses ----------------------------------------------------------------------


def state(shop: Harness, event_id: str) -> tuple[int, int, str | None]:
    """(status, retry_count, last_error) of a row."""
    sql = f"SELECT status, retry_count, last_error FROM {shop.table} WHERE event_id = %s"
    [(status, tries, reason)] = shop.database.sql(sql, (event_id,))
    return status, tries, reason


@pytest.mark.parametrize("refused_by", ["producer", "broker"])
def test_a_row_that_is_too_large_waits_and_only_its_aggregate_with_it(
    refused_by: str, shop: Harness
) -> None:
    limit = 40_000 if refused_by == "broker" else 1_000_000
    shop.create_topic("order", 1, **{"max.message.bytes": str(limit)})
    relay = shop.relay()
    first = shop.ins("big", {"n": 1})
    shop.wait_sent(1)
    # Random hexadecimal digits: no compression makes them small.
    large = shop.ins("big", {"text": os.urandom(limit).hex()})
    small = shop.ins("big", {"n": 3})
    others = [shop.ins(f"other-{n}", {"n": n}) for n in range(20)]
    shop.wait_sent(21)
    shop.until(lambda: state(shop, large)[1] >= 1)

    status, _, reason = state(shop, large)
    assert status == 0
    assert re.search(r"size|large", reason or "", re.IGNORECASE)
    assert state(shop, small) == (0, 0, None)
    assert [message.event_id for message in shop.messages()] == [first, *others]
    assert relay.terminate() == 0
    last = shop.checkpoint()
    assert last is not None
    assert list(last.closed) == [("order", "big")]

    def due(when: str = "NULL") -> None:
        shop.database.sql(f"UPDATE {shop.table} SET next_retry_time = {when} WHERE status = 0")

    tries = state(shop, large)[1]
    due()
    summary = shop.compensate()
    assert (summary["sent"], summary["failed"], summary["exit_code"]) == (0, 1, 6), summary
    assert summary["left"] == 2, summary
    assert state(shop, large)[:2] == (0, tries + 1)
    assert state(shop, small) == (0, 0, None)
    # Not due yet: it is not even tried, and neither is what stands behind it.
    due("UTC_TIMESTAMP(6) + INTERVAL 1 HOUR")
    summary = shop.compensate()
    assert (summary["sent"], summary["failed"], summary["exit_code"]) == (0, 0, 6), summary

    # A relay that comes back knows that the aggregate waits.
    relay = shop.relay()
    later = shop.ins("big", {"n": 4})
    others.append(shop.ins("other-0", {"n": 99}))
    shop.wait_sent(22)
    assert [message.event_id for message in shop.messages()] == [first, *others]

    # When the row is mended, all go out in order, and the aggregate flows again.
    shop.database.sql(f"UPDATE {shop.table} SET payload = '{{}}' WHERE event_id = %s", (large,))
    due()
    shop.until(lambda: "aggregate flows again" in relay.text())
    last_one = shop.ins("big", {"n": 5})
    shop.wait_sent(26)
    big = [message.event_id for message in shop.messages() if message.key == "big"]
    assert big == [first, large, small, later, last_one]
    assert relay.terminate() == 0


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
@pytest.mark.parametrize("limit", [50_000, 1_000_000])
def test_a_refused_row_is_not_overtaken_by_its_own_transaction(
    delivery: str, limit: int, mysql: Database, harness: MakeHarness
) -> None:
    shop: Harness = harness(mysql, DELIVERY=delivery)
    shop.create_topic("order", 1, **{"max.message.bytes": str(limit)})
    relay = shop.relay()
    large = {"text": os.urandom(limit * 5 // 8).hex()}  # hexadecimal digits do not compress well
    rows = [row("a", {"n": 1}), row("b", {"n": 1}), row("a", large, event_id="large")]
    # Many enough to travel in several batches.
    rows += [row(key, {"n": n}) for n in range(2, 1000) for key in "ab"]
    with shop.database.connect() as connection, connection.cursor() as cursor:
        cursor.executemany(INSERT.format(table=shop.table), rows)
        connection.commit()
    shop.wait_sent(1000)
    shop.until(lambda: state(shop, "large")[1] >= 1)
    assert relay.terminate() == 0
    arrived: dict[str, dict[str, None]] = {"a": {}, "b": {}}
    for message in shop.messages():
        arrived[message.key][message.event_id] = None
    assert list(arrived["a"]) == [rows[0][0]]
    assert list(arrived["b"]) == [values[0] for values in rows if values[2] == "b"]
    assert shop.count(0) == 999


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_another_aggregate_of_the_same_key_costs_no_try(
    delivery: str, mysql: Database, harness: MakeHarness
) -> None:
    """Two types with one topic: what stands behind a refused record of its key, but belongs to
    another aggregate, is sent as if nothing were before it."""
    shop: Harness = harness(mysql, DELIVERY=delivery)
    shop.create_topic("all", 1, **{"max.message.bytes": "20000"})
    relay = shop.relay(TOPIC=shop.topic_prefix + "all")
    rows = [
        row("a", {"n": 1}, kind="invoice"),
        row("a", {"text": os.urandom(15_000).hex()}, event_id="large"),
        row("a", {"n": 2}),
        *(row("a", {"n": n}, kind="invoice") for n in range(2, 10)),
    ]
    with shop.database.connect() as connection, connection.cursor() as cursor:
        cursor.executemany(INSERT.format(table=shop.table), rows)
        connection.commit()
    shop.wait_sent(9)
    shop.until(lambda: state(shop, "large")[1] >= 1)
    assert relay.terminate() == 0
    invoices = [values[0] for values in rows if values[1] == "invoice"]
    assert list(dict.fromkeys(one.event_id for one in shop.messages("all"))) == invoices
    assert [state(shop, event_id)[:2] for event_id in invoices] == [(1, 0)] * 9
    assert state(shop, str(rows[2][0])) == (0, 0, None)


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_small_rows_are_sent_however_many_there_are_at_once(
    delivery: str, mysql: Database, harness: MakeHarness
) -> None:
    # Together they are larger than what the topic takes in one batch; each one is not.
    shop: Harness = harness(mysql, DELIVERY=delivery)
    shop.create_topic("order", 1, **{"max.message.bytes": "20000"})
    relay = shop.relay()
    rows = [
        row(f"k{n % 9}", {"text": os.urandom(2000).hex()}, event_id=f"e{n:02}") for n in range(60)
    ]
    with shop.database.connect() as connection, connection.cursor() as cursor:
        cursor.executemany(INSERT.format(table=shop.table), rows)
        connection.commit()
    shop.wait_all_sent()
    assert relay.terminate() == 0
    assert [stopped["parked"] for stopped in relay.logged("stopped")] == [0]
    messages = shop.messages()
    assert sorted(message.event_id for message in messages) == [f"e{n:02}" for n in range(60)]

    shop.database.sql(f"UPDATE {shop.table} SET status = 0")
    summary = shop.compensate()
    assert (summary["sent"], summary["failed"], summary["exit_code"]) == (60, 0, 0), summary
    for arrived in (messages, shop.messages()[60:]):
        for key in {message.key for message in arrived}:
            ours = [message.event_id for message in arrived if message.key == key]
            assert ours == sorted(ours)


def test_one_pass_finds_every_row_that_is_too_large(mysql_shop: Harness) -> None:
    shop = mysql_shop
    shop.create_topic("order", 1, **{"max.message.bytes": "20000"})
    large = [shop.ins(f"k{n}", {"text": os.urandom(15000).hex()}) for n in range(0, 40, 4)]
    behind = [shop.ins(f"k{n}", {"n": n}) for n in range(0, 40, 4)]
    small = [shop.ins(f"k{n}", {"n": n}) for n in range(40) if n % 4]
    summary = shop.compensate()
    assert (summary["sent"], summary["failed"], summary["exit_code"]) == (30, 10, 6), summary
    assert [message.event_id for message in shop.messages()] == small
    assert {state(shop, event_id)[:2] for event_id in large} == {(0, 1)}
    assert {state(shop, event_id)[:2] for event_id in behind} == {(0, 0)}


def test_a_row_that_cannot_be_routed_waits_with_its_aggregate(shop: Harness) -> None:
    relay = shop.relay()
    bad = [
        shop.ins("a", {"n": 1}, kind="no topic!"),
        shop.ins("", {"n": 2}),
        shop.ins("b", {"n": 3}, headers=["no", "object"]),
    ]
    behind = [shop.ins("a", {"n": 4}, kind="no topic!"), shop.ins("b", {"n": 5})]
    good = shop.ins("a", {"n": 6})
    shop.wait_sent(1)
    shop.until(lambda: all(state(shop, event_id)[1] >= 1 for event_id in bad))
    words = ["no topic!", "aggregate_id", "headers"]
    for event_id, word in zip(bad, words, strict=True):
        status, _, reason = state(shop, event_id)
        assert status == 0
        assert word in (reason or "")
    for event_id in behind:
        assert state(shop, event_id) == (0, 0, None)
    assert [message.event_id for message in shop.messages()] == [good]
    assert relay.terminate() == 0


def test_two_tables_under_one_name_are_refused(mysql: Database, harness: MakeHarness) -> None:
    """The checkpoint of the one says nothing about the other: its rows would be passed over, and
    the marks that the first one owes would be lost."""
    shop: Harness = harness(mysql)
    relay = shop.relay()
    shop.ins("a", {"n": 1})
    shop.wait_all_sent()
    with (
        Database.create(mysql.url) as second,
        Harness(second, shop.kafka, shop.home, {"NAME": shop.name}) as other,
    ):
        other.ins("a", {"n": 2})
        told = f"carries {mysql.url.database}.outbox_event"
        refused = other.run("compensate", "--older-than", "0s")
        assert refused.wait() == 2, refused.text()
        assert told in refused.text()
        doctor = other.run("doctor")
        assert doctor.wait() == 2
        assert told in doctor.stdout.decode()
        assert relay.terminate() == 0
        refused = other.run("start")
        assert refused.wait() == 2, refused.text()
        assert told in refused.text()
        assert other.run("position", "set", "--current").wait() == 0
        assert other.run("start", "--until-current").wait() == 0
    assert [message.json["n"] for message in shop.messages()] == [1]
