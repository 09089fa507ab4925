"""``aggregate_seq``: 1, 2, 3 … for each aggregate, so that a consumer sees what it missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from sqlalchemy import MetaData, Table

from cdc_relay.outbox import sequence_table

from .sql import quoted_table
from .targets import Transaction

HEADER: Final = "aggregate_seq"
Aggregate = tuple[str, str]


class Sequences:
    """Gives numbers out in the caller's transaction.

    Each aggregate has a row of its own, which stays locked until that transaction ends: numbers of
    one aggregate are in commit order, a rollback takes its numbers back (there is no gap), and
    other aggregates do not wait. (Where the very first event of an aggregate is rolled back while
    two others wait for it, InnoDB may end one of them with a deadlock, 1213: try again.)
    """

    def __init__(self, table: str | Table) -> None:
        made = sequence_table(MetaData(), table) if isinstance(table, str) else table
        # LAST_INSERT_ID(expr) comes back with the statement's own answer: no second round trip.
        self._sql = (
            f"INSERT INTO {quoted_table(made)} (aggregate_type, aggregate_id, last_seq) "
            "VALUES (%s, %s, LAST_INSERT_ID(%s)) "
            "ON DUPLICATE KEY UPDATE last_seq = LAST_INSERT_ID(last_seq + %s)"
        )

    def take(self, target: Transaction, aggregates: Iterable[Aggregate]) -> list[int]:
        """Return the next number for each of ``aggregates``, in their order.

        Rows are locked in sorted order, so two batches do not wait for each other crosswise.
        """
        asked = list(aggregates)
        following: dict[Aggregate, int] = {}
        for aggregate, count in sorted(Counter(asked).items()):
            _, last = target.upsert(self._sql, (*aggregate, count, count))
            following[aggregate] = last - count + 1
        numbers = []
        for aggregate in asked:
            numbers.append(following[aggregate])
            following[aggregate] += 1
        return numbers
