"""Logging: structlog, one line per event on stderr, and no secrets in it."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

import structlog
from structlog.typing import Processor

from cdc_relay.config import Settings

_URL_PASSWORD: Final = re.compile(r"(://[^\s:/@]*:)[^\s@]*(?=@)")
_SECRET_NAME: Final = re.compile(r"password|passwd|secret|token|jaas", re.IGNORECASE)
_MASK: Final = "***"

_level = logging.INFO


def configure_logging(settings: Settings) -> None:
    """Set the process's logging up: JSON or console lines on stderr, from ``log_level`` on.

    Libraries that use the standard ``logging`` come out in the same format, from WARNING on.
    Standard output stays free for what a command prints. May be called again.
    """
    global _level
    _level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    as_json = settings.log_format == "json" or (
        settings.log_format == "auto" and not sys.stderr.isatty()
    )
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        mask_secrets,
    ]
    renderer: Processor = (
        structlog.processors.JSONRenderer(ensure_ascii=False, default=str)
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    )
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(_level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(_level, logging.WARNING))


def is_debugging() -> bool:
    """Whether ``log_level`` is debug, so that a bug's traceback is wanted."""
    return _level <= logging.DEBUG


def mask_secrets(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Replace passwords in URLs, and every value whose name tells that it is a secret."""
    for name, value in event.items():
        event[name] = _MASK if _SECRET_NAME.search(name) else masked(value)
    return event


def masked(value: Any) -> Any:
    """``value`` without the passwords of URLs in it, and without secrets by their name."""
    if isinstance(value, str):
        return _URL_PASSWORD.sub(rf"\1{_MASK}", value)
    if isinstance(value, Mapping):
        return {
            name: _MASK if _SECRET_NAME.search(str(name)) else masked(item)
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [masked(item) for item in value]
    return value
