"""The facts of one relay in one place: metrics, probes and page say the same."""

from __future__ import annotations

import platform
import time

from cdc_relay import about
from cdc_relay.config import Settings
from cdc_relay.http import health
from cdc_relay.http.history import History, oldest_s
from cdc_relay.http.looks import Looks
from cdc_relay.vitals import Vitals


class Report:
    """Answers from memory; any thread."""

    def __init__(self, settings: Settings, vitals: Vitals, looks: Looks, history: History) -> None:
        self.settings = settings
        self.vitals = vitals
        self.looks = looks
        self.history = history
        self.version = about.version()
        self.python = platform.python_version()
        self.compiled = about.decoder() == "compiled"
        self.marks = settings.mark != "none"
        """Whether sent rows leave the pending ones."""

    def alive(self) -> list[str]:
        """Why the relay is stuck; empty where it is alive."""
        return health.alive(self.vitals, self.settings, time.monotonic())

    def ready(self) -> list[str]:
        """Why the relay cannot carry events now; empty where it does."""
        return health.ready(self.vitals, self.looks, self.settings, time.monotonic())

    def up(self) -> dict[str, bool]:
        """Whether reader, database and broker are well."""
        return health.up(self.vitals, self.looks, self.settings, time.monotonic())

    def oldest_s(self) -> float | None:
        """Age of the oldest pending row; None where none is pending."""
        return oldest_s(self.looks, time.monotonic())

    def horizon_s(self) -> float | None:
        """Seconds until the server may purge what the relay has yet to read, at least; None where
        that is not known."""
        table, vitals = self.looks.table.seen, self.vitals
        if table is None or table.retention is None or vitals.position is None:
            return None
        return table.retention.horizon_s(
            vitals.position, vitals.commit_time / 1e6, time.time() + table.clock_offset_s
        )
