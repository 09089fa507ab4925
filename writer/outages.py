"""What an error says of the database: that it is away, that the connection is lost, that the
transaction is gone.

The numbers are those of the server and client error references of MySQL and MariaDB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, exc, insert
from sqlalchemy import event as listeners
from sqlalchemy.engine import Dialect, Engine, ExceptionContext
from sqlalchemy.orm import Session

if TYPE_CHECKING:
    from .inbox import Inbox

# The server has rolled the whole transaction back: a deadlock; MariaDB's innodb_snapshot_isolation.
_ROLLED_BACK: Final = (1213, 1020)
_LOCK_TIMEOUT: Final = 1205
# The connection is gone: cut, shut down, killed, idle for too long.
_LOST_CODES: Final = frozenset(
    [1053, 1152, 1158, 1159, 1160, 1161, 1184, 1927, 2006, 2013, 2055, 4031]
)
# Errors of the server that say nothing about the statement: too many connections, shutdown, lost
# connections, lock timeout, deadlock, read-only during a failover.
_OUTAGE_CODES: Final = frozenset(
    [1040, 1077, 1079, 1203, 1836, 2002, 2003, _LOCK_TIMEOUT, *_ROLLED_BACK, *_LOST_CODES]
)
# "The server runs with the option ...": an outage where it is read-only, or super-read-only.
_OPTION_PREVENTS: Final = 1290


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came of: services put errors of theirs around the driver's."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def is_outage(error: BaseException) -> bool:
    if not isinstance(error, exc.DBAPIError):
        return False
    code = code_of(error.orig)
    read_only = code == _OPTION_PREVENTS and "read-only" in str(error.orig)
    return is_lost(error) or code in _OUTAGE_CODES or read_only


def is_lost(error: BaseException) -> bool:
    return isinstance(error, exc.DBAPIError) and (
        error.connection_invalidated or code_of(error.orig) in _LOST_CODES
    )


class Rollbacks:
    """Notices an error with which the server has rolled back all of the event's transaction, the
    claim included, and which the handler may have caught: what follows is another transaction.

    A deadlock is one, and with ``innodb_rollback_on_timeout`` a lock timeout.
    """

    def __init__(self) -> None:
        self._engines: dict[Dialect, Engine] = {}
        self._info: object = None
        self._found: BaseException | None = None

    def watch(self, session: Session, inbox: Inbox) -> None:
        """Begin with the transaction of ``session``."""
        connection = session.connection(bind_arguments={"clause": insert(inbox.table)})
        if connection.dialect not in self._engines:
            self._engines[connection.dialect] = connection.engine
            listeners.listen(connection.engine, "handle_error", self._see)
        self._info, self._found = connection.info, None

    def check(self) -> None:
        """Raise that error, if there was one."""
        if self._found is not None:
            raise self._found

    def close(self) -> None:
        for engine in self._engines.values():
            listeners.remove(engine, "handle_error", self._see)

    def _see(self, context: ExceptionContext) -> None:
        connection, code = context.connection, code_of(context.original_exception)
        if connection is None or code not in (*_ROLLED_BACK, _LOCK_TIMEOUT):
            return
        if connection.closed or connection.invalidated or connection.info is not self._info:
            return
        if code != _LOCK_TIMEOUT or _rolls_back_on_timeout(connection):
            self._found = context.sqlalchemy_exception


def _rolls_back_on_timeout(connection: Connection) -> bool:
    try:
        return bool(connection.exec_driver_sql("SELECT @@innodb_rollback_on_timeout").scalar())
    except exc.SQLAlchemyError:
        return True  # nothing is lost by trying again


def code_of(error: BaseException | None) -> object:
    return error.args[0] if error is not None and error.args else None
