"""Faults that users of Kafka producers met, each as the smallest input that shows it, on real
brokers; and what a parked row, a lost position and another reader of the binlog see of the relay.

Rows that Kafka refuses: also ``test_errors.py``. Servers that come and go under load, kills:
``tests/acceptance``.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)
from pymysqlreplication import BinLogStreamReader
from pymysqlreplication.row_event import UpdateRowsEvent, WriteRowsEvent

from cdc_relay import owner as owner_module
from cdc_relay.cli.start import binlog_source
from cdc_relay.config import load
from cdc_relay.database import connected, describe_table, engine
from cdc_relay.errors import SinkUnavailableError
from cdc_relay.kafka.checkpoints import read_last, topic_name
from cdc_relay.kafka.sink import FencedError
from cdc_relay.kafka.transactions import TransactionalSink
from cdc_relay.kafka.unfinished import Written
from cdc_relay.owner import Owner
from cdc_relay.router import Record, Router
from cdc_relay.store import Store
from dev.kafka import Kafka
from dev.mysql import MySQL
from tests.support.brokers import ProxiedKafka, QuickKafka, console_producer
from tests.support.harness import Harness, create_topic, take_over
from tests.support.load import Load, account, repeated
from tests.support.sql import Database, insert, purge_logs, row

MakeShop = Callable[..., Harness]
SETTINGS = {
    "SESSION_TIMEOUT": "2s",
    "TRANSACTION_TIMEOUT": "5s",
    "CHECKPOINT_INTERVAL": "1s",  # what is parked is tried once a start has caught up
}
BOTH = pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])


@pytest.fixture
def make(tmp_path: Path, quick_kafka: ProxiedKafka) -> Iterator[MakeShop]:
    """Makes a shop on a database with the broker of these tests, or another."""
    with ExitStack() as stack:

        def one(database: Database, bootstrap: str = "", **environment: str) -> Harness:
            return stack.enter_context(
                Harness(
                    database,
                    bootstrap or quick_kafka.bootstrap,
                    tmp_path,
                    {**SETTINGS, **environment},
                )
            )

        yield one


def in_order(shop: Harness, kind: str = "order") -> dict[str, list[int]]:
    """The numbers of each key, each event at its first arrival."""
    seen: set[str] = set()
    found: dict[str, list[int]] = defaultdict(list)
    for message in shop.messages(kind):
        if message.event_id not in seen:
            found[message.key].append(message.json["n"])
        seen.add(message.event_id)
    return found


def state(shop: Harness, event_id: str) -> tuple[int, int, str | None]:
    """(status, retry_count, last_error) of a row."""
    sql = f"SELECT status, retry_count, last_error FROM {shop.table} WHERE event_id = %s"
    [(status, tries, reason)] = shop.database.sql(sql, (event_id,))
    return status, tries, reason


def closed(shop: Harness) -> bool:
    """Whether the last checkpoint names something closed."""
    last = shop.checkpoint()
    return last is not None and bool(last.closed)


def due_now(shop: Harness) -> None:
    """Make every parked row due."""
    shop.database.sql(f"UPDATE {shop.table} SET next_retry_time = NULL WHERE status = 0")


def set_limit(shop: Harness, kind: str, limit: int) -> None:
    """Change ``max.message.bytes`` of a topic."""
    entry = ConfigEntry(
        "max.message.bytes", str(limit), incremental_operation=AlterConfigOpType.SET
    )
    resource = ConfigResource("topic", shop.topic_prefix + kind, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": shop.kafka})
    admin.incremental_alter_configs([resource])[resource].result(timeout=20)


def status(shop: Harness) -> dict[str, Any]:
    process = shop.run("status", "--json")
    assert process.wait() == 0, process.text()
    report: dict[str, Any] = json.loads(process.stdout)
    return report


def large(size: int) -> dict[str, str]:
    """A payload of at least that size in any compression."""
    return {"text": os.urandom(size).hex()}


def test_a_topic_of_small_batches_and_a_record_that_is_too_large(
    make: MakeShop, mysql: Database
) -> None:
    """What stands behind a refused batch gets stuck in the client library, which does not say so;
    it is sent again, within the same call, until each record is judged. It once took the time of
    a transaction, and began anew."""
    shop = make(mysql)
    shop.create_topic(partitions=3, **{"max.message.bytes": "3000"})
    settings = load(environ=shop.environment())
    topic = shop.topic_prefix + "order"
    records = [
        Record(
            topic,
            f"k{n % 100}".encode(),
            json.dumps({"n": n, **large(30)}).encode(),
            [("id", b"e-%d" % n)],
            0,
        )
        for n in range(1000)
    ]
    records[501] = records[501]._replace(value=json.dumps(large(4000)).encode())
    sink = TransactionalSink(settings, "fallback", None, lambda: True)
    try:
        assert set(sink.deliver(records, None, lambda: True)) == {501}
        del records[501]
        assert sink.deliver(records, None, lambda: True) == {}
    finally:
        sink.close(1.0)
    expected: dict[str, list[int]] = defaultdict(list)
    for n in range(1000):
        if n != 501:
            expected[f"k{n % 100}"].append(n)
    assert in_order(shop) == expected


def test_a_producer_given_up_over_small_portions_is_followed_by_one_of_small_batches(
    make: MakeShop, mysql: Database
) -> None:
    """Portions that wait for their acknowledgements one after the other may take longer than a
    transaction may, where brokers are far away. It began anew for ever; the owner's next producer
    makes batches that the topic takes and that need not be waited for."""
    shop = make(mysql)
    shop.create_topic(**{"max.message.bytes": "2000"})
    topic = shop.topic_prefix + "order"
    records = [
        Record(topic, b"k", json.dumps({"n": n, **large(150)}).encode(), [("id", b"%d" % n)], 1)
        for n in range(300)
    ]
    settings = load(environ=shop.environment())
    written = Written()
    sink = TransactionalSink(settings, "fallback", None, lambda: True, written)

    def late() -> bool:
        if sink._portions.limit:
            sink._give_up_at = 0.0
        return True

    real = sink._acknowledge

    def slowly(going_on: Callable[[], bool]) -> None:
        real(going_on)
        sink._look(late, "stopped")

    sink._acknowledge = slowly  # type: ignore[method-assign]
    with pytest.raises(FencedError, match="did not end its transaction within"):
        sink.deliver(records, None, lambda: True)
    sink.close(1.0)
    assert 500 < written.batch_bytes < 3000

    sink = TransactionalSink(settings, "fallback", None, lambda: True, written)
    sink._acknowledge = lambda _going_on: pytest.fail("waits")  # type: ignore[method-assign]
    assert sink.deliver(records, None, lambda: True) == {}
    sink.close(1.0)
    assert in_order(shop) == {"k": list(range(300))}


# --- the producer and its queue -------------------------------------------------------------------


@BOTH
def test_more_rows_than_the_producers_queue_holds(
    delivery: str, mysql: Database, make: MakeShop, quick_kafka: ProxiedKafka
) -> None:
    """Reading waits while the broker stands still; nothing is dropped, and a stop is heard."""
    shop = make(mysql, DELIVERY=delivery, KAFKA_QUEUE_BUFFERING_MAX_MESSAGES="100", STOP_GRACE="4s")
    shop.create_topic(partitions=4)
    relay = shop.relay()
    shop.ins("k0", {"n": -1})
    shop.wait_sent(1)
    quick_kafka.pause()
    try:
        for number in range(1000):
            shop.ins(f"k{number % 10}", {"n": number})
        time.sleep(1)
        pages = Path(f"/proc/{relay.pid}/statm").read_text().split()[1]
        assert int(pages) * os.sysconf("SC_PAGESIZE") < 200 * 1024 * 1024
        assert shop.count(0) == 1000
        assert relay.terminate() == 0, relay.text()
    finally:
        quick_kafka.resume()
    assert "Traceback" not in relay.text()
    relay = shop.relay()
    shop.wait_sent(1001, 60)
    assert relay.terminate() == 0
    found = in_order(shop)
    assert found.pop("k0") == [-1, *range(0, 1000, 10)]
    assert found == {f"k{n}": list(range(n, 1000, 10)) for n in range(1, 10)}
    assert "Traceback" not in relay.text()


@BOTH
def test_a_stop_waits_for_brokers_that_are_far_away(
    delivery: str, mysql: Database, make: MakeShop, quick_kafka: ProxiedKafka
) -> None:
    """What is on its way is acknowledged: nothing comes again, at least once either."""
    shop = make(mysql, DELIVERY=delivery, KAFKA_BOOTSTRAP=quick_kafka.proxied)
    shop.create_topic(partitions=3)
    relay = shop.relay()
    shop.until(shop.checkpoint)
    quick_kafka.proxy.delay = 0.04
    try:
        with Load(shop, [f"k{n}" for n in range(30)], pause=0.005):
            shop.wait_sent(100)
            assert relay.terminate() == 0, relay.text()
    finally:
        quick_kafka.proxy.delay = 0.0
    relay = shop.relay()
    shop.wait_all_sent()
    assert relay.terminate() == 0, relay.text()
    found = account(mysql, shop.table, "order", shop.messages())
    assert found.whole, found
    assert not found.duplicates, found


@BOTH
def test_a_producer_in_fatal_state_is_replaced(
    delivery: str, mysql: Database, make: MakeShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later send of it would succeed; the process goes on with a new one."""
    shop = make(mysql, DELIVERY=delivery)
    shop.create_topic()
    made: list[Any] = []
    name = "TransactionalSink" if delivery == "exactly_once" else "IdempotentSink"
    real = getattr(owner_module, name)

    def remembering(*arguments: Any) -> Any:
        made.append(real(*arguments))
        return made[-1]

    monkeypatch.setattr(owner_module, name, remembering)
    with in_process(shop) as owner:
        expected = []
        for term in range(1, 4):
            expected += [shop.ins("a", {"n": number}) for number in range(3)]
            shop.wait_sent(len(expected))
            assert len(made) == term
            fatal = KafkaError(KafkaError._FATAL, "injected", fatal=True)  # type: ignore[call-arg]
            made[-1]._on_error(fatal)
            shop.until(lambda before=term: len(made) > before)  # type: ignore[misc]
        expected.append(shop.ins("a", {"n": 9}))
        shop.wait_sent(len(expected))
        assert owner.counters.sent == len(expected)
    assert [message.event_id for message in shop.messages()] == expected


@contextmanager
def in_process(shop: Harness) -> Iterator[Owner]:
    """The owner of ``cdc-relay start``, in a thread of the test."""
    environment = {k: v for k, v in shop.environment().items() if k.startswith("CDC_RELAY_")}
    settings = load(environ=environment)
    pool = engine(settings)
    failures: list[BaseException] = []
    try:
        with connected(pool) as connection:
            shape = describe_table(connection, settings)
        store = Store(pool, shape)
        owner = Owner(
            settings,
            lambda: binlog_source(settings, shape, store),
            Router(settings.topic, shape.payload_kind),
            store,
        )

        def run() -> None:
            try:
                owner.run()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run, name="owner")
        thread.start()
        try:
            yield owner
        finally:
            owner.stop()
            thread.join(40)
            assert not thread.is_alive()
            if failures:
                raise failures[0]
    finally:
        pool.dispose()


def test_a_fenced_producer_ends_a_term_not_the_process(mysql: Database, make: MakeShop) -> None:
    shop = make(mysql)
    shop.create_topic(partitions=3)
    relay = shop.relay()
    # A shard has two producers that take turns.
    ids = [f"cdc-relay.{shop.name}.0", f"cdc-relay.{shop.name}.0.second"]
    with Load(shop, [f"k{n}" for n in range(9)], pause=0.01):
        for turn, transactional_id in enumerate(ids, 1):
            shop.wait_sent(shop.count(1) + 50)
            take_over(shop.kafka, transactional_id)
            shop.until(lambda before=turn: len(relay.logged("owning the shard")) > before)  # type: ignore[misc]
        shop.wait_sent(shop.count(1) + 50)
    shop.wait_all_sent()
    assert relay.terminate() == 0, relay.text()
    found = account(mysql, shop.table, "order", shop.messages())
    assert found.whole, found
    assert not found.duplicates, found


# --- brokers that come and go ---------------------------------------------------------------------


@BOTH
def test_a_broker_that_restarts_during_inserts(
    delivery: str, mysql: Database, make: MakeShop, quick_kafka: ProxiedKafka
) -> None:
    shop = make(mysql, DELIVERY=delivery)
    shop.create_topic(partitions=6)
    relay = shop.relay()
    shop.until(shop.checkpoint)
    keys = [f"k{number}" for number in range(20)]
    with Load(shop, keys, threads=2, each=1250) as load:
        shop.wait_sent(300)
        quick_kafka.kill()
        quick_kafka.start()
        shop.wait_sent(shop.count(1) + 300)
        quick_kafka.stop()
        quick_kafka.start()
        load.wait()
    shop.wait_all_sent(60)
    assert relay.running
    assert relay.terminate() == 0, relay.text()
    messages = shop.messages()
    found = account(mysql, shop.table, "order", messages)
    assert found.whole, found
    assert found.committed > 3000, found
    if delivery == "exactly_once":
        assert not found.duplicates, (found, repeated(messages), relay.text())
    [(tried,)] = mysql.sql(f"SELECT COUNT(*) FROM {shop.table} WHERE retry_count > 0")
    assert tried == 0


@BOTH
def test_answers_that_never_come_and_connections_that_drop(
    delivery: str, mysql: Database, make: MakeShop, quick_kafka: ProxiedKafka
) -> None:
    """What the broker has taken is reported as failed: it comes again at most where that is
    allowed, with the same id, and never ahead of an earlier event of its key."""
    shop = make(mysql, DELIVERY=delivery, KAFKA_BOOTSTRAP=quick_kafka.proxied)
    shop.create_topic()
    relay = shop.relay()
    shop.until(shop.checkpoint)
    proxy = quick_kafka.proxy
    with Load(shop, ["one"], threads=1, pause=0.005):
        for number in range(6):
            shop.wait_sent(shop.count(1) + 40)
            if number % 2:
                proxy.lose_answers()
                time.sleep(0.5)
            proxy.cut()
            time.sleep(0.2)
            proxy.mend()
        shop.wait_sent(1000)
    shop.wait_all_sent(60)
    assert relay.terminate() == 0, relay.text()
    found = account(mysql, shop.table, "order", shop.messages())
    assert found.whole, found
    assert found.committed >= 1000, found
    assert delivery == "at_least_once" or not found.duplicates, found
    assert shop.count(1) == found.committed


@BOTH
def test_a_network_that_goes_dumb_for_longer_than_a_transaction(
    delivery: str, mysql: Database, make: MakeShop, quick_kafka: ProxiedKafka
) -> None:
    shop = make(
        mysql, DELIVERY=delivery, KAFKA_BOOTSTRAP=quick_kafka.proxied, TRANSACTION_TIMEOUT="2s"
    )
    shop.create_topic(partitions=3)
    relay = shop.relay()
    shop.until(shop.checkpoint)
    with Load(shop, [f"k{n}" for n in range(5)], threads=2, pause=0.01):
        shop.wait_sent(50)
        quick_kafka.proxy.swallow()
        time.sleep(4)
        quick_kafka.proxy.restore()
        shop.wait_sent(shop.count(1) + 50, 60)
    shop.wait_all_sent(60)
    assert relay.terminate() == 0, relay.text()
    found = account(mysql, shop.table, "order", shop.messages())
    assert found.whole, found
    assert delivery == "at_least_once" or not found.duplicates, found


@pytest.fixture(scope="module")
def three_brokers(servers_home: Path) -> Iterator[Kafka]:
    """Three brokers; topics have three replicas, of which two must be in sync."""
    with QuickKafka(servers_home / "three-brokers", 3, die_with_parent=True) as cluster:
        yield cluster


@BOTH
def test_a_leader_that_dies_and_a_topic_short_of_replicas(
    delivery: str, mysql: Database, make: MakeShop, three_brokers: Kafka
) -> None:
    shop = make(mysql, three_brokers.bootstrap, DELIVERY=delivery)
    shop.create_topic("order", 3, **{"min.insync.replicas": "2"})
    shop.create_topic("strict", 1, **{"min.insync.replicas": "3"})
    relay = shop.relay()
    shop.until(shop.checkpoint)
    keys = [f"k{number}" for number in range(20)]
    with Load(shop, keys, threads=2, pause=0.01):
        shop.wait_sent(50)
        admin = AdminClient({"bootstrap.servers": shop.kafka})
        topics = admin.list_topics(shop.topic_prefix + "order", timeout=15).topics
        leader = topics[shop.topic_prefix + "order"].partitions[0].leader
        # Not the first of the list: fewer reconnects of the test's own clients.
        broker = three_brokers.brokers[leader - 1]
        broker.kill()
        shop.wait_sent(shop.count(1) + 50, 60)
        # Every replica is asked for, and one is away: waited for, and nobody's fault.
        strict = [shop.ins("s", {"n": number}, kind="strict") for number in range(3)]
        time.sleep(2)
        assert [state(shop, event_id)[1] for event_id in strict] == [0, 0, 0]
        broker.start()
        broker.wait_ready()
    shop.wait_all_sent(90)
    assert relay.terminate() == 0, relay.text()
    found = account(mysql, shop.table, "order", shop.messages())
    assert found.whole, found
    assert delivery == "at_least_once" or not found.duplicates, found
    assert in_order(shop, "strict") == {"s": [0, 1, 2]}
    [(tried,)] = mysql.sql(f"SELECT COUNT(*) FROM {shop.table} WHERE retry_count > 0")
    assert tried == 0


# --- topics and partitions ------------------------------------------------------------------------


@BOTH
def test_a_topic_that_is_created_later(delivery: str, mysql: Database, make: MakeShop) -> None:
    """Its rows wait, in order, and all others flow; no restart."""
    shop = make(mysql, DELIVERY=delivery)
    shop.create_topic()
    relay = shop.relay()
    for number in range(12):
        shop.ins(f"l{number % 3}", {"n": number}, kind="late")
        shop.ins("k", {"n": number})
    shop.wait_sent(12, kind="order")
    assert shop.count(0, "late") == 12
    shop.until(lambda: relay.logged("row parked; its aggregate waits"))
    time.sleep(2.5)
    shop.create_topic("late", 2)
    shop.ins("l0", {"n": 12}, kind="late")
    shop.wait_sent(13, kind="late")
    shop.until(lambda: relay.logged("aggregate flows again"))
    shop.ins("l0", {"n": 13}, kind="late")
    shop.ins("l1", {"n": 13}, kind="late")
    shop.wait_all_sent()
    assert relay.terminate() == 0, relay.text()
    assert len(shop.messages("late")) == 15
    assert in_order(shop, "late") == {
        "l0": [0, 3, 6, 9, 12, 13],
        "l1": [1, 4, 7, 10, 13],
        "l2": [2, 5, 8, 11],
    }
    assert in_order(shop) == {"k": list(range(12))}
    last = shop.checkpoint()
    assert last is not None
    assert not last.closed


def test_one_bad_row_of_a_topic_that_came_late_holds_up_only_its_aggregate(
    mysql: Database, make: MakeShop
) -> None:
    shop = make(mysql)
    relay = shop.relay()
    shop.ins("good", {"n": 0}, kind="late")
    bad = shop.ins("bad", {"n": 0, **large(3000)}, kind="late")
    for number in range(20):  # more than half as large: they go alone
        shop.ins(f"large-{number % 10}", {"n": number, "text": "x" * 7000}, kind="late")
    shop.until(lambda: relay.logged("row parked; its aggregate waits"))
    shop.create_topic("late", 1, **{"max.message.bytes": "2000"})
    shop.ins("bad", {"n": 1}, kind="late")
    shop.wait_sent(21, kind="late")
    shop.until(lambda: state(shop, bad)[1] >= 1)
    shop.ins("good", {"n": 1}, kind="late")
    shop.ins("new", {"n": 1}, kind="late")
    shop.wait_sent(23, kind="late")
    set_limit(shop, "late", 100_000)
    due_now(shop)
    shop.wait_all_sent()
    assert relay.terminate() == 0, relay.text()
    found = in_order(shop, "late")
    assert {found.pop(f"large-{number}") == [number, number + 10] for number in range(10)} == {True}
    assert found == {"good": [0, 1], "new": [1], "bad": [0, 1]}
    assert len(shop.messages("late")) == 25


def test_names_that_are_no_topics_block_nobody_and_are_never_merged(
    mysql: Database, make: MakeShop
) -> None:
    shop = make(mysql)
    shop.create_topic()
    relay = shop.relay()
    kinds = ["Dont care/Ü"] * 10 + ["foo@bar", "foo$bar"]
    bad = [shop.ins(f"b{n}", {"n": n}, kind=kind) for n, kind in enumerate(kinds)]
    bad.append(shop.ins("", {"n": 0}))  # a record without a key has no order
    for number in range(5):
        shop.ins("good", {"n": number})
    shop.wait_sent(5)
    shop.until(lambda: all(state(shop, event_id)[1] for event_id in bad))
    for event_id in bad:
        found, _, reason = state(shop, event_id)
        assert found == 0
        assert re.search("topic name|aggregate_id is empty", reason or ""), reason
    assert relay.terminate() == 0
    assert in_order(shop) == {"good": [0, 1, 2, 3, 4]}
    assert shop.topics() == {"order"}


def test_keys_go_where_kafkas_own_producer_sends_them(mysql: Database, make: MakeShop) -> None:
    shop = make(mysql)
    keys = [f"order-{number}" for number in range(1, 51)] + ["Schlüssel-ü", "😥"]
    for kind in ("order", "java"):
        shop.create_topic(kind, 12)
    relay = shop.relay()
    for key in keys:
        shop.ins(key, {"n": 1})
    lines = "".join(f"{key}|{{}}\n" for key in keys).encode()
    console_producer(shop.kafka, shop.topic_prefix + "java", lines)
    shop.wait_sent(len(keys))
    assert relay.terminate() == 0
    # The console producer writes no headers: only keys and places are compared.
    theirs = dict(places(shop, "java"))
    ours = dict(places(shop, "order"))
    assert len(set(theirs.values())) > 6
    assert ours == theirs


def places(shop: Harness, kind: str) -> list[tuple[str, int]]:
    return [(message.key, message.partition) for message in shop.messages(kind)]


# --- what a record carries ------------------------------------------------------------------------


def test_header_values_of_every_kind_are_the_same_on_both_ways(
    mysql: Database, make: MakeShop
) -> None:
    shop = make(mysql)
    shop.create_topic()
    kinds = {"trace": None, "retry": 3, "ok": True, "n": {"a": 1}, "ключ": "é", "f": 1.50}
    expected = {
        "trace": None,
        "retry": b"3",
        "ok": b"true",
        "n": b'{"a": 1}',
        "ключ": "é".encode(),
        "f": b"1.5",
    }
    relay = shop.relay()
    events = [shop.ins("a", {"n": 0}, headers=kinds), shop.ins("b", {"n": 0})]
    wrong = shop.ins("c", {"n": 0}, headers=[1, 2])
    shop.wait_sent(2)
    shop.until(lambda: state(shop, wrong)[1] >= 1)
    assert "not an object" in (state(shop, wrong)[2] or "")
    assert relay.terminate() == 0
    mysql.sql(f"UPDATE {shop.table} SET status = 0 WHERE status = 1")
    assert shop.compensate()["sent"] == 2
    messages = sorted(shop.messages(), key=lambda message: message.offset)
    assert [message.event_id for message in messages] == events * 2
    for message in messages[::2]:
        assert {name: message.headers[name] for name in kinds} == expected
    assert [message._replace(offset=0) for message in messages[:2]] == [
        message._replace(offset=0) for message in messages[2:]
    ]


# --- the checkpoint topic -------------------------------------------------------------------------


def test_the_checkpoint_topic_is_compacted_where_brokers_create_topics(
    mysql: Database, make: MakeShop, kafka: str
) -> None:
    shop = make(mysql, kafka, SESSION_TIMEOUT="6s")
    relay = shop.relay()
    shop.until(shop.checkpoint)
    resource = ConfigResource("topic", f"cdc-relay.{shop.name}.checkpoints")
    admin = AdminClient({"bootstrap.servers": kafka})
    found = admin.describe_configs([resource])[resource].result(timeout=20)
    assert found["cleanup.policy"].value == "compact"
    assert len(admin.list_topics(timeout=15).topics[resource.name].partitions) == 1
    assert relay.terminate() == 0


def test_a_checkpoint_topic_that_forgets_is_warned_of(mysql: Database, make: MakeShop) -> None:
    shop = make(mysql)
    create_topic(shop.kafka, f"cdc-relay.{shop.name}.checkpoints", 1)
    relay = shop.relay()
    [warning] = relay.logged(
        "the checkpoint topic is not compacted: after its retention time the checkpoint of an "
        "idle relay is gone, and the relay anchors anew"
    )
    assert warning["cleanup_policy"] == "delete"
    assert relay.terminate() == 0


def delete_topic(shop: Harness, topic: str) -> None:
    """Delete a topic and wait until it is gone."""
    admin = AdminClient({"bootstrap.servers": shop.kafka})
    admin.delete_topics([topic], operation_timeout=15)[topic].result(timeout=20)
    shop.until(lambda: topic not in admin.list_topics(timeout=15).topics)


def test_a_checkpoint_topic_that_is_deleted_under_the_relay(
    mysql: Database, make: MakeShop
) -> None:
    """It is made anew, and the relay anchors anew: nothing waits for a restart."""
    shop = make(mysql)
    shop.create_topic()
    relay = shop.relay()
    topic = f"cdc-relay.{shop.name}.checkpoints"
    shop.ins("a", {"n": 0})
    shop.wait_sent(1)
    delete_topic(shop, topic)
    for number in range(1, 4):
        shop.ins("a", {"n": number})
    shop.wait_sent(4)
    assert relay.running
    assert in_order(shop) == {"a": [0, 1, 2, 3]}
    assert len(shop.messages()) == 4
    shop.until(shop.checkpoint)
    resource = ConfigResource("topic", topic)
    admin = AdminClient({"bootstrap.servers": shop.kafka})
    found = admin.describe_configs([resource])[resource].result(timeout=20)
    assert found["cleanup.policy"].value == "compact"
    assert relay.terminate() == 0


def test_a_checkpoint_topic_that_is_deleted_and_no_marks(mysql: Database, make: MakeShop) -> None:
    """Nothing tells then what was sent: the relay says so instead of passing rows over."""
    shop = make(mysql, MARK="none")
    shop.create_topic()
    relay = shop.relay()
    shop.ins("a", {"n": 0})
    shop.until(lambda: len(shop.messages()) == 1)
    delete_topic(shop, f"cdc-relay.{shop.name}.checkpoints")
    shop.ins("a", {"n": 1})
    assert relay.wait(60) == 5
    assert "the checkpoint is gone: its topic was deleted" in relay.text()


def test_a_broker_that_starts_has_not_lost_the_checkpoint(
    mysql: Database, make: MakeShop, quick_kafka: ProxiedKafka
) -> None:
    """Clients take partitions for unknown in the first moments. A checkpoint that seems not to be
    there would mean a first start: an anchor, and a sweep that knows of nothing that was sent."""
    shop = make(mysql)
    shop.create_topic()
    relay = shop.relay()
    shop.ins("a", {"n": 0})
    shop.wait_sent(1)
    assert relay.terminate() == 0
    settings = load(environ={}, flags={"kafka_bootstrap": shop.kafka, "name": shop.name})
    found: list[object] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            with suppress(SinkUnavailableError):
                found.append(read_last(settings, timeout=5.0))

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for end in (quick_kafka.kill, quick_kafka.stop) * 2:
            end()
            quick_kafka.start()
            before = len(found)
            shop.until(lambda before=before: len(found) > before + 5)  # type: ignore[misc]
    finally:
        done.set()
        for thread in threads:
            thread.join(30)
    assert None not in found


@BOTH
def test_an_open_transaction_hides_no_checkpoint(
    delivery: str, mysql: Database, make: MakeShop
) -> None:
    """Who reads what is committed sees nothing behind the begin of a transaction that is open: the
    last checkpoint that it sees is an old one, and what came after it would be sent again."""
    shop = make(mysql, DELIVERY=delivery)
    shop.create_topic()
    relay = shop.relay()
    expected = [shop.ins("a", {"n": 0})]
    shop.wait_sent(1)
    other = Producer({"bootstrap.servers": shop.kafka, "transactional.id": f"{shop.name}.other"})
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(topic_name(shop.name), b"", b"foreign", 0)
    assert other.flush(30) == 0
    expected += [shop.ins("a", {"n": number}) for number in range(1, 6)]
    shop.wait_sent(6)
    relay.kill()
    second = shop.spawn("start")
    shop.until(lambda: "a transaction is open since offset" in second.text())
    other.abort_transaction(30)
    expected.append(shop.ins("a", {"n": 6}))
    shop.wait_sent(7)
    assert second.terminate() == 0, second.text()
    assert [message.event_id for message in shop.messages()] == expected


def test_the_checkpoint_of_a_busy_relay_can_be_read(mysql: Database, make: MakeShop) -> None:
    shop = make(mysql)
    shop.create_topic()
    relay = shop.relay()
    with Load(shop, ["a", "b"], threads=2, pause=0.002):
        shop.wait_sent(50)
        for _ in range(5):
            assert shop.checkpoint() is not None
        assert status(shop)["checkpoint"]["age_s"] < 60
    assert relay.terminate() == 0


# --- parked rows ----------------------------------------------------------------------------------


@BOTH
def test_a_parked_row_climbs_the_ladder_across_restarts(
    delivery: str, mysql: Database, make: MakeShop
) -> None:
    """Its aggregate waits in order; it goes out when the topic takes larger records."""
    shop = make(mysql, DELIVERY=delivery)
    shop.create_topic("order", 2, **{"max.message.bytes": "2000"})
    relay = shop.relay()
    shop.ins("a", {"n": 0})
    bad = shop.ins("a", {"n": 1, **large(3000)})
    shop.ins("a", {"n": 2})
    shop.ins("b", {"n": 0})
    shop.wait_sent(2)
    # One second later it is tried once more, five seconds later again.
    shop.until(lambda: state(shop, bad)[1] == 2)
    relay.kill()
    relay = shop.relay()
    shop.ins("a", {"n": 3})
    shop.ins("b", {"n": 1})
    shop.wait_sent(3)
    shop.until(lambda: state(shop, bad)[1] == 3)
    assert in_order(shop) == {"a": [0], "b": [0, 1]}
    assert status(shop)["checkpoint"]["closed_aggregates"] == 1
    assert relay.terminate() == 0

    relay = shop.relay()
    set_limit(shop, "order", 100_000)
    due_now(shop)
    shop.wait_all_sent()
    shop.until(lambda: relay.logged("aggregate flows again"))
    shop.ins("a", {"n": 4})
    shop.wait_all_sent()
    assert relay.terminate() == 0, relay.text()
    assert in_order(shop) == {"a": [0, 1, 2, 3, 4], "b": [0, 1]}
    if delivery == "exactly_once":
        assert len(shop.messages()) == 7
    assert status(shop)["checkpoint"]["closed_aggregates"] == 0


@pytest.mark.parametrize("on_dead", ["block", "release"])
def test_a_row_that_is_refused_once_too_often_is_dead(
    on_dead: str, mysql: Database, make: MakeShop
) -> None:
    shop = make(mysql, ON_DEAD=on_dead, MAX_TRIES="1")
    shop.create_topic("order", 1, **{"max.message.bytes": "2000"})
    relay = shop.relay()
    bad = shop.ins("a", {"n": 1, **large(3000)})
    shop.ins("a", {"n": 2})
    shop.ins("b", {"n": 1})
    shop.until(lambda: state(shop, bad)[0] == 2)
    assert state(shop, bad)[1] == 2
    shop.until(lambda: relay.logged("row is dead"))
    [dead] = relay.logged("row is dead")
    assert (dead["event_id"], dead["aggregate_id"]) == (bad, "a")
    if on_dead == "release":
        shop.wait_sent(2)
        shop.ins("a", {"n": 3})
        shop.wait_sent(3)
        assert in_order(shop) == {"a": [2, 3], "b": [1]}
        assert relay.terminate() == 0
        return
    shop.wait_sent(1)
    # Blocked, also after a restart, until somebody decides.
    assert relay.terminate() == 0
    relay = shop.relay()
    shop.ins("a", {"n": 3})
    shop.ins("b", {"n": 2})
    shop.wait_sent(2)
    assert in_order(shop) == {"b": [1, 2]}
    assert shop.run("dead", "discard", bad, "--yes").wait() == 0
    shop.wait_all_sent()
    assert relay.terminate() == 0
    assert in_order(shop) == {"a": [2, 3], "b": [1, 2]}


@BOTH
def test_what_stands_before_a_dead_row_in_its_transaction_is_sent(
    delivery: str, mysql: Database, make: MakeShop
) -> None:
    """Brokers refuse a transaction as a whole. What stands before the rows that are at fault once
    waited with them, and was blocked with them for ever. One is refused by the brokers, one has
    headers that no record can carry."""
    shop = make(mysql, DELIVERY=delivery, MAX_TRIES="1")
    shop.create_topic("order", 1, **{"max.message.bytes": "2000"})
    relay = shop.relay()
    rows = []
    for number in range(5):
        for key in ("a", "b", "c"):
            bad = {("a", 2), ("a", 3), ("b", 3)}
            payload = {"n": number, **(large(3000) if (key, number) in bad else {})}
            headers = {"a\0b": "c"} if (key, number) == ("c", 4) else None
            rows.append(row(key, payload, headers=headers))
    mysql.sql(*insert(shop.table, rows))
    shop.wait_sent(9)
    shop.until(lambda: shop.count(2) == 3)
    assert in_order(shop) == {"a": [0, 1], "b": [0, 1, 2], "c": [0, 1, 2, 3]}
    assert shop.count(0) == 3
    assert relay.terminate() == 0, relay.text()


@pytest.mark.parametrize("step", ["parking:1", "retrying:1", "retried:1", "committing:2"])
def test_killed_around_a_parked_row(step: str, mysql: Database, make: MakeShop) -> None:
    """Whenever the relay dies, the aggregate's rows stay in order and none comes twice."""
    shop = make(mysql)
    shop.create_topic("order", 1, **{"max.message.bytes": "2000"})
    relay = shop.relay()
    shop.until(shop.checkpoint)
    relay.kill()
    for number in range(5):
        shop.ins("a", {"n": number, **(large(3000) if number == 1 else {})})
        shop.ins("b", {"n": number})
    relay = shop.spawn("start", TEST_FAULT=step)
    if step.startswith("retr"):
        shop.until(lambda: relay.logged("row parked; its aggregate waits"))
        set_limit(shop, "order", 100_000)
    shop.until(lambda: not relay.running, 40)
    assert relay.wait() == -9, relay.text()
    relay = shop.relay()
    shop.wait_sent(6)
    set_limit(shop, "order", 100_000)
    due_now(shop)
    shop.ins("a", {"n": 5})
    shop.wait_all_sent()
    assert relay.terminate() == 0, relay.text()
    assert in_order(shop) == {"a": list(range(6)), "b": list(range(5))}
    assert len(shop.messages()) == 11


@BOTH
def test_many_rows_that_are_too_large_hold_up_nobody(
    delivery: str, mysql: Database, make: MakeShop
) -> None:
    """The first one tells: the others go alone, and their time comes after that of what flows."""
    shop = make(mysql, DELIVERY=delivery)
    shop.create_topic("order", 1, **{"max.message.bytes": "2000"})
    bad = [row(f"bad-{n}", {"n": n, **large(3000)}) for n in range(60)]
    good = [row(f"good-{n}", {"n": n}) for n in range(50)]
    shop.database.sql(*insert(shop.table, bad + good))
    relay = shop.relay()
    shop.wait_sent(50)
    [(tried,)] = mysql.sql(f"SELECT COUNT(*) FROM {shop.table} WHERE retry_count > 0")
    assert delivery == "at_least_once" or tried < 40, tried  # it judges all of them at once
    shop.ins("bad-7", {"n": 8})
    shop.until(
        lambda: mysql.sql(f"SELECT COUNT(*) FROM {shop.table} WHERE retry_count > 0") == ((60,),)
    )
    shop.ins("good-7", {"n": 8})
    shop.wait_sent(51)
    set_limit(shop, "order", 100_000)
    due_now(shop)
    shop.wait_all_sent()
    assert relay.terminate() == 0, relay.text()
    found = in_order(shop)
    assert (found["bad-7"], found["good-7"]) == ([7, 8], [7, 8])
    assert len(found) == 110
    assert len(shop.messages()) == 112


def test_a_table_that_is_truncated_under_rows_that_wait(mysql: Database, make: MakeShop) -> None:
    """What somebody takes out of the table before it is sent is not sent, which is said; and what
    comes to the table then overtakes nothing."""
    shop = make(mysql)
    shop.create_topic("order", 1, **{"max.message.bytes": "2000"})
    relay = shop.relay()
    shop.until(shop.checkpoint)
    for number in range(1, 4):
        shop.ins("a", {"n": number, **(large(3000) if number == 1 else {})})
    shop.until(lambda: relay.logged("row parked; its aggregate waits"))
    shop.until(lambda: closed(shop))
    relay.kill()
    for number in range(4, 8):
        shop.ins("a", {"n": number})
    # While it was away, a row is refused that is not there any more; nothing waits for it.
    for number in range(1, 4):
        shop.ins("b", {"n": number, **(large(3000) if number == 1 else {})})
    shop.database.sql(f"TRUNCATE {shop.table}")
    for number in range(11, 16):
        shop.ins("a", {"n": number})
        shop.ins("b", {"n": number})
    relay = shop.relay()
    shop.wait_all_sent()
    assert relay.terminate() == 0, relay.text()
    assert in_order(shop) == {"a": list(range(11, 16)), "b": [2, 3, *range(11, 16)]}
    assert len(shop.messages()) == 12
    [waited] = relay.logged(
        "rows that waited behind a refused one are gone from the table: such as were not sent "
        "before are not sent"
    )
    assert (waited["aggregate_id"], waited["rows"]) == ("a", 4)
    [refused] = relay.logged("a row that was refused is gone from the table: it is not sent")
    assert refused["aggregate_id"] == "b"


# --- another reader of the same binlog ------------------------------------------------------------


@pytest.mark.parametrize(
    ("mark", "image"),
    [("update", "server"), ("update", "minimal"), ("delete", "server"), ("none", "server")],
)
def test_marks_and_another_reader(mark: str, image: str, mysql: Database, make: MakeShop) -> None:
    """A stock reader goes through everything that the relay writes; whole rows by default."""
    shop = make(mysql, MARK=mark, MARK_ROW_IMAGE=image)
    shop.create_topic()
    relay = shop.relay()
    file, start = mysql.sql("SHOW BINARY LOG STATUS")[0][:2]
    events = [shop.ins(f"k{n}", {"n": n, "text": "x" * 500}) for n in range(20)]
    if mark == "none":
        shop.until(lambda: len(shop.messages()) == 20)
        time.sleep(0.5)
        assert shop.count(0) == 20
    elif mark == "delete":
        shop.until(lambda: not mysql.sql(f"SELECT 1 FROM {shop.table}"))
    else:
        shop.wait_sent(20)
    assert relay.terminate() == 0
    assert [message.event_id for message in sorted(shop.messages(), key=lambda m: m.offset)] == (
        events
    )

    writes, updates = stock_reading(mysql, file, start)
    assert len(writes) == 20
    assert len(updates) == (20 if mark == "update" else 0)
    sizes = update_sizes(mysql, shop.table, file, start)
    if mark == "update" and image == "server":
        assert all(len(row["after_values"]) == 14 for row in updates)
        assert all(b"x" * 500 in repr(row["after_values"]).encode() for row in updates)
        assert sum(sizes) > 20 * 1000
    elif mark == "update":
        assert 0 < sum(sizes) < 20 * 200

    # Nothing comes twice, whatever the table says.
    relay = shop.relay()
    last = shop.ins("k0", {"n": 20})
    shop.until(lambda: len(shop.messages()) > 20)
    assert relay.terminate() == 0
    assert {message.event_id for message in shop.messages()} == {*events, last}
    assert len(shop.messages()) == 21


def update_sizes(database: Database, table: str, file: str, start: int) -> list[int]:
    """Bytes of the events that update ``table``; other tests write into the same log."""
    ids: set[str] = set()
    sizes: list[int] = []
    for _, begin, kind, _, end, info in database.sql(
        f"SHOW BINLOG EVENTS IN '{file}' FROM {start}"
    ):
        table_id = str(info).removeprefix("table_id: ").split()[0] if info else ""
        if kind == "Table_map" and f"({database.url.database}.{table})" in str(info):
            ids.add(table_id)
        elif kind == "Update_rows" and table_id in ids:
            sizes.append(end - begin)
    return sizes


def stock_reading(database: Database, file: str, start: int) -> tuple[list[Any], list[Any]]:
    """The rows that the stock library reads in our table: inserts, and updates."""
    reader = BinLogStreamReader(
        {
            "host": database.url.host,
            "port": database.url.port,
            "user": database.url.username,
            "password": database.url.password or "",
        },
        server_id=3_999_999_999,
        log_file=file,
        log_pos=start,
        resume_stream=True,
        only_events=[WriteRowsEvent, UpdateRowsEvent],
        only_schemas=[database.name],
    )
    writes: list[Any] = []
    updates: list[Any] = []
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # its own
        for event in reader:
            (updates if isinstance(event, UpdateRowsEvent) else writes).extend(event.rows)
        reader.close()
    return writes, updates


# --- a position that is lost ----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["purged", "reset", "reset and as far again"])
def test_a_lost_position_is_said_and_costs_nothing(
    how: str, own_mysql: MySQL, make: MakeShop
) -> None:
    with Database.create(own_mysql.url()) as database:
        shop = make(database)
        shop.create_topic(partitions=2)
        relay = shop.relay()
        for number in range(5):
            shop.ins("a", {"n": number})
        shop.wait_sent(5)
        assert relay.terminate() == 0
        for number in range(5, 8):
            shop.ins("a", {"n": number})
        if how == "purged":
            database.sql("FLUSH BINARY LOGS")
            purge_logs(database)
        else:
            database.sql("RESET BINARY LOGS AND GTIDS")
        if how == "reset and as far again":
            # The same server says that it has executed all that the checkpoint names.
            last = shop.checkpoint()
            assert last is not None
            count = int(str(last.position.gtids).rpartition("-")[2])
            database.sql("CREATE TABLE filler (id INT)")
            with database.connect(autocommit=True) as connection, connection.cursor() as cursor:
                for _ in range(count):
                    cursor.execute("INSERT INTO filler VALUES (1)")
        shop.ins("a", {"n": 8})
        relay = shop.relay()
        shop.wait_all_sent()
        shop.ins("a", {"n": 9})
        shop.wait_all_sent()
        assert in_order(shop) == {"a": list(range(10))}
        assert len(shop.messages()) == 10
        [said] = relay.logged("anchored at the end of the log")
        assert said["sweeping"] is True
        found = status(shop)["checkpoint"]
        assert found["anchor"] == said["reason"]
        assert found["sweeping"] is False
        assert relay.terminate() == 0


def test_binary_logs_reset_under_the_relay(own_mysql: MySQL, make: MakeShop) -> None:
    with Database.create(own_mysql.url()) as database:
        shop = make(database)
        shop.create_topic(partitions=2)
        relay = shop.relay()
        shop.ins("a", {"n": 0})
        shop.wait_sent(1)
        database.sql("RESET BINARY LOGS AND GTIDS")
        for number in range(1, 4):
            shop.ins("a", {"n": number})
        shop.wait_all_sent()
        assert relay.running
        assert relay.terminate() == 0
        assert in_order(shop) == {"a": [0, 1, 2, 3]}
        assert len(shop.messages()) == 4
