"""Wires a compensator and runs it: one pass, or passes until a signal."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import Any, Final

import structlog

from cdc_relay.alerts import Alerts
from cdc_relay.config import Settings
from cdc_relay.database import connected, describe_table, engine
from cdc_relay.errors import (
    CdcRelayError,
    ConfigError,
    SinkError,
    SinkUnavailableError,
    SourceUnavailableError,
)
from cdc_relay.kafka.passes import record_pass
from cdc_relay.kafka.traced import Spans
from cdc_relay.signals import stop_on_signal
from cdc_relay.store import Store

from .compensator import Compensator, Summary
from .coordination import WithRelay
from .turns import Turns

_IDLE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 30.0
# How long a pass waits for its turn: longer than the lease of one that is gone.
_TURN_S: Final = 20.0
# How long a pass waits for the targets of its alerts at its end.
_ALERTS_S: Final = 30.0
# How often a loop says that it is there.
_RECORD_S: Final = 60.0

log: Any = structlog.get_logger("compensator")


def run(settings: Settings, *, loop: bool = False, force: bool = False) -> Summary:
    """Run one pass, or with ``loop`` pass after pass until SIGTERM or SIGINT, and return what was
    done. ``force`` asks no relay. An error of the tree is in the summary (``error``,
    ``exit_code``), not raised: what was done before it counts. In a loop an unreachable database
    or broker is waited for.

    Call it from the main thread: it takes the signals over while it runs.
    """
    settings.require("database_url", "kafka_bootstrap")
    if settings.mark == "none":
        raise ConfigError(
            'mark: "none" leaves no trace of what was sent, so a pass would send it again'
        )
    started = time.monotonic()
    alerts = Alerts.of(settings)
    spans = Spans.of(settings)
    database = engine(settings)
    # To the end, alerts and record included: a signal may come in any of it.
    with stop_on_signal() as stop:
        summary, worked = Summary(), True
        try:
            with connected(database) as connection:
                shape = describe_table(connection, settings)
            store = Store(
                database,
                shape,
                max_tries=settings.max_tries,
                on_dead=settings.on_dead,
                mark="delete" if settings.mark == "delete" else "update",
                tell=alerts.dead,
                describe=lambda connection: describe_table(connection, settings),
            )
            store.check_update()
            turns = Turns(database, shape.quoted, lambda: not stop.is_set())
            compensator = Compensator(
                store,
                settings.router(shape.payload_kind, shape.extra),
                WithRelay(settings, store, stop.is_set, force=force, spans=spans),
                older_than_s=settings.older_than,
                batch=settings.batch,
                stop=stop,
                turn_over=turns.over,
            )
            summary = compensator.summary
            with closing(compensator):
                if loop:
                    alerts.start()
                    _run_passes(settings, compensator, turns, stop, started)
                else:
                    worked = _run_once(compensator, turns)
        except CdcRelayError as error:
            summary.error, summary.exit_code = str(error), error.exit_code
        finally:
            alerts.close(_ALERTS_S, stop.is_set)
            database.dispose()
            if spans is not None:
                spans.close()
        summary.seconds = time.monotonic() - started
        # Where Kafka failed the pass, it would not take the record either.
        if worked and summary.exit_code != SinkError.exit_code:
            record_pass(settings, summary.as_dict())
    return summary


def _run_once(compensator: Compensator, turns: Turns) -> bool:
    """One pass, in as many turns as others leave it; whether it had any."""
    worked = False
    while True:
        with turns.take(_TURN_S) as mine:
            if not mine:
                log.warning("another pass is at work on this table: the rest is left to it")
                return worked
            compensator.run_pass()
        worked = True
        if not compensator.handed_over:
            return True
        log.info("another pass has its turn", sent=compensator.summary.sent)


def _run_passes(
    settings: Settings,
    compensator: Compensator,
    turns: Turns,
    stop: threading.Event,
    started: float,
) -> None:
    pause = _IDLE_S
    recorded = float("-inf")
    while not stop.is_set():
        try:
            with turns.take(_TURN_S) as mine:
                while mine and not stop.is_set() and not turns.over():
                    if compensator.run_pass() == 0:
                        stop.wait(_IDLE_S)
                    pause = _IDLE_S
                    if time.monotonic() - recorded > _RECORD_S:
                        recorded = time.monotonic()
                        compensator.summary.seconds = recorded - started
                        record_pass(settings, compensator.summary.as_dict())
                compensator.release()
        except (SinkUnavailableError, SourceUnavailableError) as error:
            pause = min(pause * 2, _LONGEST_PAUSE_S)
            log.warning("waiting", reason=str(error), next_try_s=pause)
            stop.wait(pause)
