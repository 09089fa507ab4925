"""The forms of a record are the same by stream and by compensator, and readable by the SDK."""

from __future__ import annotations

from pathlib import Path

import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_kafka
from cloudevents.core.formats.json import JSONFormat

from tests.support.harness import Harness, Message
from tests.support.sql import Database


@pytest.mark.parametrize("form", ["cloudevents", "cloudevents-structured"])
def test_cloudevents_by_stream_and_by_compensator(
    form: str, mysql_url: str, kafka: str, tmp_path: Path
) -> None:
    environment = {"FORMAT": form, "CLOUDEVENTS_SOURCE": "/shop/orders"}
    with (
        Database.create(mysql_url) as database,
        Harness(database, kafka, tmp_path, environment) as shop,
    ):
        shop.create_topic()
        relay = shop.relay()
        sent = [shop.ins("a", {"n": 1.50, "text": "é😥"}), shop.ins("b", None)]
        shop.wait_sent(2)
        assert relay.terminate() == 0
        database.sql(f"UPDATE {shop.table} SET status = 0")
        assert shop.compensate()["sent"] == 2
        streamed, again = shop.messages()[:2], shop.messages()[2:]
    by_key: dict[str, list[Message]] = {}
    for message in (*streamed, *again):
        by_key.setdefault(message.key, []).append(message._replace(offset=0))
    assert [messages[0] == messages[1] for messages in by_key.values()] == [True, True]
    [first, _] = by_key["a"]
    assert first.value is not None
    carried = {name: value for name, value in first.headers.items() if value is not None}
    event = from_kafka(KafkaMessage(carried, first.key, first.value), JSONFormat())
    assert event.get_id() == sent[0]
    assert event.get_source() == "/shop/orders"
    assert event.get_subject() == "a"
    assert event.get_data() == {"n": 1.5, "text": "é😥"}
    [tombstone, _] = by_key["b"]
    assert tombstone.value is None
    assert tombstone.headers["ce_id"] == sent[1].encode()
