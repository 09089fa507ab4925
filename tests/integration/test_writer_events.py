"""Domain events on ORM objects: written at flush, gone with what is rolled back, never twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel
from sqlalchemy import Engine, ForeignKey, create_engine
from sqlalchemy import event as listeners
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    mapped_column,
    relationship,
)
from sqlalchemy.orm import sessionmaker as session_maker

from tests.support import drivers
from tests.support.sql import Database
from writer import Outbox, RecordsEvents
from writer.events import _aggregate_id


@dataclass
class OrderPlaced:
    total: Decimal


@dataclass
class OrderPaidV2:
    by: str


class Renamed(BaseModel):
    event_type: ClassVar[str] = "ORDER_RENAMED"
    event_version: ClassVar[int] = 7
    name: str


class LineAdded(BaseModel):
    sku: str


class Base(DeclarativeBase):
    pass


class Order(RecordsEvents, Base):
    __tablename__ = "orders"
    __outbox__ = Outbox()

    id: Mapped[int] = mapped_column(primary_key=True)
    total: Mapped[int]
    paid: Mapped[bool] = mapped_column(default=False)
    lines: Mapped[list[OrderLine]] = relationship(cascade="all, delete-orphan")

    def __init__(self, total: int, **fields: Any) -> None:
        super().__init__(total=total, **fields)
        self.record(OrderPlaced(Decimal(total)))

    def pay(self, by: str) -> None:
        self.paid = True
        self.record(OrderPaidV2(by), headers={"tenant": "t"})


class OrderLine(RecordsEvents, Base):
    __tablename__ = "order_lines"
    __outbox__ = Order.__outbox__
    __aggregate_type__ = "order"
    __aggregate_id__ = "order_id"

    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"), primary_key=True)
    sku: Mapped[str] = mapped_column(primary_key=True)

    def __init__(self, sku: str) -> None:
        self.sku = sku
        self.record(LineAdded(sku=sku))


def create(engine: Engine) -> None:
    for statement in (
        "CREATE TABLE orders (id INT AUTO_INCREMENT PRIMARY KEY, total INT NOT NULL,"
        " paid BOOL NOT NULL)",
        "CREATE TABLE order_lines (order_id INT, sku VARCHAR(20), PRIMARY KEY (order_id, sku))",
    ):
        with engine.begin() as connection:
            connection.exec_driver_sql(statement)


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    database.create_outbox()
    made = create_engine(database.url)
    create(made)
    yield made
    made.dispose()


def rows(database: Database) -> list[str]:
    found = database.sql(
        "SELECT event_type, aggregate_type, aggregate_id FROM outbox_event ORDER BY id"
    )
    return [" ".join(row) for row in found]


def test_events_are_written_at_flush_in_the_order_of_recording(
    database: Database, engine: Engine
) -> None:
    with Session(engine) as session, session.begin():
        first, second = Order(5), Order(6)
        first.lines.append(OrderLine("a"))
        second.pay("card")
        session.add_all([second, first])
    # The second was added first and has the lower id; it was recorded later.
    assert rows(database) == [
        "ORDER_PLACED order 2",
        "ORDER_PLACED order 1",
        "LINE_ADDED order 2",
        "ORDER_PAID order 1",
    ]
    found = database.sql("SELECT payload, headers FROM outbox_event ORDER BY id")
    assert json.loads(found[0][0]) == {"total": "5"}
    assert [json.loads(row[1]) for row in found] == [
        {"event_version": 1},
        {"event_version": 1},
        {"event_version": 1},
        {"event_version": 2, "tenant": "t"},
    ]


def test_an_object_without_other_changes(database: Database, engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        session.add(Order(5))
    with Session(engine) as session, session.begin():
        order = session.get_one(Order, 1)
        order.record(Renamed(name="x"))
        session.flush()
        session.flush()
        order.total = 9
        session.flush()
    assert rows(database) == ["ORDER_PLACED order 1", "ORDER_RENAMED order 1"]
    headers = database.sql("SELECT headers FROM outbox_event ORDER BY id")[1][0]
    assert json.loads(headers) == {"event_version": 7}


def test_a_deleted_object(database: Database, engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        session.add(Order(5))
    with Session(engine) as session, session.begin():
        order = session.get_one(Order, 1)
        order.record(Renamed(name="gone"))
        session.delete(order)
    assert rows(database)[1:] == ["ORDER_RENAMED order 1"]
    assert database.sql("SELECT COUNT(*) FROM orders")[0][0] == 0


@pytest.mark.parametrize("flushes", [True, False])
def test_a_rolled_back_savepoint_takes_its_events(
    database: Database, engine: Engine, flushes: bool
) -> None:
    with Session(engine) as session, session.begin():
        order = Order(5)
        session.add(order)
        with session.begin_nested() as savepoint:
            order.pay("card")
            if flushes:
                session.flush()
            savepoint.rollback()
        order.record(Renamed(name="after"))
    assert rows(database) == ["ORDER_PLACED order 1", "ORDER_RENAMED order 1"]
    assert database.sql("SELECT paid FROM orders") == ((0,),)


def test_events_before_a_savepoint_stay(database: Database, engine: Engine) -> None:
    with Session(engine, autoflush=False) as session, session.begin():
        session.add(Order(5))
        session.begin_nested().rollback()
    assert rows(database) == ["ORDER_PLACED order 1"]


@pytest.mark.parametrize("flushes", [True, False])
def test_a_rolled_back_transaction(database: Database, engine: Engine, flushes: bool) -> None:
    with Session(engine) as session:
        session.add(Order(5))
        session.commit()
        order = session.get_one(Order, 1)
        order.pay("card")
        if flushes:
            session.flush()
        session.rollback()
        order.pay("cash")
        session.commit()
    assert rows(database) == ["ORDER_PLACED order 1", "ORDER_PAID order 1"]
    assert json.loads(database.sql("SELECT payload FROM outbox_event ORDER BY id DESC")[0][0]) == {
        "by": "cash"
    }


@pytest.mark.parametrize("flushes", [True, False])
def test_a_new_object_that_is_added_again_tells_its_events_again(
    database: Database, engine: Engine, flushes: bool
) -> None:
    order = Order(5)
    with Session(engine) as session, session.begin():
        with session.begin_nested() as savepoint:
            session.add(order)
            if flushes:
                session.flush()
            order.pay("card")
            if flushes:
                session.flush()
            savepoint.rollback()
        session.flush()
        assert rows(database) == []
        order.id = None  # type: ignore[assignment]
        session.add(order)
    assert [row.split()[0] for row in rows(database)] == ["ORDER_PLACED", "ORDER_PAID"]


def test_what_a_savepoint_took_is_not_told_when_the_object_is_added_again(
    database: Database, engine: Engine
) -> None:
    order = Order(5)
    with Session(engine) as session:
        session.add(order)
        session.flush()
        with session.begin_nested() as savepoint:
            order.pay("card")
            session.flush()
            savepoint.rollback()
        order.record(Renamed(name="x"))
        session.flush()
        session.rollback()
        assert not order.paid
        order.id = None  # type: ignore[assignment]
        session.add(order)
        session.commit()
    assert [row.split()[0] for row in rows(database)] == ["ORDER_PLACED", "ORDER_RENAMED"]


def test_recorded_after_a_commit_and_rolled_back(database: Database, engine: Engine) -> None:
    """Nothing but the recording happened in that transaction."""
    with Session(engine) as session:
        order = Order(5)
        session.add(order)
        session.commit()
        order.record(Renamed(name="x"))
        session.rollback()
        order.record(Renamed(name="y"))
        order.record(Renamed(name="z"))
        session.rollback()
        session.commit()
    assert rows(database) == ["ORDER_PLACED order 1"]


def test_other_styles_of_mapping(database: Database, engine: Engine) -> None:
    """Mapped dataclasses, an outbox on the base class, a sessionmaker made before, inheritance."""
    Sessions = session_maker(engine)  # noqa: N806

    class DataBase(MappedAsDataclass, DeclarativeBase):
        pass

    class Base2(RecordsEvents, DeclarativeBase):
        __outbox__ = Outbox()

    class Line(RecordsEvents, DataBase):
        __tablename__ = "order_lines"
        __outbox__ = Outbox()
        __aggregate_id__ = "order_id"

        order_id: Mapped[int] = mapped_column(primary_key=True)
        sku: Mapped[str] = mapped_column(primary_key=True)

    class Thing(Base2):
        __tablename__ = "orders"
        __mapper_args__: ClassVar[dict[str, Any]] = {
            "polymorphic_on": "total",
            "polymorphic_identity": 1,
        }
        id: Mapped[int] = mapped_column(primary_key=True)
        total: Mapped[int]
        paid: Mapped[bool] = mapped_column(default=False)

    class SpecialThing(Thing):
        __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": 2}

    with Sessions.begin() as session:
        line, special = Line(order_id=3, sku="a"), SpecialThing()
        line.record(LineAdded(sku="a"))
        special.record(Renamed(name="x"))
        session.add_all([line, special])
    assert rows(database) == ["LINE_ADDED line 3", "ORDER_RENAMED thing 1"]


def test_a_composite_key_needs_a_name() -> None:
    class Base3(RecordsEvents, DeclarativeBase):
        __outbox__ = Outbox()

    class Part(Base3):
        __tablename__ = "parts"
        a: Mapped[int] = mapped_column(primary_key=True)
        b: Mapped[int] = mapped_column(primary_key=True)

    part = Part(a=1, b=2)
    with pytest.raises(TypeError, match="primary key of 2 columns: name the attribute"):
        _aggregate_id(part)


def test_a_failed_flush_leaves_nothing(database: Database, engine: Engine) -> None:
    with Session(engine) as session:
        session.add(Order(5, id=1))
        session.commit()
        session.add(Order(6, id=1))
        with pytest.raises(IntegrityError):
            session.flush()
        session.rollback()
        session.add(Order(7))
        session.commit()
    assert [row.split()[0] for row in rows(database)] == ["ORDER_PLACED", "ORDER_PLACED"]


@pytest.mark.parametrize("failing", ["another's event", "another listener"])
def test_new_objects_of_a_failed_flush_tell_their_events_when_added_again(
    database: Database, engine: Engine, failing: str
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no")

    order, other = Order(5), Order(6)
    if failing == "another's event":
        other.record(OrderPlaced(Decimal("NaN")))
    else:
        listeners.listen(Session, "after_flush", fail)  # behind the mixin's own
    try:
        with pytest.raises(ValueError, match="no"), Session(engine) as session, session.begin():
            session.add_all([order, other])
    finally:
        if failing != "another's event":
            listeners.remove(Session, "after_flush", fail)
    assert rows(database) == []
    with Session(engine) as session, session.begin():
        session.add(order)
    assert [row.split()[0] for row in rows(database)] == ["ORDER_PLACED"]


def test_recorded_by_a_listener_behind_the_flush(database: Database, engine: Engine) -> None:
    """In its transaction, though the flush has ended; not in a later one."""

    def pay(session: Session, _: object) -> None:
        for thing in session.new:
            thing.pay("listener")

    listeners.listen(Session, "after_flush", pay)
    try:
        with Session(engine) as session, session.begin():
            session.add(Order(5))
    finally:
        listeners.remove(Session, "after_flush", pay)
    assert [row.split()[0] for row in rows(database)] == ["ORDER_PLACED", "ORDER_PAID"]


@pytest.mark.parametrize("discard", ["expire", "refresh", "expire_all"])
def test_discarded_changes_take_their_events(
    database: Database, engine: Engine, discard: str
) -> None:
    with Session(engine) as session, session.begin():
        session.add(Order(5, id=1))
    with Session(engine) as session, session.begin():
        order = session.get_one(Order, 1)
        order.pay("card")
        getattr(session, discard)(*(() if discard == "expire_all" else (order,)))
        order.total = 9
    assert rows(database) == ["ORDER_PLACED order 1"]
    assert database.sql("SELECT total, paid FROM orders") == ((9, 0),)


def test_async_sessions(database: Database, engine: Engine) -> None:
    async def body(made: AsyncEngine) -> None:
        async with AsyncSession(made) as session, session.begin():
            order = Order(5)
            session.add(order)
            async with session.begin_nested() as savepoint:
                order.pay("card")
                await savepoint.rollback()

    drivers.run_async("asyncmy", database, body)
    assert rows(database) == ["ORDER_PLACED order 1"]


def test_nothing_is_recorded_into_the_blue() -> None:
    class Bare(RecordsEvents):
        pass

    with pytest.raises(TypeError, match="Bare has no __outbox__"):
        Bare().record(OrderPaidV2("x"))
    for wrong in ({"a": 1}, OrderPaidV2, "x", None):
        with pytest.raises(TypeError, match="not an object of an event class"):
            Order(5).record(wrong)
