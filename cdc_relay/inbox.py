"""The clean-up of a consumer's inbox. (Claims are the writer library's business.)"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from sqlalchemy import Engine

from cdc_relay.database import database_errors, retry_locked

_ROWS: Final = 1000


def purge(
    pool: Engine,
    table: str,
    older_than_s: float,
    *,
    consumer: str | None = None,
    pause_s: float = 0.01,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[int]:
    """Delete claims that are older than ``older_than_s`` seconds by the database's clock, oldest
    first, of one consumer or of all; gives the number of rows after each batch of 1,000.

    Each batch is a transaction of its own, found by the index on ``claimed_at``, so it can be
    stopped at any point and run twice at once. Claims of now are not waited for and do not wait.
    Errors are ``SourceError`` and ``SourceUnavailableError``.
    """
    parts = table.split(".")
    where = "claimed_at < UTC_TIMESTAMP(6) - INTERVAL %s MICROSECOND"
    parameters: tuple[object, ...] = (round(older_than_s * 1_000_000),)
    if consumer is not None:
        where += " AND consumer = %s"
        parameters += (consumer,)
    name = ".".join("`" + part.replace("`", "``").replace("%", "%%") + "`" for part in parts)
    sql = f"DELETE FROM {name} WHERE {where} ORDER BY claimed_at LIMIT {_ROWS}"

    def batch() -> int:
        with pool.connect() as connection:
            return connection.exec_driver_sql(sql, parameters).rowcount

    while not stop():
        with database_errors(pool.url, made_by="what cdc-relay inbox schema prints"):
            deleted = retry_locked(batch)
        yield deleted
        if deleted < _ROWS:
            return
        time.sleep(pause_s)
