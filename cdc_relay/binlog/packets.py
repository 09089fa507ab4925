"""Packets of the dump: the buffer between the socket and the decoder, and what does not fit into
one packet: events of 16 MB and more, and compressed transactions.

Packet format: MySQL source documentation, "MySQL Packets"; compressed transactions:
``Transaction_payload_event``.
"""

from __future__ import annotations

import io
import socket
import zlib
from collections.abc import Callable
from typing import IO, Final, Protocol, cast

import zstandard

from cdc_relay.errors import DecodeError

_MORE_FOLLOWS: Final = 0xFFFFFF
_HEADER: Final = 19
_CHECKSUM: Final = 4

# Fields before a payload, and its compression types.
_FIELD_END: Final = 0
_FIELD_SIZE: Final = 1
_FIELD_COMPRESSION: Final = 2
_ZSTD: Final = 0
_NONE: Final = 255


class Readable(Protocol):
    """Bytes that are read in pieces; empty at the end."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes."""


class Packets:
    """What was received and not yet consumed. ``buf`` starts at a packet."""

    def __init__(self, sock: socket.socket, receive: Callable[[socket.socket], bytes]) -> None:
        self._sock = sock
        self._receive = receive
        self.buf = b""

    def more(self) -> None:
        """Receive once; when a packet has only begun, all of it (joined once, not bit by bit)."""
        self._fill(4 + self._length() if len(self.buf) >= 4 else 0)

    def skip(self, count: int) -> None:
        """Drop what was consumed."""
        if count:
            self.buf = self.buf[count:]

    def has_whole(self) -> bool:
        """Whether the first packet is here whole."""
        return len(self.buf) >= 4 and len(self.buf) >= 4 + self._length()

    def kind(self) -> int:
        """Type of the event that begins in the first packet."""
        while len(self.buf) < 10:
            self._fill(10)
        return self.buf[9]

    def whole(self) -> bytes:
        """Take the first packet with those that continue it: status byte and event."""
        parts: list[bytes] = []
        while True:
            length = self._packet()
            parts.append(self.buf[4 : 4 + length])
            self.buf = self.buf[4 + length :]
            if length < _MORE_FOLLOWS:
                return b"".join(parts)

    def body(self) -> Body:
        """Take the first packet with those that continue it, piece by piece."""
        return Body(self)

    def _packet(self) -> int:
        """Make sure that the first packet is whole; its length."""
        self._fill(4)
        length = self._length()
        self._fill(4 + length)
        return length

    def _length(self) -> int:
        return int.from_bytes(self.buf[:3], "little")

    def _fill(self, size: int) -> None:
        have = len(self.buf)
        if have >= size and size:
            return
        parts = [self.buf]
        while True:
            chunk = self._receive(self._sock)
            parts.append(chunk)
            have += len(chunk)
            if have >= size:
                break
        self.buf = b"".join(parts)


class Body:
    """The event in one packet or several, read in pieces; ``close`` takes what is left of it."""

    def __init__(self, packets: Packets) -> None:
        self._packets = packets
        self._piece = b""
        self._at = 0
        self._last = False
        self._sum: int | None = None
        self._end = b""

    def read(self, size: int = -1, /) -> bytes:
        """At most ``size`` bytes of the event, status byte first; empty at its end."""
        if self._at >= len(self._piece):
            if self._last:
                return b""
            length = self._packets._packet()
            self._piece = self._packets.buf[4 : 4 + length]
            self._packets.skip(4 + length)
            self._at = 0
            self._last = length < _MORE_FOLLOWS
            self._add(self._piece)
        start = self._at
        self._at = len(self._piece) if size < 0 else min(start + size, len(self._piece))
        return self._piece[start : self._at]

    def _add(self, piece: bytes) -> None:
        """Add to the sum of everything but the status byte and the last four bytes."""
        if self._sum is None:
            piece = piece[1:]
        piece = self._end + piece
        self._sum = zlib.crc32(piece[:-_CHECKSUM], self._sum or 0)
        self._end = piece[-_CHECKSUM:]

    def intact(self) -> bool:
        """Read on to the end of the event, and say whether it ends with its own checksum."""
        self.close()
        return self._sum == int.from_bytes(self._end, "little")

    def close(self) -> None:
        """Read on to the end of the event."""
        while self.read():
            pass


class _Limited:
    """The first ``left`` bytes of another stream."""

    def __init__(self, source: Readable, left: int) -> None:
        self._source = source
        self._left = left

    def read(self, size: int = -1, /) -> bytes:
        data = self._source.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data


def read_exactly(source: Readable, size: int) -> bytes:
    """``size`` bytes, fewer only at the end."""
    data = source.read(size)
    if len(data) == size or not data:
        return data
    parts = io.BytesIO()
    while data:
        parts.write(data)
        if parts.tell() == size:
            break
        data = source.read(size - parts.tell())
    return parts.getvalue()


def open_payload(body: Readable) -> tuple[int, Readable]:
    """Read the head of a compressed transaction: the place in the log behind it (32 bits), and
    its events, unpacked as they are read. Raises ``DecodeError``."""
    head = read_exactly(body, 1 + _HEADER)
    if len(head) != 1 + _HEADER:
        raise DecodeError("a compressed transaction without a header")
    fields: dict[int, int] = {}
    while (field := _number(body)) != _FIELD_END:
        value = io.BytesIO(read_exactly(body, _number(body)))
        fields[field] = _number(value)
    if _FIELD_SIZE not in fields:
        raise DecodeError("a compressed transaction without a size")
    packed = _Limited(body, fields[_FIELD_SIZE])
    compression = fields.get(_FIELD_COMPRESSION, _NONE)
    place = int.from_bytes(head[14:18], "little")
    if compression == _NONE:
        return place, packed
    if compression != _ZSTD:
        raise DecodeError(f"a transaction in an unknown compression ({compression})")
    return place, _Unpacked(packed)


class _Unpacked:
    """A zstd frame, unpacked as it is read."""

    def __init__(self, packed: _Limited) -> None:
        # The library asks for nothing but read(); its types ask for a whole file.
        self._reader = zstandard.ZstdDecompressor().stream_reader(cast("IO[bytes]", packed))

    def read(self, size: int, /) -> bytes:
        try:
            return self._reader.read(size)
        except zstandard.ZstdError as error:
            raise DecodeError(f"a compressed transaction is damaged: {error}") from None


def _number(source: Readable) -> int:
    """A length-encoded integer."""
    first = read_exactly(source, 1)
    if not first:
        raise DecodeError("a compressed transaction is cut")
    if first[0] < 251:
        return first[0]
    width = {252: 2, 253: 3, 254: 8}.get(first[0], 0)
    data = read_exactly(source, width)
    if not width or len(data) != width:
        raise DecodeError("a compressed transaction is cut")
    return int.from_bytes(data, "little")
