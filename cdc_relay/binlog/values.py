"""Single column values from their bytes in a row image, as the server itself would print them.

Hot where marked; pure functions on bytes. Formats: MySQL internals manual, "Row images", and the
server's ``my_time.cc`` and ``decimal.cc``.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from mypy_extensions import i64

# Bytes that hold 0 to 9 decimal digits.
_DIGIT_BYTES: Final = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)


def decimal_size(precision: i64, scale: i64) -> i64:
    """Bytes of a DECIMAL(precision, scale) in a row image."""
    whole: i64 = precision - scale
    return whole // 9 * 4 + _DIGIT_BYTES[whole % 9] + scale // 9 * 4 + _DIGIT_BYTES[scale % 9]


def decimal_text(buf: bytes, pos: i64, precision: i64, scale: i64) -> str:
    """Return the DECIMAL at ``buf[pos:]`` as text: at least one digit before the point, exactly
    ``scale`` digits after it."""
    size: i64 = decimal_size(precision, scale) if precision >= scale else 0
    if pos + size > len(buf) or size == 0:
        raise ValueError("damaged DECIMAL")
    data = bytearray(buf[pos : pos + size])
    negative = not data[0] & 0x80
    data[0] ^= 0x80
    if negative:
        for index in range(len(data)):
            data[index] ^= 0xFF
    whole: i64 = precision - scale
    digits: list[str] = []
    offset: i64 = 0

    first: i64 = whole % 9
    if first:
        width: i64 = _DIGIT_BYTES[first]
        digits.append(str(int.from_bytes(data[offset : offset + width], "big")))
        offset += width
    count: i64 = whole // 9
    while count > 0:
        digits.append(f"{int.from_bytes(data[offset : offset + 4], 'big'):09d}")
        offset += 4
        count -= 1
    text = "".join(digits).lstrip("0") or "0"
    if scale:
        digits = []
        count = scale // 9
        while count > 0:
            digits.append(f"{int.from_bytes(data[offset : offset + 4], 'big'):09d}")
            offset += 4
            count -= 1
        last: i64 = scale % 9
        if last:
            width = _DIGIT_BYTES[last]
            value = int.from_bytes(data[offset : offset + width], "big")
            digits.append(str(value).rjust(last, "0"))
        text += "." + "".join(digits)
    return "-" + text if negative else text


def days_from_civil(year: i64, month: i64, day: i64) -> i64:
    """Days since 1970-01-01 in the proleptic Gregorian calendar (era arithmetic, no tables)."""
    if month <= 2:
        year -= 1
    era: i64 = year // 400
    of_era: i64 = year - era * 400
    of_year: i64 = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    day_of_era: i64 = of_era * 365 + of_era // 4 - of_era // 100 + of_year
    return era * 146097 + day_of_era - 719468


def datetime2_micros(buf: bytes, pos: i64, fsp: i64) -> i64:
    """Microseconds since 1970-01-01 of the DATETIME(fsp) at ``buf[pos:]``, taken as UTC.

    -1 << 62 for a zero date or one with a zero month or day (they name no instant).
    """
    high: i64 = 0
    index: i64 = 0
    while index < 5:
        byte: i64 = buf[pos + index]
        high = high << 8 | byte
        index += 1
    high -= 0x8000000000
    micros: i64 = fraction_micros(buf, pos + 5, fsp)
    second: i64 = high & 63
    minute: i64 = high >> 6 & 63
    hour: i64 = high >> 12 & 31
    day: i64 = high >> 17 & 31
    months: i64 = high >> 22
    year: i64 = months // 13
    month: i64 = months % 13
    if month == 0 or day == 0 or high < 0:
        return NO_TIME
    days: i64 = days_from_civil(year, month, day)
    return ((days * 24 + hour) * 60 + minute) * 60_000_000 + second * 1_000_000 + micros


def timestamp2_micros(buf: bytes, pos: i64, fsp: i64) -> i64:
    """Microseconds since 1970-01-01 UTC of the TIMESTAMP(fsp) at ``buf[pos:]``; zero: no time."""
    seconds: i64 = 0
    index: i64 = 0
    while index < 4:
        byte: i64 = buf[pos + index]
        seconds = seconds << 8 | byte
        index += 1
    micros: i64 = fraction_micros(buf, pos + 4, fsp)
    if seconds == 0 and micros == 0:
        return NO_TIME
    return seconds * 1_000_000 + micros


NO_TIME: Final = -(1 << 62)


def fraction_micros(buf: bytes, pos: i64, fsp: i64) -> i64:
    """Microseconds from the fraction bytes that follow a temporal value (none, 1, 2 or 3)."""
    a: i64
    b: i64
    c: i64
    if fsp == 0:
        return 0
    if fsp <= 2:
        a = buf[pos]
        return a * 10_000
    if fsp <= 4:
        a = buf[pos]
        b = buf[pos + 1]
        return (a << 8 | b) * 100
    a = buf[pos]
    b = buf[pos + 1]
    c = buf[pos + 2]
    return a << 16 | b << 8 | c


# --- text of any column (not hot: extra columns and tests) ----------------------------------------


def integer_text(buf: bytes, pos: i64, width: i64, unsigned: bool) -> str:
    """Digits of an integer of ``width`` bytes."""
    return str(int.from_bytes(buf[pos : pos + width], "little", signed=not unsigned))


def year_text(value: i64) -> str:
    """YEAR: 0 is the year 0000, else an offset from 1900."""
    return f"{1900 + value:04d}" if value else "0000"


def date_text(buf: bytes, pos: i64) -> str:
    """DATE: day, month and year packed into 3 bytes."""
    value = int.from_bytes(buf[pos : pos + 3], "little")
    return f"{value >> 9:04d}-{value >> 5 & 15:02d}-{value & 31:02d}"


def _fraction_text(micros: int, fsp: i64) -> str:
    return f".{micros:06d}"[: fsp + 1] if fsp else ""


def time2_text(buf: bytes, pos: i64, fsp: i64) -> str:
    """TIME(fsp): sign, hours, minutes, seconds in 24 bits, offset so that bytes sort, the fraction
    in complement for negative times."""
    size: i64 = (fsp + 1) // 2
    bits: i64 = 8 * size
    packed: int = int.from_bytes(buf[pos : pos + 3 + size], "big") - (0x800000 << int(bits))
    sign = "-" if packed < 0 else ""
    packed = abs(packed)
    micros = (packed & ((1 << bits) - 1)) * 10 ** (6 - 2 * size)
    packed >>= bits
    hours, minutes, seconds = packed >> 12 & 1023, packed >> 6 & 63, packed & 63
    return f"{sign}{hours:02d}:{minutes:02d}:{seconds:02d}{_fraction_text(micros, fsp)}"


def datetime2_text(buf: bytes, pos: i64, fsp: i64) -> str:
    """DATETIME(fsp), zero dates included."""
    high = int.from_bytes(buf[pos : pos + 5], "big") - 0x8000000000
    year, month = divmod(high >> 22, 13)
    return (
        f"{year:04d}-{month:02d}-{high >> 17 & 31:02d} {high >> 12 & 31:02d}:{high >> 6 & 63:02d}:"
        f"{high & 63:02d}{_fraction_text(fraction_micros(buf, pos + 5, fsp), fsp)}"
    )


def timestamp2_text(buf: bytes, pos: i64, fsp: i64) -> str:
    """TIMESTAMP(fsp) as a session in UTC prints it."""
    micros = timestamp2_micros(buf, pos, fsp)
    if micros == NO_TIME:
        return "0000-00-00 00:00:00" + _fraction_text(0, fsp)
    seconds, fraction = divmod(micros, 1_000_000)
    moment = _EPOCH + timedelta(seconds=seconds)
    return f"{moment:%Y-%m-%d %H:%M:%S}{_fraction_text(fraction, fsp)}"


def double_text(value: float) -> str:
    """DOUBLE as SELECT prints it: shortest digits that read back equal, exponent form outside of
    15 digits (``my_gcvt``)."""
    return _number_text(repr(abs(value)), value)


def float_text(value: float) -> str:
    """FLOAT as SELECT prints it: six significant digits (``FLT_DIG``)."""
    return _number_text(f"{abs(value):.6g}", value)


def _number_text(text: str, value: float) -> str:
    sign = "-" if value < 0 or (value == 0 and str(value)[0] == "-") else ""
    mantissa, _, exponent = text.partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    if not digits:
        return sign + "0"
    # Where the decimal point stands, counted from the first significant digit.
    leading = len(whole + fraction) - len(digits)
    point = len(whole) - leading + int(exponent or "0")
    digits = digits.rstrip("0")
    if -14 <= point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    if 0 < point <= 15 or 0 < point < len(digits):
        if len(digits) <= point:
            return sign + digits.ljust(point, "0")
        return f"{sign}{digits[:point]}.{digits[point:]}"
    rest = "." + digits[1:] if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{rest}e{point - 1}"


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
