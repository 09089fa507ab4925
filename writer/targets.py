"""Where an event can be written: SQLAlchemy sessions and connections, DB-API connections.

DB-API connections are known by what they can do, not by their class, so no driver is imported.
Nothing here commits, begins or connects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from sqlalchemy import Connection, CursorResult, Engine, Table, TwoPhaseTransaction, insert
from sqlalchemy.orm import Session, scoped_session

from cdc_relay.errors import NotInTransactionError

from .sql import ascii_only, in_schema

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session


class DBAPIConnection(Protocol):
    """A DB-API connection: PyMySQL, mysqlclient, MySQL Connector, Django's ``connection``."""

    def cursor(self) -> Any: ...


Target: TypeAlias = Session | scoped_session[Any] | Connection | DBAPIConnection
Result = TypeVar("Result")
AsyncTarget: TypeAlias = "AsyncSession | async_scoped_session[Any] | AsyncConnection"

# SERVER_STATUS_IN_TRANS of the client protocol: a transaction is open on the server.
_IN_TRANSACTION: Final = 0x0001
# SERVER_STATUS_NO_BACKSLASH_ESCAPES: the session's sql_mode has NO_BACKSLASH_ESCAPES.
_NO_BACKSLASHES: Final = 0x0200


class Transaction(Protocol):
    """The caller's transaction. Statements have ``%s`` parameters, which arrive as they are
    whatever the connection's character set and ``sql_mode``; the drivers' errors pass."""

    @property
    def hexadecimal(self) -> bool:
        """Whether all text that needs escaping goes as hexadecimal digits, two for a byte."""

    def insert(self, sql: str, parameters: Sequence[object]) -> None:
        """Run an INSERT."""

    def upsert(self, sql: str, parameters: Sequence[object]) -> tuple[int, int]:
        """Run an INSERT ... ON DUPLICATE KEY UPDATE; returns the affected rows (1 inserted, 2
        changed) and the last insert id."""

    def number(self, sql: str) -> int:
        """Run a SELECT of one number and return it."""

    def run(self, sql: str) -> None:
        """Run a statement without parameters."""


class _OnConnection:
    """In a SQLAlchemy connection's transaction."""

    __slots__ = ("_connection", "hexadecimal")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.hexadecimal = _escapes_by_itself(connection.connection.driver_connection)

    def insert(self, sql: str, parameters: Sequence[object]) -> None:
        self._run(sql, parameters)

    def upsert(self, sql: str, parameters: Sequence[object]) -> tuple[int, int]:
        result = self._run(sql, parameters)
        return result.rowcount, result.lastrowid or 0

    def _run(self, sql: str, parameters: Sequence[object]) -> CursorResult[Any]:
        options = self._connection.get_execution_options()
        if schemas := options.get("schema_translate_map"):
            sql = in_schema(sql, schemas)
        # Streaming is for a SELECT; asynchronous drivers would not give the last insert id.
        own = {"stream_results": False} if "stream_results" in options else None
        return self._connection.exec_driver_sql(
            *ascii_only(sql, parameters, self.hexadecimal), execution_options=own
        )

    def number(self, sql: str) -> int:
        return int(self._connection.exec_driver_sql(sql).scalar_one())

    def run(self, sql: str) -> None:
        self._connection.exec_driver_sql(sql)


class _OnDBAPI:
    """In a DB-API connection's transaction."""

    __slots__ = ("_connection", "hexadecimal")

    def __init__(self, connection: DBAPIConnection) -> None:
        self._connection = connection
        # Django's connection has the driver's inside.
        self.hexadecimal = _escapes_by_itself(getattr(connection, "connection", connection))

    def insert(self, sql: str, parameters: Sequence[object]) -> None:
        cursor = self._connection.cursor()
        try:
            cursor.execute(*ascii_only(sql, parameters, self.hexadecimal))
        finally:
            cursor.close()

    def upsert(self, sql: str, parameters: Sequence[object]) -> tuple[int, int]:
        cursor = self._connection.cursor()
        try:
            cursor.execute(*ascii_only(sql, parameters, self.hexadecimal))
            return cursor.rowcount, cursor.lastrowid or 0
        finally:
            cursor.close()

    def number(self, sql: str) -> int:
        cursor = self._connection.cursor()
        try:
            cursor.execute(sql)
            [[value]] = [
                list(row.values() if isinstance(row, dict) else row) for row in cursor.fetchall()
            ]
            return int(value)
        finally:
            cursor.close()

    def run(self, sql: str) -> None:
        cursor = self._connection.cursor()
        try:
            cursor.execute(sql)
        finally:
            cursor.close()


@contextmanager
def savepoint(inside: Transaction, name: str) -> Iterator[None]:
    """Undo what is run in the block where it raises."""
    inside.run(f"SAVEPOINT {name}")
    try:
        yield
    except Exception:
        with suppress(Exception):  # a deadlock or a lost connection has undone it, and more
            inside.run(f"ROLLBACK TO SAVEPOINT {name}")
        raise
    inside.run(f"RELEASE SAVEPOINT {name}")


def transaction(target: Any, table: Table, call: str) -> Transaction:
    """Return the transaction of ``target``; ``table`` chooses among a session's binds and ``call``
    is what the caller wrote (``outbox.add``), for the errors.

    A session flushes its pending objects first: the business rows, and with them the locks that
    order the events of one aggregate, come before the event's id is given out.

    Raises ``NotInTransactionError`` for a target that commits each statement by itself, and
    ``TypeError`` for something that is no target.
    """
    if isinstance(target, scoped_session):
        target = target()
    if isinstance(target, Session):
        _flush(target)
        # As for any INSERT: a session that reads from replicas sends it to the primary.
        connection = target.connection(bind_arguments={"clause": insert(table)})
        return _on_connection(connection, f"{_SESSION} {call}(session, ...)")
    if isinstance(target, Connection):
        return _on_connection(target, f"{_CONNECTION} {call}(connection, ...)")
    if isinstance(target, Engine):
        raise NotInTransactionError(
            f"an Engine has no transaction to write in: {_CONNECTION} {call}(connection, ...)"
        )
    if callable(getattr(target, "run_sync", None)) or _is_async_scoped(target):
        raise TypeError(
            f"{type(target).__name__} is asynchronous: await {call}_async(session, ...)"
        )
    if callable(getattr(target, "cursor", None)):
        if _commits_by_itself(target):
            raise _refusal(_dbapi_pattern(target, call))
        return _OnDBAPI(target)
    raise TypeError(
        f"{type(target).__name__} is not a Session, a Connection or a DB-API connection"
    )


async def run_sync(target: AsyncTarget, call: str, body: Callable[[Any], Result]) -> Result:
    """Run ``body`` with the session or connection inside an asynchronous one.

    Raises ``TypeError`` for a target that is not asynchronous; ``call`` as for ``transaction``.
    """
    if _is_async_scoped(target):
        scoped: Any = target
        target = scoped()
    run: Any = getattr(target, "run_sync", None)
    if not callable(run):
        raise TypeError(
            f"{type(target).__name__} is not an AsyncSession or AsyncConnection: "
            f"{call}(session, ...) is for synchronous ones"
        )
    result: Result = await run(body)
    return result


def _is_async_scoped(target: object) -> bool:
    # By name: sqlalchemy.ext.asyncio is loaded by those who use it.
    return type(target).__name__ == "async_scoped_session"


def _flush(session: Session) -> None:
    # no_autoflush is respected; a flush that is under way (an add from within a flush event)
    # must not be nested, and SQLAlchemy has no public name for that.
    if session.autoflush and not getattr(session, "_flushing", False):
        session.flush()


def _on_connection(connection: Connection, pattern: str) -> Transaction:
    if connection.dialect.name not in ("mysql", "mariadb"):
        raise TypeError(
            f"a connection to {connection.dialect.name}: the table is one of MySQL or MariaDB"
        )
    # The driver is asked, not SQLAlchemy: connect_args={"autocommit": True} is invisible to it.
    # XA START, though, was said by SQLAlchemy, and not every driver knows.
    if _commits_by_itself(connection.connection.driver_connection) and not isinstance(
        connection.get_transaction(), TwoPhaseTransaction
    ):
        raise _refusal(f"use an engine without AUTOCOMMIT: {pattern}")
    return _OnConnection(connection)


_SESSION: Final = "with Session(engine) as session, session.begin():"
_CONNECTION: Final = "with engine.begin() as connection:"


def _refusal(pattern: str) -> NotInTransactionError:
    return NotInTransactionError(
        "the connection commits each statement by itself (autocommit), so the event and the "
        f"business rows would not be one transaction; {pattern}"
    )


def _dbapi_pattern(connection: object, call: str) -> str:
    if hasattr(connection, "in_atomic_block"):
        return f"with transaction.atomic(): {call}(connection, ...)"
    begin = "connection.begin()"
    if hasattr(connection, "start_transaction"):
        begin = "connection.start_transaction()"
    elif not hasattr(connection, "server_status"):
        # mysqlclient: what BEGIN did cannot be seen from outside.
        begin = "connection.autocommit(False)"
    return f"{begin}; {call}(connection, ...); connection.commit()"


def _commits_by_itself(connection: Any) -> bool:
    # In this order: Django's get_autocommit() would connect, an atomic block has done so.
    return not _in_transaction(connection) and _autocommits(connection)


def _autocommits(connection: Any) -> bool:
    """PyMySQL, mysqlclient, aiomysql, asyncmy and Django have ``get_autocommit()``; MySQL
    Connector and MariaDB Connector have a property ``autocommit``."""
    get = getattr(connection, "get_autocommit", None)
    return bool(get() if callable(get) else getattr(connection, "autocommit", False))


def _escapes_by_itself(connection: Any) -> bool:
    """Whether parameters are escaped by a ``converter`` of MySQL Connector's (``use_pure``, or one
    of the service's own): it goes by the ``sql_mode`` of the first statement, or by none at all,
    whatever the session's is now. Or by asyncmy, which goes by NO_BACKSLASH_ESCAPES for too long
    once it was set: it overlooks a server status of 0."""
    status = getattr(connection, "server_status", None)
    if isinstance(status, int) and status & _NO_BACKSLASHES:
        return True
    return callable(getattr(getattr(connection, "converter", None), "escape", None))


def _in_transaction(connection: Any) -> bool:
    """Whether BEGIN was said on an autocommit connection: Django's atomic block, MySQL
    Connector's ``in_transaction``, the server's own answer in PyMySQL's ``server_status``.
    mysqlclient cannot tell, so it counts as no."""
    status = getattr(connection, "server_status", None)
    if isinstance(status, int):
        return bool(status & _IN_TRANSACTION)
    for name in ("in_atomic_block", "in_transaction"):
        answer = getattr(connection, name, None)
        if isinstance(answer, bool):
            return answer
    return False
