"""Faults that users of binlog readers met in column types and payloads, each as the smallest input
that shows it. Every row goes both ways, through the stream and through the compensator, and must
come out as the same record."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

import pytest

from cdc_relay.binlog.rows import UnreadRow
from cdc_relay.outbox import OutboxEvent
from dev.database import Database as DatabaseServer
from dev.mariadb import MariaDB
from tests.support.harness import Harness, Message
from tests.support.source import SourceUnderTest
from tests.support.sql import INSERT, Database, row
from writer import Outbox

MakeHarness = Callable[..., Harness]


@pytest.fixture(scope="module", params=["mysql", "mariadb"])
def shared_shop(
    request: pytest.FixtureRequest, kafka: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Harness]:
    url: str = request.getfixturevalue(f"{request.param}_url")
    home = tmp_path_factory.mktemp("values")
    with Database.create(url) as database, Harness(database, kafka, home) as shop:
        yield shop


@pytest.fixture
def live(shared_shop: Harness) -> Harness:
    """A shop whose relay runs; tests keep apart by the aggregate type."""
    shared_shop.steady_relay()
    return shared_shop


@pytest.fixture
def own_database(own_server: DatabaseServer) -> Iterator[Database]:
    with Database.create(own_server.url()) as database:
        yield database


def both_ways(shop: Harness, kind: str, total: int, **environment: str) -> list[Message]:
    """The records of the rows that the relay has sent, in the order of their ids, after the
    compensator has sent the same rows again as the same records."""
    shop.wait_sent(total, kind=kind)
    database = shop.database
    streamed = shop.messages(kind)
    assert len(streamed) == total
    database.sql(f"UPDATE {shop.table} SET status = 0 WHERE aggregate_type = %s", (kind,))
    summary = shop.compensate(**environment)
    assert (summary["sent"], summary["marked"]) == (total, total), summary
    again = shop.messages(kind)
    assert len(again) == 2 * total
    found = by_partition(again)
    assert {
        partition: [m._replace(offset=0) for m in messages[len(messages) // 2 :]]
        for partition, messages in found.items()
    } == {
        partition: [m._replace(offset=0) for m in messages]
        for partition, messages in by_partition(streamed).items()
    }
    return streamed


def by_partition(messages: Sequence[Message]) -> dict[int, list[Message]]:
    found: dict[int, list[Message]] = {}
    for message in messages:
        found.setdefault(message.partition, []).append(message)
    return found


def selected(shop: Harness, kind: str) -> list[bytes | None]:
    """What SELECT returns for the payloads, in id order."""
    sql = f"SELECT payload FROM {shop.table} WHERE aggregate_type = %s ORDER BY id"
    values = [value for (value,) in shop.database.sql(sql, (kind,))]
    return [value.encode() if isinstance(value, str) else value for value in values]


# --- JSON -----------------------------------------------------------------------------------------


def test_documents_are_json_text_at_every_level(live: Harness) -> None:
    """Keys and texts came out as byte strings, or only at some levels."""
    live.create_topic("documents")
    documents = [{"name": "Zoë", "tags": ["a", {"k": "v"}]}, ["x"], "text", 1, True, {}, [], [[]]]
    for document in documents:
        live.ins("o1", document, kind="documents")
    streamed = both_ways(live, "documents", len(documents))
    assert [message.json for message in streamed] == documents
    assert [message.value for message in streamed] == selected(live, "documents")
    assert not [message for message in streamed if b"b'" in (message.value or b"")]


def test_documents_about_the_limit_of_the_small_layout(live: Harness) -> None:
    """MySQL keeps an object of 64 KiB and more in another layout."""
    live.create_topic("layouts")
    documents: list[object] = []
    for size in (200, 210, 215, 218, 219, 220, 230, 700):
        documents.append({f"key {number:03d}": "x" * size for number in range(300)})
    documents.append({"nested": documents[0], "list": [documents[3], documents[4]]})
    for document in documents:
        live.ins("o1", document, kind="layouts")
    if not live.database.is_mariadb:
        sizes = [
            int(size)
            for (size,) in live.database.sql(
                f"SELECT JSON_STORAGE_SIZE(payload) FROM {live.table}"
                " WHERE aggregate_type = 'layouts' ORDER BY id"
            )
        ]
        assert [size for size in sizes if 60_000 < size < 65_536]
        assert [size for size in sizes if 65_536 <= size < 70_000]
        assert max(sizes) > 200_000
    streamed = both_ways(live, "layouts", len(documents))
    assert [message.json for message in streamed] == documents
    assert [message.value for message in streamed] == selected(live, "layouts")


def test_the_kinds_of_nothing(live: Harness) -> None:
    """SQL NULL is a tombstone; JSON null is the four letters; nothing else becomes either."""
    live.create_topic("nothing")
    values = ["NULL", "'null'", "'{}'", "'[]'", "'\"text\"'", "'\"\"'", "'true'", "'0'"]
    for value in values:
        live.database.sql(
            f"INSERT INTO {live.table} (event_id, aggregate_type, aggregate_id, event_type,"
            f" payload) VALUES (UUID(), 'nothing', 'o1', 'MADE', {value})"
        )
    streamed = both_ways(live, "nothing", len(values))
    expected = [None, b"null", b"{}", b"[]", b'"text"', b'""', b"true", b"0"]
    assert [message.value for message in streamed] == expected


def test_an_empty_text_is_no_tombstone(shop: Harness) -> None:
    shop.create_topic("texts")
    shop.database.sql(f"ALTER TABLE {shop.table} MODIFY payload TEXT NULL")
    relay = shop.relay()
    values = [None, "", "null", " ", "NULL", "\0", "'\"\\", "ü"]
    for value in values:
        insert = INSERT.format(table=shop.table)
        shop.database.sql(insert, (*row("o1", kind="texts")[:4], value, None))
    streamed = both_ways(shop, "texts", len(values))
    assert [message.value for message in streamed] == [
        None if value is None else value.encode() for value in values
    ]
    assert relay.terminate() == 0


# --- character sets -------------------------------------------------------------------------------


@pytest.mark.parametrize("table_charset", ["utf8mb4", "utf8mb3"])
def test_text_follows_the_charset_of_its_own_column(table_charset: str, shop: Harness) -> None:
    """Bytes that are not UTF-8 stopped readers; MySQL's names of charsets are not Python's."""
    table = shop.table
    shop.create_topic("charsets")
    shop.database.sql(f"ALTER TABLE {table} CONVERT TO CHARACTER SET {table_charset}")
    shop.database.sql(
        f"ALTER TABLE {table} ADD note VARCHAR(20) CHARACTER SET latin1 NULL AFTER id,"
        " ADD address VARBINARY(16) NULL AFTER note,"
        " MODIFY aggregate_id VARCHAR(64) CHARACTER SET gbk NOT NULL,"
        " MODIFY event_type VARCHAR(128) CHARACTER SET latin1 NOT NULL,"
        " MODIFY payload TEXT CHARACTER SET latin1 NULL"
    )
    relay = shop.relay()
    keys = ["good", "客户", "次のお客様", "ключ", "last"]
    for key in keys:
        shop.database.sql(
            f"INSERT INTO {table} (note, address, event_id, aggregate_type, aggregate_id,"
            " event_type, payload)"
            " VALUES (X'E981', INET6_ATON('::1'), UUID(), 'charsets', %s, 'Größe €', %s)",
            (key, f"é{chr(0x81)} für 5 €"),
        )
    streamed = both_ways(shop, "charsets", len(keys))
    assert [message.key for message in streamed] == keys
    assert {message.headers["event_type"] for message in streamed} == {"Größe €".encode()}
    assert {message.value for message in streamed} == {f"é{chr(0x81)} für 5 €".encode()}
    assert [message.value for message in streamed] == selected(shop, "charsets")
    assert relay.terminate() == 0


def test_four_byte_characters_are_the_same_on_every_way(live: Harness) -> None:
    """Emoji became question marks on one of two paths, and the key another key."""
    live.create_topic("emoji", partitions=12)
    database = live.database
    key, payload = "客户-😥", {"t": "😥", "😥": ["👩‍👩‍👧", "🇩🇪"]}
    live.ins(key, payload, kind="emoji", event_type="😥")
    with database.connect() as connection:
        Outbox(table=live.table).add(
            connection, aggregate_type="emoji", aggregate_id=key, event_type="😥", payload=payload
        )
        connection.commit()
    streamed = both_ways(live, "emoji", 2)
    assert {message.key for message in streamed} == {key}
    assert {message.headers["aggregate_id"] for message in streamed} == {key.encode()}
    assert {message.headers["event_type"] for message in streamed} == {"😥".encode()}
    assert len({message.partition for message in streamed}) == 1
    assert [message.json for message in streamed] == [payload, payload]
    assert [message.value for message in streamed] == selected(live, "emoji")


# --- binary and numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "kind"),
    [("event_id", "BINARY"), ("aggregate_id", "BINARY"), ("aggregate_id", "VARBINARY")],
)
def test_binary_ids_are_refused(column: str, kind: str, shop: Harness) -> None:
    """The log drops trailing zero bytes of BINARY, and of either Kafka's key and the headers would
    not be texts: such a table is refused at the start."""
    shop.database.sql(f"ALTER TABLE {shop.table} MODIFY {column} {kind}(16) NOT NULL")
    for command in ("start", "compensate"):
        process = shop.run(command)
        assert process.wait() == 3
        assert f"column {column} is of type {kind.lower()}; it must be one of" in process.text()
        assert "Traceback" not in process.text()


def test_trailing_zero_bytes_of_a_binary_payload(shop: Harness) -> None:
    shop.create_topic("padded")
    shop.database.sql(f"ALTER TABLE {shop.table} MODIFY payload BLOB NULL")
    shop.database.sql(f"ALTER TABLE {shop.table} ADD code BINARY(16) NULL AFTER id")
    relay = shop.relay()
    values = [b"\1" * 15 + b"\0", b"\1" * 14 + b"\0\0", b"\0" * 16, b"", b"\0", b" \0 "]
    for value in values:
        shop.database.sql(
            f"INSERT INTO {shop.table} (code, event_id, aggregate_type, aggregate_id, event_type,"
            " payload) VALUES (%s, UUID(), 'padded', 'k', 'MADE', %s)",
            (value, value),
        )
    assert [message.value for message in both_ways(shop, "padded", len(values))] == values
    assert relay.terminate() == 0


def test_ids_beyond_the_signed_range(own_database: Database, harness: MakeHarness) -> None:
    """Without signedness in the log (MariaDB's default) ids above 2^63 came out negative; their
    marks then hit no row, or another one."""
    shop = harness(own_database)
    database = own_database
    shop.create_topic("large")
    [(before,)] = database.sql("SELECT @@global.binlog_row_metadata")
    first = 9223372036854775808
    database.sql(f"ALTER TABLE {shop.table} AUTO_INCREMENT = {first}")
    relay = shop.relay()
    try:
        for number, level in enumerate((before, "FULL")):
            database.sql(f"SET GLOBAL binlog_row_metadata = {level}")
            database.sql("FLUSH TABLES")
            database.close()
            shop.ins("a", {"n": 1}, kind="large")
            shop.ins("b", {"n": 2}, kind="large")
            shop.wait_sent(2 * number + 2, kind="large")
    finally:
        database.sql(f"SET GLOBAL binlog_row_metadata = {before}")
    database.sql(
        f"INSERT INTO {shop.table} (id, event_id, aggregate_type, aggregate_id, event_type)"
        " VALUES (18446744073709551614, UUID(), 'large', 'c', 'MADE')"
    )
    shop.wait_sent(5, kind="large")
    assert relay.terminate() == 0
    stored = database.sql(f"SELECT id, event_id, status FROM {shop.table} ORDER BY id")
    assert [item[0] for item in stored] == [first + n for n in range(4)] + [2**64 - 2]
    assert {item[2] for item in stored} == {1}
    assert [message.event_id for message in shop.messages("large")] == [item[1] for item in stored]
    [stopped] = relay.logged("stopped")
    assert stopped["marked"] == 5


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bare_mysql", "own_mariadb"])
def test_one_instant_whatever_zone_anybody_is_in(
    name: str,
    request: pytest.FixtureRequest,
    harness: MakeHarness,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The instant must not depend on the zone of the process, of the session or of the server. A
    DATETIME is UTC by contract; a TIMESTAMP is an instant by itself."""
    server: DatabaseServer = request.getfixturevalue(name)
    with Database.create(server.url()) as database:
        shop = harness(database)
        # Old instants must not fall to the broker's retention before they are read.
        shop.create_topic(**{"retention.ms": "-1"})
        [(before,)] = database.sql("SELECT @@global.time_zone")
        monkeypatch.setenv("TZ", "Asia/Seoul")
        relay = shop.relay()
        monkeypatch.setenv("TZ", "America/New_York")
        try:
            for number, type_ in enumerate(("TIMESTAMP(6)", "DATETIME(6)", "DATETIME(3)")):
                kind = f"times-{number}"
                shop.create_topic(kind)
                database.sql(f"ALTER TABLE {shop.table} MODIFY created_at {type_} NOT NULL")
                for zone in ("+00:00", "-05:00"):
                    database.sql(f"SET GLOBAL time_zone = '{zone}'")
                    database.close()
                    database.sql(
                        f"INSERT INTO {shop.table} (event_id, aggregate_type, aggregate_id,"
                        " event_type, created_at)"
                        " VALUES (UUID(), %s, 'k', 'MADE', '2024-07-01 12:00:00.517')",
                        (kind,),
                    )
                # The TIMESTAMP that a session five hours west of UTC writes is five hours later.
                hours = (12, 17) if "TIMESTAMP" in type_ else (12, 12)
                for message, hour in zip(both_ways(shop, kind, 2), hours, strict=True):
                    assert message.headers["occurred_at"] == (
                        f"2024-07-01T{hour}:00:00.517000Z".encode()
                    )
                    moment = datetime(2024, 7, 1, hour, tzinfo=UTC)
                    assert message.timestamp_ms == int(moment.timestamp()) * 1000 + 517
        finally:
            database.sql(f"SET GLOBAL time_zone = '{before}'")
            database.close()
        assert relay.terminate() == 0


def test_zero_dates(shop: Harness) -> None:
    """They name no instant: no occurred_at, and Kafka's own time; the columns behind them are
    read right, and for the compensator such a row is old."""
    shop.create_topic("zero")
    table = shop.table
    shop.database.sql(
        f"ALTER TABLE {table} ADD born YEAR NULL AFTER created_at,"
        " MODIFY created_at DATETIME(6) NULL DEFAULT NULL AFTER event_id"
    )
    relay = shop.relay()
    values = ["'0000-00-00 00:00:00'", "'2024-00-15 10:00:00'", "NULL", "'2024-05-05 05:05:05.5'"]
    before = datetime.now(UTC) - timedelta(seconds=5)
    with shop.database.connect(autocommit=True) as connection, connection.cursor() as cursor:
        cursor.execute("SET sql_mode = ''")
        for number, value in enumerate(values):
            cursor.execute(
                f"INSERT INTO {table} (event_id, aggregate_type, aggregate_id, event_type, payload,"
                f" created_at, born, next_retry_time) VALUES (UUID(), 'zero', 'k', 'MADE', %s,"
                f" {value}, 0, '2024-01-01 00:00:00.25')",
                (json.dumps({"n": number}),),
            )
    shop.wait_sent(4, kind="zero")
    streamed = shop.messages("zero")
    assert [message.json["n"] for message in streamed] == [0, 1, 2, 3]
    for message in streamed[:3]:
        assert "occurred_at" not in message.headers
        assert message.timestamp_ms > before.timestamp() * 1000
    assert streamed[3].headers["occurred_at"] == b"2024-05-05T05:05:05.500000Z"
    # A living relay would see to rows with a time for the next try itself.
    assert relay.terminate() == 0
    shop.database.sql(f"UPDATE {table} SET status = 0")
    process = shop.spawn("compensate", "--older-than", "10m", "--json")
    assert process.wait() == 0
    assert json.loads(process.stdout)["sent"] == 4
    again = shop.messages("zero")[4:]
    assert [(m.key, m.value, m.headers) for m in again] == [
        (m.key, m.value, m.headers) for m in streamed
    ]


# --- ENUM and SET ---------------------------------------------------------------------------------


def test_a_status_of_labels_is_refused(shop: Harness) -> None:
    shop.database.sql(
        f"ALTER TABLE {shop.table} MODIFY status ENUM('NEW', 'SENT', 'FAILED') NOT NULL"
    )
    process = shop.run("start")
    assert process.wait() == 3
    assert "column status is of type enum" in process.text()


@pytest.mark.parametrize("level", ["MINIMAL", "FULL"])
def test_unknown_labels_do_not_hide_a_row(level: str, own_database: Database) -> None:
    """The empty ENUM value (number 0) was read as the last label, or the row passed over."""
    database = own_database
    database.create_outbox()
    [(before,)] = database.sql("SELECT @@global.binlog_row_metadata")
    database.sql(f"SET GLOBAL binlog_row_metadata = {level}")
    try:
        database.sql(
            "ALTER TABLE outbox_event ADD state ENUM('NEW', 'SENT', 'FAILED') NULL AFTER id,"
            " ADD marks SET('a', 'b', 'c') NULL AFTER state"
        )
        database.close()
        with SourceUnderTest.on(database) as source, source.session() as session:
            session.run("SET sql_mode = ''")
            for state, marks in (("NEW", "c,a"), ("unknown", "z"), ("FAILED", ""), ("", "b,a,c")):
                session.run(
                    "INSERT INTO outbox_event (state, marks, event_id, aggregate_type,"
                    " aggregate_id, event_type) VALUES (%s, %s, UUID(), 'order', %s, 'MADE')",
                    (state, marks, f"k-{state}"),
                )
            events = source.read().events
            assert [event.aggregate_id for event in events] == [
                "k-NEW",
                "k-unknown",
                "k-FAILED",
                "k-",
            ]
            assert {event.event_type for event in events} == {"MADE"}
    finally:
        database.sql(f"SET GLOBAL binlog_row_metadata = {before}")


def test_labels_that_were_changed_while_the_relay_was_away(own_database: Database) -> None:
    """The log holds their numbers. Where it names its columns it has their labels, too, and those
    count: by today's schema an order went out as an account."""
    database = own_database
    database.create_outbox()
    [(before,)] = database.sql("SELECT @@global.binlog_row_metadata")
    database.sql("SET GLOBAL binlog_row_metadata = FULL")
    try:
        database.close()
        database.sql(
            "ALTER TABLE outbox_event ADD goes_to ENUM('order', 'prüfung') CHARACTER SET latin1"
            " NULL, ADD marks SET('ä', 'b') CHARACTER SET ucs2 NULL AFTER id"
        )
        settings = {"topic": "t-{marks}", "topic_column": "goes_to"}
        with SourceUnderTest.on(database, **settings) as source:
            columns = "goes_to, marks, event_id, aggregate_type, aggregate_id, event_type"
            database.sql(
                f"INSERT INTO outbox_event ({columns}) VALUES"
                " ('order', 'ä,b', 'e1', 'o', 'k', 'M'), ('prüfung', 'b', 'e2', 'o', 'k', 'M')"
            )
            database.sql("DELETE FROM outbox_event WHERE event_id = 'e2'")
            database.sql(
                "ALTER TABLE outbox_event MODIFY goes_to ENUM('account', 'order', 'prüfung') NULL,"
                " MODIFY marks SET('c', 'b', 'ä') CHARACTER SET utf8mb4 NULL"
            )
            extras = [sorted(event.extra) for event in source.read().events]
            assert extras == [
                sorted([b"order", "ä,b".encode()]),
                [b"b", "prüfung".encode()],
            ]
    finally:
        database.sql(f"SET GLOBAL binlog_row_metadata = {before}")
        database.close()


def test_a_label_that_no_longer_exists_ends_nothing(own_database: Database) -> None:
    """At the default level the labels are today's; the row is read back, as far as it is there."""
    database = own_database
    database.create_outbox()
    database.sql("ALTER TABLE outbox_event ADD goes_to ENUM('a', 'b', 'c') NULL")
    with SourceUnderTest.on(database, topic_column="goes_to") as source:
        columns = "goes_to, event_id, aggregate_type, aggregate_id, event_type"
        for label in "ca":
            database.sql(
                f"INSERT INTO outbox_event ({columns}) VALUES (%s, UUID(), 'o', %s, 'M')",
                (label, label),
            )
        database.sql("UPDATE outbox_event SET goes_to = 'b' WHERE goes_to = 'c'")
        database.sql("ALTER TABLE outbox_event MODIFY goes_to ENUM('a', 'b') NULL")
        first, second = source.read().rows
        assert first == UnreadRow(1, "goes_to is not one of its labels: number 3 of 2")
        assert isinstance(second, OutboxEvent)
        assert second.extra == (b"a",)


@pytest.mark.parametrize("level", ["NO_LOG", "MINIMAL", "FULL"])
def test_collations_that_serve_several_character_sets(level: str, own_mariadb: MariaDB) -> None:
    """MariaDB's default from 11.5 on: they have no number in information_schema.collations, and
    every row had to be read back."""
    with Database.create(own_mariadb.url()) as database:
        database.create_outbox()
        [(before,)] = database.sql("SELECT @@global.binlog_row_metadata")
        database.sql(f"SET GLOBAL binlog_row_metadata = {level}")
        try:
            database.close()
            database.sql(
                "ALTER TABLE outbox_event CONVERT TO CHARACTER SET utf8mb4"
                " COLLATE utf8mb4_uca1400_ai_ci"
            )
            database.sql(
                "ALTER TABLE outbox_event"
                " MODIFY event_type VARCHAR(128) COLLATE utf16_uca1400_swedish_as_cs NOT NULL,"
                " ADD goes_to ENUM('a', 'ü') COLLATE utf8mb3_uca1400_ai_ci NOT NULL DEFAULT 'ü'"
            )
            with SourceUnderTest.on(database, topic_column="goes_to") as source:
                source.ins("käse", "😥", payload={"t": "ü😥"})
                events = source.read().events
            assert [event.aggregate_id for event in events] == ["käse", "😥"]
            assert {event.event_type for event in events} == {"CREATED"}
            assert {event.payload for event in events} == {'{"t": "ü😥"}'.encode()}
            assert {event.extra for event in events} == {("ü".encode(),)}
        finally:
            database.sql(f"SET GLOBAL binlog_row_metadata = {before}")


def test_headers_that_no_record_can_carry_hold_up_their_aggregate_only(shop: Harness) -> None:
    """A name with half a character was a segmentation fault of the client library, one with a
    zero character came out as another name (`id`), a deep document ended the process."""
    table = shop.table
    shop.create_topic("odd")
    shop.database.sql(f"ALTER TABLE {table} MODIFY headers LONGTEXT NULL")
    relay = shop.relay()
    odd = [r'{"\ud800": "a"}', r'{"a": "\ud800"}', r'{"id\u0000": "forged"}', "[" * 5000]
    insert = INSERT.format(table=table)
    for number, headers in enumerate(odd):
        shop.database.sql(insert, (*row(f"odd{number}", kind="odd")[:5], headers))
        shop.ins(f"odd{number}", 2, kind="odd")
    headers = '{"price": 1.50, "deep": {"n":[1e300, 0.10]}}'
    shop.database.sql(insert, (*row("good", kind="odd")[:5], headers))
    shop.wait_sent(1, kind="odd")
    assert relay.terminate() == 0
    shop.database.sql(f"UPDATE {table} SET next_retry_time = NULL WHERE status = 0")
    compensated = shop.compensate()
    assert (compensated["sent"], compensated["failed"]) == (0, 4), compensated
    (message,) = shop.messages("odd")
    assert (message.key, message.headers["price"]) == ("good", b"1.50")
    assert message.headers["deep"] == b'{"n":[1e300, 0.10]}'
    refused = shop.database.sql(f"SELECT last_error FROM {table} WHERE retry_count > 0")
    assert len(refused) == 4
    assert all(reason.startswith("headers") for (reason,) in refused)
