"""The audit finds what was planted, and mends what can be mended."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from cdc_relay.cli import main
from tests.support.harness import Harness, Message
from tests.support.sql import INSERT, Database, row


@pytest.fixture
def sent(mysql: Database, harness: Callable[[Database], Harness]) -> Harness:
    """300 events of 30 aggregates in three partitions, all delivered."""
    shop = harness(mysql)
    shop.create_topic(partitions=3)
    connection = mysql.connect(autocommit=True)
    with connection.cursor() as cursor:
        cursor.executemany(
            INSERT.format(table=shop.table), [row(f"k{n % 30}", {"n": n}) for n in range(300)]
        )
    connection.close()
    assert shop.run("start", "--until-current").wait() == 0
    return shop


def audit(shop: Harness, *arguments: str) -> dict[str, Any]:
    process = shop.run("audit", "--since", "1h", "--until", "0s", "--json", *arguments)
    assert process.stdout, process.text()
    report: dict[str, Any] = json.loads(process.stdout)
    assert process.wait() == report["exit_code"]
    return report


def again(shop: Harness, *messages: Message) -> None:
    """Send records once more, as somebody without a relay would."""
    producer = Producer(
        {
            "bootstrap.servers": shop.kafka,
            "partitioner": "murmur2_random",
            "enable.idempotence": True,
        }
    )
    for message in messages:
        producer.produce(
            message.topic,
            message.value,
            message.key,
            headers=list(message.headers.items()),
            timestamp=message.timestamp_ms,
        )
    assert producer.flush(20) == 0


def test_all_is_there(sent: Harness) -> None:
    report = audit(sent)
    assert report["exit_code"] == 0
    assert (report["rows"], report["records"]) == (300, 300)
    assert not any([*report["missing"].values(), report["duplicates"], report["out_of_order"]])
    assert report["topics"] == [sent.topic_prefix + "order"]
    # Another time, nothing to compare.
    process = sent.run(
        "audit", "--since", "2001-01-01T00:00:00Z", "--until", "2001-01-02T00:00:00Z"
    )
    assert process.wait() == 0
    assert "\x1b" not in process.stdout.decode()


def test_a_range_was_deleted_and_is_sent_again(sent: Harness) -> None:
    topic = sent.topic_prefix + "order"
    messages = [message for message in sent.messages() if message.partition == 1]
    cut = messages[len(messages) // 2].offset
    gone = [message.event_id for message in messages if message.offset < cut]
    admin = AdminClient({"bootstrap.servers": sent.kafka, "log_level": 4})
    for future in admin.delete_records([TopicPartition(topic, 1, cut)]).values():
        future.result(20)
    report = audit(sent)
    assert report["exit_code"] == 6
    assert report["missing"] == {"sent": len(gone), "pending": 0, "dead": 0}
    assert {sample["event_id"] for sample in report["samples"]["missing"]} <= set(gone)
    shown = sent.run("audit", "--since", "1h", "--until", "0s")
    assert shown.wait() == 6
    assert "--resend-missing" in shown.stdout.decode()

    mended = audit(sent, "--resend-missing")
    assert (mended["exit_code"], mended["resent"]) == (0, len(gone))
    after = audit(sent)
    assert after["exit_code"] == 0
    # They come late, and the audit says so.
    assert after["out_of_order"] == len(gone)
    bytes_ = {message.event_id: message for message in messages}
    for message in sent.messages():
        if message.event_id in gone:
            assert message[3:] == bytes_[message.event_id][3:]


def test_an_event_that_was_sent_twice(sent: Harness) -> None:
    messages = sent.messages()
    again(sent, messages[7], messages[200])
    report = audit(sent)
    assert (report["exit_code"], report["duplicates"], report["out_of_order"]) == (0, 2, 0)
    samples = {sample["event_id"] for sample in report["samples"]["duplicates"]}
    assert samples == {messages[7].event_id, messages[200].event_id}


def test_an_inversion(sent: Harness) -> None:
    [template] = [message for message in sent.messages() if message.json["n"] == 299]
    ids = [sent.ins("k29", {"n": n}) for n in (300, 301)]
    sent.database.sql(f"UPDATE {sent.table} SET status = 1")
    rows = sent.database.sql(
        f"SELECT event_id, UNIX_TIMESTAMP(created_at) * 1000 FROM {sent.table} ORDER BY id DESC"
        " LIMIT 2"
    )
    for event_id, at in rows:
        headers = {**template.headers, "id": event_id.encode()}
        again(sent, template._replace(headers=headers, timestamp_ms=int(at)))
    report = audit(sent)
    assert (report["exit_code"], report["out_of_order"]) == (0, 1)
    [sample] = report["samples"]["out_of_order"]
    assert sample["event_id"] == ids[0]


def test_few_aggregates_are_compared_in_parts(
    sent: Harness, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of one busy aggregate is split by event id; what is found stays the same."""
    topic = sent.topic_prefix + "order"
    messages = sent.messages()
    admin = AdminClient({"bootstrap.servers": sent.kafka, "log_level": 4})
    cuts = [TopicPartition(topic, partition, 5) for partition in range(3)]
    for future in admin.delete_records(cuts).values():
        future.result(20)
    again(sent, *[one for one in messages if one.offset % 7 == 6], messages[0])
    for name, value in sent.environment().items():
        monkeypatch.setenv(name, value)

    def report() -> dict[str, Any]:
        assert main(["audit", "--since", "1h", "--until", "0s", "--json"]) == 6
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        del found["seconds"], found["samples"], found["since_us"], found["until_us"]
        return found

    whole = report()
    assert whole["missing"]["sent"] == 14
    assert whole["duplicates"] > 30
    assert whole["out_of_order"] == 1
    monkeypatch.setattr("cdc_relay.audit._PART_ROWS", 3)
    assert report() == whole


def test_what_no_topic_takes_is_not_sent_again(sent: Harness) -> None:
    """The report is there all the same, and what could be sent was."""
    topic = sent.topic_prefix + "order"
    first = min(sent.messages(), key=lambda message: message.json["n"])
    admin = AdminClient({"bootstrap.servers": sent.kafka, "log_level": 4})
    cut = TopicPartition(topic, first.partition, first.offset + 1)
    admin.delete_records([cut])[cut].result(20)
    values = row("k1", {"n": 1}, kind="or/der")
    sent.database.sql(INSERT.format(table=sent.table), values)
    sent.database.sql(INSERT.format(table=sent.table), row("k2", {"pad": "x" * 1_100_000}))
    sent.database.sql(f"UPDATE {sent.table} SET status = 1")
    process = sent.run("audit", "--since", "1h", "--until", "0s", "--json", "--resend-missing")
    report = json.loads(process.stdout)
    assert process.wait() == report["exit_code"] == 4
    assert (report["missing"]["sent"], report["unroutable"]) == (3, 1)
    assert "key k2" in process.text()
    assert first.event_id in {message.event_id for message in sent.messages()}


def test_rows_whose_names_are_null_are_missing_too(sent: Harness) -> None:
    """An existing table may allow it."""
    sent.database.sql(
        f"ALTER TABLE {sent.table} MODIFY aggregate_id VARCHAR(64) NULL,"
        " MODIFY event_id VARCHAR(64) NULL"
    )
    sent.database.sql(
        f"INSERT INTO {sent.table} (aggregate_type, event_type, status) VALUES ('order', 'X', 2)"
    )
    assert audit(sent)["missing"] == {"sent": 0, "pending": 0, "dead": 1}


def test_what_was_not_sent_is_missing_too(sent: Harness) -> None:
    """Rows that are pending or dead are nobody's to send again here."""
    sent.ins("k1", {"n": 1})
    sent.ins("k2", {"n": 2})
    sent.database.sql(f"UPDATE {sent.table} SET status = 2 WHERE status = 0 AND aggregate_id='k2'")
    report = audit(sent, "--resend-missing")
    assert report["missing"] == {"sent": 0, "pending": 1, "dead": 1}
    assert (report["resent"], report["exit_code"]) == (0, 6)
    sent.create_topic("other")
    limited = audit(sent, "--topic", sent.topic_prefix + "other")
    assert (limited["rows"], limited["exit_code"]) == (0, 0)


def test_a_topic_that_is_not_there_is_not_well(sent: Harness) -> None:
    """A slip in the name would be a green audit of nothing."""
    mistyped = sent.run("audit", "--topic", sent.topic_prefix + "oder", "--until", "0s")
    assert mistyped.wait() == 2
    assert "there is no topic" in mistyped.text()
    sent.ins("k1", {"n": 1}, kind="gone")
    assert audit(sent, "--topic", sent.topic_prefix + "gone")["missing"]["pending"] == 1


def test_bad_times(sent: Harness) -> None:
    for arguments in (["--since", "yesterday"], ["--since", "1m", "--until", "2m"]):
        process = sent.run("audit", *arguments)
        assert process.wait() == 2
        assert process.text().count("error:") == 1
