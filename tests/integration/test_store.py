"""The SQL on the outbox table, on both servers and on tables that are older than we."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace

import pytest
from sqlalchemy import Engine

from cdc_relay.config import Settings
from cdc_relay.database import database_errors, describe_table, engine
from cdc_relay.errors import ChangedTableError, SourceError, SourceUnavailableError
from cdc_relay.outbox import OutboxEvent
from cdc_relay.parking import Parking
from cdc_relay.store import Failure, PendingEvent, Store
from tests.support.sql import INSERT, Database, row

LEGACY = """
CREATE TABLE outbox_event (
  id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
  event_id VARCHAR(64) NOT NULL,
  aggregate_type VARCHAR(64) NOT NULL,
  aggregate_id VARCHAR(64) NOT NULL,
  event_type VARCHAR(128) NOT NULL,
  payload {payload},
  status INT NOT NULL DEFAULT 0,
  retry_count INT NOT NULL DEFAULT 0,
  next_retry_time {retry},
  created_at DATETIME NULL DEFAULT CURRENT_TIMESTAMP,
  updated_at TIMESTAMP(6) NULL,
  KEY idx_status_next_retry (status, next_retry_time)
)"""
LEGACY_INSERT = (
    "INSERT INTO outbox_event (event_id, aggregate_type, aggregate_id, event_type, payload)"
    " VALUES (%s, %s, %s, %s, %s)"
)


@pytest.fixture
def pool(database: Database) -> Iterator[Engine]:
    made = engine(settings(database))
    yield made
    made.dispose()


@pytest.fixture
def make_store(database: Database, pool: Engine) -> Callable[..., Store]:
    def make(**options: object) -> Store:
        with pool.connect() as connection:
            shape = describe_table(connection, settings(database))
        return Store(pool, shape, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def store(database: Database, make_store: Callable[..., Store]) -> Store:
    database.create_outbox()
    return make_store()


def settings(database: Database, **more: str) -> Settings:
    return Settings.model_validate({"database_url": database.text, **more})


def insert(database: Database, *keys: str) -> list[tuple[int, str]]:
    """One row for each aggregate id, in this order; returns (id, event_id) of each."""
    for key in keys:
        database.sql(INSERT.format(table="outbox_event"), row(key, {"key": key}))
    rows = database.sql(
        "SELECT id, event_id FROM outbox_event ORDER BY id DESC LIMIT %s", (len(keys),)
    )
    return [(found[0], found[1]) for found in reversed(rows)]


@pytest.mark.parametrize("mark", ["update", "delete"])
def test_marks_wait_for_no_row_that_they_do_not_want(
    database: Database, make_store: Callable[..., Store], mark: str
) -> None:
    """Also where the optimizer would rather read the whole, small table: services hold the rows
    that they have inserted and not committed."""
    database.create_outbox()
    rows = insert(database, *[str(number) for number in range(30)])
    store = make_store(mark=mark)
    with closing(database.connect()) as other, other.cursor() as cursor:
        cursor.execute(INSERT.format(table="outbox_event"), row("open", {}))
        assert store.mark_sent(rows).done == 30


def scanned(store: Store, older_than_s: float = 0, limit: int = 2) -> list[str]:
    """The aggregate ids that a walk gives, in order."""
    return [p.event.aggregate_id for batch in store.scan(older_than_s, limit) for p in batch]


def event(store: Store, row_id: int) -> PendingEvent:
    [found], _ = store.events([row_id])
    return found


# --- marks -------------------------------------------------------------------------------------


def test_mark_sent(database: Database, store: Store) -> None:
    rows = insert(database, "a", "b", "c")
    assert store.mark_sent([rows[2], rows[0]]).done == 2
    assert store.mark_sent(rows).done == 1
    assert store.mark_sent([]).done == 0
    assert store.mark_sent([(999, "unknown")]).done == 0
    assert database.sql(
        "SELECT COUNT(*), MAX(ABS(TIMESTAMPDIFF(SECOND, sent_at, UTC_TIMESTAMP(6)))) < 10,"
        " MIN(sent_at = updated_at) FROM outbox_event WHERE status = 1"
    ) == ((3, 1, 1),)


def test_an_id_given_out_again_is_not_marked(database: Database, store: Store) -> None:
    before = insert(database, "a", "b")
    database.sql("TRUNCATE TABLE outbox_event")
    after = insert(database, "a", "b")
    assert [row_id for row_id, _ in before] == [row_id for row_id, _ in after]
    assert store.mark_sent(before).done == 0
    assert store.mark_sent(after).done == 2


def test_dead_rows_stay_dead(database: Database, store: Store) -> None:
    rows = insert(database, "a")
    database.sql("UPDATE outbox_event SET status = 2")
    assert store.mark_sent(rows).done == 0


def test_mark_sent_of_more_rows_than_one_statement_takes(database: Database, store: Store) -> None:
    values = [row(str(number), number) for number in range(5100)]
    connection = database.connect()
    with connection.cursor() as cursor:
        cursor.executemany(INSERT.format(table="outbox_event"), values)
    connection.commit()
    connection.close()
    found = database.sql("SELECT id, event_id FROM outbox_event")
    assert store.mark_sent([(row_id, event_id) for row_id, event_id in found]).done == 5100


def test_two_markers_do_not_deadlock(database: Database, store: Store) -> None:
    rows = insert(database, *"abcdefghij")
    marked: list[int] = []

    def mark(part: list[tuple[int, str]]) -> None:
        marked.append(sum(store.mark_sent(part).done for _ in range(20)))

    threads = [threading.Thread(target=mark, args=(part,)) for part in (rows, rows[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(marked) == 10


@pytest.mark.parametrize("mark", ["update", "delete"])
def test_locked_rows_are_passed_over_and_named(
    database: Database, make_store: Callable[..., Store], mark: str
) -> None:
    """Rows that others hold, those they have inserted or deleted and not committed among them, are
    still owed; rows that are gone, or marked, are not."""
    database.create_outbox()
    rows = insert(database, *"abcdef")
    store = make_store(mark=mark)
    ids = [row_id for row_id, _ in rows]
    database.sql("DELETE FROM outbox_event WHERE id = %s", (ids[0],))
    database.sql("UPDATE outbox_event SET status = 1 WHERE id = %s", (ids[1],))
    with closing(database.connect()) as other, other.cursor() as cursor:
        cursor.execute("SELECT 1 FROM outbox_event WHERE id = %s FOR UPDATE", (ids[2],))
        cursor.execute("DELETE FROM outbox_event WHERE id = %s", (ids[3],))
        cursor.execute(INSERT.format(table="outbox_event"), row("g", {}, event_id="not-yet"))
        unseen = (cursor.lastrowid, "not-yet")
        wanted = [*rows, unseen, (10**9, "unknown"), (ids[4], "another event of this id")]
        assert store.mark_sent(wanted) == (2, [rows[2], rows[3], unseen])
        assert store.mark_sent(wanted, around=True) == (0, [rows[2], rows[3], unseen])
        cursor.execute("COMMIT")
    assert store.mark_sent(wanted, around=True) == (2, [])
    # What was used for it is as it was: the next statement is a transaction of its own.
    assert insert(database, "h")[0] in store.pending([unseen[0] + 1])
    assert store.mark_sent([(unseen[0] + 1, "unknown")]) == (0, [])


def test_a_lock_on_an_index_entry_delays_what_is_marked_with_it(
    database: Database, store: Store
) -> None:
    """Where a gap is locked into which an entry of the status index would go, nothing is marked,
    and it is said so."""
    rows = insert(database, *"abc")
    database.sql("UPDATE outbox_event SET status = 1 WHERE id = %s", (rows[0][0],))
    with closing(database.connect()) as other, other.cursor() as cursor:
        cursor.execute("SELECT id FROM outbox_event WHERE status = 1 LOCK IN SHARE MODE")
        assert store.mark_sent(rows[1:]) == (0, rows[1:])
    assert store.mark_sent(rows[1:]) == (2, [])


def test_a_server_that_cannot_leave_out_locked_rows_has_them_waited_for(
    database: Database, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock outlasts one lock wait, and the look around as well."""
    monkeypatch.setattr("cdc_relay.store._AROUND", "FOR UPDATE SKIP WHATEVER")
    rows = insert(database, "a")
    blocker = database.connect()
    with blocker.cursor() as cursor:
        cursor.execute("SELECT 1 FROM outbox_event WHERE id = %s FOR UPDATE", (rows[0][0],))
    timer = threading.Timer(2.5, blocker.commit)
    timer.start()
    assert store.mark_sent(rows) == (1, [])
    timer.join()
    blocker.close()


# --- the scan ----------------------------------------------------------------------------------


def test_rows_come_in_id_order_across_batches(database: Database, store: Store) -> None:
    insert(database, *"cabcab")
    assert scanned(store) == list("cabcab")
    assert scanned(store, limit=100) == list("cabcab")


def test_a_batch_is_never_larger_than_asked(database: Database, store: Store) -> None:
    insert(database, *"abcde")
    assert [len(batch) for batch in store.scan(0, 2)] == [2, 2, 1]


def test_age_is_measured_by_the_database(database: Database, store: Store) -> None:
    insert(database, "old", "young")
    database.sql(
        "UPDATE outbox_event SET created_at = UTC_TIMESTAMP(6) - INTERVAL 601 SECOND"
        " WHERE aggregate_id = 'old'"
    )
    assert scanned(store, 600) == ["old"]
    assert scanned(store, 602) == []
    assert scanned(store, 0) == ["old", "young"]


def test_a_row_with_a_failure_is_due_when_its_time_has_come(
    database: Database, store: Store
) -> None:
    insert(database, "a", "b", "c")
    retry_at(database, "b", "INTERVAL 1 HOUR")
    scan = store.scan(0, 10)
    assert [p.event.aggregate_id for batch in scan for p in batch] == ["a", "c"]
    assert scan.held == 1
    retry_at(database, "b", "INTERVAL -1 SECOND")
    assert scanned(store) == ["a", "b", "c"]


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_nothing_overtakes_a_row_that_waits(database: Database, store: Store, limit: int) -> None:
    insert(database, *"abacab")
    first_a = database.sql("SELECT MIN(id) FROM outbox_event WHERE aggregate_id = 'a'")[0][0]
    database.sql(
        "UPDATE outbox_event SET next_retry_time = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR"
        " WHERE id = %s",
        (first_a,),
    )
    scan = store.scan(0, limit)
    assert [p.event.aggregate_id for batch in scan for p in batch] == ["b", "c", "b"]
    assert scan.held == 3


def test_nothing_overtakes_an_earlier_row_that_is_too_young(
    database: Database, store: Store
) -> None:
    insert(database, "a", "a", "b")
    database.sql("UPDATE outbox_event SET created_at = UTC_TIMESTAMP(6) - INTERVAL 1 HOUR")
    database.sql("UPDATE outbox_event SET created_at = UTC_TIMESTAMP(6) ORDER BY id LIMIT 1")
    assert scanned(store, 600) == ["b"]


def test_a_dead_row_blocks_its_aggregate_or_releases_it(
    database: Database, store: Store, make_store: Callable[..., Store]
) -> None:
    insert(database, "a", "a", "a", "b")
    database.sql("UPDATE outbox_event SET status = 2 ORDER BY id LIMIT 1 ")
    assert scanned(store) == ["b"]
    assert scanned(make_store(on_dead="release")) == ["a", "a", "b"]
    # Dead after it: the earlier ones go.
    database.sql("UPDATE outbox_event SET status = 0")
    database.sql(
        "UPDATE outbox_event SET status = 2 WHERE aggregate_id = 'a' ORDER BY id DESC LIMIT 1"
    )
    assert scanned(store) == ["a", "a", "b"]


def test_the_same_key_of_another_type_does_not_wait(database: Database, store: Store) -> None:
    insert(database, "a", "a")
    database.sql("UPDATE outbox_event SET aggregate_type = 'refund' ORDER BY id DESC LIMIT 1")
    database.sql("UPDATE outbox_event SET status = 2 ORDER BY id LIMIT 1")
    assert scanned(store) == ["a"]


def test_the_walk_ends_at_what_was_due_when_it_began(database: Database, store: Store) -> None:
    insert(database, "a", "b")
    seen = []
    for batch in store.scan(0, 1):
        seen += [pending.event.aggregate_id for pending in batch]
        insert(database, "late")
    assert seen == ["a", "b"]


def test_a_closed_aggregate_is_passed_over(database: Database, store: Store) -> None:
    insert(database, *"abab")
    scan = store.scan(0, 1)
    seen = []
    for batch in scan:
        seen += [pending.event.aggregate_id for pending in batch]
        scan.closed.add(("order", "a"))
    assert seen == ["a", "b", "b"]
    assert scan.held == 1


def test_the_scan_uses_the_index_at_any_size(database: Database, store: Store) -> None:
    """Few pending rows behind many sent ones: the plan begins at the pending ones."""
    insert(database, *"abcdef")
    sql = store._scan_sql(600, 10, 2, 6)
    plan = database.sql(f"EXPLAIN {'' if database.is_mariadb else 'FORMAT=TRADITIONAL '}{sql}")
    used = [[cell for cell in line if isinstance(cell, str)] for line in plan]
    assert any("idx_status_next_retry" in line for line in used)
    assert any("idx_status_aggregate" in line for line in used)


BARE = """
CREATE TABLE outbox_event (
  id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY, event_id VARCHAR(64) NULL UNIQUE,
  aggregate_type VARCHAR(64) NULL, aggregate_id VARCHAR(64) NULL, event_type VARCHAR(128) NULL,
  payload TEXT NULL, status TINYINT NOT NULL DEFAULT 0, retry_count INT NULL,
  next_retry_time DATETIME NULL, created_at DATETIME NULL, updated_at DATETIME NULL
)"""


def test_a_scan_without_indexes_walks_the_table_once(
    database: Database, pool: Engine, make_store: Callable[..., Store]
) -> None:
    """And not once for each pending row, to look for a dead one before it."""
    database.sql(BARE)
    for status, count in ((1, 1000), (2, 3), (0, 200)):
        many = [(f"{status}-{n}", "order", f"k{n}", status) for n in range(count)]
        with closing(database.connect(autocommit=True)) as connection:
            connection.cursor().executemany(
                "INSERT INTO outbox_event (event_id, aggregate_type, aggregate_id, status)"
                " VALUES (%s, %s, %s, %s)",
                many,
            )
    made = make_store()
    with pool.connect() as connection:
        connection.exec_driver_sql("FLUSH STATUS")
        found = connection.exec_driver_sql(made._scan_sql(0, 500, 0, 10_000)).all()
        read = dict(connection.exec_driver_sql("SHOW SESSION STATUS LIKE 'Handler_read%%'").all())
    assert len(found) == 200
    assert sum(map(int, read.values())) < 10_000, read
    # k0, k1 and k2 wait behind their dead rows.
    assert scanned(made) == [f"k{n}" for n in range(3, 200)]
    assert len(scanned(make_store(on_dead="release"))) == 200


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_name_that_is_null_is_an_empty_one(
    database: Database, make_store: Callable[..., Store], place: int
) -> None:
    """Such a row can never be sent. Its failures count all the same, until it is dead."""
    database.sql(BARE)
    names: list[str | None] = ["e-1", "order", "k"]
    names[place] = None
    database.sql(LEGACY_INSERT, (*names, "T", "{}"))
    made = make_store(max_tries=1)
    kind, key = names[1] or "", names[2] or ""
    [scan] = made.scan_rows(0, 10, 0, 10)
    assert scan.aggregate == (kind, key)
    assert made.waiting(kind, key, 10)
    for tries in (0, 1):
        [waiting] = made.waiting(kind, key, 10)
        assert (waiting.event_id, waiting.aggregate_id) == (names[0] or "", key)
        [pending], _ = made.events([waiting.id])
        outcome = made.record_failure(pending.event, tries, "refused").outcome
        assert outcome == ("dead" if tries else "retry")
        assert made.failing(10) == [(kind, key)]
    assert made.dead_aggregates(kind, key, 10) == [(kind, key)]
    assert [one.tries for one in made.troubled(10)] == [2]
    assert made.dead_aggregates(kind, None, 10) == [(kind, key)]
    assert not made.waiting(kind, key, 10)


COLLATED = """
CREATE TABLE outbox_event (
  id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY,
  event_id VARCHAR(64) NOT NULL,
  aggregate_type VARCHAR(64) NOT NULL,
  aggregate_id VARCHAR(64) NOT NULL,
  event_type VARCHAR(128) NOT NULL,
  payload JSON,
  status TINYINT NOT NULL DEFAULT 0,
  retry_count INT NOT NULL DEFAULT 0,
  next_retry_time DATETIME(6) NULL,
  created_at DATETIME(6) NULL,
  updated_at DATETIME(6) NULL,
  KEY idx_status_next_retry (status, next_retry_time) {index}
) DEFAULT CHARSET utf8mb4 COLLATE utf8mb4_general_ci"""


@pytest.mark.parametrize("index", ["", ", KEY (status, aggregate_type, aggregate_id)"])
def test_what_the_database_takes_for_equal_are_other_aggregates(
    database: Database, make_store: Callable[..., Store], index: str
) -> None:
    """A1, a1 and "A1 " are one key to the database here and three to Kafka."""
    database.sql(COLLATED.format(index=index))
    made = make_store(max_tries=0)
    keys = ("A1", "a1", "A1 ")
    rows = [
        (number, f"e{number}", kind, key, "T")
        for number, (kind, key) in enumerate(
            [(kind, key) for _ in range(2) for kind in ("order", "Order") for key in keys], 1
        )
    ]
    with closing(database.connect(autocommit=True)) as connection:
        connection.cursor().executemany(
            "INSERT INTO outbox_event (id, event_id, aggregate_type, aggregate_id, event_type)"
            " VALUES (%s, %s, %s, %s, %s)",
            rows,
        )
    [first], _ = made.events([1])
    assert made.record_failure(first.event, 0, "refused").outcome == "dead"  # order, A1
    assert made.failing(10) == [("order", "A1")]
    ids = [pending.event.id for batch in made.scan(0, 100) for pending in batch]
    assert ids == [2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    database.sql("UPDATE outbox_event SET status = 2 WHERE id IN (1, 2, 4)")
    assert sorted(made.failing(10)) == [("Order", "A1"), ("order", "A1"), ("order", "a1")]
    assert sorted(made.failing_types()) == ["Order", "order"]
    parking = Parking(made, "block")
    parking.learn()
    for key, due in (("A1", None), ("a1", None), ("A1 ", [3, 9])):
        parking.close("order", key)
        found = parking.rows(("order", key), {})
        assert (found and [event.id for event, _ in found]) == due, key
    database.sql("UPDATE outbox_event SET status = 0, retry_count = 1 WHERE id = 1")
    found = parking.rows(("order", "A1"), {})
    assert found is not None
    assert [event.id for event, _ in found] == [1, 7]
    parking.close("order", None)
    found = parking.rows(("order", None), {})
    assert found is not None
    assert [event.id for event, _ in found] == [1, 3, 7, 9]


def test_more_dead_rows_than_can_be_named_are_not_overtaken(
    database: Database, make_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The type is closed as a whole, and what stands behind a dead row stays."""
    monkeypatch.setattr("cdc_relay.parking._MOST_AGGREGATES", 3)
    database.create_outbox()
    keys = [f"k{number}" for number in range(6)]
    first = insert(database, *keys)
    dead = ",".join(str(row_id) for row_id, _ in first[:5])
    database.sql(f"UPDATE outbox_event SET status = 2, retry_count = 11 WHERE id IN ({dead})")
    second = insert(database, *keys)
    made = make_store()
    for close in (Parking.learn, Parking.close_blocked):
        parking = Parking(made, "block")
        close(parking)
        assert parking.closed() == (("order", None),)
        found = parking.rows(("order", None), {})
        assert found is not None
        assert [event.id for event, _ in found] == [first[5][0], second[5][0]]
        database.sql("UPDATE outbox_event SET status = 1 WHERE aggregate_id = 'k5'")
        # More wait than can be closed one by one: the type stays closed.
        assert parking.rows(("order", None), {}) is None
        database.sql("UPDATE outbox_event SET status = 0 WHERE aggregate_id = 'k5'")


def test_only_a_type_that_has_too_many_by_itself_is_closed_as_a_whole(
    database: Database, make_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be opened at the next look, and closed again, for ever."""
    monkeypatch.setattr("cdc_relay.parking._MOST_AGGREGATES", 3)
    database.create_outbox()
    for kind, many in (("a", 3), ("b", 2), ("c", 4)):
        for number in range(many):
            database.sql(INSERT.format(table="outbox_event"), row(f"k{number}", {}, kind=kind))
    database.sql("UPDATE outbox_event SET status = 2, retry_count = 11")
    parking = Parking(make_store(), "block")
    for _ in range(2):
        parking.learn()
        one_by_one = {("a", "k0"), ("a", "k1"), ("a", "k2"), ("b", "k0"), ("b", "k1")}
        assert set(parking.closed()) == one_by_one | {("c", None)}


def test_a_time_that_a_service_sets_itself_is_no_failure(
    database: Database, make_store: Callable[..., Store]
) -> None:
    database.create_outbox()
    insert(database, "a", "b")
    database.sql("UPDATE outbox_event SET next_retry_time = UTC_TIMESTAMP(6)")
    made = make_store()
    assert made.failing(10) == []
    assert made.counts().failing == 0
    assert made.backlog().failing == 0
    assert scanned(made) == ["a", "b"]


def test_a_small_column_of_tries_is_no_obstacle(
    database: Database, make_store: Callable[..., Store]
) -> None:
    database.create_outbox()
    database.sql("ALTER TABLE outbox_event MODIFY retry_count TINYINT NOT NULL DEFAULT 0")
    [(row_id, _)] = insert(database, "a")
    made = make_store(max_tries=1000)
    database.sql("UPDATE outbox_event SET retry_count = 125")
    [pending], _ = made.events([row_id])
    assert made.record_failure(pending.event, 125, "refused").outcome == "retry"
    assert made.record_failure(pending.event, 126, "refused").outcome == "dead"
    database.sql("UPDATE outbox_event SET status = 0")
    assert made.record_failure(pending.event, 127, "refused").outcome == "dead"


def test_what_is_read_at_once_is_bounded_in_bytes(
    database: Database, make_store: Callable[..., Store]
) -> None:
    """Also where rows become large all of a sudden: nothing tells beforehand."""
    database.sql(LEGACY.format(payload="MEDIUMTEXT", retry="DATETIME NULL"))
    sizes = [10] * 300 + [1_000_000] * 40 + [10] * 300 + [12_000_000, 10]
    for number, size in enumerate(sizes):
        database.sql(LEGACY_INSERT, (f"e-{number}", "order", "k", "T", "x" * size))
    made = make_store()
    ids = [number + 1 for number in range(len(sizes))]
    rest: Sequence[int] = ids
    parts = []
    while rest:
        events, rest = made.events(rest)
        parts.append([len(pending.event.payload or b"") for pending in events])
        assert [pending.event.id for pending in events] == ids[: len(events)]
        ids = ids[len(events) :]
    assert [size for part in parts for size in part] == sizes
    # More than the bound is read only where the last row, or the one large row, goes beyond it.
    assert all(sum(part[:-1]) <= 2 * 8 * 1024 * 1024 for part in parts), parts
    assert len(parts) < 30, parts
    assert [event.id for part in made.rows([9, 7, 305]) for event, _ in part] == [7, 9, 305]
    assert made.states([305, 100_000]) == {305: ("e-304", 0)}
    # In any order, as a prepared transaction may have written them: the first ones come first.
    order = [*range(640, 340, -1), 1000, *range(340, 300, -1)]
    seen: set[int] = set()
    rest = order
    while rest:
        asked = set(rest)
        found, rest = made.first_rows(rest)
        assert sum(len(event.payload or b"") for event, _ in found[:-1]) <= 2 * 8 * 1024 * 1024
        assert {event.id for event, _ in found} == asked - set(rest) - {1000}
        seen |= asked - set(rest)
        assert list(rest) == [row_id for row_id in order if row_id not in seen]


# --- events as SELECT gives them ---------------------------------------------------------------


@pytest.mark.parametrize("indexed", [True, False])
def test_rows_of_a_time_are_read_in_steps(
    database: Database,
    make_store: Callable[..., Store],
    monkeypatch: pytest.MonkeyPatch,
    indexed: bool,
) -> None:
    """No statement looks at more than a step of the index or of the ids, whatever the optimizer
    thinks; gaps in the ids, rows of one instant and rows of every status are all in there."""
    monkeypatch.setattr("cdc_relay.store._SPAN_IDS", 3)
    monkeypatch.setattr("cdc_relay.store._SLICE_ROWS", 2)
    database.create_outbox()
    if not indexed:
        database.sql("DROP INDEX idx_status_created ON outbox_event")
    store = make_store()
    ids = [number for number, _ in insert(database, *"abcdefghij")]
    for place, (second, status) in enumerate(
        [(9, 1), (1, 1), (1, 1), (1, 1), (1, 1), (2, 0), (3, 2), (4, 1), (0, 1), (2, 1)]
    ):
        database.sql(
            "UPDATE outbox_event SET status = %s, created_at = '1970-01-01' + INTERVAL %s SECOND"
            " WHERE id = %s",
            (status, second, ids[place]),
        )
    database.sql("UPDATE outbox_event SET id = id + 1000000 WHERE id >= %s", (ids[6],))

    def found(since_s: int, until_s: int, limit: int) -> list[str]:
        chunks = list(store.keys(since_s * 1_000_000, until_s * 1_000_000, limit))
        assert all(len(chunk) <= limit for chunk in chunks)
        return [row[3] for chunk in chunks for row in chunk]

    for limit in (1, 2, 100):
        assert "".join(found(0, 10, limit)) == "abcdefghij"
        assert "".join(found(1, 4, limit)) == "bcdefgj"
        assert found(5, 9, limit) == []


def test_rows_of_a_time_are_found_by_the_index_of_times(database: Database, store: Store) -> None:
    """Another index that begins with the status looks as good, and reads every row for its time."""
    insert(database, "a")
    seen: list[str] = []
    read = store._read
    store._read = lambda sql, *more: seen.append(sql) or read(sql, *more)  # type: ignore[method-assign,func-returns-value]
    list(store.keys(0, 2**52, 10))
    assert store.newest_pending(0.000001)
    assert store.count_pending(0.000001, 1) == 1
    bounds = [sql for sql in seen if "MAX(id)" in sql or "COUNT(*)" in sql]
    assert len(bounds) == 5
    assert all("FORCE INDEX (`idx_status_created`)" in sql for sql in bounds)


def test_payload_headers_and_time(database: Database, store: Store) -> None:
    values = ("e-1", "order", "ключ", "CREATED", '{"b": 1.50, "ä": "\U0001f600"}', '{"x": null}')
    database.sql(INSERT.format(table="outbox_event"), values)
    database.sql("UPDATE outbox_event SET created_at = '2026-03-01 12:00:00.000001'")
    [(payload, headers)] = database.sql("SELECT payload, headers FROM outbox_event")
    [row_id] = database.sql("SELECT id FROM outbox_event")[0]
    found = event(store, row_id)
    assert found == PendingEvent(
        OutboxEvent(
            row_id,
            "e-1",
            "order",
            "ключ",
            "CREATED",
            payload.encode(),
            headers.encode(),
            1_772_366_400_000_001,
        ),
        0,
    )


def test_nulls_and_zero_dates(database: Database, store: Store) -> None:
    insert(database, "a")
    database.sql("UPDATE outbox_event SET payload = NULL")
    database.sql("SET sql_mode = ''")
    database.sql("UPDATE outbox_event SET created_at = '0000-00-00'")
    assert scanned(store, 600) == ["a"]
    [batch] = store.scan(600, 10)
    assert batch[0].event.payload is None
    assert batch[0].event.headers is None
    assert batch[0].event.created_at is None
    assert store.counts().pending == 1


@pytest.mark.parametrize(
    ("column", "kind", "value"),
    [
        ("JSON", "json", b'{"a": 1}'),
        ("TEXT", "text", "naïve {}".encode()),
        ("VARCHAR(100) CHARACTER SET latin1", "text", "naïve".encode()),
        ("BLOB", "binary", b"\x00\xff\x01"),
        ("VARBINARY(20)", "binary", b"\x00 \x00"),
    ],
)
@pytest.mark.parametrize(
    "retry", ["DATETIME NULL", "DATETIME(6) NOT NULL DEFAULT '1970-01-01 00:00:00'"]
)
def test_a_table_with_only_the_required_columns(
    database: Database,
    make_store: Callable[..., Store],
    column: str,
    kind: str,
    value: bytes,
    retry: str,
) -> None:
    database.sql(LEGACY.format(payload=column, retry=retry))
    given = value if kind == "binary" else value.decode()
    for number, key in enumerate("aba"):
        database.sql(LEGACY_INSERT, (f"e-{number}", "order", key, "T", given))
    store = make_store()
    assert store._shape.payload_kind == kind
    [batch] = store.scan(0, 10)
    assert [pending.event.aggregate_id for pending in batch] == ["a", "b", "a"]
    assert batch[0].event.payload == value
    assert batch[0].event.headers is None
    first = batch[0].event
    # A rung that does not come due while a slow machine looks.
    database.sql("UPDATE outbox_event SET retry_count = 3 WHERE id = %s", (first.id,))
    assert store.record_failure(first, 3, "refused") == Failure("retry", 4, 120)
    assert scanned(store) == ["b"]
    assert store.mark_sent([(p.event.id, p.event.event_id) for p in batch[1:2]]).done == 1
    counts = store.counts()
    assert (counts.pending, counts.failing, counts.sent, counts.dead) == (2, 1, 1, 0)


# --- failures ----------------------------------------------------------------------------------


def test_the_ladder(database: Database, store: Store) -> None:
    [(row_id, _)] = insert(database, "a")
    pending = event(store, row_id)
    ladder = [1, 5, 30, 120, 900, 3600, 21600, 21600, 21600, 21600]
    for tries, delay in enumerate(ladder, start=1):
        failure = store.record_failure(pending.event, tries - 1, f"no {tries}")
        assert failure == Failure("retry", tries, delay)
        [(retry_count, status, seconds, last_error)] = database.sql(
            "SELECT retry_count, status, TIMESTAMPDIFF(SECOND, UTC_TIMESTAMP(6), next_retry_time),"
            " last_error FROM outbox_event"
        )
        assert (retry_count, status, last_error) == (tries, 0, f"no {tries}")
        assert delay - 3 <= seconds <= delay
    assert store.record_failure(pending.event, 10, "the last") == Failure("dead", 11, 0)
    assert database.sql("SELECT status, retry_count, last_error FROM outbox_event") == (
        (2, 11, "the last"),
    )
    assert store.record_failure(pending.event, 11, "more").outcome == "gone"


def test_a_failure_is_counted_once(database: Database, store: Store) -> None:
    [(row_id, _)] = insert(database, "a")
    pending = event(store, row_id)
    assert store.record_failure(pending.event, 0, "one").outcome == "retry"
    assert store.record_failure(pending.event, 0, "one").outcome == "gone"
    reused = pending.event._replace(event_id="another")
    assert store.record_failure(reused, 1, "one").outcome == "gone"


def test_any_reason_fits(database: Database, store: Store) -> None:
    [(row_id, _)] = insert(database, "a")
    pending = event(store, row_id)
    store.record_failure(pending.event, 0, "\U0001f600" * 600)
    assert database.sql("SELECT CHAR_LENGTH(last_error) FROM outbox_event") == ((512,),)
    database.sql("UPDATE outbox_event SET last_error = NULL")
    database.sql("ALTER TABLE outbox_event MODIFY last_error VARCHAR(20) CHARACTER SET latin1")
    columns = dict(store._shape.columns)
    columns["last_error"] = replace(columns["last_error"], charset="latin1", characters=20)
    narrow = Store(store._engine, replace(store._shape, columns=columns))
    assert narrow.record_failure(pending.event, 1, "订单" * 9).outcome == "retry"
    assert database.sql("SELECT last_error FROM outbox_event") == ((("\\u8ba2\\u5355" * 2)[:20],),)


# --- looking -----------------------------------------------------------------------------------


def test_counts(database: Database, store: Store) -> None:
    assert store.counts().oldest_pending_s is None
    rows = insert(database, *"abcd")
    store.mark_sent(rows[:1])
    database.sql("UPDATE outbox_event SET retry_count = 10 WHERE aggregate_id = 'b'")
    store.record_failure(event(store, rows[1][0]).event, 10, "dead")
    store.record_failure(event(store, rows[2][0]).event, 0, "later")
    database.sql("UPDATE outbox_event SET created_at = UTC_TIMESTAMP(6) - INTERVAL 90 SECOND")
    counts = store.counts()
    assert (counts.pending, counts.failing, counts.sent, counts.dead) == (2, 1, 1, 1)
    assert 89 < (counts.oldest_pending_s or 0) < 120


def test_no_transaction_stays_open(database: Database, store: Store) -> None:
    insert(database, *"abc")
    for _ in store.scan(0, 1):
        pass
    store.counts()
    open_ones = database.sql(
        "SELECT COUNT(*) FROM information_schema.INNODB_TRX AS t"
        " JOIN information_schema.PROCESSLIST AS p ON p.ID = t.trx_mysql_thread_id"
        " WHERE p.DB = %s AND p.ID <> CONNECTION_ID()",
        (database.name,),
    )
    assert open_ones == ((0,),)


# --- wrong tables and servers ------------------------------------------------------------------


def described(database: Database, **more: str) -> str:
    """The one line that describing the table fails with."""
    pool = engine(settings(database, **more))
    try:
        with pytest.raises(SourceError) as caught, pool.connect() as connection:
            describe_table(connection, settings(database, **more))
    finally:
        pool.dispose()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_wrong_tables(database: Database) -> None:
    assert described(database) == (
        f"table {database.name}.outbox_event does not exist: run cdc-relay init"
    )
    database.sql("CREATE TABLE poor (id INT PRIMARY KEY, event_id VARCHAR(9), payload TEXT)")
    assert "lacks the columns aggregate_type, aggregate_id" in described(database, table="poor")
    database.create_outbox("base")
    database.sql("CREATE VIEW seen AS SELECT * FROM base")
    assert "is a view" in described(database, table="seen")
    engine_name = "Aria" if database.is_mariadb else "MyISAM"
    database.sql(LEGACY.format(payload="TEXT", retry="DATETIME").replace("outbox_event", "isam"))
    database.sql(f"ALTER TABLE isam ENGINE = {engine_name}")
    assert f"uses the engine {engine_name}" in described(database, table="isam")
    database.sql("ALTER TABLE base MODIFY aggregate_id BIGINT NOT NULL")
    assert "column aggregate_id is of type bigint" in described(database, table="base")


def test_missing_grants_are_named(database: Database) -> None:
    database.create_outbox()
    user = f"u{database.name}"
    database.sql(f"CREATE USER {user}@'%' IDENTIFIED BY 'pw-{user}'")
    try:
        url = database.url.set(username=user, password=f"pw-{user}")
        mine = Database(url)
        # A user who may nothing does not see the schema at all.
        pool = engine(settings(mine))
        with pytest.raises(SourceError, match="missing grant"):
            store_error(pool, mine)
        pool.dispose()
        database.sql(f"GRANT SELECT ON {database.name}.* TO {user}@'%'")
        pool = engine(settings(mine))
        with pool.connect() as connection:
            shape = describe_table(connection, settings(mine))
        with pytest.raises(SourceError, match=f"GRANT UPDATE ON `{database.name}`.`outbox_event`"):
            Store(pool, shape).mark_sent([(1, "x")])
        pool.dispose()
        wrong = Database(url.set(password="nope-secret"))
        pool = engine(settings(wrong))
        with pytest.raises(SourceError, match=f"refused the login.*{user}") as caught:
            store_error(pool, wrong)
        assert "nope-secret" not in str(caught.value)
        pool.dispose()
    finally:
        database.sql(f"DROP USER {user}@'%'")


def store_error(pool: Engine, database: Database) -> None:
    with database_errors(pool.url), pool.connect() as connection:
        describe_table(connection, settings(database))


def test_wrong_schema_and_nobody_there(database: Database) -> None:
    nowhere = Database(database.url.set(database="no_such_schema"))
    pool = engine(settings(nowhere))
    with pytest.raises(SourceError, match="has no schema 'no_such_schema'"):
        store_error(pool, nowhere)
    pool.dispose()
    closed = Database(database.url.set(port=1))
    pool = engine(settings(closed))
    with pytest.raises(SourceUnavailableError, match=r"127\.0\.0\.1:1 does not answer"):
        store_error(pool, closed)
    pool.dispose()


def retry_at(database: Database, key: str, interval: str) -> None:
    database.sql(
        f"UPDATE outbox_event SET retry_count = 1, next_retry_time = UTC_TIMESTAMP(6) + {interval}"
        " WHERE aggregate_id = %s",
        (key,),
    )


# --- a table that changes -----------------------------------------------------------------------

_INDEXES = ("idx_status_next_retry", "idx_status_aggregate", "idx_status_created")


def test_indexes_that_the_server_must_not_use_are_not_asked_for(
    database: Database, make_store: Callable[..., Store]
) -> None:
    """Who wants to drop an index makes it invisible first, to see whether it is missed."""
    database.create_outbox()
    hidden = "IGNORED" if database.is_mariadb else "INVISIBLE"
    for index in _INDEXES:
        database.sql(f"ALTER TABLE outbox_event ALTER INDEX {index} {hidden}")
    store = make_store()
    rows = insert(database, "a", "b", "a")
    assert store.backlog().pending == 3
    batches = list(store.scan(0, 10))
    assert [entry.event.id for batch in batches for entry in batch] == [
        row_id for row_id, _ in rows
    ]
    store.record_failure(batches[0][0].event, 0, "refused")
    assert store.mark_sent(rows[1:]).done == 2


def test_columns_and_indexes_that_are_dropped_meanwhile(
    database: Database, make_store: Callable[..., Store]
) -> None:
    """The statement that finds it is refused, the next try fits the table."""
    database.create_outbox()
    store = make_store(describe=lambda connection: describe_table(connection, settings(database)))
    rows = insert(database, "a", "b", "c")
    event = next(iter(store.scan(0, 10)))[0].event
    steps: list[tuple[str, Callable[[], object]]] = [
        ("DROP COLUMN sent_at", lambda: store.mark_sent(rows[1:2])),
        ("DROP COLUMN last_error", lambda: store.record_failure(event, 0, "refused")),
        ("DROP COLUMN headers", lambda: store.events([rows[2][0]])),
        *((f"DROP INDEX {index}", lambda: list(store.scan(0, 10))) for index in _INDEXES[1:]),
        (f"RENAME INDEX {_INDEXES[0]} TO other", store.backlog),
    ]
    for change, action in steps:
        database.sql(f"ALTER TABLE outbox_event {change}")
        with suppress(SourceUnavailableError):
            action()
            continue
        action()
    assert database.sql("SELECT status, retry_count FROM outbox_event ORDER BY id") == (
        (0, 1),
        (1, 0),
        (0, 0),
    )
    database.sql("ALTER TABLE outbox_event DROP COLUMN event_type")
    with pytest.raises(SourceError, match="lacks the columns event_type"):
        store.events([rows[2][0]])


def test_a_changed_table_is_an_error_to_who_does_not_expect_it(
    database: Database, store: Store
) -> None:
    rows = insert(database, "a")
    database.sql("ALTER TABLE outbox_event DROP COLUMN sent_at")
    with pytest.raises(ChangedTableError, match="sent_at"):
        store.mark_sent(rows)
