"""What the relay and the compensator publish, and what they do not, on real servers.

Most tests share one running relay per server and keep apart by an aggregate type of their own.
"""

from __future__ import annotations

import json
import math
import random
import struct
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dev.mysql import MySQL
from tests.support.harness import Harness, Message
from tests.support.load import Load, account
from tests.support.murmur2 import java_partition, murmur2
from tests.support.sql import INSERT, Database, row


@pytest.fixture(scope="module", params=["mysql", "mariadb"])
def shared_shop(
    request: pytest.FixtureRequest, kafka: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Harness]:
    url: str = request.getfixturevalue(f"{request.param}_url")
    home = tmp_path_factory.mktemp("shared")
    with Database.create(url) as database, Harness(database, kafka, home) as shop:
        yield shop


@pytest.fixture
def live(shared_shop: Harness) -> Harness:
    """A shop whose relay runs."""
    shared_shop.steady_relay()
    return shared_shop


def ids(messages: list[Message]) -> list[str]:
    return [message.event_id for message in messages]


# --- order ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "hash_"),
    [
        # The cases of Apache Kafka's own UtilsTest.testMurmur2.
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_the_reference_hash_is_kafkas(key: bytes, hash_: int) -> None:
    assert murmur2(key) == hash_


def test_each_aggregate_is_in_order_over_twelve_partitions(live: Harness) -> None:
    live.create_topic("ordered", partitions=12)
    keys = [f"order-{number}" for number in range(80)]
    with Load(live, keys, kind="ordered", threads=4, each=150) as load:
        load.wait()
    live.until(lambda: live.count(0, "ordered") == 0)

    messages = live.messages("ordered")
    found = account(live.database, live.table, "ordered", messages)
    assert found.whole, found
    assert found.duplicates == 0, found
    assert found.committed > 500
    assert {message.partition for message in messages} == set(range(12))


def test_a_key_goes_where_a_java_producer_sends_it(live: Harness) -> None:
    live.create_topic("keys", partitions=12)
    keys = ["a", "ab", "abc", "0", "-1", " ", "Ключ", "größe", "🚀", "a'b`c\\d%s", "x" * 64]
    keys += [str(number) for number in range(200)]
    insert = INSERT.format(table=live.table)
    with live.database.connect() as connection, connection.cursor() as cursor:
        cursor.executemany(insert, [row(key, {}, kind="keys") for key in keys])
        connection.commit()
    live.wait_sent(len(keys), kind="keys")

    placed = {message.key: message.partition for message in live.messages("keys")}
    assert placed == {key: java_partition(key.encode(), 12) for key in keys}


# --- nothing invented ---------------------------------------------------------------------------


def test_rolled_back_work_is_never_published(live: Harness) -> None:
    insert = INSERT.format(table=live.table)

    def values(name: str) -> tuple[object, ...]:
        return row(name, {"name": name}, kind="rollback", event_id=name)

    suffix = uuid.uuid4().hex[:8]
    kept = [f"{name}-{suffix}" for name in ("before", "inner-kept", "after", "one-of-two", "last")]
    before, inner_kept, after, one_of_two, last = kept
    database = live.database
    database.sql(insert, values(before))
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute(insert, values("rolled-back"))
        connection.rollback()
        # A savepoint's work goes, what stands around it stays.
        cursor.execute(insert, values(inner_kept))
        cursor.execute("SAVEPOINT one")
        cursor.execute(insert, values("undone"))
        cursor.execute("SAVEPOINT two")
        cursor.execute(insert, values("undone-too"))
        cursor.execute("ROLLBACK TO SAVEPOINT one")
        cursor.execute(insert, values(after))
        connection.commit()
        # Everything undone, and yet a commit.
        cursor.execute("SAVEPOINT one")
        cursor.execute(insert, values("undone-alone"))
        cursor.execute("ROLLBACK TO SAVEPOINT one")
        connection.commit()
        # A statement that fails in its second row takes its first row with it.
        cursor.execute(insert, values(one_of_two))
        with pytest.raises(Exception, match="Duplicate"):
            cursor.execute(
                insert + ", (%s, %s, %s, %s, %s, %s)", values("half") + values(one_of_two)
            )
        connection.commit()
        cursor.execute("XA START 'x'")
        cursor.execute(insert, values("xa"))
        cursor.execute("XA END 'x'")
        cursor.execute("XA ROLLBACK 'x'")
    abandoned = database.connect()
    with abandoned.cursor() as cursor:
        cursor.execute(insert, values("abandoned"))
    abandoned.close()
    database.sql(insert, values(last))
    live.wait_sent(5, kind="rollback")

    assert ids(live.messages("rollback")) == kept


def test_only_inserts_of_this_very_table_are_published(live: Harness) -> None:
    database = live.database
    name = database.name
    database.create_outbox("other_outbox")
    database.sql(
        "CREATE TABLE `order` (id INT PRIMARY KEY, note LONGTEXT, body BLOB, at TIMESTAMP NULL)"
    )
    url = database.url.render_as_string(hide_password=False)
    with Database.create(url) as neighbour:
        neighbour.create_outbox(live.table)
        mine = INSERT.format(table=f"`{name}`.{live.table}")
        other = INSERT.format(table=f"`{name}`.other_outbox")
        namesake = INSERT.format(table=f"`{neighbour.name}`.{live.table}")
        expected = []
        with database.connect() as connection, connection.cursor() as cursor:
            for number in range(20):
                values = row("a", {"n": number}, kind="mine")
                expected.append(values[0])
                cursor.execute(namesake, row("a", {}, kind="namesake"))
                cursor.execute(
                    "INSERT INTO `order` VALUES (%s, %s, %s, NOW())",
                    (number, "ü" * 5000, b"\0\xff" * 500),
                )
                cursor.execute(mine, values)
                cursor.execute(other, row("a", {}, kind="other"))
                cursor.execute("UPDATE `order` SET note = NULL WHERE id = %s", (number,))
                if number % 3 == 0:
                    connection.commit()
            connection.commit()
        # Changes of published rows, and of the namesakes, are nobody's events.
        live.wait_sent(20, kind="mine")
        database.sql(f"UPDATE {live.table} SET payload = '[]' WHERE aggregate_type = 'mine'")
        database.sql(f"UPDATE {live.table} SET status = 0 WHERE aggregate_type = 'mine'")
        database.sql(f"DELETE FROM {live.table} WHERE aggregate_type = 'mine'")
        neighbour.sql(f"UPDATE {live.table} SET retry_count = 1")
        neighbour.sql(f"TRUNCATE {live.table}")
        database.sql("DROP TABLE `order`, other_outbox")
    last = live.ins("a", {}, kind="mine")
    live.wait_sent(1, kind="mine")

    assert ids(live.messages("mine")) == [*expected, last]
    assert not live.topics() & {"other", "namesake"}


# --- ways to write ------------------------------------------------------------------------------


def test_rows_of_one_statement_keep_their_order(live: Harness) -> None:
    insert = INSERT.format(table=live.table)
    database = live.database
    expected = []
    values: tuple[object, ...] = ()
    for number in range(300):
        one = row("many", {"n": number}, kind="statements")
        expected.append(str(one[0]))
        values += one
    database.sql(insert + ", (%s, %s, %s, %s, %s, %s)" * 299, values)

    database.sql("CREATE TABLE basket (id INT PRIMARY KEY, item VARCHAR(20))")
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO basket VALUES (%s, %s)", [(n, f"item {n}") for n in range(500)]
        )
        cursor.execute(
            f"INSERT INTO {live.table}"
            " (event_id, aggregate_type, aggregate_id, event_type, payload)"
            " SELECT CONCAT('basket-', id), 'statements', 'many', 'SELECTED',"
            " JSON_OBJECT('id', id, 'item', item) FROM basket ORDER BY id"
        )
        connection.commit()
    expected += [f"basket-{number}" for number in range(500)]
    live.wait_sent(800, kind="statements")

    messages = live.messages("statements")
    assert ids(messages) == expected
    assert messages[-1].json == {"id": 499, "item": "item 499"}


@pytest.mark.parametrize("name", ["bare_mysql", "own_mariadb"])
def test_load_data_is_published_in_order(
    name: str,
    request: pytest.FixtureRequest,
    harness: Callable[[Database], Harness],
    tmp_path: Path,
) -> None:
    server: MySQL = request.getfixturevalue(name)
    file = tmp_path / "events.tsv"
    file.write_text(
        "".join(
            f"e-{n}\torder\tloaded\tLOADED\t{json.dumps({'n': n, 'text': 'ü🚀'})}\n"
            for n in range(500)
        ).replace("\\", "\\\\")
    )
    with Database.create(server.url()) as database:
        shop = harness(database)
        relay = shop.relay()
        with database.connect(local_infile=True) as connection, connection.cursor() as cursor:
            cursor.execute(
                f"LOAD DATA LOCAL INFILE '{file}' INTO TABLE {shop.table} CHARACTER SET utf8mb4"
                " (event_id, aggregate_type, aggregate_id, event_type, payload)"
            )
            connection.commit()
        shop.wait_sent(500)
        assert ids(shop.messages()) == [f"e-{n}" for n in range(500)]
        assert relay.terminate() == 0


# --- the record ---------------------------------------------------------------------------------


def test_the_record_is_the_one_of_the_contract(live: Harness) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    extra = {
        "traceparent": trace,
        "tracestate": "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
        "baggage": "tenant=42,user=J%C3%BCrgen",
        "tenant": "Süd 🚀",
        "retries": 3,
        "test": True,
        "none": None,
        "nested": {"a": [1, "b"]},
    }
    plain, full = str(uuid.uuid4()), "not-a-uuid: ü"
    database = live.database
    with database.connect(autocommit=True) as connection, connection.cursor() as cursor:
        # The session's time zone is nobody's business.
        cursor.execute("SET time_zone = '+09:00'")
        insert = INSERT.format(table=live.table)
        cursor.execute(insert, row("k1", {"a": 1}, kind="record", event_id=plain))
        cursor.execute(
            f"INSERT INTO {live.table} (event_id, aggregate_type, aggregate_id, event_type,"
            " payload, headers, created_at)"
            " VALUES (%s, 'record', 'k2', 'Größe', '[1]', %s, '2024-02-29 23:59:59.123456')",
            (full, json.dumps(extra)),
        )
    live.wait_sent(2, kind="record")

    first, second = sorted(live.messages("record"), key=lambda message: message.key)
    [(created_at,)] = database.sql(
        f"SELECT created_at FROM {live.table} WHERE event_id = %s", (plain,)
    )
    assert abs(created_at.replace(tzinfo=UTC) - datetime.now(UTC)).total_seconds() < 120
    assert first.value == database.sql("SELECT JSON_OBJECT('a', 1)")[0][0].encode()
    assert first.headers == {
        "id": plain.encode(),
        "event_type": b"CREATED",
        "aggregate_type": b"record",
        "aggregate_id": b"k1",
        "occurred_at": created_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ").encode(),
        "content-type": b"application/json",
    }
    assert first.timestamp_ms == int(created_at.replace(tzinfo=UTC).timestamp() * 1000)
    assert second.headers == {
        "id": full.encode(),
        "event_type": "Größe".encode(),
        "aggregate_type": b"record",
        "aggregate_id": b"k2",
        "occurred_at": b"2024-02-29T23:59:59.123456Z",
        "content-type": b"application/json",
        "traceparent": trace.encode(),
        "tracestate": b"rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
        "baggage": b"tenant=42,user=J%C3%BCrgen",
        "tenant": "Süd 🚀".encode(),
        "retries": b"3",
        "test": b"true",
        "none": None,
        "nested": b'{"a": [1, "b"]}',
    }
    assert second.timestamp_ms == 1709251199123


_NUMBERS = """
    0 1 -1 18446744073709551615 18446744073709551616 100000000000000000000 -10000000000000000000000
    1e20 1e-7 0.1 1.0 -0.0 0.0 1e15 1e16 1e17 123456789012345.6 1e21 1e22 1e23 1e308 -1e308 5e-324
    2.2250738585072014e-308 1.7976931348623157e308 0.0001 0.00001 0.000001 1.5e300 100.0 1234567.0
    3.141592653589793 0.30000000000000004 9007199254740993.0 1E5 1e+2 -1.5E-9 4.35 2.675 1e14
    999999999999999.9 0.1e1 12345678.9e-20
"""


def _numbers() -> list[str]:
    """Integers about every width's ends, floats about every change of notation, and any."""
    texts = _NUMBERS.split()
    for bit in (7, 8, 15, 16, 23, 24, 31, 32, 53, 63):
        ends = [sign * (1 << bit) + step for sign in (1, -1) for step in (-1, 0, 1)]
        texts += [str(number) for number in ends]
    chance = random.Random(7)
    for _ in range(150):
        [number] = struct.unpack("<d", chance.randbytes(8))
        if math.isfinite(number):
            texts.append(repr(number))
        texts.append(repr(round(chance.uniform(-1e6, 1e6), chance.randrange(8))))
    return texts


def _documents() -> list[str]:
    """JSON texts that both servers take."""
    numbers = _numbers()
    words = ["", " ", "a", "ß", "日本語", "🚀👩‍👩‍👧", "e\u0301", "\u2028\u2029\x7f\xa0"]
    escapes = "".join(chr(code) for code in range(32)) + "\"\\/'`\b\f"
    lengths = [127, 128, 255, 256, 16383, 16384, 65535, 65536, 70000]
    objects: list[object] = [
        {},
        [],
        [[]],
        {"": ""},
        [{}, [], "", None, True, False],
        {"b": 1, "a": 2, "aa": 3, "B": 4, "ä": 5, "10": 6, "9": 7},
        {word: [word, {word: word}] for word in words},
        {escapes: escapes},
        {"text": ["x" * length for length in lengths[:5]]},
        [None] * 3000,
        {f"key {number}": {"n": number, "list": list(range(number % 7))} for number in range(3000)},
        list(range(-20000, 20000)),
        ["é" * length for length in lengths[:6]],
        # MariaDB takes 32 levels, MySQL 100.
        {"nested": json.loads("[" * 30 + "1" + "]" * 30)},
        {"deep": json.loads('{"a": ' * 30 + "null" + "}" * 30)},
    ]
    scalars = ["null", "true", "false", '""', '"text"', '"🚀"', "0", "-1", "70000", "-70000"]
    scalars += [str((1 << 64) - 1), str(-(1 << 63)), "1e20", "1e-7", "0.1", "1.0", "1.5e300"]
    scalars.append(json.dumps("ü" * 70000))
    return [
        *scalars,
        *(json.dumps(document, ensure_ascii=n % 2 == 0) for n, document in enumerate(objects)),
        f"[{', '.join(numbers)}]",
        "{" + ", ".join(f'"{index}":{number}' for index, number in enumerate(numbers)) + "}",
    ]


# Documents that MySQL builds from typed values; MariaDB's JSON is text whoever wrote it.
_EXPRESSIONS = {
    "mysql": """
        JSON_OBJECT('d', CAST('2024-02-29' AS DATE), 'min', CAST('1000-01-01' AS DATE))
        JSON_OBJECT('max', CAST('9999-12-31 23:59:59.999999' AS DATETIME(6)))
        JSON_OBJECT('dt', CAST('2024-02-29 23:59:59.123456' AS DATETIME(6)))
        JSON_OBJECT('dt0', CAST('2024-02-29' AS DATETIME), 'ts', TIMESTAMP '2024-01-01 1:2:3')
        JSON_OBJECT('t', CAST('-12:34:56.789' AS TIME(3)), 'tmax', CAST('838:59:59' AS TIME))
        JSON_OBJECT('t0', CAST('00:00:00' AS TIME), 't6', CAST('-00:00:00.000001' AS TIME(6)))
        JSON_OBJECT('year', CAST(2024 AS YEAR), 'bool', TRUE, 'null', NULL)
        JSON_ARRAY(CAST('1.10' AS DECIMAL(10,2)), CAST('-0.01' AS DECIMAL(10,2)), 1.0, 0.0, 100.00)
        JSON_ARRAY(CAST('12345678901234567890.1234567891' AS DECIMAL(40,10)), 99999999999999999999)
        JSON_ARRAY(CAST(REPEAT('9', 65) AS DECIMAL(65,0)), -0.000000000000000000000000000001)
        JSON_ARRAY(CAST('-1234567890.5' AS DECIMAL(30,15)), CAST(0 AS DECIMAL(65,30)))
        JSON_ARRAY(1e0, 0.1e0, 1e20, 1e-7, CAST(0.1 AS FLOAT), PI(), 18446744073709551615, ~0)
        JSON_ARRAY(CAST('ab' AS BINARY), x'00ff80', b'101', _binary 'ü')
        JSON_ARRAY(CAST(REPEAT('xyz', 1000) AS BINARY))
        JSON_OBJECT('geo', ST_GeomFromText('POINT(1 2.5)'))
        JSON_OBJECT('latin', CONVERT('Grüße' USING latin1))
        JSON_SET('{"a": [1, 2.50], "b": 0}', '$.a[1]', CAST('9.9' AS DECIMAL(5,2)), '$.b', NOW(6))
        CAST(CONCAT(REPEAT('[', 99), REPEAT(']', 99)) AS JSON)
        CAST(CAST('2024-02-29' AS DATE) AS JSON)
        CAST(CAST('23:59:59.5' AS TIME(1)) AS JSON)
        CAST(CAST('2024-02-29 12:00:00.5' AS DATETIME(1)) AS JSON)
        CAST(1.10 AS JSON)
        CAST(x'00ff' AS JSON)
        JSON_ARRAY(REPEAT('ü', 70000), CAST('1.50' AS DECIMAL(5,2)), CURRENT_DATE)
        JSON_MERGE_PRESERVE('[1, 2.5]', JSON_OBJECT('d', UTC_DATE, 't', UTC_TIME(6)))
        NULL
    """,
    "mariadb": """
        JSON_OBJECT('d', CAST('2024-02-29' AS DATE), 'n', 1.10, 'e', 1e20, 'b', TRUE, 'null', NULL)
        JSON_ARRAY(CAST('-12:34:56.789' AS TIME(3)), 'ü🚀', 18446744073709551615)
        JSON_SET('{"a" : 1,   "b":[ ]}', '$.a', 2)
        JSON_COMPACT('{"a" : 1,   "b":[ ]}')
        NULL
    """,
}


def test_the_value_is_what_select_returns_from_stream_and_compensator_alike(live: Harness) -> None:
    live.create_topic("json")
    database = live.database
    insert = (
        f"INSERT INTO {live.table} (event_id, aggregate_type, aggregate_id, event_type, payload,"
        " headers) VALUES (UUID(), 'json', %s, 'VALUED', {}, %s)"
    )
    headers = json.dumps({"traceparent": "00-1", "list": [1.50, "ü", None], "n": -0.0})
    key = 0
    for document in _documents():
        key += 1
        database.sql(insert.format("%s"), (key, document, headers if key % 2 else None))
    flavor = "mariadb" if database.is_mariadb else "mysql"
    for expression in filter(None, map(str.strip, _EXPRESSIONS[flavor].splitlines())):
        key += 1
        database.sql(insert.format(expression), (key, headers))
    live.wait_sent(key, kind="json")

    select = f"SELECT aggregate_id, payload FROM {live.table} WHERE aggregate_type = 'json'"
    expected = {
        int(number): None if payload is None else payload.encode()
        for number, payload in database.sql(select)
    }
    streamed = live.messages("json")
    assert [int(message.key) for message in streamed] == list(range(1, key + 1))
    for message in streamed:
        assert message.value == expected[int(message.key)], message.key
    nulls = [message.value for message in streamed if message.value in (None, b"null")]
    assert nulls == [b"null", None]

    # The very same rows once more, by the other way.
    database.sql(f"UPDATE {live.table} SET status = 0 WHERE aggregate_type = 'json'")
    summary = live.compensate()
    assert (summary["sent"], summary["marked"]) == (key, key), summary
    compensated = live.messages("json")[key:]
    assert [message._replace(offset=0) for message in compensated] == [
        message._replace(offset=0) for message in streamed
    ]


# An outbox as it stood before us: none of the optional columns, a payload that is not JSON.
_EXISTING = """
    CREATE TABLE outbox_event (
      id INT AUTO_INCREMENT PRIMARY KEY,
      tenant SET('a', 'b', 'c') NULL,
      event_id VARCHAR(64) CHARACTER SET ascii NOT NULL UNIQUE,
      amount DECIMAL(12, 3) NULL,
      aggregate_type VARCHAR(32) CHARACTER SET latin1 NOT NULL,
      aggregate_id CHAR(40) CHARACTER SET utf8mb4 NOT NULL,
      flag BIT(5) NULL,
      event_type VARCHAR(128) CHARACTER SET utf16 NOT NULL,
      payload {type},
      status TINYINT UNSIGNED NOT NULL DEFAULT 0,
      retry_count INT NOT NULL DEFAULT 0,
      next_retry_time DATETIME(6) NOT NULL DEFAULT '2000-01-01',
      created_at TIMESTAMP(3) NOT NULL DEFAULT CURRENT_TIMESTAMP(3),
      updated_at DATETIME NOT NULL DEFAULT CURRENT_TIMESTAMP
    )
"""


@pytest.mark.parametrize(
    ("type_", "content_type"),
    [
        ("LONGTEXT CHARACTER SET latin1 NULL", b"text/plain; charset=utf-8"),
        ("VARBINARY(3000) NULL", b"application/octet-stream"),
    ],
    ids=["text", "binary"],
)
def test_an_existing_table_needs_none_of_the_optional_columns(
    type_: str, content_type: bytes, database: Database, kafka: str, tmp_path: Path
) -> None:
    database.sql(_EXISTING.format(type=type_))
    binary = "BINARY" in type_
    values = [b"\0\xff\x80 '\"\\" if binary else 'Größe: 5 €, "\\"', b"" if binary else "", None]
    insert = (
        "INSERT INTO outbox_event (tenant, event_id, amount, aggregate_type, aggregate_id, flag,"
        " event_type, payload) VALUES ('a,c', %s, 12.5, 'Käse', %s, b'10101', 'Größe €', %s)"
    )
    with Harness(database, kafka, tmp_path, {"TOPIC": "{aggregate_type}"}, create=False) as shop:
        topic = shop.topic_prefix + "old"
        relay = shop.relay(TOPIC=topic)
        for number, value in enumerate(values):
            database.sql(insert, (f"e{number}", f"key-ü-{number}", value))
        shop.wait_sent(3)
        assert relay.terminate() == 0
        database.sql("UPDATE outbox_event SET status = 0")
        assert shop.compensate(TOPIC=topic)["sent"] == 3

        messages = sorted(shop.messages("old"), key=lambda message: message.offset)
        expected = [value.encode() if isinstance(value, str) else value for value in values]
        assert [message.value for message in messages] == expected * 2
        assert [message.key for message in messages] == [f"key-ü-{n}" for n in range(3)] * 2
        assert {message.headers["content-type"] for message in messages} == {content_type}
        assert {message.headers["aggregate_type"] for message in messages} == {"Käse".encode()}
        assert {message.headers["event_type"] for message in messages} == {"Größe €".encode()}
        assert [m.timestamp_ms for m in messages[:3]] == [m.timestamp_ms for m in messages[3:]]
        assert all("id" in message.headers for message in messages)


# --- logging in ---------------------------------------------------------------------------------

_NEEDED = ("REPLICATION SLAVE, REPLICATION CLIENT ON *.*", "SELECT, UPDATE ON {schema}.*")


def _whole_path(
    database: Database, user: Database, harness: Callable[..., Harness], **environment: str
) -> None:
    """Stream, mark and compensate as ``user``."""
    shop: Harness = harness(database)
    settings = {"DATABASE_URL": user.text, **environment}
    relay = shop.relay(**settings)
    shop.ins("a", {"by": "stream"})
    shop.wait_sent(1)
    assert relay.terminate() == 0
    shop.database.sql(f"UPDATE {shop.table} SET status = 0")
    assert shop.compensate(**settings)["sent"] == 1
    assert len(shop.messages()) == 2
    assert "s3cret" not in relay.text()


@pytest.mark.parametrize("query", ["", "ssl_disabled=true", "ssl_mode=DISABLED"])
def test_mysqls_default_authentication_at_the_first_login(
    query: str, mysql: Database, harness: Callable[..., Harness]
) -> None:
    with mysql.user(*_NEEDED) as user:
        [(plugin,)] = mysql.sql(
            "SELECT plugin FROM mysql.user WHERE user = %s", (user.url.username,)
        )
        assert plugin == "caching_sha2_password"
        user.url = user.url.update_query_string(query)
        _whole_path(mysql, user, harness)


def test_mariadbs_default_authentication(
    mariadb: Database, harness: Callable[..., Harness]
) -> None:
    with mariadb.user(*_NEEDED) as user:
        [(plugin,)] = mariadb.sql(
            "SELECT plugin FROM mysql.user WHERE user = %s", (user.url.username,)
        )
        assert plugin == "mysql_native_password"
        _whole_path(mariadb, user, harness)


def test_a_user_who_must_use_tls_with_the_servers_ca(
    bare_mysql: MySQL, harness: Callable[..., Harness]
) -> None:
    ca = str(bare_mysql.home / "data" / "ca.pem")
    with (
        Database.create(bare_mysql.url()) as database,
        database.user(*_NEEDED, require="SSL") as user,
    ):
        # The certificate that MySQL makes for itself names no host.
        user.url = user.url.update_query_string("ssl_check_hostname=false")
        _whole_path(database, user, harness, DATABASE_TLS_CA=ca)
