"""The service's tables and its domain events."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from uuid import UUID, uuid4

from sqlalchemy import Numeric, String, Uuid
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from writer import Outbox, RecordsEvents, outbox_table, sequence_table


class Base(DeclarativeBase):
    pass


# In the service's own metadata: Alembic makes the tables with the others.
outbox = Outbox(
    outbox_table(Base.metadata),
    sequences=sequence_table(Base.metadata),
    max_payload_bytes=500_000,
)


@dataclass(frozen=True)
class OrderPlaced:
    """Event type ORDER_PLACED, version 1."""

    order_id: UUID
    customer: str
    total: Decimal


@dataclass(frozen=True)
class OrderCancelled:
    """Event type ORDER_CANCELLED, version 1."""

    order_id: UUID
    customer: str
    total: Decimal


class OrderIsCancelledError(Exception):
    """The order was cancelled before."""


class Order(RecordsEvents, Base):
    """The aggregate ``order``; its id is the Kafka key."""

    __tablename__ = "orders"
    __outbox__ = outbox

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True)
    customer: Mapped[str] = mapped_column(String(64))
    total: Mapped[Decimal] = mapped_column(Numeric(10, 2))
    status: Mapped[str] = mapped_column(String(16))

    @classmethod
    def place(cls, customer: str, total: Decimal) -> Order:
        """A new order, to be added to a session; the event goes with it."""
        order = cls(id=uuid4(), customer=customer, total=total, status="placed")
        order.record(OrderPlaced(order.id, customer, total))
        return order

    def cancel(self) -> None:
        """Cancel an order that the caller has locked."""
        if self.status == "cancelled":
            raise OrderIsCancelledError
        self.status = "cancelled"
        self.record(OrderCancelled(self.id, self.customer, self.total))
