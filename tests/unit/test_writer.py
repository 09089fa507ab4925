"""The writer without a database: ids, the JSON form, what is refused."""

from __future__ import annotations

import enum
import functools
import json
import subprocess
import sys
import threading
import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import attrs
import msgspec
import pytest
from pydantic import BaseModel
from sqlalchemy import Column, LargeBinary, MetaData, String, create_engine
from sqlalchemy.orm import Session

from cdc_relay.outbox import outbox_table
from writer import EventInfo, EventTooLargeError, Inbox, NotInTransactionError, Outbox
from writer.ids import uuid7
from writer.payload import Json
from writer.registry import RegistrySerializer

encode_payload = Json().payload
encode_headers = Json().headers

EVENT: dict[str, Any] = {
    "aggregate_type": "order",
    "aggregate_id": "7",
    "event_type": "CREATED",
    "payload": {},
}


class FakeConnection:
    """A DB-API connection that keeps what it is given."""

    def __init__(self) -> None:
        self.executed: list[tuple[str, tuple[Any, ...]]] = []
        self.open_cursors = 0

    def cursor(self) -> FakeConnection:
        self.open_cursors += 1
        return self

    def execute(self, sql: str, parameters: tuple[Any, ...] = ()) -> None:
        self.executed.append((sql, parameters))

    def fetchall(self) -> list[tuple[int]]:
        return [(1 << 26,)]

    def close(self) -> None:
        self.open_cursors -= 1


# --- ids ---------------------------------------------------------------------------------------


def test_ids_are_uuid7_of_now() -> None:
    before = datetime.now(UTC)
    made = uuid.UUID(uuid7())
    assert made.version == 7
    assert made.variant == uuid.RFC_4122
    stamp = datetime.fromtimestamp((made.int >> 80) / 1000, UTC)
    assert abs(stamp - before) < timedelta(seconds=5)


def test_ids_rise_across_threads() -> None:
    per_thread: list[list[str]] = []

    def make() -> None:
        per_thread.append([uuid7() for _ in range(2000)])

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(ids == sorted(ids) for ids in per_thread)
    assert len({name for ids in per_thread for name in ids}) == 8000


def test_ids_rise_while_the_clock_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([5_000_000_000_000_000_000, 4_999_000_000_000_000_000, 5_000_000_000_001_000_000])
    monkeypatch.setattr("writer.ids._clock", type(uuid7.__globals__["_clock"])())
    monkeypatch.setattr("writer.ids.time.time_ns", lambda: next(times))
    ids = [uuid7() for _ in range(3)]
    assert ids == sorted(set(ids))


def test_a_forked_child_makes_other_ids() -> None:
    code = (
        "import os, sys\n"
        "from writer.ids import uuid7\n"
        "uuid7()\n"
        "r, w = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.write(w, uuid7().encode())\n"
        "    os._exit(0)\n"
        "mine = uuid7()\n"
        "os.wait()\n"
        "assert os.read(r, 99).decode() != mine\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


# --- payload -----------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Name(enum.StrEnum):
    A = "a"


@dataclass
class Item:
    sku: str
    price: Decimal


class Model(BaseModel):
    at: datetime
    item: Any = None


MOMENT = datetime(2026, 3, 1, 11, 30, tzinfo=timezone(timedelta(hours=2)))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, 2.5, True, None]}, '{"a":[1,2.5,true,null]}'),
        ([], "[]"),
        ({"d": Decimal("12.50")}, '{"d":"12.50"}'),
        ({"d": Decimal("1E+3")}, '{"d":"1E+3"}'),
        ({"t": MOMENT}, '{"t":"2026-03-01T09:30:00.000000Z"}'),
        ({"t": date(2026, 3, 1)}, '{"t":"2026-03-01"}'),
        ({"u": uuid.UUID(int=1)}, '{"u":"00000000-0000-0000-0000-000000000001"}'),
        ({"e": Colour.RED, "l": Level.HIGH, "n": Name.A}, '{"e":"red","l":3,"n":"a"}'),
        (Item("x", Decimal("1")), '{"sku":"x","price":"1"}'),
        ([Item("x", Decimal("1"))], '[{"sku":"x","price":"1"}]'),
        (Model(at=MOMENT), '{"at":"2026-03-01T09:30:00.000000Z","item":null}'),
        ({"m": Model(at=MOMENT, item=1)}, '{"m":{"at":"2026-03-01T09:30:00.000000Z","item":1}}'),
        ({"b": b"\x00\xff", "m": memoryview(b"x")}, '{"b":"AP8=","m":"eA=="}'),
        ((1, 2), "[1,2]"),
        (5, "5"),
        (Name.A, '"a"'),
        ({1: "int key"}, '{"1":"int key"}'),
        ({"x": 2**64 - 1, "y": "9" * 30}, f'{{"x":{2**64 - 1},"y":"{"9" * 30}"}}'),
    ],
)
def test_json_forms(value: object, text: str) -> None:
    assert encode_payload(value) == text


@attrs.define
class AttrsItem:
    sku: str
    at: datetime


class StructItem(msgspec.Struct, rename="camel", tag="item"):
    unit_price: Decimal
    item_id: uuid.UUID
    colour: Colour
    data: bytes = b"x"


def test_attrs_and_msgspec() -> None:
    assert encode_payload([AttrsItem("x", MOMENT)]) == (
        '[{"sku":"x","at":"2026-03-01T09:30:00.000000Z"}]'
    )
    item = StructItem(Decimal("12.50"), uuid.UUID(int=1), Colour.RED)
    assert json.loads(str(encode_payload({"i": item}))) == {
        "i": {
            "type": "item",
            "unitPrice": "12.50",
            "itemId": "00000000-0000-0000-0000-000000000001",
            "colour": "red",
            "data": "eA==",
        }
    }


def test_a_default_for_types_of_ones_own() -> None:
    def default(value: object) -> object:
        if isinstance(value, complex):
            return [value.real, value.imag]
        raise TypeError(f"{value!r} is unknown")

    connection = FakeConnection()
    outbox = Outbox(default=default)
    outbox.add(connection, **{**EVENT, "payload": {"c": 1 + 2j, "t": MOMENT}})
    assert connection.executed[0][1][4] == '{"c":[1.0,2.0],"t":"2026-03-01T09:30:00.000000Z"}'
    with pytest.raises(TypeError, match="is unknown"):
        outbox.add(connection, **{**EVENT, "payload": {"x": object()}})


@pytest.mark.parametrize(
    ("payload", "size"),
    [
        ({"a": "x" * 83, "b": [1, 2]}, 105),
        ({"a": "\u8ba2" * 20}, 129),
        (json.dumps({"a": ":" * 100}), 109),
        (b"x" * 101, 101),
        (json.dumps({"é": [1, 2]}, ensure_ascii=False, separators=(",", ":")), 14),
        ("no JSON " * 20, 160),
    ],
)
def test_the_size_limit(payload: object, size: int) -> None:
    """Counted as the larger of what MySQL and MariaDB will return."""
    connection = FakeConnection()
    fields = {**EVENT, "payload": payload}
    Outbox(max_payload_bytes=size).add(connection, **fields)
    with pytest.raises(EventTooLargeError, match=rf"CREATED of order 7 has {size} bytes") as caught:
        Outbox(max_payload_bytes=size - 1).add_all(connection, [EVENT, fields])  # type: ignore[list-item]
    assert isinstance(caught.value, ValueError)
    assert len(connection.executed) == 1


def test_a_serializer() -> None:
    calls: list[tuple[Any, EventInfo]] = []

    def serialize(payload: Any, event: EventInfo) -> bytes:
        calls.append((payload, event))
        return b"\x00\xff"

    connection = FakeConnection()
    table = outbox_table(MetaData(), payload="binary")
    event_id = Outbox(table, serializer=serialize).add(connection, **EVENT)
    assert calls == [({}, EventInfo(event_id, "order", "7", "CREATED"))]
    assert "UNHEX(%s)" in connection.executed[0][0]
    assert connection.executed[0][1][4] == "00ff"
    Outbox(table, serializer=serialize).add(connection, **{**EVENT, "payload": None})
    assert connection.executed[1][1][4] is None
    with pytest.raises(ValueError, match="payload='binary'"):
        Outbox(serializer=serialize).add(connection, **EVENT)


def test_bytes_of_json_are_text_for_a_json_column() -> None:
    connection = FakeConnection()
    Outbox().add(connection, **{**EVENT, "payload": b'{"a":1}'})
    sql, parameters = connection.executed[0]
    assert "UNHEX" not in sql
    assert parameters[4] == '{"a":1}'


def test_nothing_but_ascii_reaches_a_driver() -> None:
    """Character set, sql_mode and driver have nothing to take for something else."""
    connection = FakeConnection()
    metadata = MetaData()
    table = outbox_table(metadata, "50%s")
    table.append_column(Column("raw", LargeBinary))
    table.append_column(Column("note", String(20)))
    fields = {**EVENT, "payload": '"é"', "columns": {"raw": b"\xff", "note": "50%é"}}
    Outbox(table).add_all(connection, [EVENT, fields])  # type: ignore[list-item]
    [(sql, parameters)] = connection.executed
    assert sql.startswith("INSERT INTO `50%%s` (")
    assert [place for place in ("%s", "UNHEX(%s)") if place in sql] == ["%s", "UNHEX(%s)"]
    assert sql.count("CONVERT(UNHEX(%s) USING utf8mb4)") == 2
    assert sql.replace("`50%%s`", "").count("%s") == len(parameters)
    assert parameters[6:] == (
        parameters[6],
        "order",
        "7",
        "CREATED",
        "22c3a922",
        None,
        "ff",
        "353025c3a9",
    )


@pytest.mark.parametrize("number", [-1, True, 1.0, "1", 1 << 63])
def test_a_wrong_aggregate_seq(number: Any) -> None:
    with pytest.raises(ValueError, match="aggregate_seq must be a whole number"):
        Outbox().add(FakeConnection(), **EVENT, aggregate_seq=number)


def test_text_bytes_and_none_are_kept() -> None:
    assert encode_payload('{"already": "json"}') == '{"already": "json"}'
    assert encode_payload(b"\x00\xff") == b"\x00\xff"
    assert encode_payload(bytearray(b"x")) == b"x"
    assert encode_payload(memoryview(b"x")) == b"x"
    assert encode_payload(None) is None


def test_json_is_ascii_and_means_the_same() -> None:
    said = {"text": "naïve 订单 \U0001f600 \\ud800"}
    text = encode_payload(said)
    assert isinstance(text, str)
    assert text.isascii()
    assert json.loads(text) == said


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"x": float("nan")}, ValueError),
        ({"x": float("inf")}, ValueError),
        ({"x": 2**64}, ValueError),
        ({"x": -(2**63) - 1}, ValueError),
        ({"x": Decimal("NaN")}, ValueError),
        ({"t": datetime(2026, 3, 1)}, ValueError),
        ({"x": object()}, TypeError),
        ({"x": {1, 2}}, TypeError),
        ({("a", "b"): 1}, TypeError),
        (Item, TypeError),
        ({"x": "\ud83d"}, ValueError),
        ({"\ude00": 1}, ValueError),
        ({"t": datetime.min.replace(tzinfo=timezone(timedelta(hours=2)))}, ValueError),
        ({"t": datetime.max.replace(tzinfo=timezone(timedelta(hours=-2)))}, ValueError),
        (functools.reduce(lambda inner, _: [inner], range(100_000), []), ValueError),
        ({1: "a", "1": "b"}, ValueError),
        ([{"x": {None: 1, "null": 2}}], ValueError),
        ({True: 1, "true": 2}, ValueError),
        ({-1.5: 1, "-1.5": 2}, ValueError),
        ({1e300: 1, "1e+300": 2}, ValueError),
    ],
)
def test_what_has_no_form_is_refused(value: object, error: type[Exception]) -> None:
    """And the error says which event it was."""
    with pytest.raises(error):
        encode_payload(value)
    with pytest.raises(error) as caught:
        Outbox().add(FakeConnection(), **{**EVENT, "payload": value})
    assert "CREATED of order 7" in "".join(caught.value.__notes__)


def test_numbers_as_keys_are_kept_where_each_is_another() -> None:
    value = {1: {"1": 0}, 2: [{"2": 0}], "3": '"1":', "true": {True: 1}}
    assert json.loads(str(encode_payload(value))) == json.loads(json.dumps(value))


def test_json_text_that_is_nested_deeply_is_as_large_as_it_is() -> None:
    connection = FakeConnection()
    fields = {**EVENT, "payload": "[" * 100_000 + "]" * 100_000}
    Outbox(max_payload_bytes=200_000).add(connection, **fields)
    with pytest.raises(EventTooLargeError, match="has 200000 bytes"):
        Outbox(max_payload_bytes=199_999).add(connection, **fields)


def test_headers() -> None:
    assert encode_headers(None) is None
    assert encode_headers({}) == "{}"
    assert encode_headers({"a": "b", "n": None}) == '{"a":"b","n":null}'
    with pytest.raises(TypeError, match="must be a mapping"):
        encode_headers('{"a": 1}')  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is not a str"):
        encode_headers({1: "b"})  # type: ignore[dict-item]


# --- fields ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"aggregate_id": ""}, "aggregate_id is empty"),
        ({"aggregate_id": None}, "flush"),
        ({"aggregate_id": True}, "aggregate_id must be a str, not bool"),
        ({"aggregate_id": 1.5}, "aggregate_id must be a str, not float"),
        ({"aggregate_id": "x" * 65}, "aggregate_id has 65 characters; the column takes 64"),
        ({"aggregate_type": "x" * 65}, "aggregate_type has 65"),
        ({"aggregate_type": 3}, "aggregate_type must be a str"),
        ({"event_type": "x" * 129}, "event_type has 129 characters; the column takes 128"),
        ({"event_type": ""}, "event_type is empty"),
        ({"event_id": "x" * 65}, "event_id has 65"),
        ({"event_id": ""}, "event_id is empty"),
        ({"event_id": "e "}, "ends with a blank"),
        ({"occurred_at": datetime(2026, 3, 1)}, "has no time zone"),
        ({"aggregate_id": "\udcc3\udca9"}, "aggregate_id holds half a character"),
        ({"payload": '"\ud800"'}, "payload of CREATED of order 7 holds half a character"),
        ({"headers": {"a": "\ud800"}}, "holds half a character"),
        ({"headers": {"a": {1: 1, "1": 2}}}, "the key '1' is in one object twice"),
        ({"occurred_at": datetime.min.replace(tzinfo=timezone(timedelta(hours=2)))}, "in UTC"),
    ],
)
def test_wrong_fields_are_refused_before_anything_is_written(
    fields: dict[str, Any], message: str
) -> None:
    connection = FakeConnection()
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        Outbox().add(connection, **{**EVENT, **fields})
    if not fields.keys() & {"aggregate_type", "aggregate_id", "event_type", "event_id"}:
        said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        assert "CREATED of order 7" in said
    assert connection.executed == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(7, "7"), (uuid.UUID(int=1), str(uuid.UUID(int=1))), (Name.A, "a"), ("é", "c3a9")],
)
def test_aggregate_ids_that_are_taken(value: Any, text: str) -> None:
    connection = FakeConnection()
    Outbox().add(connection, **{**EVENT, "aggregate_id": value})
    [(_, parameters)] = connection.executed
    assert parameters[2] == text


def test_the_insert() -> None:
    connection = FakeConnection()
    event_id = Outbox("shop.outbox_event").add(connection, **EVENT, headers={"a": "b"})
    [(sql, parameters)] = connection.executed
    assert sql.startswith("INSERT INTO `shop`.`outbox_event` (`event_id`, ")
    assert parameters == (event_id, "order", "7", "CREATED", "{}", '{"a":"b"}')
    assert connection.open_cursors == 0


def test_one_statement_or_several_in_a_savepoint() -> None:
    connection = FakeConnection()
    Outbox().add_all(connection, [EVENT] * 900)  # type: ignore[list-item]
    assert len(connection.executed) == 1
    connection.executed.clear()
    Outbox().add_all(connection, [EVENT] * 1001)  # type: ignore[list-item]
    assert [sql.split("_")[0] for sql, _ in connection.executed] == [
        "SELECT @@max",
        "SAVEPOINT cdc",
        "INSERT INTO `outbox",
        "INSERT INTO `outbox",
        "RELEASE SAVEPOINT cdc",
    ]


def test_a_savepoint_that_is_gone_hides_no_error() -> None:
    """After a deadlock there is none to return to."""

    class Deadlocked(FakeConnection):
        def execute(self, sql: str, parameters: tuple[Any, ...] = ()) -> None:
            super().execute(sql, parameters)
            if len(self.executed) > 3:
                raise RuntimeError(sql.partition(" ")[0])

    connection = Deadlocked()
    with pytest.raises(RuntimeError, match="INSERT"):
        Outbox().add_all(connection, [EVENT] * 1001)  # type: ignore[list-item]
    assert connection.executed[-1][0].startswith("ROLLBACK TO SAVEPOINT")
    assert connection.open_cursors == 0


def test_a_given_event_id_and_time() -> None:
    connection = FakeConnection()
    fields: Any = {**EVENT, "event_id": uuid.UUID(int=1), "occurred_at": MOMENT}
    assert Outbox().add(connection, **fields) == str(uuid.UUID(int=1))
    assert connection.executed[0][1][-1] == "2026-03-01 09:30:00.000000"


def test_unknown_fields_of_add_all_are_errors() -> None:
    with pytest.raises(TypeError, match="no field 'kind'"):
        Outbox().add_all(FakeConnection(), [{**EVENT, "kind": "x"}])  # type: ignore[typeddict-item]
    with pytest.raises(TypeError, match="needs the field 'payload'"):
        Outbox().add_all(
            FakeConnection(), [{"aggregate_type": "a", "aggregate_id": 1, "event_type": "b"}]
        )  # type: ignore[typeddict-item]
    with pytest.raises(TypeError, match="needs the field 'event_type'"):
        Outbox().add_all(
            FakeConnection(),
            [{"aggregate_type": "a", "aggregate_id": 1, "payload": {}}],  # type: ignore[typeddict-item]
        )


def test_a_table_of_the_users_metadata() -> None:
    connection = FakeConnection()
    Outbox(outbox_table(MetaData(schema="shop"), "events")).add(connection, **EVENT)
    assert "INTO `shop`.`events`" in connection.executed[0][0]


# --- targets -----------------------------------------------------------------------------------


class PyMySQLLike(FakeConnection):
    def __init__(self, autocommit: bool, status: int) -> None:
        super().__init__()
        self._autocommit = autocommit
        self.server_status = status

    def get_autocommit(self) -> bool:
        return self._autocommit

    def autocommit(self, value: bool) -> None: ...


class ConnectorLike(FakeConnection):
    def __init__(self, autocommit: bool, in_transaction: bool) -> None:
        super().__init__()
        self.autocommit = autocommit
        self.in_transaction = in_transaction


class DjangoLike(FakeConnection):
    def __init__(self, autocommit: bool, in_atomic_block: bool) -> None:
        super().__init__()
        self._autocommit = autocommit
        self.in_atomic_block = in_atomic_block

    def get_autocommit(self) -> bool:
        assert not self.in_atomic_block, "would connect"
        return self._autocommit


@pytest.mark.parametrize(
    "target",
    [
        FakeConnection(),
        PyMySQLLike(False, 0),
        PyMySQLLike(True, 3),
        ConnectorLike(False, False),
        ConnectorLike(True, True),
        DjangoLike(True, True),
        DjangoLike(False, False),
    ],
)
def test_targets_in_a_transaction(target: FakeConnection) -> None:
    Outbox().add(target, **EVENT)
    assert len(target.executed) == 1


@pytest.mark.parametrize(
    "target", [PyMySQLLike(True, 2), ConnectorLike(True, False), DjangoLike(True, False)]
)
def test_targets_that_autocommit(target: FakeConnection) -> None:
    with pytest.raises(
        NotInTransactionError, match=r"begin\(\)|start_transaction|atomic|autocommit\(False\)"
    ):
        Outbox().add(target, **EVENT)
    assert target.executed == []


@pytest.mark.parametrize("target", [None, "mysql://", object()])
def test_what_is_no_target(target: object) -> None:
    with pytest.raises(TypeError, match="is not a Session"):
        Outbox().add(target, **EVENT)


# --- wrong settings ----------------------------------------------------------------------------


loose: Any = SimpleNamespace(
    Outbox=Outbox, Inbox=Inbox, outbox_table=outbox_table, Registry=RegistrySerializer
)
"""Without their types, which would refuse most of it before it runs."""


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: loose.Outbox("shop.events", names="debezium"), "give Outbox the table, Table"),
        (lambda: loose.Outbox(outbox_table(MetaData()), names="deb"), "'deb' is no preset"),
        (lambda: loose.Outbox(object()), "a name or a SQLAlchemy Table"),
        (lambda: loose.Outbox(""), "'' is no table's name"),
        (lambda: loose.Outbox(max_payload_bytes=0), "at least 1"),
        (lambda: loose.Inbox(7), "1 to 64 characters: 7"),
        (
            lambda: loose.outbox_table(MetaData(), payload="xml"),
            "'xml' is none of json, text, binary",
        ),
        (
            lambda: loose.Outbox().add_all(FakeConnection(), ["x"]),
            "a mapping of its fields, not str",
        ),
        (lambda: loose.Outbox().add(Session(create_engine("sqlite://")), **EVENT), "to sqlite"),
        (lambda: loose.Registry(bytes, topic="{tenant}.x"), "'tenant'.*give a function"),
        (lambda: loose.Registry(bytes, topic="{event_type"), "cannot be filled"),
    ],
)
def test_wrong_settings_are_one_line(made: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        made()
    assert "\n" not in str(caught.value)


def test_a_table_that_is_there_with_another_payload() -> None:
    """It used to come back as it was, and the first bytes were refused with the advice to do what
    had been done."""
    metadata = MetaData()
    table = outbox_table(metadata, payload="binary")
    assert outbox_table(metadata) is table
    assert outbox_table(metadata, payload="binary") is table
    with pytest.raises(ValueError, match="is in this metadata already, with LONGBLOB"):
        outbox_table(metadata, payload="text")


def test_the_topic_of_a_subject() -> None:
    event = EventInfo("e-1", "order", "7", "PLACED")

    def subject(payload: Any, context: Any) -> bytes:
        return str(context.topic).encode()

    assert RegistrySerializer(subject)({}, event) == b"outbox.event.order"
    template = "{aggregate_type}.{event_type}.{aggregate_id}"
    assert RegistrySerializer(subject, topic=template)({}, event) == b"order.PLACED.7"
    assert RegistrySerializer(subject, topic=lambda e: f"acme.{e.event_type}")({}, event) == (
        b"acme.PLACED"
    )


def test_an_event_that_is_none_is_said_within_a_trace_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("writer.trace.active", lambda: True)
    with pytest.raises(TypeError, match="a mapping of its fields, not str"):
        loose.Outbox().add_all(FakeConnection(), ["x"])
