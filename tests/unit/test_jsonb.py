"""Binary JSON to text: values recorded from MySQL, an encoder of the test's own the other way
round, and damaged bytes."""

from __future__ import annotations

import json
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc_relay.binlog.jsonb import json_text

# The bytes in the log and what SELECT returned, MySQL 9.7.
_RECORDED = [
    ("", "null"),
    ("0400", "null"),
    ("0401", "true"),
    ("0402", "false"),
    ("0200000400", "[]"),
    ("0000000400", "{}"),
    ("0c06c3bcf09f98a5", '"ü😥"'),
    (
        "020700390005010005ffff071900071d000921000a29000931007011010090eefeffffffffff00000000"
        "ffffffffffffffff0000000000000080",
        "[1, -1, 70000, -70000, 4294967295, 18446744073709551615, -9223372036854775808]",
    ),
    (
        "02070051000b19000b21000b29000b31000b39000b41000b4900000000000000f83f408cb5781daf154448"
        "afbc9af2d77a3e0000000000000000000000000000008000003426f56b0c4366de77832112dc42",
        "[1.5, 1e20, 0.0000001, 0.0, -0.0, 1e15, 123456789012345.6]",
    ),
    (
        "0003003300190001001a0001001b000200021d00050100002f006162616104001200040000040100040200"
        "0c1000017800000400",
        '{"a": [null, true, false, "x"], "b": 1, "aa": {}}',
    ),
    (
        "02030033000f0d000f16000f2800f6070b027ffffffef5f6101e038000000c149aa4350dfb38d2007bf609"
        "0e0580000000000000",
        "[-1.10, 12345678901234567890.123, 0.00000]",
    ),
    (
        "02040038000f10000f1a000f24000f2e000a080000000000bab2190b08e05ef84737ffffff0b08000000fb"
        "6e3400000c0840e201fb7ebbb219",
        '["2024-02-29", "-12:34:56.500000", "838:59:59.000000", "2024-02-29 23:59:59.123456"]',
    ),
    (
        "02030015000f0d000f120006e8070f0300ff800f0105",
        '["base64:type15:AP+A", "base64:type15:BQ==", 2024]',
    ),
    ("0c0b001f225c2f080c0a0d097f", '"\\u0000\\u001f\\"\\\\/\\b\\f\\n\\r\\t\x7f"'),
    # Room that a JSON_REMOVE left behind.
    ("0001000c000b00010005020062", '{"b": 2}'),
]


@pytest.mark.parametrize(("value", "text"), _RECORDED, ids=lambda item: item[:20])
def test_recorded_values(value: str, text: str) -> None:
    data = bytes.fromhex(value)
    assert json_text(data, 0, len(data)).decode() == text
    # Anywhere in a buffer, and not a byte beyond its end.
    assert json_text(b"ab" + data + b"cd", 2, 2 + len(data)).decode() == text


def test_long_base64_is_broken_into_lines() -> None:
    """As the server does: 76 characters a line, and the line break is one inside JSON."""
    data = bytes([0x0F, 15, 0xAC, 0x02]) + b"\0" * 300
    text = json_text(data, 0, len(data)).decode()
    assert text.startswith('"base64:type15:' + "A" * 76 + "\\n")
    assert json.loads(text).count("\n") == 5


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0"), (-0.0, "-0.0"), (1.0, "1.0"), (0.1, "0.1"), (1e14, "100000000000000.0"),
        (1e15, "1e15"), (1e16, "1e16"), (999999999999999.9, "999999999999999.9"),
        (1234567890123456.0, "1.234567890123456e15"), (1234567890123456.8, "1234567890123456.8"),
        (0.0001, "0.0001"), (0.00001, "0.00001"), (1e-14, "0.00000000000001"),
        (1e-15, "0.000000000000001"), (1e-16, "1e-16"), (-1.5e300, "-1.5e300"), (5e-324, "5e-324"),
        (1.7976931348623157e308, "1.7976931348623157e308"),
        (1.23456789e-15, "0.00000000000000123456789"),
    ],
)  # fmt: skip
def test_doubles(value: float, text: str) -> None:
    data = b"\x0b" + struct.pack("<d", value)
    assert json_text(data, 0, 9).decode() == text


# --- an encoder -----------------------------------------------------------------------------------


def encode(value: object, large: bool) -> tuple[int, bytes]:
    """Type and bytes of a value, containers in the small or the large layout."""
    if value is None or isinstance(value, bool):
        return 4, bytes([0 if value is None else 1 if value else 2])
    if isinstance(value, int):
        for kind, form in ((5, "<h"), (6, "<H"), (7, "<i"), (8, "<I"), (9, "<q"), (10, "<Q")):
            try:
                return kind, struct.pack(form, value)
            except struct.error:
                continue
    if isinstance(value, float):
        return 11, struct.pack("<d", value)
    if isinstance(value, str):
        data = value.encode()
        return 12, length(len(data)) + data
    assert isinstance(value, (list, dict))
    return container(value, large)


def length(size: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    out = bytearray()
    while size >= 0x80:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out)


def container(value: list[object] | dict[str, object], large: bool) -> tuple[int, bytes]:
    width = 4 if large else 2
    names = [name.encode() for name in value] if isinstance(value, dict) else []
    items = list(value.values()) if isinstance(value, dict) else value
    start = 2 * width + len(names) * (width + 2) + len(items) * (width + 1)
    keys, body = b"", b""
    for name in names:
        keys += (start + len(body)).to_bytes(width, "little") + len(name).to_bytes(2, "little")
        body += name
    entries = b""
    for item in items:
        kind, data = encode(item, large)
        inlined = kind in (4, 5, 6) or (large and kind in (7, 8))
        entries += bytes([kind])
        if inlined:
            entries += data.ljust(width, b"\0")
        else:
            entries += (start + len(body)).to_bytes(width, "little")
            body += data
    head = len(items).to_bytes(width, "little") + (start + len(body)).to_bytes(width, "little")
    return (0 if isinstance(value, dict) else 2) + large, head + keys + entries + body


_DOCUMENTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=15,
)


@settings(derandomize=True, deadline=None)
@given(_DOCUMENTS, st.booleans())
def test_what_is_encoded_is_read(document: object, large: bool) -> None:
    kind, data = encode(document, large)
    text = json_text(bytes([kind]) + data, 0, 1 + len(data))
    assert json.loads(text) == document


def test_many_keys_and_long_texts() -> None:
    documents: list[object] = [
        {f"k{number}": number for number in range(5000)},
        {"k" * size: "v" * size for size in (1, 63, 64, 65, 127, 128, 255, 256, 20_000)},
        ["ü" * 100_000, {"deep": json.loads("[" * 98 + "1" + "]" * 98)}],
    ]
    for document in documents:
        kind, data = encode(document, True)
        assert json.loads(json_text(bytes([kind]) + data, 0, 1 + len(data))) == document


def test_more_kinds_of_keys_than_are_kept() -> None:
    for number in range(10_050):
        kind, data = encode({f"key-{number}": 1}, False)
        assert json_text(bytes([kind]) + data, 0, 1 + len(data)).startswith(b'{"key-')


# --- damage ---------------------------------------------------------------------------------------


def damaged(data: bytes) -> None:
    """Read bytes that may be anything: a value of JSON, or ``ValueError``."""
    try:
        text = json_text(data, 0, len(data))
    except ValueError:
        return
    text.decode()


def test_cut_values() -> None:
    for value, _ in _RECORDED:
        data = bytes.fromhex(value)
        for size in range(len(data)):
            damaged(data[:size])


def test_changed_values() -> None:
    chance = random.Random(5)
    documents = [{"a": [1, 2.5, "x", None, {"b": "y" * 200}], "c": 2**40}, ["z"] * 30]
    values = [bytes.fromhex(value) for value, _ in _RECORDED[1:]]
    for document in documents:
        for large in (False, True):
            kind, data = encode(document, large)
            values.append(bytes([kind]) + data)
    for _ in range(20_000):
        value = bytearray(chance.choice(values))
        for _ in range(chance.choice([1, 1, 2, 5])):
            value[chance.randrange(len(value))] = chance.choice([0, 0xFF, chance.randrange(256)])
        damaged(bytes(value))


def test_a_container_that_holds_itself_ends() -> None:
    """An offset back to the container would be read for ever."""
    data = bytes([2, 1, 0, 7, 0, 2, 0, 0])
    with pytest.raises(ValueError, match="damaged JSON"):
        json_text(data, 0, len(data))
    wide = bytes([2, 2, 0, 10, 0, 2, 0, 0, 2, 0, 0])
    with pytest.raises(ValueError, match="damaged JSON"):
        json_text(wide, 0, len(wide))


def test_values_that_share_their_bytes_do_not_multiply() -> None:
    """Sixty levels of two references to the same next level are 2^60 values."""
    value = b"\x00\x00\x04\x00"
    for _ in range(60):
        size = 10 + len(value)
        value = b"\x02\x00" + size.to_bytes(2, "little") + b"\x02\x0a\x00" * 2 + value
    with pytest.raises(ValueError, match="more values than bytes"):
        json_text(b"\x02" + value, 0, 1 + len(value))


@pytest.mark.parametrize(
    "value",
    ["ff", "0d00", "0403", "0b0000000000", "0b000000000000f07f", "0c05414243", "0cffffffffff01",
     "0cff", "0f", "0ff60102", "0ff6020201", "0f0a0400000000", "02ffff0500", "000100"],
)  # fmt: skip
def test_nonsense_is_an_error(value: str) -> None:
    data = bytes.fromhex(value)
    with pytest.raises(ValueError):  # noqa: PT011
        json_text(data, 0, len(data))
