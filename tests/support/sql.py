"""A schema of its own for each test, and short ways to speak SQL to it."""

from __future__ import annotations

import itertools
import json
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import pymysql
from pymysql.connections import Connection
from sqlalchemy.engine import URL, make_url

from cdc_relay.outbox import table_ddl

_numbers = itertools.count(1)


class Database:
    """One schema on one server. ``sql`` runs in autocommit on a connection of its own."""

    def __init__(self, url: URL) -> None:
        self.url = url
        self._connection: Connection[Any] | None = None

    @classmethod
    @contextmanager
    def create(cls, server_url: str, name: str | None = None) -> Iterator[Self]:
        """A fresh schema, dropped at the end."""
        name = name or f"t{os.getpid()}_{next(_numbers)}"
        base = make_url(server_url)
        made = cls(base.set(database=name))
        admin = cls(base.set(database=None))
        admin.sql(f"DROP DATABASE IF EXISTS `{name}`")
        admin.sql(f"CREATE DATABASE `{name}` CHARACTER SET utf8mb4")
        admin.close()  # the test may restart the server
        try:
            yield made
        finally:
            made.close()
            admin.sql(f"DROP DATABASE IF EXISTS `{name}`")
            admin.close()

    @property
    def name(self) -> str:
        return str(self.url.database)

    @property
    def text(self) -> str:
        """The URL with its password, for the environment of a process."""
        return self.url.render_as_string(hide_password=False)

    @property
    def is_mariadb(self) -> bool:
        return "MariaDB" in str(self.sql("SELECT VERSION()")[0][0])

    def connect(self, **options: Any) -> Connection[Any]:
        """A new connection; autocommit is off unless asked for. The caller closes it."""
        arguments: dict[str, Any] = {
            "host": self.url.host,
            "port": self.url.port,
            "user": self.url.username,
            "password": self.url.password or "",
            "database": self.url.database,
            "charset": "utf8mb4",
            "connect_timeout": 10,
            "read_timeout": 60,
        }
        return pymysql.connect(**{**arguments, **options})

    def sql(self, statement: str, parameters: Sequence[object] | None = None) -> Sequence[Any]:
        """Run one statement in autocommit and return its rows."""
        if self._connection is None or not self._connection.open:
            self._connection = self.connect(autocommit=True)
        with self._connection.cursor() as cursor:
            cursor.execute(statement, parameters)
            return cursor.fetchall() or ()

    @contextmanager
    def user(
        self, *grants: str, require: str = "NONE", password: str = "s3cret-Wörd"
    ) -> Iterator[Database]:
        """This schema through a new user with the server's default authentication, dropped at the
        end. ``grants`` are what stands between GRANT and TO; ``{schema}`` is this schema."""
        name = f"u{os.getpid()}_{next(_numbers)}"
        self.sql(f"CREATE USER {name}@'%%' IDENTIFIED BY %s REQUIRE {require}", (password,))
        try:
            for grant in grants:
                self.sql(f"GRANT {grant.format(schema=f'`{self.name}`')} TO {name}@'%'")
            yield Database(self.url.set(username=name, password=password))
        finally:
            self.sql(f"DROP USER {name}@'%'")

    def close(self) -> None:
        """Close the connection of ``sql``; it is opened again on demand."""
        if self._connection is not None and self._connection.open:
            self._connection.close()
        self._connection = None

    def create_outbox(self, table: str = "outbox_event") -> None:
        """Create the table of ``cdc-relay schema``."""
        for statement in table_ddl(table):
            self.sql(statement)


INSERT = (
    "INSERT INTO {table} (event_id, aggregate_type, aggregate_id, event_type, payload, headers)"
    " VALUES (%s, %s, %s, %s, %s, %s)"
)


def insert(table: str, rows: Sequence[tuple[object, ...]]) -> tuple[str, list[object]]:
    """One INSERT of many ``row``s, and its values."""
    head, one = INSERT.format(table=table).split(" VALUES ")
    return f"{head} VALUES " + ", ".join([one] * len(rows)), [v for values in rows for v in values]


def row(
    key: str,
    payload: object = None,
    *,
    kind: str = "order",
    event_type: str = "CREATED",
    event_id: str | None = None,
    headers: object = None,
) -> tuple[object, ...]:
    """Values for ``INSERT``; ``payload`` and ``headers`` as JSON text, None is SQL NULL."""
    return (
        event_id or str(uuid.uuid4()),
        kind,
        key,
        event_type,
        None if payload is None else json.dumps(payload, ensure_ascii=False),
        None if headers is None else json.dumps(headers, ensure_ascii=False),
    )


def purge_logs(database: Database) -> None:
    """Leave nothing but the newest file of the log. A file is kept while somebody reads it: a dump
    whose end the server has not seen, and MariaDB's engines."""
    for _ in range(300):
        files = database.sql("SHOW BINARY LOGS")
        if len(files) == 1:
            return
        database.sql("PURGE BINARY LOGS TO %s", (files[-1][0],))
        time.sleep(0.1)
    raise AssertionError(f"not purged: {files}")
