"""The decoder on logs made by hand: what is given out, when, and with which position."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from typing import Any

import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from cdc_relay.binlog.decoder import FULL, NOTHING, PAYLOAD, REREAD, STATUS
from cdc_relay.binlog.packets import open_payload
from cdc_relay.binlog.rows import INTEGER, Column, Layout, UnreadRow, decode_rows
from cdc_relay.errors import DecodeError, PositionLostError
from cdc_relay.outbox import OutboxEvent
from tests.support.binlog import SID, Log, images, query_body
from tests.support.corpus import FLAVORS, Corpus, packets

UUID = "00010203-0405-0607-0809-0a0b0c0d0e0f"


def place(log: Log) -> tuple[str, int]:
    return log.decoder.commit_file, int(log.decoder.commit_offset)


# --- rows and boundaries --------------------------------------------------------------------------


def test_nothing_is_given_before_the_commit() -> None:
    log = Log()
    start = place(log)
    log.gtid(1)
    log.query("BEGIN")
    log.table_map()
    log.write((1, "a"), (2, "b"))
    log.write((3, "c"))
    assert log.names == []
    assert place(log) == start
    assert log.decoder.gtid_text() == ""
    log.xid(time=1_700_000_000)
    assert log.names == ["a", "b", "c"]
    assert place(log) == ("binlog.000001", log.offset)
    assert log.decoder.gtid_text() == f"{UUID}:1"
    assert log.decoder.time() == 1_700_000_000_000_000


def test_an_event_is_the_row() -> None:
    log = Log()
    log.transaction(1, (2**64 - 1, "größe"))
    log.names  # noqa: B018
    assert log.rows == [
        OutboxEvent(2**64 - 1, f"e{2**64 - 1}", "order", "größe", "MADE", b"{}", None, None)
    ]


@pytest.mark.parametrize("flavor", FLAVORS)
def test_the_position_only_ever_stands_between_transactions(flavor: str) -> None:
    """Over a whole recorded log, event by event."""
    corpus = Corpus.load(flavor)
    decoder = corpus.decoder()
    before = (decoder.commit_file, int(decoder.commit_offset))
    # What may follow a boundary: the beginning of a group, or what stands between groups.
    between = {33, 34, 42, 162, 4, 15, 35, 3, 163, 161}
    for event, following in zip(
        corpus.events, [*corpus.events[1:], b"\0" * 4 + b"\x04"], strict=True
    ):
        if event[4] == 40:
            feed_payload(decoder, packets([event]))
        else:
            decoder.feed(packets([event]), 0, len(event) + 5)
            while decoder.deciding:
                decoder.feed(b"", 0, 0)
        after = (decoder.commit_file, int(decoder.commit_offset))
        if after != before:
            assert following[4] in between, (event[4], following[4])
            assert after[1] == int.from_bytes(event[13:17], "little") or event[4] == 4
        before = after


def feed_payload(decoder: object, data: bytes) -> None:
    place, unpacked = open_payload(io.BytesIO(data[4:]))
    decoder.begin_payload(place)  # type: ignore[attr-defined]
    inner = unpacked.read(1 << 20)
    assert decoder.inner(inner, 0, len(inner)) == len(inner)  # type: ignore[attr-defined]
    decoder.end_payload()  # type: ignore[attr-defined]


def test_a_full_batch_stops_at_a_boundary() -> None:
    log = Log(batch_rows=3)
    assert log.transaction(1, (1, "a"), (2, "b")) == NOTHING
    assert log.transaction(2, (3, "c"), (4, "d")) == FULL
    assert log.names == ["a", "b", "c", "d"]
    assert log.transaction(3, (5, "e")) == NOTHING


def test_other_tables_and_other_operations_are_passed_over() -> None:
    log = Log()
    log.gtid(1)
    log.query("BEGIN")
    log.table_map("outbox_event2", 5)
    log.write((1, "other"), number=5)
    log.table_map("outbox_even", 6)
    log.write((1, "other"), number=6)
    log.write((1, "never mapped"), number=99)
    log.table_map()
    log.write((1, "update"), kind=31)
    log.write((1, "delete"), kind=32)
    log.add(39, b"partial")
    # The same number for another table: it is not ours any more.
    log.table_map("something", 77)
    log.write((1, "other"))
    log.xid()
    assert log.names == []
    assert log.shapes.asked == 1


@pytest.mark.parametrize(
    "before",
    [
        " \n\t",
        "/* ApplicationName=Some Tool */ ",
        "-- changeset 7\n",
        "# changeset 7\n-- and more\n /* x */",
        "/*!50001 ",
        "/*M!100100 ",
    ],
)
def test_a_change_of_the_table_behind_a_comment(before: str) -> None:
    log = Log()
    log.transaction(1, (1, "a"))
    log.gtid(2)
    log.query(f"{before}ALTER TABLE outbox_event MODIFY x INT")
    log.gtid(3)
    log.query(f"{before}GRANT SELECT ON outbox_event TO somebody")
    assert log.decoder.notices == {"ddl": 1}
    log.transaction(4, (2, "b"))
    assert log.shapes.asked == 2


def test_version_one_row_events() -> None:
    log = Log()
    log.gtid(1)
    log.query("BEGIN")
    log.table_map()
    log.write((1, "a"), kind=23)
    log.query("COMMIT")
    assert log.names == ["a"]


def test_a_table_map_survives_neither_a_new_file_nor_a_change_of_the_table() -> None:
    log = Log()
    log.transaction(1, (1, "a"))
    log.gtid(2)
    log.query("ALTER TABLE Outbox_Event ADD COLUMN x INT")
    assert log.decoder.notices == {"ddl": 1}
    log.transaction(3, (2, "b"))
    assert log.shapes.asked == 2
    log.gtid(4)
    log.query("ALTER TABLE another ADD COLUMN x INT")
    log.transaction(5, (3, "c"))
    assert log.shapes.asked == 2
    assert log.names == ["a", "b", "c"]


# --- ends of transactions -------------------------------------------------------------------------


def test_a_text_commit_and_a_rollback() -> None:
    log = Log()
    for number, end in enumerate(("COMMIT", "ROLLBACK", "rollback", "COMMIT"), 1):
        log.gtid(number)
        log.query("BEGIN")
        log.table_map()
        log.write((number, f"k{number}"))
        log.query(end)
        assert place(log) == ("binlog.000001", log.offset)
    assert log.names == ["k1", "k4"]
    assert log.decoder.gtid_text() == f"{UUID}:1-4"


def test_savepoints_in_every_spelling() -> None:
    log = Log()
    log.gtid(1)
    log.query("BEGIN")
    log.table_map()
    log.write((1, "kept"))
    log.query("SAVEPOINT `s`")
    log.write((2, "gone"))
    log.query("SAVEPOINT `t`")
    log.write((3, "gone"))
    log.query("ROLLBACK TO `S`")
    log.write((4, "kept-too"))
    log.query("ROLLBACK TO SAVEPOINT `s`")
    log.write((5, "kept-in-the-end"))
    log.query("SAVEPOINT `Ä b`".encode("latin-1"))
    log.write((6, "gone"))
    log.query("ROLLBACK TO `ä b`".encode("latin-1"))
    log.xid()
    assert log.names == ["kept", "kept-in-the-end"]


def test_an_unknown_savepoint_leaves_the_rows_to_the_table() -> None:
    """The table knows which of them were committed."""
    log = Log()
    log.gtid(1)
    log.query("BEGIN")
    log.table_map()
    log.write((1, "a"), (2, "b"))
    log.query("ROLLBACK TO `where`")
    log.write((3, "c"))
    log.xid()
    assert log.names == ["#1", "#2", "c"]


def test_a_transaction_that_does_not_end_is_an_error() -> None:
    """Rows that belong to nothing would be lost without a word."""
    for again in ("gtid", "BEGIN"):
        log = Log()
        log.gtid(1)
        log.query("BEGIN")
        log.table_map()
        log.write((1, "a"))
        with pytest.raises(DecodeError, match=r"binlog\.000001:\d+.*has ended"):
            log.gtid(2) if again == "gtid" else log.query(again)


def test_a_crash_of_the_server_ends_a_transaction_without_commit() -> None:
    """Its rows stand at the end of the file; the next file begins with its description."""
    log = Log()
    log.transaction(1, (1, "a"))
    log.gtid(2)
    log.query("BEGIN")
    log.table_map()
    log.write((2, "never"))
    log.rotate("binlog.000002", made_up=True)
    log.description(made_up=False)
    assert place(log) == ("binlog.000002", 4)
    assert log.decoder.gtid_text() == f"{UUID}:1"
    log.transaction(2, (3, "b"))
    assert log.names == ["a", "b"]
    assert log.decoder.gtid_text() == f"{UUID}:1-2"
    assert place(log) == ("binlog.000002", log.offset)


# --- statements -----------------------------------------------------------------------------------


def test_fields_of_a_statement_that_nobody_knows() -> None:
    """A new version of a server adds one to every BEGIN; the text is found by its length."""
    log = Log()
    for number, status in enumerate((b"\x80\1\2\3", b"\xff" * 200), 1):
        log.gtid(number)
        log.query("BEGIN", status)
        log.table_map()
        log.write((number, f"k{number}"))
        log.query("COMMIT", status)
        log.gtid(number + 10)
        log.query("CREATE TABLE neighbour (id INT)", status)
    assert log.names == ["k1", "k2"]
    assert log.decoder.gtid_text() == f"{UUID}:1-2:11-12"


def test_rows_written_as_statements_are_noticed() -> None:
    log = Log()
    for text in (
        "INSERT INTO outbox_event VALUES (1)",
        "/* x */ insert into OUTBOX_EVENT select 1",
        "REPLACE INTO `shop`.`outbox_event` VALUES (2)",
        "INSERT INTO another VALUES ('x')",
        "UPDATE outbox_event SET status = 1",
    ):
        log.gtid(1)
        log.query("BEGIN")
        log.query(text)
        log.xid()
    assert log.decoder.notices["statement"] >= 2
    assert log.names == []


# --- XA -------------------------------------------------------------------------------------------


def prepare(
    log: Log, number: int, xid: str, *rows: tuple[int, str], one_phase: bool = False
) -> None:
    log.gtid(number)
    log.query(f"XA START X'{xid.encode().hex()}',X'',1")
    log.table_map()
    log.write(*rows)
    log.query(f"XA END X'{xid.encode().hex()}',X'',1")
    sizes = (1).to_bytes(4, "little") + len(xid).to_bytes(4, "little") + bytes(4)
    log.add(38, bytes([one_phase]) + sizes + xid.encode())


def decide(log: Log, number: int, verb: str, xid: str) -> None:
    log.gtid(number)
    log.query(f"XA {verb} X'{xid.encode().hex()}',X'',1")


def test_prepared_transactions() -> None:
    log = Log()
    prepare(log, 1, "x", (1, "a"), (2, "b"))
    prepare(log, 2, "y", (3, "c"))
    prepare(log, 3, "z", (4, "d"), one_phase=True)
    assert log.names == ["d"]
    assert log.decoder.prepared == {"78::1": (1, 2), "79::1": (3,)}
    decide(log, 4, "ROLLBACK", "y")
    decide(log, 5, "COMMIT", "x")
    decide(log, 6, "COMMIT", "unknown")
    decide(log, 7, "ROLLBACK", "unknown")
    assert log.names == ["d", "#1", "#2"]
    assert log.decoder.prepared == {}
    assert log.decoder.notices == {"xa_unknown": 1}
    assert log.decoder.gtid_text() == f"{UUID}:1-7"


def test_a_large_prepared_transaction_is_held_as_keys() -> None:
    log = Log(hold_bytes=200)
    rows = [(number, "k" * 60) for number in range(1, 101)]
    log.gtid(1)
    log.query("XA START X'78',X'',1")
    log.table_map()
    for row in rows:
        assert log.write(row) == NOTHING
    assert all(isinstance(row, UnreadRow) for row in log.decoder._open[:90])
    log.query("XA END X'78',X'',1")
    log.add(38, b"\0" + (1).to_bytes(4, "little") * 2 + bytes(4) + b"x")
    assert log.decoder.prepared == {"78::1": tuple(range(1, 101))}


@pytest.mark.parametrize("flavor", FLAVORS)
def test_keys_of_a_prepared_transaction_are_given_out_by_batches(flavor: str) -> None:
    """Each batch with a place inside the transaction, what was committed before by itself."""
    mysql = flavor == "mysql"

    def decide(log: Log) -> None:
        assert (log.gtid if mysql else log.maria_gtid)(3) == NOTHING
        event = log.event(2, query_body("XA COMMIT X'78',X'',1"))
        data = packets([event])
        assert log.decoder.feed(data, 0, len(data)) == len(data)
        assert log.decoder.stopped == FULL
        assert log.decoder.deciding

    def parts(log: Log) -> list[tuple[list[str], int, str]]:
        """The batches: rows, place inside, transactions before."""
        out = []
        while log.decoder.deciding:
            assert log.decoder.feed(b"", 0, 0) == 0
            assert log.decoder.stopped == FULL
            names = [f"#{row.id}" for row in log.decoder.take()]
            out.append((names, int(log.decoder.given), str(log.decoder.gtid_text())))
        return out

    log = Log(batch_rows=2, mariadb=not mysql)
    keys = (1, 3, 2, 9, 5)
    log.decoder.prepared = {"78::1": keys, "79::1": (4,)}
    (log.gtid if mysql else log.maria_gtid)(2)
    log.query("BEGIN")
    log.table_map()
    log.write((7, "a"))
    log.xid()
    before = log.decoder.gtid_text()
    decide(log)
    assert log.names == ["a"]
    assert log.decoder.prepared == {"78::1": keys, "79::1": (4,)}
    group = log.decoder.open_group()
    after = f"{UUID}:2-3" if mysql else "0-1-3"
    assert parts(log) == [(["#1", "#3"], 2, before), (["#2", "#9"], 4, before), (["#5"], 0, after)]
    assert log.decoder.prepared == {"79::1": (4,)}

    # Three of them were done when the process died.
    again = Log(batch_rows=2, mariadb=not mysql)
    again.decoder.prepared = {"78::1": keys}
    again.decoder.expect(group, 3, None)
    decide(again)
    assert again.names == []
    assert [names for names, _, _ in parts(again)] == [["#9", "#5"]]
    assert again.decoder.prepared == {}


def test_a_large_xa_transaction_of_one_phase_is_read_again() -> None:
    """Its outcome stands in its own group: its rows need not be read back."""

    def play(log: Log) -> int:
        log.gtid(1)
        log.query("XA START X'78',X'',1")
        log.table_map()
        for number in range(1, 8):
            log.write((number, f"k{number}"))
        log.query("XA END X'78',X'',1")
        return log.add(38, b"\1" + (1).to_bytes(4, "little") * 2 + bytes(4) + b"x")

    log = Log(hold_bytes=100)
    assert play(log) == REREAD
    assert log.names == []
    again = Log(hold_bytes=100)
    again.decoder.expect(log.decoder.open_group(), 2, list(log.decoder.dropped))
    play(again)
    assert again.names == [f"k{number}" for number in range(3, 8)]
    assert again.decoder.gtid_text() == f"{UUID}:1"


# --- transactions too large to hold ---------------------------------------------------------------


def _walk(log: Log, steps: Sequence[str]) -> tuple[int, list[str]]:
    """A transaction of inserts, savepoints and rollbacks to them; how its end stopped the decoder,
    and what the server keeps of it."""
    kept: list[str] = []
    savepoints: list[tuple[str, int]] = []
    log.gtid(1)
    log.query("BEGIN")
    log.table_map()
    for number, step in enumerate(steps, 1):
        verb, _, name = step.partition(" ")
        here = [place for place, (one, _) in enumerate(savepoints) if one == name]
        if verb == "insert":
            log.write((number, f"k{number}"))
            kept.append(f"k{number}")
        elif verb == "save":
            log.query(f"SAVEPOINT `{name}`")
            for place in here:
                del savepoints[place]
            savepoints.append((name, len(kept)))
        elif here:
            log.query(f"ROLLBACK TO `{name}`")
            del savepoints[here[0] + 1 :]
            del kept[savepoints[-1][1] :]
    return log.xid(), kept


@pytest.mark.parametrize("hold", [60, 200, 10_000])
def test_an_unknown_savepoint_in_a_transaction_that_is_read_twice(hold: int) -> None:
    """The table knows, in whatever order that and the end of memory come."""

    def play(log: Log) -> int:
        log.gtid(1)
        log.query("BEGIN")
        log.table_map()
        log.write((1, "a"))
        log.write((2, "b"))
        log.query("ROLLBACK TO `where`")
        for number in range(3, 7):
            log.write((number, f"k{number}"))
        return log.xid()

    log = Log(hold_bytes=hold)
    if play(log) == REREAD:
        dropped, doubted = list(log.decoder.dropped), int(log.decoder.doubted)
        group, log = log.decoder.open_group(), Log(hold_bytes=hold)
        log.decoder.expect(group, 0, dropped, doubted)
        play(log)
    assert log.names == ["#1", "#2", "k3", "k4", "k5", "k6"]


@given(
    steps=st.lists(
        st.sampled_from(["insert", "insert", "insert", "save a", "save b", "back a", "back b"]),
        max_size=40,
    ),
    hold=st.integers(1, 1500),
    before=st.integers(0, 2),
)
@example(["insert", "save a", "insert", "back a", *["insert"] * 5], 260, 0)
@example(
    ["insert", "save a", "insert", "back a", *["insert"] * 5, "save a", "insert", "back a"], 260, 0
)
def test_what_was_rolled_back_is_not_given_however_large_the_transaction(
    steps: list[str], hold: int, before: int
) -> None:
    """In whatever order rollbacks come and memory ends, in one reading or two."""
    log = Log(hold_bytes=hold)
    for number in range(before):  # what it left behind is none of the next one's
        log.gtid(number + 5)
        log.query("BEGIN")
        log.table_map()
        log.query("SAVEPOINT `a`")
        log.write((1, "gone"))
        log.query("ROLLBACK TO `a`")
        log.query("ROLLBACK")
    stopped, kept = _walk(log, steps)
    names = log.names
    if stopped == REREAD:
        assert names == []
        again = Log(hold_bytes=hold)
        again.decoder.expect(log.decoder.open_group(), 0, list(log.decoder.dropped))
        _walk(again, steps)
        names = again.names
    assert names == kept


def test_a_transaction_too_large_to_hold_is_read_again() -> None:
    def play(log: Log) -> int:
        log.gtid(1)
        log.query("BEGIN")
        log.table_map()
        for number in range(1, 6):
            log.write((number, f"k{number}"))
        log.query("SAVEPOINT `s`")
        for number in range(6, 11):
            log.write((number, f"k{number}"))
        log.query("ROLLBACK TO `s`")
        log.write((11, "k11"))
        return log.xid()

    first = Log(hold_bytes=100)
    assert play(first) == REREAD
    assert first.names == []
    group, dropped = first.decoder.open_group(), list(first.decoder.dropped)
    assert group == f"{SID.hex()}::1"
    assert dropped == [(5, 10)]
    assert place(first) == ("binlog.000001", 4)

    second = Log(hold_bytes=100)
    second.decoder.expect(group, 0, dropped)
    play(second)
    assert second.names == ["k1", "k2", "k3", "k4", "k5", "k11"]
    assert second.decoder.gtid_text() == f"{UUID}:1"

    # Three of them were done when the process died: then it is walked through once more first.
    third = Log(hold_bytes=100)
    third.decoder.expect(group, 3, None)
    assert play(third) == REREAD
    fourth = Log(hold_bytes=100)
    fourth.decoder.expect(group, 3, list(third.decoder.dropped))
    play(fourth)
    assert fourth.names == ["k4", "k5", "k11"]

    # Something else comes instead: it is read as usual.
    other = Log(hold_bytes=10_000)
    other.decoder.expect(group, 3, dropped)
    other.transaction(2, (1, "a"), (2, "b"), (3, "c"), (4, "d"))
    assert other.names == ["a", "b", "c", "d"]


@pytest.mark.parametrize("present", [0xFF, 0b11])
def test_many_rows_are_too_large_to_hold_however_small(present: int) -> None:
    """Rows that are read back (an image that lacks columns) as well: the log does not tell what
    they hold."""

    def play(log: Log) -> tuple[list[int], int]:
        """How many rows came after each event, and how the end stopped the decoder."""
        log.gtid(1)
        log.query("BEGIN")
        log.table_map()
        sizes = []
        for first in range(1, 31, 3):
            log.write(*[(number, "k") for number in range(first, first + 3)], present=present)
            sizes.append(len(log.decoder.take()))
        return sizes, log.xid()

    log = Log(batch_rows=2)
    assert play(log) == ([0] * 10, REREAD)
    again = Log(batch_rows=2)
    again.decoder.expect(log.decoder.open_group(), 4, [])
    assert play(again)[0] == [0, 2] + [3] * 8
    few = Log(batch_rows=4)
    assert play(few) == ([0] * 10, FULL)
    assert len(few.decoder.take()) == 30


def test_a_large_transaction_that_is_rolled_back_costs_no_second_reading() -> None:
    log = Log(hold_bytes=100)
    log.gtid(1)
    log.query("BEGIN")
    log.table_map()
    for number in range(1, 20):
        log.write((number, f"k{number}"))
    assert log.query("ROLLBACK") == NOTHING
    log.transaction(2, (30, "a"))
    assert log.names == ["a"]
    assert log.decoder.gtid_text() == f"{UUID}:1-2"


# --- GTIDs ----------------------------------------------------------------------------------------


def varlen(value: int) -> bytes:
    """Up to 14 bits: the trailing ones of the first byte count the bytes that follow."""
    return bytes([value << 1]) if value < 64 else (value << 2 | 1).to_bytes(2, "little")


def tagged(number: int, tag: str, extra: bytes = b"") -> bytes:
    fields = varlen(0) + varlen(1)
    fields += varlen(1) + b"".join(varlen(byte) for byte in SID)
    fields += varlen(2) + varlen(number << 1)
    fields += varlen(3) + varlen(len(tag)) + tag.encode() + extra
    head = varlen(1)
    size = len(fields) + 3
    return head + varlen(size) + varlen(8) + fields


def test_tagged_gtids() -> None:
    log = Log()
    log.add(42, tagged(1, "mine"))
    log.query("BEGIN")
    log.table_map()
    log.write((1, "a"))
    log.xid()
    log.add(42, tagged(2, "mine"))
    log.query("CREATE TABLE t (id INT)")
    log.transaction(9, (2, "b"))
    log.add(42, tagged(1, "other", varlen(9) + varlen(77)))
    log.query("BEGIN")
    log.xid()
    assert log.names == ["a", "b"]
    assert log.decoder.gtid_text() == f"{UUID}:9:mine:1-2:other:1"


def test_a_tagged_gtid_of_a_version_nobody_knows() -> None:
    log = Log()
    with pytest.raises(DecodeError, match="version 2"):
        log.add(42, varlen(2) + tagged(1, "t")[1:])
    with pytest.raises(DecodeError, match="without a number"):
        Log().add(42, varlen(1) + varlen(5) + varlen(0) + varlen(0) + varlen(1))


def test_mariadb_gtids() -> None:
    log = Log(mariadb=True)
    log.maria_gtid(5)
    log.table_map()
    log.write((1, "a"), kind=23)
    log.xid()
    log.maria_gtid(6, flags=1)  # standalone: the statement is the transaction
    log.query("CREATE TABLE t (id INT)")
    log.maria_gtid(9, domain=7)
    log.table_map()
    log.write((2, "b"), kind=23)
    log.query("ROLLBACK")
    assert log.names == ["a"]
    assert log.decoder.gtid_text() == "0-1-6,7-1-9"


def test_a_server_without_gtids_has_none() -> None:
    log = Log(gtids=False)
    log.gtid(0, kind=34)
    log.query("BEGIN")
    assert log.decoder.open_group() == "binlog.000001:4"
    log.table_map()
    log.write((1, "a"))
    log.xid()
    assert log.names == ["a"]
    assert log.decoder.gtid_text() is None


# --- places ---------------------------------------------------------------------------------------


def test_places_beyond_32_bits() -> None:
    """Headers have 32 bits; the offset goes on."""
    log = Log(start=2**32 - 300)
    for number in range(1, 8):
        log.transaction(number, (number, "k"))
        assert place(log) == ("binlog.000001", log.offset)
    assert log.offset > 2**32
    log = Log(start=5 * 2**32 - 10)
    log.transaction(1, (1, "k"))
    assert place(log) == ("binlog.000001", log.offset)
    assert log.offset > 5 * 2**32


def test_rotation() -> None:
    log = Log()
    log.transaction(1, (1, "a"))
    log.rotate("binlog.000002")
    assert place(log) == ("binlog.000002", 4)
    log.rotate("binlog.000002", made_up=True)
    log.checksums = False
    log.description(made_up=False)
    log.transaction(2, (2, "b"))
    assert place(log) == ("binlog.000002", log.offset)
    log.rotate("binlog.000003")
    log.rotate("binlog.000003", made_up=True)
    log.checksums = True
    log.description(made_up=False)
    log.transaction(3, (3, "c"))
    assert log.names == ["a", "b", "c"]
    assert place(log) == ("binlog.000003", log.offset)


def test_another_servers_files_are_known_from_its_first_rotation() -> None:
    """They may have lower numbers; a boundary is never the old file at the new server."""
    log = Log(hold_bytes=100)
    log.decoder.begin("", 0)
    log.rotate("binlog.000001", made_up=True)
    log.description(made_up=False)
    log.gtid(1)
    log.query("BEGIN")
    log.table_map()
    for number in range(5):
        log.write((number, "k" * 60))
    assert log.xid() == REREAD
    assert place(log) == ("binlog.000001", 4)


def test_a_made_up_rotation_moves_only_to_the_head_of_a_later_file() -> None:
    """The server sends one at the start of a dump, with whatever offset it was asked for."""
    log = Log()
    log.transaction(1, (1, "a"))
    before = place(log)
    log.rotate("binlog.000001", 4711, made_up=True)
    assert place(log) == before
    # With a checksum, too: then its name is not four bytes longer.
    body = (4).to_bytes(8, "little") + b"binlog.000009"
    log.add(4, body, flags=0x20, place=0)
    assert log.decoder.file == "binlog.000009"
    # The end of a file that has no rotate event of its own: a crash of the server.
    assert place(log) == ("binlog.000009", 4)
    log.add(4, (4711).to_bytes(8, "little") + b"binlog.000010", flags=0x20, place=0)
    assert place(log) == ("binlog.000009", 4)
    for name in (b"", b"binlog", b"binlog.0\xff", b"\0.000001"):
        with pytest.raises(DecodeError):
            log.add(4, (4).to_bytes(8, "little") + name, flags=0x20, place=0)


def test_heartbeats_move_the_place_and_not_the_position() -> None:
    log = Log()
    log.transaction(1, (1, "a"))
    before = place(log)
    log.add(27, b"binlog.000001", place=log.offset + 5000)
    log.add(41, b"x", place=0)
    assert log.decoder.where() == f"binlog.000001:{log.offset + 5000}"
    assert place(log) == before


# --- what nobody knows ----------------------------------------------------------------------------


def test_unknown_events() -> None:
    log = Log()
    log.gtid(1)
    log.query("BEGIN")
    log.add(99, b"new")
    log.add(98, b"new and ignorable", flags=0x80)
    log.add(18, b"LOAD DATA")
    log.table_map()
    log.write((1, "a"))
    log.xid()
    assert log.names == ["a"]
    assert log.decoder.notices == {"event type 99": 1, "statement": 1}


def test_an_incident_is_a_lost_position() -> None:
    """Reading it again would end there again: what the log has lost is in the table."""
    with pytest.raises(PositionLostError, match=r"binlog\.000001:\d+.*INCIDENT"):
        Log().add(26, b"\1\0")


def test_a_checksum_of_a_kind_nobody_knows() -> None:
    log = Log()
    with pytest.raises(DecodeError, match="checksum algorithm 7"):
        log.feed(log.event(15, b"\4\0" + bytes(54) + b"\x13\7"))


def test_a_row_whose_type_is_damaged_is_not_passed_over() -> None:
    for kind in range(256):
        log = Log()
        log.gtid(1)
        log.query("BEGIN")
        log.table_map()
        original = log.event

        def event(number: int, body: bytes, to: int = kind, **options: Any) -> bytes:
            made = original(number, body, **options)  # noqa: B023
            return made[:4] + bytes([to]) + made[5:]

        log.event = event  # type: ignore[method-assign]
        if kind == 30:
            log.write((1, "a"))
            continue
        if kind == 40:
            continue  # a compressed transaction, which the reader takes apart and sums up itself
        with pytest.raises(DecodeError):
            log.write((1, "a"))
        assert log.names == []


@pytest.mark.parametrize("kind", [2, 16, 19, 30, 33, 4, 38, 15, 32])
def test_damage_is_told_by_the_checksum(kind: int) -> None:
    """Each event that decides something, and one that is passed over."""
    log = Log()
    log.gtid(1)
    log.query("BEGIN")
    log.table_map()
    seen: list[bytes] = []
    original = log.event

    def event(number: int, body: bytes, **options: object) -> bytes:
        made = original(number, body, **options)  # type: ignore[arg-type]
        if number != kind:
            return made
        seen.append(made)
        return made[:-1] + bytes([made[-1] ^ 1])

    log.event = event  # type: ignore[method-assign, assignment]

    def go_on() -> None:
        if kind == 38:
            prepare(log, 2, "x")
        log.write((1, "a"))
        log.add(32, bytes(20))
        log.xid()
        log.gtid(2)
        log.query("BEGIN")
        log.table_map()
        log.rotate("binlog.000002")
        log.description()

    with pytest.raises(DecodeError, match=r"binlog\.00000\d:\d+.*checksum does not match"):
        go_on()
    assert seen
    assert log.names in ([], ["a"])


def test_packets_that_are_no_events() -> None:
    log = Log()
    assert log.decoder.feed(b"\1\0\0\0\xfe", 0, 5) == 0
    assert log.decoder.stopped == STATUS
    with pytest.raises(DecodeError, match="empty packet"):
        log.decoder.feed(b"\0\0\0\0", 0, 4)
    with pytest.raises(DecodeError, match="says"):
        log.feed(log.event(16, bytes(8)) + b"x")
    with pytest.raises(DecodeError, match="an event of"):
        log.feed(b"short")


# --- images ---------------------------------------------------------------------------------------


def test_an_image_that_lacks_columns_is_read_back() -> None:
    log = Log()
    log.gtid(1)
    log.query("BEGIN")
    log.table_map()
    log.write((1, "whole"))
    log.write((2, "without payload"), present=0b11011111)
    log.write((3, "id and type"), present=0b00000101)
    log.write((4, "whole"))
    log.xid()
    assert log.names == ["whole", "#2", "#3", "whole"]
    assert log.rows[1] == UnreadRow(2, "the row image lacks payload")
    assert log.rows[2] == UnreadRow(
        3,
        "the row image lacks event_id, aggregate_id, event_type, payload, headers, created_at",
    )


def test_an_image_without_an_id_is_an_error() -> None:
    log = Log()
    log.gtid(1)
    log.query("BEGIN")
    log.table_map()
    with pytest.raises(DecodeError, match="no id"):
        log.write((1, "a"), present=0b11111110)


def test_bytes_that_are_not_utf8_are_read_back() -> None:
    log = Log()
    log.gtid(1)
    log.query("BEGIN")
    log.table_map()
    data = images([(1, "good")]) + images([(2, "bad?")]).replace(b"bad?", b"bad\xe9")
    log.add(30, (77).to_bytes(6, "little") + b"\1\0\2\0\x08\xff" + data)
    log.xid()
    assert log.names == ["good", "#2"]
    assert isinstance(log.rows[1], UnreadRow)
    assert log.rows[1].reason == "aggregate_id is not UTF-8: unexpected end of data"


# --- compressed -----------------------------------------------------------------------------------


def test_compressed_rows_of_mariadb() -> None:
    log = Log(mariadb=True)
    rows = images([(1, "a"), (2, "b")])
    packed = bytes([0x81, len(rows)]) + zlib.compress(rows)
    head = (77).to_bytes(6, "little") + b"\1\0"
    for number, (kind, extra) in enumerate(((166, b""), (169, b"\2\0"))):
        log.maria_gtid(number + 1)
        log.table_map()
        log.add(kind, head + extra + b"\x08\xff" + packed)
        log.xid()
    assert log.names == ["a", "b", "a", "b"]
    log.maria_gtid(9)
    log.table_map()
    for damaged in (b"\x01" + packed[1:], bytes([0x81, 5]) + packed[2:], packed[:-4], packed[:2]):
        with pytest.raises(DecodeError):
            log.add(166, head + b"\x08\xff" + damaged)


def test_compressed_statements_of_mariadb() -> None:
    log = Log(mariadb=True)
    log.maria_gtid(1)
    log.table_map()
    log.write((1, "a"), kind=23)
    text = b"ROLLBACK"
    packed = bytes([0x81, len(text)]) + zlib.compress(text)
    head = bytes(8) + b"\4" + bytes(2) + bytes(2) + b"shop\0"
    log.add(165, head + packed)
    log.maria_gtid(2)
    assert log.names == []


def payload(log: Log, inner: bytes, compression: int = 0, size: int | None = None) -> bytes:
    packed = zstandard.ZstdCompressor().compress(inner) if compression == 0 else inner
    size = len(packed) if size is None else size
    fields = (
        b"\2\1" + bytes([compression])
        if compression < 251
        else b"\2\3\xfc" + bytes([compression, 0])
    )
    fields += b"\3\3\xfc" + len(inner).to_bytes(2, "little")
    fields += b"\1\3\xfc" + size.to_bytes(2, "little") + b"\0"
    return log.event(40, fields + packed)


def inner_events(log: Log) -> bytes:
    """A transaction as it stands inside of a compressed one: without checksums and places."""
    made: list[bytes] = []
    checksums, log.checksums = log.checksums, False
    feed, log.feed = log.feed, lambda *events: made.extend(events) or 0  # type: ignore[method-assign, func-returns-value]
    log.query("BEGIN")
    log.table_map()
    log.write((1, "a"), (2, "b"))
    log.xid()
    log.feed, log.checksums = feed, checksums  # type: ignore[method-assign]
    return b"".join(event[:13] + bytes(4) + event[17:] for event in made)


@pytest.mark.parametrize("compression", [0, 255])
def test_compressed_transactions(compression: int) -> None:
    log = Log()
    inner = inner_events(log)
    log.gtid(1)
    event = payload(log, inner, compression)
    assert log.feed(event) == PAYLOAD
    assert log.names == []
    feed_payload(log.decoder, packets([event]))
    assert log.names == ["a", "b"]
    assert place(log) == ("binlog.000001", log.offset)
    log.transaction(2, (3, "c"))
    assert log.names == ["a", "b", "c"]
    assert log.decoder.gtid_text() == f"{UUID}:1-2"


def test_a_compressed_transaction_without_an_end_is_an_error() -> None:
    log = Log()
    inner = inner_events(log)
    log.gtid(1)
    event = payload(log, inner[:-27])
    with pytest.raises(DecodeError, match="without an end"):
        feed_payload(log.decoder, packets([event]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda log, inner: payload(log, inner, 7), "unknown compression"),
        (lambda log, inner: log.event(40, b"\2\1\0\0"), "without a size"),
        (lambda log, inner: log.event(40, b"\2\1")[:-4], "is cut"),
        (lambda log, inner: log.event(40, b"\1\xfb")[:-4], "is cut"),
        (lambda log, inner: b"\0" * 9, "without a header"),
        (
            lambda log, inner: payload(log, inner).replace(b"\x28\xb5\x2f\xfd", b"zstd"),
            "is damaged",
        ),
    ],
)
def test_damaged_compressed_transactions(change: object, words: str) -> None:
    log = Log()
    inner = inner_events(log)
    event: bytes = change(log, inner)  # type: ignore[operator]

    def read() -> None:
        _, unpacked = open_payload(io.BytesIO(b"\0" + event))
        while unpacked.read(1000):
            pass

    with pytest.raises(DecodeError, match=words):
        read()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
def test_ids_of_every_width_and_sign(width: int, signed: bool) -> None:
    bits = 8 * width
    low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if signed else (0, 1 << bits)
    layout = Layout(
        [Column(width, slot=0, kind=INTEGER, argument=int(signed))], named=True, proved=True
    )
    for number in {low, low + 1, 0, 5, high // 2, high - 1}:
        out: list[Any] = []
        body = bytes([1, 1, 0]) + number.to_bytes(width, "little", signed=signed)
        decode_rows(body, 0, len(body), layout, out)
        assert out[0].id == number
