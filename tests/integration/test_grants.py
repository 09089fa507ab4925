"""Relay, compensator and writer run with exactly what ``cdc-relay schema --grants`` prints."""

from __future__ import annotations

from collections.abc import Callable

import pymysql
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from tests.support.harness import Harness
from tests.support.sql import Database
from writer import Outbox


def grant(shop: Harness, role: str, user: Database, **settings: str) -> None:
    """Run the printed statements, as they are printed."""
    admin = shop.database
    process = shop.run(
        *("schema", "--grants", "--role", role, "--account", f"'{user.url.username}'@'%'"),
        *("--dialect", "mariadb" if admin.is_mariadb else "mysql"),
        **settings,
    )
    assert process.wait() == 0, process.text()
    lines = process.stdout.decode().splitlines()
    assert lines[0] == f"-- {role}"
    for line in lines[1:]:
        admin.sql(line)


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
