"""What a table calls its columns, and SQL text in those names."""

from __future__ import annotations

import pytest

from cdc_relay.columns import Columns, parse
from cdc_relay.config import load
from cdc_relay.errors import ConfigError
from cdc_relay.outbox import DEBEZIUM_COLUMNS


def test_sql_in_the_names_of_the_table() -> None:
    names = Columns(DEBEZIUM_COLUMNS)
    text = "SELECT id, event_id, o.aggregate_id FROM `id` WHERE id > 'event_id' AND event_ids = 1"
    theirs = (
        "SELECT `outbox_id`, `id`, o.`aggregateid` FROM `id` WHERE `outbox_id` > 'event_id'"
        " AND event_ids = 1"
    )
    assert names.sql(text) == theirs
    assert names.sql(theirs) == theirs


def test_our_own_names_leave_the_text_alone() -> None:
    text = "SELECT id FROM t"
    assert Columns().sql(text) is text
    assert Columns({"status": "status"}).sql(text) is text


def test_names_of_both_sides() -> None:
    names = Columns({"id": "Seq", "event_type": "kind"})
    assert (names["id"], names["payload"]) == ("seq", "payload")
    assert (names.ours("SEQ"), names.ours("Payload"), names.ours("event_type")) == (
        "id",
        "payload",
        None,
    )
    assert (names.key("Kind"), names.key("Tenant")) == ("event_type", "tenant")
    # A column of the service's that happens to be called as one of ours.
    assert names.key("event_type") == "`event_type`"


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("debezium", dict(DEBEZIUM_COLUMNS)),
        ("debezium, id = seq", {**DEBEZIUM_COLUMNS, "id": "seq"}),
        ({"preset": "debezium", "id": "seq"}, {**DEBEZIUM_COLUMNS, "id": "seq"}),
        ("event_type=kind", {"event_type": "kind"}),
        ({"event_type": "kind"}, {"event_type": "kind"}),
        ("", {}),
    ],
)
def test_the_setting(written: object, names: dict[str, str]) -> None:
    assert parse(written) == names
    assert load(environ={}, flags={"columns": written}).columns == names


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("debezum", "'debezum' is no preset; debezium is"),
        ("kind=type", "'kind' is no column of an outbox table; id, event_id"),
        ("event_id=id", "id and event_id would both be the column id: name another for one"),
        ("id=a,id=b", "names a column, or a preset, twice"),
        ("id=a`b", "'a`b' is not a column name"),
        ("id=", "'' is not a column name"),
        ({"id": 5}, "the name of id is not text"),
    ],
)
def test_a_wrong_setting_is_one_line(written: object, why: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(environ={}, flags={"columns": written})
    assert str(raised.value).startswith("--columns: columns: ")
    assert why in str(raised.value)
    assert "\n" not in str(raised.value)
