"""A user's code, as strict as type checkers go. Lines that end in ``# wrong`` must be refused."""

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from uuid import UUID

import pymysql
from confluent_kafka import Consumer, Producer
from sqlalchemy import Connection, Engine, MetaData, Table, create_engine
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
)
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    scoped_session,
    sessionmaker,
)

from writer import (
    Arrival,
    DeadLetters,
    EventFields,
    EventInfo,
    EventTooLargeError,
    Inbox,
    InboxEvent,
    NotInTransactionError,
    Outbox,
    RecordsEvents,
    inbox_sequence_table,
    inbox_table,
    outbox_table,
    sequence_table,
)


class Base(DeclarativeBase):
    pass


class EventType(StrEnum):
    PLACED = "PLACED"


@dataclass
class OrderPlaced:
    total: Decimal


outbox = Outbox()
table: Table = outbox_table(Base.metadata, payload="binary")
sequence_table(MetaData())
inbox_table(MetaData(), "inbox")
inbox_sequence_table(MetaData())


class Order(RecordsEvents, Base):
    __tablename__ = "orders"
    __outbox__ = outbox
    __aggregate_type__ = "order"
    __aggregate_id__ = "number"

    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[str]

    def place(self) -> None:
        self.record(OrderPlaced(Decimal(5)), headers={"tenant": "t"})


def serialize(payload: object, event: EventInfo) -> bytes:
    return f"{event.event_type}{payload}".encode()


def default(value: object) -> object:
    raise TypeError(value)


Outbox("shop.outbox_event", max_payload_bytes=1_000_000, sequences=True, default=default)
Outbox(table, serializer=serialize)


def write(session: Session, connection: Connection, scoped: scoped_session[Session]) -> str:
    outbox.add(scoped, aggregate_type="order", aggregate_id=7, event_type="A", payload=None)
    driver = pymysql.connect(host="127.0.0.1")
    outbox.add(driver, aggregate_type="order", aggregate_id="7", event_type="A", payload={})
    events: list[EventFields] = [
        {"aggregate_type": "order", "aggregate_id": 7, "event_type": "A", "payload": [1]},
    ]
    ids: list[str] = outbox.add_all(connection, events)
    try:
        return ids[0] + outbox.add(
            session,
            aggregate_type="order",
            aggregate_id=UUID(int=1),
            event_type=EventType.PLACED,
            payload=OrderPlaced(Decimal(1)),
            headers={"tenant": "t", "n": 1},
            event_id=UUID(int=2),
            occurred_at=datetime.now(UTC),
            aggregate_seq=7,
        )
    except (NotInTransactionError, EventTooLargeError):
        raise


async def write_async(
    session: AsyncSession, connection: AsyncConnection, scoped: async_scoped_session[AsyncSession]
) -> list[str]:
    await outbox.add_async(
        session, aggregate_type="order", aggregate_id=7, event_type="A", payload={}
    )
    await outbox.add_async(
        scoped, aggregate_type="order", aggregate_id=7, event_type="A", payload={}
    )
    first: bool = await inbox.claim_async(session, "e")
    return await outbox.add_all_async(connection, []) if first else []


inbox = Inbox("points", sequences=True)


def handle(session: Session, event: InboxEvent) -> None:
    if event.arrival is Arrival.GAP:
        raise ValueError(event.missing)
    if inbox.claim(session, event.event_id):
        write(session, session.connection(), scoped_session(sessionmaker()))


def consume(consumer: Consumer, producer: Producer, engine: Engine) -> None:
    inbox.consume(
        consumer,
        sessionmaker(engine),
        handle,
        waits=(0.1, 1),
        dead_letters=DeadLetters(producer),
        outages=(OSError,),
        stop=lambda: False,
    )


async def handle_async(session: AsyncSession, event: InboxEvent) -> None:
    await outbox.add_async(
        session, aggregate_type="o", aggregate_id=7, event_type="A", payload=event.json()
    )


async def consume_async(consumer: Consumer, engine: AsyncEngine) -> None:
    await inbox.consume_async(
        consumer, async_sessionmaker(engine), handle_async, waits=(1,), stop=lambda: False
    )


# fmt: off
async def wrong(engine: Engine, session: Session, async_session: AsyncSession) -> None:
    outbox.add(engine, aggregate_type="o", aggregate_id=7, event_type="A", payload={})  # wrong
    outbox.add(async_session, aggregate_type="o", aggregate_id=7, event_type="A", payload={})  # wrong
    outbox.add(session, aggregate_type="o", aggregate_id=7, event_type="A")  # wrong
    outbox.add(session, aggregate_type="o", aggregate_id=1.5, event_type="A", payload={})  # wrong
    outbox.add(session, aggregate_type="o", aggregate_id=7, event_typ="A", payload={})  # wrong
    outbox.add_all(session, [{"aggregate_type": "o"}])  # wrong
    await outbox.add_async(session, aggregate_type="o", aggregate_id=7, event_type="A", payload={})  # wrong
    outbox_table(MetaData(), payload="xml")  # wrong
    inbox.claim(create_engine("mysql://"), "e")  # wrong
    await inbox.consume_async(Consumer({}), async_sessionmaker(), handle)  # wrong
    inbox.consume(Consumer({}), async_sessionmaker(), handle)  # wrong
