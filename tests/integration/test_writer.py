"""The writer on real servers: the event lives and dies with the caller's transaction."""

from __future__ import annotations

import enum
import itertools
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import (
    Column,
    DateTime,
    Engine,
    Integer,
    MetaData,
    Numeric,
    String,
    Table,
    create_engine,
    func,
    inspect,
    select,
    text,
)
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session
from sqlalchemy.orm import sessionmaker as session_maker
from sqlalchemy.sql.dml import UpdateBase

from cdc_relay.outbox import ddl
from tests.support.sql import Database
from writer import (
    EventTooLargeError,
    Inbox,
    NotInTransactionError,
    Outbox,
    inbox_table,
    outbox_table,
    sequence_table,
)


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    total: Mapped[Any] = mapped_column(Numeric(10, 2))


class Colour(enum.Enum):
    RED = "red"


EVENT: dict[str, Any] = {
    "aggregate_type": "order",
    "aggregate_id": "7",
    "event_type": "ORDER_CREATED",
    "payload": {"a": 1},
}


@pytest.fixture
def outbox(database: Database) -> Outbox:
    database.create_outbox()
    return Outbox()


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    made = create_engine(database.url)
    Base.metadata.create_all(made)
    yield made
    made.dispose()


def event_types(database: Database) -> list[str]:
    return [row[0] for row in database.sql("SELECT event_type FROM outbox_event ORDER BY id")]


def test_rows_follow_savepoints_and_rollback(
    database: Database, outbox: Outbox, engine: Engine
) -> None:
    """e1 and e3 only; e4 never."""

    def add(session: Session, name: str) -> None:
        outbox.add(session, **{**EVENT, "event_type": name})

    with Session(engine) as session:
        session.add(Order(id=1, total=5))
        add(session, "e1")
        try:
            with session.begin_nested():
                session.get_one(Order, 1).total = 6
                add(session, "e2")
                raise RuntimeError
        except RuntimeError:
            pass
        add(session, "e3")
        session.commit()
        add(session, "e4")
        session.rollback()
    assert event_types(database) == ["e1", "e3"]
    assert database.sql("SELECT total FROM orders")[0][0] == 5


def test_plain_connection_savepoints_and_rollback(
    database: Database, outbox: Outbox, engine: Engine
) -> None:
    with engine.begin() as connection:
        outbox.add(connection, **{**EVENT, "event_type": "e1"})
        with connection.begin_nested() as savepoint:
            outbox.add(connection, **{**EVENT, "event_type": "e2"})
            savepoint.rollback()
        outbox.add(connection, **{**EVENT, "event_type": "e3"})
    with engine.connect() as connection:
        outbox.add(connection, **{**EVENT, "event_type": "e4"})
        # Closed without a commit.
    assert event_types(database) == ["e1", "e3"]


def test_event_is_there_when_the_process_dies_right_after_commit(
    database: Database, outbox: Outbox, engine: Engine
) -> None:
    code = (
        "import os, sys\n"
        "from sqlalchemy import create_engine\n"
        "from sqlalchemy.orm import Session\n"
        "from writer import Outbox\n"
        "with Session(create_engine(sys.argv[1])) as session:\n"
        "    Outbox().add(session, aggregate_type='order', aggregate_id=1, event_type='kept',"
        " payload={})\n"
        "    session.commit()\n"
        "    Outbox().add(session, aggregate_type='order', aggregate_id=1, event_type='lost',"
        " payload={})\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, database.text], check=False, timeout=60)
    assert done.returncode == -9
    assert event_types(database) == ["kept"]


def test_session_is_flushed_first(database: Database, outbox: Outbox, engine: Engine) -> None:
    """The business rows, and their locks, come before the event's id."""
    with Session(engine) as session, session.begin():
        session.add(Order(id=1, total=5))
        outbox.add(session, **EVENT)
        assert not session.new
        session.add(Order(id=2, total=5))
        with session.no_autoflush:
            outbox.add(session, **EVENT)
        assert session.new


def test_scoped_session(database: Database, outbox: Outbox, engine: Engine) -> None:
    session = scoped_session(session_maker(engine))
    outbox.add(session, **EVENT)
    session.commit()
    session.remove()
    assert event_types(database) == ["ORDER_CREATED"]


def test_dbapi_connection(database: Database, outbox: Outbox) -> None:
    connection = database.connect()
    outbox.add(connection, **{**EVENT, "event_type": "kept"})
    connection.commit()
    outbox.add(connection, **{**EVENT, "event_type": "gone"})
    connection.rollback()
    connection.close()
    assert event_types(database) == ["kept"]


def test_autocommit_targets_are_refused_and_nothing_is_written(
    database: Database, outbox: Outbox, engine: Engine
) -> None:
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    # SQLAlchemy believes that it begins a transaction; the driver does not.
    invisible = create_engine(database.url, connect_args={"autocommit": True})
    raw = database.connect(autocommit=True)
    with (
        Session(autocommit) as session,
        autocommit.connect() as connection,
        Session(invisible) as deceived,
    ):
        for target in (session, connection, deceived, raw, engine):
            with pytest.raises(NotInTransactionError, match=r"outbox\.add|begin a transaction"):
                outbox.add(target, **EVENT)
    raw.close()
    invisible.dispose()
    assert event_types(database) == []


def test_begin_on_an_autocommit_connection_is_a_transaction(
    database: Database, outbox: Outbox
) -> None:
    connection = database.connect(autocommit=True)
    connection.begin()
    outbox.add(connection, **EVENT)
    connection.rollback()
    with pytest.raises(NotInTransactionError):
        outbox.add(connection, **EVENT)
    with connection.cursor() as cursor:
        cursor.execute("START TRANSACTION")
    outbox.add(connection, **{**EVENT, "event_type": "kept"})
    connection.commit()
    connection.close()
    assert event_types(database) == ["kept"]


def test_columns_and_defaults(database: Database, outbox: Outbox, engine: Engine) -> None:
    with engine.begin() as connection:
        event_id = outbox.add(connection, **EVENT, headers={"traceparent": "00-ab", "n": None})
    [row] = database.sql(
        "SELECT event_id, aggregate_type, aggregate_id, event_type, payload, headers, status,"
        " retry_count, next_retry_time, last_error, sent_at FROM outbox_event"
    )
    assert row[:4] == (event_id, "order", "7", "ORDER_CREATED")
    assert json.loads(row[4]) == {"a": 1}
    assert json.loads(row[5]) == {"traceparent": "00-ab", "n": None}
    assert row[6:] == (0, 0, None, None, None)


def test_times_are_the_databases_clock_in_utc_to_the_microsecond(
    database: Database, outbox: Outbox
) -> None:
    """Whatever the session's time zone is."""
    connection = database.connect(init_command="SET time_zone = '+05:30'")
    outbox.add(connection, **EVENT)
    time.sleep(0.05)
    outbox.add(connection, **EVENT)
    connection.commit()
    connection.close()
    [(young, between)] = database.sql(
        "SELECT MAX(ABS(TIMESTAMPDIFF(SECOND, created_at, UTC_TIMESTAMP(6)))),"
        " TIMESTAMPDIFF(MICROSECOND, MIN(created_at), MAX(created_at)) FROM outbox_event"
    )
    assert young < 10
    assert 50_000 <= between < 1_000_000
    assert database.sql("SELECT COUNT(*) FROM outbox_event WHERE created_at = updated_at") == (
        (2,),
    )


def test_occurred_at_is_stored_in_utc(database: Database, outbox: Outbox, engine: Engine) -> None:
    moment = datetime(2026, 3, 1, 1, 30, 0, 123456, tzinfo=timezone(timedelta(hours=2)))
    with engine.begin() as connection:
        outbox.add(connection, **EVENT, occurred_at=moment)
    [(created_at,)] = database.sql("SELECT created_at FROM outbox_event")
    assert created_at == datetime(2026, 2, 28, 23, 30, 0, 123456)


def test_none_is_sql_null_and_null_text_is_json_null(
    database: Database, outbox: Outbox, engine: Engine
) -> None:
    with engine.begin() as connection:
        outbox.add(connection, **{**EVENT, "payload": None})
        outbox.add(connection, **{**EVENT, "payload": "null"}, headers=None)
    rows = database.sql("SELECT payload, headers FROM outbox_event ORDER BY id")
    assert rows == ((None, None), ("null", None))


@pytest.mark.parametrize("charset", ["utf8mb4", "utf8mb3", "latin1"])
def test_payload_survives_any_connection_charset(
    database: Database, outbox: Outbox, charset: str
) -> None:
    said = {"text": "naïve 订单 \U0001f600 \\ ' \" %s %% \u2028"}
    connection = database.connect(charset=charset)
    outbox.add(connection, **{**EVENT, "payload": said}, headers=said)
    outbox.add(connection, **{**EVENT, "payload": json.dumps(said, ensure_ascii=False)})
    connection.commit()
    connection.close()
    [(payload, headers), (text, _)] = database.sql("SELECT payload, headers FROM outbox_event")
    assert json.loads(payload) == said
    assert json.loads(text) == said
    assert json.loads(headers) == said


@pytest.mark.parametrize("charset", ["utf8mb3", "latin1"])
def test_keys_survive_any_connection_charset(database: Database, charset: str) -> None:
    """What the character set lacks would arrive as question marks: another aggregate's key."""
    database.create_outbox()
    metadata = MetaData()
    for table in (sequence_table(metadata), inbox_table(metadata)):
        for statement in ddl(table):
            database.sql(statement)
    connection = database.connect(charset=charset, sql_mode="")
    keys = ["订单", "\U0001f600", "\U0001f601", "é"]
    for key in keys:
        Outbox(sequences=True).add(connection, **{**EVENT, "aggregate_id": key}, event_id=key)
        assert Inbox("é\U0001f600").claim(connection, key)
    connection.commit()
    connection.close()
    found = database.sql("SELECT aggregate_id, event_id, headers FROM outbox_event ORDER BY id")
    assert [(row[0], row[1], json.loads(row[2])["aggregate_seq"]) for row in found] == [
        (key, key, 1) for key in keys
    ]
    found = database.sql("SELECT consumer, event_id FROM inbox_event ORDER BY event_id")
    assert found == tuple(("é\U0001f600", key) for key in sorted(keys))


def test_no_backslash_escapes(database: Database, outbox: Outbox) -> None:
    connection = database.connect(sql_mode="NO_BACKSLASH_ESCAPES")
    outbox.add(connection, **{**EVENT, "payload": {"a": "\n\"'\\"}})
    connection.commit()
    connection.close()
    [(payload,)] = database.sql("SELECT payload FROM outbox_event")
    assert json.loads(payload) == {"a": "\n\"'\\"}


def test_duplicate_event_id_is_the_drivers_error(outbox: Outbox, engine: Engine) -> None:
    with engine.begin() as connection:
        assert outbox.add(connection, **EVENT, event_id="e-1") == "e-1"
    with engine.connect() as connection, pytest.raises(IntegrityError):
        outbox.add(connection, **EVENT, event_id="e-1")


def test_add_all_keeps_the_order(database: Database, outbox: Outbox, engine: Engine) -> None:
    events: list[Any] = [{**EVENT, "aggregate_id": number} for number in range(1, 2502)]
    events[5]["payload"] = {"large": "x" * 1_500_000}
    events[6]["occurred_at"] = datetime(2026, 1, 1, tzinfo=UTC)
    with engine.begin() as connection:
        ids = outbox.add_all(connection, events)
        assert outbox.add_all(connection, []) == []
    rows = database.sql("SELECT event_id, aggregate_id FROM outbox_event ORDER BY id")
    assert [row[0] for row in rows] == ids == sorted(ids)
    assert [int(row[1]) for row in rows] == list(range(1, 2502))


def test_add_all_keeps_below_the_packet_size(database: Database, server_url: str) -> None:
    """And an event that no packet takes is refused before anything is written."""
    database.create_outbox()
    before = database.sql("SELECT @@GLOBAL.max_allowed_packet")[0][0]
    database.sql("SET GLOBAL max_allowed_packet = 1048576")
    try:
        engine = create_engine(database.url)
        with engine.begin() as connection:
            large = {**EVENT, "payload": {"quotes": '"' * 90_000}}
            Outbox().add_all(connection, [large] * 20)  # type: ignore[list-item]
            Outbox().add(connection, **{**EVENT, "payload": {"x": "y" * 900_000}})
            too_large = {**EVENT, "payload": {"x": "y" * 1_100_000}}
            with pytest.raises(EventTooLargeError, match=r"ORDER_CREATED of order 7 .* 1048576"):
                Outbox().add(connection, **too_large)
            with pytest.raises(EventTooLargeError, match="max_allowed_packet"):
                Outbox().add_all(connection, [EVENT, too_large])  # type: ignore[list-item]
        engine.dispose()
    finally:
        database.sql(f"SET GLOBAL max_allowed_packet = {before}")
    assert len(event_types(database)) == 21


def test_fifty_threads(database: Database, outbox: Outbox) -> None:
    """Rows are exactly those committed; each third thread rolls back."""
    engine = create_engine(database.url, pool_size=50, max_overflow=0)
    expected = {f"{number}.{step}" for number in range(50) if number % 3 for step in range(8)}

    def one(number: int) -> None:
        for step in range(4):
            with Session(engine) as session:
                for part in (2 * step, 2 * step + 1):
                    fields = {"aggregate_id": number, "event_type": f"{number}.{part}"}
                    outbox.add(session, **{**EVENT, **fields})
                if number % 3:
                    session.commit()

    with ThreadPoolExecutor(50) as pool:
        list(pool.map(one, range(50), timeout=120))
    engine.dispose()
    found = event_types(database)
    assert len(found) == len(expected)
    assert set(found) == expected


def test_sequences_are_in_commit_order_without_gaps(database: Database) -> None:
    """Writers of one aggregate wait for each other; a rollback gives its numbers back."""
    database.create_outbox()
    for statement in ddl(sequence_table(MetaData())):
        database.sql(statement)
    outbox = Outbox(sequences=True)
    engine = create_engine(database.url, pool_size=8)

    def one(number: int) -> None:
        for step in range(6):
            # Two first events of an aggregate, one of them rolled back, may end in a deadlock.
            while not attempt(number, commits=step % 3 > 0):
                pass

    def attempt(number: int, *, commits: bool) -> bool:
        keys = ["a", f"own-{number}", "b"]
        try:
            with Session(engine) as session:
                outbox.add_all(session, [{**EVENT, "aggregate_id": key} for key in keys])  # type: ignore[typeddict-item]
                outbox.add(session, **{**EVENT, "aggregate_id": "a"})
                if commits:
                    session.commit()
        except OperationalError as error:
            if "1213" not in str(error.orig):
                raise
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(8), timeout=120))
    engine.dispose()
    found = database.sql("SELECT aggregate_id, headers FROM outbox_event ORDER BY id")
    seen: dict[str, list[int]] = {}
    for key, headers in found:
        seen.setdefault(key, []).append(json.loads(headers)["aggregate_seq"])
    assert {key: len(numbers) for key, numbers in seen.items()} == {
        **{f"own-{number}": 4 for number in range(8)},
        "a": 64,
        "b": 32,
    }
    for numbers in seen.values():
        assert numbers == list(range(1, len(numbers) + 1))


def test_the_callers_own_sequence(database: Database, outbox: Outbox, engine: Engine) -> None:
    with engine.begin() as connection:
        outbox.add(connection, **EVENT, aggregate_seq=12, headers={"a": "b"})
    [(headers,)] = database.sql("SELECT headers FROM outbox_event")
    assert json.loads(headers) == {"a": "b", "aggregate_seq": 12}


def test_add_all_checks_all_before_it_writes(outbox: Outbox, engine: Engine) -> None:
    with engine.begin() as connection:
        with pytest.raises(ValueError, match="aggregate_id is empty"):
            outbox.add_all(connection, [EVENT, {**EVENT, "aggregate_id": ""}])
        assert connection.scalar(text("SELECT COUNT(*) FROM outbox_event")) == 0


LEGACY = """
CREATE TABLE legacy (
  id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
  event_id CHAR(36) NOT NULL,
  aggregate_type VARCHAR(20) NOT NULL,
  aggregate_id VARCHAR(20) NOT NULL,
  event_type VARCHAR(20) NOT NULL,
  payload BLOB,
  status INT NOT NULL,
  retry_count INT NOT NULL,
  next_retry_time DATETIME NOT NULL,
  created_at TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
  updated_at TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)
)"""


def test_older_table_is_served_by_reflection(database: Database, engine: Engine) -> None:
    database.sql(LEGACY)
    legacy = Outbox(Table("legacy", MetaData(), autoload_with=engine))
    connection = database.connect(init_command="SET time_zone = '-08:00'")
    legacy.add(connection, **{**EVENT, "payload": b"\x00\xff'"})
    legacy.add(connection, **EVENT, occurred_at=datetime.fromisoformat("2026-03-01T12:00:00.5Z"))
    connection.commit()
    with pytest.raises(ValueError, match="has no column headers"):
        legacy.add(connection, **EVENT, headers={"a": "b"})
    with pytest.raises(ValueError, match="21 characters; the column takes 20"):
        legacy.add(connection, **{**EVENT, "aggregate_id": "x" * 21})
    connection.close()
    reader = database.connect(init_command="SET time_zone = '+00:00'", autocommit=True)
    with reader.cursor() as cursor:
        cursor.execute(
            "SELECT payload, status, ABS(TIMESTAMPDIFF(SECOND, created_at, UTC_TIMESTAMP())) < 10,"
            " created_at FROM legacy ORDER BY id"
        )
        first, second = cursor.fetchall()
    reader.close()
    assert first[:3] == (b"\x00\xff'", 0, 1)
    assert second[0] == b'{"a":1}'
    assert second[3] == datetime(2026, 3, 1, 12, 0, 0, 500000)


DEBEZIUM = """
CREATE TABLE outbox (
  id CHAR(36) PRIMARY KEY,
  aggregatetype VARCHAR(255) NOT NULL,
  aggregateid VARCHAR(255) NOT NULL,
  type VARCHAR(255) NOT NULL,
  payload JSON
)"""


def test_a_table_of_debeziums_router(database: Database, engine: Engine) -> None:
    database.sql(DEBEZIUM)
    table = Table("outbox", MetaData(), autoload_with=engine)
    outbox = Outbox(table, names="debezium")
    with engine.begin() as connection:
        first = outbox.add(connection, **EVENT)
        outbox.add_all(connection, [{**EVENT, "payload": None, "event_id": "e-2"}])  # type: ignore[typeddict-item]
        with pytest.raises(ValueError, match="has no column created_at"):
            outbox.add(connection, **EVENT, occurred_at=datetime.now(UTC))
        with pytest.raises(ValueError, match="has no column headers"):
            outbox.add(connection, **EVENT, headers={"a": "b"})
    rows = database.sql(
        "SELECT id, aggregatetype, aggregateid, type, payload IS NULL FROM outbox ORDER BY id"
    )
    assert rows == (
        (first, "order", "7", "ORDER_CREATED", 0),
        ("e-2", "order", "7", "ORDER_CREATED", 1),
    )
    with pytest.raises(ValueError, match="table outbox has no column event_id for event_id"):
        Outbox(table)
    with pytest.raises(ValueError, match="names: 'kind' is no column of an outbox table"):
        Outbox(table, names={"kind": "type"})


def test_columns_of_the_services_own(database: Database, engine: Engine) -> None:
    database.create_outbox()
    database.sql(
        "ALTER TABLE outbox_event ADD COLUMN tenant_id INT NOT NULL DEFAULT 9,"
        " ADD COLUMN note VARCHAR(40) NULL, CHANGE event_type kind VARCHAR(128) NOT NULL"
    )
    table = Table("outbox_event", MetaData(), autoload_with=engine)
    outbox = Outbox(table, names={"event_type": "kind"})
    with engine.begin() as connection:
        outbox.add(connection, **EVENT, columns={"note": "50%", "tenant_id": 5})
        outbox.add_all(connection, [{**EVENT, "columns": {"note": "x"}}, EVENT])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="no column 'status' of the service's own"):
            outbox.add(connection, **EVENT, columns={"status": 1})
        for wrong in (("x",), {"x"}, object()):
            with pytest.raises(TypeError, match="columns: note cannot be a"):
                outbox.add(connection, **EVENT, columns={"note": wrong})
        for right in ({"a": Decimal("1.10")}, ["x"], Colour.RED, uuid.UUID(int=7), b"raw"):
            outbox.add(connection, **EVENT, columns={"note": right, "tenant_id": 3})
    rows = database.sql("SELECT kind, tenant_id, note FROM outbox_event ORDER BY id")
    assert rows == (
        ("ORDER_CREATED", 5, "50%"),
        ("ORDER_CREATED", 9, "x"),
        ("ORDER_CREATED", 9, None),
        ("ORDER_CREATED", 3, '{"a":"1.10"}'),
        ("ORDER_CREATED", 3, '["x"]'),
        ("ORDER_CREATED", 3, "red"),
        ("ORDER_CREATED", 3, str(uuid.UUID(int=7))),
        ("ORDER_CREATED", 3, "raw"),
    )


def test_defaults_that_only_sqlalchemy_knows(database: Database, engine: Engine) -> None:
    """Of a declared table: the database has none for these columns."""
    metadata = MetaData()
    table = outbox_table(metadata)
    numbers = itertools.count(1)
    table.append_column(Column("tenant", String(20), default="acme"))
    table.append_column(Column("n", Integer, default=lambda: next(numbers), nullable=False))
    metadata.create_all(engine)
    outbox = Outbox(table)
    with engine.begin() as connection:
        outbox.add(connection, **EVENT)
        outbox.add(connection, **EVENT, columns={"tenant": None})
        outbox.add_all(connection, [EVENT, {**EVENT, "columns": {"n": 9}}])  # type: ignore[list-item]
    rows = database.sql("SELECT tenant, n FROM outbox_event ORDER BY id")
    assert rows == (("acme", 1), (None, 2), ("acme", 3), ("acme", 9))
    table.append_column(Column("at", DateTime, default=func.now()))
    other = Outbox(table)
    with engine.begin() as connection, pytest.raises(ValueError, match="default of 'at' is an SQL"):
        other.add(connection, **EVENT)


def test_schemas_that_sqlalchemy_translates(database: Database, engine: Engine) -> None:
    """The event goes where the business rows go, and its number and its claim with it."""
    name = f"{database.name[:50]}_t`%s"
    quoted = name.replace("`", "``")
    database.sql(f"CREATE DATABASE `{quoted}`")
    try:
        metadata = MetaData()
        kept = outbox_table(metadata, f"{database.name}.kept")
        moved = [make(metadata) for make in (outbox_table, sequence_table, inbox_table)]
        outbox, inbox = Outbox(moved[0], sequences=moved[1]), Inbox("x", moved[2])
        translated = engine.execution_options(schema_translate_map={None: name, "shop": name})
        metadata.create_all(translated)
        with Session(translated) as session, session.begin():
            outbox.add(session, **EVENT)
            outbox.add_all(session, [EVENT])  # type: ignore[list-item]
            Outbox("shop.outbox_event").add(session, **EVENT)
            Outbox(kept).add(session, **EVENT)
            assert inbox.claim(session, "e-1")
            counts = [
                session.execute(select(func.count()).select_from(one)).scalar_one()
                for one in (*moved, kept)
            ]
        assert counts == [3, 1, 1, 1]
    finally:
        database.sql(f"DROP DATABASE `{quoted}`")


def test_another_schema_and_a_table_name_with_percent(database: Database, engine: Engine) -> None:
    database.create_outbox("out%s")
    outbox = Outbox(f"{database.name}.out%s")
    with engine.begin() as connection:
        outbox.add(connection, **EVENT)
    assert database.sql("SELECT COUNT(*) FROM `out%s`") == ((1,),)


def test_session_with_several_binds_finds_the_table(database: Database, engine: Engine) -> None:
    database.create_outbox()
    metadata = MetaData()
    table = outbox_table(metadata)
    with Session(binds={table: engine}) as session, session.begin():
        Outbox(table).add(session, **EVENT)
    assert event_types(database) == ["ORDER_CREATED"]


def test_session_that_reads_from_replicas_writes_to_the_primary(
    database: Database, engine: Engine
) -> None:
    class Routed(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **more: Any) -> Engine:
            assert self._flushing or isinstance(clause, UpdateBase), "went to a replica"
            return engine

    database.create_outbox()
    for statement in ddl(inbox_table(MetaData())):
        database.sql(statement)
    with Routed() as session, session.begin():
        Outbox().add(session, **EVENT)
        assert Inbox("points").claim(session, "e-1")
    assert event_types(database) == ["ORDER_CREATED"]


def test_outbox_table_is_what_schema_prints(database: Database, engine: Engine) -> None:
    """``create_all`` and ``cdc-relay schema`` give the same table."""
    database.create_outbox()
    metadata = MetaData()
    outbox_table(metadata, "by_metadata")
    metadata.create_all(engine)

    def lines(name: str) -> list[str]:
        shown: str = database.sql(f"SHOW CREATE TABLE {name}")[0][1]
        return sorted(line.rstrip(",") for line in shown.replace(name, "T").splitlines())

    assert lines("outbox_event") == lines("by_metadata")
    assert {index["name"] for index in inspect(engine).get_indexes("by_metadata")} >= {
        "idx_status_next_retry",
        "uk_event_id",
    }


def test_existing_server_variables_do_not_matter(database: Database, outbox: Outbox) -> None:
    connection = database.connect(sql_mode="ANSI_QUOTES,STRICT_ALL_TABLES")
    outbox.add(connection, **EVENT)
    connection.commit()
    connection.close()
    assert event_types(database) == ["ORDER_CREATED"]


def test_async_targets_are_shown_the_way(outbox: Outbox) -> None:
    class AsyncSession:
        async def run_sync(self) -> None: ...

    with pytest.raises(TypeError, match=r"await outbox\.add_async"):
        outbox.add(AsyncSession(), **EVENT)
