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
        shop.compensate()  # or the relay is there first
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


OWN_COLUMNS = """ALTER TABLE outbox_event
  ADD COLUMN tenant VARCHAR(32) CHARACTER SET latin1,
  ADD COLUMN goes_to VARCHAR(100),
  ADD COLUMN part INT,
  ADD COLUMN rev BIGINT UNSIGNED,
  ADD COLUMN padded INT ZEROFILL,
  ADD COLUMN price DECIMAL(12, 3),
  ADD COLUMN flag ENUM('no', 'maybe é'),
  ADD COLUMN tags SET('x', 'y'),
  ADD COLUMN doc JSON,
  ADD COLUMN digest BINARY(4),
  ADD COLUMN day DATE,
  ADD COLUMN moment TIMESTAMP(3) NULL,
  ADD COLUMN note TEXT"""
VALUES: dict[str, object] = {
    "tenant": "é",
    "rev": 2**64 - 1,
    "padded": 42,
    "price": "-1.500",
    "flag": "maybe é",
    "tags": "x,y",
    "doc": '{"n": 1.25}',
    "digest": b"\xff\x01\0\0",
    "day": "2026-02-28",
    "moment": "2026-02-28 12:00:00.125",
    "note": "é😥",
}


@pytest.fixture
def own(database: Database, kafka: str, tmp_path: Path) -> Iterator[Shop]:
    """Our table with columns of the service's."""
    with Shop(database, kafka, tmp_path, "outbox_event") as shop:
        database.create_outbox()
        database.sql(OWN_COLUMNS)
        yield shop


@pytest.mark.parametrize("form", ["raw", "cloudevents-structured"])
def test_columns_in_header_and_envelope(own: Shop, form: str) -> None:
    shop = own
    places = [f"{name}:header:x-{name}" for name in VALUES]
    places += [f"{name}:envelope" for name in VALUES]
    shop._extra |= {"EXTRA_COLUMNS": ",".join(places), "FORMAT": form}
    shop.create_topic()
    shop.relay()
    full = shop.event("a", {"n": 1.50}, **VALUES)
    empty = shop.event("b", {"n": 2})
    shop.event("c", None, **VALUES)
    records = {record.event_id: record for record in thrice(shop, 3)}
    headers = records[full].headers
    assert headers["x-tenant"] == "é".encode()
    assert headers["x-rev"] == b"18446744073709551615"
    assert headers["x-padded"] == b"0000000042"
    assert headers["x-price"] == b"-1.500"
    assert headers["x-flag"] == "maybe é".encode()
    assert headers["x-doc"] == b'{"n": 1.25}'
    assert headers["x-digest"] == b"\xff\x01\0\0"
    assert headers["x-moment"] == b"2026-02-28 12:00:00.125"
    value = records[full].json
    assert value["tenant"] == "é"
    assert value["digest"] == "/wEAAA=="
    if form == "raw":
        assert value["payload"] == {"n": 1.5}
        assert value["rev"] == 2**64 - 1
        assert records[empty].json == {"payload": {"n": 2}, **dict.fromkeys(VALUES)}
    else:
        assert value["data"] == {"n": 1.5}
        assert value["rev"] == "18446744073709551615"
        assert not VALUES.keys() & records[empty].json.keys()


def test_topics_and_partitions_by_column_and_route(own: Shop) -> None:
    shop = own
    prefix = shop.topic_prefix
    routes = [
        {"column": "event_type", "match": "Audit.*", "topic": prefix + "audit"},
        {"match": r"shop\.(\w+)", "topic": prefix + "{1}.{flag}"},
    ]
    shop._extra |= {
        "TOPIC": prefix + "{note}",
        "ROUTES": json.dumps(routes),
        "TOPIC_COLUMN": "goes_to",
        "PARTITION_COLUMN": "part",
    }
    kinds = ("acme", "audit", "cart.no", "own")
    for kind in kinds:
        shop.create_topic(kind, partitions=3)
    shop.relay()
    expected = {
        shop.event("a", 1, note="acme"): "acme",
        shop.event("a", 2, note="acme", event_type="AuditDone"): "audit",
        shop.event("a", 3, aggregate_type="shop.cart", flag="no"): "cart.no",
        shop.event("a", 4, goes_to=prefix + "own", part=2): "own",
        shop.event("b", 5, goes_to=prefix + "own", part=0): "own",
    }
    records = {record.event_id: record for record in thrice(shop, 5, *kinds)}
    assert {key: record.topic for key, record in records.items()} == {
        key: prefix + kind for key, kind in expected.items()
    }
    by_value = {record.json: record.partition for record in records.values()}
    assert (by_value[4], by_value[5]) == (2, 0)
    audited = shop.run("audit", "--since", "1h", "--until", "0s", "--json")
    assert audited.wait() == 0, audited.stdout
    report = json.loads(audited.stdout)
    assert report["topics"] == sorted(prefix + kind for kind in kinds)
    assert (report["rows"], report["records"], report["foreign"]) == (5, 15, 0)
    shop.run("doctor", "--json")


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_a_row_whose_topic_or_partition_cannot_be_is_parked_alone(own: Shop, delivery: str) -> None:
    shop = own
    shop._extra |= {
        "TOPIC_COLUMN": "goes_to",
        "PARTITION_COLUMN": "part",
        "DELIVERY": delivery,
    }
    shop.create_topic(partitions=2)
    shop.relay()
    bad = [
        shop.event("a", 1, goes_to="no topic"),
        shop.event("b", 1, part=2),
        shop.event("c", 1, part=-1),
    ]
    behind = [shop.event(key, 2) for key in "abc"]
    good = [shop.event("d", 1), shop.event("e", 1, part=1)]
    shop.wait_sent(2)
    shop.until(lambda: shop.sql("SELECT COUNT(*) FROM {t} WHERE retry_count > 0")[0][0] == 3)
    assert {message.event_id for message in shop.messages()} == set(good)
    reasons = dict(shop.sql("SELECT aggregate_id, last_error FROM {t} WHERE retry_count > 0"))
    assert "'no topic' is not a Kafka topic name" in reasons["a"]
    assert "Unknown partition" in reasons["b"]
    assert "part is '-1', which is no partition" in reasons["c"]
    shop.sql("UPDATE {t} SET goes_to = NULL, part = NULL, next_retry_time = NULL WHERE status = 0")
    shop.wait_sent(8)
    assert [message.event_id for message in shop.messages() if message.key == "b"] == [
        bad[1],
        behind[1],
    ]


def test_a_table_without_the_column_is_one_line(own: Shop) -> None:
    """Exit code 2 for the setting's fault, 3 for the table's, from every command that reads it."""
    shop = own
    lacking = "has no column tenent, which topic names; did you mean tenant?"
    for command in ("start", "compensate", "init", "purge"):
        more = ("--older-than", "1d") if command == "purge" else ()
        refused = shop.run(command, *more, TOPIC="t.{tenent}")
        assert refused.wait() == 2, command
        assert lacking in refused.text()
        assert "Traceback" not in refused.text()
        wrong = shop.run(command, *more, TOPIC="t.{status}")
        assert wrong.wait() == 2, command
        assert "topic: column status cannot be used here" in wrong.text()
    doctor = shop.run("doctor", "--json", TOPIC="t.{tenent}")
    assert doctor.wait() != 1
    assert lacking in (doctor.stdout or b"").decode()
    typed = shop.run("start", PARTITION_COLUMN="note")
    assert typed.wait() == 3
    assert "column note, which partition_column names, is of type text" in typed.text()


def test_rows_logged_before_the_column_was_there(own: Shop) -> None:
    """Rows that were logged before the column was there are read back, with its value of now."""
    shop = own
    shop.create_topic()
    relay = shop.relay()
    shop.event("a", 0)
    shop.wait_sent(1)
    assert relay.terminate() == 0
    shop.event("a", 1)
    shop.database.sql("ALTER TABLE outbox_event ADD COLUMN later VARCHAR(10) DEFAULT 'x'")
    shop.event("a", 2, later="y")
    shop._extra["EXTRA_COLUMNS"] = "later:header"
    shop.relay()
    shop.wait_sent(3)
    assert [message.headers.get("later") for message in shop.messages()] == [None, b"x", b"y"]


def test_a_binary_id_with_its_text_beside_it(mysql_url: str, kafka: str, tmp_path: Path) -> None:
    """The way out that docs/shapes.md shows for a BINARY(16) id."""
    names = {**DEBEZIUM_COLUMNS, "event_id": "event_id"}
    with (
        Database.create(mysql_url) as database,
        Shop(database, kafka, tmp_path, "outboxevent", names) as shop,
    ):
        database.sql(DEBEZIUM.replace("CHAR(36)", "BINARY(16)"))
        database.sql(
            "ALTER TABLE outboxevent"
            " ADD COLUMN event_id CHAR(36) AS (BIN_TO_UUID(id)) STORED UNIQUE"
        )
        shop._extra["COLUMNS"] = "debezium,event_id=event_id"
        findings = json.loads(shop.run("doctor", "--json").stdout)["findings"]
        [lacking] = [one for one in findings if one["check"] == "columns"]
        for statement in lacking["mend"]:
            database.sql(statement)
        wrong = shop.run("start", COLUMNS="debezium")
        assert wrong.wait() == 3
        assert "column id is of type binary; it must be one of char, varchar" in wrong.text()
        shop.create_topic()
        shop.relay()
        event_id = uuid.uuid4()
        database.sql(
            "INSERT INTO outboxevent (id, aggregatetype, aggregateid, type, payload)"
            " VALUES (%s, 'order', 'a', 'CREATED', '{}')",
            (event_id.bytes,),
        )
        [record] = thrice(shop, 1)
        assert record.event_id == str(event_id)
