"""Everything at one table at once: passes that share the work, a relay, a purge, services."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc_relay.config import load
from cdc_relay.errors import SourceError
from dev.kafka import Kafka
from fallback import run
from fallback.turns import Turns
from tests.support.harness import CHECKOUT, Harness, Process
from tests.support.load import ACCOUNTS
from tests.support.sql import Database

_SERVICES = 8


@pytest.fixture
def shop(database: Database, quick_kafka: Kafka, tmp_path: Path) -> Iterator[Harness]:
    settings = {"SESSION_TIMEOUT": "2s", "TRANSACTION_TIMEOUT": "5s"}
    with Harness(database, quick_kafka.bootstrap, tmp_path, settings) as made:
        made.create_topic(partitions=6)
        yield made


def keys(service: int) -> list[str]:
    """Six services share ten aggregates; two write, unseen by the binlog, five of their own."""
    prefix, count = ("seen", 10) if service < _SERVICES - 2 else ("hidden", 5)
    return [f"{prefix}{number}" for number in range(count)]


@contextlib.contextmanager
def services(shop: Harness, seconds: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Eight processes that insert for so long."""
    shop.database.sql(ACCOUNTS)
    for key in {*keys(0), *keys(_SERVICES - 1)}:
        shop.database.sql("INSERT INTO account VALUES (%s, 0)", (key,))
    command = [sys.executable, "-m", "tests.support.strict", shop.table, str(seconds)]
    started = [
        subprocess.Popen(
            [*command, str(number), str(int("hidden0" in keys(number))), *keys(number)],
            cwd=CHECKOUT,
            env=shop.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(_SERVICES)
    ]
    try:
        yield started
    finally:
        for one in started:
            one.kill()
            one.communicate(timeout=60)


def loop(shop: Harness) -> Process:
    return shop.spawn("compensate", "--older-than", "0s", "--loop", "--json")


def filled(shop: Harness, rows: int) -> None:
    """A backlog of 500 aggregates, numbered in each."""
    depth = "max_recursive_iterations" if shop.database.is_mariadb else "cte_max_recursion_depth"
    shop.database.sql(f"SET SESSION {depth} = 1000000")
    shop.database.sql(
        "INSERT INTO outbox_event (event_id, aggregate_type, aggregate_id, event_type, payload)"
        " WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n"
        f" WHERE i < {rows - 1}) SELECT UUID(), 'order', CONCAT('k', i % 500), 'T',"
        " JSON_OBJECT('n', i DIV 500) FROM n"
    )


def further(shop: Harness, done: int) -> bool:
    return shop.count(1) > done


def by_key(shop: Harness) -> dict[str, list[int]]:
    """What a read_committed consumer sees, repetitions included."""
    found: dict[str, list[int]] = {}
    for message in shop.messages():
        found.setdefault(message.key, []).append(message.json["n"])
    return found


def test_two_passes_a_relay_a_purge_and_eight_services(shop: Harness) -> None:
    """No error for a service; every event once, in order; nothing left. The relay is killed in the
    middle and comes back, so the passes see it alive and dead."""
    seconds = 30 if shop.database.is_mariadb else 60
    relay = shop.relay()
    shop.until(shop.checkpoint)
    with services(shop, seconds) as writing:
        passes = [loop(shop) for _ in range(2)]
        purged = 0
        begun = time.monotonic()
        while any(one.poll() is None for one in writing):
            purge = shop.run("purge", "--older-than", "1s", "--batch", "200", "--json")
            assert purge.wait() == 0, purge.text()
            purged += json.loads(purge.stdout)["sent"]
            if relay.running and time.monotonic() - begun > seconds / 3:
                relay.kill()
            elif not relay.running and time.monotonic() - begun > seconds / 2:
                relay = shop.relay()
                begun = float("inf")
            assert all(one.running for one in passes), [one.text() for one in passes]
        said = [one.communicate(timeout=60) for one in writing]
        assert [one.returncode for one in writing] == [0] * _SERVICES, said
    shop.wait_all_sent(150)
    summaries = []
    for one in passes:
        assert one.terminate() == 0, one.text()
        summaries.append(json.loads(one.stdout))
    assert relay.terminate() == 0, relay.text()
    about = (summaries, said, purged)
    assert shop.database.sql("SELECT COUNT(*) FROM outbox_event WHERE status <> 1") == ((0,),)
    expected = {key: list(range(1, n + 1)) for key, n in shop.database.sql("SELECT * FROM account")}
    assert by_key(shop) == {key: numbers for key, numbers in expected.items() if numbers}, about
    assert all(one["sent"] > 0 for one in summaries), about
    assert purged > 0


def test_two_passes_share_a_backlog(shop: Harness) -> None:
    filled(shop, 80_000)
    both = [
        shop.spawn("compensate", "--older-than", "0s", "--json", "--batch", "100") for _ in range(2)
    ]
    assert [one.wait(120) for one in both] == [0, 0], [one.text() for one in both]
    sent = [json.loads(one.stdout)["sent"] for one in both]
    assert sum(sent) == 80_000
    assert min(sent) > 0
    assert shop.count(1) == 80_000
    assert by_key(shop) == {f"k{number}": list(range(160)) for number in range(500)}


def test_a_pass_that_stands_still_blocks_nobody_for_longer_than_its_lease(shop: Harness) -> None:
    """And when it goes on, it sends nothing that another one has sent."""
    filled(shop, 40_000)
    paused = shop.spawn("compensate", "--older-than", "0s", "--json", "--batch", "100")
    shop.until(lambda: shop.count(1) > 0)
    paused.signal(signal.SIGSTOP)
    try:
        other = shop.spawn("compensate", "--older-than", "0s", "--json")
        assert other.wait(90) == 0, other.text()
        assert json.loads(other.stdout)["sent"] > 0, other.text()
        assert shop.count(0) == 0
    finally:
        paused.signal(signal.SIGCONT)
    assert paused.wait(120) == 0, paused.text()
    assert by_key(shop) == {f"k{number}": list(range(80)) for number in range(500)}


def test_of_three_passes_two_are_killed(shop: Harness) -> None:
    filled(shop, 40_000)
    passes = []
    for number in range(3):
        passes.append(shop.spawn("compensate", "--older-than", "0s", "--json", "--batch", "100"))
        done = shop.count(1)
        if number:
            shop.until(functools.partial(further, shop, done))
            passes[number - 1].kill()
    assert passes[-1].wait(120) == 0, passes[-1].text()
    assert shop.count(1) == 40_000
    assert by_key(shop) == {f"k{number}": list(range(80)) for number in range(500)}


def test_without_named_locks_the_fence_alone_keeps_passes_apart(
    shop: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Percona XtraDB Cluster in its strict mode: here one pass is denied its locks, and has
    no turn beside one that has."""

    def denied(*_: object) -> bool:
        raise SourceError("use of GET_LOCK is prohibited")

    monkeypatch.setattr(Turns, "_lock", denied)
    filled(shop, 40_000)
    other = shop.spawn("compensate", "--older-than", "0s", "--json", "--batch", "100")
    shop.until(functools.partial(further, shop, 0))
    found = run(load(environ=shop.environment(OLDER_THAN="0s")))
    assert (found.exit_code, found.error) == (0, None)
    assert other.wait(120) == 0, other.text()
    assert found.sent > 0
    assert shop.count(1) == 40_000
    assert by_key(shop) == {f"k{number}": list(range(80)) for number in range(500)}
