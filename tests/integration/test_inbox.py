"""``Inbox.consume`` on real servers: each event handled once, whatever is delivered how often."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer
from sqlalchemy import Engine, MetaData, create_engine, text
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError
from sqlalchemy.ext.asyncio import async_sessionmaker as async_session_maker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.orm import sessionmaker as session_maker
from sqlalchemy.pool import NullPool

from cdc_relay.outbox import ddl, inbox_sequence_table, inbox_table
from dev.database import Database as Server
from tests.support.brokers import ProxiedKafka
from tests.support.harness import Message, create_topic
from tests.support.harness import consume as read_topic
from tests.support.sql import Database
from writer import Arrival, DeadLetters, Inbox, InboxEvent, NotInTransactionError

ROOT = Path(__file__).resolve().parents[2]
_numbers = itertools.count(1)


class Shop:
    """A topic, a consumer group and a database with an inbox and a table of points."""

    def __init__(self, database: Database, kafka: str) -> None:
        self.database = database
        self.kafka = kafka
        self.topic = f"inbox-{os.getpid()}-{next(_numbers)}"
        self.group = self.topic
        self.engine: Engine = create_engine(database.url, pool_pre_ping=True)
        self.sessions = session_maker(self.engine)
        metadata = MetaData()
        for table in (inbox_table(metadata), inbox_sequence_table(metadata)):
            for statement in ddl(table):
                database.sql(statement)
        database.sql("CREATE TABLE points (event_id VARCHAR(64), body TEXT)")
        self.producer = Producer({"bootstrap.servers": kafka, "log_level": 4})

    def send(self, event_id: str | None, key: str = "7", **headers: str) -> None:
        fields = {"event_type": "PLACED", "aggregate_type": "order", "aggregate_id": key, **headers}
        if event_id is not None:
            fields["id"] = event_id
        self.producer.produce(
            self.topic,
            key=key,
            value=b'{"a": 1}',
            headers={k: v.encode() for k, v in fields.items()},
        )
        assert self.producer.flush(30) == 0

    @contextmanager
    def consumer(
        self, settings: Mapping[str, Any] | None = None, topic: str | None = None
    ) -> Iterator[Consumer]:
        made = Consumer(
            {
                "bootstrap.servers": self.kafka,
                "group.id": self.group,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "session.timeout.ms": 6000,
                "max.poll.interval.ms": 6000,
                **(settings or {}),
            }
        )
        made.subscribe([topic or self.topic])
        try:
            yield made
        finally:
            made.close()

    def consume(
        self,
        handler: Any,
        until: Callable[[], bool],
        settings: Mapping[str, Any] | None = None,
        topic: str | None = None,
        **options: Any,
    ) -> None:
        """Run ``consume`` until ``until()``; fails after 60 s."""
        deadline = time.monotonic() + 60
        inbox = options.pop("inbox", None) or Inbox("points")

        def stop() -> bool:
            assert time.monotonic() < deadline, "not within 60 s"
            return until()

        with self.consumer(settings, topic) as consumer:
            inbox.consume(consumer, self.sessions, handler, stop=stop, **options)

    def handled(self) -> list[str]:
        self.database.close()  # the server may have been killed
        return [row[0] for row in self.database.sql("SELECT event_id FROM points")]

    def dead(self) -> list[Message]:
        return read_topic(self.kafka, f"{self.topic}.dead")


def add_points(session: Session, event: InboxEvent) -> None:
    session.execute(
        text("INSERT INTO points VALUES (:id, :body)"),
        {"id": event.event_id, "body": str(event.json())},
    )


@pytest.fixture
def shop(mysql: Database, kafka: str) -> Iterator[Shop]:
    made = Shop(mysql, kafka)
    create_topic(kafka, made.topic, 4)
    yield made
    made.engine.dispose()


def test_each_event_once_and_the_offset_behind_it(shop: Shop) -> None:
    for number in range(5):
        for _ in range(3):
            shop.send(f"e-{number}", key=str(number))
    seen: list[InboxEvent] = []

    def handler(session: Session, event: InboxEvent) -> None:
        seen.append(event)
        add_points(session, event)

    shop.consume(handler, lambda: len(seen) >= 5)
    shop.send("e-last")
    shop.consume(handler, lambda: len(seen) >= 6)
    assert sorted(shop.handled()) == [*(f"e-{number}" for number in range(5)), "e-last"]
    first = next(event for event in seen if event.event_id == "e-3")
    assert first.event_type == "PLACED"
    assert (first.aggregate_type, first.aggregate_id) == ("order", "3")
    assert first.key == b"3"
    assert first.json() == {"a": 1}
    assert (first.occurred_at, first.aggregate_seq, first.arrival) == (None, None, None)


def test_ten_redeliveries_to_four_processes(shop: Shop) -> None:
    """The same event, ten times, from four consumer processes, each in a group of its own."""
    for _ in range(10):
        for number in range(20):
            shop.send(f"e-{number}", key=str(number))
    code = """
import sys
from confluent_kafka import Consumer
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker
from writer import Inbox
url, kafka, topic, group = sys.argv[1:]
consumer = Consumer({"bootstrap.servers": kafka, "group.id": group, "enable.auto.commit": False,
                     "auto.offset.reset": "earliest"})
consumer.subscribe([topic])
seen = 0
class Counted:
    # Counts what was delivered, handled or not.
    def __getattr__(self, name): return getattr(consumer, name)
    def poll(self, timeout):
        global seen
        message = consumer.poll(timeout)
        seen += message is not None and message.error() is None
        return message
def handler(session, event):
    session.execute(text("INSERT INTO points VALUES (:id, '')"), {"id": event.event_id})
Inbox("points").consume(Counted(), sessionmaker(create_engine(url)), handler,
                        stop=lambda: seen >= 200)
consumer.close()
"""
    command = [sys.executable, "-c", code, shop.database.text, shop.kafka, shop.topic]
    processes = [
        subprocess.Popen(
            [*command, f"{shop.group}-{number}"],
            cwd=ROOT,
        )
        for number in range(4)
    ]
    try:
        assert [process.wait(90) for process in processes] == [0] * 4
    finally:
        for process in processes:
            process.kill()
    assert sorted(shop.handled()) == sorted(f"e-{number}" for number in range(20))
    repeats = shop.database.sql("SELECT repeats FROM inbox_event")
    assert [row[0] for row in repeats] == [39] * 20


def test_a_group_whose_members_are_killed(shop: Shop) -> None:
    """Rebalances and kill -9 among four members of one group: each event is handled once."""
    code = """
import sys
from confluent_kafka import Consumer
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker
from writer import Inbox
url, kafka, topic = sys.argv[1:]
consumer = Consumer({"bootstrap.servers": kafka, "group.id": topic, "enable.auto.commit": False,
                     "auto.offset.reset": "earliest", "session.timeout.ms": 6000})
consumer.subscribe([topic])
def handler(session, event):
    session.execute(text("INSERT INTO points VALUES (:id, SLEEP(0.005))"), {"id": event.event_id})
Inbox("points").consume(consumer, sessionmaker(create_engine(url)), handler)
"""
    command = [sys.executable, "-c", code, shop.database.text, shop.kafka, shop.topic]
    expected = [f"e-{number}" for number in range(300)]
    for event_id in [*expected, *expected[:100]]:
        shop.producer.produce(
            shop.topic, key=event_id[-1], value=b"{}", headers={"id": event_id.encode()}
        )
    assert shop.producer.flush(30) == 0
    processes = [subprocess.Popen(command, cwd=ROOT) for _ in range(4)]
    try:
        deadline = time.monotonic() + 90
        for goal in (20, 80, 160):
            while len(shop.handled()) < goal:
                assert time.monotonic() < deadline, f"{len(shop.handled())} handled"
                time.sleep(0.02)
            victim = processes.pop(0)
            victim.kill()
            victim.wait(10)
            processes.append(subprocess.Popen(command, cwd=ROOT))
        while len(set(shop.handled())) < len(expected):
            assert time.monotonic() < deadline, f"{len(shop.handled())} handled"
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    assert sorted(shop.handled()) == sorted(expected)


def test_a_consumer_that_is_killed_after_the_commit(shop: Shop) -> None:
    """The offset was never committed: the event comes again and is not handled again."""
    shop.send("e-1")
    code = """
import os, sys
from confluent_kafka import Consumer
from sqlalchemy import create_engine, event, text
from sqlalchemy.orm import sessionmaker
from writer import Inbox
url, kafka, topic = sys.argv[1:]
consumer = Consumer({"bootstrap.servers": kafka, "group.id": topic, "enable.auto.commit": False,
                     "auto.offset.reset": "earliest", "session.timeout.ms": 6000})
consumer.subscribe([topic])
sessions = sessionmaker(create_engine(url))
event.listen(sessions, "after_commit", lambda session: os.kill(os.getpid(), 9))
def handler(session, event):
    session.execute(text("INSERT INTO points VALUES (:id, '')"), {"id": event.event_id})
Inbox("points").consume(consumer, sessions, handler)
"""
    arguments = [sys.executable, "-c", code, shop.database.text, shop.kafka, shop.topic]
    done = subprocess.run(arguments, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert shop.handled() == ["e-1"]
    shop.send("e-2")
    shop.consume(add_points, lambda: "e-2" in shop.handled())
    assert sorted(shop.handled()) == ["e-1", "e-2"]
    assert shop.database.sql("SELECT repeats FROM inbox_event WHERE event_id = 'e-1'") == ((1,),)


def test_a_failing_event_is_tried_again_in_its_place(shop: Shop) -> None:
    shop.send("e-1")
    shop.send("e-2")
    tries: list[str] = []

    def handler(session: Session, event: InboxEvent) -> None:
        add_points(session, event)
        tries.append(event.event_id)
        if len(tries) < 3:
            raise RuntimeError("not yet")

    shop.consume(handler, lambda: "e-2" in shop.handled(), waits=(0.05, 0.05, 0.05))
    assert tries == ["e-1", "e-1", "e-1", "e-2"]
    assert shop.handled() == ["e-1", "e-2"]


def test_an_event_that_cannot_be_handled_goes_to_the_dead_letters(shop: Shop) -> None:
    shop.send("bad", tenant="t")
    shop.send(None)
    shop.send("good")

    def handler(session: Session, event: InboxEvent) -> None:
        add_points(session, event)
        if event.event_id == "bad":
            raise RuntimeError("broken for good")

    dead_letters = DeadLetters(shop.producer)
    shop.consume(
        handler, lambda: "good" in shop.handled(), waits=(0.05,), dead_letters=dead_letters
    )
    assert shop.handled() == ["good"]
    bad, nameless = shop.dead()
    assert bad.event_id == "bad"
    assert bad.key == "7"
    assert bad.json == {"a": 1}
    assert bad.headers["tenant"] == b"t"
    assert bad.headers["dead_letter_consumer"] == b"points"
    assert bad.headers["dead_letter_reason"] == b"RuntimeError: broken for good"
    assert (bad.headers["dead_letter_source"] or b"").startswith(shop.topic.encode())
    assert b"has no header id" in (nameless.headers["dead_letter_reason"] or b"")
    # Not claimed: sent again once it is mended, it is handled.
    shop.send("bad")
    shop.consume(add_points, lambda: "bad" in shop.handled())


def test_a_pattern_that_takes_in_the_dead_letters(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """They are passed over: handled again they would be letters of letters, without end. Sent back
    to its topic, with all its headers, one is handled."""
    create_topic(shop.kafka, f"{shop.topic}.dead", 1)
    shop.send("bad")
    shop.send(None)
    broken = True
    tries: list[str] = []

    def handler(session: Session, event: InboxEvent) -> None:
        tries.append(f"{event.event_id} of {event.topic}")
        add_points(session, event)
        if event.event_id == "bad" and broken:
            raise RuntimeError("broken for good")

    def passed_over() -> int:
        return caplog.text.count("is a dead letter and passed over")

    options: dict[str, Any] = {"waits": (), "dead_letters": DeadLetters(shop.producer)}
    pattern = f"^{shop.topic}.*"
    shop.consume(handler, lambda: passed_over() == 2, topic=pattern, **options)
    assert tries == [f"bad of {shop.topic}"]
    bad, _ = shop.dead()
    broken = False
    headers = {name: value or b"" for name, value in bad.headers.items()}
    shop.producer.produce(shop.topic, key=bad.key, value=bad.value, headers=headers)
    shop.consume(handler, lambda: "bad" in shop.handled(), topic=pattern, **options)
    assert tries == [f"bad of {shop.topic}"] * 2
    assert len(shop.dead()) == 2
    assert passed_over() == 2


def test_without_dead_letters_nothing_is_passed_over(shop: Shop) -> None:
    shop.send("bad")
    shop.send("good")

    def handler(session: Session, event: InboxEvent) -> None:
        add_points(session, event)
        raise RuntimeError(event.event_id)

    for _ in range(2):
        with pytest.raises(RuntimeError, match="bad"):
            shop.consume(handler, lambda: False, waits=(0.05,))
    assert shop.handled() == []


class Unique(DeclarativeBase):
    pass


class Taken(Unique):
    __tablename__ = "taken"

    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.mark.parametrize("end", ["rollback", "close", "flush"])
def test_a_handler_that_ends_the_transaction_has_not_handled(shop: Shop, end: str) -> None:
    """An error of a flush that it catches has rolled everything back, the claim included."""
    shop.database.sql("CREATE TABLE taken (id INT PRIMARY KEY)")
    shop.database.sql("INSERT INTO taken VALUES (1)")
    shop.send("e-1")
    shop.send("e-2")
    tries: list[str] = []

    def handler(session: Session, event: InboxEvent) -> None:
        tries.append(event.event_id)
        add_points(session, event)
        if tries.count("e-1") > 1 or event.event_id == "e-2":
            return
        if end == "flush":
            session.add(Taken(id=1))
            with contextlib.suppress(IntegrityError):
                session.flush()
        else:
            getattr(session, end)()

    shop.consume(handler, lambda: "e-2" in shop.handled(), waits=(0.05,))
    assert tries == ["e-1", "e-1", "e-2"]
    assert shop.handled() == ["e-1", "e-2"]


def test_a_handler_must_not_commit(shop: Shop) -> None:
    """The claim would be committed with the half that is done, and what fails behind it would
    never be tried again."""
    shop.send("e-1")
    shop.send("e-2")
    shop.send("e-3")

    def handler(session: Session, event: InboxEvent) -> None:
        with session.begin_nested():
            add_points(session, event)
        if event.event_id == "e-1":
            session.commit()
            raise RuntimeError("the other half")
        if event.event_id == "e-2":
            session.begin_nested()
            session.commit()
        with contextlib.suppress(RuntimeError):  # refused, and nothing is lost
            session.commit()

    options: dict[str, Any] = {"waits": (0.05,), "dead_letters": DeadLetters(shop.producer)}
    shop.consume(handler, lambda: bool(shop.handled()), **options)
    assert shop.handled() == ["e-3"]
    dead = shop.dead()
    assert [one.event_id for one in dead] == ["e-1", "e-2"]
    for one in dead:
        assert b"the handler must not commit" in (one.headers["dead_letter_reason"] or b"")
    with shop.sessions.begin() as session:  # other sessions may
        session.execute(text("DELETE FROM points"))
    # Not claimed: they come again once the handler is mended.
    shop.send("e-1")
    shop.consume(add_points, lambda: bool(shop.handled()))
    assert shop.handled() == ["e-1"]


def test_a_handler_that_ends_the_transaction_each_time_is_told(shop: Shop) -> None:
    shop.send("e-1")

    def handler(session: Session, event: InboxEvent) -> None:
        session.rollback()

    dead_letters = DeadLetters(shop.producer)
    shop.consume(handler, lambda: bool(shop.dead()), waits=(), dead_letters=dead_letters)
    [dead] = shop.dead()
    assert b"the handler ended the transaction" in (dead.headers["dead_letter_reason"] or b"")


def test_a_deadlock_that_the_handler_caught(shop: Shop) -> None:
    """The server has rolled back the claim with the rest; what follows is another transaction."""
    shop.database.sql("CREATE TABLE locks (id INT PRIMARY KEY, n INT)")
    shop.database.sql("INSERT INTO locks VALUES (1, 0), (2, 0)")
    shop.send("e-1")
    shop.send("e-1")
    shop.send("e-2")
    caught: list[str] = []

    def cross(locked: threading.Event) -> None:
        other = shop.database.connect()
        with other.cursor() as cursor:
            # It has changed more rows, so the handler's transaction is the victim.
            rows = [(number,) for number in range(10, 300)]
            cursor.executemany("INSERT INTO locks VALUES (%s, 0)", rows)
            cursor.execute("UPDATE locks SET n = 1 WHERE id = 2")
            locked.set()
            cursor.execute("UPDATE locks SET n = 1 WHERE id = 1")
        other.rollback()
        other.close()

    def handler(session: Session, event: InboxEvent) -> None:
        if not caught:
            session.execute(text("UPDATE locks SET n = 2 WHERE id = 1"))
            locked = threading.Event()
            thread = threading.Thread(target=cross, args=(locked,))
            thread.start()
            assert locked.wait(30)
            try:
                session.execute(text("UPDATE locks SET n = 2 WHERE id = 2"))
            except OperationalError as error:
                caught.append(str(error))
            thread.join(30)
        add_points(session, event)

    shop.consume(handler, lambda: "e-2" in shop.handled())
    assert "1213" in caught[0]
    assert shop.handled() == ["e-1", "e-2"]


@pytest.mark.parametrize("catches", [False, True])
def test_a_record_that_changed_since_it_was_read(
    mariadb: Database, kafka: str, catches: bool
) -> None:
    """MariaDB's innodb_snapshot_isolation, on by default since 11.6: no event is at fault, and the
    transaction is rolled back, as by a deadlock."""
    shop = Shop(mariadb, kafka)
    create_topic(kafka, shop.topic, 1)
    shop.sessions = session_maker(
        create_engine(
            mariadb.url,
            poolclass=NullPool,
            connect_args={"init_command": "SET innodb_snapshot_isolation = ON"},
        )
    )
    mariadb.sql("CREATE TABLE stock (id INT PRIMARY KEY, n INT)")
    mariadb.sql("INSERT INTO stock VALUES (1, 0)")
    shop.send("e-1")
    seen: list[str] = []
    tries: list[int] = []

    def handler(session: Session, event: InboxEvent) -> None:
        tries.append(1)
        session.execute(text("SELECT * FROM stock"))
        if len(tries) == 1:
            mariadb.sql("UPDATE stock SET n = 1")
        try:
            session.execute(text("UPDATE stock SET n = n + 1"))
        except OperationalError as error:
            seen.append(str(error))
            if not catches:
                raise
        add_points(session, event)

    shop.consume(handler, lambda: bool(shop.handled()), waits=())
    assert len(tries) == 2
    assert "1020" in seen[0]
    assert shop.handled() == ["e-1"]
    assert mariadb.sql("SELECT n FROM stock") == ((2,),)
    shop.engine.dispose()


def test_a_broker_that_hangs_does_not_hold_up_stop(
    mysql: Database, quick_kafka: ProxiedKafka
) -> None:
    """Not for the minute that the answer to a commit is waited for."""
    shop = Shop(mysql, quick_kafka.bootstrap)
    create_topic(shop.kafka, shop.topic, 1)
    shop.send("e-1")
    hung = threading.Event()

    def handler(session: Session, event: InboxEvent) -> None:
        add_points(session, event)
        quick_kafka.pause()
        hung.set()

    with shop.consumer() as consumer:
        arguments = (consumer, shop.sessions, handler)
        thread = threading.Thread(
            target=Inbox("points").consume, args=arguments, kwargs={"stop": hung.is_set}
        )
        thread.start()
        try:
            assert hung.wait(60)
            thread.join(30)
            assert not thread.is_alive(), "still waiting for the broker"
        finally:
            quick_kafka.resume()
            thread.join(60)
    assert shop.handled() == ["e-1"]
    shop.engine.dispose()


@pytest.mark.parametrize(
    "fault", ["asynchronous", "a generator", "an engine", "asynchronous sessions"]
)
def test_what_is_wrong_with_the_call_is_no_events_fault(shop: Shop, fault: str) -> None:
    """A coroutine or a generator that nobody runs would count as handled."""
    sessions: Any = shop.sessions
    handler: Any = add_points
    if fault == "asynchronous":

        async def handler(session: Session, event: InboxEvent) -> None:
            add_points(session, event)

    elif fault == "a generator":

        def handler(session: Session, event: InboxEvent) -> Iterator[None]:
            add_points(session, event)
            yield

    elif fault == "an engine":
        sessions = shop.engine
    else:
        sessions = async_session_maker()
    shop.sessions, right = sessions, shop.sessions
    shop.send("e-1")
    with pytest.raises(TypeError):
        shop.consume(handler, lambda: False, dead_letters=DeadLetters(shop.producer))
    assert shop.dead() == []
    shop.sessions = right
    shop.consume(add_points, lambda: bool(shop.handled()))
    assert shop.handled() == ["e-1"]


@pytest.mark.parametrize("fault", ["no table", "autocommit"])
def test_what_is_wrong_with_the_inbox_is_no_events_fault(shop: Shop, fault: str) -> None:
    """Raised at once: no event goes to the dead letters for it, and none is passed over."""
    expected: type[Exception] = NotInTransactionError
    sessions = shop.sessions
    if fault == "no table":
        shop.database.sql("RENAME TABLE inbox_event TO elsewhere")
        expected = ProgrammingError
    else:
        shop.sessions = session_maker(shop.engine.execution_options(isolation_level="AUTOCOMMIT"))
    shop.send("e-1")
    with pytest.raises(expected):
        shop.consume(add_points, lambda: False, dead_letters=DeadLetters(shop.producer))
    assert shop.dead() == []
    if fault == "no table":
        shop.database.sql("RENAME TABLE elsewhere TO inbox_event")
    shop.sessions = sessions
    shop.consume(add_points, lambda: bool(shop.handled()))
    assert shop.handled() == ["e-1"]


def test_records_with_wrong_headers_are_dead_letters(shop: Shop) -> None:
    shop.send("x" * 65)
    shop.send("e-1", aggregate_seq="one")
    shop.send("e-2", aggregate_seq=str(1 << 63))
    shop.send("e-3", key="k" * 65, aggregate_seq="1")
    shop.send("e-4", occurred_at="yesterday")
    shop.send("good")
    shop.consume(
        add_points,
        lambda: "good" in shop.handled(),
        inbox=Inbox("points", sequences=True),
        dead_letters=DeadLetters(shop.producer),
    )
    assert shop.handled() == ["good"]
    assert len(shop.dead()) == 5


def test_waits_longer_than_the_poll_interval_keep_the_membership(shop: Shop) -> None:
    """A consumer that does not poll for 6 s would be thrown out of its group."""
    shop.send("e-1")
    tries: list[float] = []

    def handler(session: Session, event: InboxEvent) -> None:
        add_points(session, event)
        tries.append(time.monotonic())
        if len(tries) == 1:
            raise RuntimeError("not yet")

    shop.consume(handler, lambda: bool(shop.handled()), waits=(8.0,))
    shop.send("e-2")
    shop.consume(add_points, lambda: "e-2" in shop.handled())
    # The offset behind e-1 was taken: it did not come again.
    assert shop.database.sql("SELECT repeats FROM inbox_event WHERE event_id = 'e-1'") == ((0,),)


def test_stop_during_a_wait_leaves_the_event_for_later(shop: Shop) -> None:
    shop.send("e-1")
    failed = threading.Event()

    def handler(session: Session, event: InboxEvent) -> None:
        failed.set()
        raise RuntimeError("not now")

    began = time.monotonic()
    shop.consume(handler, failed.is_set, waits=(3600.0,))
    assert time.monotonic() - began < 60
    shop.consume(add_points, lambda: bool(shop.handled()))
    assert shop.handled() == ["e-1"]


def test_an_outage_of_the_database_costs_no_event_a_try(
    own_mysql: Server, kafka: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Database.create(own_mysql.url()) as database:
        shop = Shop(database, kafka)
        create_topic(kafka, shop.topic, 1)
        shop.send("e-1")
        shop.send("e-2")
        killed_at: list[float] = []

        def handler(session: Session, event: InboxEvent) -> None:
            add_points(session, event)
            if not killed_at:
                own_mysql.kill()
                killed_at.append(time.monotonic())

        def until() -> bool:
            if not own_mysql.alive and time.monotonic() > killed_at[0] + 3:
                own_mysql.start()
            return own_mysql.alive and len(shop.handled()) == 2

        with caplog.at_level(logging.WARNING, "cdc_relay.inbox"):
            shop.consume(handler, until, waits=())
        assert sorted(shop.handled()) == ["e-1", "e-2"]
        assert "waits for" in caplog.text
        shop.engine.dispose()


def test_an_outage_inside_an_error_of_the_services_own(shop: Shop) -> None:
    """A lock that somebody holds for too long, as a repository layer tells it."""
    shop.database.sql("CREATE TABLE locks (id INT PRIMARY KEY, n INT)")
    shop.database.sql("INSERT INTO locks VALUES (1, 0)")
    other = shop.database.connect()
    with other.cursor() as cursor:
        cursor.execute("UPDATE locks SET n = 1")
    shop.send("e-1")
    tries: list[str] = []

    class StorageError(Exception):
        pass

    def handler(session: Session, event: InboxEvent) -> None:
        tries.append(event.event_id)
        if len(tries) == 3:
            other.rollback()
        session.execute(text("SET innodb_lock_wait_timeout = 1"))
        try:
            session.execute(text("UPDATE locks SET n = 2"))
        except OperationalError as error:
            if len(tries) == 1:
                raise StorageError from error
            raise StorageError  # noqa: B904
        add_points(session, event)

    shop.consume(handler, lambda: bool(shop.handled()), waits=())
    other.close()
    assert tries == ["e-1"] * 3


def test_gaps_and_late_events_are_seen(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[int | None, Arrival | None, int]] = []

    def handler(session: Session, event: InboxEvent) -> None:
        add_points(session, event)
        seen.append((event.aggregate_seq, event.arrival, event.missing))

    for number, seq in enumerate((3, 4, 7, 6, 8)):
        shop.send(f"e-{number}", aggregate_seq=str(seq))
    shop.send("other", key="8", aggregate_seq="1")
    shop.send("none")
    with caplog.at_level(logging.WARNING, "cdc_relay.inbox"):
        shop.consume(handler, lambda: len(seen) == 7, inbox=Inbox("points", sequences=True))
    assert [item for item in seen if item[0] not in (1, None)] == [
        (3, Arrival.FIRST, 0),
        (4, Arrival.NEXT, 0),
        (7, Arrival.GAP, 2),
        (6, Arrival.LATE, 0),
        (8, Arrival.NEXT, 0),
    ]
    assert (1, Arrival.FIRST, 0) in seen
    assert (None, None, 0) in seen
    assert "number 7 of order 7 is 2 too far" in caplog.text
    assert "number 6 of order 7 is late" in caplog.text


def test_a_handler_may_name_its_own_outages(shop: Shop) -> None:
    class PartnerIsAwayError(Exception):
        pass

    shop.send("e-1")
    tries: list[int] = []

    def handler(session: Session, event: InboxEvent) -> None:
        tries.append(1)
        if len(tries) < 3:
            raise PartnerIsAwayError
        add_points(session, event)

    shop.consume(handler, lambda: bool(shop.handled()), waits=(), outages=(PartnerIsAwayError,))
    assert len(tries) == 3
