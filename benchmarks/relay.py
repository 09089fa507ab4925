"""One measured run of the whole relay: ``cdc-relay start --until-current`` as a process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.place import Place
from benchmarks.reader import peak_rss

_TIMEOUT_S: Final = 900
_POLL_S: Final = 0.02


@dataclass(frozen=True)
class Relay:
    """A relay by name; its checkpoints stay in Kafka between two runs."""

    place: Place
    name: str
    delivery: str
    mark: str

    @property
    def topic(self) -> str:
        """Where the orders go."""
        return f"{self.name}.event.order"

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
        try:
            yield
        finally:
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
            "HTTP": "off",
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


@dataclass(frozen=True)
class Process:
    """What the run of a process took, start and end of the interpreter included."""

    start_ms: float
    """Milliseconds since 1970."""
    wall: float
    cpu_seconds: float
    peak_rss: int
    """Bytes, looked at 50 times a second."""


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
