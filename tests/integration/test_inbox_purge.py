"""``cdc-relay inbox``: old claims go, young ones stay."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import MetaData, create_engine

from cdc_relay.cli import main
from cdc_relay.outbox import ddl, inbox_table
from tests.support.sql import Database
from writer import Inbox

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _inbox(database: Database) -> None:
    for statement in ddl(inbox_table(MetaData())):
        database.sql(statement)


def fill(database: Database, rows: int, *, age: str = "10 DAY", consumer: str = "points") -> None:
    values = ", ".join(
        f"('{consumer}', '{consumer}-{age}-{number}', UTC_TIMESTAMP(6) - INTERVAL {age})"
        for number in range(rows)
    )
    database.sql(f"INSERT INTO inbox_event (consumer, event_id, claimed_at) VALUES {values}")


def left(database: Database) -> int:
    return int(database.sql("SELECT COUNT(*) FROM inbox_event")[0][0])


def test_old_claims_go_and_young_ones_stay(database: Database, capsys: Capture) -> None:
    fill(database, 2500, age="40 DAY")
    fill(database, 10, age="20 DAY")
    fill(database, 5, age="40 DAY", consumer="mail")
    url = ["--database-url", database.text]
    assert main(["inbox", "purge", *url, "--consumer", "points", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["deleted"] == 2500
    assert left(database) == 15
    assert main(["inbox", "purge", *url, "--older-than", "240h"]) == 0
    assert capsys.readouterr().out.startswith("deleted 15 claims from inbox_event in ")
    assert left(database) == 0


def test_two_at_once_beside_claims(database: Database) -> None:
    fill(database, 8000)
    engine = create_engine(database.url)
    done = threading.Event()
    claimed = 0

    def claim() -> None:
        nonlocal claimed
        while not done.is_set():
            with engine.begin() as connection:
                assert Inbox("points").claim(connection, f"new-{claimed}")
            claimed += 1

    with ThreadPoolExecutor(3) as pool:
        claims = pool.submit(claim)
        words = ["inbox", "purge", "--older-than", "7d", "--database-url", database.text]
        purges = [pool.submit(main, words) for _ in range(2)]
        assert [purge.result(60) for purge in purges] == [0, 0]
        done.set()
        claims.result(60)
    engine.dispose()
    assert left(database) == claimed > 0


def test_what_is_wrong_is_one_line(database: Database, capsys: Capture) -> None:
    url = ["--database-url", database.text]
    assert main(["inbox", "purge", *url, "--older-than", "7"]) == 2
    assert "is not a duration" in capsys.readouterr().err
    assert main(["inbox", "purge", *url, "--inbox-table", "nothing"]) == 3
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "nothing does not exist: run what cdc-relay inbox schema prints" in error
    assert error.count("\n") == 1
    for command in (["purge", *url], ["schema"]):
        for name in ("", "a.b.c"):
            assert main(["inbox", *command, "--inbox-table", name]) == 2
            assert f"{name!r} is not a table name" in capsys.readouterr().err


@pytest.mark.parametrize("named", [True, False])
def test_schema_prints_what_works(database: Database, capsys: Capture, named: bool) -> None:
    """The table of the sequences is beside the inbox, whatever schema the session is in."""
    name = f"{database.name}.other" if named else "other"
    assert main(["inbox", "schema", "--inbox-table", name, "--sequences"]) == 0
    with database.connect(database=None if named else database.name) as connection:
        for statement in capsys.readouterr().out.split(";\n")[:-1]:
            connection.cursor().execute(statement)
    engine = create_engine(database.url.set(database=None) if named else database.url)
    with engine.begin() as connection:
        inbox = Inbox("points", name, sequences=True)
        assert inbox.claim(connection, "e")
        inbox.arrival(connection, aggregate_type="order", aggregate_id="7", aggregate_seq=1)
    engine.dispose()
