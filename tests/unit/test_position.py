"""Positions and GTID sets as values: parsed, merged, compared, stored, and encoded for a dump."""

from __future__ import annotations

import json
import random
import uuid
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_relay.cli.position import _place, _wanted
from cdc_relay.errors import ConfigError
from cdc_relay.position import Flavor, GtidSet, MariaGtidPosition, Position, file_number

A = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
B = "a1b2c3d4-0000-11e1-9e33-c80aa9429562"
SID_A = uuid.UUID(A).bytes


# --- GTID sets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        (f"{A}:1", f"{A}:1"),
        (f"{A}:1-1", f"{A}:1"),
        (f"{A}:1-5:7", f"{A}:1-5:7"),
        (f"{A}:1-5:6-7", f"{A}:1-7"),
        (f"{A}:7:1-5:6", f"{A}:1-7"),
        (f"{A}:1-5:3-9:20", f"{A}:1-9:20"),
        (f"{A.upper()}:3", f"{A}:3"),
        (f"{A.replace('-', '')}:3", f"{A}:3"),
        (f"{B}:4, {A}:1-3,\n{A}:5", f"{A}:1-3:5,{B}:4"),
        (f"{A}:1-3:tag:5", f"{A}:1-3:tag:5"),
        (f"{A}:tag:5:7:other_1:2-3", f"{A}:other_1:2-3:tag:5:7"),
        (f"{A}:TAG:5,{A}:tag:6,{A}:1", f"{A}:1:tag:5-6"),
        (f"{A}:9223372036854775806", f"{A}:9223372036854775806"),
    ],
)
def test_a_set_has_one_form(text: str, expected: str) -> None:
    assert str(GtidSet(text)) == expected
    assert GtidSet(text) == GtidSet(expected)
    assert bool(GtidSet(text)) == bool(expected)


def test_a_set_is_added_to_another() -> None:
    whole = GtidSet(f"{A}:5-6:tag:1")
    whole.add(GtidSet(f"{A}:1-4:9:tag:2,{B}:7"))
    assert str(whole) == f"{A}:1-6:9:tag:1-2,{B}:7"


@pytest.mark.parametrize(
    "text",
    [
        "x", A, f"{A}:", f"{A}:0", f"{A}:5-3", f"{A}:a-b", f"{A}:-1", f"{A}:1-", f"{A}:1--2",
        f"{A[:-1]}:1", f"{A}:1,{B}", f"{A}:9223372036854775808", f"{A}:{'t' * 33}:1", "0-1-2",
        f"{A}:tag", f"{A}:1-12:x", f"{A}:1:x,{B}:1", f"{A}:x:y:1",
    ],
)  # fmt: skip
def test_what_is_not_a_set_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="GTID set"):
        GtidSet(text)


@pytest.mark.parametrize(
    ("one", "other", "contains"),
    [
        ("", "", True),
        (f"{A}:1", "", True),
        ("", f"{A}:1", False),
        (f"{A}:1-10", f"{A}:2-5:7", True),
        (f"{A}:1-10", f"{A}:2-11", False),
        (f"{A}:1-5:7-10", f"{A}:5-7", False),
        (f"{A}:1-5:7-10", f"{A}:5:7", True),
        (f"{A}:1-10", f"{B}:1", False),
        (f"{A}:1-10", f"{A}:tag:1", False),
        (f"{A}:1-10:tag:1-3", f"{A}:tag:2:4", False),
        (f"{A}:1-10:tag:1-3,{B}:1", f"{A}:4:tag:2", True),
    ],
)
def test_contains(one: str, other: str, contains: bool) -> None:
    assert GtidSet(one).contains(GtidSet(other)) == contains


_RANGES = st.lists(
    st.tuples(st.sampled_from([A, B]), st.sampled_from(["", "t"]), st.integers(1, 40)).flatmap(
        lambda item: st.tuples(*map(st.just, item), st.integers(item[2] + 1, 45))
    ),
    max_size=12,
)


def _model(ranges: list[tuple[str, str, int, int]]) -> set[tuple[str, str, int]]:
    return {(sid, tag, n) for sid, tag, first, stop in ranges for n in range(first, stop)}


def _made(ranges: list[tuple[str, str, int, int]]) -> GtidSet:
    made = GtidSet()
    for sid, tag, first, stop in ranges:
        made.add_range(uuid.UUID(sid).bytes, tag, first, stop)
    return made


@given(_RANGES, _RANGES)
def test_sets_behave_like_sets(
    one: list[tuple[str, str, int, int]], other: list[tuple[str, str, int, int]]
) -> None:
    first, second = _made(one), _made(other)
    assert first.contains(second) == (_model(one) >= _model(other))
    assert first.missing(second) == len(_model(other) - _model(one))
    assert (first == second) == (_model(one) == _model(other))
    assert GtidSet(str(first)) == first
    assert str(_made(one[::-1])) == str(first)


def test_encoding_without_tags() -> None:
    """COM_BINLOG_DUMP_GTID: a count, then uuid, number of intervals, half-open intervals."""
    assert GtidSet().encode() == bytes(8)
    assert GtidSet(f"{A}:1-5:9").encode() == (
        (1).to_bytes(8, "little") + SID_A + (2).to_bytes(8, "little")
        + b"".join(n.to_bytes(8, "little") for n in (1, 6, 9, 10))
    )  # fmt: skip


def test_encoding_with_tags() -> None:
    """The format's number stands in the first and the last byte of the count; behind each uuid
    its tag."""
    encoded = GtidSet(f"{A}:1:tag:5").encode()
    assert encoded[:8] == bytes([1, 2, 0, 0, 0, 0, 0, 1])
    one = b"".join(n.to_bytes(8, "little") for n in (1, 1, 2))
    other = b"".join(n.to_bytes(8, "little") for n in (1, 5, 6))
    assert encoded[8:] == SID_A + b"\0" + one + SID_A + b"\6tag" + other


# --- MariaDB --------------------------------------------------------------------------------------


def test_mariadb_positions() -> None:
    position = MariaGtidPosition("0-1-100, 7-2-5")
    assert str(position) == "0-1-100,7-2-5"
    position.add(0, 9, 101)
    position.add(3, 1, 1)
    assert str(position) == "0-9-101,3-1-1,7-2-5"
    assert position.contains(MariaGtidPosition("0-1-100"))
    assert position.contains(MariaGtidPosition("0-9-101,7-2-5"))
    assert position.contains(MariaGtidPosition(""))
    assert not position.contains(MariaGtidPosition("0-1-102"))
    assert not position.contains(MariaGtidPosition("1-1-1"))
    assert not MariaGtidPosition()
    for text in ("0-1", "a-1-2", "0-1-2-3", "0-1--2"):
        with pytest.raises(ValueError, match="MariaDB GTID"):
            MariaGtidPosition(text)


# --- positions ------------------------------------------------------------------------------------


def place(file: str, offset: int, gtids: str | None = None, server: str = "s") -> Position:
    return Position("mysql", server, file, offset, gtids)


@pytest.mark.parametrize(
    ("here", "there", "reached"),
    [
        (place("b.000001", 4), place("b.000001", 4), True),
        (place("b.000001", 5), place("b.000001", 4), True),
        (place("b.000001", 4), place("b.000001", 5), False),
        (place("b.000002", 4), place("b.000001", 999), True),
        (place("b.000001", 999), place("b.000002", 4), False),
        # File numbers outgrow six digits; their texts do not sort.
        (place("b.1000000", 4), place("b.999999", 4), True),
        (place("b.999999", 4), place("b.1000000", 4), False),
        # Offsets outgrow 32 bits.
        (place("b.000001", 2**32 + 4), place("b.000001", 2**32 - 4), True),
        (place("b.000001", 2**32 - 4), place("b.000001", 2**32 + 4), False),
        # Another server's files mean nothing, its GTIDs do.
        (place("b.000009", 4), place("b.000001", 4, server="t"), False),
        (place("b.000001", 4, f"{A}:1-5"), place("b.000009", 9, f"{A}:3", server="t"), True),
        (place("b.000009", 4, f"{A}:1-5"), place("b.000001", 4, f"{A}:6"), False),
        # GTIDs on one side only: the files of one server decide.
        (place("b.000002", 4, f"{A}:1"), place("b.000001", 4), True),
        (Position("mariadb", "1", "b.000002", 4, "0-1-9"), place("b.000001", 4), False),
        (
            Position("mariadb", "1", "b.000001", 4, "0-1-9"),
            Position("mariadb", "2", "b.000005", 4, "0-1-8"),
            True,
        ),
        # The empty set is a set: of a server that has executed nothing.
        (place("b.000001", 4, ""), place("b.000001", 4, ""), True),
        (place("b.000009", 4, ""), place("b.000001", 4, f"{A}:1"), False),
    ],
)
def test_reached(here: Position, there: Position, reached: bool) -> None:
    assert here.reached(there) == reached


@pytest.mark.parametrize(
    "position",
    [
        place("binlog.000001", 4),
        place("binlog.000001", 2**40, ""),
        place("binlog.000001", 157, f"{A}:1-5:tag:1"),
        Position("mariadb", "1", "mariadb-bin.000001", 330, "0-1-9"),
        place("b.000001", 4).with_prepared({"78::1": (1, 2, 3, 7, 9, 10), "79:7a:2": (5,)}),
        place("b.000001", 4, f"{A}:1").inside(f"{SID_A.hex()}::2", 4711),
    ],
)
def test_what_is_stored_is_what_is_read(position: Position) -> None:
    assert Position.from_json(json.loads(json.dumps(position.to_json()))) == position


@pytest.mark.parametrize("steps", [(7,), (1, 1, 1, 2), (1, 5, 2, 9, 3), (3, -1)])
def test_keys_with_gaps_take_little_room(steps: tuple[int, ...]) -> None:
    """Ids that go by seven (Group Replication), or that others took in between."""
    chance = random.Random(1)
    keys = tuple(accumulate([10**15, *chance.choices(steps, k=200_000)]))
    position = place("b.000001", 4).with_prepared({"x": keys})
    text = json.dumps(position.to_json())
    assert len(text) < 120_000
    assert Position.from_json(json.loads(text)) == position
    for damaged in ("%", "eJwz", "AAAA"):
        with pytest.raises(ValueError):  # noqa: PT011
            Position.from_json({**position.to_json(), "prepared": {"x": damaged}})


def test_many_keys_of_a_prepared_transaction_take_little_room() -> None:
    position = place("b.000001", 4).with_prepared({"x": tuple(range(1, 100_001))})
    assert len(json.dumps(position.to_json())) < 300


def test_a_new_place_has_nothing_of_the_old_one_but_its_server() -> None:
    old = place("b.000001", 4, f"{A}:1").inside("group", 5)
    assert old.at("b.000002", 8, f"{A}:1-2") == place("b.000002", 8, f"{A}:1-2")
    assert old.with_prepared({}) is old
    prepared = old.with_prepared({"x": (1,)})
    assert prepared.with_prepared({}).prepared == {}


@pytest.mark.parametrize("change", [{"flavor": "oracle"}, {"offset": "x"}, {"gtids": ...}])
def test_what_is_not_a_position_is_refused(change: dict[str, object]) -> None:
    value = {**place("b.000001", 4).to_json(), **change}
    if change.get("gtids") is ...:
        del value["gtids"]
    with pytest.raises((ValueError, KeyError)):
        Position.from_json(value)


def test_file_numbers() -> None:
    assert file_number("binlog.000042") == 42
    assert file_number("my.host-bin.1000001") == 1_000_001
    assert file_number("nothing") == -1


def test_a_position_behind_the_end_of_the_log_is_of_other_logs() -> None:
    place = Position("mysql", A, "binlog.000003", 500, f"{A}:1-9")
    assert place.is_beyond(place.at("binlog.000001", 9000, f"{A}:1-50"))
    assert place.is_beyond(place.at("binlog.000003", 499, None))
    assert not place.is_beyond(place)
    assert not place.is_beyond(place.at("binlog.000004", 4, None))
    assert not place.is_beyond(place.at("other.000001", 4, None))
    assert not place.is_beyond(Position("mysql", B, "binlog.000001", 4))
    assert not place.is_beyond(Position("mariadb", A, "binlog.000001", 4))


def test_transactions_that_a_server_never_executed() -> None:
    place = Position("mysql", A, "binlog.000001", 500, f"{A}:1-50")
    assert place.is_beyond(Position("mysql", B, "binlog.000009", 500, f"{A}:1-49,{B}:1-9"))
    assert place.is_beyond(Position("mysql", B, "binlog.000009", 500, ""))
    assert not place.is_beyond(Position("mysql", B, "binlog.000001", 4, f"{A}:1-50"))


@pytest.mark.parametrize(
    ("flavor", "gtids", "there", "missing"),
    [
        ("mysql", f"{A}:1-50", f"{A}:1-50", 0),
        ("mysql", f"{A}:1-50", f"{A}:1-40,{B}:1-3", 10),
        ("mysql", f"{A}:1-50,{B}:1-3", f"{A}:1-50", 3),
        ("mysql", f"{A}:1-50:tag:1-3", f"{A}:1-50", 3),
        ("mysql", f"{A}:1-50", f"{B}:1-40", 0),  # no replica of ours
        ("mysql", f"{A}:1-50", "", 0),
        ("mysql", f"{A}:1-50", None, 0),
        ("mysql", None, f"{A}:1-40", 0),
        ("mariadb", "0-1-50,7-1-9", "0-1-40,7-1-8", 11),
        ("mariadb", "0-1-50", "0-1-60", 0),
        ("mariadb", "0-1-50", "0-2-40", 0),  # wrote by itself: it comes to no more of them
        ("mariadb", "0-1-50,7-1-9", "0-1-50", 0),  # what it has applied stands in no log of its own
    ],
)
def test_what_a_replica_still_lacks(
    flavor: Flavor, gtids: str | None, there: str | None, missing: int
) -> None:
    place = Position(flavor, A, "binlog.000001", 500, gtids)
    assert place.missing(Position(flavor, B, "binlog.000009", 4, there)) == missing
    # What the same server does not know any more was reset, or is a restored copy.
    assert place.missing(Position(flavor, A, "binlog.000009", 4, there)) == 0


@pytest.mark.parametrize(
    "change", [{"gtids": "zzz"}, {"offset": -7}, {"gtids": 5}, {"flavor": "oracle"}]
)
def test_a_position_that_is_none(change: dict[str, Any]) -> None:
    stored = Position("mysql", A, "binlog.000001", 500, f"{A}:1-50").to_json() | change
    with pytest.raises((ValueError, AttributeError)):
        Position.from_json(stored)


@pytest.mark.parametrize(
    ("flavor", "gtids", "said"),
    [
        ("mysql", "", "to the very beginning: before every transaction (an empty set of GTIDs)"),
        ("mysql", " , ", "to the very beginning: before every transaction (an empty set of GTIDs)"),
        ("mysql", f"{A.upper()}:1-5,\n{A}:6", f"behind {A}:1-6"),
        ("mariadb", "", "to the very beginning: before every transaction (an empty set of GTIDs)"),
        ("mariadb", "0-1-7, 3-1-4", "behind 0-1-7,3-1-4"),
    ],
)
def test_a_position_by_gtids_is_not_said_to_be_where_the_log_ends(
    flavor: Flavor, gtids: str, said: str
) -> None:
    end = Position(flavor, "s", "binlog.000001", 461546, f"{A}:1-9" if flavor == "mysql" else "")
    assert _place(_wanted(end, False, gtids, None, None), by_gtids=True) == said
    assert _place(end, by_gtids=False).startswith("to binlog.000001:461546")


def test_what_is_no_set_of_gtids_is_refused_with_one_line() -> None:
    end = Position("mysql", "s", "binlog.000001", 461546, f"{A}:1-12")
    with pytest.raises(ConfigError, match=r"^--gtids: tag 'x' of a GTID set has no interval$"):
        _wanted(end, False, f"{A}:1-12:x", None, None)
