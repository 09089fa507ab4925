"""``mark = "none"``: the table does not tell what is sent, and a refused row still waits, in order,
with what stands behind it, over restarts; nothing is sent twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.harness import Harness, Process, alter_topic
from tests.support.sql import Database, insert, row

SMALL = 20_000
Make = Callable[..., Harness]


def large() -> dict[str, str]:
    return {"x": random.Random(1).randbytes(2 * SMALL).hex()}


def due(shop: Harness) -> None:
    """Let the next try be now."""
    shop.database.sql(
        f"UPDATE {shop.table} SET next_retry_time = UTC_TIMESTAMP(6)"
        " WHERE status = 0 AND next_retry_time IS NOT NULL"
    )


def seen(shop: Harness, kind: str = "order") -> list[tuple[str, Any]]:
    return [(message.key, message.json.get("n", "large")) for message in shop.messages(kind)]


def waiting(shop: Harness) -> list[tuple[str, str | None, int]]:
    """How many rows wait, by the checkpoint."""
    last = shop.checkpoint()
    return [(kind, key, len(ids)) for kind, key, ids in last.held] if last is not None else []


def of(key: str, events: list[tuple[str, Any]]) -> list[Any]:
    return [number for name, number in events if name == key]


def kill(shop: Harness, relay: Process) -> Process:
    relay.kill()
    return shop.relay()


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_what_waits_is_sent_once_and_in_order(
    delivery: str, mysql: Database, harness: Make
) -> None:
    shop = harness(mysql, MARK="none", DELIVERY=delivery, SESSION_TIMEOUT="6s")
    shop.create_topic(**{"max.message.bytes": str(SMALL)})
    relay = shop.relay()
    shop.until(shop.checkpoint)
    for number in range(3):
        shop.ins("a", {"n": number})
    shop.ins("a", large())
    shop.until(lambda: "row parked" in relay.text())
    for number in range(3, 6):
        shop.ins("a", {"n": number})
        shop.ins("b", {"n": number})
    shop.until(lambda: of("b", seen(shop)) == [3, 4, 5])
    shop.until(lambda: relay.logged("row parked; its aggregate waits")[1:])  # tried again
    shop.until(lambda: waiting(shop) == [("order", "a", 4)])
    relay = kill(shop, relay)
    shop.ins("a", {"n": 6})
    shop.until(lambda: waiting(shop) == [("order", "a", 5)])
    assert of("a", seen(shop)) == [0, 1, 2]

    alter_topic(shop.kafka, shop.topic_prefix + "order", {"max.message.bytes": "1000000"})
    due(shop)
    shop.until(lambda: relay.logged("aggregate flows again"), 60)
    shop.ins("a", {"n": 7})
    shop.until(lambda: of("a", seen(shop))[-1] == 7)
    assert relay.terminate() == 0, relay.text()
    assert of("a", seen(shop)) == [0, 1, 2, "large", 3, 4, 5, 6, 7]
    assert of("b", seen(shop)) == [3, 4, 5]
    last = shop.checkpoint()
    assert last is not None
    assert not last.closed
    assert not last.held


def test_a_topic_that_is_created_later(mysql: Database, quick_kafka: Any, tmp_path: Any) -> None:
    with Harness(mysql, quick_kafka.bootstrap, tmp_path, {"MARK": "none"}) as shop:
        shop.create_topic("other")
        relay = shop.relay()
        shop.until(shop.checkpoint)
        for number in range(4):
            shop.ins(f"k{number % 2}", {"n": number})
            shop.ins("a", {"n": number}, kind="other")
        shop.until(lambda: len(shop.messages("other")) == 4)
        relay = kill(shop, relay)
        shop.ins("k0", {"n": 4})
        shop.create_topic("order", 3)
        shop.until(lambda: relay.logged("aggregate flows again"), 60)
        shop.ins("k1", {"n": 5})
        shop.until(lambda: len(shop.messages()) == 6)
        assert relay.terminate() == 0, relay.text()
        assert of("k0", seen(shop)) == [0, 2, 4]
        assert of("k1", seen(shop)) == [1, 3, 5]
        assert len(shop.messages("other")) == 4


@pytest.mark.parametrize("on_dead", ["block", "release"])
def test_dead_rows(on_dead: str, mysql: Database, harness: Make) -> None:
    shop = harness(mysql, MARK="none", MAX_TRIES="1", ON_DEAD=on_dead)
    shop.create_topic(**{"max.message.bytes": str(SMALL)})
    relay = shop.relay()
    shop.until(shop.checkpoint)
    shop.ins("a", {"n": 0})
    shop.ins("a", large())
    shop.ins("a", {"n": 1})
    shop.until(lambda: shop.count(2) == 1)
    if on_dead == "block":
        shop.ins("a", {"n": 2})
        shop.until(lambda: waiting(shop) == [("order", "a", 3)])
        assert seen(shop) == [("a", 0)]
        alter_topic(shop.kafka, shop.topic_prefix + "order", {"max.message.bytes": "1000000"})
        assert shop.run("dead", "retry", "--all").wait() == 0
        shop.until(lambda: len(seen(shop)) == 4)
        assert of("a", seen(shop)) == [0, "large", 1, 2]
    else:
        shop.until(lambda: len(seen(shop)) == 2)
        shop.ins("a", {"n": 2})
        shop.until(lambda: len(seen(shop)) == 3)
        assert of("a", seen(shop)) == [0, 1, 2]
    assert relay.terminate() == 0, relay.text()


def test_more_than_a_checkpoint_takes_is_not_held(mysql: Database, harness: Make) -> None:
    """The ids of what waits stand in every checkpoint, which Kafka takes up to a megabyte: the
    relay reads no further, and goes on when the refused row is mended."""
    shop = harness(mysql, MARK="none")
    shop.create_topic(**{"max.message.bytes": str(SMALL)})
    relay = shop.relay()
    shop.until(shop.checkpoint)
    shop.ins("a", large(), event_id="large")
    for start in range(0, 25_000, 500):
        made = [row(key, {"n": n}) for n in range(start, start + 500) for key in "ab"]
        shop.database.sql(*insert(shop.table, made))
    shop.ins("c", {"n": 0})
    shop.until(lambda: "reads no further" in relay.text())
    shop.until(lambda: sum(count for _, _, count in waiting(shop)) >= 20_000)
    [(_, key, count)] = waiting(shop)
    assert key == "a"
    assert count < 23_000
    assert of("c", seen(shop)) == []
    shop.database.sql(
        f"UPDATE {shop.table} SET payload = '{{}}', next_retry_time = UTC_TIMESTAMP(6)"
        " WHERE event_id = 'large'"
    )
    shop.until(lambda: of("c", seen(shop)) == [0], 120)
    shop.until(lambda: len(of("a", seen(shop))) == 25_001, 120)
    events = seen(shop)
    assert of("a", events) == ["large", *range(25_000)]
    assert of("b", events) == list(range(25_000))
    assert relay.terminate() == 0
