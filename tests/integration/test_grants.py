"""Each part runs with exactly what ``cdc-relay schema --grants`` and ``inbox schema --grants``
print."""

from __future__ import annotations

import json
from collections.abc import Callable

import pymysql
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from tests.support.harness import Harness
from tests.support.sql import Database
from writer import Inbox, Outbox


def grant(shop: Harness, role: str, user: Database, *more: str, **settings: str) -> None:
    """Run the printed statements, as they are printed."""
    dialect = "mariadb" if shop.database.is_mariadb else "mysql"
    words = ["schema", "--grants", "--role", role, "--dialect", dialect]
    if role == "consumer":
        words = ["inbox", "schema", "--grants"]
    process = shop.run(*words, "--account", f"'{user.url.username}'@'%'", *more, **settings)
    assert process.wait() == 0, process.text()
    head, *lines = process.stdout.decode().splitlines()
    assert head == f"-- {role}"
    for line in lines:
        shop.database.sql(line)


def create(shop: Harness, *words: str) -> None:
    """Run the DDL that a command prints, as it is printed."""
    process = shop.run(*words)
    assert process.wait() == 0, process.text()
    for statement in process.stdout.decode().split(";\n"):
        if statement:
            shop.database.sql(statement)


@pytest.mark.parametrize(
    ("mark", "image"), [("update", "server"), ("update", "minimal"), ("delete", "server")]
)
def test_each_role_with_its_own_grants(
    database: Database, harness: Callable[..., Harness], mark: str, image: str
) -> None:
    settings = {"MARK": mark, "MARK_ROW_IMAGE": image}
    shop = harness(database, **settings)
    with (
        database.user(password="plain") as writer,
        database.user() as relay,
        database.user() as compensator,
    ):
        grant(shop, "writer", writer)
        grant(shop, "relay", relay)
        grant(shop, "compensator", compensator)

        engine = create_engine(writer.url)
        with Session(engine) as session, session.begin():
            for number in range(3):
                Outbox().add(
                    session,
                    aggregate_type="order",
                    aggregate_id=str(number),
                    event_type="CREATED",
                    payload={"n": number},
                )
        engine.dispose()
        # Parked and tried again, marked, looked up, swept: all that a relay does.
        shop.ins("big", {"pad": "x" * 1_200_000})
        running = shop.relay(DATABASE_URL=relay.text)
        shop.until(lambda: len(shop.messages()) == 3)
        shop.until(lambda: database.sql("SELECT 1 FROM outbox_event WHERE retry_count > 0"))
        shop.ins("late", {"n": 3})
        shop.until(lambda: len(shop.messages()) == 4)
        assert running.terminate() == 0
        left = 1 if mark == "delete" else 5
        assert database.sql("SELECT COUNT(*) FROM outbox_event") == ((left,),)

        database.sql("DELETE FROM outbox_event WHERE aggregate_id = 'big'")
        shop.ins("missed", {"n": 4})
        assert shop.compensate(DATABASE_URL=compensator.text)["sent"] == 1
        report = shop.run("doctor", "--quiet", DATABASE_URL=relay.text)
        assert report.wait() == 0, report.stdout.decode()


@pytest.mark.parametrize("image", ["server", "minimal"])
def test_purge_and_archive(database: Database, harness: Callable[..., Harness], image: str) -> None:
    shop = harness(database, MARK_ROW_IMAGE=image)
    with database.user() as user:
        grant(shop, "housekeeping", user)

        def clean(command: str) -> dict[str, int]:
            shop.ins("old")
            database.sql(
                "UPDATE outbox_event SET status = 1, sent_at = UTC_TIMESTAMP(6) - INTERVAL 9 DAY,"
                " created_at = UTC_TIMESTAMP(6) - INTERVAL 9 DAY"
            )
            process = shop.run(command, "--json", DATABASE_URL=user.text)
            assert process.wait() == 0, process.text()
            report: dict[str, int] = json.loads(process.stdout)
            return report

        assert clean("purge")["sent"] == 1
        assert clean("archive")["sent"] == 1  # makes the table
        archived = "INSERT INTO outbox_event SELECT * FROM outbox_archive"
        database.sql(archived)
        assert clean("archive")["sent"] == 2  # of which one comes a second time
        assert database.sql("SELECT COUNT(*) FROM outbox_archive") == ((2,),)
        for statement in ("UPDATE outbox_event SET status = 1", "DROP TABLE outbox_archive"):
            with pytest.raises(pymysql.err.OperationalError, match="denied"):
                user.sql(statement)
        user.close()


def test_a_writer_that_counts_and_a_consumer_that_looks_for_gaps(shop: Harness) -> None:
    database = shop.database
    database.sql("DROP TABLE outbox_event")
    inbox = f"{database.name}.inbox_event"
    create(shop, "schema", "--sequences")
    create(shop, "inbox", "schema", "--sequences", "--inbox-table", inbox)
    with database.user(password="plain") as writer, database.user(password="plain") as consumer:
        grant(shop, "writer", writer, "--sequences")
        grant(shop, "consumer", consumer, "--sequences", "--inbox-table", inbox)

        pool = create_engine(writer.url)
        counting = Outbox(sequences=True)
        for _ in range(2):
            with pool.begin() as connection:
                counting.add(
                    connection, aggregate_type="o", aggregate_id=1, event_type="E", payload={}
                )
        pool.dispose()
        assert database.sql("SELECT last_seq FROM outbox_sequence") == ((2,),)

        pool = create_engine(consumer.url)
        points = Inbox("points", inbox, sequences=True)
        with pool.begin() as connection:
            assert [points.claim(connection, "e") for _ in range(2)] == [True, False]
            for seq in (1, 2):
                points.arrival(connection, aggregate_type="o", aggregate_id="1", aggregate_seq=seq)
        pool.dispose()
        words = ("inbox", "purge", "--inbox-table", inbox, "--older-than", "0s", "--json")
        process = shop.run(*words, DATABASE_URL=consumer.text)
        assert process.wait() == 0, process.text()
        assert json.loads(process.stdout)["deleted"] == 1


def test_the_payload_is_out_of_reach(shop: Harness) -> None:
    with shop.database.user() as relay:
        grant(shop, "relay", relay)
        with pytest.raises(pymysql.err.OperationalError, match="denied"):
            relay.sql("UPDATE outbox_event SET payload = NULL")
        with pytest.raises(pymysql.err.OperationalError, match="denied"):
            relay.sql("DELETE FROM outbox_event")
        relay.close()


@pytest.mark.parametrize("dropped", ["last_error", "sent_at"])
def test_a_table_without_an_optional_column(shop: Harness, dropped: str) -> None:
    """The statements are the table's: they run as printed."""
    shop.database.sql(f"ALTER TABLE outbox_event DROP COLUMN {dropped}")
    with shop.database.user() as relay:
        grant(shop, "relay", relay)
        shop.ins("a", {"n": 1})
        running = shop.relay(DATABASE_URL=relay.text)
        shop.wait_sent(1)
        assert running.terminate() == 0


def test_a_table_that_cannot_be_looked_at(shop: Harness) -> None:
    """All columns, and it says so beside the statements, which can still be piped."""
    process = shop.run(
        *("schema", "--grants", "--role", "relay"),
        DATABASE_URL=shop.database.url.set(port=1).render_as_string(hide_password=False),
    )
    assert process.wait() == 0
    assert "note: the table could not be looked at (the database at" in process.text()
    assert "leave out what it lacks of last_error, sent_at" in process.text()
    assert b"last_error, sent_at" in process.stdout


def test_a_schema_has_to_be_named(shop: Harness) -> None:
    process = shop.run("schema", "--grants", DATABASE_URL="")
    assert process.wait() == 2
    assert "which schema?" in process.text()
    process = shop.run("inbox", "schema", "--grants")
    assert process.wait() == 2
    assert "which schema? write --inbox-table schema.table" in process.text()
