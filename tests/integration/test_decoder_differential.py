"""The decoder beside the server: what it makes of the log must be what SELECT returns, byte for
byte, for random documents, texts in every character set, numbers, times and binary values.

``CDC_RELAY_TEST_ROWS`` sets the rows per server (20,000 and more for a long run); the values are
the same in every run of one size.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pymysql.constants import FIELD_TYPE

from cdc_relay.binlog.charsets import codec_of
from cdc_relay.binlog.jsonb import json_text
from cdc_relay.binlog.layout import (
    JSON,
    MappedColumn,
    SchemaColumn,
    assign,
    parse_table_map,
    reader_for,
    row_images,
)
from cdc_relay.binlog.rows import UnreadRow
from cdc_relay.outbox import OutboxEvent
from dev.database import Database as DatabaseServer
from tests.support.source import SourceUnderTest, raw_events
from tests.support.sql import Database

ROWS = int(os.environ.get("CDC_RELAY_TEST_ROWS", "1500"))

_TABLE_MAP = 19
_WRITE_ROWS = (23, 30)


@pytest.fixture(scope="module", params=["own_mysql", "own_mariadb"])
def database(request: pytest.FixtureRequest) -> Iterator[Database]:
    """A schema on a server whose settings may be changed."""
    server: DatabaseServer = request.getfixturevalue(request.param)
    with Database.create(server.url()) as made:
        yield made


def examples(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """Values of the strategy, ``count`` where it has so many; the same in every run."""
    found: list[Any] = []

    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=count,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: object) -> None:
        found.append(value)

    collect()
    return found[:count]


@dataclass
class Found:
    """What a comparison has seen."""

    equal: int = 0
    read_back: dict[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.equal + sum(self.read_back.values())


def compare(source: SourceUnderTest, found: Found, headers: str = "headers") -> None:
    """Read what was written since the last reading; every event is what SELECT returns. Rows that
    have to be read back are counted by their reason."""
    reading = source.read(timeout=280)
    stored: dict[int, OutboxEvent] = {}
    with source.database.connect(autocommit=True) as connection, connection.cursor() as cursor:
        cursor.execute("SET time_zone = '+00:00'")
        cursor.execute(
            "SELECT id, event_id, aggregate_type, aggregate_id, event_type, payload,"
            f" {headers}, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', created_at)"
            f" FROM {source.table} ORDER BY id"
        )
        for row in cursor.fetchall():
            texts = [value.encode() if isinstance(value, str) else value for value in row[5:7]]
            stored[row[0]] = OutboxEvent(*row[:5], *texts, row[7])
    assert [row.id for row in reading.rows] == list(stored)
    for row in reading.rows:
        if isinstance(row, UnreadRow):
            found.read_back[row.reason] = found.read_back.get(row.reason, 0) + 1
        else:
            expected = stored[row.id]
            for name, ours, theirs in zip(row._fields, row, expected, strict=True):
                assert ours == theirs, (
                    f"{name} of row {row.id}: {str(ours)[:300]} {str(theirs)[:300]}"
                )
            found.equal += 1


@contextmanager
def outbox(database: Database, create: str | None = None) -> Iterator[SourceUnderTest]:
    """A new outbox table, its source at the end of the log; dropped at the end."""
    database.sql("DROP TABLE IF EXISTS outbox_event")
    if create is None:
        database.create_outbox()
    else:
        database.sql(create)
    with SourceUnderTest.on(database) as source:
        yield source


def insert(
    database: Database, columns: str, values: Sequence[Sequence[object]], mark: str = "%s"
) -> None:
    """Insert rows in statements of moderate size, in a session that takes everything."""
    with database.connect(autocommit=True) as connection, connection.cursor() as cursor:
        cursor.execute("SET sql_mode = '', time_zone = '+00:00'")
        if not database.is_mariadb:
            # Half of it in compressed transactions.
            cursor.execute("SET binlog_transaction_compression = ON")
        for number, part in enumerate(batched(values, 50)):
            if number * 2 >= len(values) // 50 and not database.is_mariadb:
                cursor.execute("SET binlog_transaction_compression = OFF")
            one = "(" + ", ".join([mark] * len(part[0])) + ")"
            cursor.execute(
                f"INSERT INTO outbox_event ({columns}) VALUES " + ", ".join([one] * len(part)),
                [value for row in part for value in row],
            )


def batched(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


# --- documents ------------------------------------------------------------------------------------

_EDGES = [
    sign * (1 << bit) + step
    for bit in (7, 8, 15, 16, 31, 32, 63, 64)
    for sign in (1, -1)
    for step in (-1, 0, 1)
]
_NUMBERS = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.integers(-70000, 70000),
    st.sampled_from(_EDGES),
    st.floats(allow_nan=False, allow_infinity=False),
    st.builds(
        lambda digits, power: float(f"{digits}e{power}"),
        st.integers(-99999, 99999),
        st.integers(-30, 30),
    ),
)
_TEXTS = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(max_codepoint=0x7F), max_size=20),
    st.text("\0\1\b\t\n\f\r\x1b\x1f\x7f\"\\/'ü€😥\u2028\ufeff\ufffd", max_size=10),
)
_DOCUMENTS = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=6), st.dictionaries(_TEXTS, inner, max_size=6)
    ),
    max_leaves=12,
)


def large_documents() -> list[object]:
    """The shapes that random documents do not reach."""
    sizes = [126, 127, 128, 255, 256, 16382, 16383, 16384, 65534, 65535, 65536, 70000]
    return [
        *["x" * size for size in sizes],
        ["ü" * size for size in sizes],
        {f"key {number}": number for number in range(3000)},
        {f"{number}": {"n": number, "l": list(range(number % 9))} for number in range(4000)},
        {"k" * length: length for length in range(0, 700)},
        list(range(-20000, 20000)),
        [2**31 - 1, -(2**31), 2**32 - 1, 65535, 65536, 1.5, None, True, "x"] * 3000,
        {"small": {}, "large": {"a": "x" * 66000, "b": {"c": ["y" * 66000, 1]}}},
        [[]] * 9000,
        json.loads("[" * 30 + "1" + "]" * 30),
        {"a" * 65535: 1},
    ]


# What only the server can make: values of SQL types inside a document.
_MADE = [
    "JSON_ARRAY(CAST('{d}' AS DECIMAL(65, {s})), CAST({d} AS DOUBLE), CAST({u} AS DECIMAL(40, 9)))",
    "JSON_OBJECT('d', CAST('{date}' AS DATE), 't', CAST('{time}' AS TIME({f})))",
    "JSON_ARRAY(CAST('{date} {hour}' AS DATETIME({f})), TIMESTAMP('{date} {hour}'))",
    "JSON_OBJECT('u', CAST({u} AS UNSIGNED), 's', CAST(-{h} AS SIGNED), 'y', CAST({y} AS YEAR))",
    "JSON_ARRAY(x'{x}', b'{b}', CAST('{x}' AS BINARY(24)), CAST({d} AS FLOAT), {d}, {u}, -{h})",
    "JSON_SET(JSON_OBJECT('a', JSON_ARRAY(1, 2)), '$.a[1]', CAST('{d}' AS DECIMAL(50, {s})))",
    "CAST(CAST('{d}' AS DECIMAL(65, {s})) AS JSON)",
    "CAST(CAST('{time}' AS TIME({f})) AS JSON)",
    "CAST(x'{x}{x}{x}{x}{x}{x}{x}{x}{x}{x}' AS JSON)",
    "JSON_MERGE_PRESERVE(JSON_ARRAY(CAST('{date}' AS DATE)), JSON_OBJECT('k', x'{x}'), 'null')",
    "JSON_ARRAY(REPEAT('ü', 40000), CAST('{d}' AS DECIMAL(50, {s})), x'{x}', DATE('{date}'))",
    "JSON_OBJECT('p', ST_GeomFromText('POINT({h} 2.5)'), 'g', JSON_ARRAY(PI() * {d}, {d} / 3))",
]


def made_documents(count: int) -> list[str]:
    chance = random.Random(11)
    found = []
    for number in range(count):
        scale = chance.choice([0, 1, 2, 9, 10, 15, 30])
        digits = chance.randrange(1, 30)
        found.append(
            _MADE[number % len(_MADE)].format(
                d=f"{chance.choice(['', '-'])}{chance.randrange(10**digits)}"
                f".{chance.randrange(10**30):030d}"[: digits + scale + 2],
                s=scale,
                f=chance.randrange(7),
                date=f"{chance.randrange(1000, 10000)}-{chance.randrange(1, 13):02d}"
                f"-{chance.randrange(1, 29):02d}",
                time=f"{chance.choice(['', '-'])}{chance.randrange(839)}"
                f":{chance.randrange(60):02d}:{chance.randrange(60):02d}"
                f".{chance.randrange(10**6):06d}",
                hour=f"{chance.randrange(24):02d}:{chance.randrange(60):02d}"
                f":{chance.randrange(60):02d}.{chance.randrange(10**6):06d}",
                u=chance.randrange(2 ** chance.choice([7, 16, 32, 63, 64])),
                h=chance.randrange(2 ** chance.choice([7, 16, 32, 63])),
                y=chance.choice([0, 1901, 1970, 2024, 2155]),
                x=chance.randbytes(chance.randrange(1, 12)).hex(),
                b=f"{chance.randrange(1, 2**40):b}",
            )
        )
    return found


def test_documents(database: Database) -> None:
    count = ROWS * 2 // 5
    columns = "event_id, aggregate_type, aggregate_id, event_type, payload, headers"
    documents = examples(_DOCUMENTS, count)
    documents += [*large_documents()]
    found = Found()
    with outbox(database) as source:
        rows = []
        for number, document in enumerate(documents):
            payload = json.dumps(document, ensure_ascii=number % 3 == 0)
            headers = json.dumps({"n": documents[number // 2]}) if number < count else None
            key = f"k{number % 50}"
            rows.append((f"e{number}", "order", key, "MADE", payload, headers))
        insert(database, columns, rows)
        compare(source, found)
        assert not found.read_back, found
        if database.is_mariadb:
            return
    made = made_documents(count)
    with outbox(database) as source:
        # Documents with holes in them, too: what partial updates leave.
        database.sql("CREATE TABLE scratch (id INT AUTO_INCREMENT PRIMARY KEY, j JSON)")
        with database.connect(autocommit=True) as connection, connection.cursor() as cursor:
            # What does not fit its type is cut.
            cursor.execute("SET sql_mode = ''")
            for part in batched(made, 40):
                values = ", ".join(f"({item})" for item in part)
                cursor.execute(f"INSERT INTO scratch (j) VALUES {values}")
        database.sql(
            "INSERT INTO scratch (j) SELECT JSON_OBJECT('a', REPEAT('x', id), 'b', j, 'c', 1.5)"
            " FROM scratch"
        )
        for change in (
            "JSON_REPLACE(j, '$.a', 'short', '$.c', CAST('1.50' AS DECIMAL(5, 2)))",
            "JSON_REMOVE(j, '$.c')",
            "JSON_SET(j, '$.b', 7, '$.z', JSON_ARRAY())",
            "JSON_REPLACE(j, '$[0]', NULL)",
        ):
            database.sql(f"UPDATE scratch SET j = {change} WHERE MOD(id, 3) = 0")
        source.skip()
        database.sql(
            f"INSERT INTO outbox_event ({columns}) SELECT UUID(), 'order', id, 'MADE', j, j"
            " FROM scratch ORDER BY id"
        )
        database.sql("DROP TABLE scratch")
        compare(source, found)
        assert not found.read_back, found
    assert found.equal >= 3 * count


@pytest.mark.parametrize("database", ["own_mysql"], indirect=True)  # MariaDB's JSON is text
def test_the_deepest_document(database: Database) -> None:
    with outbox(database) as source:
        deep = "[" * 99 + "1" + "]" * 99
        mixed = '{"a": [' * 49 + "null" + "]}" * 49
        insert(
            database,
            "event_id, aggregate_type, aggregate_id, event_type, payload",
            [(f"e{n}", "order", "k", "MADE", text) for n, text in enumerate((deep, mixed))],
        )
        found = Found()
        compare(source, found)
        assert found.equal == 2


# --- character sets -------------------------------------------------------------------------------

_CHARSET_TABLE = """
    CREATE TABLE outbox_event (
      id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY,
      first CHAR(20) CHARACTER SET {charset} NULL,
      event_id VARCHAR(64) CHARACTER SET ascii NOT NULL UNIQUE,
      aggregate_type CHAR(30) CHARACTER SET {charset} NOT NULL,
      note VARCHAR(200) CHARACTER SET {charset} NULL,
      aggregate_id VARCHAR(64) CHARACTER SET {charset} NOT NULL,
      event_type VARCHAR(128) CHARACTER SET {charset} NOT NULL,
      payload LONGTEXT CHARACTER SET {charset} NULL,
      headers TEXT CHARACTER SET {charset} NULL,
      status TINYINT NOT NULL DEFAULT 0,
      retry_count INT NOT NULL DEFAULT 0,
      next_retry_time DATETIME(6) NULL,
      created_at DATETIME(6) NULL,
      updated_at DATETIME(6) NULL
    )
"""
_RANGES = [
    (0x20, 0x7E), (0x00, 0x1F), (0x7F, 0xFF), (0x100, 0x17F), (0x370, 0x3FF), (0x400, 0x4FF),
    (0x590, 0x5FF), (0x600, 0x6FF), (0xE00, 0xE7F), (0x10A0, 0x10FF), (0x2000, 0x206F),
    (0x20A0, 0x21FF), (0x2500, 0x25FF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3),
    (0xE000, 0xF8FF), (0xFF00, 0xFFEF), (0x1F300, 0x1F6FF), (0x20000, 0x2A6DF),
]  # fmt: skip


def words(chance: random.Random, longest: int) -> str:
    """A text of characters of a few scripts, some of which the charset will not have."""
    ranges = [(0x20, 0x7E), *chance.sample(_RANGES, 2)]
    length = chance.randrange(longest)
    return "".join(chr(chance.randint(*chance.choice(ranges))) for _ in range(length))


def test_character_sets(database: Database) -> None:
    """Every character set that the server lists: texts of many scripts, and each single byte."""
    charsets = {
        name: int(width)
        for name, width in database.sql(
            "SELECT character_set_name, maxlen FROM information_schema.character_sets"
            " WHERE character_set_name <> 'binary' ORDER BY character_set_name"
        )
    }
    assert len(charsets) > 35
    columns = (
        "first, event_id, aggregate_type, note, aggregate_id, event_type, payload, headers,"
        " created_at"
    )
    each = max(4, ROWS // 4 // len(charsets))
    found: dict[str, Found] = {}
    for charset, width in charsets.items():
        chance = random.Random(charset)
        found[charset] = Found()
        with outbox(database, _CHARSET_TABLE.format(charset=charset)) as source:
            rows: list[tuple[object, ...]] = [
                (
                    words(chance, 20),
                    f"e{number}",
                    words(chance, 30),
                    None if number % 5 == 0 else words(chance, 100),
                    words(chance, 64),
                    words(chance, 100),
                    words(chance, 2000),
                    None if number % 3 == 0 else words(chance, 30),
                    "2024-01-01 00:00:00.5",
                )
                for number in range(each)
            ]
            insert(database, columns, rows)
            if width == 1:
                # In a long run each byte by itself, else sixteen together.
                size = 1 if ROWS >= 20_000 else 16
                parts = [bytes(range(start, start + size)) for start in range(0, 256, size)]
                values = ", ".join(
                    f"('{name}{number}', 'bytes', {key}, 'MADE', _{charset} X'{part.hex()}',"
                    " '2024-01-01')"
                    for number, part in enumerate(parts)
                    for name, key in (("b", f"_{charset} X'{part.hex()}'"), ("p", "'k'"))
                )
                with database.connect(autocommit=True) as connection:
                    cursor = connection.cursor()
                    cursor.execute("SET sql_mode = ''")
                    cursor.execute(
                        "INSERT IGNORE INTO outbox_event (event_id, aggregate_type, aggregate_id,"
                        f" event_type, payload, created_at) VALUES {values}"
                    )
            compare(source, found[charset])
    print({charset: (one.equal, one.read_back) for charset, one in found.items()})
    for charset in ("utf8mb4", "utf8mb3", "utf16", "utf32", "ucs2", "utf16le"):
        if charset in found:
            assert not found[charset].read_back, (charset, found[charset])
    for charset in ("latin1", "latin2", "cp1251", "koi8r", "greek"):
        assert found[charset].equal >= each, (charset, found[charset])


# --- every other type -----------------------------------------------------------------------------

_FINITE = 0x7F7FFFFF


def integers(bits: int, unsigned: bool) -> Callable[[random.Random], object]:
    low, high = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return lambda chance: chance.choice(
        [low, low + 1, -1 if low else 1, 0, high - 1, high, chance.randint(low, high)]
    )


def decimals(precision: int, scale: int) -> Callable[[random.Random], object]:
    def make(chance: random.Random) -> object:
        digits = chance.choice([precision, chance.randrange(1, precision + 1)])
        number = str(chance.randrange(10**digits)).rjust(scale + 1, "0")
        text = number[:-scale] + "." + number[-scale:] if scale else number
        return chance.choice(["", "-"]) + text

    return make


def floats(chance: random.Random) -> object:
    [value] = struct.unpack("<f", struct.pack("<I", chance.randrange(_FINITE)))
    return repr(chance.choice([value, -value, round(value, 3), chance.randrange(10**8) / 1000]))


def doubles(chance: random.Random) -> object:
    digits = chance.randrange(10 ** chance.randrange(1, 18))
    exponent = chance.choice([chance.randrange(-330, 290), chance.randrange(-40, 10)])
    value = chance.choice([1, -1]) * float(f"{digits}e{exponent}")
    # All digits, the point before, among and behind them: the longest there are.
    long = float(f"{chance.randrange(10**16, 10**17)}e{chance.randrange(-20, 22) - 17}")
    small = round(chance.uniform(-1e6, 1e6), chance.randrange(8))
    return repr(chance.choice([value, value, long, -long, small, 0.0]))


def dates(chance: random.Random) -> str:
    return chance.choice(
        [
            "0000-00-00", "2024-00-00", "2024-02-00", "0000-01-01", "1000-01-01", "9999-12-31",
            f"{chance.randrange(1, 10000):04d}-{chance.randrange(1, 13):02d}"
            f"-{chance.randrange(1, 29):02d}",
        ]
    )  # fmt: skip


def clocks(chance: random.Random) -> str:
    return (
        f"{chance.randrange(24):02d}:{chance.randrange(60):02d}:{chance.randrange(60):02d}"
        f".{chance.choice([0, 999_999, 1, 500_000, chance.randrange(10**6)]):06d}"
    )


def times(chance: random.Random) -> object:
    return chance.choice(["", "-"]) + chance.choice(
        ["838:59:59", "00:00:00", "00:00:00.000001", f"{chance.randrange(838)}{clocks(chance)[2:]}"]
    )


def moments(chance: random.Random) -> str:
    return f"{dates(chance)} {clocks(chance)}"


def moments_of_a_calendar(chance: random.Random) -> object:
    """The server's arithmetic with days of the year 0000 is nobody's; such a row is parked."""
    found = moments(chance)
    return instants(chance) if found.startswith("0000-01") else found


def instants(chance: random.Random) -> object:
    year = chance.randrange(1971, 2038)
    text = f"{year}-{chance.randrange(1, 13):02d}-{chance.randrange(1, 29):02d} {clocks(chance)}"
    return chance.choice([text, text, "0000-00-00", "1970-01-01 00:00:01"])


def binaries(longest: int) -> Callable[[random.Random], object]:
    def make(chance: random.Random) -> object:
        value = chance.randbytes(chance.randrange(longest + 1))
        return chance.choice([value, value[: longest - 2] + b"\0\0", b"", b"\0" * longest, b"  "])

    return make


def strings(longest: int) -> Callable[[random.Random], object]:
    return lambda chance: chance.choice([words(chance, longest + 1), "", "trailing  ", " "])


_LABELS = ["a", "b''c", "d\\\\e", "ü€", "x y", "(z)", "ü''ü", 'q"q', "\\n", "%", "`"]
_MANY_LABELS = [f"label {number}" for number in range(300)]
_SET_LABELS = [f"s{number}" for number in range(62)] + ["it''s", "a\\\\b"]


def enum(labels: Sequence[str]) -> str:
    return ", ".join(f"'{label}'" for label in labels)


def spelled(labels: Sequence[str]) -> list[str]:
    return [label.replace("''", "'").replace("\\\\", "\\").replace("\\n", "\n") for label in labels]


def one_label(labels: Sequence[str]) -> Callable[[random.Random], object]:
    return lambda chance: chance.choice([*spelled(labels), "no label", ""])


def some_labels(labels: Sequence[str]) -> Callable[[random.Random], object]:
    def make(chance: random.Random) -> object:
        count = chance.choice([0, 1, 3, len(labels)])
        return ",".join(chance.sample(spelled(labels), min(count, len(labels))))

    return make


def bits(width: int) -> Callable[[random.Random], object]:
    return lambda chance: chance.choice([0, 1, 2**width - 1, chance.randrange(2**width)])


def columns_of(mariadb: bool) -> dict[str, tuple[str, Callable[[random.Random], object]]]:
    """Every column type with values for it; names begin with the family."""
    found: dict[str, tuple[str, Callable[[random.Random], object]]] = {}
    for name, width in (("tiny", 8), ("small", 16), ("medium", 24), ("", 32), ("big", 64)):
        found[f"i_{width}"] = (f"{name}INT", integers(width, False))
        found[f"u_{width}"] = (f"{name}INT UNSIGNED", integers(width, True))
    for precision, scale in (
        (1, 0), (5, 2), (9, 9), (10, 0), (18, 9), (19, 10), (30, 15), (38, 10), (65, 0), (65, 30),
        (30, 30), (11, 1),
    ):  # fmt: skip
        found[f"dec_{precision}_{scale}"] = (
            f"DECIMAL({precision}, {scale})",
            decimals(precision, scale),
        )
    found["dec_unsigned"] = ("DECIMAL(20, 5) UNSIGNED", decimals(20, 5))
    found["f_float"] = ("FLOAT", floats)
    found["f_double"] = ("DOUBLE", doubles)
    found["f_unsigned"] = ("DOUBLE UNSIGNED", doubles)
    found["f_fixed"] = ("DOUBLE(12, 3)", doubles)
    for width in (1, 5, 8, 9, 17, 33, 64):
        found[f"bit_{width}"] = (f"BIT({width})", bits(width))
    found["year"] = ("YEAR", lambda chance: chance.choice([0, 1901, 1970, 2024, 2155]))
    found["after_year"] = ("BIGINT UNSIGNED", integers(64, True))
    found["date"] = ("DATE", dates)
    for fraction in range(7):
        found[f"time_{fraction}"] = (f"TIME({fraction})", times)
        found[f"moment_{fraction}"] = (f"DATETIME({fraction})", moments)
        found[f"instant_{fraction}"] = (f"TIMESTAMP({fraction}) NULL", instants)
    for width in (1, 16, 255):
        found[f"bin_{width}"] = (f"BINARY({width})", binaries(width))
        found[f"char_{width}"] = (f"CHAR({width})", strings(width))
    for width in (20, 300):
        found[f"varbin_{width}"] = (f"VARBINARY({width})", binaries(width))
        found[f"var_{width}"] = (f"VARCHAR({width})", strings(width))
        found[f"latin_{width}"] = (f"VARCHAR({width}) CHARACTER SET latin1", strings(width))
    for size in ("TINY", "", "MEDIUM", "LONG"):
        found[f"blob_{size.lower()}"] = (f"{size}BLOB", binaries(250))
        found[f"text_{size.lower()}"] = (f"{size}TEXT", strings(60))
    found["enum_few"] = (f"ENUM({enum(_LABELS)})", one_label(_LABELS))
    found["enum_many"] = (f"ENUM({enum(_MANY_LABELS)})", one_label(_MANY_LABELS))
    found["set_few"] = (f"SET({enum(_LABELS)})", some_labels(_LABELS))
    found["set_many"] = (f"SET({enum(_SET_LABELS)})", some_labels(_SET_LABELS))
    for charset in ("latin1", "gbk", "ucs2", "utf16le", "utf32", "koi8r"):
        letters = ["я", "д", "x"] if charset in ("gbk", "koi8r") else ["ä", "ö", "x"]
        kinds = f"({enum(letters)}) CHARACTER SET {charset}"
        found[f"enum_{charset}"] = (f"ENUM{kinds}", one_label(letters))
        found[f"set_{charset}"] = (f"SET{kinds}", some_labels(letters))
    found["json"] = ("JSON", lambda chance: json.dumps({"k": [chance.random(), words(chance, 9)]}))
    found["point"] = ("POINT", lambda chance: None)
    if mariadb:
        found["uuid"] = ("UUID", lambda chance: f"{chance.randrange(16**32):032x}")
        found["inet6"] = ("INET6", lambda chance: f"fe80::{chance.randrange(1, 9999)}")
        found["inet4"] = ("INET4", lambda chance: f"10.0.{chance.randrange(256)}.1")
        found["var_compressed"] = ("VARCHAR(100) COMPRESSED", strings(100))
        found["text_compressed"] = ("TEXT COMPRESSED", strings(100))
        found["blob_compressed"] = ("BLOB COMPRESSED", binaries(200))
    else:
        found["vector"] = ("VECTOR(3)", lambda chance: struct.pack("<3f", 1.5, 2.5, -1.0))
    found["last_text"] = ("VARCHAR(10) CHARACTER SET latin2", strings(10))
    found["last_number"] = ("SMALLINT UNSIGNED", integers(16, True))
    return found


_TYPED_TABLE = """
    CREATE TABLE outbox_event (
      id {id} AUTO_INCREMENT PRIMARY KEY,
      {columns},
      event_id VARCHAR(64) NOT NULL UNIQUE,
      aggregate_type VARCHAR(64) NOT NULL,
      aggregate_id VARCHAR(64) NOT NULL,
      event_type VARCHAR(128) NOT NULL,
      payload {payload} NULL,
      status TINYINT NOT NULL DEFAULT 0,
      retry_count INT NOT NULL DEFAULT 0,
      next_retry_time DATETIME(6) NULL,
      created_at {created} NULL,
      updated_at DATETIME(6) NULL
    ) CHARACTER SET utf8mb4 AUTO_INCREMENT = {first}
"""
_ROUNDS = [
    ("TINYINT UNSIGNED", 1, "BLOB", "DATETIME(0)"),
    ("SMALLINT", 30000, "VARBINARY(300)", "TIMESTAMP(6)"),
    ("MEDIUMINT UNSIGNED", 2**23, "LONGBLOB", "DATETIME(1)"),
    ("INT UNSIGNED", 2**31, "TINYBLOB", "TIMESTAMP(0)"),
    ("INT", 1, "VARBINARY(20)", "DATETIME(3)"),
    ("BIGINT", 2**62, "BINARY(30)", "TIMESTAMP(3)"),
    ("BIGINT UNSIGNED", 2**63, "MEDIUMBLOB", "DATETIME(6)"),
    ("BIGINT UNSIGNED", 1, "JSON", "TIMESTAMP(1)"),
    ("BIGINT UNSIGNED", 255, "TINYTEXT", "DATETIME(2)"),
    ("BIGINT UNSIGNED", 256, "CHAR(255)", "DATETIME(4)"),
    ("BIGINT UNSIGNED", 65535, "VARCHAR(3000)", "DATETIME(5)"),
    ("BIGINT UNSIGNED", 2**32 - 9, "MEDIUMTEXT", "TIMESTAMP(2)"),
]


def test_column_types(database: Database) -> None:
    """All types as plain columns, read as the log describes them, and in the fields of an event
    where they may stand there; at every level of metadata."""
    mariadb = database.is_mariadb
    levels = itertools.cycle(["NO_LOG", "MINIMAL", "FULL"] if mariadb else ["MINIMAL", "FULL"])
    columns = columns_of(mariadb)
    [(before,)] = database.sql("SELECT @@global.binlog_row_metadata")
    names = ", ".join(columns)
    definition = ",\n".join(f"{name} {type_}" for name, (type_, _) in columns.items())
    found = Found()
    values_compared = 0
    each = max(10, ROWS * 2 // 5 // len(_ROUNDS))
    try:
        for number, (id_type, first, payload, created) in enumerate(_ROUNDS):
            level = next(levels)
            database.sql(f"SET GLOBAL binlog_row_metadata = {level}")
            database.close()
            create = _TYPED_TABLE.format(
                id=id_type, first=first, payload=payload, created=created, columns=definition
            )
            chance = random.Random(number)
            moment = instants if "TIMESTAMP" in created else moments_of_a_calendar
            make = strings(60) if "TEXT" in payload or "CHAR" in payload else binaries(20)
            if payload == "JSON":
                make = columns["json"][1]
            rows = [
                [
                    *[perhaps(chance, one) for _, one in columns.values()],
                    *(f"e{n}", "order", f"k{n}", "MADE", make(chance), moment(chance)),
                ]
                for n in range(min(each, 100 if "TINY" in id_type else each))
            ]
            with outbox(database, create) as source:
                start = source.position
                insert_plainly(
                    database,
                    f"{names}, event_id, aggregate_type, aggregate_id, event_type, payload,"
                    " created_at",
                    rows,
                )
                compare(source, found, "NULL")
                values_compared += compare_columns(source, start, level)
    finally:
        database.sql(f"SET GLOBAL binlog_row_metadata = {before}")
        database.close()
    assert not found.read_back, found
    print(f"{found.equal} rows, {values_compared} values of {len(columns)} columns")
    assert values_compared > found.equal * 50


def perhaps(chance: random.Random, make: Callable[[random.Random], object]) -> object:
    """A value, sometimes NULL."""
    return make(chance) if chance.random() > 0.15 else None


def insert_plainly(database: Database, columns: str, rows: Sequence[Sequence[object]]) -> None:
    """Insert without compression, which ``raw_events`` does not undo."""
    with database.connect(autocommit=True) as connection, connection.cursor() as cursor:
        cursor.execute("SET sql_mode = '', time_zone = '+00:00'")
        for part in batched(rows, 20):
            one = "(" + ", ".join(["%s"] * len(part[0])) + ")"
            cursor.execute(
                f"INSERT INTO outbox_event ({columns}) VALUES " + ", ".join([one] * len(part)),
                [value for row in part for value in row],
            )


def compare_columns(source: SourceUnderTest, start: Any, level: str) -> int:
    """Compare each column of each row in the log with SELECT; return how many values."""
    schema = source.source()._load_columns()
    charsets = source.source()._load_charsets()
    wanted = (
        f"{chr(len(source.database.name))}{source.database.name}\0"
        f"{chr(len(source.table))}{source.table}\0"
    ).encode()
    shapes: dict[bytes, bytes] = {}
    images: list[list[bytes | None]] = []
    mapped: list[MappedColumn] = []
    for event in raw_events(source.database, start, source.position):
        body = event[19:-4]
        if event[4] == _TABLE_MAP and body[8:].startswith(wanted):
            shapes[body[:6]] = body[8:]
            mapped = parse_table_map(body[8:], mariadb=source.database.is_mariadb)
        elif event[4] in _WRITE_ROWS and body[:6] in shapes:
            rows = body[8:] if event[4] == 23 else body[8 + int.from_bytes(body[8:10], "little") :]
            images += row_images(rows, 0, len(rows), [column.width for column in mapped])
    assigned = assign(mapped, schema)
    assert assigned is not None
    assert assigned[1] == (level == "FULL")
    check_metadata(mapped, schema, charsets, level)
    stored = selected(source.database, [column.name for column in schema])
    assert len(images) == len(stored)
    compared = 0
    for image, row in zip(images, stored, strict=True):
        for logged, column, ours, theirs in zip(mapped, schema, image, row, strict=False):
            assert same(logged, column, charsets, ours, theirs), (column, ours, theirs)
            compared += 1
    return compared


def check_metadata(
    mapped: Sequence[MappedColumn],
    schema: Sequence[SchemaColumn],
    charsets: dict[int, str],
    level: str,
) -> None:
    """Names, signs and character sets of the log stand at their own columns."""
    for logged, column in zip(mapped, schema, strict=False):
        assert logged.name == (column.name if level == "FULL" else None)
        if logged.unsigned is not None:
            # YEAR has a sign, too: none.
            assert logged.unsigned == (column.unsigned or column.data_type == "year"), column
        assert (logged.labels is not None) == (level == "FULL" and bool(column.labels))
        if logged.collation is not None and (column.data_type in _TEXT_TYPES or column.labels):
            assert charsets[logged.collation] == column.charset, column
        elif logged.collation is not None:
            assert charsets[logged.collation] == "binary", column
    if level != "NO_LOG":
        signed = [logged for logged in mapped if logged.unsigned is not None]
        assert len(signed) > 20


_TEXT_TYPES = ("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "json")


def selected(database: Database, names: Sequence[str]) -> Sequence[Any]:
    """The rows as a session in UTC prints them: text as text, everything binary as bytes."""
    with database.connect(autocommit=True, conv={FIELD_TYPE.NULL: None}) as connection:
        cursor = connection.cursor()
        cursor.execute("SET time_zone = '+00:00'")
        # PyMySQL takes a vector for text.
        what = ["UNHEX(HEX(vector))" if name == "vector" else name for name in names]
        cursor.execute(f"SELECT {', '.join(what)} FROM outbox_event ORDER BY id")
        rows: Sequence[Any] = cursor.fetchall()
        return rows


def same(
    logged: MappedColumn,
    column: SchemaColumn,
    charsets: dict[int, str],
    ours: bytes | None,
    theirs: Any,
) -> Any:
    """Whether the value of the log is the value of SELECT."""
    if ours is None or theirs is None:
        return ours is None and theirs is None
    if logged.type == JSON:
        return json_text(ours, 0, len(ours)) == theirs.encode()
    reader = reader_for(logged, column, charsets)
    if reader is not None:
        return reader(b"??" + ours + b"??", 2, len(ours)) == theirs
    kind = column.data_type
    if kind == "binary":
        return ours.ljust(logged.meta, b"\0") == theirs
    if column.charset in ("latin1", "latin2"):
        return ours.decode(str(codec_of(column.charset))) == theirs
    if kind in _TEXT_TYPES and logged.type < 140:
        return ours.decode() == theirs
    if "blob" in kind or kind in ("varbinary", "bit", "vector"):
        return logged.type in (140, 141) or ours == theirs
    # Types whose form in the log is the server's own affair: they are only walked over.
    assert re.match("uuid|inet|point|double|.*text|.*char|.*blob", kind), column
    return True
