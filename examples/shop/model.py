"""The shop's tables: customers, orders, and the outbox beside them in the same schema."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal

from sqlalchemy import ForeignKey, Numeric, UniqueConstraint, text
from sqlalchemy.dialects.mysql import DATETIME
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from writer import outbox_table


class Base(DeclarativeBase):
    pass


class Customer(Base):
    """The aggregate: whoever changes a customer's orders locks this row first."""

    __tablename__ = "customers"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    orders: Mapped[int] = mapped_column(server_default=text("0"))


class Order(Base):
    __tablename__ = "orders"
    __table_args__ = (UniqueConstraint("customer_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int] = mapped_column(ForeignKey("customers.id"))
    number: Mapped[int]
    """1, 2, 3 … for each customer, in commit order."""
    total: Mapped[Decimal] = mapped_column(Numeric(10, 2))
    created_at: Mapped[datetime] = mapped_column(
        DATETIME(fsp=6), server_default=text("(UTC_TIMESTAMP(6))")
    )


# In the service's own metadata, so that Alembic or create_all make it with the other tables.
# (The demo lets `cdc-relay init` create it, as a platform team would.)
outbox_events = outbox_table(Base.metadata)
