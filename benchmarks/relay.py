"""One measured run of the whole relay: ``cdc-relay start --until-current`` as a process."""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.place import PARTITIONS, Arrivals, Place
from benchmarks.reader import peak_rss

# The marks come last: the others would read them.
MODES: Final = (("at_least_once", "none"), ("exactly_once", "none"), ("exactly_once", "update"))

_TIMEOUT_S: Final = 900
_POLL_S: Final = 0.02
# What a Java peer reads while its compiler still works.
_COLD_ROWS: Final = 100_000

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Relay:
    """A relay by name; its checkpoints stay in Kafka between two runs."""

    place: Place
    name: str
    delivery: str
    mark: str
    mark_row_image: str = "server"

    _running: list[int] = field(default_factory=list, init=False, compare=False)

    @property
    def topic(self) -> str:
        """Where the orders go."""
        return f"{self.name}.event.order"

    @property
    def pid(self) -> int:
        """Of the process that is ``running``."""
        return self._running[-1]

    def prepare(self, partitions: int = PARTITIONS) -> None:
        """Make the topic, and a checkpoint at the present end of the binlog."""
        self.place.create_topic(self.topic, partitions)
        self.run()

    def drain(self, rows: int) -> Drain:
        """Carry a backlog of so many rows. Raises ``RuntimeError`` unless each of them, and
        nothing else, is in the topic afterwards."""
        database = cpu_seconds(self.place.mysql.pid)
        process = self.run()
        database = cpu_seconds(self.place.mysql.pid) - database
        found = self.place.arrivals(self.topic, rows)
        return Drain.of(rows, found, process, database)

    def run(self) -> Process:
        """Run until everything that is committed now is sent, marked and checkpointed."""
        cpu = _children_cpu()
        start_ms = time.time() * 1000
        process = self._start("--until-current")
        peak = 0
        try:
            while process.poll() is None:
                peak = max(peak, peak_rss(process.pid))
                if time.time() * 1000 - start_ms > _TIMEOUT_S * 1000:
                    raise RuntimeError(f"the relay is not done after {_TIMEOUT_S} s")
                time.sleep(_POLL_S)
        finally:
            process.kill()
        wall = time.time() - start_ms / 1000
        if process.returncode != 0:
            raise RuntimeError(f"the relay failed:\n{self._log.read_text()[-2000:]}")
        return Process(start_ms, wall, _children_cpu() - cpu, peak)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run for as long as the body."""
        process = self._start()
        self._running.append(process.pid)
        try:
            yield
        finally:
            self._running.remove(process.pid)
            process.terminate()
            try:
                process.wait(40)
            finally:
                process.kill()

    @property
    def _log(self) -> Path:
        return self.place.home / f"{self.name}.log"

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        ours = {
            "DATABASE_URL": self.place.url,
            "KAFKA_BOOTSTRAP": self.place.kafka.bootstrap,
            "NAME": self.name,
            "TOPIC": f"{self.name}.event.{{aggregate_type}}",
            "DELIVERY": self.delivery,
            "MARK": self.mark,
            "MARK_ROW_IMAGE": self.mark_row_image,
            "HTTP": "127.0.0.1:0",  # on, as it is by default
            "LOG_FORMAT": "json",
        }
        clean = {k: v for k, v in os.environ.items() if not k.startswith("CDC_RELAY_")}
        with self._log.open("ab") as stderr:
            return subprocess.Popen(
                [sys.executable, "-m", "cdc_relay", "start", *arguments],
                env={**clean, **{f"CDC_RELAY_{key}": value for key, value in ours.items()}},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )


def ready(
    place: Place,
    delivery: str,
    mark: str,
    *,
    mark_row_image: str = "server",
    partitions: int = PARTITIONS,
) -> Relay:
    """A new relay whose checkpoint lies at the present end of the binlog, its topic empty."""
    one = Relay(place, f"bench-{next(_numbers)}", delivery, mark, mark_row_image)
    one.prepare(partitions)
    return one


@dataclass(frozen=True)
class Drain:
    """One backlog carried to Kafka."""

    rows: int
    seconds: float
    """From the first append to the last."""
    warm: float
    """Rows per second after the first 100,000, or after the first half where there are fewer."""
    first: float
    """Seconds from the start of the process to the first append."""
    wall: float
    """Seconds from the start of the process to its end, or to the last append where it goes on."""
    cpu_seconds: float
    database_cpu_seconds: float
    peak_rss: int
    """Bytes."""

    @classmethod
    def of(cls, rows: int, found: Arrivals, process: Process, database: float) -> Drain:
        """Raises ``RuntimeError`` where what arrived is not what was committed, each once."""
        if (found.records, found.distinct) != (rows, rows):
            raise RuntimeError(
                f"{rows} rows were committed; {found.records} records of {found.distinct} arrived"
            )
        return cls(
            rows,
            max(found.last_ms - found.first_ms, 1) / 1000,
            found.rate_after(min(_COLD_ROWS, rows // 2)),
            (found.first_ms - process.start_ms) / 1000,
            process.wall,
            process.cpu_seconds,
            database,
            process.peak_rss,
        )

    @property
    def rate(self) -> float:
        return self.rows / self.seconds

    @property
    def cpu_per_million(self) -> float:
        return self.cpu_seconds / self.rows * 1e6

    @property
    def database_cpu_per_million(self) -> float:
        """Of the whole server: reading the log for us, and the marks."""
        return self.database_cpu_seconds / self.rows * 1e6


@dataclass(frozen=True)
class Process:
    """What the run of a process took, start and end of the interpreter included."""

    start_ms: float
    """Milliseconds since 1970."""
    wall: float
    cpu_seconds: float
    peak_rss: int
    """Bytes, looked at 50 times a second."""


def cpu_seconds(pid: int | None) -> float:
    """CPU time of a living process so far, all its threads; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
