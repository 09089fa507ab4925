"""One outbox under test: its table, its relay and compensator as processes, its topics."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
)

from cdc_relay.config import Settings, load
from cdc_relay.kafka.checkpoints import Checkpoint, read_last
from tests.support.sql import INSERT, Database, row

CHECKOUT = Path(__file__).resolve().parents[2]
_numbers = itertools.count(1)


class Message(NamedTuple):
    """A record as a consumer sees it."""

    topic: str
    partition: int
    offset: int
    key: str
    value: bytes | None
    headers: dict[str, bytes | None]
    timestamp_ms: int

    @property
    def event_id(self) -> str:
        return (self.headers["id"] or b"").decode()

    @property
    def json(self) -> Any:
        assert self.value is not None
        return json.loads(self.value)


class Process:
    """A command of ours as a process; its stderr goes to ``log``."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self.arguments = arguments
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cdc_relay", *arguments],
                cwd=CHECKOUT,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def terminate(self, timeout: float = 60) -> int:
        """SIGTERM and the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self.wait(timeout)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, also to one that has ended."""
        self._process.kill()
        self.wait(10)

    def wait(self, timeout: float = 60) -> int:
        """The exit code."""
        self.stdout, _ = self._process.communicate(timeout=timeout)
        return self._process.returncode

    def text(self) -> str:
        """What it has logged so far."""
        return self.log.read_text(errors="replace")

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The lines of its log with this event."""
        lines = [line for line in self.text().splitlines() if line.startswith("{")]
        return [entry for entry in map(json.loads, lines) if entry["event"] == event]


class Harness:
    """An outbox table in ``database`` and everything that works on it, under a name of its own.

    ``environment`` adds ``CDC_RELAY_*`` variables, by their names without the prefix.
    """

    def __init__(
        self,
        database: Database,
        kafka: str,
        home: Path,
        environment: Mapping[str, str] | None = None,
        *,
        create: bool = True,
    ) -> None:
        self.database = database
        self.kafka = kafka
        self.home = home
        self.name = f"t{os.getpid()}-{next(_numbers)}"
        self.topic_prefix = f"{self.name}.event."
        self._extra = dict(environment or {})
        self._processes: list[Process] = []
        if create:
            database.create_outbox(self.table)

    @property
    def table(self) -> str:
        return self._extra.get("TABLE", "outbox_event")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()

    def environment(self, **extra: str) -> dict[str, str]:
        """The environment of a process of ours."""
        ours = {
            "DATABASE_URL": self.database.text,
            "KAFKA_BOOTSTRAP": self.kafka,
            "NAME": self.name,
            "TOPIC": self.topic_prefix + "{aggregate_type}",
            "HTTP": "off",
            "LOG_FORMAT": "json",
            **self._extra,
            **extra,
        }
        clean = {k: v for k, v in os.environ.items() if not k.startswith("CDC_RELAY_")}
        return {**clean, **{f"CDC_RELAY_{key}": value for key, value in ours.items()}}

    # --- writing -------------------------------------------------------------------------------

    def ins(self, key: str, payload: object = None, **fields: Any) -> str:
        """Insert one row in a transaction of its own; returns its event id."""
        values = row(key, payload, **fields)
        self.database.sql(INSERT.format(table=self.table), values)
        return str(values[0])

    # --- processes -----------------------------------------------------------------------------

    def run(self, *arguments: str, timeout: float = 60, **extra: str) -> Process:
        """Run a command to its end; ``wait()`` gives the exit code again."""
        process = self.spawn(*arguments, **extra)
        process.wait(timeout)
        return process

    def spawn(self, *arguments: str, **extra: str) -> Process:
        """Start a command."""
        log = self.home / f"{self.name}-{arguments[0]}-{len(self._processes)}.log"
        process = Process(list(arguments), self.environment(**extra), log)
        self._processes.append(process)
        return process

    def relay(self, *arguments: str, **extra: str) -> Process:
        """Start a relay and wait until it streams."""
        process = self.spawn("start", *arguments, **extra)
        self.until(lambda: '"streaming"' in process.text() or not process.running)
        assert process.running, process.text()
        return process

    def steady_relay(self) -> Process:
        """The relay that runs, or a new one where none does: for tests that share one."""
        for process in self._processes:
            if process.arguments[0] == "start" and process.running:
                return process
        return self.relay()

    def compensate(self, *arguments: str, **extra: str) -> dict[str, Any]:
        """Run one pass of the compensator over rows of any age; returns its summary."""
        process = self.spawn("compensate", "--older-than", "0s", "--json", *arguments, **extra)
        code = process.wait(90)
        assert process.stdout, process.text()
        summary: dict[str, Any] = json.loads(process.stdout)
        assert code == summary["exit_code"], process.text()
        return summary

    def until(self, condition: Callable[[], object], timeout: float = 60) -> None:
        """Wait for ``condition``; fails with the logs when it does not come true in time."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(process.text()[-3000:] for process in self._processes)
                raise AssertionError(f"not within {timeout} s\n{logs}")
            time.sleep(0.02)

    # --- looking -------------------------------------------------------------------------------

    def count(self, status: int, kind: str = "%") -> int:
        """Rows with this status, of one aggregate type or of all."""
        sql = f"SELECT COUNT(*) FROM {self.table} WHERE status = %s AND aggregate_type LIKE %s"
        return int(self.database.sql(sql, (status, kind))[0][0])

    def wait_sent(self, total: int, timeout: float = 60, *, kind: str = "%") -> None:
        """Wait until ``total`` rows, of one aggregate type or of all, are marked as sent."""
        self.until(lambda: self.count(1, kind) >= total, timeout)

    def wait_all_sent(self, timeout: float = 60) -> None:
        """Wait until no row is pending."""
        self.until(lambda: self.count(0) == 0, timeout)

    def checkpoint(self) -> Checkpoint | None:
        """The last committed checkpoint."""
        return read_last(self.settings())

    def settings(self) -> Settings:
        """Those that name the relay and its brokers."""
        return load(environ={}, flags={"kafka_bootstrap": self.kafka, "name": self.name})

    def messages(self, kind: str = "order") -> list[Message]:
        """All records of the topic of an aggregate type, as a read_committed consumer sees them,
        in order within each partition."""
        return consume(self.kafka, self.topic_prefix + kind)

    def topics(self) -> set[str]:
        """The aggregate types that have a topic."""
        found = (
            AdminClient({"bootstrap.servers": self.kafka, "log_level": 4})
            .list_topics(timeout=15)
            .topics
        )
        prefix = self.topic_prefix
        return {name.removeprefix(prefix) for name in found if name.startswith(prefix)}

    def create_topic(self, kind: str = "order", partitions: int = 1, **config: str) -> None:
        """Create the topic of an aggregate type."""
        create_topic(self.kafka, self.topic_prefix + kind, partitions, config)


def take_over(bootstrap: str, transactional_id: str) -> None:
    """What another owner does first: it fences the producer of this id."""
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": transactional_id})
    for _ in range(4):
        with suppress(KafkaException):
            return producer.init_transactions(5)
    raise AssertionError("no transactional producer within 20 s")


def create_topic(
    bootstrap: str, topic: str, partitions: int, config: Mapping[str, str] | None = None
) -> None:
    """Create a topic and wait until it is there."""
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 4})
    new = NewTopic(topic, num_partitions=partitions, config=dict(config or {}))
    admin.create_topics([new], operation_timeout=15)[topic].result(timeout=20)


def alter_topic(bootstrap: str, topic: str, config: Mapping[str, str]) -> None:
    """Set properties of a topic."""
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in config.items()
    ]
    resource = ConfigResource("topic", topic, incremental_configs=entries)
    admin: Any = AdminClient({"bootstrap.servers": bootstrap, "log_level": 4})
    admin.incremental_alter_configs([resource])[resource].result(30)


def consume(bootstrap: str, topic: str, timeout: float = 60) -> list[Message]:
    """Everything in a topic up to its present end, read committed."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"reader-{os.getpid()}-{next(_numbers)}",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "allow.auto.create.topics": False,
        }
    )
    try:
        found = consumer.list_topics(topic, timeout=timeout).topics[topic]
        if found.error is not None:
            return []
        waiting = set(found.partitions)
        consumer.assign([TopicPartition(topic, number, 0) for number in waiting])
        result: list[Message] = []
        deadline = time.monotonic() + timeout
        while waiting:
            message = consumer.poll(0.5)
            assert time.monotonic() < deadline, f"{topic} is not read within {timeout} s"
            if message is None:
                continue
            error = message.error()
            if error is not None:
                assert error.code() == KafkaError._PARTITION_EOF, error
                waiting.discard(message.partition())
                continue
            result.append(_message(message))
        return sorted(result, key=lambda item: (item.partition, item.offset))
    finally:
        consumer.close()


def _message(message: Any) -> Message:
    key = message.key()
    return Message(
        message.topic(),
        message.partition(),
        message.offset(),
        key.decode() if key is not None else "",
        message.value(),
        dict(message.headers() or []),
        message.timestamp()[1],
    )
