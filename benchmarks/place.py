"""Where a benchmark runs: a MySQL and a Kafka of its own, in a home that is removed at the end."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import pymysql
from confluent_kafka import Consumer, IsolationLevel, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    NewTopic,
    OffsetSpec,
)

from cdc_relay.outbox import DEFAULT_TABLE, table_ddl
from dev.kafka import Kafka
from dev.mysql import MySQL

PARTITIONS: Final = 12
_POOL: Final = "1G"
"""InnoDB's buffer pool: room for the whole table, as a database of some size has it."""
METADATA: Final = "FULL"
"""``binlog_row_metadata``: what the stock library needs to name columns; ours does without."""

# What makes a commit durable. Loading does without; measuring has the server's own defaults.
_LOADING: Final = {"sync_binlog": 0, "innodb_flush_log_at_trx_commit": 2}
_MEASURING: Final = {"sync_binlog": 1, "innodb_flush_log_at_trx_commit": 1}

_TABLES: Final = (
    "CREATE TABLE orders (id BIGINT PRIMARY KEY, customer_id BIGINT NOT NULL, "
    "total DECIMAL(12, 2) NOT NULL, state VARCHAR(16) NOT NULL, "
    "placed_at DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6))",
    "CREATE TABLE visits (id BIGINT PRIMARY KEY, page VARCHAR(64) NOT NULL, seen INT NOT NULL)",
)

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Place:
    """The servers, ready, with empty tables."""

    home: Path
    mysql: MySQL
    kafka: Kafka

    @property
    def url(self) -> str:
        return self.mysql.url()

    @cached_property
    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.kafka.bootstrap, "log_level": 4})

    def sql(self, *statements: str) -> Any:
        """Run statements in autocommit; returns the rows of the last one."""
        with self.connect() as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return cursor.fetchall()

    def connect(self, **options: Any) -> pymysql.Connection[Any]:
        return connect(self.mysql.port, **options)

    def clear(self) -> None:
        """Empty all tables and begin a new binlog file, so that a run reads its own only."""
        self.sql(
            *(f"TRUNCATE TABLE {table}" for table in (DEFAULT_TABLE, "orders", "visits")),
            "FLUSH BINARY LOGS",
        )

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Commits that are not durable, for as long as the body runs."""
        self._set(_LOADING)
        try:
            yield
        finally:
            self._set(_MEASURING)

    def _set(self, variables: dict[str, int]) -> None:
        self.sql(*(f"SET GLOBAL {name} = {value}" for name, value in variables.items()))

    def binlog_end(self) -> tuple[str, int]:
        """File and offset."""
        file, offset = self.sql("SHOW BINARY LOG STATUS")[0][:2]
        return str(file), int(offset)

    def binlog_bytes(self) -> int:
        """Of all files of the log."""
        return sum(int(row[1]) for row in self.sql("SHOW BINARY LOGS"))

    def records(self, topic: str) -> int:
        """Sum of the topic's end offsets; where transactions are used, their markers count too."""
        admin = self.admin
        partitions = admin.list_topics(topic, timeout=15).topics[topic].partitions
        request = {TopicPartition(topic, number): OffsetSpec.latest() for number in partitions}  # type: ignore[no-untyped-call]
        offsets = admin.list_offsets(
            request, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=15
        )
        return sum(future.result(timeout=20).offset for future in offsets.values())

    def create_topic(self, topic: str, partitions: int = PARTITIONS) -> None:
        """A topic whose records carry the broker's time of append."""
        new = NewTopic(
            topic,
            num_partitions=partitions,
            config={"message.timestamp.type": "LogAppendTime"},
        )
        self.admin.create_topics([new], operation_timeout=15)[topic].result(timeout=20)

    def arrivals(self, topic: str, expected: int) -> Arrivals:
        """Everything in the topic, as a read_committed consumer sees it."""
        seen: set[object] = set()
        times: list[int] = []
        for event_id, time_ms in self._messages(topic, expected):
            seen.add(event_id)
            times.append(time_ms)
        return Arrivals(len(times), len(seen), sorted(times))

    def check_numbered(self, topic: str, rows: int) -> None:
        """Raise ``RuntimeError`` unless the topic holds the event ids 0 to ``rows`` - 1, each once:
        in a bit for each row, where ``arrivals`` would keep them all."""
        seen = bytearray(rows)
        count = 0
        for event_id, _ in self._messages(topic, rows):
            seen[int(event_id)] = 1
            count += 1
        if (count, sum(seen)) != (rows, rows):
            raise RuntimeError(f"{rows} rows; {count} records of {sum(seen)} arrived")

    def _messages(self, topic: str, expected: int) -> Iterator[tuple[bytes, int]]:
        """Event id, and when the broker appended it, of everything in the topic."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.kafka.bootstrap,
                "group.id": f"bench-{os.getpid()}-{next(_numbers)}",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
            }
        )
        count = 0
        try:
            partitions = consumer.list_topics(topic, timeout=15).topics[topic].partitions
            consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
            while messages := consumer.consume(10_000, timeout=1 if count >= expected else 10):
                for message in messages:
                    error = message.error()
                    if error is not None:
                        raise RuntimeError(f"{topic} cannot be read: {error}")
                    count += 1
                    event_id = dict(message.headers() or [])["id"]
                    assert isinstance(event_id, bytes)
                    yield event_id, message.timestamp()[1]
        finally:
            consumer.close()


@dataclass(frozen=True)
class Arrivals:
    """What a topic holds."""

    records: int
    distinct: int
    appended: Sequence[int]
    """When the broker appended each record, milliseconds since 1970, sorted."""

    @property
    def first_ms(self) -> int:
        return self.appended[0]

    @property
    def last_ms(self) -> int:
        return self.appended[-1]

    def rate_after(self, records: int) -> float:
        """Records per second after the first so many."""
        rest = self.appended[records:]
        return len(rest) / (max(rest[-1] - rest[0], 1) / 1000)


def connect(port: int, **options: Any) -> pymysql.Connection[Any]:
    """A connection to a benchmark's MySQL, in autocommit unless asked otherwise."""
    arguments: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": port,
        "user": "root",
        "database": "shop",
        "charset": "utf8mb4",
        "autocommit": True,
    }
    return pymysql.connect(**{**arguments, **options})


@contextmanager
def place(*, kafka: bool) -> Iterator[Place]:
    """Start the servers, Kafka only where it is needed; kill and remove them at the end."""
    with tempfile.TemporaryDirectory(prefix="cdc-relay-bench-") as directory:
        home = Path(directory)
        made = Place(
            home,
            MySQL(home / "mysql", die_with_parent=True),
            Kafka(home / "kafka", die_with_parent=True),
        )
        try:
            made.mysql.start(
                [f"--binlog-row-metadata={METADATA}", f"--innodb-buffer-pool-size={_POOL}"],
                wait=None,
            )
            if kafka:
                made.kafka.start()
            made.mysql.wait_ready()
            made.sql(*_TABLES, *table_ddl())
            yield made
        finally:
            made.kafka.kill()
            made.mysql.kill()
