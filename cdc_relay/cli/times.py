"""Points in time on the command line, and what the commands that read topics share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import click

from cdc_relay.config import Settings, seconds
from cdc_relay.database import connected, describe_table, engine
from cdc_relay.router import Router
from cdc_relay.store import Store


def moment(_context: object, parameter: click.Parameter, value: str | None) -> float | None:
    """Callback of an option that is a point in time: seconds since 1970 where it was a time,
    minus the seconds where it was a duration (so many ago, by the database's clock)."""
    if value is None:
        return None
    try:
        return -seconds(value)
    except ValueError:
        pass
    try:
        at = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is neither a duration (2h ago is written 2h) nor a time "
            "(2026-05-01T12:00:00Z)",
            param=parameter,
        ) from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def microseconds(at: float | None, now_us: int) -> int | None:
    """A ``moment`` as microseconds since 1970, in whole milliseconds."""
    if at is None:
        return None
    us = round(at * 1e6) if at > 0 else now_us + round(at * 1e6)
    return us // 1000 * 1000


@contextmanager
def opened(settings: Settings) -> Iterator[tuple[Store, Router]]:
    """The table, and the router that its rows go through."""
    settings.require("database_url", "kafka_bootstrap")
    pool = engine(settings)
    try:
        with connected(pool) as connection:
            shape = describe_table(connection, settings)
        yield Store(pool, shape), settings.router(shape.payload_kind, shape.extra)
    finally:
        pool.dispose()
