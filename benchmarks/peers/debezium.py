"""One measured run of Debezium's MySQL connector with its outbox event router, on Kafka Connect.

Four ways to run it: with the settings that it comes with; *tuned*, with those that we found
fastest; *low latency*, the same without a pause anywhere; and *exactly once*, which Connect gives
in distributed mode only, on the tuned settings.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.peers import dist
from benchmarks.place import Place
from benchmarks.reader import peak_rss
from benchmarks.relay import Drain, Process, cpu_seconds
from dev import kafka_dist, maven, ports

Variant = Literal["defaults", "tuned", "low latency", "exactly once"]

_TIMEOUT_S: Final = 900
_POLL_S: Final = 0.5
# Offsets that have not grown for so long have reached their end, or the run is broken.
_QUIET_S: Final = 5.0

_JAVA: Final = (
    "-server",
    "-Xmx512m",  # enough for every run
    *kafka_dist.JVM,
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
)
_WORKER: Final = {
    "key.converter": "org.apache.kafka.connect.storage.StringConverter",
    "value.converter": "org.apache.kafka.connect.storage.StringConverter",
    # The default looks through every jar: 5 s at the start and 300 MB.
    "plugin.discovery": "service_load",
}
_CONNECTOR: Final = {
    "connector.class": "io.debezium.connector.mysql.MySqlConnector",
    "tasks.max": "1",
    "database.hostname": "127.0.0.1",
    "database.user": "root",
    "database.password": "",
    "database.ssl.mode": "required",  # as ours
    "snapshot.mode": "no_data",
    "include.schema.changes": "false",
    "tombstones.on.delete": "false",
    "table.include.list": "shop.outbox_event",
    "schema.history.internal": "io.debezium.storage.file.history.FileSchemaHistory",
    "schema.history.internal.store.only.captured.tables.ddl": "true",
    "transforms": "outbox",
    "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
    "transforms.outbox.route.by.field": "aggregate_type",
    "transforms.outbox.table.field.event.id": "event_id",
    "transforms.outbox.table.field.event.key": "aggregate_id",
    "transforms.outbox.table.field.event.type": "event_type",
    "transforms.outbox.table.field.event.payload": "payload",
    "transforms.outbox.table.fields.additional.placement": "event_type:header:event_type",
}
_TUNED_WORKER: Final = {
    "producer.linger.ms": "5",
    "producer.batch.size": "262144",
    "producer.buffer.memory": "67108864",
    "producer.compression.type": "lz4",
    "producer.acks": "all",
    "producer.enable.idempotence": "true",
    "producer.max.in.flight.requests.per.connection": "5",
}
_TUNED_CONNECTOR: Final = {
    "max.batch.size": "8192",
    "max.queue.size": "32768",
    "max.queue.size.in.bytes": "67108864",
    "poll.interval.ms": "10",
}
_QUICK_WORKER: Final = {"producer.linger.ms": "0"}
_QUICK_CONNECTOR: Final = {"poll.interval.ms": "1"}

_FIRST_ROW: Final = (
    "INSERT INTO outbox_event (event_id, aggregate_type, aggregate_id, event_type, payload)"
    " VALUES (UUID(), 'first', 'first', 'FIRST', '{}')"
)


@dataclass
class Debezium:
    """A connector by name; its offsets stay where Connect keeps them between two runs."""

    place: Place
    name: str
    variant: Variant
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def topic(self) -> str:
        """Where the orders go."""
        return f"{self.name}.event.order"

    @property
    def pid(self) -> int:
        """Of the running worker."""
        assert self._process is not None
        return self._process.pid

    def prepare(self) -> None:
        """Make the topics, start the connector, let it carry one row, and stop it, so that its
        offsets lie near the present end of the binlog. The row goes to a topic of its own."""
        self.place.create_topic(self.topic)
        self.place.create_topic(self._first_topic)
        with self.running():
            if self._distributed:
                self._configure()
            self._wait_running()
            deadline = time.monotonic() + 120
            while self.place.records(self._first_topic) == 0:
                self._check(deadline)
                # A row that is written before the connector has noted its position is not carried.
                self.place.sql(_FIRST_ROW)
                time.sleep(1)

    def drain(self, rows: int) -> Drain:
        """Carry a backlog of so many rows. Raises ``RuntimeError`` unless each of them, and
        nothing else, is in the topic afterwards."""
        start_ms = time.time() * 1000
        database = cpu_seconds(self.place.mysql.pid)
        with self.running():
            process, database_end = self._watch(rows, start_ms)
        found = self.place.arrivals(self.topic, rows)
        wall = (found.last_ms - start_ms) / 1000
        process = Process(start_ms, wall, process.cpu_seconds, process.peak_rss)
        return Drain.of(rows, found, process, database_end - database)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run for as long as the body; it ends by SIGTERM, so that its offsets are kept."""
        self._process = self._start()
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            finally:
                self._process.kill()
                self._process.wait(10)

    def _watch(self, rows: int, start_ms: float) -> tuple[Process, float]:
        """Wait until the topic grows no more; what the process had taken when it last grew, and
        the CPU time of the database then."""
        deadline = time.monotonic() + _TIMEOUT_S
        end, grown = 0, time.monotonic()
        cpu = database = 0.0
        while end < rows or time.monotonic() - grown < _QUIET_S:
            self._check(deadline)
            now = self.place.records(self.topic)
            if now != end:
                end, grown = now, time.monotonic()
                cpu, database = cpu_seconds(self.pid), cpu_seconds(self.place.mysql.pid)
            time.sleep(_POLL_S)
        return Process(start_ms, 0.0, cpu, peak_rss(self.pid)), database

    def _check(self, deadline: float) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"Connect ended:\n{self._log.read_text()[-3000:]}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"Debezium is not done in time:\n{self._log.read_text()[-3000:]}")

    @property
    def _first_topic(self) -> str:
        return f"{self.name}.event.first"

    @property
    def _distributed(self) -> bool:
        return self.variant == "exactly once"

    @property
    def _home(self) -> Path:
        home = self.place.home / self.name
        home.mkdir(exist_ok=True)
        return home

    @property
    def _rest(self) -> int:
        """The port of the worker's own HTTP interface."""
        return ports.kept(self._home)

    @property
    def _log(self) -> Path:
        return self._home / "connect.log"

    def _connector(self) -> dict[str, str]:
        return {
            **_CONNECTOR,
            "name": self.name,
            "database.port": str(self.place.mysql.port),
            "database.server.id": str(100_000 + self._rest),
            "topic.prefix": self.name,
            "schema.history.internal.file.filename": str(self._home / "history"),
            "transforms.outbox.route.topic.replacement": f"{self.name}.event.${{routedByValue}}",
            **(_TUNED_CONNECTOR if self.variant != "defaults" else {}),
            **(_QUICK_CONNECTOR if self.variant == "low latency" else {}),
            **({"exactly.once.support": "required"} if self._distributed else {}),
        }

    def _worker(self) -> dict[str, str]:
        made = {
            **_WORKER,
            "bootstrap.servers": self.place.kafka.bootstrap,
            "listeners": f"http://127.0.0.1:{self._rest}",
            **(_TUNED_WORKER if self.variant != "defaults" else {}),
            **(_QUICK_WORKER if self.variant == "low latency" else {}),
        }
        if not self._distributed:
            return {**made, "offset.storage.file.filename": str(self._home / "offsets")}
        stores = {
            f"{what}.storage.{key}": value
            for what in ("offset", "config", "status")
            for key, value in (("topic", f"{self.name}.{what}"), ("replication.factor", "1"))
        }
        return {
            **made,
            **stores,
            "group.id": self.name,
            "exactly.once.source.support": "enabled",
        }

    def _start(self) -> subprocess.Popen[bytes]:
        worker = _properties(self._home / "worker.properties", self._worker())
        arguments = [worker]
        if not self._distributed:
            arguments.append(_properties(self._home / "connector.properties", self._connector()))
        kind = "Distributed" if self._distributed else "Standalone"
        main = f"org.apache.kafka.connect.cli.Connect{kind}"
        jars = maven.jars(dist.fetch())
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [kafka_dist.java(), *_JAVA, "-cp", jars, main, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _configure(self) -> None:
        """Give a distributed worker its connector; it keeps it from then on."""
        deadline = time.monotonic() + 90
        while True:
            with contextlib.suppress(OSError):
                self._ask("PUT", f"/connectors/{self.name}/config", self._connector())
                return
            self._check(deadline)
            time.sleep(0.5)

    def _wait_running(self) -> None:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                status = self._ask("GET", f"/connectors/{self.name}/status")
                states = {task["state"] for task in status["tasks"]}
                if "FAILED" in states:
                    raise RuntimeError(f"Debezium failed: {json.dumps(status)[:3000]}")
                if states == {"RUNNING"}:
                    return
            self._check(deadline)
            time.sleep(0.2)

    def _ask(self, method: str, path: str, body: Mapping[str, str] | None = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._rest}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


def _properties(file: Path, values: Mapping[str, str]) -> str:
    file.write_text("".join(f"{key}={value}\n" for key, value in values.items()))
    return str(file)
