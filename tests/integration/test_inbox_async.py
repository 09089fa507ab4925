"""``Inbox.consume_async`` on real servers, with each asynchronous driver."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from confluent_kafka.aio import AIOConsumer
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.ext.asyncio import async_sessionmaker as async_session_maker

from tests.integration.test_inbox import Shop
from tests.support import drivers
from tests.support.harness import create_topic
from tests.support.sql import Database
from writer import Arrival, DeadLetters, Inbox, InboxEvent


@pytest.fixture
def shop(mysql: Database, kafka: str) -> Iterator[Shop]:
    made = Shop(mysql, kafka)
    create_topic(kafka, made.topic, 2)
    yield made
    made.engine.dispose()


async def add_points(session: AsyncSession, event: InboxEvent) -> None:
    await session.execute(
        text("INSERT INTO points VALUES (:id, :body)"),
        {"id": event.event_id, "body": str(event.json())},
    )


def consume(
    shop: Shop,
    handler: Any,
    until: Callable[[], bool],
    *,
    driver: str = "asyncmy",
    meanwhile: Callable[[asyncio.Task[None]], Awaitable[None]] | None = None,
    **options: Any,
) -> None:
    """Run ``consume_async`` until ``until()``; fails after 60 s."""
    deadline = time.monotonic() + 60
    inbox = options.pop("inbox", None) or Inbox("points")

    def stop() -> bool:
        assert time.monotonic() < deadline, "not within 60 s"
        return until()

    async def body(engine: AsyncEngine) -> None:
        with shop.consumer() as consumer:
            work = asyncio.create_task(
                inbox.consume_async(
                    consumer, async_session_maker(engine), handler, stop=stop, **options
                )
            )
            if meanwhile is not None:
                await meanwhile(work)
            await work

    drivers.run_async(driver, shop.database, body)


@pytest.mark.parametrize("driver", drivers.ASYNC)
def test_each_event_once_in_the_callers_event_loop(shop: Shop, driver: str) -> None:
    for number in range(6):
        for _ in range(3):
            shop.send(f"e-{number}", key=str(number), aggregate_seq="1")
    threads: set[int] = set()
    turns: list[int] = []
    tries: list[str] = []

    async def handler(session: AsyncSession, event: InboxEvent) -> None:
        threads.add(threading.get_ident())
        assert event.arrival is Arrival.FIRST
        await add_points(session, event)
        tries.append(event.event_id)
        if tries.count("e-3") == 1 and event.event_id == "e-3":
            raise RuntimeError("not yet")

    async def others(work: asyncio.Task[None]) -> None:
        while not work.done():
            turns.append(1)
            await asyncio.sleep(0.01)

    consume(
        shop,
        handler,
        lambda: len(shop.handled()) >= 6,
        driver=driver,
        meanwhile=others,
        inbox=Inbox("points", sequences=True),
    )
    assert sorted(shop.handled()) == [f"e-{number}" for number in range(6)]
    assert tries.count("e-3") == 2
    assert threads == {threading.get_ident()}
    assert len(turns) > 5  # nothing stands still while it polls
    shop.send("e-last")
    consume(shop, add_points, lambda: "e-last" in shop.handled(), driver=driver)
    repeats = shop.database.sql("SELECT MAX(repeats) FROM inbox_event")
    assert repeats[0][0] <= 2, "the offsets were taken"


@pytest.mark.parametrize("when", ["handling", "waiting"])
def test_cancelled_it_rolls_back_and_lets_go(shop: Shop, when: str) -> None:
    shop.send("e-1")
    begun = asyncio.Event()

    async def handler(session: AsyncSession, event: InboxEvent) -> None:
        await add_points(session, event)
        begun.set()
        if when == "waiting":
            raise RuntimeError("not now")
        await asyncio.sleep(3600)

    async def cancel(work: asyncio.Task[None]) -> None:
        await asyncio.wait_for(begun.wait(), 60)
        work.cancel()

    with pytest.raises(asyncio.CancelledError):
        consume(shop, handler, lambda: False, meanwhile=cancel, waits=(3600.0,))
    assert shop.handled() == []
    consume(shop, add_points, lambda: bool(shop.handled()))
    assert shop.handled() == ["e-1"]


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("rollback", b"the handler ended the transaction"),
        ("commit", b"the handler must not commit"),
    ],
)
def test_a_handler_that_ends_the_transaction_has_not_handled(
    shop: Shop, end: str, reason: bytes
) -> None:
    shop.send("e-1")

    async def handler(session: AsyncSession, event: InboxEvent) -> None:
        await add_points(session, event)
        await getattr(session, end)()

    dead_letters = DeadLetters(shop.producer)
    consume(shop, handler, lambda: bool(shop.dead()), waits=(0.05,), dead_letters=dead_letters)
    [dead] = shop.dead()
    assert reason in (dead.headers["dead_letter_reason"] or b"")
    assert shop.handled() == []


def test_what_is_wrong_with_the_call_is_no_events_fault(shop: Shop) -> None:
    shop.send("e-1")

    async def aio() -> None:
        consumer = AIOConsumer({"bootstrap.servers": shop.kafka, "group.id": shop.group})
        try:
            await Inbox("points").consume_async(
                consumer,  # type: ignore[arg-type]
                async_session_maker(),
                add_points,
            )
        finally:
            await consumer.close()

    with pytest.raises(TypeError, match=r"give a confluent_kafka\.Consumer"):
        asyncio.run(aio())
    with pytest.raises(TypeError, match="the handler is not asynchronous"):
        consume(shop, lambda *_: None, lambda: False, dead_letters=DeadLetters(shop.producer))
    assert shop.dead() == []
