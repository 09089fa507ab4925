"""Single column values: packed by an encoder of the test's own, read back as the server prints
them."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_relay.binlog.values import (
    NO_TIME,
    date_text,
    datetime2_micros,
    datetime2_text,
    days_from_civil,
    decimal_size,
    decimal_text,
    double_text,
    float_text,
    integer_text,
    time2_text,
    timestamp2_micros,
    timestamp2_text,
    year_text,
)

_DIGIT_BYTES = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


# --- DECIMAL --------------------------------------------------------------------------------------


def packed_decimal(text: str, precision: int, scale: int) -> bytes:
    """Nine digits in four bytes, fewer in fewer; negative in complement; sign bit turned over."""
    whole, _, fraction = text.lstrip("-").partition(".")
    whole = whole.rjust(precision - scale, "0") if precision > scale else ""
    fraction = fraction.ljust(scale, "0")
    groups: list[str] = []
    first = len(whole) % 9
    groups += [whole[:first]] if first else []
    groups += [whole[at : at + 9] for at in range(first, len(whole), 9)]
    groups += [fraction[at : at + 9] for at in range(0, len(fraction), 9)]
    data = bytearray().join(
        int(group).to_bytes(_DIGIT_BYTES[len(group)], "big") for group in groups if group
    )
    if text.startswith("-"):
        data = bytearray(byte ^ 0xFF for byte in data)
    data[0] ^= 0x80
    return bytes(data)


@st.composite
def _decimals(draw: st.DrawFn) -> tuple[str, int, int]:
    precision = draw(st.integers(1, 65))
    scale = draw(st.integers(0, min(30, precision)))
    digits = str(draw(st.integers(0, 10**precision - 1))).rjust(scale + 1, "0")
    text = digits[: len(digits) - scale] + ("." + digits[-scale:] if scale else "")
    negative = draw(st.booleans()) and any(digit not in "0." for digit in text)
    return "-" * negative + text, precision, scale


@given(_decimals())
def test_decimals(value: tuple[str, int, int]) -> None:
    text, precision, scale = value
    data = packed_decimal(text, precision, scale)
    assert len(data) == decimal_size(precision, scale)
    found = decimal_text(b"??" + data + b"?", 2, precision, scale)
    assert Decimal(found) == Decimal(text)
    assert len(found.partition(".")[2]) == scale
    assert found.lstrip("-").startswith("0.") or not found.lstrip("-").startswith("00")


def test_a_cut_decimal_is_an_error() -> None:
    for args in ((b"\x80", 0, 10, 2), (b"\x80\0\0\0\0", 1, 10, 2), (b"\x80", 0, 1, 2)):
        with pytest.raises(ValueError, match="damaged DECIMAL"):
            decimal_text(*args)


# --- times ----------------------------------------------------------------------------------------


def fraction(micros: int, digits: int) -> bytes:
    size = (digits + 1) // 2
    return (micros // int(10 ** (6 - 2 * size))).to_bytes(size, "big")


def packed_datetime(year: int, month: int, day: int, seconds: int, micros: int, fsp: int) -> bytes:
    hour, minute, second = seconds // 3600, seconds // 60 % 60, seconds % 60
    value = ((year * 13 + month) << 5 | day) << 17 | hour << 12 | minute << 6 | second
    head: bytes = (value + 0x8000000000).to_bytes(5, "big")
    return head + fraction(micros, fsp)


_FSP = st.integers(0, 6)


@given(st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31)), _FSP)
def test_datetimes(value: datetime, fsp: int) -> None:
    micros = value.microsecond // 10 ** (6 - fsp) * 10 ** (6 - fsp)
    value = value.replace(microsecond=micros)
    seconds = value.hour * 3600 + value.minute * 60 + value.second
    data = b"?" + packed_datetime(value.year, value.month, value.day, seconds, micros, fsp)
    assert datetime2_micros(data, 1, fsp) == (value.replace(tzinfo=UTC) - _EPOCH) // timedelta(
        microseconds=1
    )
    text = f"{value.year:04d}-{value:%m-%d %H:%M:%S}"
    assert datetime2_text(data, 1, fsp) == text + (f".{micros:06d}"[: fsp + 1] if fsp else "")


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ((0, 0, 0, 0, 0), "0000-00-00 00:00:00.000000"),
        ((2024, 0, 15, 3661, 0), "2024-00-15 01:01:01.000000"),
        ((2024, 5, 0, 0, 500_000), "2024-05-00 00:00:00.500000"),
    ],
)
def test_zero_dates_name_no_instant(parts: tuple[int, int, int, int, int], text: str) -> None:
    data = packed_datetime(*parts, 6)
    assert datetime2_micros(data, 0, 6) == NO_TIME
    assert datetime2_text(data, 0, 6) == text


@given(st.dates())
def test_days(value: date) -> None:
    assert days_from_civil(value.year, value.month, value.day) == value.toordinal() - 719163


@given(st.integers(1, 2**31 - 1), st.integers(0, 999_999), _FSP)
def test_timestamps(seconds: int, micros: int, fsp: int) -> None:
    micros = micros // 10 ** (6 - fsp) * 10 ** (6 - fsp)
    data = b"?" + seconds.to_bytes(4, "big") + fraction(micros, fsp)
    assert timestamp2_micros(data, 1, fsp) == seconds * 1_000_000 + micros
    moment = datetime.fromtimestamp(seconds, UTC)
    shown = f".{micros:06d}"[: fsp + 1] if fsp else ""
    assert timestamp2_text(data, 1, fsp) == f"{moment:%Y-%m-%d %H:%M:%S}{shown}"


def test_the_zero_timestamp_is_no_instant() -> None:
    assert timestamp2_micros(bytes(7), 0, 6) == NO_TIME
    assert timestamp2_text(bytes(7), 0, 6) == "0000-00-00 00:00:00.000000"
    assert timestamp2_text(bytes(4), 0, 0) == "0000-00-00 00:00:00"
    # The half second after it is one.
    assert timestamp2_micros(bytes(4) + fraction(500_000, 6), 0, 6) == 500_000


@given(st.booleans(), st.integers(0, 838), st.integers(0, 3599), st.integers(0, 999_999), _FSP)
def test_times(negative: bool, hours: int, rest: int, micros: int, fsp: int) -> None:
    micros = micros // 10 ** (6 - fsp) * 10 ** (6 - fsp)
    size = (fsp + 1) // 2
    value = (hours << 12 | rest // 60 << 6 | rest % 60) << 8 * size
    value |= int.from_bytes(fraction(micros, fsp), "big")
    value = -value if negative else value
    data = b"?" + (value + (0x800000 << 8 * size)).to_bytes(3 + size, "big")
    sign = "-" if value < 0 else ""
    shown = f".{micros:06d}"[: fsp + 1] if fsp else ""
    expected = f"{sign}{hours:02d}:{rest // 60:02d}:{rest % 60:02d}{shown}"
    assert time2_text(data, 1, fsp) == expected


def test_dates_and_years() -> None:
    value = (2024 << 9 | 2 << 5 | 29).to_bytes(3, "little")
    assert date_text(b"?" + value, 1) == "2024-02-29"
    assert date_text(bytes(3), 0) == "0000-00-00"
    assert [year_text(number) for number in (0, 1, 124, 255)] == ["0000", "1901", "2024", "2155"]


# --- numbers --------------------------------------------------------------------------------------


@given(st.sampled_from([1, 2, 3, 4, 8]), st.booleans(), st.data())
def test_integers(width: int, unsigned: bool, data: st.DataObject) -> None:
    low, high = (
        (0, 2 ** (8 * width)) if unsigned else (-(2 ** (8 * width - 1)), 2 ** (8 * width - 1))
    )
    value = data.draw(st.integers(low, high - 1))
    packed = value.to_bytes(width, "little", signed=not unsigned)
    assert integer_text(b"?" + packed, 1, width, unsigned) == str(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (-0.0, "-0"), (1.0, "1"), (-1.5, "-1.5"), (0.1, "0.1"),
        (1e14, "100000000000000"), (1e15, "1e15"), (1e20, "1e20"),
        (1234567890123456.8, "1234567890123456.8"),
        (1.5e-7, "0.00000015"), (1e-14, "0.00000000000001"), (1e-20, "1e-20"),
        (2.5e300, "2.5e300"),
    ],
)  # fmt: skip
def test_doubles(value: float, text: str) -> None:
    assert double_text(value) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_double_reads_back_equal(value: float) -> None:
    assert float(double_text(value)) == value


def test_floats_have_six_digits() -> None:
    """As the server prints FLOAT, though it holds a little more."""
    assert float_text(1.2345678) == "1.23457"
    assert float_text(16777216.0) == "16777200"
    assert float_text(1e20) == "1e20"
    assert float_text(-0.0001234567) == "-0.000123457"
