"""Lines of the client library, and what reaches the log of them."""

from __future__ import annotations

import logging

import pytest
from confluent_kafka import KafkaError

from cdc_relay.config import load
from cdc_relay.kafka import client


def line(text: str) -> logging.LogRecord:
    return logging.LogRecord("librdkafka", logging.ERROR, "", 0, text, None, None)


def test_a_failure_that_repeats_with_every_try_is_said_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(client.time, "monotonic", lambda: now[0])
    repeats = client.Repeats()
    tries = [line(f"FAIL rdkafka#consumer-1: broker/1: refused (after {n}ms)") for n in range(50)]
    assert [repeats(one) for one in tries].count(True) == 1
    assert repeats(line("FAIL rdkafka#consumer-1: broker/2: refused (after 1ms)"))
    now[0] += 31
    assert repeats(tries[0])
    assert not repeats(tries[1])
    assert len(repeats._said) == 1  # bounded: what is old is forgotten


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (KafkaError.INVALID_SESSION_TIMEOUT, ("session_timeout", "group.min.session.timeout.ms")),
        (KafkaError.INVALID_TRANSACTION_TIMEOUT, ("transaction_timeout: ", "15 s", "max.timeout")),
    ],
)
def test_a_time_that_the_brokers_refuse_is_named_by_its_setting(
    code: int, words: tuple[str, ...]
) -> None:
    settings = load(environ={}, flags={"kafka_bootstrap": "b:1"})
    said = str(client.sink_error(KafkaError(code), settings, "cannot start"))
    assert all(word in said for word in words), said
