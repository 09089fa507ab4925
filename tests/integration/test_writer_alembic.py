"""Alembic: the tables come out of autogenerate, and autogenerate then sees no drift."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata, produce_migrations
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.operations.ops import MigrateOperation, OpContainer
from sqlalchemy import Connection, Engine, MetaData, create_engine, inspect

from tests.integration.test_writer_django import REQUIRED_ONLY
from tests.support.sql import Database
from writer import (
    Inbox,
    Outbox,
    inbox_sequence_table,
    inbox_table,
    outbox_table,
    sequence_table,
)

EVENT: dict[str, Any] = {
    "aggregate_type": "order",
    "aggregate_id": "7",
    "event_type": "PLACED",
    "payload": {"a": 1},
}


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    made = create_engine(database.url)
    yield made
    made.dispose()


def tables(payload: Any = "json") -> MetaData:
    metadata = MetaData()
    outbox_table(metadata, payload=payload)
    sequence_table(metadata)
    inbox_table(metadata)
    inbox_sequence_table(metadata)
    return metadata


def context(connection: Connection) -> MigrationContext:
    # What the default env.py of Alembic has, and the stricter comparison of defaults.
    return MigrationContext.configure(
        connection, opts={"compare_type": True, "compare_server_default": True}
    )


def drift(connection: Connection, metadata: MetaData) -> Any:
    return compare_metadata(context(connection), metadata)


def upgrade(connection: Connection, metadata: MetaData) -> None:
    """Run what ``alembic revision --autogenerate`` would write."""
    made = context(connection)
    script = produce_migrations(made, metadata)
    operations = Operations(made)

    def run(container: OpContainer | MigrateOperation) -> None:
        for step in getattr(container, "ops", [container]):
            if isinstance(step, OpContainer):
                run(step)
            else:
                operations.invoke(step)

    assert script.upgrade_ops is not None
    run(script.upgrade_ops)


@pytest.mark.parametrize("payload", ["json", "text", "binary"])
def test_autogenerate_makes_the_tables_and_sees_no_drift(engine: Engine, payload: str) -> None:
    metadata = tables(payload)
    with engine.begin() as connection:
        upgrade(connection, metadata)
        assert drift(connection, metadata) == []
        assert drift(connection, tables(payload)) == []
        Outbox(sequences=True).add(connection, **EVENT)
        assert Inbox("points", sequences=True).claim(connection, "e")


def test_a_naming_convention_leaves_our_names(database: Database, engine: Engine) -> None:
    """``uk_event_id`` and the indexes are part of the table; the relay's tools know them."""
    name = "%(table_name)s_%(constraint_name)s"
    metadata = MetaData(naming_convention={kind: f"{kind}_{name}" for kind in ("uq", "ix")})
    outbox_table(metadata)
    with engine.begin() as connection:
        upgrade(connection, metadata)
        assert drift(connection, metadata) == []
        assert drift(connection, tables()) != []  # the other tables only
    found = {index["name"] for index in inspect(engine).get_indexes("outbox_event")}
    expected = ("next_retry", "aggregate", "created")
    assert found == {"uk_event_id", *(f"idx_status_{name}" for name in expected)}


def test_tables_of_cdc_relay_init_show_no_drift(database: Database, engine: Engine) -> None:
    database.create_outbox()
    metadata = MetaData()
    outbox_table(metadata)
    with engine.begin() as connection:
        assert drift(connection, metadata) == []


def test_another_name(engine: Engine) -> None:
    metadata = MetaData()
    outbox_table(metadata, name="events")
    with engine.begin() as connection:
        upgrade(connection, metadata)
        assert drift(connection, metadata) == []
        Outbox("events").add(connection, **EVENT)


def test_a_table_with_the_required_columns_is_upgraded(database: Database, engine: Engine) -> None:
    """Rows stay, and so does their order; the writer works before and after."""
    database.sql(REQUIRED_ONLY)
    metadata = MetaData()
    table = outbox_table(metadata)
    with engine.begin() as connection:
        reflected = MetaData()
        reflected.reflect(connection, only=["outbox_event"])
        Outbox(reflected.tables["outbox_event"]).add(connection, **EVENT, event_id="old")
    with engine.begin() as connection:
        assert drift(connection, metadata) != []
        upgrade(connection, metadata)
        assert drift(connection, metadata) == []
    with engine.begin() as connection:
        Outbox(table).add(connection, **EVENT, event_id="new", headers={"a": "b"})
        found = connection.exec_driver_sql("SELECT event_id, headers FROM outbox_event ORDER BY id")
        assert [row[0] for row in found] == ["old", "new"]


ENV = """
from alembic import context
from sqlalchemy import create_engine
from writer import inbox_table, outbox_table
from sqlalchemy import MetaData
metadata = MetaData()
outbox_table(metadata)
inbox_table(metadata)
with create_engine(context.config.get_main_option("sqlalchemy.url")).connect() as connection:
    context.configure(connection=connection, target_metadata=metadata)
    with context.begin_transaction():
        context.run_migrations()
"""


def test_the_alembic_commands(database: Database, tmp_path: Path) -> None:
    """``revision --autogenerate``, ``upgrade``, ``check`` and ``downgrade``, as a service runs
    them."""
    config = Config(tmp_path / "alembic.ini")
    config.set_main_option("script_location", str(tmp_path / "migrations"))
    command.init(config, str(tmp_path / "migrations"))
    config = Config(tmp_path / "alembic.ini")
    config.set_main_option("sqlalchemy.url", database.text.replace("%", "%%"))
    (tmp_path / "migrations" / "env.py").write_text(ENV)
    command.revision(config, "outbox", autogenerate=True)
    command.upgrade(config, "head")
    command.check(config)
    assert database.sql("SHOW TABLES LIKE 'outbox_event'")
    command.downgrade(config, "base")
    assert not database.sql("SHOW TABLES LIKE 'outbox_event'")
