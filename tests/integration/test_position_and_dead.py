"""The commands that set a position and that deal with dead rows, on real servers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from confluent_kafka import Producer

from cdc_relay.kafka.checkpoints import topic_name
from tests.support.harness import Harness
from tests.support.sql import Database

UNKNOWN = "00000000-0000-0000-0000-000000000001"


def _output(process: object) -> str:
    return getattr(process, "stdout").decode()  # noqa: B009


def test_position_is_shown_and_set_while_no_relay_runs(shop: Harness) -> None:
    assert "no checkpoint" in _output(shop.run("position", "show"))
    shop.ins("a", {"n": 1})
    relay = shop.relay()
    shop.wait_sent(1)
    refused = shop.run("position", "set", "--current")
    assert refused.wait() == 2
    assert "is running: stop it first" in refused.text()
    assert relay.terminate() == 0

    before = json.loads(_output(shop.run("position", "show", "--json")))
    shop.ins("a", {"n": 2})
    assert shop.run("position", "set", "--current").wait() == 0
    after = json.loads(_output(shop.run("position", "show", "--json")))
    assert after["gtids"] != before["gtids"]
    # The row that the new position passed over is the compensator's.
    assert shop.run("start", "--until-current").wait() == 0
    assert [message.json["n"] for message in shop.messages()] == [1]
    assert shop.compensate()["sent"] == 1
    assert [message.json["n"] for message in shop.messages()] == [1, 2]


def test_going_back_sends_nothing_that_the_table_shows_as_sent(shop: Harness) -> None:
    relay = shop.relay()
    start = json.loads(_output(shop.run("position", "show", "--json")))
    for number in range(5):
        shop.ins("a", {"n": number})
    shop.wait_sent(5)
    assert relay.terminate() == 0
    assert shop.run("position", "set", "--gtids", start["gtids"]).wait() == 0
    shop.ins("a", {"n": 5})
    assert shop.run("start", "--until-current").wait() == 0
    assert [message.json["n"] for message in shop.messages()] == [0, 1, 2, 3, 4, 5]


def test_a_position_that_the_server_cannot_start_from_is_refused(shop: Harness) -> None:
    file = str(shop.database.sql("SHOW BINARY LOGS")[-1][0])
    for arguments, code in (
        (["--file", file, "--offset", "5"], 2),
        (["--gtids", "nonsense"], 2),
        (["--gtids", f"{UNKNOWN}:1" if not shop.database.is_mariadb else "0-9-999999999999"], 2),
        (["--file", "nope.000001", "--offset", "4"], 5),
        (["--file", "nope.000001"], 2),
        ([], 2),
    ):
        process = shop.run("position", "set", *arguments)
        assert process.wait() == code, process.text()
        assert process.text().count("error:") == 1
    begins = str(shop.database.sql(f"SHOW BINLOG EVENTS IN '{file}' LIMIT 4")[-1][1])
    assert shop.run("position", "set", "--file", file, "--offset", begins).wait() == 0


def test_a_checkpoint_that_cannot_be_read_is_replaced(shop: Harness) -> None:
    """It keeps the relay from starting where nothing is marked; this is the way out."""
    assert shop.run("position", "set", "--current").wait() == 0
    producer = Producer({"bootstrap.servers": shop.kafka})
    producer.produce(topic_name(shop.name), b"nonsense", b"shard-0", partition=0)
    assert producer.flush(15) == 0
    process = shop.run("position", "set", "--current")
    assert process.wait() == 0, process.text()
    assert "nothing of it is kept" in process.text()
    assert shop.run("start", "--until-current").wait() == 0


def test_rows_that_wait_where_nothing_is_marked_are_kept(
    mysql: Database, harness: Callable[..., Harness]
) -> None:
    """The checkpoint alone knows of them."""
    shop = harness(mysql, MARK="none")
    shop.create_topic(**{"max.message.bytes": "2000"})
    relay = shop.relay()
    shop.until(shop.checkpoint)
    shop.ins("a", {"x": random.Random(1).randbytes(2000).hex()}, event_id="large")
    shop.ins("a", {"n": 1})
    shop.ins("b", {"n": 2})
    shop.until(shop.messages)

    def both_wait() -> bool:
        last = shop.checkpoint()
        return last is not None and sum(len(ids) for _, _, ids in last.held) == 2

    shop.until(both_wait)
    assert relay.terminate() == 0
    assert shop.run("position", "set", "--current").wait() == 0
    shop.database.sql(
        f"UPDATE {shop.table} SET payload = '{{}}', next_retry_time = UTC_TIMESTAMP(6)"
        " WHERE event_id = 'large'"
    )
    relay = shop.relay()
    shop.ins("a", {"n": 3})
    shop.until(lambda: len(shop.messages()) == 4)
    assert [one.json.get("n") for one in shop.messages() if one.key == "a"] == [None, 1, 3]
    assert relay.terminate() == 0


def test_dead_rows_are_listed_shown_retried_and_discarded(shop: Harness) -> None:
    first = shop.ins("a", {"n": 1})
    second = shop.ins("b", {"n": 2})
    shop.database.sql(
        f"UPDATE {shop.table} SET status = 2, retry_count = 11, last_error = 'too large'"
    )
    rows = [json.loads(line) for line in _output(shop.run("dead", "list", "--json")).splitlines()]
    assert [row["event_id"] for row in rows] == [first, second]
    assert rows[0]["last_error"] == "too large"
    # Whole lines where it is piped: nothing is cut, and brackets are no markup.
    shop.database.sql(f"UPDATE {shop.table} SET last_error = CONCAT('[red] ', REPEAT('x', 300))")
    lines = _output(shop.run("dead", "list")).splitlines()
    assert len(lines) == 3
    assert first in lines[1]
    assert lines[1].rstrip().endswith("[red] " + "x" * 300)
    [_, one, hint] = _output(shop.run("dead", "list", "--limit", "1")).splitlines()
    assert first in one
    assert "--limit" in hint
    shown = json.loads(_output(shop.run("dead", "show", first)))
    assert json.loads(shown["payload"]) == {"n": 1}

    assert shop.run("dead", "retry").wait() == 2
    for command in ("retry", "discard"):
        refused = shop.run("dead", command, "nobody", *["--yes"] * (command == "discard"))
        assert refused.wait() == 2
        assert "no dead row has the event id 'nobody'" in refused.text()
    refused = shop.run("dead", "discard", first)
    assert refused.wait() == 2
    assert "--yes" in refused.text()
    assert shop.run("dead", "retry", first).wait() == 0
    assert (shop.count(0), shop.count(2)) == (1, 1)
    assert shop.compensate()["sent"] == 1

    assert shop.run("dead", "discard", "--all", "--yes").wait() == 0
    assert (shop.count(1), shop.count(2)) == (1, 0)
    assert [message.event_id for message in shop.messages()] == [first]
