"""The server's character sets as Python codecs.

Most of Python's codecs read a character set exactly as MySQL and MariaDB do. Some read a few bytes
otherwise (the server keeps old editions of a standard): a text that holds one of those characters
counts as not decodable, so its row is read back by SELECT. Character sets that are not here are
always read back. Compared byte for byte with both servers by the decoder's differential test.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from encodings import cp1252
from typing import Any, Final

# Name of the character set: Python's codec, and the characters that one of the two reads otherwise.
_CODECS: Final[dict[str, tuple[str, str]]] = {
    "latin2": ("iso8859_2", ""),
    "latin5": ("iso8859_9", ""),
    "latin7": ("iso8859_13", ""),
    "greek": ("iso8859_7", "\u2018\u2019\u20ac\u20af\u037a"),
    "hebrew": ("iso8859_8", "\xaf"),
    "cp850": ("cp850", ""),
    "cp852": ("cp852", ""),
    "cp866": ("cp866", "\u2116\xa4"),
    "cp1250": ("cp1250", ""),
    "cp1251": ("cp1251", ""),
    "cp1256": ("cp1256", "\u0679\u0688\u06a9\u0691\u06ba\u06be\u06c1\u06d2"),
    "cp1257": ("cp1257", ""),
    "hp8": ("hp_roman8", ""),
    "koi8r": ("koi8_r", ""),
    "koi8u": ("koi8_u", "\u2219"),
    "macce": ("mac_latin2", ""),
    "macroman": ("mac_roman", ""),
    "tis620": ("tis_620", ""),
    "big5": ("big5", "\u2574\uffe3\u02cd\uff0f\uff3c\u5341\u5345"),
    "cp932": ("cp932", "\x80\uf8f0\uf8f1\uf8f2\uf8f3"),
    "euckr": ("cp949", ""),
    "gb18030": ("gb18030", "\ue7c7\u1e3f"),
    "gb2312": ("gb2312", ""),
    "gbk": ("gbk", ""),
    "sjis": ("shift_jis", "\uff3c"),
    "ujis": ("euc_jp", "\uff3c"),
    # The two halves of a character beyond 16 bits are two characters to the server.
    "ucs2": ("utf_16_be", "\U00010000-\U0010ffff"),
    "utf16": ("utf_16_be", ""),
    "utf16le": ("utf_16_le", ""),
    "utf32": ("utf_32_be", ""),
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
    codec, differing = _CODECS.get(charset, (None, ""))
    return _PREFIX + charset if differing else codec


def _find(name: str) -> codecs.CodecInfo | None:
    if name == _PREFIX + "latin1":
        return codecs.CodecInfo(cp1252.Codec().encode, _latin1, name=name)
    codec, differing = _CODECS.get(name.removeprefix(_PREFIX), ("", ""))
    if not name.startswith(_PREFIX) or not differing:
        return None
    return codecs.CodecInfo(codecs.lookup(codec).encode, _decoder(codec, differing), name=name)


def _latin1(value: Any, errors: str = "strict") -> tuple[str, int]:
    return codecs.charmap_decode(value, errors, _LATIN1)


def _decoder(codec: str, differing: str) -> Callable[..., tuple[str, int]]:
    decode = codecs.lookup(codec).decode
    search = re.compile(f"[{differing}]").search

    def decoded(value: bytes, errors: str = "strict") -> tuple[str, int]:
        text, size = decode(value, errors)
        if search(text) is not None:
            raise UnicodeDecodeError(
                codec, bytes(value), 0, size, "the server reads a character of it otherwise"
            )
        return text, size

    return decoded


codecs.register(_find)
