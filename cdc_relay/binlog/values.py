"""Single column values from their bytes in a row image, as the server itself would print them.

Hot where marked; pure functions on bytes. Formats: MySQL internals manual, "Row images", and the
server's ``my_time.cc`` and ``decimal.cc``.
"""

from __future__ import annotations

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
    size: i64 = decimal_size(precision, scale)
    if precision < scale or pos + size > len(buf) or size == 0:
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
