"""The store's parts that need no server; its SQL is tested on real ones."""

from __future__ import annotations

import pytest

from cdc_relay.database import ColumnShape, TableShape, quote
from cdc_relay.store import RETRY_LADDER_S, retry_delay_s


def shape(**indexes: tuple[str, ...]) -> TableShape:
    columns = {"id": ColumnShape("id", "bigint", False, 0, "")}
    return TableShape("50%", "out`box", columns, "json", indexes)


@pytest.mark.parametrize(
    ("tries", "delay"),
    [(1, 1), (2, 5), (3, 30), (4, 120), (5, 900), (6, 3600), (7, 21600), (8, 21600), (10, 21600)],
)
def test_the_ladder(tries: int, delay: int) -> None:
    assert retry_delay_s(tries) == delay


def test_the_ladder_rises() -> None:
    assert list(RETRY_LADDER_S) == sorted(set(RETRY_LADDER_S))


def test_names_are_quoted_for_the_drivers_format() -> None:
    assert quote("a`b") == "`a``b`"
    assert shape().quoted == "`50%%`.`out``box`"


def test_an_index_is_forced_by_its_leading_columns() -> None:
    found = shape(PRIMARY=("id",), odd=("status", "next_retry_time", "id"), other=("status",))
    assert found.force_index("id") == " FORCE INDEX (`PRIMARY`)"
    assert found.force_index("status", "next_retry_time") == " FORCE INDEX (`odd`)"
    assert found.force_index("status", "aggregate_type") == ""
    assert shape().force_index("id") == ""
