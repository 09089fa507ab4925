"""The demo is the proof that users run themselves, so it has to prove something every time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO = [sys.executable, "-m", "examples.shop.demo", "--servers", "environment"]


@pytest.fixture
def environment(mysql_url: str, kafka: str) -> dict[str, str]:
    """The demo's environment, with a mark by which all of its processes are known."""
    return os.environ | {
        "CDC_RELAY_DATABASE_URL": mysql_url,
        "CDC_RELAY_KAFKA_BOOTSTRAP": kafka,
        "DEMO_MARK": uuid.uuid4().hex,
    }


@pytest.fixture
def demo(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*DEMO, "--orders", "50000"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        yield process
        process.kill()


def _processes(mark: str) -> list[str]:
    """Return the command lines of all living processes whose environment has the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"DEMO_MARK={mark}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended, or is another user's
    return found


def test_outbox_loses_nothing_where_commit_then_send_does(
    environment: dict[str, str], tmp_path: Path
) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [*DEMO, "--orders", "2000", "--kills", "4", "--json", str(figures)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outbox, naive = (json.loads(figures.read_text())[shop] for shop in ("outbox", "naive"))
    assert (outbox["committed"], outbox["arrived"]) == (2000, 2000)
    assert (outbox["lost"], outbox["duplicates"]) == (0, 0)
    assert (outbox["invented"], outbox["out_of_order"]) == (0, 0)
    assert naive["committed"] == 2000
    assert naive["lost"] > 0
    assert naive["arrived"] == 2000 - naive["lost"]
    assert outbox["calm"]["p50_ms"] > 0
    for row in ("orders committed", "events arrived", "lost", "duplicates", "latency p99"):
        assert row in done.stdout
    assert not _processes(environment["DEMO_MARK"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_no_process_behind(
    demo: subprocess.Popen[str], environment: dict[str, str], number: signal.Signals
) -> None:
    assert demo.stdout is not None
    said = []
    for line in demo.stdout:
        said.append(line)
        if "at work, flat out" in line:
            break
    else:
        pytest.fail("the demo ended by itself:\n" + "".join(said))
    assert len(_processes(environment["DEMO_MARK"])) >= 12  # demo, relay, consumers, clerks
    demo.send_signal(number)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130, output
    deadline = time.monotonic() + 10
    while _processes(environment["DEMO_MARK"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _processes(environment["DEMO_MARK"])
