"""librdkafka properties of the user: each is taken as it is, or refused by name."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from confluent_kafka import KafkaError

from cdc_relay.config import REFUSED_KAFKA_PROPERTIES, Settings, load
from cdc_relay.errors import ConfigError, SinkError
from cdc_relay.kafka import client, membership, reader, sink, transactions
from cdc_relay.kafka.membership import Membership
from cdc_relay.kafka.reader import Reader
from cdc_relay.kafka.sink import IdempotentSink
from cdc_relay.kafka.transactions import TransactionalSink

# Noticing that a broker is away rests on them: what is shown is what the user says, see below.
_HONOURED_OTHERWISE = {"log_level", "log.connection.close"}


class _MadeError(Exception):
    pass


def settings_with(**kafka: str) -> Settings:
    return load(environ={}, flags={"kafka_bootstrap": "127.0.0.1:1", "kafka": kafka})


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The properties of each client, which is not made."""
    configs: list[dict[str, Any]] = []

    def create(_kind: object, config: dict[str, Any]) -> Any:
        configs.append(config)
        raise _MadeError

    for module in (membership, reader, sink, transactions):
        monkeypatch.setattr(module, "create", create)
    monkeypatch.setattr(transactions.markers, "write_forgotten", lambda *_: {})
    return configs


def make_all(settings: Settings, made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made.clear()
    for make in (
        lambda: Membership(settings),
        lambda: Reader(settings),
        lambda: IdempotentSink(settings, "test"),
        lambda: TransactionalSink(settings, 0, None, lambda: True),
    ):
        with pytest.raises(_MadeError):
            make()
    return [*made, client.topic_reader_config(settings, "test", "read_committed")]


def test_what_is_set_after_the_users_properties_is_refused_by_name(
    made: list[dict[str, Any]],
) -> None:
    """Never overridden in silence."""
    ours = {name for config in make_all(settings_with(), made) for name in config}
    assert "group.id" in ours
    for name in ours - _HONOURED_OTHERWISE - {"error_cb", "on_commit"}:  # the library says so
        if name in REFUSED_KAFKA_PROPERTIES:
            continue
        for config in make_all(settings_with(**{name: "the user's"}), made):
            assert config.get(name, "the user's") == "the user's", name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("group.instance.id", "one and the same member"),
        ("group.protocol", "session_timeout"),
        ("transaction.timeout.ms", "set transaction_timeout instead"),
        ("message.timeout.ms", "set transaction_timeout"),
        ("delivery.timeout.ms", "set transaction_timeout"),  # an alias
        ("session.timeout.ms", "set session_timeout instead"),
        ("heartbeat.interval.ms", "session_timeout"),
        ("partition.assignment.strategy", "interrupt"),
        ("allow.auto.create.topics", "auto.create.topics.enable"),
        ("enable.partition.eof", "end of its topics"),
        ("queuing.strategy", "order"),
        ("enabled_events", "delivery reports"),
        ("logger", "log_level"),
        ("log.queue", "log_level"),
        ("test.mock.num.brokers", "made up"),
    ],
)
def test_it_is_said_why_and_what_to_use_instead(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings_with(**{name: "1"})
    assert f"{name} cannot be set: " in str(refused.value)
    assert words in str(refused.value)


def test_the_log_level_can_be_a_variable() -> None:
    assert load(environ={"CDC_RELAY_KAFKA_LOG_LEVEL": "4"}).kafka == {"log_level": "4"}


@pytest.mark.parametrize(
    ("kafka", "asked", "shown"),
    [
        ({}, 6, {"info", "warning"}),
        ({"log_level": "4"}, 6, {"warning"}),
        ({"log_level": "2"}, 6, set()),
        ({"log_level": "7"}, 7, {"debug", "info", "warning"}),
        ({"log_level": "3", "debug": "broker"}, 6, {"debug", "info", "warning"}),
        ({"log.connection.close": "true"}, 6, {"closed", "info", "warning"}),
        ({"log.connection.close": "true", "log_level": "4"}, 6, {"warning"}),
    ],
)
def test_lost_brokers_are_noticed_at_any_log_level(
    kafka: dict[str, str], asked: int, shown: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client._logger, "level", logging.DEBUG)
    lost: list[bool] = []
    config = client.noticing(settings_with(**kafka), lambda: lost.append(True))
    assert config["log_level"] == asked
    assert config["log.connection.close"] is True
    lines = {
        "closed": (logging.INFO, f"FAIL broker/1: Disconnected: closed {kafka}"),
        "debug": (logging.DEBUG, f"BROKER {kafka}"),
        "info": (logging.INFO, f"INFO {kafka}"),
        "warning": (logging.WARNING, f"TERMINATE {kafka}"),
    }
    passed = {
        name
        for name, (level, text) in lines.items()
        if config["logger"].filter(logging.LogRecord("", level, "", 0, text, None, None))
    }
    assert passed == shown
    assert lost == [True]


class _FatalConsumer:
    """Its client has given up."""

    def poll(self, _timeout: float) -> Any:
        return self

    def error(self) -> KafkaError:
        return KafkaError(KafkaError._FATAL, "fenced by another member", fatal=True)


def test_a_member_whose_client_gave_up_ends_the_process() -> None:
    """The next one is another member; this one would stand by for ever."""
    member: Any = Membership.__new__(Membership)
    member._settings, member._consumer = settings_with(), _FatalConsumer()
    member._was_let_in, member.losses, member.topic_gone = True, 0, False
    with pytest.raises(SinkError, match="fenced by another member"):
        member.poll(0)
