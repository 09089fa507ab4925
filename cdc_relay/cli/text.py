"""Text of rows, topics and servers on a terminal."""

from __future__ import annotations

from typing import Final

# C0 and C1: what a terminal obeys.
_ESCAPED: Final = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


def printable(text: str) -> str:
    """Return ``text`` on one line, with its control characters spelt out: a row's text may come
    from anybody, and must not colour, clear or type for who looks at it. For the eye only; JSON
    has escapes of its own."""
    return text.translate(_ESCAPED)
