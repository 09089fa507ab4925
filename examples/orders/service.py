"""The HTTP service.

    DATABASE_URL=mysql+pymysql://root@127.0.0.1:3306/shop \\
        uvicorn --factory examples.orders.service:create_app
"""

from __future__ import annotations

import os
from decimal import Decimal
from typing import Annotated
from uuid import UUID

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker

from examples.orders.model import Order, OrderIsCancelledError


class NewOrder(BaseModel):
    """What a customer sends."""

    customer: Annotated[str, Field(min_length=1, max_length=64)]
    total: Annotated[Decimal, Field(gt=0, max_digits=10, decimal_places=2)]


class OrderView(BaseModel):
    """What a customer gets."""

    id: UUID
    customer: str
    total: Decimal
    status: str


def _view(order: Order) -> OrderView:
    return OrderView(id=order.id, customer=order.customer, total=order.total, status=order.status)


def create_app() -> FastAPI:
    """The application on the database of ``DATABASE_URL``."""
    engine = create_engine(os.environ["DATABASE_URL"], pool_pre_ping=True)
    sessions = sessionmaker(engine)
    app = FastAPI(title="orders")

    # The transaction ends inside the function: FastAPI may run what follows the yield of a
    # dependency after the answer went out, and an answer must not be older than its commit.

    @app.post("/orders", status_code=201)
    def place(new: NewOrder) -> OrderView:
        with sessions.begin() as session:
            order = Order.place(new.customer, new.total)
            session.add(order)
            session.flush()
            return _view(order)

    @app.post("/orders/{order_id}/cancel")
    def cancel(order_id: UUID) -> OrderView:
        with sessions.begin() as session:
            # Locked: events of one order are in the order of its changes.
            order = session.get(Order, order_id, with_for_update=True)
            if order is None:
                raise HTTPException(404, "no such order")
            try:
                order.cancel()
            except OrderIsCancelledError:
                raise HTTPException(409, "the order is cancelled already") from None
            return _view(order)

    @app.get("/orders/{order_id}")
    def show(order_id: UUID) -> OrderView:
        with sessions() as session:
            order = session.get(Order, order_id)
            if order is None:
                raise HTTPException(404, "no such order")
            return _view(order)

    return app
