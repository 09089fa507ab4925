"""One measured process that reads a range of the binlog and does nothing with the rows.

``python -m benchmarks.reader JOB`` with a ``Job`` as JSON; prints a ``Reading`` as JSON. A process
of its own for every reading: its CPU time and its memory are the reader's and nothing else's.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Reader = Literal["ours", "ours-python", "stock", "stock-tuned"]
"""``ours-python``: the same sources where they are not compiled. ``stock``: the stock library as
its manual shows it, told to give inserts of this table only. ``stock-tuned``: at its fastest."""


@dataclass(frozen=True)
class Job:
    """What to read: from ``start`` on until ``rows`` rows of the outbox have come."""

    reader: Reader
    url: str
    start: Mapping[str, Any]
    """A position in the form a checkpoint keeps it."""
    rows: int


@dataclass(frozen=True)
class Reading:
    """What it took, from the first batch of rows to the last."""

    count: int
    """Rows; or events, where the caller knows how many there were."""
    seconds: float
    cpu_seconds: float
    peak_rss: int
    """Bytes."""
    decoder: str
    """``compiled`` or ``python``; of the stock library its version."""

    @property
    def rate(self) -> float:
        """What was counted, per second."""
        return self.count / self.seconds

    @property
    def cpu_rate(self) -> float:
        """The same per second of the process's own CPU time, which other processes hardly
        disturb."""
        return self.count / self.cpu_seconds


def read(job: Job) -> Reading:
    """Run ``job`` in a process of its own. Raises ``RuntimeError`` with its last words."""
    plain = {"CDC_RELAY_PURE": "1"} if job.reader == "ours-python" else {}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.reader", json.dumps(asdict(job))],
        env={**os.environ, **plain},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the {job.reader} reader failed:\n{done.stderr[-2000:]}")
    return Reading(**json.loads(done.stdout))


def active_decoder() -> str:
    """Whether ours runs ``compiled`` or as plain ``python`` here."""
    from cdc_relay.binlog import compiled

    return "compiled" if compiled() else "python"


def peak_rss(pid: int | str = "self") -> int:
    """The largest resident size of a living process so far, in bytes; 0 when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _ours(job: Job) -> tuple[str, Iterator[int]]:
    from cdc_relay.cli.start import binlog_source
    from cdc_relay.config import load
    from cdc_relay.database import describe_table, engine
    from cdc_relay.position import Position
    from cdc_relay.store import Store
    from cdc_relay.telemetry import configure_logging

    settings = load(environ={}, flags={"database_url": job.url, "log_level": "warning"})
    configure_logging(settings)
    pool = engine(settings)
    with pool.connect() as connection:
        shape = describe_table(connection, settings)
    source = binlog_source(settings, shape, Store(pool, shape, max_tries=settings.max_tries))
    start = Position.from_json(job.start)
    return active_decoder(), (len(batch.rows) for batch in source.batches(start))


def _stock(job: Job) -> tuple[str, Iterator[int]]:
    from importlib.metadata import version

    from pymysqlreplication.binlogstream import BinLogStreamReader
    from pymysqlreplication.row_event import WriteRowsEvent
    from sqlalchemy.engine import make_url

    from cdc_relay.outbox import DEFAULT_TABLE

    url = make_url(job.url)
    # A table map is then read once, not before every row, and nothing is logged.
    tuned = {"freeze_schema": True, "enable_logging": False} if job.reader == "stock-tuned" else {}

    def counts() -> Iterator[int]:
        reader = BinLogStreamReader(  # type: ignore[no-untyped-call]
            {"host": url.host, "port": url.port, "user": url.username, "passwd": ""},
            server_id=4_000_000_001,
            log_file=job.start["file"],
            log_pos=job.start["offset"],
            resume_stream=True,
            only_events=[WriteRowsEvent],
            only_schemas=[url.database],
            only_tables=[DEFAULT_TABLE],
            **tuned,
        )
        with closing(reader):
            for event in reader:
                yield len(event.rows)  # decodes them

    return version("mysql-replication"), counts()


def _main(job: Job) -> Reading:
    decoder, counts = _ours(job) if job.reader.startswith("ours") else _stock(job)
    rows = first = next(counts)  # connected, and every cache warm
    gc.collect()
    gc.freeze()  # as cdc-relay start does; for all readers alike
    cpu = _cpu_seconds()
    start = time.perf_counter()
    for count in counts:
        rows += count
        if rows >= job.rows:
            break
    seconds = time.perf_counter() - start
    cpu = _cpu_seconds() - cpu
    if rows != job.rows:
        raise RuntimeError(f"{rows} rows where {job.rows} were written")
    return Reading(rows - first, seconds, cpu, peak_rss(), decoder)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    print(json.dumps(asdict(_main(Job(**json.loads(sys.argv[1]))))))
