"""Services under way: threads that order through the outbox, and the account of what arrived."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import pymysql

from tests.support.harness import Harness, Message
from tests.support.sql import Database

_ROLLBACKS = 0.1
ACCOUNTS = (
    "CREATE TABLE IF NOT EXISTS account (id VARCHAR(64) COLLATE utf8mb4_bin PRIMARY KEY,"
    " n INT NOT NULL) CHARACTER SET utf8mb4"
)


class Load:
    """Threads that write events of shared aggregates until ``stop``, or a given number each.

    Every transaction takes the aggregate's row lock first, as a service must, and numbers its
    events from it: the payload's ``n`` runs 1, 2, 3, … per aggregate in commit order. One in ten
    is rolled back. A database that goes away is waited for.
    """

    def __init__(
        self,
        harness: Harness,
        keys: Sequence[str],
        *,
        kind: str = "order",
        threads: int = 3,
        each: int | None = None,
        pause: float = 0.0,
        seed: int = 1,
    ) -> None:
        self._database = harness.database
        self._table = harness.table
        self._keys = keys
        self._kind = kind
        self._each = each
        self._pause = pause
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._guarded, args=(random.Random(seed * 1000 + number),))
            for number in range(threads)
        ]

    def __enter__(self) -> Self:
        self._database.sql(ACCOUNTS)
        for key in self._keys:
            self._database.sql("INSERT IGNORE INTO account VALUES (%s, 0)", (key,))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Let every thread end its transaction; raises what went wrong in one."""
        self._stopping.set()
        self.wait()

    def wait(self, timeout: float = 60) -> None:
        """Wait until every thread has written its number of transactions."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.1, deadline - time.monotonic()))
            assert not thread.is_alive(), f"the load does not end within {timeout} s"
        if self._error is not None:
            raise self._error

    def _guarded(self, chance: random.Random) -> None:
        try:
            self._run(chance)
        except BaseException as error:
            self._error = error

    def _run(self, chance: random.Random) -> None:
        done = 0
        while not self._stopping.is_set() and done != self._each:
            try:
                connection = self._database.connect()
            except pymysql.err.OperationalError:
                self._stopping.wait(0.05)
                continue
            try:
                while not self._stopping.is_set() and done != self._each:
                    self._transaction(connection, chance)
                    done += 1
                    if self._pause:
                        self._stopping.wait(self._pause)
                connection.close()
            except (pymysql.err.OperationalError, pymysql.err.InterfaceError):
                with contextlib.suppress(pymysql.err.Error):
                    connection.close()

    def _transaction(self, connection: Any, chance: random.Random) -> None:
        key, count = chance.choice(self._keys), chance.choice((1, 1, 2, 3))
        with connection.cursor() as cursor:
            cursor.execute("UPDATE account SET n = n + %s WHERE id = %s", (count, key))
            cursor.execute("SELECT n FROM account WHERE id = %s", (key,))
            last = int(cursor.fetchone()[0])
            cursor.executemany(
                f"INSERT INTO {self._table}"
                " (event_id, aggregate_type, aggregate_id, event_type, payload)"
                " VALUES (%s, %s, %s, %s, %s)",
                [
                    (str(uuid.uuid4()), self._kind, key, "CHANGED", json.dumps({"n": number}))
                    for number in range(last - count + 1, last + 1)
                ],
            )
        if chance.random() < _ROLLBACKS:
            connection.rollback()
        else:
            connection.commit()


class Account(NamedTuple):
    """What was committed against what arrived."""

    committed: int
    lost: int
    invented: int
    duplicates: int
    disordered: list[str]
    """Aggregates whose events, each at its first arrival, are not in commit order."""

    @property
    def whole(self) -> bool:
        """Nothing lost, nothing invented, everything in order."""
        return not (self.lost or self.invented or self.disordered)


def repeated(messages: Iterable[Message]) -> dict[str, list[tuple[int, int]]]:
    """Partition and offset of each record of the events that arrived more than once."""
    places: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for message in messages:
        places[message.event_id].append((message.partition, message.offset))
    return {event_id: found for event_id, found in places.items() if len(found) > 1}


def account(database: Database, table: str, kind: str, messages: Iterable[Message]) -> Account:
    """Compare the table with what a consumer saw; commit order is the payload's ``n``."""
    rows = database.sql(
        f"SELECT event_id, aggregate_id, payload FROM {table} WHERE aggregate_type = %s", (kind,)
    )
    committed: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for event_id, key, payload in rows:
        committed[key].append((json.loads(payload)["n"], event_id))
    arrived: dict[str, dict[str, None]] = defaultdict(dict)
    count = 0
    for message in messages:
        arrived[message.key][message.event_id] = None
        count += 1
    expected = {event_id for events in committed.values() for _, event_id in events}
    found = {event_id for events in arrived.values() for event_id in events}
    disordered = [
        key
        for key, events in committed.items()
        if [event_id for _, event_id in sorted(events) if event_id in found]
        != [event_id for event_id in arrived[key] if event_id in expected]
    ]
    return Account(
        len(rows), len(expected - found), len(found - expected), count - len(found), disordered
    )
