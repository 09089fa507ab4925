"""The consumer: a point for each whole unit of money, taken back when the order is cancelled.

    DATABASE_URL=mysql+pymysql://root@127.0.0.1:3306/points \\
    KAFKA_BOOTSTRAP=127.0.0.1:9092 TOPIC=outbox.event.order python -m examples.orders.points

It may be killed at any moment: an event that comes again is not counted again.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from decimal import Decimal

from confluent_kafka import Consumer, Producer
from sqlalchemy import String, create_engine
from sqlalchemy.dialects.mysql import insert
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from writer import DeadLetters, Inbox, InboxEvent, inbox_sequence_table, inbox_table


class Base(DeclarativeBase):
    pass


inbox = Inbox("points", inbox_table(Base.metadata), sequences=inbox_sequence_table(Base.metadata))


class Account(Base):
    __tablename__ = "accounts"

    customer: Mapped[str] = mapped_column(String(64), primary_key=True)
    points: Mapped[int]


def handle(session: Session, event: InboxEvent) -> None:
    """Book one event, in the transaction that also claims it."""
    order = event.json()
    points = int(Decimal(order["total"]))
    match event.event_type:
        case "ORDER_PLACED":
            pass
        case "ORDER_CANCELLED":
            points = -points
        case other:
            raise ValueError(f"unknown event type {other}")
    statement = insert(Account).values(customer=order["customer"], points=points)
    session.execute(statement.on_duplicate_key_update(points=Account.points + points))


def main() -> None:
    """Consume until SIGTERM or SIGINT."""
    logging.basicConfig(level=logging.INFO)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    engine = create_engine(os.environ["DATABASE_URL"], pool_pre_ping=True)
    Base.metadata.create_all(engine)
    bootstrap = os.environ["KAFKA_BOOTSTRAP"]
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": os.environ.get("GROUP", "points"),
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "session.timeout.ms": 6000,
        }
    )
    consumer.subscribe([os.environ["TOPIC"]])
    dead_letters = DeadLetters(Producer({"bootstrap.servers": bootstrap}))
    try:
        inbox.consume(
            consumer,
            sessionmaker(engine),
            handle,
            dead_letters=dead_letters,
            stop=stopped.is_set,
        )
    finally:
        consumer.close()
        engine.dispose()


if __name__ == "__main__":
    main()
