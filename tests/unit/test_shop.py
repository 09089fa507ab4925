"""The shop's demo: what it plans and how it counts, without any server."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from examples.shop.ledger import Book, Reader
from examples.shop.plan import CLERKS, Plan
from examples.shop.report import Figures, Latency


class Message:
    """As much of a consumed message as the ledger looks at."""

    def __init__(self, event_id: str, order_id: int, customer: int, number: int) -> None:
        self._id = event_id.encode()
        self._value = json.dumps(
            {"order_id": order_id, "customer_id": customer, "number": number, "placed_ns": 0}
        ).encode()

    def headers(self) -> list[tuple[str, bytes]]:
        return [("event_type", b"ORDER_PLACED"), ("id", self._id)]

    def value(self) -> bytes:
        return self._value


def book(*messages: Message) -> Book:
    reader = Reader()
    for message in messages:
        reader.enter(message, 5_000_000)
    return reader.book


@pytest.mark.parametrize("orders", [100, 101, 1500, 10_000, 118_402])
@pytest.mark.parametrize("kills", [1, 5, 12])
def test_plan_places_exactly_the_orders_asked_for(orders: int, kills: int) -> None:
    plan = Plan.draw(orders, 7, kills)
    # The calm tasks go on where those of the storm end.
    tasks = [*plan.calm, plan.warm_up, plan.unlogged]
    assert sum(task.orders for task in tasks) == orders
    assert all(
        calm.orders >= storm.orders for calm, storm in zip(plan.calm, plan.storm, strict=True)
    )
    assert len(plan.kills) == kills
    assert plan.unlogged.orders > 0
    assert plan.unlogged.orders <= orders * 0.02


def test_customers_belong_to_one_clerk() -> None:
    plan = Plan.draw(10_000, 7, 5)
    tasks = [*plan.storm, plan.warm_up, plan.unlogged]
    customers = [number for task in tasks for number in range(task.first, task.last + 1)]
    assert len(customers) == len(set(customers))
    assert max(customers) == plan.customers


def test_kills_come_while_the_storm_lasts() -> None:
    for seed in range(50):
        plan = Plan.draw(10_000, seed, 5)
        storm = sum(task.orders for task in plan.storm)
        moments = [kill.at for kill in plan.kills]
        assert moments == sorted(moments)
        assert moments[0] > plan.warm_up.orders / plan.orders
        assert moments[-1] < (plan.warm_up.orders + 0.9 * storm) / plan.orders
        assert all(set(kill.clerks) <= set(range(CLERKS)) for kill in plan.kills)


def test_same_seed_same_plan() -> None:
    assert Plan.draw(5000, 1, 5) == Plan.draw(5000, 1, 5)
    assert Plan.draw(5000, 1, 5) != Plan.draw(5000, 2, 5)


def test_duplicates_are_counted_and_never_out_of_order() -> None:
    seen = book(Message("a", 1, 1, 1), Message("b", 2, 1, 2), Message("a", 1, 1, 1))
    assert (seen.messages, seen.distinct, seen.duplicates, seen.steps_back) == (3, 2, 1, 0)


def test_a_step_back_is_within_one_customer() -> None:
    seen = book(Message("a", 1, 1, 2), Message("b", 2, 2, 1), Message("c", 3, 1, 1))
    assert seen.steps_back == 1


def test_book_is_read_as_it_was_written(tmp_path: Path) -> None:
    seen = book(Message("a", 1, 1, 1), Message("b", 2, 1, 2))
    (tmp_path / "book.json").write_text(json.dumps(asdict(seen)))
    assert Book.read(tmp_path / "book.json") == seen


def test_lost_and_invented_are_differences_of_order_ids() -> None:
    seen = book(Message("a", 1, 1, 1), Message("b", 9, 1, 2))
    figures = Figures.of({1, 2, 3}, seen, (0, 1))
    assert (figures.committed, figures.arrived) == (3, 2)
    assert (figures.lost, figures.invented) == (2, 1)


def test_percentiles() -> None:
    assert Latency.of(range(0, 100_000_000, 1_000_000)) == Latency(50.0, 99.0)
    assert Latency.of([1, 2, 3]) == Latency(None, None)
