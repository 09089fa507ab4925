"""Tables of other shapes: the same records by stream, compensator and polling."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdc_relay.columns import Columns
from cdc_relay.outbox import DEBEZIUM_COLUMNS
from tests.support.harness import Harness, Message
from tests.support.sql import Database

DEBEZIUM = """CREATE TABLE outboxevent (
  id CHAR(36) NOT NULL PRIMARY KEY,
  aggregatetype VARCHAR(255) NOT NULL,
  aggregateid VARCHAR(255) NOT NULL,
  type VARCHAR(255) NOT NULL,
  payload JSON
)"""


class Shop(Harness):
    """A table of another shape."""

    def __init__(
        self,
        database: Database,
        kafka: str,
        home: Path,
        table: str,
        names: dict[str, str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        super().__init__(
            database, kafka, home, {"TABLE": table, **(environment or {})}, create=False
        )
        self.names = Columns(names)

    def sql(self, statement: str, *parameters: object) -> Any:
        """Run a statement in our names on the table ``{t}``."""
        text = self.names.sql(statement).format(t=self.table)
        return self.database.sql(text, parameters or None)

    def count(self, status: int, kind: str = "%") -> int:
        sql = "SELECT COUNT(*) FROM {t} WHERE status = %s AND aggregate_type LIKE %s"
        return int(self.sql(sql, status, kind)[0][0])

    def event(self, key: str, payload: object = None, **more: object) -> str:
        """Insert one row as a service does; ``more`` are columns of its own, and ours."""
        fields: dict[str, object] = {
            "event_id": str(uuid.uuid4()),
            "aggregate_type": "order",
            "aggregate_id": key,
            "event_type": "CREATED",
            "payload": None if payload is None else json.dumps(payload, ensure_ascii=False),
            **more,
        }
        names = ", ".join(fields)
        holes = ", ".join(["%s"] * len(fields))
        self.sql(f"INSERT INTO {{t}} ({names}) VALUES ({holes})", *fields.values())
        return str(fields["event_id"])


def thrice(shop: Shop, rows: int, *kinds: str) -> list[Message]:
    """Send the table's ``rows`` rows by stream (it runs), compensator and polling; the records of
    the stream, after those of the others proved the same. Each event has a record of its own in
    each third of its topic."""

    def collect() -> dict[tuple[str, str], list[Message]]:
        found: dict[tuple[str, str], list[Message]] = {}
        for kind in kinds or ("order",):
            for message in shop.messages(kind):
                key = (message.topic, message.event_id)
                found.setdefault(key, []).append(message._replace(offset=0))
        return found

    shop.wait_sent(rows)
    [relay] = [process for process in shop._processes if process.running]
    assert relay.terminate() == 0
    shop.sql("UPDATE {t} SET status = 0")
    assert shop.compensate()["sent"] == rows
    shop.sql("UPDATE {t} SET status = 0")
    polling = shop.spawn("start", SOURCE="polling")
    shop.wait_sent(rows)
    assert polling.terminate() == 0
    records = collect()
    assert sum(map(len, records.values())) == 3 * rows
    for stream, compensated, polled in records.values():
        assert stream == compensated
        assert stream == polled
    return [messages[0] for messages in records.values()]


@pytest.fixture(params=["mysql_url", "mariadb_url"])
def database(request: pytest.FixtureRequest) -> Iterator[Database]:
    with Database.create(request.getfixturevalue(request.param)) as made:
        yield made


@pytest.fixture
def debezium(database: Database, kafka: str, tmp_path: Path) -> Iterator[Shop]:
    """Debezium's table with an event that Debezium has sent, mended by what doctor says."""
    environment = {"COLUMNS": "debezium"}
    names = dict(DEBEZIUM_COLUMNS)
    with Shop(database, kafka, tmp_path, "outboxevent", names, environment) as shop:
        database.sql(DEBEZIUM)
        shop.event("old", {})
        refused = shop.run("start")
        assert refused.wait() == 3
        assert "lacks the columns outbox_id, status, retry_count" in refused.text()
        doctor = shop.run("doctor", "--json")
        assert doctor.wait() == 3
        findings = json.loads(doctor.stdout)["findings"]
        [lacking] = [one for one in findings if one["check"] == "columns"]
        for statement in lacking["mend"]:
            database.sql(statement)
        assert shop.run("init").wait() == 0
        yield shop


def test_a_table_of_debeziums_router(debezium: Shop) -> None:
    shop = debezium
    shop.create_topic()
    shop.relay()
    first = shop.event("a", {"n": 1.50, "text": "é😥"})
    shop.event("a", {"n": 2})
    tombstone = shop.event("b")
    shop.wait_sent(4)
    shop.sql("DELETE FROM {t} WHERE aggregate_id = 'old'")
    records = {record.event_id: record for record in thrice(shop, 3)}
    assert records[first].key == "a"
    assert records[first].json == {"n": 1.5, "text": "é😥"}
    assert records[first].headers["event_type"] == b"CREATED"
    assert records[tombstone].value is None
    assert shop.run("audit", "--since", "1h").wait() == 0


def test_the_whole_life_of_a_row_of_debeziums_table(debezium: Shop) -> None:
    """Parked, dead, revived, archived and purged, by an account with no more than its grants."""
    shop = debezium
    shop.create_topic()
    granted = shop.run("schema", "--grants", "--role", "relay", "--account", "{account}")
    grants = [
        line.removeprefix("GRANT ").partition(" TO ")[0]
        for line in granted.stdout.decode().splitlines()
        if line.startswith("GRANT")
    ]
    assert "`outbox_id`" not in granted.stdout.decode()
    with shop.database.user(*grants, require="NONE", password="x") as account:
        shop.relay(DATABASE_URL=account.text)
        bad = shop.event("a", {"n": 1}, aggregate_type="not a topic")
        shop.event("a", {"n": 2}, aggregate_type="not a topic")
        shop.event("a", {"n": 3})
        shop.wait_sent(2)
        shop.until(lambda: shop.sql("SELECT 1 FROM {t} WHERE retry_count > 0"))
        shop.sql("UPDATE {t} SET status = 2 WHERE event_id = %s", bad)
        listed = shop.run("dead", "list", "--json")
        assert bad in listed.stdout.decode()
        assert json.loads(shop.run("status", "--json").stdout)["dead"] == 1
        assert shop.run("diagnose").wait() in (0, 6)
        shop.sql("UPDATE {t} SET aggregate_type = 'order' WHERE status <> 1")
        assert shop.run("dead", "retry", bad).wait() == 0
        assert shop.compensate()["sent"] == 2
        shop.wait_sent(4)
    archived = shop.run("archive", "--older-than", "0s")
    assert archived.wait() == 0, archived.text()
    assert shop.database.sql("SELECT COUNT(*) FROM outbox_archive")[0][0] == 4
    shop.event("c", {})
    shop.sql("UPDATE {t} SET status = 1")
    purged = shop.run("purge", "--older-than", "0s")
    assert purged.wait() == 0, purged.text()
    assert shop.sql("SELECT COUNT(*) FROM {t}")[0][0] == 0


def test_other_names_beside_a_column_called_as_one_of_ours(
    database: Database, kafka: str, tmp_path: Path
) -> None:
    """``status`` is the service's own there; ours is another."""
    names = {"id": "seq", "status": "relay_status", "created_at": "made"}
    environment = {"COLUMNS": ",".join(f"{ours}={theirs}" for ours, theirs in names.items())}
    with Shop(database, kafka, tmp_path, "events", names, environment) as shop:
        assert shop.run("init").wait() == 0
        database.sql("ALTER TABLE events ADD COLUMN status VARCHAR(20) NOT NULL DEFAULT 'new'")
        shop.create_topic()
        shop.relay()
        for number in range(3):
            shop.event("a", number)
        records = thrice(shop, 3)
        assert [record.json for record in records] == [0, 1, 2]
        assert database.sql("SELECT DISTINCT status FROM events") == (("new",),)
        assert shop.run("archive", "--older-than", "0s").wait() == 0
        assert database.sql("SELECT COUNT(*) FROM outbox_archive")[0][0] == 3
