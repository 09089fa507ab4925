"""Faults that users of binlog readers met in events and transactions, each as the smallest input
that shows it, on real servers: through the source alone where only the log is in question, with
relay, compensator and Kafka where marks, restarts or both ways are."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from cdc_relay.binlog.rows import UnreadRow
from cdc_relay.kafka.checkpoints import Checkpoint
from cdc_relay.outbox import OutboxEvent
from cdc_relay.position import Position
from dev.database import Database as DatabaseServer
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
def own_source(own_server: DatabaseServer) -> Iterator[SourceUnderTest]:
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
    server: DatabaseServer = request.getfixturevalue(name)
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


def test_nothing_of_an_xa_transaction_is_given_before_its_outcome(
    own_source: SourceUnderTest,
) -> None:
    """The rows are logged at PREPARE; a reader that gives them out then has invented an event
    when the transaction is rolled back."""
    source = own_source
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
    """Upserts, ignored duplicates and updates of an outbox row are no events. REPLACE is one only
    where the server does it as DELETE and INSERT."""
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
    # The servers execute REPLACE of an event id as an update, of an id as delete and insert. The
    # updated row is pending: the compensator delivers it.
    replace = insert.replace("INSERT", "REPLACE")
    by_id = replace.replace("(event_id", "(id, event_id").replace("(%s", "(99, %s")
    with source.session() as session:
        session.run(replace, row("new", event_id="e-3"))
        session.run(replace, row("newer", event_id="e-3"))
        session.run(by_id, row("by-id", event_id="e-4"))
        session.run(by_id, row("by-id-again", event_id="e-5"))
    assert source.read().keys == ["new", "by-id", "by-id-again"]


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
    shop.until(
        lambda: relay.logged(
            "rows were written in statement format; the compensator will deliver them"
        )
    )
    assert shop.compensate()["sent"] == 2
    assert shop.compensate()["sent"] == 0
    assert sorted(message.key for message in shop.messages()) == [
        "as-statement",
        "logged",
        "unlogged",
    ]
    assert relay.terminate() == 0


def test_a_server_that_logs_statements_is_refused(
    own_server: DatabaseServer, harness: MakeHarness
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
    expected = database.sql(f"SELECT aggregate_id, event_id, payload FROM {shop.table} ORDER BY id")
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
    keys: list[str] = []
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
    stored = dict(database.sql(f"SELECT id, aggregate_id FROM {own_source.table}"))
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
    server: DatabaseServer = request.getfixturevalue(request.param)
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


def test_what_was_rolled_back_in_a_transaction_too_large_to_hold(
    mixed_source: SourceUnderTest,
) -> None:
    """The same, when the transaction is read twice: rollbacks stand in the log before, across and
    behind the place where memory ends."""
    payload = "x" * 900
    keys = [[f"{part}-{number}" for number in range(3000)] for part in "abc"]
    with mixed_source.session() as session:
        session.run("BEGIN")
        session.ins("first")
        session.run("SAVEPOINT s")
        session.ins("undone")
        session.script("INSERT INTO audit VALUES ('x')", "ROLLBACK TO s")
        session.bulk(keys[0], payload)
        session.run("SAVEPOINT t")
        session.bulk([f"undone-{number}" for number in range(3000)], payload)
        session.script("INSERT INTO audit VALUES ('x')", "ROLLBACK TO t")
        session.bulk(keys[1], payload)
        session.run("SAVEPOINT u")
        session.ins("undone")
        session.script("INSERT INTO audit VALUES ('x')", "ROLLBACK TO u")
        session.bulk(keys[2], payload)
        session.run("COMMIT")
        session.ins("last")
    reading = mixed_source.read()
    assert reading.keys == ["first", *keys[0], *keys[1], *keys[2], "last"]


def test_a_table_without_transactions_is_no_outbox(shop: Harness) -> None:
    """Its rows would outlive a rollback."""
    engines = ["MyISAM", "Aria"] if shop.database.is_mariadb else ["MyISAM"]
    for engine in engines:
        shop.database.sql(f"ALTER TABLE {shop.table} ENGINE = {engine}")
        process = shop.run("start")
        assert process.wait() == 3
        assert f"uses the engine {engine}" in process.text()


def test_a_table_that_is_made_with_its_rows(source: SourceUnderTest) -> None:
    """CREATE TABLE ... SELECT holds rows behind the statement that creates the table; both are
    one transaction, and no position lies between them."""
    table = source.table
    source.ins("old")
    source.skip()
    source.database.sql(f"RENAME TABLE {table} TO before_us")
    source.database.sql(f"CREATE TABLE {table} LIKE before_us")
    source.database.sql(f"DROP TABLE {table}")
    source.database.sql(
        f"CREATE TABLE {table} (PRIMARY KEY (id), UNIQUE (event_id))"
        " SELECT id + 10 AS id, CONCAT('copy-', event_id) AS event_id, aggregate_type,"
        " CONCAT('copy of ', aggregate_id) AS aggregate_id, event_type, payload, headers, status,"
        " retry_count, next_retry_time, created_at, updated_at FROM before_us"
    )
    source.ins_with_id(100, "new")
    assert source.read().keys == ["copy of old", "new"]


# --- partitions, TRUNCATE -------------------------------------------------------------------------


_PARTITIONED = """
    ALTER TABLE {} DROP INDEX uk_event_id, DROP PRIMARY KEY, ADD PRIMARY KEY (id, created_at)
    PARTITION BY RANGE COLUMNS (created_at) (
        PARTITION old VALUES LESS THAN ('2020-01-01'),
        PARTITION middle VALUES LESS THAN ('2024-01-01'),
        PARTITION rest VALUES LESS THAN (MAXVALUE)
    )
"""


def test_a_partitioned_table(source: SourceUnderTest) -> None:
    """Row events of partitioned tables carry extra bytes in front of the rows."""
    table, database = source.table, source.database
    database.sql(_PARTITIONED.format(table))
    source.skip()
    for key, time in (("a", "2019-05-05"), ("b", "2022-02-02"), ("c", "2025-01-01")):
        database.sql(
            f"INSERT INTO {table} (event_id, aggregate_type, aggregate_id, event_type, payload,"
            " created_at) VALUES (UUID(), 'order', %s, 'MADE', JSON_ARRAY(%s), %s)",
            (key, key, time),
        )
    stored = database.sql(f"SELECT id, event_id, aggregate_id, payload FROM {table} ORDER BY id")
    database.sql(f"UPDATE {table} SET status = 1 WHERE aggregate_id = 'a'")
    database.sql(f"UPDATE {table} SET created_at = '2026-01-01' WHERE aggregate_id = 'b'")
    database.sql(f"ALTER TABLE {table} DROP PARTITION old")
    source.ins("d")
    rows = source.read().rows
    assert len(rows) == 4
    # What was changed or dropped since, and is not proved by its neighbours, is read back.
    for read, expected in zip(rows, stored, strict=False):
        assert read.id == expected[0]
        if isinstance(read, OutboxEvent):
            assert (read.event_id, read.aggregate_id) == expected[1:3]
            assert read.payload == expected[3].encode()
    assert isinstance(rows[-1], OutboxEvent)
    assert rows[-1].aggregate_id == "d"
    keys = ["e", "f"]
    source.ins(*keys)
    assert source.read().keys == keys


def test_ids_that_start_again_after_truncate(shop: Harness) -> None:
    """The rows of the log that TRUNCATE took from the table have the ids of new ones: all are
    published, and the marks of the old ones do not mark the new."""
    shop.create_topic()
    relay = shop.relay()
    shop.ins("before")
    shop.wait_sent(1)
    assert relay.terminate() == 0
    database = shop.database
    database.sql(f"TRUNCATE {shop.table}")
    first = [shop.ins("a", {"n": n}) for n in range(3)]
    database.sql(f"TRUNCATE {shop.table}")
    second = [shop.ins("a", {"n": n}) for n in range(3, 6)]
    assert [row_id for (row_id,) in database.sql(f"SELECT id FROM {shop.table}")] == [1, 2, 3]
    relay = shop.relay()
    shop.wait_sent(3)
    assert relay.terminate() == 0
    [stopped] = relay.logged("stopped")
    assert (stopped["sent"], stopped["marked"]) == (6, 3)
    assert [message.event_id for message in shop.messages()][1:] == [*first, *second]


# --- sizes ----------------------------------------------------------------------------------------


def test_a_transaction_larger_than_the_memory_for_it(own_source: SourceUnderTest) -> None:
    """It is read twice, so that neither memory grows with it nor anything of it is given out
    before its commit; what it rolled back in between stays out. Compressed, too."""
    table, database = own_source.table, own_source.database
    payload = "x" * 900
    keys = [f"k{number}" for number in range(18_000)]
    with own_source.session() as session:
        for compressed in [False] if database.is_mariadb else [False, True]:
            if compressed:
                session.run("SET SESSION binlog_transaction_compression = ON")
            session.run("BEGIN")
            session.ins("first")
            session.run("SAVEPOINT s")
            session.bulk([f"undone-{number}" for number in range(500)], payload)
            session.run("ROLLBACK TO s")
            for start in range(0, len(keys), 1000):
                session.bulk(keys[start : start + 1000], payload)
            session.run("COMMIT")
            session.run("BEGIN")
            session.bulk(keys[:1000], payload)
            session.run("ROLLBACK")
            session.ins("last")
            reading = own_source.read()
            assert reading.keys == ["first", *keys, "last"]
            assert reading.reconnects == 0
            # It came in several pieces, none of which is a place to go on from by itself.
            inside = [batch.position.partial for batch in reading.batches[:-1]]
            assert any(partial is not None for partial in inside)
            assert reading.batches[-1].position.partial is None
            session.run(f"TRUNCATE {table}")


@pytest.mark.parametrize("name", ["bare_mysql", "own_mysql", "own_mariadb"])
def test_an_event_larger_than_a_packet(name: str, request: pytest.FixtureRequest) -> None:
    """Events of 16 MB and more span several packets of the protocol."""
    server: DatabaseServer = request.getfixturevalue(name)
    with Database.create(server.url()) as database:
        [(before,)] = database.sql("SELECT @@global.max_allowed_packet")
        database.sql("SET GLOBAL max_allowed_packet = 134217728")
        database.close()
        try:
            database.create_outbox()
            with (
                SourceUnderTest.on(database) as source,
                database.connect(autocommit=True, max_allowed_packet=1 << 27) as connection,
            ):
                session = Session(connection, source.table)
                sizes = [5, 20_000_000, 5, 16_777_215 - 400, 33_554_430, 5]
                for number, size in enumerate(sizes):
                    session.ins(f"k{number}", payload="x" * size)
                events = source.read().events
                assert [event.aggregate_id for event in events] == [f"k{n}" for n in range(6)]
                # Quotes included.
                assert [len(event.payload or b"") for event in events] == [n + 2 for n in sizes]
                assert {bytes(set((event.payload or b"").strip(b'"'))) for event in events} == {
                    b"x"
                }
        finally:
            database.sql(f"SET GLOBAL max_allowed_packet = {before}")


def test_a_row_too_large_for_kafka_is_parked_and_memory_comes_back(
    bare_mysql: DatabaseServer, harness: MakeHarness
) -> None:
    with Database.create(bare_mysql.url()) as database:
        shop = harness(database)
        relay = shop.relay()
        with database.connect(autocommit=True, max_allowed_packet=1 << 26) as connection:
            session = Session(connection, shop.table)
            session.ins("small-1")
            shop.wait_sent(1)
            session.ins("big", payload="x" * 20_000_000)
            session.ins("small-2")
            shop.wait_sent(2)
            before = resident(relay.pid)
            for _ in range(3):
                session.ins("big", payload="x" * 20_000_000)
            session.ins("small-3")
            session.ins("big", payload="waits")
            shop.wait_sent(3)
        assert [message.key for message in shop.messages()] == ["small-1", "small-2", "small-3"]
        # One was tried; the others, small or large, wait behind it.
        parked = relay.logged("row parked; its aggregate waits")
        assert {entry["aggregate_id"] for entry in parked} == {"big"}
        assert "too large" in parked[0]["reason"].lower()
        assert shop.count(0) == 5
        # Five rows of 20 MB have passed; the allocator may keep some of what one of them took.
        shop.until(lambda: resident(relay.pid) < before + 90_000_000)
        assert relay.terminate() == 0


def resident(pid: int) -> int:
    """Bytes of a process in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_a_place_beyond_4_gib(
    bare_mysql: DatabaseServer, own_mysql: DatabaseServer, harness: MakeHarness
) -> None:
    """The dump command has 32 bits for an offset: where only the offset tells the place, it is
    lost, and the table is swept; no difference at all where GTIDs tell it."""
    with Database.create(bare_mysql.url()) as database:
        shop = harness(database)
        shop.run("start", "--until-current")
        place = shop.checkpoint()
        assert place is not None
        assert place.position.gtids is None
        far = place.position.at(place.position.file, 4294967396, None)
        store_checkpoint(shop, Checkpoint(far))
        expected = shop.ins("lost?")
        process = shop.run("start", MARK="none")
        assert process.wait() == 5
        assert f"{far.file}:4294967396 lies beyond 4 GiB" in process.text()
        assert "Traceback" not in process.text()
        assert not shop.messages()
        process = shop.run("start", "--until-current")
        assert process.wait() == 0
        assert "lies beyond 4 GiB" in process.text()
        assert [message.event_id for message in shop.messages()] == [expected]
    with Database.create(own_mysql.url()) as database:
        shop = harness(database)
        shop.run("start", "--until-current")
        place = shop.checkpoint()
        assert place is not None
        far = place.position.at(place.position.file, 4294967396, place.position.gtids)
        store_checkpoint(shop, Checkpoint(far))
        shop.ins("one")
        assert shop.run("start", "--until-current").wait() == 0
        assert [message.key for message in shop.messages()] == ["one"]


def store_checkpoint(shop: Harness, checkpoint: Checkpoint) -> None:
    """Write a checkpoint by hand."""
    record = checkpoint.record(shop.name)
    producer = Producer({"bootstrap.servers": shop.kafka})
    producer.produce(record.topic, record.value, record.key, record.partition)
    assert producer.flush(20) == 0


# --- GTIDs ----------------------------------------------------------------------------------------


def test_tagged_gtids(mysql_shop: Harness) -> None:
    """Since 8.3 a GTID may have a tag, which comes in an event type of its own."""
    shop = mysql_shop
    shop.create_topic()
    relay = shop.relay()
    with shop.database.connect(autocommit=True) as connection:
        session = Session(connection, shop.table)
        session.run("SET gtid_next = 'AUTOMATIC:mytag'")
        session.ins("tagged-1")
        session.run("SET gtid_next = 'AUTOMATIC'")
        session.ins("plain")
        shop.wait_sent(2)
        assert relay.terminate() == 0
        place = shop.checkpoint()
        assert place is not None
        assert place.position.gtids is not None
        assert ":mytag:" in place.position.gtids
        session.run("SET gtid_next = 'AUTOMATIC:mytag'")
        session.ins("tagged-2")
        session.run(f"ALTER TABLE {shop.table} COMMENT 'tagged'")
        session.run("SET gtid_next = 'AUTOMATIC:a_tag_of_thirty_two_characters_x'")
        session.ins("tagged-3")
        session.run("SET gtid_next = 'AUTOMATIC'")
        session.ins("last")
    relay = shop.relay()
    shop.wait_sent(5)
    assert relay.terminate() == 0
    assert [message.key for message in shop.messages()] == [
        "tagged-1",
        "plain",
        "tagged-2",
        "tagged-3",
        "last",
    ]


def test_gtids_given_by_hand(mysql_source: SourceUnderTest) -> None:
    """Numbers with gaps, of other servers, out of order, and empty transactions."""
    one, other = str(uuid.uuid4()), str(uuid.uuid4())
    with mysql_source.session() as session:
        for key, gtid in (("a", f"{one}:5"), ("b", f"{one}:2"), ("c", f"{other}:7")):
            session.run(f"SET gtid_next = '{gtid}'")
            session.ins(key)
        session.script(f"SET gtid_next = '{one}:3'", "BEGIN", "COMMIT")
        session.script(f"SET gtid_next = '{other}:tag:9'", "BEGIN", "COMMIT")
        session.run("SET gtid_next = 'AUTOMATIC'")
        session.ins("d")
    assert mysql_source.read().keys == ["a", "b", "c", "d"]
    gtids = mysql_source.position.gtids
    assert gtids is not None
    assert f"{one}:2-3:5" in gtids
    assert f"{other}:7:tag:9" in gtids
    mysql_source.ins("e")
    assert mysql_source.read().keys == ["e"]


# --- rotation -------------------------------------------------------------------------------------


def test_rotation_checksums_and_a_killed_dump(
    own_server: DatabaseServer, harness: MakeHarness
) -> None:
    """The saved file is always one that the server has, the place always a boundary, and a restart
    sends nothing twice and loses nothing."""
    with Database.create(own_server.url()) as database:
        shop = harness(database)
        shop.create_topic()
        relay = shop.relay()
        expected: list[str] = []
        for value in (None, "NONE", None, "CRC32", None):
            expected.append(shop.ins("a", {"n": len(expected)}))
            if value is None:
                database.sql("FLUSH BINARY LOGS")
            else:
                database.sql(f"SET GLOBAL binlog_checksum = {value}")
            expected.append(shop.ins("a", {"n": len(expected)}))
        shop.wait_sent(len(expected))
        database.sql("FLUSH BINARY LOGS")
        kill_dumps(database)
        shop.until(lambda: len(relay.logged("streaming")) == 2)
        assert relay.terminate() == 0
        check_boundary(shop)
        expected.append(shop.ins("a", {"n": len(expected)}))
        relay = shop.relay()
        shop.wait_sent(len(expected))
        assert relay.terminate() == 0
        check_boundary(shop)
        assert [message.event_id for message in shop.messages()] == expected


def kill_dumps(database: Database) -> None:
    """End the server's side of every dump."""
    found = database.sql(
        "SELECT id FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%%'"
    )
    assert found
    for (number,) in found:
        database.sql(f"KILL {number}")


# What may stand between two transactions.
_BETWEEN = ("end", "start", "gtid", "anonymous_gtid", "rotate", "stop", "binlog_checkpoint")


def check_boundary(shop: Harness) -> None:
    """The checkpoint names a file of the server and a place where a transaction may begin."""
    place = shop.checkpoint()
    assert place is not None
    files = {item[0]: int(item[1]) for item in shop.database.sql("SHOW BINARY LOGS")}
    file, offset = place.position.file, place.position.offset
    assert file in files
    starts = {files[file]: "end", 4: "start"}
    for item in shop.database.sql(f"SHOW BINLOG EVENTS IN '{file}'"):
        starts[int(item[1])] = str(item[2])
    assert offset in starts, (file, offset)
    kind = starts[offset].lower()
    assert kind in _BETWEEN, kind
