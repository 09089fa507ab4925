"""Latency under a steady load: from the commit of a row to the consumer that reads it."""

from __future__ import annotations

import json
import multiprocessing
import time
import uuid
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

from confluent_kafka import Consumer, TopicPartition

from benchmarks.figures import Figure
from benchmarks.place import PARTITIONS, Place, connect

WRITERS: Final = 4
_WARM_S: Final = 3.0
_SHARES: Final = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"), (1.0, "worst"))
# Until the first row is there: what waits before it is carried first.
_CATCH_UP_S: Final = 300.0
_INSERT: Final = (
    "INSERT INTO outbox_event (event_id, aggregate_type, aggregate_id, event_type, payload)"
    " VALUES (%s, 'order', %s, 'PLACED', %s)"
)


@dataclass(frozen=True)
class Latencies:
    """Milliseconds from the return of COMMIT to the consumer, sorted."""

    milliseconds: list[float]
    reached: float
    """Orders per second that the writers wrote; fewer than asked for where the machine is full."""

    def quantile(self, share: float) -> float:
        """The time within which this share of the rows arrived."""
        return self.milliseconds[
            min(int(len(self.milliseconds) * share), len(self.milliseconds) - 1)
        ]

    def figures(self, scenario: str, rate: int) -> list[Figure]:
        """The quantiles that people ask for."""
        return [
            Figure(scenario, f"{rate:,} orders/s, {label}", "ms", [self.quantile(share)])
            for share, label in _SHARES
        ] + [Figure(scenario, f"{rate:,} orders/s, written", "orders/s", [self.reached])]

    def __str__(self) -> str:
        return ", ".join(f"{label} {self.quantile(share):.1f}" for share, label in _SHARES) + " ms"


class Side(Protocol):
    """What carries the rows."""

    @property
    def topic(self) -> str:
        """Where the orders go."""

    def running(self) -> AbstractContextManager[None]:
        """Run for as long as the body."""


def steady(place: Place, one: Side, rate: int, seconds: float) -> Latencies:
    """Write ``rate`` rows a second for ``seconds`` while ``one`` runs, after it has carried what is
    committed before; the first seconds are not counted. Writers and consumer are processes of
    their own, all on the machine's one clock."""
    context = multiprocessing.get_context("spawn")
    with one.running():
        place.sql(_one_row("'warm'"))
        ours, theirs = context.Pipe()
        consumer = context.Process(
            target=_consume, args=(theirs, place.kafka.bootstrap, one.topic), daemon=True
        )
        consumer.start()
        _expect(ours, _CATCH_UP_S)  # it has seen the first row
        start = time.time() + 1
        writers = []
        pipes = []
        for number in range(WRITERS):
            mine, its = context.Pipe()
            pipes.append(mine)
            writers.append(
                context.Process(
                    target=_write,
                    args=(its, place.mysql.port, number, rate / WRITERS, start, seconds),
                    daemon=True,
                )
            )
            writers[-1].start()
        committed: dict[str, float] = {}
        for pipe in pipes:
            committed |= _expect(pipe, seconds + 60)
        ours.send(len(committed) + 1)
        arrived: dict[str, float] = _expect(ours, 60)
        for process in (*writers, consumer):
            process.join(10)
            process.kill()
    counted = [
        (arrived[event_id] - moment) * 1000
        for event_id, moment in committed.items()
        if moment >= start + _WARM_S
    ]
    took = max(committed.values()) - start
    return Latencies(sorted(counted), len(committed) / max(took, seconds))


def _one_row(key: str) -> str:
    return (
        "INSERT INTO outbox_event (event_id, aggregate_type, aggregate_id, event_type, payload)"
        f" VALUES (UUID(), 'order', {key}, 'PLACED', '{{}}')"
    )


def _expect(pipe: Connection, timeout: float) -> Any:
    if not pipe.poll(timeout):
        raise RuntimeError(f"no answer within {timeout:g} s")
    return pipe.recv()


def _write(
    pipe: Connection, port: int, number: int, rate: float, start: float, seconds: float
) -> None:
    """Insert at a steady pace, one row a transaction; sends when each commit returned."""
    committed: dict[str, float] = {}
    payload = json.dumps({"customer": 7, "note": "x" * 200})
    with connect(port) as connection, connection.cursor() as cursor:
        for turn in range(int(rate * seconds)):
            due = start + turn / rate
            time.sleep(max(0.0, due - time.time()))
            event_id = str(uuid.uuid4())
            cursor.execute(_INSERT, (event_id, f"{number}-{turn % 97}", payload))
            committed[event_id] = time.time()
    pipe.send(committed)


def _consume(pipe: Connection, bootstrap: str, topic: str) -> None:
    """Note when each record is read; ends when as many were seen as the other side says."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"latency-{uuid.uuid4()}",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 10,
        }
    )
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    arrived: dict[str, float] = {}
    expected = None
    deadline = time.time() + 600
    while time.time() < deadline and (expected is None or len(arrived) < expected):
        message = consumer.poll(0.05)
        if message is not None and message.error() is None:
            if not arrived:
                pipe.send(None)
            header = dict(message.headers() or [])["id"]
            assert isinstance(header, bytes)
            event_id = header.decode()
            if event_id in arrived:
                raise RuntimeError(f"{event_id} arrived twice")
            arrived[event_id] = time.time()
        if expected is None and pipe.poll():
            expected = pipe.recv()
    consumer.close()
    pipe.send(arrived)
