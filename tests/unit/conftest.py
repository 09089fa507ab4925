"""What every unit test leaves as it was."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog

from cdc_relay import telemetry


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Commands set the process's logging up, on a stderr that ends with their test."""
    root = logging.getLogger()
    handlers, level, ours = root.handlers[:], root.level, telemetry._level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    telemetry._level = ours
    structlog.reset_defaults()
