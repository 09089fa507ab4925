"""The writer and the inbox through every driver, on both databases."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from mysql.connector.conversion import MySQLConverter
from sqlalchemy import MetaData, create_engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.ext.asyncio import async_sessionmaker as async_session_maker
from sqlalchemy.orm import Session

from cdc_relay.outbox import ddl, inbox_sequence_table, inbox_table, sequence_table
from tests.support import drivers
from tests.support.sql import Database
from writer import (
    Arrival,
    EventFields,
    EventTooLargeError,
    Inbox,
    NotInTransactionError,
    Outbox,
    outbox_table,
)

EVENT: dict[str, Any] = {"aggregate_type": "order", "aggregate_id": "7", "payload": {"a": 1}}
SAID = {"text": "naïve 订单 \U0001f600 \\ ' \" %s %% \n \x00"}


@pytest.fixture
def outbox(database: Database) -> Outbox:
    database.create_outbox()
    metadata = MetaData()
    for table in (sequence_table(metadata), inbox_table(metadata), inbox_sequence_table(metadata)):
        for statement in ddl(table):
            database.sql(statement)
    return Outbox(sequences=True)


@pytest.fixture(params=drivers.DBAPI)
def driver(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def connection(driver: str, database: Database) -> Iterator[Any]:
    made = drivers.connect(driver, database)
    yield made
    made.close()


def rows(database: Database, columns: str = "event_type") -> list[Any]:
    found = database.sql(f"SELECT {columns} FROM outbox_event ORDER BY id")
    return [row[0] if len(row) == 1 else tuple(row) for row in found]


def numbers(database: Database) -> list[int]:
    return [int(json.loads(text)["aggregate_seq"]) for text in rows(database, "headers")]


# --- DB-API connections --------------------------------------------------------------------------


def test_commit_rollback_and_savepoint(database: Database, outbox: Outbox, connection: Any) -> None:
    cursor = connection.cursor()
    outbox.add(connection, **EVENT, event_type="e1")
    cursor.execute("SAVEPOINT s")
    outbox.add(connection, **EVENT, event_type="e2")
    cursor.execute("ROLLBACK TO SAVEPOINT s")
    outbox.add(connection, **EVENT, event_type="e3")
    connection.commit()
    outbox.add(connection, **EVENT, event_type="e4")
    connection.rollback()
    cursor.close()
    assert rows(database) == ["e1", "e3"]
    assert numbers(database) == [1, 2]


def test_texts_and_bytes(database: Database, outbox: Outbox, connection: Any) -> None:
    database.sql("ALTER TABLE outbox_event RENAME TO plain")
    for statement in ddl(outbox_table(MetaData(), payload="binary")):
        database.sql(statement)
    Outbox("plain").add(connection, **{**EVENT, "payload": SAID}, headers=SAID, event_type="x")
    Outbox("plain").add(
        connection,
        **{**EVENT, "payload": json.dumps(SAID, ensure_ascii=False).encode()},
        event_type="x",
    )
    binary = Outbox(outbox_table(MetaData(), payload="binary"))
    binary.add(connection, **{**EVENT, "payload": bytes(range(256))}, event_type="x")
    binary.add(connection, **{**EVENT, "payload": SAID}, event_type="x")
    binary.add(connection, **{**EVENT, "payload": '"é"'}, event_type="x")
    connection.commit()
    found = database.sql("SELECT payload, headers FROM plain ORDER BY id")
    assert [json.loads(row[0]) for row in found] == [SAID, SAID]
    assert json.loads(found[0][1]) == SAID
    first, second, third = rows(database, "payload")
    assert first == bytes(range(256))
    assert json.loads(second) == SAID
    assert third == '"é"'.encode()


MODES = ("", "NO_BACKSLASH_ESCAPES", "ANSI_QUOTES,PIPES_AS_CONCAT,NO_BACKSLASH_ESCAPES")


def add_what_needs_quoting(connection: Any) -> None:
    """To the outboxes of ``quoting``; each payload and key is SAID in some form."""
    text, key = json.dumps(SAID, ensure_ascii=False), "it's \\' 订单"
    event = {**EVENT, "aggregate_id": key, "event_type": "x"}
    Outbox().add(connection, **{**event, "payload": SAID}, headers=SAID)
    Outbox().add(connection, **{**event, "payload": text}, headers=SAID)
    Outbox().add(connection, **{**event, "payload": text.encode()}, headers=SAID)
    binary = Outbox(outbox_table(MetaData(), "bytes", payload="binary"))
    binary.add(connection, **{**event, "payload": bytes(range(256))})


def quoting(database: Database) -> None:
    database.create_outbox()
    for statement in ddl(outbox_table(MetaData(), "bytes", payload="binary")):
        database.sql(statement)


def assert_quoted(database: Database) -> None:
    for payload, headers, key in rows(database, "payload, headers, aggregate_id"):
        assert (json.loads(payload), json.loads(headers), key) == (SAID, SAID, "it's \\' 订单")
    assert len(rows(database)) == 3
    assert database.sql("SELECT payload FROM bytes") == ((bytes(range(256)),),)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", [None, "", "NO_BACKSLASH_ESCAPES"])
def test_any_sql_mode(database: Database, driver: str, mode: str, before: str | None) -> None:
    """Drivers escape in their own ways, and not always in those of the session: MySQL Connector's
    pure form in those of its first statement with parameters."""
    quoting(database)
    connection = drivers.connect(driver, database)
    cursor = connection.cursor()
    if before is not None:
        cursor.execute(f"SET sql_mode = '{before}'")
        cursor.execute("SELECT %s", ("x",))
        cursor.fetchall()
    cursor.execute(f"SET sql_mode = '{mode}'")
    cursor.close()
    add_what_needs_quoting(connection)
    connection.commit()
    connection.close()
    assert_quoted(database)


@pytest.mark.parametrize("pure", ["True", "False"])
def test_a_sql_mode_that_mysql_connector_does_not_know(mysql: Database, pure: str) -> None:
    """Through SQLAlchemy, for the inbox too; and a converter of the service's own, which is told
    no ``sql_mode`` at all."""
    quoting(mysql)
    for statement in ddl(inbox_table(MetaData())):
        mysql.sql(statement)
    url = drivers.engine_url("mysqlconnector", mysql).update_query_dict({"use_pure": pure})
    engine = create_engine(url, connect_args={"converter_class": MySQLConverter})
    with engine.begin() as connection:
        connection.exec_driver_sql("SELECT %s", ("x",)).all()
        connection.exec_driver_sql("SET sql_mode = 'NO_BACKSLASH_ESCAPES'")
        add_what_needs_quoting(connection)
        assert Inbox("it's").claim(connection, "\\'\"")
    engine.dispose()
    assert_quoted(mysql)
    assert mysql.sql("SELECT consumer, event_id FROM inbox_event") == (("it's", "\\'\""),)


def test_the_packet_size_where_text_goes_as_digits(database: Database) -> None:
    database.create_outbox()
    before = database.sql("SELECT @@GLOBAL.max_allowed_packet")[0][0]
    database.sql("SET GLOBAL max_allowed_packet = 1048576")
    try:
        connection = drivers.connect("mysql-connector", database)
        quotes, text = {"quotes": '"' * 90_000}, {"text": "x" * 480_000}
        Outbox().add_all(
            connection,
            [{**EVENT, "payload": one, "event_type": "x"} for one in [quotes, text] * 5],  # type: ignore[typeddict-item]
        )
        with pytest.raises(EventTooLargeError, match="a statement takes 524288"):
            Outbox().add(connection, **{**EVENT, "payload": "x" * 600_000}, event_type="x")
        connection.commit()
        connection.close()
    finally:
        database.sql(f"SET GLOBAL max_allowed_packet = {before}")
    assert len(rows(database)) == 10


@pytest.mark.parametrize("dialect", drivers.ASYNC)
def test_a_sql_mode_that_was_left_async(database: Database, dialect: str) -> None:
    """asyncmy does not notice, and escapes for the one before."""
    quoting(database)

    async def body(engine: AsyncEngine) -> None:
        async with engine.connect() as connection:
            await connection.exec_driver_sql("SET sql_mode = 'NO_BACKSLASH_ESCAPES'")
            await connection.commit()
            await connection.exec_driver_sql("SET sql_mode = ''")
            await connection.run_sync(add_what_needs_quoting)
            await connection.commit()

    drivers.run_async(dialect, database, body)
    assert_quoted(database)


@pytest.mark.parametrize("dialect", drivers.ASYNC)
def test_an_engine_that_streams(database: Database, outbox: Outbox, dialect: str) -> None:
    """Streaming is for results; a claim and a number are none."""

    async def body(engine: AsyncEngine) -> None:
        async with engine.execution_options(stream_results=True).begin() as connection:
            await outbox.add_async(connection, **EVENT, event_type="e1")
            inbox = Inbox("points")
            claims = [await inbox.claim_async(connection, "e-1") for _ in range(3)]
            assert claims == [True, False, False]

    drivers.run_async(dialect, database, body)
    assert numbers(database) == [1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dialect", drivers.ASYNC)
def test_any_sql_mode_async(database: Database, dialect: str, mode: str) -> None:
    async def body(engine: AsyncEngine) -> None:
        async with engine.begin() as connection:
            await connection.exec_driver_sql(f"SET sql_mode = '{mode}'")
            await connection.run_sync(add_what_needs_quoting)

    quoting(database)
    drivers.run_async(dialect, database, body)
    assert_quoted(database)


def test_autocommit_is_refused_with_the_right_pattern(
    database: Database, outbox: Outbox, driver: str
) -> None:
    begin = {"pymysql": "begin", "mysqlclient": "autocommit"}.get(driver, "start_transaction")
    connection = drivers.connect(driver, database, autocommit=True)
    with pytest.raises(NotInTransactionError, match=rf"connection\.{begin}\(.*outbox\.add\("):
        outbox.add(connection, **EVENT, event_type="x")
    with pytest.raises(NotInTransactionError, match=r"inbox\.claim\("):
        Inbox("points").claim(connection, "e-1")
    if driver == "mysqlclient":  # it cannot tell that BEGIN was said: what the message shows works
        connection.autocommit(False)
    else:
        getattr(connection, begin)()
    outbox.add(connection, **EVENT, event_type="kept")
    connection.commit()
    connection.close()
    assert rows(database) == ["kept"]


def test_claim_and_arrival(database: Database, outbox: Outbox, connection: Any) -> None:
    inbox = Inbox("points", sequences=True)

    def arrive(number: int) -> tuple[Arrival, int]:
        return inbox.arrival(
            connection, aggregate_type="order", aggregate_id="7", aggregate_seq=number
        )

    assert inbox.claim(connection, "e-1")
    assert not inbox.claim(connection, "e-1")
    assert Inbox("mail").claim(connection, "e-1")
    assert [arrive(number) for number in (1, 2, 2, 5, 4, 6)] == [
        (Arrival.FIRST, 0),
        (Arrival.NEXT, 0),
        (Arrival.LATE, 0),
        (Arrival.GAP, 2),
        (Arrival.LATE, 0),
        (Arrival.NEXT, 0),
    ]
    connection.commit()
    assert not inbox.claim(connection, "e-1")
    assert inbox.claim(connection, "e-2")
    connection.rollback()
    assert inbox.claim(connection, "e-2")
    connection.rollback()
    found = database.sql("SELECT consumer, event_id, repeats FROM inbox_event ORDER BY consumer")
    assert list(found) == [("mail", "e-1", 0), ("points", "e-1", 1)]


# --- several INSERTs of one add_all --------------------------------------------------------------


def three_statements() -> list[EventFields]:
    """Of which the last one fails: its event has the id of the first."""
    events: list[EventFields] = [
        {**EVENT, "event_type": "gone", "event_id": f"e-{number}"}  # type: ignore[typeddict-item]
        for number in range(2100)
    ]
    events[-1]["event_id"] = "e-0"
    return events


def test_add_all_is_all_or_nothing(database: Database, outbox: Outbox, connection: Any) -> None:
    """The caller catches the error and commits: what it did before is there, and nothing of the
    call, no number either."""
    outbox.add(connection, **EVENT, event_type="before")
    with pytest.raises(Exception, match="Duplicate entry"):
        outbox.add_all(connection, three_statements())
    with pytest.raises(Exception, match="Duplicate entry"):
        outbox.add_all(connection, [{**EVENT, "event_type": "one", "event_id": "twice"}] * 2)  # type: ignore[list-item]
    outbox.add_all(connection, [*three_statements()[:-1], {**EVENT, "event_type": "after"}])  # type: ignore[typeddict-item]
    connection.commit()
    found = rows(database)
    assert (found[0], len(found), found[-1]) == ("before", 2101, "after")
    assert numbers(database) == list(range(1, 2102))


@pytest.mark.parametrize("dialect", drivers.SQLALCHEMY)
@pytest.mark.parametrize("kind", ["session", "savepoint", "two-phase"])
def test_add_all_is_all_or_nothing_in_sqlalchemy(
    database: Database, outbox: Outbox, dialect: str, kind: str
) -> None:
    engine = create_engine(drivers.engine_url(dialect, database))
    try:
        with Session(engine, twophase=kind == "two-phase") as session:
            outbox.add(session, **EVENT, event_type="before")
            with session.begin_nested() if kind == "savepoint" else nullcontext():
                with pytest.raises(IntegrityError):
                    outbox.add_all(session, three_statements())
                outbox.add(session, **EVENT, event_type="after")
            session.commit()
    finally:
        engine.dispose()
    assert rows(database) == ["before", "after"]
    assert numbers(database) == [1, 2]


# --- SQLAlchemy over the drivers -----------------------------------------------------------------


@pytest.mark.parametrize("dialect", drivers.SQLALCHEMY)
def test_sqlalchemy(database: Database, outbox: Outbox, dialect: str) -> None:
    url = drivers.engine_url(dialect, database)
    engine = create_engine(url)
    inbox = Inbox("points")
    with Session(engine) as session:
        outbox.add(session, **EVENT, event_type="e1")
        with session.begin_nested() as savepoint:
            outbox.add(session, **EVENT, event_type="e2")
            savepoint.rollback()
        events: list[EventFields] = [{**EVENT, "event_type": name} for name in ("e3", "e4")]  # type: ignore[typeddict-item]
        outbox.add_all(session, events)
        assert (inbox.claim(session, "e"), inbox.claim(session, "e")) == (True, False)
        session.commit()
        assert not inbox.claim(session, "e")
    with engine.begin() as connection:
        outbox.add(connection, **{**EVENT, "payload": SAID}, event_type="e5")
    automatic = create_engine(url, isolation_level="AUTOCOMMIT")
    with (
        automatic.connect() as connection,
        pytest.raises(NotInTransactionError, match=r"engine\.begin\(\)"),
    ):
        outbox.add(connection, **EVENT, event_type="x")
    automatic.dispose()
    engine.dispose()
    assert rows(database) == ["e1", "e3", "e4", "e5"]
    assert numbers(database) == [1, 2, 3, 4]


@pytest.mark.parametrize("dialect", drivers.SQLALCHEMY)
@pytest.mark.parametrize("options", [{}, {"connect_args": {"autocommit": True}}])
def test_two_phase(
    database: Database, outbox: Outbox, dialect: str, options: dict[str, Any]
) -> None:
    """The event is in the prepared transaction: there after the commit, gone with a rollback."""
    engine = create_engine(drivers.engine_url(dialect, database), **options)
    try:
        with Session(engine, twophase=True) as session:
            outbox.add(session, **EVENT, event_type="kept")
            session.prepare()
            assert rows(database) == []
            session.commit()
            outbox.add(session, **EVENT, event_type="gone")
            session.prepare()
            session.rollback()
        with engine.connect() as connection:
            transaction = connection.begin_twophase()
            outbox.add(connection, **EVENT, event_type="kept too")
            transaction.prepare()
            transaction.commit()
    finally:
        engine.dispose()
    assert rows(database) == ["kept", "kept too"]


# --- asyncio -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", drivers.ASYNC)
def test_async(database: Database, outbox: Outbox, dialect: str) -> None:
    inbox = Inbox("points", sequences=True)

    async def body(engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session:
            await outbox.add_async(session, **EVENT, event_type="e1")
            async with session.begin_nested() as savepoint:
                await outbox.add_async(session, **EVENT, event_type="e2")
                await savepoint.rollback()
            events: list[EventFields] = [{**EVENT, "event_type": name} for name in ("e3", "e4")]  # type: ignore[typeddict-item]
            await outbox.add_all_async(session, events)
            assert await inbox.claim_async(session, "e")
            assert not await inbox.claim_async(session, "e")
            seen = await inbox.arrival_async(
                session, aggregate_type="order", aggregate_id="7", aggregate_seq=9
            )
            assert seen == (Arrival.FIRST, 0)
            await session.commit()
            await outbox.add_async(session, **EVENT, event_type="e5")
            await session.rollback()
        async with engine.begin() as connection:
            await outbox.add_async(connection, **{**EVENT, "payload": SAID}, event_type="e6")
        maker = async_session_maker(engine)
        scoped = async_scoped_session(maker, scopefunc=asyncio.current_task)
        await outbox.add_async(scoped, **EVENT, event_type="e7")
        await scoped.commit()
        await scoped.remove()
        with pytest.raises(TypeError, match=r"await outbox\.add_async\("):
            async with AsyncSession(engine) as session:
                outbox.add(session, **EVENT, event_type="x")  # type: ignore[arg-type]

    drivers.run_async(dialect, database, body)
    assert rows(database) == ["e1", "e3", "e4", "e6", "e7"]
    assert numbers(database) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("dialect", drivers.ASYNC)
@pytest.mark.parametrize(
    "options", [{"isolation_level": "AUTOCOMMIT"}, {"connect_args": {"autocommit": True}}]
)
def test_async_autocommit_is_refused(
    database: Database, outbox: Outbox, dialect: str, options: dict[str, Any]
) -> None:
    async def body(engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session:
            with pytest.raises(NotInTransactionError, match="without AUTOCOMMIT"):
                await outbox.add_async(session, **EVENT, event_type="x")
            with pytest.raises(NotInTransactionError, match="without AUTOCOMMIT"):
                await outbox.add_all_async(session, [{**EVENT, "event_type": "x"}])  # type: ignore[typeddict-item]
        async with engine.connect() as connection:
            with pytest.raises(NotInTransactionError, match="without AUTOCOMMIT"):
                await outbox.add_async(connection, **EVENT, event_type="x")

    drivers.run_async(dialect, database, body, **options)
    assert rows(database) == []


def test_sync_targets_of_async_calls_are_shown_the_way(database: Database, outbox: Outbox) -> None:
    engine = create_engine(database.url)

    async def body() -> None:
        with Session(engine) as session, pytest.raises(TypeError, match=r": outbox\.add\("):
            await outbox.add_async(session, **EVENT, event_type="x")  # type: ignore[arg-type]

    asyncio.run(body())
    engine.dispose()


# --- many at once --------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", drivers.ASYNC)
def test_fifty_tasks(mysql: Database, dialect: str) -> None:
    """Rows are exactly those committed; each third task rolls back."""
    mysql.create_outbox()
    outbox = Outbox()

    async def body(engine: AsyncEngine) -> None:
        async def one(number: int) -> None:
            async with AsyncSession(engine) as session:
                for step in range(4):
                    await outbox.add_async(
                        session,
                        **{**EVENT, "aggregate_id": number},
                        event_type=f"{number}.{step}",
                    )
                    await asyncio.sleep(0)
                await (session.rollback() if number % 3 == 0 else session.commit())

        await asyncio.gather(*(one(number) for number in range(50)))
        async with AsyncSession(engine) as session:
            assert await session.scalar(text("SELECT COUNT(*) FROM outbox_event")) == 4 * 33

    drivers.run_async(dialect, mysql, body)
    expected = {f"{number}.{step}" for number in range(50) if number % 3 for step in range(4)}
    assert set(rows(mysql)) == expected
