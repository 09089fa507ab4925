"""``Inbox.consume`` where the event itself is what goes wrong, and where the group changes while it
waits. Real servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from dev.database import Database as Server
from tests.integration.test_inbox import Shop, add_points
from tests.integration.test_inbox_async import consume as consume_async
from tests.support.brokers import ProxiedKafka
from tests.support.harness import create_topic
from tests.support.sql import Database
from writer import DeadLetters, Inbox, InboxEvent


@pytest.fixture
def shop(mysql: Database, kafka: str) -> Iterator[Shop]:
    made = Shop(mysql, kafka)
    create_topic(kafka, made.topic, 4)
    yield made
    made.engine.dispose()


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outages are waited for as often as ever, but not as long."""
    monkeypatch.setattr("writer.consume._OUTAGE_WAITS_S", (0.05,))


# --- what looks like an outage ------------------------------------------------------------------


def kill(shop: Shop, connection: int) -> None:
    shop.database.sql(f"KILL {connection}")


@pytest.mark.usefixtures("short_waits")
def test_an_event_that_loses_the_connection_each_time(shop: Shop) -> None:
    """Five times it may be an outage; then each time is a try. The others go on."""
    shop.send("bad")
    shop.send("good")
    tries: list[str] = []

    def handler(session: Session, event: InboxEvent) -> None:
        tries.append(event.event_id)
        if event.event_id == "bad":
            kill(shop, session.execute(text("SELECT CONNECTION_ID()")).scalar_one())
        add_points(session, event)

    dead_letters = DeadLetters(shop.producer)
    shop.consume(
        handler, lambda: "good" in shop.handled(), waits=(0.05,), dead_letters=dead_letters
    )
    assert tries == ["bad"] * 6 + ["good"]
    assert shop.handled() == ["good"]
    [dead] = shop.dead()
    assert dead.event_id == "bad"
    assert (dead.headers["dead_letter_reason"] or b"").startswith(b"OperationalError")


@pytest.mark.usefixtures("short_waits")
def test_an_event_that_loses_the_connection_each_time_async(shop: Shop) -> None:
    shop.send("bad")
    shop.send("good")
    tries: list[str] = []

    async def handler(session: AsyncSession, event: InboxEvent) -> None:
        tries.append(event.event_id)
        if event.event_id == "bad":
            kill(shop, (await session.execute(text("SELECT CONNECTION_ID()"))).scalar_one())
        await session.execute(text("INSERT INTO points VALUES (:id, '')"), {"id": event.event_id})

    dead_letters = DeadLetters(shop.producer)
    consume_async(
        shop, handler, lambda: "good" in shop.handled(), waits=(0.05,), dead_letters=dead_letters
    )
    assert tries == ["bad"] * 6 + ["good"]
    assert shop.handled() == ["good"]
    assert [dead.event_id for dead in shop.dead()] == ["bad"]


@pytest.mark.usefixtures("short_waits")
def test_a_statement_that_no_packet_takes(shop: Shop) -> None:
    """Some drivers say "too large", others that the connection is lost."""
    before = shop.database.sql("SELECT @@GLOBAL.max_allowed_packet")[0][0]
    shop.database.sql("SET GLOBAL max_allowed_packet = 1048576")
    try:
        shop.send("bad")
        shop.send("good")

        def handler(session: Session, event: InboxEvent) -> None:
            add_points(session, event)
            if event.event_id == "bad":
                session.execute(text("DO LENGTH(:text)"), {"text": "x" * 8_000_000})

        dead_letters = DeadLetters(shop.producer)
        shop.consume(
            handler, lambda: "good" in shop.handled(), waits=(0.05,), dead_letters=dead_letters
        )
        assert shop.handled() == ["good"]
        assert [dead.event_id for dead in shop.dead()] == ["bad"]
    finally:
        shop.database.sql(f"SET GLOBAL max_allowed_packet = {before}")


def test_lost_connections_that_the_service_calls_outages(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are waited out without end."""
    monkeypatch.setattr("writer.consume._OUTAGE_WAITS_S", (0.05,))
    shop.send("e-1")
    tries: list[str] = []

    class StorageError(Exception):
        pass

    def handler(session: Session, event: InboxEvent) -> None:
        tries.append(event.event_id)
        if len(tries) < 9:
            kill(shop, session.execute(text("SELECT CONNECTION_ID()")).scalar_one())
        try:
            add_points(session, event)
        except OperationalError as error:
            raise StorageError from error

    shop.consume(handler, lambda: bool(shop.handled()), waits=(), outages=(StorageError,))
    assert len(tries) == 9


def test_what_the_servers_options_forbid(own_mysql: Server, kafka: str) -> None:
    """Error 1290 is an outage where the server is read-only, as in a failover; a file that
    --secure-file-priv forbids is forbidden for ever."""
    with Database.create(own_mysql.url()) as database:
        shop = Shop(database, kafka)
        create_topic(kafka, shop.topic, 1)
        [(allowed,)] = database.sql("SELECT @@secure_file_priv")
        assert allowed != "", "this server writes files anywhere"
        shop.send("bad")
        shop.send("good")
        tries: list[str] = []
        refused_at: list[float] = []

        def handler(session: Session, event: InboxEvent) -> None:
            tries.append(event.event_id)
            if event.event_id == "bad":
                session.execute(text("SELECT 1 INTO OUTFILE '/nowhere/file'"))
            if not refused_at:
                database.sql("SET GLOBAL super_read_only = ON")
                refused_at.append(time.monotonic())
            add_points(session, event)

        def until() -> bool:
            if refused_at and time.monotonic() > refused_at[0] + 2:
                database.sql("SET GLOBAL super_read_only = OFF")
                database.sql("SET GLOBAL read_only = OFF")
            return "good" in shop.handled()

        try:
            shop.consume(handler, until, waits=(), dead_letters=DeadLetters(shop.producer))
        finally:
            database.sql("SET GLOBAL super_read_only = OFF")
            database.sql("SET GLOBAL read_only = OFF")
        assert tries == ["bad", "good", "good"]
        [dead] = shop.dead()
        assert b"secure-file-priv" in (dead.headers["dead_letter_reason"] or b"")
        shop.engine.dispose()


@pytest.mark.parametrize("driver", ["pymysql", "asyncmy"])
@pytest.mark.parametrize("rolls_back", [False, True])
def test_a_lock_timeout_that_the_handler_caught(
    own_mysql: Server, kafka: str, rolls_back: bool, driver: str
) -> None:
    """With innodb_rollback_on_timeout the claim is gone with all the rest, and the event is handled
    again; without it only the statement is."""
    own_mysql.stop()
    own_mysql.start(["--innodb-rollback-on-timeout=ON"] if rolls_back else [])
    try:
        with Database.create(own_mysql.url()) as database:
            shop = Shop(database, kafka)
            create_topic(kafka, shop.topic, 1)
            database.sql("CREATE TABLE locks (id INT PRIMARY KEY, n INT)")
            database.sql("INSERT INTO locks VALUES (1, 0)")
            shop.send("e-1")
            shop.send("e-2")
            tries: list[str] = []
            caught: list[str] = []
            insert = text("INSERT INTO points VALUES (:id, :try)")

            with closing(database.connect()) as other:
                with other.cursor() as cursor:
                    cursor.execute("UPDATE locks SET n = 1")

                def first(session: Session, event: InboxEvent) -> None:
                    tries.append(event.event_id)
                    row = {"id": event.event_id, "try": len(tries)}
                    session.execute(insert, row)
                    if len(tries) == 1:
                        session.execute(text("SET innodb_lock_wait_timeout = 1"))
                        try:
                            session.execute(text("UPDATE locks SET n = 2"))
                        except OperationalError as error:
                            caught.append(str(error))

                async def first_async(session: AsyncSession, event: InboxEvent) -> None:
                    await session.run_sync(first, event)

                if driver == "pymysql":
                    shop.consume(first, lambda: "e-2" in shop.handled())
                else:
                    consume_async(shop, first_async, lambda: "e-2" in shop.handled())
                other.rollback()
            assert "1205" in caught[0]
            assert shop.handled() == ["e-1", "e-2"]
            assert tries == ["e-1", *(["e-1"] if rolls_back else []), "e-2"]
            claims = database.sql("SELECT event_id FROM inbox_event ORDER BY event_id")
            assert claims == (("e-1",), ("e-2",))
            shop.engine.dispose()
    finally:
        own_mysql.stop()
        own_mysql.start()


# --- dead letters -------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["the producer's", "the topic's", "none"])
def test_a_dead_letter_that_is_too_large(shop: Shop, limit: str) -> None:
    """It goes without its value, which is still where the record came from."""
    producer = shop.producer
    if limit == "the producer's":
        producer = Producer({"bootstrap.servers": shop.kafka, "message.max.bytes": 1000})
    elif limit == "the topic's":
        create_topic(shop.kafka, f"{shop.topic}.dead", 1, {"max.message.bytes": "1500"})
    value = b'"' + b"x" * 1400 + b'"'
    shop.producer.produce(shop.topic, key="7", value=value, headers={"id": b"bad", "tenant": b"t"})
    shop.producer.flush(30)
    shop.send("good")

    def handler(session: Session, event: InboxEvent) -> None:
        if event.event_id == "bad":
            raise RuntimeError("broken for good")
        add_points(session, event)

    shop.consume(
        handler,
        lambda: "good" in shop.handled(),
        waits=(),
        dead_letters=DeadLetters(producer),
    )
    [dead] = shop.dead()
    assert (dead.key, dead.headers["id"], dead.headers["tenant"]) == ("7", b"bad", b"t")
    assert dead.headers["dead_letter_reason"] == b"RuntimeError: broken for good"
    topic, partition, offset = (dead.headers["dead_letter_source"] or b"").decode().split("/")
    if limit == "none":
        assert dead.value == value
        assert "dead_letter_value_left_out" not in dead.headers
    else:
        assert dead.value == b""
        assert dead.headers["dead_letter_value_left_out"] == str(len(value)).encode()
    assert (topic, int(partition) >= 0, int(offset)) == (shop.topic, True, 0)


def received(shop: Shop) -> Any:
    """The first record of the topic, as a consumer gets it."""
    with shop.consumer() as consumer:
        deadline = time.monotonic() + 60
        while (message := consumer.poll(0.5)) is None or message.error() is not None:
            assert time.monotonic() < deadline, "nothing received"
        return message


def test_a_full_queue_is_waited_for(shop: Shop) -> None:
    shop.send("bad")
    settings = {"queue.buffering.max.messages": 1, "linger.ms": 1000}
    producer = Producer({"bootstrap.servers": shop.kafka, **settings})
    producer.produce(f"{shop.topic}.others", value=b"x")
    with pytest.raises(BufferError):
        producer.produce(f"{shop.topic}.others", value=b"y")
    DeadLetters(producer).send(received(shop), "points", "why")
    [dead] = shop.dead()
    assert dead.headers["dead_letter_reason"] == b"why"


def test_what_others_send_by_the_same_producer_is_theirs(
    mysql: Database, quick_kafka: ProxiedKafka
) -> None:
    """Their record for a topic that is not there stays in the queue; the letter is delivered."""
    shop = Shop(mysql, quick_kafka.bootstrap)
    for topic in (shop.topic, f"{shop.topic}.dead"):
        create_topic(shop.kafka, topic, 1)
    shop.send("bad")
    producer = Producer(
        {"bootstrap.servers": shop.kafka, "topic.metadata.propagation.max.ms": 60_000}
    )
    producer.produce(f"{shop.topic}.missing", value=b"x")
    message = received(shop)
    DeadLetters(producer, timeout_s=20).send(message, "points", "why")
    assert len(producer) == 1
    assert [dead.event_id for dead in shop.dead()] == ["bad"]
    with pytest.raises(RuntimeError, match=r"dead letter of .*/0/0 was not taken: time-out"):
        DeadLetters(producer, "{topic}.nowhere", timeout_s=1).send(message, "points", "why")
    producer.purge()
    producer.flush(10)
    shop.engine.dispose()


# --- the group ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("loses", "back"), [(True, "within"), (False, "within"), (False, "after")])
def test_the_group_changes_during_a_wait(shop: Shop, loses: bool, back: str) -> None:
    """A second consumer takes half of the partitions over, with that of the event that waits or
    without it, and gives them back, within the wait or after it: nothing is lost, nothing is
    handled twice, and no partition stays paused."""

    def send(name: str) -> list[str]:
        sent = [f"{name}-{partition}-{number}" for partition in range(4) for number in range(3)]
        for event_id in sent:
            shop.producer.produce(
                shop.topic,
                key=event_id,
                value=b"{}",
                partition=int(event_id.split("-")[1]),
                headers={"id": event_id.encode()},
            )
        assert shop.producer.flush(30) == 0
        return sent

    waiting, over, done = threading.Event(), threading.Event(), threading.Event()
    # Partitions are given out in the order of the members' names: the second one has 0 and 1.
    waits_at = 0 if loses else 3
    failures: list[BaseException] = []
    seconds: list[InboxEvent] = []

    def first(session: Session, event: InboxEvent) -> None:
        add_points(session, event)
        if event.partition == waits_at and not (over if back == "after" else waiting).is_set():
            waiting.set()
            raise RuntimeError("not yet")

    def second(session: Session, event: InboxEvent) -> None:
        add_points(session, event)
        seconds.append(event)

    def enough() -> bool:
        if len(seconds) < 4:
            return False
        over.set()
        return back == "within" or f"before-{waits_at}-2" in shop.handled()

    waits = (12.0,) if back == "within" else (3.0,) * 40

    def consume_first(consumer: Consumer) -> None:
        try:
            Inbox("points").consume(consumer, shop.sessions, first, waits=waits, stop=done.is_set)
        except BaseException as error:
            failures.append(error)

    quick = {"heartbeat.interval.ms": 300}
    expected = send("before")
    with shop.consumer({**quick, "client.id": "b"}) as consumer:
        thread = threading.Thread(target=consume_first, args=(consumer,))
        thread.start()
        try:
            assert waiting.wait(60)
            expected += send("during")
            shop.consume(second, enough, {**quick, "client.id": "a"})
            expected += send("after")
            deadline = time.monotonic() + 60
            while len(set(shop.handled())) < len(expected):
                assert not failures, failures
                assert time.monotonic() < deadline, f"only {sorted(set(shop.handled()))}"
                time.sleep(0.1)
        finally:
            done.set()
            thread.join(60)
    assert not thread.is_alive()
    assert not failures
    assert {event.partition for event in seconds} <= {0, 1}
    assert sorted(shop.handled()) == sorted(expected)


@pytest.mark.parametrize("waits", [True, False])
def test_a_consumer_that_is_replaced(shop: Shop, waits: bool) -> None:
    """Another one with its ``group.instance.id`` fences it: that is fatal, and raised, also while
    an event waits."""
    shop.send("e-1")
    waiting, done = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def handler(session: Session, event: InboxEvent) -> None:
        add_points(session, event)
        waiting.set()
        if waits:
            raise RuntimeError("not yet")

    def consume_first(consumer: Consumer) -> None:
        try:
            Inbox("points").consume(
                consumer, shop.sessions, handler, waits=(3600.0,), stop=done.is_set
            )
        except KafkaException as error:
            failures.append(error)

    same = {"group.instance.id": "one", "heartbeat.interval.ms": 300}
    with shop.consumer(same) as consumer:
        thread = threading.Thread(target=consume_first, args=(consumer,))
        thread.start()
        try:
            assert waiting.wait(60)
            shop.send("e-2")
            # Until the first one has ended.
            shop.consume(
                add_points, lambda: not thread.is_alive() and "e-2" in shop.handled(), same
            )
        finally:
            done.set()
            thread.join(30)
    [error] = failures
    assert "fenced" in str(error)
    assert shop.handled() == ["e-1", "e-2"]
