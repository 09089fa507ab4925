"""``purge`` and ``archive``: only what was sent long ago goes, and nobody waits for it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pymysql
import pytest
from sqlalchemy.engine import make_url

from cdc_relay.cli import main
from cdc_relay.config import load
from cdc_relay.database import connected, describe_table, engine
from cdc_relay.housekeeping import OldRows, Partitions, rows
from dev.mysql import MySQL
from tests.support.harness import Harness
from tests.support.sql import INSERT, Database, row

Capture = pytest.CaptureFixture[str]
CHECKOUT = Path(__file__).resolve().parents[2]

FILL = (
    "INSERT INTO {table} (event_id, aggregate_type, aggregate_id, event_type, payload, status,"
    " created_at, updated_at, sent_at)"
    " SELECT UUID(), 'order', CONCAT('a', n % 1000), 'CREATED', '{{}}', {status},"
    " UTC_TIMESTAMP(6) - INTERVAL {age} HOUR - INTERVAL n SECOND,"
    " UTC_TIMESTAMP(6) - INTERVAL {since} HOUR,"
    " IF({status} = 1, UTC_TIMESTAMP(6) - INTERVAL {since} HOUR, NULL)"
    " FROM ({numbers}) AS numbers WHERE n < {rows}"
)
DIGITS = "(" + " UNION ALL ".join(f"SELECT {d} AS d" for d in range(10)) + ")"


def fill(
    database: Database,
    rows: int,
    *,
    status: int = 1,
    age: int = 240,
    since: int | None = None,
    table: str = "outbox_event",
) -> None:
    """Rows created ``age`` hours ago, in their status since ``since`` hours."""
    since = age if since is None else since
    places = range(len(str(rows)))
    total = " + ".join(f"{10**place} * d{place}.d" for place in places)
    tables = ", ".join(f"{DIGITS} d{place}" for place in places)
    numbers = f"SELECT {total} AS n FROM {tables}"
    values = {"rows": rows, "status": status, "age": age, "since": since, "table": table}
    database.sql(FILL.format(numbers=numbers, **values))


def statuses(database: Database, table: str = "outbox_event") -> dict[int, int]:
    found = database.sql(f"SELECT status, COUNT(*) FROM {table} GROUP BY status")
    return {int(status): int(count) for status, count in found}


def run(database: Database, capsys: Capture, *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*arguments, "--database-url", database.text, "--json"]) == 0
    summary: dict[str, Any] = json.loads(capsys.readouterr().out)
    return summary


@pytest.fixture
def outbox(database: Database) -> Database:
    database.create_outbox()
    return database


@contextmanager
def busy(outbox: Database) -> Iterator[None]:
    """Eight writers insert rows, one transaction each, until the body ends; none may fail."""
    done = threading.Event()

    def write(number: int) -> int:
        count = 0
        with closing(outbox.connect()) as connection, connection.cursor() as cursor:
            cursor.execute("SET innodb_lock_wait_timeout = 2")
            while not done.wait(0.005):
                cursor.execute(INSERT.format(table="outbox_event"), row(f"new-{number}", {}))
                connection.commit()
                count += 1
        return count

    with ThreadPoolExecutor(8) as pool:
        writers = [pool.submit(write, number) for number in range(8)]
        try:
            yield
        finally:
            done.set()
        written = sum(writer.result(30) for writer in writers)
    assert statuses(outbox)[0] == written > 0


@pytest.mark.parametrize("command", ["purge", "archive"])
@pytest.mark.parametrize("dead", [False, True])
def test_rows_of_every_status_and_age(
    outbox: Database, capsys: Capture, command: str, dead: bool
) -> None:
    for status in (0, 1, 2, 3):  # 3: claimed, in the table of somebody else's
        fill(outbox, 20, status=status, age=240)
        fill(outbox, 30, status=status, age=100)
    # Old, but sent (or given up) only lately.
    fill(outbox, 5, status=1, age=240, since=100)
    fill(outbox, 7, status=2, age=240, since=100)
    summary = run(outbox, capsys, command, "--batch", "8", *(["--dead"] if dead else []))
    assert statuses(outbox) == {0: 50, 1: 35, 2: 37 if dead else 57, 3: 50}
    assert (summary["sent"], summary["dead"]) == (20, 20 if dead else 0)
    assert summary["left"] == {"pending": 20, "dead": 7 if dead else 27, "3": 20}
    assert summary["batches"] == (6 if dead else 3)
    assert not summary["stopped"]
    if command == "archive":
        assert statuses(outbox, "outbox_archive") == ({1: 20, 2: 20} if dead else {1: 20})
        assert sum(summary["days"].values()) == 20 + summary["dead"]
    again = run(outbox, capsys, command, *(["--dead"] if dead else []))
    assert (again["sent"], again["dead"], again["batches"]) == (0, 0, 0)


@pytest.mark.parametrize("command", ["purge", "archive"])
def test_the_human_summary(outbox: Database, capsys: Capture, command: str) -> None:
    fill(outbox, 12, status=1)
    fill(outbox, 3, status=0)
    assert main([command, "--database-url", outbox.text]) == 0
    out = capsys.readouterr().out
    assert ("deleted 12 sent and 0 dead rows" if command == "purge" else "moved 12 sent") in out
    assert "of that age stay 3 pending, 0 dead" in out


@pytest.mark.parametrize("command", ["purge", "archive"])
def test_a_large_backlog_two_at_once_beside_writers(outbox: Database, command: str) -> None:
    rows = 200_000 if command == "purge" else 30_000
    # Before the writers: MariaDB locks the table's counter for as long as this takes.
    fill(outbox, rows)
    with busy(outbox), ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(_process, outbox, command) for _ in range(2)]
        summaries = [one.result(240) for one in runs]
    assert sum(summary["sent"] for summary in summaries) == rows
    # Neither stood in the other's way.
    assert all(summary["sent"] > rows / 10 for summary in summaries)
    assert statuses(outbox).get(1, 0) == 0
    if command == "archive":
        assert statuses(outbox, "outbox_archive") == {1: rows}


def _process(database: Database, *arguments: str) -> dict[str, Any]:
    with _spawn(database, *arguments) as process:
        out, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    summary: dict[str, Any] = json.loads(out)
    return summary


def _spawn(database: Database, *arguments: str, stderr: Any = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cdc_relay", *arguments, "--database-url", database.text]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*command, "--json"], cwd=CHECKOUT, stdout=pipe, stderr=stderr, text=True
    )


def _until_some_are_gone(database: Database, rows: int) -> None:
    _until(lambda: statuses(database)[1] < rows)


def test_an_archive_that_is_killed_goes_on_where_it_was(outbox: Database) -> None:
    rows = 20_000
    fill(outbox, rows)
    before = _events(outbox, "outbox_event")
    for _ in range(3):
        there = statuses(outbox)[1]
        with _spawn(outbox, "archive", "--batch", "300") as process:
            _until_some_are_gone(outbox, there)
            process.kill()
        assert statuses(outbox)[1] > 0, "too quick for this test"
    summary = _process(outbox, "archive")
    assert 0 < summary["sent"] < rows
    assert statuses(outbox) == {}
    assert _events(outbox, "outbox_archive") == before


def _events(database: Database, table: str) -> Sequence[Any]:
    columns = "id, event_id, aggregate_type, aggregate_id, event_type, payload, headers, status"
    columns += ", retry_count, next_retry_time, last_error, created_at, updated_at, sent_at"
    return database.sql(f"SELECT {columns} FROM {table} ORDER BY id")


@pytest.mark.parametrize("command", ["purge", "archive"])
def test_sigterm_ends_it_after_the_batch(outbox: Database, command: str) -> None:
    fill(outbox, 20_000)
    with _spawn(outbox, command, "--batch", "100") as process:
        _until_some_are_gone(outbox, 20_000)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    summary = json.loads(out)
    assert summary["stopped"]
    assert 0 < summary["sent"] == 20_000 - statuses(outbox)[1]


def test_what_becomes_pending_after_the_look_stays(outbox: Database, capsys: Capture) -> None:
    """``dead retry`` while purge --dead waits for the row's lock."""
    fill(outbox, 10, status=2)
    with closing(outbox.connect()) as other, other.cursor() as cursor:
        cursor.execute("UPDATE outbox_event SET status = 0 WHERE id = 3")
        assert run(outbox, capsys, "purge", "--dead")["dead"] == 9
        other.commit()
    assert statuses(outbox) == {0: 1}
    assert run(outbox, capsys, "purge", "--dead")["dead"] == 0
    assert statuses(outbox) == {0: 1}


def test_rows_that_others_hold_are_passed_over(outbox: Database, capsys: Capture) -> None:
    fill(outbox, 50)
    with closing(outbox.connect()) as other, other.cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.execute("SELECT * FROM outbox_event WHERE id < 11 FOR UPDATE")
        assert run(outbox, capsys, "purge", "--batch", "7")["sent"] == 40
    assert run(outbox, capsys, "purge")["sent"] == 10


def test_a_minimal_table_without_the_index(database: Database, capsys: Capture) -> None:
    """No sent_at: the age is that of updated_at, which the mark sets. No index on age: the table
    is walked by its key."""
    database.create_outbox()
    database.sql(
        "ALTER TABLE outbox_event DROP COLUMN sent_at, DROP COLUMN headers, DROP COLUMN last_error,"
        " DROP INDEX idx_status_created"
    )
    insert = (
        "INSERT INTO outbox_event (event_id, aggregate_type, aggregate_id, event_type, payload,"
        " status, created_at, updated_at) VALUES (UUID(), 'order', 'a', 'CREATED', '{}', %s,"
        " UTC_TIMESTAMP(6) - INTERVAL 10 DAY, UTC_TIMESTAMP(6) - INTERVAL %s DAY)"
    )
    for number in range(60):
        database.sql(insert, (number % 3, 9 if number % 2 else 2))
    assert run(database, capsys, "purge", "--batch", "7")["sent"] == 10
    assert statuses(database) == {0: 20, 1: 10, 2: 20}
    assert run(database, capsys, "archive", "--batch", "7", "--older-than", "1d")["sent"] == 10
    assert statuses(database) == {0: 20, 2: 20}
    assert statuses(database, "outbox_archive") == {1: 10}


def test_rows_without_a_date(database: Database, capsys: Capture) -> None:
    database.create_outbox()
    database.sql("ALTER TABLE outbox_event MODIFY created_at DATETIME(6) NULL")
    fill(database, 10)
    fill(database, 10, age=100)
    database.sql("UPDATE outbox_event SET created_at = NULL WHERE id % 2 = 0")
    assert run(database, capsys, "purge", "--batch", "3")["sent"] == 10
    assert statuses(database) == {1: 10}


def test_the_batches_go_by_an_index(outbox: Database) -> None:
    fill(outbox, 3000)
    fill(outbox, 3000, age=1)
    explain = "EXPLAIN" if outbox.is_mariadb else "EXPLAIN FORMAT=TRADITIONAL"
    plan = outbox.sql(
        f"{explain} SELECT id, created_at FROM outbox_event FORCE INDEX (idx_status_created)"
        " WHERE status = 1 AND COALESCE(sent_at, updated_at, created_at) < '2100-01-01'"
        " AND created_at < UTC_TIMESTAMP(6) - INTERVAL 7 DAY AND created_at >= '2020-01-01'"
        " AND (created_at > '2020-01-01' OR id > 5)"
        " ORDER BY created_at, id LIMIT 1000"
    )
    assert "idx_status_created" in plan[0]
    assert "filesort" not in str(plan[0])
    assert "range" in plan[0]


def test_a_batch_locks_no_gap(outbox: Database) -> None:
    """While a batch is open, writers insert and relays mark on both sides of it."""
    fill(outbox, 100)
    fill(outbox, 100, status=0)
    settings = load(environ={}, flags={"database_url": outbox.text})
    pool = engine(settings)
    with connected(pool) as connection:
        shape = describe_table(connection, settings)
    old = OldRows(pool, shape, 7 * 86400)

    def take(connection: Any, where: str, parameters: tuple[object, ...]) -> int:
        taken = old.delete(connection, where, parameters)
        with closing(outbox.connect(autocommit=True)) as other, other.cursor() as cursor:
            cursor.execute("SET innodb_lock_wait_timeout = 1")
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
            cursor.execute(INSERT.format(table="outbox_event"), row("new", {}))
            cursor.execute("UPDATE outbox_event SET status = 1 WHERE status = 0 AND id < 150")
        return taken

    batches = list(old.batches(1000, take))
    assert batches[0].rows == 100
    pool.dispose()


def test_progress_pause_and_lock_waits(outbox: Database, capsys: Capture) -> None:
    """Sessions that wait for row locks make it pause, and do not stop it for good."""
    fill(outbox, 300)
    fill(outbox, 1, status=0, age=1)
    update = "UPDATE outbox_event SET retry_count = 1 WHERE status = 0"

    def wait() -> None:
        with closing(outbox.connect(autocommit=True)) as waiting, waiting.cursor() as inner:
            inner.execute("SET innodb_lock_wait_timeout = 60")
            inner.execute(update)

    with closing(outbox.connect()) as holder, holder.cursor() as cursor:
        cursor.execute(update)
        with ThreadPoolExecutor(5) as pool:
            waits = [pool.submit(wait) for _ in range(5)]
            deadline = time.monotonic() + 20
            status = "SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'"
            while int(outbox.sql(status)[0][1]) < 5:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            summary = run(outbox, capsys, "purge", "--batch", "150")
            holder.rollback()
            for one in waits:
                one.result(30)
    assert summary["sent"] == 300
    assert summary["paused_s"] > 0


def test_a_replica_that_lags_makes_it_wait(mysql_url: str, tmp_path: Path) -> None:
    with MySQL(tmp_path / "replica", die_with_parent=True) as server:
        replica = Database(make_url(server.url()))
        source = Database(make_url(mysql_url))
        [(executed,)] = source.sql("SELECT @@GLOBAL.gtid_executed")
        replica.sql("RESET BINARY LOGS AND GTIDS")
        replica.sql("SET GLOBAL gtid_purged = %s", (executed,))
        replica.sql(
            "CHANGE REPLICATION SOURCE TO SOURCE_HOST = '127.0.0.1', SOURCE_USER = 'root',"
            f" SOURCE_PORT = {source.url.port}, SOURCE_AUTO_POSITION = 1, GET_SOURCE_PUBLIC_KEY = 1"
        )
        replica.sql("START REPLICA")
        with Database.create(mysql_url) as outbox:
            outbox.create_outbox()
            fill(outbox, 3000)
            _until(lambda: _replicated(replica, outbox.name) == 3000)
            replica.sql("STOP REPLICA SQL_THREAD")
            log = tmp_path / "purge.log"
            arguments = ["--batch", "500", "--replicas", f"127.0.0.1:{replica.url.port}"]
            with (
                log.open("w") as stderr,
                _spawn(outbox, "purge", *arguments, stderr=stderr) as process,
            ):
                _until(lambda: "does not run" in log.read_text())
                assert statuses(outbox)[1] == 2500
                replica.sql("START REPLICA SQL_THREAD")
                out, _ = process.communicate(timeout=60)
            assert process.returncode == 0, log.read_text()
            assert json.loads(out)["sent"] == 3000
            assert json.loads(out)["paused_s"] > 0
        replica.close()
        source.close()


def _replicated(replica: Database, schema: str) -> int:
    try:
        return int(replica.sql(f"SELECT COUNT(*) FROM `{schema}`.outbox_event")[0][0])
    except pymysql.err.Error:
        return 0  # not there yet


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "not within a minute"
        time.sleep(0.02)


# --- partitions -----------------------------------------------------------------------------

PARTITIONED = """CREATE TABLE outbox_event (
  id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT,
  event_id VARCHAR(64) NOT NULL, aggregate_type VARCHAR(64) NOT NULL,
  aggregate_id VARCHAR(64) NOT NULL, event_type VARCHAR(128) NOT NULL, payload JSON,
  status TINYINT NOT NULL DEFAULT 0, retry_count INT NOT NULL DEFAULT 0,
  next_retry_time DATETIME(6) NULL,
  created_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
  updated_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), sent_at DATETIME(6) NULL,
  PRIMARY KEY (id, created_at), KEY idx_status_created (status, created_at),
  KEY idx_status_next_retry (status, next_retry_time)
) ENGINE = InnoDB PARTITION BY RANGE COLUMNS (created_at) ({parts})"""


def partitioned(database: Database, ages: Sequence[int], kind: str = "") -> None:
    """A partition up to each of these ages in days (negative: ahead of now), oldest first, and
    one for the rest."""
    parts = []
    for age in ages:
        [(bound,)] = database.sql(f"SELECT UTC_DATE() - INTERVAL {age} DAY")
        parts.append(f"PARTITION `p%{age}` VALUES LESS THAN ('{bound}')")
    parts.append("PARTITION rest VALUES LESS THAN (MAXVALUE)")
    database.sql(PARTITIONED.format(parts=", ".join(parts)))


def names(database: Database) -> list[str]:
    return [
        str(name)
        for (name,) in database.sql(
            "SELECT PARTITION_NAME FROM information_schema.PARTITIONS"
            " WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = 'outbox_event'"
            " ORDER BY PARTITION_ORDINAL_POSITION"
        )
    ]


def test_only_partitions_in_which_nothing_has_to_stay_are_dropped(
    database: Database, capsys: Capture
) -> None:
    # Bounds 60, 50, 40, 30, 20 and 8 days ago, now + 10 and + 20, the rest.
    partitioned(database, [60, 50, 40, 30, 20, 8, -10, -20])
    fill(database, 10, age=24 * 55)  # p50: all sent
    fill(database, 10, age=24 * 45)  # p40: one is pending
    fill(database, 1, status=0, age=24 * 45)
    fill(database, 10, age=24 * 35)  # p30: one is dead
    fill(database, 1, status=2, age=24 * 35)
    fill(database, 10, age=24 * 25)  # p20: one was sent only yesterday
    fill(database, 1, age=24 * 25, since=24)
    fill(database, 10, age=24 * 9)  # p8: all sent
    fill(database, 10, age=24)  # p-10: young
    summary = run(database, capsys, "purge")
    assert names(database) == ["p%40", "p%30", "p%20", "p%-10", "p%-20", "rest"]
    assert [part["name"] for part in summary["partitions"]] == ["p%60", "p%50", "p%8"]
    assert [part["rows"] for part in summary["partitions"]] == [{}, {"sent": 10}, {"sent": 10}]
    assert summary["sent"] == 50
    assert summary["left"] == {"pending": 1, "dead": 1}
    assert statuses(database) == {0: 1, 1: 11, 2: 1}
    # With --dead the partition of the dead row goes as well, and the empty future ones never.
    summary = run(database, capsys, "purge", "--dead")
    assert [part["name"] for part in summary["partitions"]] == ["p%30"]
    assert summary["dead"] == 1
    assert names(database) == ["p%40", "p%20", "p%-10", "p%-20", "rest"]
    assert statuses(database) == {0: 1, 1: 11}


def test_partitions_of_a_table_with_other_column_names(database: Database, capsys: Capture) -> None:
    """Dropped by the columns that are ours; columns of the service's that have our names say
    nothing."""
    partitioned(database, [50, 40, 30, -10])
    fill(database, 10, age=24 * 55)  # p50: all sent
    fill(database, 10, age=24 * 45)  # p40: one is pending
    fill(database, 1, status=0, age=24 * 45)
    fill(database, 10, age=24 * 35)  # p30: one was sent only yesterday
    fill(database, 1, age=24 * 35, since=24)
    fill(database, 10, age=24)
    theirs = {"status": "state", "updated_at": "changed", "event_id": "uid", "sent_at": "gone"}
    for ours, name in theirs.items():
        database.sql(f"ALTER TABLE outbox_event RENAME COLUMN {ours} TO {name}")
    database.sql(
        "ALTER TABLE outbox_event ADD COLUMN status INT NOT NULL DEFAULT 1,"
        " ADD COLUMN sent_at DATETIME NULL DEFAULT '2020-01-01'"
    )
    mapped = ["--columns", ",".join(f"{ours}={name}" for ours, name in theirs.items())]
    summary = run(database, capsys, "purge", *mapped)
    assert [part["name"] for part in summary["partitions"]] == ["p%50"]
    assert names(database) == ["p%40", "p%30", "p%-10", "rest"]
    assert (summary["sent"], summary["left"]) == (30, {"pending": 1, "dead": 0})
    left = "SELECT state, COUNT(*) FROM outbox_event GROUP BY state ORDER BY state"
    assert database.sql(left) == ((0, 1), (1, 11))


def test_the_last_partitions_stay_when_all_is_old(database: Database, capsys: Capture) -> None:
    partitioned(database, [20, -10])
    fill(database, 10, age=24 * 30)
    fill(database, 10, age=24 * 10)
    summary = run(database, capsys, "purge")
    assert [part["name"] for part in summary["partitions"]] == ["p%20"]
    assert summary["sent"] == 20
    assert names(database) == ["p%-10", "rest"]
    fill(database, 1, status=0, age=0)
    assert statuses(database) == {0: 1}


def test_a_row_that_commits_during_the_proof_keeps_its_partition(
    database: Database, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitioned(database, [20])
    fill(database, 10, age=24 * 30)
    fill(database, 10, age=24)
    proof = Partitions._proof

    def then_insert(self: Partitions, name: str, stop: Any) -> Any:
        held = proof(self, name, stop)
        fill(database, 1, status=0, age=24 * 30)
        return held

    monkeypatch.setattr(Partitions, "_proof", then_insert)
    summary = run(database, capsys, "purge")
    assert summary["partitions"] == []
    assert names(database) == ["p%20", "rest"]
    assert summary["sent"] == 10
    assert statuses(database) == {0: 1, 1: 10}


def test_an_open_transaction_holds_up_no_writer_for_long(
    database: Database, capsys: Capture
) -> None:
    partitioned(database, [20])
    fill(database, 10, age=24 * 30)
    fill(database, 10, age=24)
    with closing(database.connect()) as other, other.cursor() as cursor:
        cursor.execute("SELECT COUNT(*) FROM outbox_event")
        summary = run(database, capsys, "purge")
    assert summary["partitions"] == []
    assert summary["sent"] == 10
    assert run(database, capsys, "purge")["partitions"] == [{"name": "p%20", "rows": {}}]


def test_without_the_grants_rows_go_in_batches(database: Database, capsys: Capture) -> None:
    partitioned(database, [20])
    fill(database, 10, age=24 * 30)
    fill(database, 10, age=24)
    with database.user("SELECT, DELETE ON {schema}.*") as user:
        summary = run(user, capsys, "purge")
        user.close()
    assert summary["partitions"] == []
    assert statuses(database) == {1: 10}


def test_partitions_go_under_a_running_relay(
    database: Database, kafka: str, tmp_path: Path, capsys: Capture
) -> None:
    partitioned(database, [20, 10])
    fill(database, 50, age=24 * 30)
    fill(database, 50, age=24 * 15)
    with Harness(database, kafka, tmp_path, create=False) as shop:
        relay = shop.relay()
        before = [_ins(database, f"k{number}") for number in range(20)]
        summary = run(database, capsys, "purge")
        assert [part["name"] for part in summary["partitions"]] == ["p%20", "p%10"]
        after = [_ins(database, f"k{number}") for number in range(20)]
        shop.wait_sent(40)
        assert relay.terminate() == 0
        assert sorted(one.event_id for one in shop.messages()) == sorted(before + after)


def _ins(database: Database, key: str) -> str:
    event_id = str(uuid.uuid4())
    database.sql(
        "INSERT INTO outbox_event (event_id, aggregate_type, aggregate_id, event_type, payload)"
        " VALUES (%s, 'order', %s, 'CREATED', '{}')",
        (event_id, key),
    )
    return event_id


# --- archive --------------------------------------------------------------------------------


def test_the_archive_follows_extra_columns(outbox: Database, capsys: Capture) -> None:
    outbox.sql(
        "ALTER TABLE outbox_event ADD COLUMN tenant VARCHAR(20) CHARACTER SET latin1 NOT NULL"
        " DEFAULT 'x', ADD COLUMN twice INT AS (status * 2) STORED, ADD COLUMN `per%cent` INT NULL"
    )
    fill(outbox, 10)
    outbox.sql("UPDATE outbox_event SET tenant = CONVERT('é' USING latin1), `per%cent` = 5")
    before = outbox.sql("SELECT * FROM outbox_event ORDER BY id")
    assert run(outbox, capsys, "archive")["sent"] == 10
    assert outbox.sql("SELECT * FROM outbox_archive ORDER BY id") == before
    fill(outbox, 10)
    outbox.sql("ALTER TABLE outbox_event ADD COLUMN region VARCHAR(9) NULL, MODIFY tenant CHAR(30)")
    assert main(["archive", "--database-url", outbox.text]) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "ADD COLUMN region varchar(9)" in error
    assert "MODIFY tenant char(30)" in error
    assert statuses(outbox) == {1: 10}
    outbox.sql(error[error.index("ALTER TABLE") :])
    assert run(outbox, capsys, "archive")["sent"] == 10
    assert statuses(outbox, "outbox_archive") == {1: 20}


@pytest.mark.parametrize(
    "columns",
    [
        "event_id VARCHAR(64) NULL UNIQUE, aggregate_id VARCHAR(64) NULL",
        "event_id VARCHAR(255) NOT NULL, aggregate_id VARCHAR(1000) NULL",
        "event_id TEXT NOT NULL, aggregate_id MEDIUMTEXT NOT NULL",
        "event_id TINYTEXT NULL, aggregate_id CHAR(36) NOT NULL",
    ],
)
def test_the_archive_of_an_older_table(database: Database, capsys: Capture, columns: str) -> None:
    """Its columns are not always fit for a key, and may be NULL."""
    database.sql(
        f"CREATE TABLE outbox_event (id INT AUTO_INCREMENT PRIMARY KEY, {columns},"
        " aggregate_type VARCHAR(255), event_type VARCHAR(64), payload TEXT,"
        " status INT NOT NULL DEFAULT 0, retry_count INT, next_retry_time DATETIME NULL,"
        " created_at DATETIME NULL, updated_at DATETIME NULL, sent_at DATETIME NULL)"
    )
    fill(database, 10)
    if "event_id VARCHAR(64) NULL" in columns:
        database.sql("UPDATE outbox_event SET event_id = NULL, aggregate_id = NULL WHERE id < 4")
    before = database.sql("SELECT * FROM outbox_event ORDER BY id")
    assert run(database, capsys, "archive")["sent"] == 10
    assert database.sql("SELECT * FROM outbox_archive ORDER BY id") == before
    # Copied back and sent again, a row replaces its older copy; one without an event id is new.
    database.sql("INSERT INTO outbox_event SELECT * FROM outbox_archive WHERE id > 6")
    assert run(database, capsys, "archive")["sent"] == 4
    assert database.sql("SELECT * FROM outbox_archive ORDER BY id") == before
    database.sql("TRUNCATE TABLE outbox_event")
    fill(database, 10)
    assert run(database, capsys, "archive")["sent"] == 10
    assert statuses(database, "outbox_archive") == {1: 20}


@pytest.mark.parametrize("command", ["purge", "archive"])
def test_rows_that_another_table_refers_to_stay(
    outbox: Database, capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """And hold up no other row."""
    outbox.sql(
        "CREATE TABLE note (at BIGINT UNSIGNED, FOREIGN KEY (at) REFERENCES outbox_event (id))"
    )
    fill(outbox, 100)
    outbox.sql("INSERT INTO note SELECT id FROM outbox_event WHERE id IN (5, 6, 77)")
    summary = run(outbox, capsys, command, "--batch", "40")
    assert (summary["sent"], summary["referenced"]) == (97, 3)
    assert outbox.sql("SELECT id FROM outbox_event ORDER BY id") == ((5,), (6,), (77,))
    if command == "archive":
        assert statuses(outbox, "outbox_archive") == {1: 97}
        assert sum(summary["days"].values()) == 97
    # So many of them that it is no use going on.
    monkeypatch.setattr(rows, "_MOST_REFERENCED", 2)
    assert main([command, "--database-url", outbox.text]) == 3
    assert "foreign key" in capsys.readouterr().err
    assert statuses(outbox) == {1: 3}


def test_ids_that_were_given_out_again(outbox: Database, capsys: Capture) -> None:
    fill(outbox, 10)
    assert run(outbox, capsys, "archive")["sent"] == 10
    outbox.sql("TRUNCATE TABLE outbox_event")
    fill(outbox, 10)
    assert run(outbox, capsys, "archive")["sent"] == 10
    assert statuses(outbox, "outbox_archive") == {1: 20}


def test_a_row_that_was_copied_back_and_sent_again(outbox: Database, capsys: Capture) -> None:
    fill(outbox, 10)
    run(outbox, capsys, "archive")
    outbox.sql("INSERT INTO outbox_event SELECT * FROM outbox_archive WHERE id < 4")
    assert run(outbox, capsys, "archive")["sent"] == 3
    assert statuses(outbox, "outbox_archive") == {1: 10}


def test_an_archive_of_the_users_own(outbox: Database, capsys: Capture) -> None:
    outbox.sql("CREATE TABLE `old 100%` LIKE outbox_event")
    outbox.sql("ALTER TABLE `old 100%` ADD COLUMN moved_at DATETIME DEFAULT CURRENT_TIMESTAMP")
    fill(outbox, 10)
    arguments = ["archive", "--archive-table", "old 100%"]
    assert run(outbox, capsys, *arguments)["sent"] == 10
    assert statuses(outbox, "`old 100%`") == {1: 10}
    # Its unique key on event_id is the user's choice; what it refuses stays, and is told.
    outbox.sql(
        "INSERT INTO outbox_event (event_id, aggregate_type, aggregate_id, event_type, payload,"
        " status, created_at, updated_at) SELECT event_id, 'order', 'a', 'CREATED', '{}', 1,"
        " created_at, updated_at FROM `old 100%` WHERE id = 1"
    )
    assert main([*arguments, "--database-url", outbox.text]) == 3
    assert "has a unique key that refuses a row" in capsys.readouterr().err
    assert statuses(outbox) == {1: 1}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["purge", "--older-than", "7"], 2, "is not a duration"),
        (["purge", "--batch", "0"], 2, "--batch"),
        (["purge", "--table", "nothing"], 3, "does not exist"),
        (["archive", "--archive-table", "outbox_event"], 3, "is the outbox itself"),
        (["archive", "--archive-table", ""], 2, "is not a table name"),
        (["archive", "--archive-table", "a.b.c"], 2, "is not a table name"),
        (["purge", "--replicas", "http://x"], 2, "host:port"),
    ],
)
def test_what_is_wrong_is_one_line(
    outbox: Database, capsys: Capture, arguments: list[str], code: int, words: str
) -> None:
    assert main([*arguments, "--database-url", outbox.text]) == code
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_server_that_is_no_replica(outbox: Database, capsys: Capture) -> None:
    here = f"{outbox.url.host}:{outbox.url.port}"
    assert main(["purge", "--database-url", outbox.text, "--replicas", here]) == 2
    assert "is not a replica" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["purge", "archive"])
def test_rows_that_a_relay_has_still_to_come_over_stay(
    mysql: Database, harness: Callable[..., Harness], command: str
) -> None:
    """It was away, a pass has sent them. Coming back, it asks the table: gone would mean unsent."""
    shop = harness(mysql, SESSION_TIMEOUT="6s")
    relay = shop.relay()
    shop.ins("a", {"n": 0})
    shop.wait_all_sent()
    relay.kill()
    shop.ins("a", {"n": 1})
    while shop.compensate("--older-than", "0s", "--relay-wait", "0s")["relay"] == "alive":
        pass  # Kafka has not noticed yet
    shop.wait_all_sent()

    def clean_up() -> dict[str, Any]:
        process = shop.run(command, "--older-than", "0s", "--json")
        assert process.wait() == 0, process.text()
        found: dict[str, Any] = json.loads(process.stdout)
        return found

    first = clean_up()
    assert first["kept_since"] is not None
    assert first["sent"] == 0
    assert shop.run("start", "--until-current").wait() == 0
    assert [message.json["n"] for message in shop.messages()] == [0, 1]
    second = clean_up()
    assert (second["kept_since"], second["sent"]) == (None, 2)
    shop.ins("a", {"n": 2})
    assert shop.run("start", "--until-current").wait() == 0
    assert [message.json["n"] for message in shop.messages()] == [0, 1, 2]
