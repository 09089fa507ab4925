"""The one door to the database: how ours connect, what a wrong answer means, what the table is.

Every connection of ours, the pooled SQL ones and the relay's binlog one, is built from
``connect_arguments``, so one URL and one TLS setting serve them all. Every database error leaves
through ``database_errors`` as one clear line of the error tree.
"""

from __future__ import annotations

import difflib
import random
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, Final, TypeVar

import pymysql
from sqlalchemy import Connection, Engine, create_engine, event, exc
from sqlalchemy.engine import URL
from sqlalchemy.engine.default import DefaultDialect

from cdc_relay.cloudevents import PayloadKind
from cdc_relay.columns import Columns
from cdc_relay.config import Settings
from cdc_relay.errors import (
    ChangedTableError,
    ConfigError,
    LockedError,
    SourceError,
    SourceUnavailableError,
)
from cdc_relay.outbox import COLUMNS, REQUIRED_COLUMNS
from cdc_relay.router import ValueKind

_CONNECT_TIMEOUT_S: Final = 10
# Long enough for a count over a large table; short enough that a dead link is noticed.
_READ_TIMEOUT_S: Final = 120
# Short, so that who can pass over a locked row learns of it soon; others wait again.
_LOCK_WAIT_S: Final = 1
# In all, for a lock that others hold.
_LOCK_PATIENCE_S: Final = 25.0
_NO_LIMIT: Final = 2**64 - 1
# From 2.0.43 on SQLAlchemy can leave out the rollback of a connection in autocommit.
_NO_ROLLBACK: Final[dict[str, Any]] = (
    {"skip_autocommit_rollback": True}
    if "skip_autocommit_rollback" in signature(DefaultDialect.__init__).parameters
    else {}
)

_T = TypeVar("_T")


# --- connecting -----------------------------------------------------------------------------


def connect_arguments(settings: Settings) -> dict[str, Any]:
    """Return PyMySQL's keyword arguments for ``settings``: address, login, charset and TLS.

    The URL's query may hold any keyword of ``pymysql.connect`` that is a number, a switch or a
    text, and the TLS names of SQLAlchemy and of the MySQL clients (``ssl_ca``, ``ssl_cert``,
    ``ssl_key``, ``ssl_check_hostname``, ``ssl_mode``, …). The ``database_tls_*`` settings win
    over the URL. Raises ``ConfigError`` for a key that does not exist or a file that cannot be
    read. No connection is made.
    """
    url = settings.url()
    arguments: dict[str, Any] = {
        "host": url.host or "localhost",
        "port": url.port or 3306,
        "user": url.username,
        # PyMySQL would encode text as Latin-1; the server compares UTF-8.
        "password": (url.password or "").encode(),
        "database": url.database,
        "connect_timeout": _CONNECT_TIMEOUT_S,
    }
    query = {
        key: value if isinstance(value, str) else value[-1] for key, value in url.query.items()
    }
    arguments |= _tls_arguments(query, settings)
    allowed = signature(pymysql.Connection.__init__).parameters
    for key, value in query.items():
        if key not in allowed or key in ("ssl", "conv", "cursorclass", "db", "passwd"):
            raise ConfigError(f"database_url: {key!r} is not an option of a database connection")
        arguments[key] = _typed(key, value, allowed[key].default)
    # What the server sends must be the payload's own bytes, whatever the URL says.
    arguments["charset"] = "utf8mb4"
    return arguments


def engine(settings: Settings) -> Engine:
    """Return the engine of our SQL connections. It connects on first use.

    Each statement is its own transaction (autocommit), so no read view and no row lock outlives
    a statement; READ COMMITTED, so that an UPDATE locks the rows it changes and no gaps; session
    time zone UTC. Connections are checked before use and pooled (two, four at a peak). Threads
    may share it. Dispose of it at the end.
    """
    settings.require("database_url")
    arguments = {"read_timeout": _READ_TIMEOUT_S, "write_timeout": _READ_TIMEOUT_S}
    arguments |= connect_arguments(settings)
    made = create_engine(
        settings.url().set(query={}),
        connect_args=arguments,
        isolation_level="AUTOCOMMIT",
        pool_size=2,
        max_overflow=2,
        # Nothing to roll back in autocommit: two round trips less for each batch of marks.
        pool_reset_on_return=None,
        **_NO_ROLLBACK,
    )
    event.listen(made, "do_connect", _connect)
    event.listen(made, "connect", _prepare_session)

    def check(connection: Any, record: Any, _proxy: object) -> None:
        _check_connection(connection, record, settings.read_timeout)

    event.listen(made, "checkout", check)
    event.listen(made, "checkin", _forget)
    if settings.mark_row_image == "minimal":
        event.listen(made, "connect", _minimal_row_image)
    return made


def replica_engine(settings: Settings, address: str) -> Engine:
    """Return an engine like ``engine``'s to another server, ``host:port``: same user, password and
    TLS."""
    host, _, port = address.partition(":")
    url = settings.url().set(host=host, port=int(port or 3306))
    there = {"database_url": url.render_as_string(hide_password=False)}
    return engine(settings.model_copy(update={**there, "database_password_file": None}))


def _connect(_dialect: object, _record: object, _args: object, arguments: dict[str, Any]) -> Any:
    """Connect, and wait for the greeting and the answer to the login no longer than for the
    connection. (PyMySQL's own ``connect_timeout`` ends with TCP's handshake, which the kernel of a
    server that hangs still answers; the rest would wait as long as a statement may take.)"""
    connection: Any = pymysql.connect(**{**arguments, "defer_connect": True})
    patience = connection._read_timeout
    connection._read_timeout = min(
        patience or connection.connect_timeout, connection.connect_timeout
    )
    connection.connect()
    connection._read_timeout = patience
    return connection


def _check_connection(connection: Any, record: Any, timeout: float) -> None:
    """Ask whether a pooled connection is still alive. (SQLAlchemy's own check would wait as long
    for the answer as for that of a statement; on a network that has died without a word, that is
    minutes.)"""
    if not record.info.setdefault("used", False):
        record.info["used"] = True
        return
    patience, connection._read_timeout = connection._read_timeout, timeout
    try:
        connection.ping(reconnect=False)
    except (pymysql.MySQLError, OSError):
        raise exc.InvalidatePoolError from None
    finally:
        connection._read_timeout = patience


def _forget(connection: Any, _record: object) -> None:
    """Let go of the last answer, which PyMySQL keeps until the next one: it may be large."""
    if connection is not None:  # None where it was given up
        connection._result = None


def _minimal_row_image(connection: Any, _record: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION binlog_row_image = 'MINIMAL'")


def _prepare_session(connection: Any, _record: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        # autocommit is said in so many words: the driver goes by the greeting, which claims it
        # where the server's own default (or its init_connect) is off, and marks would be lost.
        # A limit of rows for all that name none would cut off the list of the table's columns.
        cursor.execute(
            f"SET SESSION time_zone = '+00:00', innodb_lock_wait_timeout = {_LOCK_WAIT_S},"
            f" autocommit = 1, sql_select_limit = {_NO_LIMIT}"
        )


def _typed(key: str, value: str, default: object) -> object:
    if isinstance(default, bool):
        return _switch(key, value)
    if isinstance(default, int) or key.endswith("_timeout"):
        try:
            return int(value)
        except ValueError:
            raise ConfigError(f"database_url: {key}={value} is not a whole number") from None
    return value


def _switch(key: str, value: str) -> bool:
    lowered = value.lower()
    if lowered in ("true", "1", "yes", "on"):
        return True
    if lowered in ("false", "0", "no", "off"):
        return False
    raise ConfigError(f"database_url: {key}={value} is not true or false")


# The modes of the MySQL clients, as the ``ssl`` dictionary of PyMySQL.
_SSL_MODES: Final[Mapping[str, dict[str, Any]]] = {
    "DISABLED": {},
    "PREFERRED": {},
    "REQUIRED": {"verify_mode": False, "check_hostname": False},
    "VERIFY_CA": {"verify_mode": True, "check_hostname": False},
    "VERIFY_IDENTITY": {"verify_mode": True, "check_hostname": True},
}
_TLS_TEXTS: Final = ("ca", "capath", "cert", "key", "cipher")


def _tls_arguments(query: dict[str, str], settings: Settings) -> dict[str, Any]:
    """Take the TLS keys out of ``query`` and return PyMySQL's, with the settings' files."""
    tls: dict[str, Any] = {}
    mode = query.pop("ssl_mode", "").upper()
    if mode:
        if mode not in _SSL_MODES:
            raise ConfigError(
                f"database_url: ssl_mode={mode} is not one of {', '.join(_SSL_MODES)}"
            )
        tls |= _SSL_MODES[mode]
    if "ssl_verify_cert" in query:
        tls["verify_mode"] = _switch("ssl_verify_cert", query.pop("ssl_verify_cert"))
    for key in ("ssl_check_hostname", "ssl_verify_identity"):
        if key in query:
            tls["check_hostname"] = _switch(key, query.pop(key))
    if "ssl_key_password" in query:
        tls["password"] = query.pop("ssl_key_password")
    for name in _TLS_TEXTS:
        if f"ssl_{name}" in query:
            tls[name] = query.pop(f"ssl_{name}")
    disabled = mode == "DISABLED" or _switch("ssl_disabled", query.pop("ssl_disabled", "false"))
    for name in ("ca", "cert", "key"):
        path = getattr(settings, f"database_tls_{name}")
        if path is not None:
            tls[name] = str(path)
        if name in tls:
            _readable(name, Path(tls[name]))
    if settings.database_tls_ca is None and disabled:
        return {"ssl_disabled": True}
    # No key at all leaves PyMySQL at its own default: TLS where the server offers it.
    return {"ssl": tls} if tls else {}


def _readable(name: str, path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"database_tls_{name}: cannot read {path}: {error.strerror}") from None


# --- errors ---------------------------------------------------------------------------------

# Numbers of mysqld_error.h and of the client library's errmsg.h.
_ACCESS_DENIED: Final = (1045, 1698, 1130, 1251, 1820, 1862, 2059, 2061, 3118, 4151)
_UNKNOWN_DATABASE: Final = 1049
_NO_SUCH_TABLE: Final = (1146, 1932)
_NOT_AS_IT_WAS: Final = (1054, 1176)  # no such column, no such index
_MISSING_GRANT: Final = (1044, 1142, 1143, 1227, 1370)
_TLS_FAILED: Final = 2026
_DEADLOCK: Final = 1213
_LOCKED: Final = (1205, _DEADLOCK)
# Times that a transaction may be the victim.
_DEADLOCKS: Final = 5
# Too many connections, shutting down, read-only (a failover under way), killed, lost.
_UNAVAILABLE: Final = (
    *(0, 1040, 1053, 1077, 1079, 1129, 1152, 1158, 1159, 1160, 1161, 1203, 1226, 1290, 1317),
    *(1792, 1836, 1927, 2002, 2003, 2006, 2013, 2014, 2027, 2055, 3032, 3169, 4031),
    # Disk or table full, a node of a cluster that is not ready or rolled back, out of locks or of
    # transactions, a statement's time is over: somebody may be mending it.
    *(1021, 1047, 1114, 1180, 1206, 1637, 1969, 3024, 3100, 3101),
)
# Of those, where there was an answer: the client's own errors and the lost connections are none.
_NO_ANSWER: Final = (0, 1053, 1077, 1079, 1152, 1158, 1159, 1160, 1161, 1927, 4031)
_DENIED: Final = re.compile(r"(.+?) command denied to user (\S+) for (?:table|column) (.+)")


@contextmanager
def database_errors(url: URL, *, made_by: str = "cdc-relay init") -> Iterator[None]:
    """Turn every error of a database in the body into ``SourceError`` or
    ``SourceUnavailableError`` with one line. ``url`` names the server; its password is never
    shown; ``made_by`` is the command that makes the table, should it be missing. Errors of the tree
    pass through as they are.
    """
    try:
        yield
    except (exc.DBAPIError, exc.TimeoutError, pymysql.MySQLError, OSError) as error:
        raise explain(error, url, made_by) from error


@contextmanager
def connected(pool: Engine) -> Iterator[Connection]:
    """Lend a connection of ``pool``; errors, that of connecting included, as above."""
    with database_errors(pool.url), pool.connect() as connection:
        yield connection


@contextmanager
def streamed(connection: Connection, sql: str) -> Iterator[Iterator[Any]]:
    """Give the rows of a SELECT one by one as they come in, so that who reads them decides how
    many he holds. What the body leaves unread is never read: ``connection`` is given up then."""
    options = connection.execution_options(stream_results=True, max_row_buffer=1)
    result = options.exec_driver_sql(sql, ())
    unread: Any = getattr(result.cursor, "_result", None)
    try:
        yield iter(result)
    finally:
        if unread is not None and unread.unbuffered_active:
            # Else PyMySQL would read all the rest before it lets go of it.
            unread.unbuffered_active = False
            unread.rows = unread.connection = None  # large, and part of a cycle
            connection.invalidate()
        result.close()


def explain(error: Exception, url: URL, made_by: str = "cdc-relay init") -> SourceError:
    """Return the error of the tree that says what ``error`` (of SQLAlchemy, of PyMySQL or of the
    socket) means for a user."""
    cause: Any = getattr(error, "orig", None) or error
    server = f"the database at {url.host or 'localhost'}:{url.port or 3306}"
    if isinstance(getattr(cause, "original_exception", None), ssl.SSLCertVerificationError):
        reason = cause.original_exception.verify_message
        return SourceError(
            f"{server} shows a certificate that is not trusted: {reason.rstrip('.')}; set "
            f"database_tls_ca (?ssl_check_hostname=false in the URL leaves the name unchecked)"
        )
    if isinstance(cause, (OSError, exc.TimeoutError)):
        return SourceUnavailableError(f"{server} does not answer: {_line(cause)}")
    code = cause.args[0] if cause.args and isinstance(cause.args[0], int) else -1
    message = _line(cause.args[1]) if len(cause.args) > 1 else _line(cause)
    if code in _ACCESS_DENIED:
        return SourceError(f"{server} refused the login: {message}")
    if code == _UNKNOWN_DATABASE:
        named = re.search(r"'([^']*)'$", message)
        schema = named[1] if named else url.database
        return SourceError(f"{server} has no schema {schema!r}: create it or mend the setting")
    if code in _NO_SUCH_TABLE:
        table = re.search(r"'(.+?)'", message)
        name = table[1] if table else "of the outbox"
        # A swap by hand, or a restore, takes it away for a moment: who is at work waits.
        return SourceUnavailableError(f"table {name} does not exist: run {made_by}")
    if code in _MISSING_GRANT:
        return SourceError(f"{server}: missing grant: {_grant(message, url)}")
    if code == _TLS_FAILED:
        return SourceError(f"{server} offers no TLS as asked: {message}")
    if code in _LOCKED:
        return LockedError(f"{server}: other sessions hold the rows: {message}")
    if code in _UNAVAILABLE:
        silent = code in _NO_ANSWER or 2000 <= code < 3000
        what = "does not answer" if silent else "cannot do it now"
        return SourceUnavailableError(f"{server} {what}: {message or 'connection lost'}")
    if code == -1 and isinstance(cause, pymysql.err.InternalError):
        # The driver's own word for packets that are out of turn: a network (a proxy, a failover)
        # swallowed some. It has given the connection up.
        return SourceUnavailableError(f"{server} does not answer as it should: {message}")
    kind = ChangedTableError if code in _NOT_AS_IT_WAS else SourceError
    return kind(f"{server} refused a statement: {message} ({code})")


def _grant(message: str, url: URL) -> str:
    denied = _DENIED.match(message)
    if denied is None:
        return message
    privilege, user, on = denied.groups()
    table = on.replace("`", "").replace("'", "").rpartition(".")[2]
    return f"GRANT {privilege} ON `{url.database}`.`{table}` TO {user} ({message})"


def _line(text: object) -> str:
    return " ".join(str(text).split())


def retry_locked(action: Callable[[], _T], *, waits: bool = True) -> _T:
    """Run ``action`` again when InnoDB chose it as the victim of a deadlock, up to five times, or
    it waited too long for a lock, for 25 seconds in all (once, where ``waits`` is false). Both
    rolled it back, so it must be one transaction. Anything else, and the last try's error, is
    raised as it came. (A few lines do not need a retry library.)
    """
    give_up_at = time.monotonic() + (_LOCK_PATIENCE_S if waits else 0.0)
    tries = deadlocks = 0
    while True:
        try:
            return action()
        except exc.DBAPIError as error:
            code = error.orig.args[0] if error.orig is not None and error.orig.args else None
            deadlocks += code == _DEADLOCK
            if code not in _LOCKED or deadlocks == _DEADLOCKS:
                raise
            if code != _DEADLOCK and time.monotonic() >= give_up_at:
                raise
        tries += 1
        # Spread the rivals, or they meet again: up to 50, 100, 200, 400 ms.
        time.sleep(random.uniform(0, 0.025 * 2 ** min(tries, 4)))


# --- the table ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ColumnShape:
    """A column as information_schema tells it."""

    name: str
    data_type: str
    """Lower case, without length: ``varchar``, ``json``, ``datetime``."""
    nullable: bool
    characters: int
    """Longest text, 0 where the type has no length."""
    charset: str
    """Character set, empty where the type has none."""


@dataclass(frozen=True, slots=True)
class TableShape:
    """The outbox table as the server has it: what may differ from our own DDL."""

    schema: str
    table: str
    columns: Mapping[str, ColumnShape]
    """All columns by name, in the table's order, those that are not ours included."""
    payload_kind: PayloadKind
    indexes: Mapping[str, tuple[str, ...]]
    """Columns of each index by its name; those that are invisible (MySQL) or ignored (MariaDB) left
    out."""
    extra: Mapping[str, ValueKind] = field(default_factory=dict)
    """The columns of the service's that the settings ask for, in the order of
    ``OutboxEvent.extra``."""
    names: Columns = field(default_factory=Columns)
    """What the table calls the columns that are ours. ``columns`` and ``indexes`` go by our names,
    as all SQL text does until ``names.sql``."""

    def force_index(self, *columns: str) -> str:
        """Return the SQL hint that makes a statement use the index that begins with ``columns``
        whatever the optimizer's statistics say, or nothing where the table has none."""
        for name, indexed in self.indexes.items():
            if indexed[: len(columns)] == columns:
                return f" FORCE INDEX ({quote(name)})".replace("%", "%%")
        return ""

    @property
    def extra_sql(self) -> str:
        """SQL of the extra columns for the end of a SELECT list, a comma before each: as the text
        that the server prints, or as bytes."""
        return "".join(
            f", `{name}`" if kind == "binary" else f", CONVERT(`{name}` USING utf8mb4)"
            for name, kind in self.extra.items()
        )

    @property
    def delete(self) -> str:
        """The head of a DELETE by id, as SQL text like ``quoted``. It goes by the primary key
        whatever the optimizer's statistics say: a small table would be read as a whole, waiting
        for rows that others hold. (Only the form for several tables takes an index hint.)"""
        return f"DELETE outbox FROM {self.quoted} AS outbox{self.force_index('id')}"

    @property
    def quoted(self) -> str:
        """`schema`.`table` for SQL text that is given to the driver with parameters."""
        return f"{quote(self.schema)}.{quote(self.table)}".replace("%", "%%")


def quote(name: str) -> str:
    """Return ``name`` as a quoted SQL identifier."""
    return "`" + name.replace("`", "``") + "`"


_TEXTS: Final = ("char", "varchar", "tinytext", "text", "mediumtext", "longtext")
_BINARIES: Final = ("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob")
_INTEGERS: Final = ("tinyint", "smallint", "mediumint", "int", "bigint")
_TIMES: Final = ("datetime", "timestamp")
_TYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "id": _INTEGERS,
    "event_id": _TEXTS,
    "aggregate_type": _TEXTS,
    "aggregate_id": _TEXTS,
    "event_type": _TEXTS,
    "payload": ("json", *_TEXTS, *_BINARIES),
    "headers": ("json", *_TEXTS),
    "status": _INTEGERS,
    "retry_count": _INTEGERS,
    "next_retry_time": _TIMES,
    "last_error": _TEXTS,
    "created_at": _TIMES,
    "updated_at": _TIMES,
    "sent_at": _TIMES,
}


def describe_table(connection: Connection, settings: Settings) -> TableShape:
    """Read the outbox table's shape, or raise ``SourceError`` with one line: it does not exist,
    is a view, is not transactional, lacks a column, or has one of a type that cannot work.

    MySQL 8.0 and later, MariaDB 10.6 and later. Reads only; leaves no transaction open.
    """
    schema, table = settings.schema_and_table()
    names = Columns(settings.columns)
    with database_errors(connection.engine.url):
        # Asked first because information_schema hides what the user may not see: this tells a
        # missing table from a missing grant.
        name = f"{quote(schema)}.{quote(table)}"
        connection.exec_driver_sql(f"SELECT 1 FROM {name} LIMIT 0".replace("%", "%%"))
        found = connection.exec_driver_sql(_TABLE_SQL, (schema, table)).one_or_none()
        if found is None:  # a view of the server's own, or dropped at this moment
            raise SourceError(
                f"{schema}.{table} is not listed as a table of this name: the outbox must be one"
            )
        rows = connection.exec_driver_sql(_COLUMNS_SQL, (schema, table)).all()
        columns = {
            names.key(name): ColumnShape(
                name, kind.lower(), bool(nullable), int(characters), charset
            )
            for name, kind, nullable, characters, charset in rows
        }
        indexes: dict[str, tuple[str, ...]] = {}
        # One that the optimizer must not use cannot be asked for by name either.
        used = "IGNORED = 'NO'" if is_mariadb(connection) else "IS_VISIBLE = 'YES'"
        sql = _INDEXES_SQL.format(used=used)
        for index, column in connection.exec_driver_sql(sql, (schema, table)):
            indexes[index] = (*indexes.get(index, ()), names.key(column))
        full_name = f"{found[0]}.{found[1]}"
        _check_shape(full_name, found[2], found[3], columns, names)
        # A partitioned table's key holds more than id.
        if indexes.get("PRIMARY", ("",))[0] != "id":
            raise SourceError(
                f"table {full_name}: column {names['id']} must be the (first of the) primary key"
            )
        if columns["status"].nullable:
            raise SourceError(
                f"table {full_name}: column {names['status']} may be NULL, and such a row is "
                f"neither pending nor sent: ALTER TABLE {full_name} MODIFY {names.sql('status')} "
                "TINYINT NOT NULL DEFAULT 0"
            )
        kind = _payload_kind(connection, schema, table, columns["payload"])
        extra = {
            name: _extra_kind(
                full_name,
                name,
                setting,
                columns,
                names,
                lambda column: _payload_kind(connection, schema, table, column),
            )
            for name, setting in settings.routing().used_by.items()
        }
    return TableShape(found[0], found[1], columns, kind, indexes, extra, names)


_TABLE_SQL: Final = (
    "SELECT TABLE_SCHEMA, TABLE_NAME, TABLE_TYPE, ENGINE FROM information_schema.TABLES"
    " WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s"
)
_COLUMNS_SQL: Final = (
    "SELECT LOWER(COLUMN_NAME), DATA_TYPE, IS_NULLABLE = 'YES',"
    " COALESCE(CHARACTER_MAXIMUM_LENGTH, 0), COALESCE(CHARACTER_SET_NAME, '')"
    " FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s"
    " ORDER BY ORDINAL_POSITION"
)
_INDEXES_SQL: Final = (
    "SELECT INDEX_NAME, COALESCE(LOWER(COLUMN_NAME), '') FROM information_schema.STATISTICS"
    " WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s AND {used} ORDER BY INDEX_NAME, SEQ_IN_INDEX"
)
# MariaDB only: MySQL's view of this name has no TABLE_NAME, and its JSON is a type of its own.
_CHECKS_SQL: Final = (
    "SELECT CHECK_CLAUSE FROM information_schema.CHECK_CONSTRAINTS"
    " WHERE CONSTRAINT_SCHEMA = %s AND TABLE_NAME = %s"
)


def seen_columns(connection: Connection, settings: Settings) -> set[str]:
    """The outbox table's columns by our names, as far as the user may see them; empty where there
    is no such table."""
    names = Columns(settings.columns)
    rows = connection.exec_driver_sql(_COLUMNS_SQL, settings.schema_and_table())
    return {names.key(str(row[0])) for row in rows}


def is_mariadb(connection: Connection) -> bool:
    """Whether the server behind ``connection`` is MariaDB."""
    return bool(getattr(connection.dialect, "is_mariadb", False))


def _check_shape(
    name: str,
    table_type: str,
    engine_name: str | None,
    columns: Mapping[str, ColumnShape],
    names: Columns,
) -> None:
    if table_type == "SYSTEM VERSIONED":
        raise SourceError(
            f"table {name} is system-versioned: each UPDATE would put its old row into the binlog "
            f"once more, as another event: ALTER TABLE {name} DROP SYSTEM VERSIONING"
        )
    if table_type != "BASE TABLE":
        raise SourceError(f"{name} is a {table_type.lower()}; the outbox must be a table")
    if str(engine_name).lower() in ("myisam", "aria", "memory", "csv", "archive", "blackhole"):
        raise SourceError(
            f"table {name} uses the engine {engine_name}, which has no transactions, so an event "
            f"would outlive a rollback: ALTER TABLE {name} ENGINE = InnoDB"
        )
    missing = [names[column] for column in REQUIRED_COLUMNS if column not in columns]
    if missing:
        raise SourceError(
            f"table {name} lacks the columns {', '.join(missing)}; cdc-relay schema prints them "
            "all, cdc-relay doctor the ALTER TABLE that adds them"
        )
    for column in COLUMNS:
        shape = columns.get(column)
        if shape is not None and shape.data_type not in _TYPES[column]:
            raise SourceError(
                f"table {name}: column {names[column]} is of type {shape.data_type}; it must be "
                f"one of {', '.join(_TYPES[column])}"
            )


_NUMBERS: Final = (*_INTEGERS, "decimal", "year")
_PRINTED: Final = ("enum", "set", "date", "time", *_TIMES)


def _extra_kind(
    table: str,
    name: str,
    setting: str,
    columns: Mapping[str, ColumnShape],
    names: Columns,
    payload_kind: Callable[[ColumnShape], PayloadKind],
) -> ValueKind:
    column = columns.get(names.key(name))
    if column is None:
        close = difflib.get_close_matches(name, [one.strip("`") for one in columns], n=1)
        raise ConfigError(
            f"table {table} has no column {name}, which {setting} names"
            + (f"; did you mean {close[0]}?" if close else "")
        )
    kinds: tuple[str, ...] = (*_TEXTS, *_BINARIES, *_NUMBERS, *_PRINTED, "json")
    if setting == "partition_column":
        kinds = _INTEGERS
    elif setting == "topic_column":
        kinds = (*_TEXTS, "enum")
    if column.data_type not in kinds:
        raise SourceError(
            f"table {table}: column {name}, which {setting} names, is of type {column.data_type}; "
            f"it must be one of {', '.join(kinds)}"
        )
    if column.data_type in _NUMBERS:
        return "number"
    return "text" if column.data_type in _PRINTED else payload_kind(column)


def _payload_kind(
    connection: Connection, schema: str, table: str, column: ColumnShape
) -> PayloadKind:
    data_type = column.data_type
    if data_type == "json":
        return "json"
    if data_type in _BINARIES:
        return "binary"
    if data_type == "longtext" and is_mariadb(connection):
        checks = connection.exec_driver_sql(_CHECKS_SQL, (schema, table)).scalars()
        valid = f"json_valid({column.name})".replace(" ", "")
        if any(re.sub(r"[`\s]", "", check).lower() == valid for check in checks):
            return "json"
    return "text"
