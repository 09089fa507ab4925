"""``cdc-relay init`` on both servers, and TLS by one setting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cdc_relay.cli import main
from cdc_relay.config import Settings
from cdc_relay.database import connect_arguments, database_errors, engine
from cdc_relay.errors import SourceError
from tests.support.sql import Database

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers given for the test run are not the command's settings."""
    for name in list(os.environ):
        if name.startswith("CDC_RELAY_"):
            monkeypatch.delenv(name)


def init(database: Database, *arguments: str) -> int:
    return main(["init", "--database-url", database.text, *arguments])


def indexes(database: Database, table: str = "outbox_event") -> set[str]:
    return {row[2] for row in database.sql(f"SHOW INDEX FROM `{table}`")}


OURS = {
    *("PRIMARY", "uk_event_id"),
    *("idx_status_aggregate", "idx_status_created", "idx_status_next_retry"),
}


def test_init_creates_the_table_once(database: Database, capsys: Capture) -> None:
    assert init(database) == 0
    assert capsys.readouterr().out == f"created table {database.name}.outbox_event\n"
    assert indexes(database) == OURS
    assert init(database) == 0
    assert "is there and fits: nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize("table", ["order", "50%", "out box", "{schema}.qualified"])
def test_init_takes_any_name(database: Database, table: str, capsys: Capture) -> None:
    table = table.format(schema=database.name)
    assert init(database, "--table", table) == 0
    assert indexes(database, table.rpartition(".")[2]) == OURS


def test_init_completes_an_empty_table_and_leaves_a_full_one(
    database: Database, capsys: Capture
) -> None:
    """As after an init that was killed between its statements."""
    database.create_outbox()
    database.sql("DROP INDEX idx_status_created ON outbox_event")
    assert init(database) == 0
    assert "created the 1 missing indexes" in capsys.readouterr().out
    assert indexes(database) == OURS
    database.sql("DROP INDEX idx_status_created ON outbox_event")
    database.sql(
        "INSERT INTO outbox_event (event_id, aggregate_type, aggregate_id, event_type)"
        " VALUES ('e', 't', 'k', 'T')"
    )
    assert init(database) == 0
    shown = capsys.readouterr().out
    assert "CREATE INDEX idx_status_created ON outbox_event (status, created_at);" in shown
    assert "idx_status_created" not in indexes(database)


def test_init_says_what_does_not_fit(database: Database, capsys: Capture) -> None:
    database.sql("CREATE TABLE outbox_event (id INT PRIMARY KEY, event_id INT)")
    assert init(database) == 3
    assert "lacks the columns aggregate_type" in capsys.readouterr().err


def test_two_inits_at_once(database: Database) -> None:
    command = [sys.executable, "-m", "cdc_relay", "init", "--database-url", database.text]
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert indexes(database) == OURS


# --- TLS ---------------------------------------------------------------------------------------


def cipher(database: Database, query: str = "", **settings: object) -> str:
    """The cipher of a pooled connection and of one made of the same arguments, as the binlog
    connection is; they must agree."""
    import pymysql

    made = Settings.model_validate({"database_url": database.text + query, **settings})
    pool = engine(made)
    try:
        with database_errors(pool.url), pool.connect() as connection:
            pooled = connection.exec_driver_sql("SHOW STATUS LIKE 'Ssl_cipher'").one()[1]
    finally:
        pool.dispose()
    raw = pymysql.connect(**connect_arguments(made))
    with raw.cursor() as cursor:
        cursor.execute("SHOW STATUS LIKE 'Ssl_cipher'")
        [(_, single)] = cursor.fetchall()
    raw.close()
    assert bool(pooled) == bool(single)
    return str(pooled)


def test_tls_as_asked(mysql: Database) -> None:
    assert cipher(mysql, "?ssl_mode=REQUIRED")
    assert not cipher(mysql, "?ssl_mode=DISABLED")


def test_one_ca_for_every_connection(mysql: Database) -> None:
    [(home, name)] = mysql.sql("SELECT @@datadir, @@ssl_ca")
    ca = Path(home) / name
    if not ca.is_file():
        pytest.skip("the server's CA is not on this machine")
    assert cipher(mysql, "?ssl_check_hostname=false", database_tls_ca=ca)
    # The server's own certificate names no host.
    with pytest.raises(SourceError, match="not trusted"):
        cipher(mysql, database_tls_ca=ca)


def test_a_server_whose_ca_is_not_ours(mysql: Database) -> None:
    import ssl

    strangers = ssl.get_default_verify_paths().openssl_cafile
    if not Path(strangers).is_file():
        pytest.skip("this machine has no CA file")
    with pytest.raises(SourceError, match=r"not trusted: self-signed.*set database_tls_ca"):
        cipher(mysql, "?ssl_check_hostname=false", database_tls_ca=strangers)


def test_require_ssl_with_the_default_settings(mysql: Database) -> None:
    """A user created with REQUIRE SSL, never logged in before, MySQL's default authentication."""
    user = f"u{mysql.name}"
    mysql.sql(f"CREATE USER {user}@'%' IDENTIFIED BY 'päss' REQUIRE SSL")
    try:
        mysql.sql(f"GRANT SELECT ON {mysql.name}.* TO {user}@'%'")
        assert cipher(Database(mysql.url.set(username=user, password="päss")))
    finally:
        mysql.sql(f"DROP USER {user}@'%'")


def test_first_login_without_tls(mysql: Database) -> None:
    user = f"u{mysql.name}"
    mysql.sql(f"CREATE USER {user}@'%' IDENTIFIED BY 'geheim'")
    try:
        mysql.sql(f"GRANT SELECT ON {mysql.name}.* TO {user}@'%'")
        mine = Database(mysql.url.set(username=user, password="geheim"))
        assert not cipher(mine, "?ssl_mode=DISABLED")
    finally:
        mysql.sql(f"DROP USER {user}@'%'")
