"""Where an event can be inserted: SQLAlchemy sessions and connections, DB-API connections.

DB-API connections are known by what they can do, not by their class, so no driver is imported.
Nothing here commits, begins or connects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Engine, Table
from sqlalchemy.orm import Session, scoped_session

from cdc_relay.errors import NotInTransactionError

Execute = Callable[[str, Sequence[object]], None]
"""Runs one statement with ``%s`` parameters in the caller's transaction."""

# SERVER_STATUS_IN_TRANS of the client protocol: a transaction is open on the server.
_IN_TRANSACTION: Final = 0x0001


def executor(target: Any, table: Table) -> Execute:
    """Return how to run a statement in the transaction of ``target``.

    A session flushes its pending objects first: the business rows, and with them the locks that
    order the events of one aggregate, come before the event's id is given out.

    Raises ``NotInTransactionError`` for a target that commits each statement by itself, and
    ``TypeError`` for something that is no target.
    """
    if isinstance(target, scoped_session):
        target = target()
    if isinstance(target, Session):
        _flush(target)
        return _sqlalchemy(target.connection(bind_arguments={"clause": table}), _SESSION_PATTERN)
    if isinstance(target, Connection):
        return _sqlalchemy(target, _CONNECTION_PATTERN)
    if isinstance(target, Engine):
        raise NotInTransactionError(
            f"an Engine has no transaction to write the event in; {_CONNECTION_PATTERN}"
        )
    if callable(getattr(target, "run_sync", None)):
        raise TypeError(
            f"{type(target).__name__} is asynchronous; "
            "await it: await session.run_sync(lambda sync: outbox.add(sync, ...))"
        )
    if callable(getattr(target, "cursor", None)):
        _refuse_autocommit(target, _DBAPI_PATTERN)
        return _dbapi(target)
    raise TypeError(
        f"{type(target).__name__} is not a Session, a Connection or a DB-API connection"
    )


_SESSION_PATTERN: Final = (
    "use an engine without AUTOCOMMIT: "
    "with Session(engine) as session, session.begin(): outbox.add(session, ...)"
)
_CONNECTION_PATTERN: Final = (
    "use an engine without AUTOCOMMIT: "
    "with engine.begin() as connection: outbox.add(connection, ...)"
)
_DBAPI_PATTERN: Final = (
    "begin a transaction first (connection.begin(), connection.autocommit(False), or "
    "transaction.atomic() in Django), then add the event, then commit"
)


def _flush(session: Session) -> None:
    # no_autoflush is respected; a flush that is under way (an add from within a flush event)
    # must not be nested, and SQLAlchemy has no public name for that.
    if session.autoflush and not getattr(session, "_flushing", False):
        session.flush()


def _sqlalchemy(connection: Connection, pattern: str) -> Execute:
    # The driver is asked, not SQLAlchemy: connect_args={"autocommit": True} is invisible to it.
    _refuse_autocommit(connection.connection.driver_connection, pattern)

    def execute(sql: str, parameters: Sequence[object]) -> None:
        connection.exec_driver_sql(sql, tuple(parameters)).close()

    return execute


def _dbapi(connection: Any) -> Execute:
    def execute(sql: str, parameters: Sequence[object]) -> None:
        cursor = connection.cursor()
        try:
            cursor.execute(sql, tuple(parameters))
        finally:
            cursor.close()

    return execute


def _refuse_autocommit(connection: Any, pattern: str) -> None:
    # In this order: Django's get_autocommit() would connect, an atomic block has done so.
    if not _in_transaction(connection) and _autocommits(connection):
        raise NotInTransactionError(
            "the connection commits each statement by itself (autocommit), so the event and the "
            f"business rows would not be one transaction; {pattern}"
        )


def _autocommits(connection: Any) -> bool:
    """PyMySQL, mysqlclient, aiomysql, asyncmy and Django have ``get_autocommit()``; MySQL
    Connector and MariaDB Connector have a property ``autocommit``."""
    get = getattr(connection, "get_autocommit", None)
    return bool(get() if callable(get) else getattr(connection, "autocommit", False))


def _in_transaction(connection: Any) -> bool:
    """Whether BEGIN was said on an autocommit connection: Django's atomic block, MySQL
    Connector's ``in_transaction``, the server's own answer in PyMySQL's ``server_status``.
    mysqlclient cannot tell, so it counts as no."""
    for name in ("in_atomic_block", "in_transaction"):
        answer = getattr(connection, name, None)
        if isinstance(answer, bool):
            return answer
    return bool(getattr(connection, "server_status", 0) & _IN_TRANSACTION)
