"""The server's character sets as Python codecs.

Most of Python's codecs read a character set exactly as MySQL and MariaDB do. Some read a few bytes
otherwise (the server keeps old editions of a standard): those characters are exchanged for the
server's, or, where they cannot be told from others, the text counts as not decodable, so that its
row is read back by SELECT. Character sets that are not here are always read back. Compared byte
for byte with both servers by the decoder's differential test.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from encodings import cp1252
from typing import Any, Final

# Name of the character set: Python's codec, and characters that the server reads otherwise, with
# the server's own; empty where it has none there, or where the character has other bytes as well.
_CODECS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "ascii": ("ascii", {}),  # MariaDB stores other bytes, too, and shows them as question marks
    "latin2": ("iso8859_2", {}),
    "latin5": ("iso8859_9", {}),
    "latin7": ("iso8859_13", {}),
    "greek": (
        "iso8859_7",
        {"\u2018": "\u02bd", "\u2019": "\u02bc", **dict.fromkeys("\u20ac\u20af\u037a", "")},
    ),
    "hebrew": ("iso8859_8", {"\xaf": "\u203e"}),
    "cp850": ("cp850", {}),
    "cp852": ("cp852", {}),
    "cp866": ("cp866", {"\u2116": "\u207f", "\xa4": "\xb2"}),
    "cp1250": ("cp1250", {}),
    "cp1251": ("cp1251", {}),
    "cp1256": ("cp1256", dict.fromkeys("\u0679\u0688\u06a9\u0691\u06ba\u06be\u06c1\u06d2", "")),
    "cp1257": ("cp1257", {}),
    "hp8": ("hp_roman8", {}),
    "koi8r": ("koi8_r", {}),
    "koi8u": ("koi8_u", {"\u2219": "\u2022"}),
    "macce": ("mac_latin2", {}),
    "macroman": ("mac_roman", {}),
    "tis620": ("tis_620", {}),
    "big5": ("big5", dict.fromkeys("\u2574\uffe3\u02cd\uff0f\uff3c\u5341\u5345", "")),
    "cp932": ("cp932", dict.fromkeys("\x80\uf8f0\uf8f1\uf8f2\uf8f3", "")),
    "euckr": ("cp949", {}),
    "gb18030": ("gb18030", {"\ue7c7": "\u1e3f", "\u1e3f": "\ue7c7"}),
    "gb2312": ("gb2312", {}),
    "gbk": ("gbk", {}),
    "sjis": ("shift_jis", {"\uff3c": "\\"}),
    "ujis": ("euc_jp", {"\uff3c": "\\"}),
    # The two halves of a character beyond 16 bits are two characters to the server.
    "ucs2": ("utf_16_be", {"\U00010000-\U0010ffff": ""}),
    "utf16": ("utf_16_be", {}),
    "utf16le": ("utf_16_le", {}),
    "utf32": ("utf_32_be", {}),
}
_PREFIX: Final = "mysql_"
# The server's latin1 is cp1252 whose five free places are control characters.
_LATIN1: Final = "".join(
    [chr(byte) if char == "\ufffe" else char for byte, char in enumerate(cp1252.decoding_table)]
)


def codec_of(charset: str) -> str | None:
    """The name of the codec that reads ``charset`` as the server does, or raises
    ``UnicodeDecodeError``; None where there is none."""
    if charset == "latin1":
        return _PREFIX + charset
    codec, differing = _CODECS.get(charset, (None, {}))
    return _PREFIX + charset if differing else codec


def _find(name: str) -> codecs.CodecInfo | None:
    if name == _PREFIX + "latin1":
        return codecs.CodecInfo(cp1252.Codec().encode, _latin1, name=name)
    codec, differing = _CODECS.get(name.removeprefix(_PREFIX), ("", {}))
    if not name.startswith(_PREFIX) or not differing:
        return None
    return codecs.CodecInfo(codecs.lookup(codec).encode, _decoder(codec, differing), name=name)


def _latin1(value: Any, errors: str = "strict") -> tuple[str, int]:
    return codecs.charmap_decode(value, errors, _LATIN1)


def _decoder(codec: str, differing: dict[str, str]) -> Callable[..., tuple[str, int]]:
    decode = codecs.lookup(codec).decode
    exchanged = {ord(char): other for char, other in differing.items() if other}
    refused = "".join(char for char, other in differing.items() if not other)
    search = re.compile(f"[{refused}]").search if refused else None

    def decoded(value: bytes, errors: str = "strict") -> tuple[str, int]:
        text, size = decode(value, errors)
        if search is not None and search(text) is not None:
            raise UnicodeDecodeError(
                codec, bytes(value), 0, size, "the server reads a character of it otherwise"
            )
        return text.translate(exchanged) if exchanged else text, size

    return decoded


codecs.register(_find)
