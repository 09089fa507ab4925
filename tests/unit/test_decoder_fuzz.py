"""Recorded logs of both servers, whole and damaged: whole they give their rows however they come
in; damaged they give an error that names the place, or rows that are in them, and never anything
else."""

from __future__ import annotations

import os
import random
import re
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import zstandard

from cdc_relay.binlog import layout
from cdc_relay.binlog.decoder import TABLE_MAP, TRANSACTION_PAYLOAD, WRITE_ROWS, WRITE_ROWS_V1
from cdc_relay.binlog.rows import UnreadRow
from cdc_relay.errors import DecodeError, SourceError
from cdc_relay.outbox import OutboxEvent
from tests.support.corpus import FLAVORS, Corpus, names, packets, summed

CASES = int(os.environ.get("CDC_RELAY_TEST_FUZZ", "400"))
"""Damaged logs of each kind and server."""

_PLACE = re.compile(r"[\w.-]+:\d+")


@cache
def corpus(flavor: str) -> Corpus:
    return Corpus.load(flavor)


@pytest.fixture(params=FLAVORS)
def recorded(request: pytest.FixtureRequest) -> Corpus:
    return corpus(request.param)


# --- whole ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 5, 19, 100, 4096, 1 << 18])
def test_a_log_gives_its_rows_however_the_bytes_arrive(recorded: Corpus, chunk: int) -> None:
    rows = list(recorded.read(packets(recorded.events), chunk=chunk))
    assert names(rows) == recorded.keys
    told = [row for row in rows if isinstance(row, OutboxEvent)]
    for row in told:
        later = recorded.stored.get(row.id)
        # Some were changed or deleted afterwards.
        assert later is None or later[:5] == row[:5]
    assert sum(recorded.stored.get(row.id) == row for row in told) >= 10


@pytest.mark.parametrize("hold_bytes", [1, 100, 300, 1000])
@pytest.mark.parametrize("batch_rows", [1, 2, 1000])
def test_transactions_larger_than_memory_are_the_same(
    recorded: Corpus, hold_bytes: int, batch_rows: int
) -> None:
    rows = list(recorded.read_again(hold_bytes, batch_rows))
    whole = list(recorded.read(packets(recorded.events)))
    assert [row.id for row in rows] == [row.id for row in whole]
    # Each dump proves the layout anew; a row that was changed since does not prove it.
    for row, same in zip(rows, whole, strict=True):
        assert row == same or isinstance(row, UnreadRow)


# --- damaged --------------------------------------------------------------------------------------


def decode(recorded: Corpus, data: bytes) -> tuple[list[OutboxEvent | UnreadRow], str]:
    """The rows that came out, and the error. Any error but one of the source fails the test."""
    rows: list[OutboxEvent | UnreadRow] = []
    found: SourceError | None = None
    try:
        for row in recorded.read(data):
            rows.append(row)
    except SourceError as error:
        found = error
    text = "" if found is None else str(found)
    assert "\n" not in text
    # Else it is a packet that by the damage is an error message of the server.
    assert not isinstance(found, DecodeError) or _PLACE.search(text), text
    return rows, text


def flip(chance: random.Random, data: bytes, count: int = 1) -> bytes:
    changed = bytearray(data)
    for _ in range(count):
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def scribble(chance: random.Random, data: bytes) -> bytes:
    """Other bytes, fewer bytes or more bytes somewhere in the body."""
    at = chance.randrange(19, max(20, len(data) - 4))
    size = chance.choice([1, 1, 2, 4, 8])
    kind = chance.randrange(5)
    if kind == 0:
        return data[:at] + chance.randbytes(size) + data[at + size :]
    if kind == 1:
        return data[:at] + b"\xff" * size + data[at + size :]
    if kind == 2:
        return data[:at] + data[at + size :]
    if kind == 3:
        return data[:at] + chance.randbytes(size) + data[at:]
    return flip(chance, data, size)


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_give_an_error_or_rows_of_the_log(recorded: Corpus, seed: int) -> None:
    """The checksum of the row event keeps damaged rows out."""
    chance = random.Random(seed)
    originals = set(recorded.read(packets(recorded.events)))
    unsummed = first_without_checksum(recorded)
    for _ in range(CASES // 4):
        events = list(recorded.events)
        index = chance.randrange(unsummed)
        events[index] = flip(chance, events[index], chance.choice([1, 1, 1, 3]))
        rows, error = decode(recorded, packets(events))
        for row in rows:
            # What the damage hides from the log alone is read back by its own key.
            told = row in originals or isinstance(row, UnreadRow)
            assert told, (index, recorded.events[index][4], row, error)


def first_without_checksum(recorded: Corpus) -> int:
    """Where the part of the log begins that has no checksums to tell damage by."""
    for index, event in enumerate(recorded.events):
        if event[13:17] != b"\0\0\0\0" and zlib.crc32(event[:-4]) != int.from_bytes(
            event[-4:], "little"
        ):
            return index - 2
    raise AssertionError("all of it has checksums")


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_stream_ends_in_an_error_or_in_rows(recorded: Corpus, seed: int) -> None:
    """Damage anywhere, lengths of packets included; bytes missing, doubled or made up."""
    chance = random.Random(seed)
    whole = packets(recorded.events)
    ways: list[Callable[[], bytes]] = [
        lambda: flip(chance, whole, chance.choice([1, 2, 8])),
        lambda: whole[: chance.randrange(len(whole))],
        lambda: whole[chance.randrange(len(whole)) :],
        lambda: scribble(chance, whole),
        lambda: packets([event for event in recorded.events if chance.random() > 0.03]),
        lambda: packets(shuffled(chance, recorded.events)),
        lambda: chance.randbytes(500),
    ]
    for number in range(CASES // 4):
        decode(recorded, ways[number % len(ways)]())


def shuffled(chance: random.Random, events: list[bytes]) -> list[bytes]:
    """Some events twice, and two of them in each other's place."""
    changed = [event for event in events for _ in range(1 + (chance.random() > 0.97))]
    first, second = chance.randrange(len(changed)), chance.randrange(len(changed))
    changed[first], changed[second] = changed[second], changed[first]
    return changed


@pytest.mark.parametrize("seed", range(4))
def test_nonsense_with_a_right_checksum(recorded: Corpus, seed: int) -> None:
    """What no checksum can tell: the fields of an event contradict each other."""
    chance = random.Random(seed)
    unsummed = first_without_checksum(recorded)
    wanted = [
        index
        for index, event in enumerate(recorded.events[:unsummed])
        if index and (chance.random() > 0.5 or event[4] in (TABLE_MAP, WRITE_ROWS, WRITE_ROWS_V1))
    ]
    for _ in range(CASES // 4):
        events = list(recorded.events)
        for _ in range(chance.choice([1, 1, 2])):
            index = chance.choice(wanted)
            events[index] = summed(scribble(chance, events[index]))
        decode(recorded, packets(events))


@pytest.mark.parametrize("flavor", FLAVORS)
def test_every_byte_of_every_kind_of_event(flavor: str) -> None:
    """Each byte of one event of each kind set to its extremes, checksum made right."""
    recorded = corpus(flavor)
    unsummed = first_without_checksum(recorded)
    seen: set[tuple[int, bytes]] = set()
    for index, event in enumerate(recorded.events[:unsummed]):
        kind = (event[4], event[27:35] if event[4] == TABLE_MAP else b"")
        if index == 0 or kind in seen:
            continue
        seen.add(kind)
        step = 1 + len(event) // 80
        for at in range(19, len(event) - 4, step):
            for value in (0, 0xFF):
                if event[at] != value:
                    changed = event[:at] + bytes([value]) + event[at + 1 :]
                    events = [*recorded.events[:index], summed(changed)]
                    decode(recorded, packets([*events, *recorded.events[index + 1 : index + 6]]))


@pytest.mark.parametrize("seed", range(2))
def test_damage_inside_a_compressed_transaction(seed: int) -> None:
    """The packed events have no checksums of their own; that of the whole is right here."""
    recorded = corpus("mysql")
    chance = random.Random(seed)
    [index] = [n for n, event in enumerate(recorded.events) if event[4] == TRANSACTION_PAYLOAD]
    event = recorded.events[index]
    at = event.index(b"\x28\xb5\x2f\xfd")
    library: Any = zstandard
    inner: bytes = library.ZstdDecompressor().decompressobj().decompress(event[at:-4])
    for _ in range(CASES // 2):
        ways: list[Callable[[], bytes]] = [
            lambda: scribble(chance, inner),
            lambda: inner[: chance.randrange(len(inner))],
        ]
        changed = chance.choice(ways)()
        packed = zstandard.ZstdCompressor().compress(changed)
        if chance.random() < 0.3:
            packed = scribble(chance, packed)
        head = bytearray(event[:at])
        # The fields before: uncompressed size, compression, packed size (two bytes and more).
        size = head.index(b"\x01", 19)
        fields = b"\x02\x01\x00\x03\x03\xfc" + len(changed).to_bytes(2, "little")
        fields += b"\x01\x03\xfc" + len(packed).to_bytes(2, "little") + b"\x00"
        assert size
        events = list(recorded.events)
        events[index] = summed(event[:19] + fields + packed + b"\0\0\0\0")
        decode(recorded, packets(events))


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is not there will not come."""
    monkeypatch.setattr(layout, "_VISIBLE_WITHIN_S", 0.0)
