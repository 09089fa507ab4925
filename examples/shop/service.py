"""The business of the shop: one transaction per order, its event in the same transaction."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import Protocol

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from examples.shop.model import Customer, Order
from writer import Outbox

outbox = Outbox()


class PaymentDeclinedError(Exception):
    """The card was refused after the order had been written; everything is rolled back."""


class Shop(Protocol):
    """A way of placing orders and telling Kafka about them."""

    def place_order(self, customer_id: int, total: Decimal, *, declined: bool) -> None:
        """Commit one order and see to its event.

        Raises PaymentDeclinedError, with nothing committed, when ``declined``.
        """

    def close(self) -> None:
        """Hand over whatever has not reached Kafka yet."""


class OutboxShop:
    """The event is a row, committed with the order. Publishing is the relay's business."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def place_order(self, customer_id: int, total: Decimal, *, declined: bool) -> None:
        with Session(self._engine) as session, session.begin():
            order = write_order(session, customer_id, total)
            outbox.add(
                session,
                aggregate_type="customer",
                aggregate_id=customer_id,
                event_type="ORDER_PLACED",
                payload=payload(order),
            )
            if declined:
                raise PaymentDeclinedError

    def close(self) -> None:
        pass


def write_order(session: Session, customer_id: int, total: Decimal) -> Order:
    """Write one order with the customer's next number; the caller's transaction commits it.

    Guarantee: the customer's row is locked until then, so numbers are in commit order.
    """
    customer = session.get_one(Customer, customer_id, with_for_update=True)
    customer.orders += 1
    order = Order(customer_id=customer_id, number=customer.orders, total=total)
    session.add(order)
    session.flush()
    return order


def payload(order: Order) -> dict[str, object]:
    """What the event says about an order.

    ``placed_ns`` is CLOCK_MONOTONIC just before the COMMIT, for a consumer on the same host.
    """
    return {
        "order_id": order.id,
        "customer_id": order.customer_id,
        "number": order.number,
        "total": str(order.total),
        "placed_ns": time.monotonic_ns(),
    }
