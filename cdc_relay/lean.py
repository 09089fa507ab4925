"""Imported first where memory counts: keeps out of the process what others pull in unasked.

structlog loads `rich`, 4 MiB of it, wherever that is installed, for tracebacks that the relay does
not print.
"""

from __future__ import annotations

import sys

if "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]  # an import of it fails
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
