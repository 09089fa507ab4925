"""Faults that users of binlog readers met with changes of the schema, on real servers: the table
swapped away under the relay, columns that only the log shows, names that match nothing."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cdc_relay.binlog.rows import UnreadRow
from cdc_relay.errors import SourceError
from cdc_relay.outbox import OutboxEvent, table_ddl
from cdc_relay.position import Position
from dev.console import run
from dev.mariadb import MariaDB
from dev.mysql import MySQL
from tests.support.harness import Harness
from tests.support.source import SourceUnderTest
from tests.support.sql import Database, row

MakeHarness = Callable[..., Harness]


@pytest.fixture
def source(database: Database) -> Iterator[SourceUnderTest]:
    """An outbox on MySQL and on MariaDB, with the servers' defaults: no names in the log."""
    database.create_outbox()
    with SourceUnderTest.on(database) as made:
        yield made


# --- online schema change -------------------------------------------------------------------------

_FIELDS = (
    "id, event_id, aggregate_type, aggregate_id, event_type, payload, headers, status,"
    " retry_count, next_retry_time, last_error, created_at, updated_at, sent_at"
)


def test_an_online_schema_change_swaps_the_table(shop: Harness) -> None:
    """Every row is copied into a helper table, which is renamed into place: the copies are not
    published, and relay, marks and compensator go on with the new table without a restart."""
    shop.create_topic()
    database = shop.database
    relay = shop.relay()
    first = [shop.ins("a", {"n": n}) for n in range(3)]
    shop.wait_sent(3)
    database.sql("CREATE TABLE _outbox_event_gho LIKE outbox_event")
    database.sql("ALTER TABLE _outbox_event_gho ADD shard INT NOT NULL DEFAULT 7 AFTER event_id")
    database.sql(f"INSERT INTO _outbox_event_gho ({_FIELDS}) SELECT {_FIELDS} FROM outbox_event")
    first.append(shop.ins("a", {"n": 3}))
    database.sql(
        f"INSERT INTO _outbox_event_gho ({_FIELDS}) SELECT {_FIELDS} FROM outbox_event"
        " WHERE id > (SELECT MAX(id) FROM _outbox_event_gho)"
    )
    shop.wait_sent(4)
    database.sql(
        "RENAME TABLE outbox_event TO _outbox_event_del, _outbox_event_gho TO outbox_event"
    )
    # The copy of the last row may have been made before it was marked.
    database.sql("UPDATE outbox_event SET status = 1")
    first.append(shop.ins("a", {"n": 4}))
    shop.wait_sent(5)
    database.sql("DROP TABLE _outbox_event_del")
    assert relay.terminate() == 0
    relay = shop.relay()
    first.append(shop.ins("a", {"n": 5}))
    shop.wait_sent(6)
    assert relay.terminate() == 0
    first.append(shop.ins("a", {"n": 6}))
    assert shop.compensate()["sent"] == 1
    assert [message.event_id for message in shop.messages()] == first
    assert [message.json["n"] for message in shop.messages()] == list(range(7))


# --- layouts over time ----------------------------------------------------------------------------

# Each changes the place, the type or the name of columns; the fields of an event stay.
_CHANGES = [
    "ADD extra INT NOT NULL DEFAULT 5 AFTER id",
    "DROP extra",
    "MODIFY aggregate_id VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL"
    " AFTER event_id",
    "MODIFY event_type VARCHAR(200) CHARACTER SET latin1 NOT NULL FIRST",
    "ADD twin VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT 'twin'"
    " AFTER aggregate_id",
    "DROP sent_at, DROP last_error",
    "CHANGE twin other VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT 'o'",
    "MODIFY created_at DATETIME(3) NOT NULL DEFAULT CURRENT_TIMESTAMP(3) AFTER id",
    "DROP headers",
    "MODIFY id INT UNSIGNED NOT NULL AUTO_INCREMENT",
]


def test_a_table_that_is_away_for_a_moment(shop: Harness) -> None:
    """A swap by hand in two steps, a restore: the relay waits for it."""
    database = shop.database
    relay = shop.relay()
    shop.ins("a", {"n": 0})
    shop.wait_sent(1)
    relay.signal(signal.SIGSTOP)
    shop.ins("a", {"n": 1})
    database.sql(f"RENAME TABLE {shop.table} TO away")
    relay.signal(signal.SIGCONT)
    shop.until(lambda: "does not exist" in relay.text())
    time.sleep(1)
    database.sql(f"RENAME TABLE away TO {shop.table}")
    shop.wait_sent(2)
    shop.ins("a", {"n": 2})
    shop.wait_sent(3)
    assert relay.running
    assert relay.terminate() == 0, relay.text()
    assert [message.json["n"] for message in shop.messages()] == [0, 1, 2]


def test_what_a_running_relay_can_do_without_is_dropped(shop: Harness) -> None:
    """Optional columns and indexes: the relay goes on with the table as it is, marks included."""
    shop.create_topic()
    database = shop.database

    def insert(event_id: str, key: str) -> None:
        database.sql(
            "INSERT INTO outbox_event (event_id, aggregate_type, aggregate_id, event_type, payload)"
            f" VALUES ('{event_id}', 'order', '{key}', 'E', '{{}}')"
        )

    relay = shop.relay()
    insert("event-0", "a")
    shop.wait_sent(1)
    changes = (
        "DROP COLUMN sent_at",
        "DROP COLUMN last_error, DROP COLUMN headers",
        "DROP INDEX idx_status_next_retry, DROP INDEX idx_status_aggregate",
        "RENAME INDEX idx_status_created TO other",
    )
    for number, change in enumerate(changes, 1):
        database.sql(f"ALTER TABLE outbox_event {change}")
        insert(f"event-{number}", "a")
        insert(f"bad-{number}", "")  # parked: no record without a key
        shop.wait_sent(1 + number)
    shop.until(lambda: database.sql("SELECT MAX(retry_count) FROM outbox_event")[0][0] >= 2)
    assert relay.terminate() == 0
    assert [message.event_id for message in shop.messages()] == [f"event-{n}" for n in range(5)]


def test_changes_while_the_stream_follows(source: SourceUnderTest) -> None:
    source.ins("k")
    assert source.read().keys == ["k"]
    for number, change in enumerate(_CHANGES):
        source.database.sql(f"ALTER TABLE {source.table} {change}")
        key = f"k{number}"
        insert(source, key)
        assert source.read().keys == [key], change


def test_changes_while_the_stream_was_away(source: SourceUnderTest) -> None:
    """It comes back to events of older shapes, whose names nobody has logged: rows that can be
    told are told right, the others are read back by their key, and none is another row."""
    start = source.position
    keys = []
    for number, change in enumerate(["COMMENT 'nothing'", *_CHANGES]):
        source.database.sql(f"ALTER TABLE {source.table} {change}")
        keys.append(f"k{number}")
        insert(source, keys[-1])
    check(source, start, keys)


def test_columns_that_changed_places_with_their_like(source: SourceUnderTest) -> None:
    """Two columns of one type swap their names: the shape in the log is the same, only the values
    tell."""
    start = source.position
    insert(source, "before")
    text = "VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL"
    source.database.sql(
        f"ALTER TABLE {source.table} CHANGE aggregate_type aggregate_id {text},"
        f" CHANGE aggregate_id aggregate_type {text}"
    )
    source.database.sql(
        f"ALTER TABLE {source.table} CHANGE payload headers JSON NULL,"
        " CHANGE headers payload JSON NULL"
    )
    # Renaming carried the values along; whoever swaps columns puts them back.
    source.database.sql(
        f"UPDATE {source.table} SET aggregate_type = 'order', aggregate_id = 'before',"
        " payload = headers, headers = NULL"
    )
    insert(source, "after", headers={"h": 1})
    check(source, start, ["before", "after"])


def insert(source: SourceUnderTest, key: str, headers: object = None) -> None:
    """Insert a row without the columns that may be missing."""
    columns = "event_id, aggregate_type, aggregate_id, event_type, payload"
    values = row(key, {"k": key}, headers=headers)
    columns += ", headers" * (headers is not None)
    marks = ", ".join(["%s"] * (5 + (headers is not None)))
    source.database.sql(
        f"INSERT INTO {source.table} ({columns}) VALUES ({marks})", values[: marks.count("%s")]
    )


def check(source: SourceUnderTest, start: Position, keys: list[str]) -> None:
    """Read from ``start``: the rows with ``keys``, each equal to the table's or read back."""
    reading = source.read(start)
    stored = {
        item[0]: item[1:]
        for item in source.database.sql(
            "SELECT id, event_id, aggregate_type, aggregate_id, event_type, payload"
            f" FROM {source.table}"
        )
    }
    assert [stored[item.id][2] for item in reading.rows] == keys
    for item in reading.rows:
        if isinstance(item, OutboxEvent):
            assert item[1:5] == stored[item.id][:4]
            assert item.payload == stored[item.id][4].encode()
    # The last shape is the table's own: it needs no reading back.
    assert not isinstance(reading.rows[-1], UnreadRow)


def test_a_row_that_was_changed_since(source: SourceUnderTest) -> None:
    """Its contents in the table do not disprove the names, and do not prove them either."""
    start = source.position
    source.ins("a", "b", "c")
    source.database.sql(
        f"UPDATE {source.table} SET payload = JSON_ARRAY(1) WHERE aggregate_id IN ('a', 'b')"
    )
    reading = source.read(start)
    ids = dict(source.database.sql(f"SELECT aggregate_id, id FROM {source.table}"))
    assert reading.keys == [f"#{ids['a']}", f"#{ids['b']}", "c"]
    assert reading.rows[0] == UnreadRow(ids["a"], "the row was changed since")


def test_rows_whose_place_another_row_has_now(source: SourceUnderTest) -> None:
    """TRUNCATE gives their ids again: that does not disprove the names."""
    start = source.position
    source.ins("a", "b")
    source.database.sql(f"TRUNCATE {source.table}")
    source.ins("c", "d", "e")
    assert source.read(start).keys == ["a", "b", "c", "d", "e"]


def test_rows_that_are_looked_for_are_progress(
    source: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are gone prove no names, so each is looked for by some ten SELECTs. A backlog of
    them, from a database some milliseconds away, was silence to /healthz, and a restart began it
    again: every look-up is heard, and each transaction is handed on by itself."""
    start = source.position
    keys = [f"k{number}" for number in range(10)]
    with source.session() as session:
        for key in keys:
            if key == "k5" and not source.database.is_mariadb:
                session.run("SET SESSION binlog_transaction_compression = ON")
            session.ins(key)
            session.run(f"DELETE FROM {source.table}")
    made = source.source()
    find = made._find
    heard: list[float] = []

    def noted(row_id: int) -> OutboxEvent | None:
        heard.append(made._reading.heard)
        return find(row_id)

    monkeypatch.setattr(made, "_find", noted)
    reading = source.read(start, source=made)
    assert reading.keys == keys
    assert [len(batch.rows) for batch in reading.batches if batch.rows] == [1] * len(keys)
    assert len(heard) > len(keys)
    assert len(set(heard)) == len(heard)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_question_about_the_schema_that_is_cut_off(
    cut: int, source: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KILL, a failover: it is asked again, as everything is; the relay ended with exit code 1."""
    start = source.position
    source.ins("a")
    made = source.source()
    control = made._control
    numbers = itertools.count(1)

    def killed() -> Any:
        connection = control()
        if next(numbers) == cut:
            source.database.sql(f"KILL {connection.thread_id()}")
        return connection

    monkeypatch.setattr(made, "_control", killed)
    reading = source.read(start, source=made)
    assert reading.keys == ["a"]
    assert reading.reconnects == 1


# --- columns that only the log shows --------------------------------------------------------------


def test_invisible_generated_and_hidden_columns(shop: Harness) -> None:
    """Columns that SELECT * or the schema does not show are in row events all the same."""
    shop.create_topic()
    database, table = shop.database, shop.table
    if database.is_mariadb:
        # A unique key on a long column has a hidden column with its hash.
        changes = [
            "ADD shard INT INVISIBLE NOT NULL DEFAULT 0 AFTER id",
            "ADD dedupe TEXT NULL, ADD UNIQUE (dedupe)",
            "ADD twice INT AS (retry_count * 2) VIRTUAL AFTER shard,"
            " ADD kept INT AS (retry_count * 3) PERSISTENT AFTER event_id",
        ]
    else:
        changes = [
            "ADD shard INT NOT NULL DEFAULT 0 INVISIBLE AFTER id",
            "ADD INDEX functional ((LOWER(aggregate_id)))",
            "ADD INDEX multi ((CAST(headers->'$.tags' AS CHAR(20) ARRAY)))",
            "ADD twice INT AS (retry_count * 2) VIRTUAL AFTER shard,"
            " ADD kept INT AS (retry_count * 3) STORED AFTER event_id",
            "MODIFY payload JSON NULL INVISIBLE",
        ]
    relay = shop.relay()
    expected = []
    for number, change in enumerate(changes):
        database.sql(f"ALTER TABLE {table} {change}")
        expected.append(shop.ins("k", {"n": number}, headers={"tags": ["a", "b"]}))
        shop.wait_sent(number + 1)
    assert relay.terminate() == 0
    streamed = shop.messages()
    assert [message.event_id for message in streamed] == expected
    assert [message.json["n"] for message in streamed] == list(range(len(changes)))
    database.sql(f"UPDATE {table} SET status = 0")
    assert shop.compensate()["sent"] == len(changes)
    assert [m._replace(offset=0) for m in shop.messages()[len(changes) :]] == [
        m._replace(offset=0) for m in streamed
    ]


def test_a_generated_invisible_primary_key(mysql: Database) -> None:
    """sql_generate_invisible_primary_key puts my_row_id in front of a table without a primary key;
    such a table is refused, because its rows are found again by id."""
    [create, *_] = table_ddl("outbox_event")
    create = create.replace("PRIMARY KEY (id)", "KEY (id)")
    with mysql.connect(autocommit=True) as connection, connection.cursor() as cursor:
        cursor.execute("SET SESSION sql_generate_invisible_primary_key = ON")
        cursor.execute(create)
    with pytest.raises(SourceError, match="id must be the"), SourceUnderTest.on(mysql):
        pass


def test_a_system_versioned_table_is_refused(mariadb_shop: Harness) -> None:
    """MariaDB keeps its history as further rows of it: each UPDATE, our marks included, logs an
    insert of the row as it was, which would be a second event."""
    shop = mariadb_shop
    shop.database.sql(f"ALTER TABLE {shop.table} ADD SYSTEM VERSIONING")
    process = shop.run("start")
    assert process.wait() == 3
    assert "is system-versioned" in process.text()
    assert f"{shop.table} DROP SYSTEM VERSIONING" in process.text()


# --- names ----------------------------------------------------------------------------------------


def test_a_name_in_another_case_is_no_silence(shop: Harness) -> None:
    """A filter that matches nothing made readers run for ever with no events."""
    for name in ("Outbox_Event", f"{shop.database.name}.OUTBOX_EVENT"):
        process = shop.run("start", TABLE=name)
        assert process.wait() == 3
        assert "does not exist" in process.text()


def test_the_table_by_its_schema_and_its_name(shop: Harness) -> None:
    relay = shop.relay(TABLE=f"{shop.database.name}.outbox_event")
    shop.ins("a")
    shop.wait_sent(1)
    assert relay.terminate() == 0


class LowerCaseMySQL(MySQL):
    """Keeps all names in lower case, as on Windows; decided when the data directory is made."""

    def command(self, options: Sequence[str]) -> list[str]:
        data = self.home / "data"
        if not data.is_dir():
            self.home.mkdir(parents=True, exist_ok=True)
            init = [f"--datadir={data}", "--initialize-insecure", *self.flags()]
            run([*self.program(self.tree()), *init])
        return super().command(options)

    def flags(self) -> list[str]:
        return [*super().flags(), "--lower-case-table-names=1", "--innodb-redo-log-capacity=8M"]


class LowerCaseMariaDB(MariaDB):
    def flags(self) -> list[str]:
        return [*super().flags(), "--lower-case-table-names=1"]


@pytest.mark.parametrize("kind", [LowerCaseMySQL, LowerCaseMariaDB])
def test_names_on_a_server_without_case(
    kind: type[LowerCaseMySQL | LowerCaseMariaDB], tmp_path: Path, harness: MakeHarness
) -> None:
    """The name in the log is the server's, in lower case, whatever the configuration says."""
    with (
        kind(tmp_path / "server", die_with_parent=True) as server,
        Database.create(server.url("mysql")) as database,
    ):
        database.url = database.url.set(database=database.name.upper())
        shop = harness(database, TABLE=f"{database.name}.Outbox_Event")
        relay = shop.relay()
        shop.ins("a")
        shop.wait_sent(1)
        assert relay.terminate() == 0
        assert [message.key for message in shop.messages()] == ["a"]
