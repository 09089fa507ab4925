"""Every pass leaves a record of itself, so that its absence is noticed."""

from __future__ import annotations

import json
from typing import Any

from cdc_relay.config import load
from cdc_relay.kafka.checkpoints import read_fallback
from tests.support.harness import Harness


def last_pass(shop: Harness) -> Any:
    status = shop.run("status", "--json")
    assert status.wait() == 0, status.text()
    return json.loads(status.stdout)["last_pass"]


def test_status_shows_the_last_pass(mysql_shop: Harness) -> None:
    shop = mysql_shop
    assert last_pass(shop) is None
    for number in range(3):
        shop.ins(f"k{number}", {})
    assert shop.compensate()["sent"] == 3
    found = last_pass(shop)
    assert (found["sent"], found["exit_code"], found["error"]) == (3, 0, None)
    assert 0 <= found["age_s"] < 60
    settings = load(environ={}, flags={"kafka_bootstrap": shop.kafka, "name": shop.name})
    sent = read_fallback(settings)
    # One with nothing to do is a pass as well, and does not hide what an earlier one has sent.
    assert shop.compensate()["sent"] == 0
    assert last_pass(shop)["sent"] == 0
    assert read_fallback(settings) == sent
    shop.ins("bad", {}, kind="no such topic!")
    assert shop.compensate()["exit_code"] == 6
    found = last_pass(shop)
    assert (found["failed"], found["exit_code"]) == (1, 6)


def test_a_loop_says_that_it_is_there(mysql_shop: Harness) -> None:
    shop = mysql_shop
    loop = shop.spawn("compensate", "--older-than", "0s", "--loop")
    shop.until(lambda: last_pass(shop) is not None)
    assert loop.terminate() == 0


def test_a_pass_without_kafka_is_not_at_fault(mysql_shop: Harness) -> None:
    process = mysql_shop.run("compensate", "--json", KAFKA_BOOTSTRAP="127.0.0.1:9")
    assert process.wait() == 0, process.text()
    assert len(process.logged("the pass left no record of itself")) == 1
