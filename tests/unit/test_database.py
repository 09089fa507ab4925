"""Connection arguments and error lines, without a server."""

from __future__ import annotations

import socket
from pathlib import Path
from threading import Thread
from typing import Any

import pymysql
import pytest
from sqlalchemy import exc
from sqlalchemy.engine import make_url

from cdc_relay.config import Settings
from cdc_relay.database import (
    connect_arguments,
    connected,
    database_errors,
    engine,
    explain,
    retry_locked,
)
from cdc_relay.errors import (
    ChangedTableError,
    ConfigError,
    LockedError,
    SourceError,
    SourceUnavailableError,
)

URL = "mysql+pymysql://relay:s3cr€t@db.example:3307/shop"


def arguments(query: str = "", url: str = URL, **settings: object) -> dict[str, Any]:
    return connect_arguments(Settings.model_validate({"database_url": url + query, **settings}))


def test_address_and_login() -> None:
    given = arguments()
    assert given == {
        "host": "db.example",
        "port": 3307,
        "user": "relay",
        "password": "s3cr€t".encode(),
        "database": "shop",
        "connect_timeout": 10,
        "charset": "utf8mb4",
    }
    assert arguments(url="mysql://root@/shop")["host"] == "localhost"


def test_options_of_the_url() -> None:
    given = arguments("?unix_socket=/run/my.sock&connect_timeout=3&read_timeout=9&local_infile=no")
    assert given["unix_socket"] == "/run/my.sock"
    assert (given["connect_timeout"], given["read_timeout"]) == (3, 9)
    assert given["local_infile"] is False
    # Whatever the URL says: bytes must come as SELECT gives them in utf8mb4.
    assert arguments("?charset=latin1")["charset"] == "utf8mb4"


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    for name in ("ca.pem", "cert.pem", "key.pem", "other.pem"):
        (tmp_path / name).touch()
    return tmp_path / "ca.pem"


def test_tls_of_the_settings(ca: Path) -> None:
    home = ca.parent
    given = arguments(
        database_tls_ca=ca,
        database_tls_cert=home / "cert.pem",
        database_tls_key=home / "key.pem",
    )
    expected = {"ca": ca, "cert": home / "cert.pem", "key": home / "key.pem"}
    assert given["ssl"] == {name: str(path) for name, path in expected.items()}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("?ssl_mode=REQUIRED", {"verify_mode": False, "check_hostname": False}),
        ("?ssl_mode=verify_ca", {"verify_mode": True, "check_hostname": False}),
        ("?ssl_mode=VERIFY_IDENTITY", {"verify_mode": True, "check_hostname": True}),
        ("?ssl_check_hostname=false", {"check_hostname": False}),
        ("?ssl_verify_identity=1", {"check_hostname": True}),
        ("?ssl_verify_cert=true", {"verify_mode": True}),
        ("?ssl_cipher=AES&ssl_key_password=x", {"cipher": "AES", "password": "x"}),
    ],
)
def test_tls_of_the_url(query: str, expected: dict[str, object]) -> None:
    assert arguments(query)["ssl"] == expected


def test_tls_files_of_the_url_and_of_the_settings(ca: Path) -> None:
    other = ca.parent / "other.pem"
    assert arguments(f"?ssl_ca={other}")["ssl"] == {"ca": str(other)}
    assert arguments(f"?ssl_ca={other}", database_tls_ca=ca)["ssl"] == {"ca": str(ca)}


@pytest.mark.parametrize("query", ["?ssl_disabled=true", "?ssl_mode=DISABLED"])
def test_tls_switched_off(query: str, ca: Path) -> None:
    assert arguments(query)["ssl_disabled"] is True
    # A CA in the settings asks for verified TLS on every connection.
    assert "ssl_disabled" not in arguments(query, database_tls_ca=ca)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("?foo=1", "'foo' is not an option"),
        ("?conv=1", "'conv' is not an option"),
        ("?passwd=x", "'passwd' is not an option"),
        ("?connect_timeout=soon", "connect_timeout=soon is not a whole number"),
        ("?local_infile=maybe", "is not true or false"),
        ("?ssl_mode=SOMETIMES", "ssl_mode=SOMETIMES is not one of"),
        ("?ssl_check_hostname=perhaps", "is not true or false"),
        ("?ssl_ca=/no/such.pem", "cannot read /no/such.pem"),
    ],
)
def test_wrong_options_of_the_url(query: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arguments(query)


def test_an_engine_needs_a_url_and_shows_no_password() -> None:
    with pytest.raises(ConfigError, match="database_url is not set"):
        engine(Settings())
    made = engine(Settings(database_url=URL))
    assert "s3cr" not in repr(made)
    made.dispose()


def test_a_server_that_never_greets_is_away_soon() -> None:
    # The kernel of a server that hangs still takes connections.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        made = engine(
            Settings(database_url=f"mysql+pymysql://u@127.0.0.1:{port}/s?connect_timeout=1")
        )
        found: list[Exception] = []

        def connect() -> None:
            try:
                with connected(made):
                    pass
            except Exception as error:
                found.append(error)

        thread = Thread(target=connect, daemon=True)
        thread.start()
        thread.join(60)  # a statement may take 120 s
    made.dispose()
    [error] = found
    assert isinstance(error, SourceUnavailableError)
    assert "does not answer" in str(error)


def test_a_greeting_of_which_the_network_swallowed_a_part() -> None:
    """What the driver calls an internal error is a network that may heal."""

    def greet() -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"\x01\x00\x00\x01\xff")  # the second packet first

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = Thread(target=greet, daemon=True)
        thread.start()
        port = server.getsockname()[1]
        made = engine(Settings(database_url=f"mysql+pymysql://u@127.0.0.1:{port}/s"))
        said = "does not answer as it should: Packet"
        with pytest.raises(SourceUnavailableError, match=said), connected(made):
            pass
        thread.join(10)
    made.dispose()


# --- errors ------------------------------------------------------------------------------------

ERRORS: list[tuple[Exception, type[SourceError], str]] = [
    (
        pymysql.err.OperationalError(1045, "Access denied for user 'u'@'h' (using password: YES)"),
        SourceError,
        "db.example:3307 refused the login: Access denied for user 'u'@'h'",
    ),
    (pymysql.err.OperationalError(1698, "Access denied for user 'u'@'h'"), SourceError, "'u'@'h'"),
    (
        pymysql.err.OperationalError(1049, "Unknown database 'shop'"),
        SourceError,
        "has no schema 'shop'",
    ),
    (
        pymysql.err.ProgrammingError(1146, "Table 'shop.outbox_event' doesn't exist"),
        SourceUnavailableError,
        "table shop.outbox_event does not exist: run cdc-relay init",
    ),
    (
        pymysql.err.OperationalError(
            1142, "UPDATE command denied to user 'u'@'h' for table 'outbox_event'"
        ),
        SourceError,
        "missing grant: GRANT UPDATE ON `shop`.`outbox_event` TO 'u'@'h'",
    ),
    (
        pymysql.err.OperationalError(
            1142, "SELECT command denied to user 'u'@'h' for table `shop`.`outbox_event`"
        ),
        SourceError,
        "missing grant: GRANT SELECT ON `shop`.`outbox_event` TO 'u'@'h'",
    ),
    (
        pymysql.err.OperationalError(1044, "Access denied for user 'u'@'h' to database 'shop'"),
        SourceError,
        "missing grant: Access denied for user 'u'@'h' to database 'shop'",
    ),
    (
        pymysql.err.OperationalError(
            1227, "Access denied; you need (at least one of) the REPLICATION SLAVE privilege(s)"
        ),
        SourceError,
        "missing grant: Access denied; you need (at least one of) the REPLICATION SLAVE",
    ),
    (
        pymysql.err.OperationalError(2003, "Can't connect to MySQL server on 'db' (refused)"),
        SourceUnavailableError,
        "db.example:3307 does not answer: Can't connect",
    ),
    (pymysql.err.OperationalError(2006, "gone"), SourceUnavailableError, "does not answer: gone"),
    (pymysql.err.OperationalError(2013, "lost"), SourceUnavailableError, "does not answer: lost"),
    (pymysql.err.InterfaceError(0, ""), SourceUnavailableError, "connection lost"),
    (pymysql.err.OperationalError(1213, "Deadlock"), LockedError, "hold the rows"),
    (
        pymysql.err.OperationalError(1290, "--read-only"),
        SourceUnavailableError,
        "db.example:3307 cannot do it now: --read-only",  # it does answer
    ),
    (pymysql.err.OperationalError(1114, "table is full"), SourceUnavailableError, "is full"),
    (pymysql.err.OperationalError(1047, "not prepared"), SourceUnavailableError, "not prepared"),
    (pymysql.err.OperationalError(3101, "certification"), SourceUnavailableError, "certification"),
    (pymysql.err.OperationalError(2026, "no SSL"), SourceError, "offers no TLS as asked"),
    (ConnectionResetError(104, "reset"), SourceUnavailableError, "does not answer"),
    (exc.TimeoutError("pool"), SourceUnavailableError, "does not answer: pool"),
    (pymysql.err.ProgrammingError(1064, "bad\nsyntax"), SourceError, "bad syntax (1064)"),
    (
        pymysql.err.OperationalError(1054, "Unknown column 'sent_at' in 'field list'"),
        ChangedTableError,
        "Unknown column 'sent_at'",
    ),
    (pymysql.err.OperationalError(1176, "Key 'k' doesn't exist"), ChangedTableError, "Key 'k'"),
]


@pytest.mark.parametrize(("error", "kind", "line"), ERRORS)
def test_each_error_is_one_line(error: Exception, kind: type[SourceError], line: str) -> None:
    wrapped = exc.DBAPIError("SELECT", (), error) if isinstance(error, pymysql.Error) else error
    for raised in (error, wrapped):
        with pytest.raises(SourceError) as caught, database_errors(make_url(URL)):
            raise raised
        assert type(caught.value) is kind
        assert line in str(caught.value)
        assert "\n" not in str(caught.value)
        assert "s3cr" not in str(caught.value)


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), database_errors(make_url(URL)):
        raise KeyError
    original = SourceError("as it is")
    with pytest.raises(SourceError) as caught, database_errors(make_url(URL)):
        raise original
    assert caught.value is original


def test_explain_without_a_message() -> None:
    assert "refused a statement" in str(explain(pymysql.err.Error(), make_url(URL)))


def deadlock(code: int = 1213) -> exc.DBAPIError:
    return exc.DBAPIError("UPDATE", (), pymysql.err.OperationalError(code, "x"))


@pytest.fixture(autouse=True)
def _no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdc_relay.database.time.sleep", lambda _seconds: None)


@pytest.mark.parametrize("code", [1205, 1213])
def test_locks_are_tried_again(code: int) -> None:
    errors = [deadlock(code), deadlock(code)]

    def action() -> str:
        if errors:
            raise errors.pop()
        return "done"

    assert retry_locked(action) == "done"


def test_who_does_not_wait_for_locks_is_told_at_once() -> None:
    calls = []

    def action() -> None:
        calls.append(len(calls))
        raise deadlock(1205 if len(calls) == 3 else 1213)

    with pytest.raises(exc.DBAPIError, match="1205"):
        retry_locked(action, waits=False)
    assert len(calls) == 3


def test_retries_end_and_other_errors_are_not_retried() -> None:
    calls = []

    def action(code: int) -> None:
        calls.append(code)
        raise deadlock(code)

    for code, times in ((1213, 5), (1062, 1)):
        calls.clear()
        with pytest.raises(exc.DBAPIError):
            retry_locked(lambda code=code: action(code))  # type: ignore[misc]
        assert len(calls) == times
