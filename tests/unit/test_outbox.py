"""The kernel: the table and its DDL."""

from __future__ import annotations

import pytest
from sqlalchemy import MetaData

from cdc_relay.outbox import (
    OPTIONAL_COLUMNS,
    REQUIRED_COLUMNS,
    OutboxEvent,
    outbox_table,
    table_ddl,
)


def test_columns_are_the_contracts() -> None:
    table = outbox_table(MetaData())
    assert set(table.columns.keys()) == {*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS}
    assert [column.name for column in table.primary_key] == ["id"]


def test_the_same_metadata_gives_the_same_table() -> None:
    metadata = MetaData()
    assert outbox_table(metadata) is outbox_table(metadata)
    assert outbox_table(metadata, "shop.outbox_event") is outbox_table(
        metadata, "shop.outbox_event"
    )
    assert outbox_table(metadata, "shop.outbox_event").schema == "shop"


def test_ddl_has_every_time_to_the_microsecond_and_in_utc() -> None:
    create = table_ddl()[0]
    times = [line for line in create.splitlines() if line.split()[0].endswith(("_at", "_time"))]
    assert len(times) == 4
    assert all("DATETIME(6)" in line for line in times)
    assert create.count("DEFAULT (UTC_TIMESTAMP(6))") == 2


def test_ddl_begins_with_the_table_and_has_no_semicolons() -> None:
    create, *indexes = table_ddl()
    assert create.startswith("CREATE TABLE outbox_event (")
    assert "uk_event_id" in create
    assert [index.split()[2] for index in indexes] == [
        "idx_status_aggregate",
        "idx_status_created",
        "idx_status_next_retry",
    ]
    assert all(index.split("(")[1].startswith("status,") for index in indexes)
    assert not any(";" in statement for statement in (create, *indexes))


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("shop.outbox_event", "shop.outbox_event"),
        ("order", "`order`"),
        ("50%", "`50%`"),
        ("Out Box", "`Out Box`"),
    ],
)
def test_ddl_quotes_names(name: str, written: str) -> None:
    create, *indexes = table_ddl(name)
    assert create.startswith(f"CREATE TABLE {written} (")
    assert all(f" ON {written} (" in index for index in indexes)


def test_an_event_is_a_value() -> None:
    event = OutboxEvent(1, "e", "order", "7", "T", b"{}", None, 0)
    assert event == OutboxEvent(1, "e", "order", "7", "T", b"{}", None, 0)
    with pytest.raises(AttributeError):
        event.payload = b""  # type: ignore[misc]
