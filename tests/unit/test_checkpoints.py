from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from hypothesis import given
from hypothesis import strategies as st

from cdc_relay.config import load
from cdc_relay.errors import SinkError, SinkUnavailableError
from cdc_relay.kafka import checkpoints
from cdc_relay.kafka.checkpoints import Checkpoint, UnreadableCheckpointError
from cdc_relay.kafka.owed import Owed, fingerprint
from cdc_relay.position import Position

HERE = Position("mysql", "a-server", "binlog.000042", 4711, "")

ids = st.integers(0, (1 << 64) - 1) | st.integers(1_000, 4_000)
owed_marks = st.dictionaries(ids, st.text(max_size=40), max_size=50)


@given(st.lists(owed_marks, max_size=4))
def test_owed_marks_come_back(parts: list[dict[int, str]]) -> None:
    owed = Owed.together(Owed.of(list(part.items())) for part in parts)
    found = Checkpoint.decode(Checkpoint(HERE, owed).encode()).owed
    assert list(found) == [
        (row_id, fingerprint(event_id))
        for part in parts
        for row_id, event_id in sorted(part.items())
    ]
    assert len(found) == sum(map(len, parts))


def test_the_owed_marks_of_a_large_transaction_fit_into_a_record() -> None:
    owed = Owed.of([(1 << 60 | number * 3, f"event {number}") for number in range(150_000)])
    value = Checkpoint(HERE, owed).encode()
    assert len(value) < 800_000
    assert Checkpoint.decode(value).owed == owed
    assert len(list(owed)) == len(owed) == 150_000


def test_everything_else_comes_back() -> None:
    made = Checkpoint(
        HERE.inside("a-server:17", 3),
        Owed.of([(1, "two")]),
        [("order", "k\n1"), ("Ü", None)],
        sweeping=True,
        doubtful_until=HERE,
        anchor="why",
        time=1.5,
        held=(("order", "k\n1", [3, 4, 5, 9]), ("Ü", None, [])),
    )
    assert Checkpoint.decode(made.encode()) == made


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_a_damaged_one_is_refused(cut: int) -> None:
    value = Checkpoint(HERE, Owed.of([(1, "two"), (5, "six")])).encode()
    with pytest.raises(SinkError):
        Checkpoint.decode(value[:-cut])
    with pytest.raises(SinkError):
        Checkpoint.decode(b"{}")


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"[]",
        b"{}",
        b'"text"',
        b"[" * 100_000,
        b'{"version": 2, "position": [], "closed": [], "owed": 0, "time": 0}\n',
        b'{"version": 2, "position": {"flavor": "mysql", "server": "", "file": "", "offset": -7,'
        b' "gtids": null}, "closed": [], "owed": 0, "time": 0}\n',
        b'{"version": 2, "position": {"flavor": "mysql", "server": "", "file": "", "offset": 4,'
        b' "gtids": "zzz"}, "closed": [], "owed": 0, "time": 0}\n',
    ],
)
def test_a_record_that_is_no_checkpoint(value: bytes) -> None:
    with pytest.raises(UnreadableCheckpointError, match="the checkpoint cannot be read"):
        Checkpoint.decode(value)


class _Answers:
    """A consumer whose brokers answer as told, then with a partition that is empty."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)

    def get_watermark_offsets(self, *_: Any, **__: Any) -> tuple[int, int]:
        if self.codes:
            raise KafkaException(KafkaError(self.codes.pop(0)))
        return 0, 0

    def list_topics(self, topic: str, **_: Any) -> Any:
        class Found:
            topics = {topic: type("Topic", (), {"error": None})}  # noqa: RUF012

        return Found

    def poll(self, _: float) -> None:
        return None

    def close(self) -> None:
        pass


def _last(monkeypatch: pytest.MonkeyPatch, consumer: _Answers) -> object:
    monkeypatch.setattr(checkpoints, "create", lambda *_: consumer)
    settings = load(environ={}, flags={"kafka_bootstrap": "127.0.0.1:1", "name": "shop"})
    return checkpoints.last_value(settings, "t", 0, b"key", 5.0)


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
    ],
)
def test_a_leader_that_changes_is_waited_for(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    consumer = _Answers(code, code)
    assert _last(monkeypatch, consumer) is None
    assert not consumer.codes


def test_what_waiting_cannot_mend_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = _Answers(*[KafkaError.TOPIC_AUTHORIZATION_FAILED] * 2)
    with pytest.raises(SinkError) as refused:
        _last(monkeypatch, consumer)
    assert len(consumer.codes) == 1
    assert not isinstance(refused.value, SinkUnavailableError)
