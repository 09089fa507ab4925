"""Django: its connection as a target, its migrations, in processes of their own on real servers.

Django's settings are the process's own, so each test runs a script as a project would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData

from cdc_relay.outbox import inbox_sequence_table, inbox_table, outbox_table, sequence_table
from dev import mysqlclient
from tests.support import drivers
from tests.support.sql import Database

ROOT = Path(__file__).resolve().parents[2]

SETTINGS = """
import json, os
from django.conf import settings
settings.configure(
    DATABASES={"default": json.loads(os.environ["TEST_DATABASE"])},
    INSTALLED_APPS=["writer.django.outbox", "writer.django.inbox"],
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    USE_TZ=True,
)
import django
django.setup()
from django.core.management import call_command
from django.db import connection, transaction
from writer import Inbox, NotInTransactionError, Outbox
EVENT = dict(aggregate_type="order", aggregate_id=7, payload={"a": "100%"})
"""


def django(database: Database, script: str, *, fails: bool = False) -> str:
    """Run ``script`` after ``SETTINGS``; returns what it printed."""
    drivers.have_mysqlclient()
    url = database.url
    settings: dict[str, Any] = {
        "ENGINE": "django.db.backends.mysql",
        "NAME": url.database,
        "USER": url.username,
        "PASSWORD": url.password or "",
        "HOST": url.host,
        "PORT": url.port,
    }
    environment = {
        **os.environ,
        "TEST_DATABASE": json.dumps(settings),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "MARIADB_PLUGIN_DIR": os.environ.get("MARIADB_PLUGIN_DIR") or str(mysqlclient.plugins()),
    }
    done = subprocess.run(
        [sys.executable, "-c", SETTINGS + script],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode != 0) is fails, done.stderr
    return done.stdout


def event_types(database: Database) -> list[str]:
    return [row[0] for row in database.sql("SELECT event_type FROM outbox_event ORDER BY id")]


def test_atomic_blocks(database: Database) -> None:
    database.create_outbox()
    django(
        database,
        """
outbox = Outbox()
try:
    outbox.add(connection, **EVENT, event_type="x")
    raise SystemExit("not refused")
except NotInTransactionError as error:
    assert "with transaction.atomic(): outbox.add(connection, ...)" in str(error), error
with transaction.atomic():
    outbox.add(connection, **EVENT, event_type="e1", headers={"tenant": "50%"})
    try:
        with transaction.atomic():
            outbox.add(connection, **EVENT, event_type="e2")
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    outbox.add_all(connection, [{**EVENT, "event_type": name} for name in ("e3", "e4")])
try:
    with transaction.atomic():
        outbox.add(connection, **EVENT, event_type="e5")
        raise ZeroDivisionError
except ZeroDivisionError:
    pass
""",
    )
    assert event_types(database) == ["e1", "e3", "e4"]


def shown(database: Database, name: str) -> str:
    text: str = database.sql(f"SHOW CREATE TABLE {name}")[0][1]
    return text


def test_migrations_make_the_tables_and_see_no_drift(database: Database, server_url: str) -> None:
    out = django(
        database,
        """
call_command("migrate", verbosity=0)
call_command("makemigrations", check=True, dry_run=True)
inbox = Inbox("points")
with transaction.atomic():
    Outbox(sequences=True).add(connection, **EVENT, event_type="e1")
    assert inbox.claim(connection, "e") and not inbox.claim(connection, "e")
from writer.django.outbox.models import OutboxEvent
event = OutboxEvent.objects.get()
assert event.payload == {"a": "100%"} and event.status == OutboxEvent.PENDING
assert event.headers == {"aggregate_seq": 1}
print(event)
""",
    )
    assert out == "No changes detected\ne1 of order 7\n"
    by_django = {}
    tables = (outbox_table, sequence_table, inbox_table, inbox_sequence_table)
    names = [make(MetaData()).name for make in tables]
    for name in names:
        by_django[name] = shown(database, name)
    django(database, "call_command('migrate', 'cdc_relay_outbox', 'zero', verbosity=0)")
    assert not database.sql("SHOW TABLES LIKE 'outbox%'")
    with Database.create(server_url) as other:
        other.create_outbox()
        fresh = shown(other, "outbox_event")
        assert _lines(by_django["outbox_event"]) == _lines(fresh)


def _lines(shown: str) -> list[str]:
    return sorted(line.rstrip(",") for line in shown.splitlines() if not line.startswith(")"))


REQUIRED_ONLY = """
CREATE TABLE outbox_event (
  id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY,
  event_id VARCHAR(64) NOT NULL UNIQUE KEY,
  aggregate_type VARCHAR(64) NOT NULL, aggregate_id VARCHAR(64) NOT NULL,
  event_type VARCHAR(128) NOT NULL, payload JSON,
  status TINYINT NOT NULL DEFAULT 0, retry_count INT NOT NULL DEFAULT 0,
  next_retry_time DATETIME(6) NULL,
  created_at DATETIME(6) NOT NULL, updated_at DATETIME(6) NOT NULL
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4"""


def test_a_table_with_the_required_columns_is_upgraded(database: Database) -> None:
    database.sql(REQUIRED_ONLY)
    database.sql(
        "INSERT INTO outbox_event (event_id, aggregate_type, aggregate_id, event_type, payload,"
        " created_at, updated_at) VALUES ('old', 'order', '1', 'OLD', '{}', UTC_TIMESTAMP(6),"
        " UTC_TIMESTAMP(6))"
    )
    django(
        database,
        """
call_command("migrate", verbosity=0)
with transaction.atomic():
    Outbox().add(connection, **EVENT, event_type="NEW", headers={"tenant": "a"})
""",
    )
    assert event_types(database) == ["OLD", "NEW"]
    columns = {row[0] for row in database.sql("SHOW COLUMNS FROM outbox_event")}
    assert columns >= {"headers", "last_error", "sent_at"}
    indexes = {row[2] for row in database.sql("SHOW INDEX FROM outbox_event")}
    assert indexes >= {"idx_status_next_retry", "idx_status_aggregate", "idx_status_created"}


@pytest.mark.parametrize("app", ["writer.django.outbox", "writer.django.inbox"])
def test_apps_are_packages_of_the_distribution(app: str) -> None:
    assert (ROOT / app.replace(".", "/") / "migrations" / "0001_initial.py").exists()
