"""Fault points: places between two steps where a test can kill the process.

``CDC_RELAY_TEST_FAULT=name`` (or ``name:n``) makes the process kill itself with SIGKILL when it
passes the point ``name`` for the first (the n-th) time. Without the variable a point costs one
comparison. The guarantees' tests restart the process afterwards and compare table and topic.
"""

from __future__ import annotations

import os
import signal

_name, _, _count = os.environ.get("CDC_RELAY_TEST_FAULT", "").partition(":")
_left = int(_count or 1)


def point(name: str) -> None:
    """Pass the point ``name``."""
    global _left
    if _name != name:
        return
    _left -= 1
    if _left <= 0:
        os.kill(os.getpid(), signal.SIGKILL)
