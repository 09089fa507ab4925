"""Points in time on the command line, and what the commands that read topics share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import click

from cdc_relay.config import Settings, seconds
from cdc_relay.database import connected, describe_table, engine
from cdc_relay.router import Router
from cdc_relay.store import Store

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Moment(NamedTuple):
    """A point in time, as an option gives it."""

    us: int
    """Microseconds since 1970, or before now."""
    ago: bool

    def at(self, now_us: int) -> int:
        """Microseconds since 1970, in whole milliseconds; 0 for what was before."""
        return max(0, now_us - self.us if self.ago else self.us) // 1000 * 1000


def moment(_context: object, parameter: click.Parameter, value: str | None) -> Moment | None:
    """Callback of an option that is a point in time: a time, or a duration, which is so long ago by
    the database's clock."""
    if value is None:
        return None
    try:
        return Moment(round(seconds(value) * 1e6), ago=True)
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
    since = (at if at.tzinfo else at.replace(tzinfo=UTC)) - _EPOCH
    return Moment(round(since.total_seconds() * 1e6), ago=False)


def utc(us: int) -> datetime:
    """Microseconds since 1970 as a time."""
    return _EPOCH + timedelta(microseconds=us)


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
