"""The services: threads that write events and know what they committed.

Each aggregate has one writer, so its commit order is the order in which that writer numbered its
events. Every transaction writes its number into ``journal`` too: after a crash of the database the
journal tells whether a COMMIT without an answer has happened.
"""

from __future__ import annotations

import json
import random
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pymysql

from tests.chaos.plan import Plan
from tests.support.sql import INSERT, Database

ORDER: Final = "order"
INVOICE: Final = "invoice"
LATE: Final = "late"
"""Its topic is created late."""
NARROW: Final = "narrow"
"""Its topic takes small records only."""
HIDDEN: Final = "hidden"
"""Its rows are not in the binlog."""
KINDS: Final = (ORDER, INVOICE, LATE, NARROW, HIDDEN)
NARROW_BYTES: Final = 20_000

_WRITERS: Final = 3
_KEYS: Final = 6
_PAUSE_S: Final = 0.03
_LARGE_ROWS: Final = 1500


class Event(NamedTuple):
    """A row as it was written."""

    event_id: str
    kind: str
    key: str
    payload: str | None
    headers: str | None
    sendable: bool


@dataclass
class Transaction:
    """What a transaction wrote, without what its savepoints took back."""

    events: list[Event] = field(default_factory=list)
    acknowledged: bool = False
    """Whether COMMIT returned."""


class Writers:
    """Write until ``stop``. A database that is away is waited for."""

    def __init__(self, database: Database, table: str, plan: Plan) -> None:
        self._database = database
        self._table = table
        self._plan = plan
        self._stopping = threading.Event()
        self._large = threading.Event()
        self._errors: list[BaseException] = []
        self._transactions: dict[tuple[int, int], Transaction] = {}
        self._threads = [
            threading.Thread(target=self._guarded, args=(number,), name=f"writer-{number}")
            for number in range(_WRITERS)
        ]

    def start(self) -> None:
        self._database.sql(
            "CREATE TABLE journal (writer INT, number INT, PRIMARY KEY (writer, number))"
        )
        for thread in self._threads:
            thread.start()

    def large(self) -> None:
        """Let the next transaction be a large one."""
        self._large.set()

    def stop(self) -> None:
        """End; raises what went wrong in a thread."""
        self._stopping.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(90)
                assert not thread.is_alive(), "a writer does not end"
        if self._errors:
            raise self._errors[0]

    def committed(self) -> list[Event]:
        """The events of committed transactions; those of one aggregate in commit order."""
        there = set(self._database.sql("SELECT writer, number FROM journal"))
        for name, transaction in self._transactions.items():
            assert name in there or not transaction.acknowledged, f"the database forgot {name}"
        return [
            event
            for name, transaction in sorted(self._transactions.items())
            if name in there
            for event in transaction.events
        ]

    def _guarded(self, writer: int) -> None:
        try:
            self._run(writer, random.Random(f"chaos-{self._plan.seed}-{writer}"))
        except BaseException as error:
            self._errors.append(error)

    def _run(self, writer: int, chance: random.Random) -> None:
        number = 0
        deadline = 0.0
        while True:
            # What is prepared must not stay so, when the end has come as well.
            if self._stopping.is_set():
                deadline = deadline or time.monotonic() + 60
                if time.monotonic() > deadline:
                    raise TimeoutError("the database does not come back")
            try:
                connection = self._database.connect()
            except pymysql.err.Error:
                time.sleep(0.05)
                continue
            try:
                self._recover(connection, writer)
                while not self._stopping.is_set():
                    number += 1
                    self._transaction(connection, writer, number, chance)
                    self._stopping.wait(_PAUSE_S * chance.random() * 2)
                connection.close()
                return
            except pymysql.err.Error:  # gone, or a deadlock: the journal tells
                with suppress(Exception):
                    connection.close()

    def _transaction(
        self, connection: Any, writer: int, number: int, chance: random.Random
    ) -> None:
        transaction = self._transactions[writer, number] = Transaction()
        hidden = self._plan.hidden and chance.random() < 0.05
        xid = f"'{self._database.name}-{writer}-{number}'"
        two_phases = self._plan.xa and not hidden and chance.random() < 0.2
        with connection.cursor() as cursor:
            if hidden:
                cursor.execute("SET SESSION sql_log_bin = 0")
            if two_phases:
                cursor.execute(f"XA START {xid}")
            cursor.execute("INSERT INTO journal VALUES (%s, %s)", (writer, number))
            made = 0
            for _ in range(chance.choice((1, 1, 1, 2, 3))):
                count = chance.choice((1, 1, 2, 5))
                if self._large.is_set() and not hidden:
                    self._large.clear()
                    count = _LARGE_ROWS
                rows = [
                    self._event(writer, f"{number}-{made + index}", hidden, chance)
                    for index in range(count)
                ]
                made += count
                taken_back = chance.random() < 0.1
                if taken_back:
                    cursor.execute("SAVEPOINT here")
                self._insert(cursor, rows, chance)
                if taken_back:
                    cursor.execute("ROLLBACK TO SAVEPOINT here")
                else:
                    transaction.events += rows
            if chance.random() < 0.01:
                self._stopping.wait(1.0)  # a long transaction
            ending = "ROLLBACK" if chance.random() < 0.1 else "COMMIT"
            if two_phases:
                cursor.execute(f"XA END {xid}")
                cursor.execute(f"XA PREPARE {xid}")
                self._stopping.wait(chance.choice((0.0, 0.0, 0.5)))
                cursor.execute(f"XA {ending} {xid}")
            else:
                cursor.execute(ending)
            transaction.acknowledged = ending == "COMMIT"
            if hidden:
                cursor.execute("SET SESSION sql_log_bin = 1")

    def _recover(self, connection: Any, writer: int) -> None:
        """As a transaction manager after a crash: end what this writer has prepared."""
        prefix = f"{self._database.name}-{writer}-"
        connection.autocommit(True)  # MariaDB ends nothing in a session that has begun something
        with connection.cursor() as cursor:
            cursor.execute("XA RECOVER")
            for _, length, _, xid in cursor.fetchall():
                name = (xid if isinstance(xid, str) else xid.decode())[:length]  # MariaDB: bytes
                if name.startswith(prefix):
                    cursor.execute(f"XA COMMIT '{name}'")
                    number = int(name.removeprefix(prefix))
                    self._transactions[writer, number].acknowledged = True
        connection.autocommit(False)

    def _insert(self, cursor: Any, rows: list[Event], chance: random.Random) -> None:
        sql = INSERT.format(table=self._table)
        values = [
            (row.event_id, row.kind, row.key, "CHANGED", row.payload, row.headers) for row in rows
        ]
        if chance.random() < 0.5:
            cursor.executemany(sql, values)  # one statement
        else:
            for value in values:
                cursor.execute(sql, value)

    def _event(self, writer: int, name: str, hidden: bool, chance: random.Random) -> Event:
        plan = self._plan
        kinds = [ORDER, ORDER, INVOICE] if plan.late_topic == 0 else [ORDER, ORDER, INVOICE, LATE]
        kind = HIDDEN if hidden else chance.choice(kinds)
        key = f"k{writer}-{chance.randrange(_KEYS)}"
        filling = chance.choice(("", "é€𝄞", "x" * chance.randrange(300)))
        sendable = True
        if not hidden and chance.random() < 0.02:
            if plan.unsendable and chance.random() < 0.1:
                kind, key, sendable = ORDER, f"fat-{writer}", False
                filling = chance.randbytes(700_000).hex()
            elif plan.unsendable and chance.random() < 0.7:
                kind, key = ORDER, f"fat-{writer}"
            elif plan.narrow:
                kind, key = NARROW, f"n{writer}-{chance.randrange(3)}"
                if chance.random() < 0.3:
                    filling = chance.randbytes(2 * NARROW_BYTES).hex()
        payload: str | None = json.dumps(
            {"name": name, "text": filling, "amount": chance.randrange(10**6) / 100},
            ensure_ascii=False,
        )
        if chance.random() < 0.02 and sendable and kind != NARROW:
            payload = None  # a tombstone
        headers = chance.choice(
            (None, None, '{"traceparent": "00-1-2-01", "tenant": null, "n": 3}')
        )
        return Event(f"{writer}-{name}", kind, key, payload, headers, sendable)
