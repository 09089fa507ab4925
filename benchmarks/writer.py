"""What ``Outbox.add`` costs beside a raw INSERT, and ``add_all`` beside many ``add``."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, Final

from sqlalchemy import Connection, create_engine
from sqlalchemy.orm import Session

from benchmarks.figures import Figure
from benchmarks.place import Place
from cdc_relay.outbox import DEFAULT_TABLE
from dev.console import say
from writer import EventFields, Outbox

_ROWS: Final = 1000
_PAYLOAD: Final = {
    "order_id": 4711,
    "customer_id": 815,
    "total": "129.90",
    "items": [{"sku": "A-1001", "quantity": 2, "price": "64.95"}],
}
_EVENT: Final[EventFields] = {
    "aggregate_type": "order",
    "aggregate_id": "4711",
    "event_type": "ORDER_PLACED",
    "payload": _PAYLOAD,
}
# What a service would write by hand: the same row, an id and JSON made for each.
_RAW: Final = (
    f"INSERT INTO {DEFAULT_TABLE} (event_id, aggregate_type, aggregate_id, event_type, payload) "
    "VALUES (%s, %s, %s, %s, %s)"
)

_outbox = Outbox()


def measure(place: Place, runs: int) -> list[Figure]:
    """Ratios of the time of a call on one connection; the sides take turns row by row."""
    engine = create_engine(place.url)
    ratios: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {}
    try:
        for turn in range(runs + 1):
            place.clear()
            with engine.connect() as connection:
                raw, add = _in_turns(partial(_raw, connection), partial(_add, connection))
            driver = place.connect(autocommit=False)
            raw_driver, add_driver = _in_turns(
                partial(_raw_on_driver, driver), partial(_add, driver)
            )
            driver.rollback()
            with engine.connect() as connection:
                began = time.perf_counter()
                _outbox.add_all(connection, [_EVENT] * _ROWS)
                connection.rollback()
                whole = time.perf_counter() - began
                began = time.perf_counter()
                for _ in range(_ROWS):
                    _add(connection)
                connection.rollback()
                single = time.perf_counter() - began
            began = time.perf_counter()
            with Session(engine) as session, session.begin():
                _outbox.add_all(session, [_EVENT] * _ROWS)
            whole_committed = time.perf_counter() - began
            began = time.perf_counter()
            for _ in range(_ROWS):
                with Session(engine) as session, session.begin():
                    _add(session)
            committed = time.perf_counter() - began
            driver.close()
            if turn == 0:
                continue  # warms up
            for name, ratio in (
                ("add / raw INSERT, SQLAlchemy connection", add / raw),
                ("add / raw INSERT, PyMySQL connection", add_driver / raw_driver),
                ("1,000 add / add_all of 1,000, one transaction", single / whole),
                ("1,000 add, a transaction each / add_all of 1,000", committed / whole_committed),
            ):
                ratios.setdefault(name, []).append(ratio)
            for name, seconds in (
                ("raw INSERT, SQLAlchemy connection", raw),
                ("add, SQLAlchemy connection", add),
                ("raw INSERT, PyMySQL connection", raw_driver),
                ("add, PyMySQL connection", add_driver),
                ("add_all of 1,000, one row", whole),
                ("add and commit", committed),
            ):
                times.setdefault(name, []).append(seconds / _ROWS * 1e6)
            say(f"writer {turn}/{runs}: add / raw INSERT {add / raw:.2f}")
    finally:
        engine.dispose()
    return [
        *(Figure("writer", name, "×", values) for name, values in ratios.items()),
        *(Figure("writer", name, "µs", values) for name, values in times.items()),
    ]


def _in_turns(*sides: Callable[[], object]) -> list[float]:
    """What ``_ROWS`` calls of each side take, one call at a time, by the median call: a call during
    which the machine did something else says nothing about either side."""
    calls: list[list[float]] = [[] for _ in sides]
    for _ in range(_ROWS):
        for side, seconds in zip(sides, calls, strict=True):
            began = time.perf_counter()
            side()
            seconds.append(time.perf_counter() - began)
    return [median(seconds) * _ROWS for seconds in calls]


def _add(target: Any) -> None:
    _outbox.add(target, **_EVENT)


def _raw(connection: Connection) -> None:
    connection.exec_driver_sql(_RAW, _row())


def _raw_on_driver(connection: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(_RAW, _row())


def _row() -> tuple[str, ...]:
    return (str(uuid.uuid4()), "order", "4711", "ORDER_PLACED", json.dumps(_PAYLOAD))
