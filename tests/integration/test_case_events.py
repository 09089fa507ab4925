"""Faults that users of binlog readers met in events and transactions, each as the smallest input
that shows it, on real servers: through the source alone where only the log is in question, with
relay, compensator and Kafka where marks, restarts or both ways are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cdc_relay.binlog.rows import UnreadRow
from cdc_relay.outbox import OutboxEvent
from cdc_relay.position import Position
from dev.mysql import MySQL
from dev.server import Server
from tests.support.harness import Harness
from tests.support.source import Session, SourceUnderTest
from tests.support.sql import INSERT, Database, row

MakeHarness = Callable[..., Harness]




@pytest.fixture
def source(database: Database) -> Iterator[SourceUnderTest]:
    """An outbox on MySQL and on MariaDB."""
    database.create_outbox()
    with SourceUnderTest.on(database) as made:
        yield made


@pytest.fixture
def mysql_source(mysql: Database) -> Iterator[SourceUnderTest]:
    mysql.create_outbox()
    with SourceUnderTest.on(mysql) as made:
        yield made


@pytest.fixture
def own_source(own_server: Server) -> Iterator[SourceUnderTest]:
    """An outbox on a server that may be reconfigured: MySQL without and with GTIDs, MariaDB."""
    with Database.create(own_server.url()) as database:
        database.create_outbox()
        with SourceUnderTest.on(database) as made:
            yield made


# --- many rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bare_mysql", "own_mariadb"])
def test_every_row_of_a_statement_counts(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """One INSERT with several VALUES, INSERT ... SELECT, LOAD DATA: readers that took only the
    first row of an event lost the rest."""
    server: MySQL = request.getfixturevalue(name)
    keys = [f"k{number}" for number in range(500)]
    file = tmp_path / "rows.tsv"
    file.write_text("".join(f"l-{key}\torder\tl-{key}\tLOADED\t{{}}\n" for key in keys))
    with Database.create(server.url()) as database:
        database.create_outbox()
        with (
            SourceUnderTest.on(database) as source,
            database.connect(autocommit=True, local_infile=True) as connection,
        ):
            session = Session(connection, source.table)
            session.bulk(["one", "two", "three"])
            session.run("CREATE TABLE basket (id INT PRIMARY KEY, k VARCHAR(20))")
            with connection.cursor() as cursor:
                cursor.executemany("INSERT INTO basket VALUES (%s, %s)", list(enumerate(keys)))
            session.run(
                f"INSERT INTO {source.table} (event_id, aggregate_type, aggregate_id, event_type)"
                " SELECT UUID(), 'order', CONCAT('s-', k), 'SELECTED' FROM basket ORDER BY id"
            )
            session.run(
                f"LOAD DATA LOCAL INFILE '{file}' INTO TABLE {source.table}"
                " (event_id, aggregate_type, aggregate_id, event_type, payload)"
            )
            expected = ["one", "two", "three"]
            expected += [f"s-{key}" for key in keys] + [f"l-{key}" for key in keys]
            assert source.read().keys == expected


# --- XA -------------------------------------------------------------------------------------------


def test_nothing_of_an_xa_transaction_is_given_before_its_outcome(source: SourceUnderTest) -> None:
    """The rows are logged at PREPARE; a reader that gives them out then has invented an event
    when the transaction is rolled back."""
    with source.session() as session:
        session.run("XA START 'gone'")
        session.ins("never")
        session.script("XA END 'gone'", "XA PREPARE 'gone'")
        source.ins("between")
        assert source.read().keys == ["between"]
        assert source.position.prepared
        session.run("XA ROLLBACK 'gone'")
        source.ins("after")
        assert source.read().keys == ["after"]
        assert not source.position.prepared

        session.run("XA START 'kept', 'branch', 7")
        session.ins("one", "two")
        session.script("XA END 'kept', 'branch', 7", "XA PREPARE 'kept', 'branch', 7")
        source.ins("between")
        assert source.read().keys == ["between"]
        # A new connection knows of it from the position alone.
        resumed = Position.from_json(json.loads(json.dumps(source.position.to_json())))
        session.run("XA COMMIT 'kept', 'branch', 7")
        source.ins("after")
        rows = source.read(resumed).rows
        ids = dict(source.database.sql(f"SELECT aggregate_id, id FROM {source.table}"))
        reason = "prepared XA transaction"
        assert rows[:2] == [UnreadRow(ids["one"], reason), UnreadRow(ids["two"], reason)]
        assert isinstance(rows[2], OutboxEvent)
        assert rows[2].aggregate_id == "after"
        assert not source.position.prepared

        session.run("XA START 'phase'")
        session.ins("one-phase")
        session.script("XA END 'phase'", "XA COMMIT 'phase' ONE PHASE")
        session.script("XA START 'empty'", "XA END 'empty'", "XA PREPARE 'empty'")
        session.script("XA COMMIT 'empty'", "XA START 'back'")
        session.ins("rolled-back")
        session.script("XA END 'back'", "XA ROLLBACK 'back'")
        source.ins("last")
        assert source.read().keys == ["one-phase", "last"]


def test_xa_rows_are_published_after_the_commit_in_another_run(shop: Harness) -> None:
    """Prepared under one relay, committed under the next: published once, and marked."""
    shop.create_topic()
    relay = shop.relay()
    with shop.database.connect(autocommit=True) as connection:
        session = Session(connection, shop.table)
        session.run("XA START 'x'")
        session.ins("xa-1", "xa-2")
        session.script("XA END 'x'", "XA PREPARE 'x'")
        shop.ins("between")
        shop.wait_sent(1)
        assert relay.terminate() == 0
        relay = shop.relay()
        session.run("XA COMMIT 'x'")
        shop.ins("after")
        shop.wait_sent(4)
        assert relay.terminate() == 0
    assert [message.key for message in shop.messages()] == ["between", "xa-1", "xa-2", "after"]


# --- updates and deletes --------------------------------------------------------------------------


def test_a_partial_json_update_is_no_event(mysql_source: SourceUnderTest) -> None:
    """PARTIAL_JSON gives an UPDATE an event type of its own, which readers choked on."""
    table = mysql_source.table
    with mysql_source.session() as session:
        session.run(INSERT.format(table=table), row("first", {}, headers={"attempt": 1}))
        assert mysql_source.read().keys == ["first"]
        session.run("SET SESSION binlog_row_value_options = PARTIAL_JSON")
        session.run(f"UPDATE {table} SET headers = JSON_SET(headers, '$.attempt', 2)")
        session.run("SET SESSION binlog_row_image = MINIMAL")
        session.run(f"UPDATE {table} SET headers = JSON_SET(headers, '$.attempt', 3)")
        session.run("SET SESSION binlog_row_image = FULL")
        session.ins("second")
    assert mysql_source.read().keys == ["second"]


def test_only_true_inserts_are_events(source: SourceUnderTest) -> None:
    """Upserts, ignored duplicates and updates of an outbox row are no events. REPLACE of a row
    with the same event id is one only where the server does it as DELETE and INSERT."""
    table = source.table
    values = row("first", {"n": 1}, event_id="e-1")
    again = row("again", {"n": 2}, event_id="e-1")
    insert = INSERT.format(table=table)
    with source.session() as session:
        session.run(insert, values)
        session.run(insert + " ON DUPLICATE KEY UPDATE retry_count = retry_count + 1", again)
        session.run(insert.replace("INSERT", "INSERT IGNORE"), again)
        session.run(f"UPDATE {table} SET status = 1, payload = '[]'")
        session.run(
            insert + ", (%s, %s, %s, %s, %s, %s) ON DUPLICATE KEY UPDATE retry_count = 0",
            again + row("fresh", event_id="e-2"),
        )
        session.run(f"DELETE FROM {table} WHERE event_id = 'e-1'")
    assert source.read().keys == ["first", "fresh"]
    with source.session() as session:
        session.run(insert.replace("INSERT", "REPLACE"), row("new", event_id="e-3"))
        session.run(insert.replace("INSERT", "REPLACE"), row("newer", event_id="e-3"))
    assert source.read().keys in (["new"], ["new", "newer"])


def test_a_row_deleted_in_its_own_transaction_is_published_once(shop: Harness) -> None:
    """The row is gone when its event is handled: its mark finds nothing, which is no error."""
    relay = shop.relay()
    with shop.database.connect() as connection:
        session = Session(connection, shop.table)
        session.ins("gone")
        session.run(f"DELETE FROM {shop.table} WHERE aggregate_id = 'gone'")
        connection.commit()
    shop.ins("stays")
    shop.wait_sent(1)
    assert relay.terminate() == 0
    assert [message.key for message in shop.messages()] == ["gone", "stays"]
    [stopped] = relay.logged("stopped")
    assert (stopped["sent"], stopped["marked"], stopped["parked"]) == (2, 1, 0)
    assert not [line for line in relay.text().splitlines() if '"level": "error"' in line]
    assert not shop.relay().terminate()
    assert len(shop.messages()) == 2


# --- rows that leave no row event -----------------------------------------------------------------


def test_rows_that_the_log_does_not_hold_go_out_through_the_compensator(shop: Harness) -> None:
    """Statement format and a session without logging leave no row event; the table has the row."""
    relay = shop.relay()
    with shop.database.connect(autocommit=True) as connection:
        session = Session(connection, shop.table)
        session.run("SET SESSION binlog_format = STATEMENT")
        session.ins("as-statement")
        session.run("SET SESSION binlog_format = ROW")
        session.run("SET SESSION sql_log_bin = 0")
        session.ins("unlogged")
        session.run("SET SESSION sql_log_bin = 1")
        session.ins("logged")
    shop.wait_sent(1)
    assert [message.key for message in shop.messages()] == ["logged"]
    shop.until(lambda: relay.logged("rows were written in statement format; the compensator will "
                                    "deliver them"))
    assert shop.compensate()["sent"] == 2
    assert shop.compensate()["sent"] == 0
    assert sorted(message.key for message in shop.messages()) == [
        "as-statement", "logged", "unlogged",
    ]
    assert relay.terminate() == 0


def test_a_server_that_logs_statements_is_refused(
    own_server: Server, harness: MakeHarness
) -> None:
    with Database.create(own_server.url()) as database:
        shop = harness(database)
        for value in ("STATEMENT", "MIXED"):
            database.sql(f"SET GLOBAL binlog_format = {value}")
            try:
                process = shop.run("start")
            finally:
                database.sql("SET GLOBAL binlog_format = ROW")
            assert process.wait() == 3
            assert f"binlog_format is {value}" in process.text()


# --- images and names -----------------------------------------------------------------------------


def test_columns_that_the_image_lacks_are_read_back(shop: Harness) -> None:
    """A minimal row image leaves unnamed columns out; they are not NULL."""
    database = shop.database
    database.sql(f"ALTER TABLE {shop.table} MODIFY event_id VARCHAR(64) NOT NULL DEFAULT (UUID())")
    relay = shop.relay()
    with database.connect(autocommit=True) as connection:
        session = Session(connection, shop.table)
        session.run("SET SESSION binlog_row_image = MINIMAL")
        session.run(
            f"INSERT INTO {shop.table} (aggregate_type, aggregate_id, event_type)"
            " VALUES ('order', 'few', 'CREATED')"
        )
        session.run(
            f"INSERT INTO {shop.table} (aggregate_type, aggregate_id, event_type, payload)"
            " VALUES ('order', 'more', 'CREATED', JSON_ARRAY(1)), ('order', 'two', 'CREATED', '{}')"
        )
        session.run(f"UPDATE {shop.table} SET retry_count = 1 WHERE aggregate_id = 'few'")
        session.run("SET SESSION binlog_row_image = NOBLOB")
        session.ins("noblob", payload={"a": 1})
    shop.wait_sent(4)
    expected = database.sql(
        f"SELECT aggregate_id, event_id, payload FROM {shop.table} ORDER BY id"
    )
    messages = shop.messages()
    assert [(m.key, m.event_id, m.value) for m in messages] == [
        (key, event_id, None if payload is None else payload.encode())
        for key, event_id, payload in expected
    ]
    assert all(m.timestamp_ms > 0 and m.headers["occurred_at"] for m in messages)
    assert relay.terminate() == 0


def test_names_in_the_log_or_not(own_source: SourceUnderTest) -> None:
    """Column names are in the log only at binlog_row_metadata=FULL: a history that changes in
    between is read whole, and no field is ever empty or another's."""
    database = own_source.database
    levels = ["MINIMAL", "FULL"] + ["NO_LOG"] * database.is_mariadb
    [(before,)] = database.sql("SELECT @@global.binlog_row_metadata")
    start = own_source.position
    keys = []
    try:
        for level in [*levels, *levels]:
            database.sql(f"SET GLOBAL binlog_row_metadata = {level}")
            # Sessions and table definitions take it up when they are opened anew.
            database.sql("FLUSH TABLES")
            database.close()
            keys.append(f"{level}-{len(keys)}")
            own_source.ins(keys[-1], payload={"level": level})
    finally:
        database.sql(f"SET GLOBAL binlog_row_metadata = {before}")
    assert [event.aggregate_id for event in own_source.read().events] == keys
    # All of it again, after the table changed: with names in front of everything.
    database.sql(f"ALTER TABLE {own_source.table} ADD COLUMN shard INT NOT NULL DEFAULT 0 FIRST")
    own_source.ins("after")
    reading = own_source.read(start)
    assert len(reading.rows) == len(keys) + 1
    stored = {
        row_id: key
        for row_id, key in database.sql(f"SELECT id, aggregate_id FROM {own_source.table}")
    }
    assert [stored[item.id] for item in reading.rows] == [*keys, "after"]
    for item in reading.rows:
        assert isinstance(item, UnreadRow) or item.aggregate_id == stored[item.id]


# --- savepoints, rollbacks, mixed engines ---------------------------------------------------------


def test_savepoints(source: SourceUnderTest) -> None:
    with source.session() as session:
        session.run("BEGIN")
        session.ins("e1")
        session.run("SAVEPOINT s")
        session.ins("e2")
        session.run("ROLLBACK TO s")
        session.ins("e3")
        session.run("COMMIT")
    assert source.read().keys == ["e1", "e3"]


@pytest.fixture(params=["bare_mysql", "own_mariadb"])
def mixed_source(request: pytest.FixtureRequest) -> Iterator[SourceUnderTest]:
    """Servers on which one transaction may write to a table without transactions."""
    server: Server = request.getfixturevalue(request.param)
    with Database.create(server.url()) as database:
        database.create_outbox()
        database.sql("CREATE TABLE audit (t TEXT) ENGINE = MyISAM")
        with SourceUnderTest.on(database) as made:
            yield made


@pytest.mark.parametrize("direct", ["ON", "OFF"])
def test_a_table_without_transactions_in_a_transaction(
    direct: str, mixed_source: SourceUnderTest
) -> None:
    """The group ends with the text COMMIT or ROLLBACK, and holds ROLLBACK TO: what the outbox
    rolled back is not published, and nothing waits for an XID that never comes."""
    with mixed_source.session() as session:
        session.run(f"SET SESSION binlog_direct_non_transactional_updates = {direct}")
        session.run("BEGIN")
        session.ins("e4")
        session.script("INSERT INTO audit VALUES ('x')", "ROLLBACK")
        session.ins("after")
        session.run("BEGIN")
        session.ins("m1")
        session.run("SAVEPOINT s")
        session.ins("m2")
        session.script("INSERT INTO audit VALUES ('x')", "ROLLBACK TO s")
        session.ins("m3")
        # The same savepoint again, and names in every spelling.
        session.run("SAVEPOINT `a b`")
        session.ins("m4")
        session.script("INSERT INTO audit VALUES ('x')", "ROLLBACK TO SAVEPOINT S")
        session.ins("m5")
        session.run("SAVEPOINT `Öre``'`")
        session.ins("m6")
        session.script("INSERT INTO audit VALUES ('x')", "ROLLBACK WORK TO `öRE``'`")
        session.script("COMMIT", "INSERT INTO audit VALUES ('alone')")
        session.run("BEGIN")
        session.script("INSERT INTO audit VALUES ('y')", "COMMIT")
        session.ins("last")
    assert mixed_source.read().keys == ["after", "m1", "m5", "last"]
