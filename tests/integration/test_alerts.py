"""A row that goes dead raises one alert, from the relay and from the compensator."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from pymysql.err import OperationalError

from tests.support.harness import Harness
from tests.support.webhook import Webhook

# Refused whatever the brokers say: Kafka allows no such topic.
BAD = "no such topic!"


@pytest.fixture
def hook() -> Iterator[Webhook]:
    webhook = Webhook()
    with webhook.serving():
        yield webhook


def make_due(shop: Harness) -> None:
    """No need to wait for the ladder."""
    shop.database.sql("UPDATE outbox_event SET next_retry_time = NULL WHERE status = 0")


def test_the_pass_sends_one_digest_for_all(shop: Harness, hook: Webhook) -> None:
    ids = [shop.ins(f"k{number}", {}, kind=BAD, event_type="PAID") for number in range(15)]
    environment = {"MAX_TRIES": "1", "ALERTS": f"{hook.url} json://127.0.0.1:9/s3cret-token"}
    assert shop.compensate(**environment)["failed"] == 15
    assert hook.received == []
    make_due(shop)
    process = shop.run("compensate", "--older-than", "0s", **environment)
    assert process.wait() == 6  # the target that fails changes nothing
    assert shop.count(2) == 15
    [alert] = hook.received
    assert alert["title"].endswith("15 rows are dead")
    assert shop.name in alert["title"]
    assert f"event_id={ids[0]} " in alert["message"]
    assert "aggregate_id=k0 event_type=PAID tries=2" in alert["message"]
    assert "reason: " in alert["message"]
    assert "and 5 more" in alert["message"]
    [failure] = process.logged("alert not delivered")
    assert failure["target"] == "2 (json://)"
    assert "s3cret" not in process.text()


def test_a_signal_while_the_alert_is_on_its_way(mysql_shop: Harness, hook: Webhook) -> None:
    mysql_shop.ins("k", {}, kind=BAD)
    mysql_shop.database.sql("UPDATE outbox_event SET retry_count = 1")
    hook.answers.clear()
    process = mysql_shop.spawn(
        "compensate", "--older-than", "0s", "--json", MAX_TRIES="1", ALERTS=hook.url
    )
    mysql_shop.until(lambda: hook.received)
    process.signal(signal.SIGTERM)
    hook.answers.set()
    assert process.wait() == 6, process.text()
    assert json.loads(process.stdout)["dead"] == 1
    assert process.logged("alert not delivered") == []


def test_the_relay_tells_once(shop: Harness, hook: Webhook) -> None:
    relay = shop.relay(MAX_TRIES="1", ALERTS=hook.url)
    for number in range(15):
        shop.ins(f"k{number}", {}, kind=BAD)
    good = shop.ins("good", {})

    def all_dead() -> bool:
        with suppress(OperationalError):  # a deadlock with the relay, which parks meanwhile
            make_due(shop)
        return shop.count(2) == 15

    shop.until(all_dead)
    shop.wait_sent(1)
    assert relay.terminate() == 0
    deadline = time.monotonic() + 20
    while sum(alert["message"].count("event_id=") for alert in hook.received) < 10:
        assert time.monotonic() < deadline, "no alert"
        time.sleep(0.05)
    assert len(hook.received) <= 2  # one at once, one with what came after it
    told = "\n".join(alert["message"] for alert in hook.received)
    assert "tries=2" in told
    assert good not in told
    dead = sum(int(alert["title"].split()[-4]) for alert in hook.received)
    assert dead == 15
