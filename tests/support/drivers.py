"""Every driver that the writer serves, opened on a test's schema."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pymysql
from sqlalchemy import URL
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from dev import mysqlclient
from tests.support.sql import Database

DBAPI = ("pymysql", "mysqlclient", "mysql-connector", "mysql-connector-c")
SQLALCHEMY = ("pymysql", "mysqldb", "mysqlconnector")
ASYNC = ("asyncmy", "aiomysql")


def have_mysqlclient() -> None:
    """Make MySQLdb importable: the installed one, else one that is built and kept in the cache."""
    if importlib.util.find_spec("MySQLdb") is None:
        sys.path.append(str(mysqlclient.fetch()))
        os.environ["MARIADB_PLUGIN_DIR"] = str(mysqlclient.plugins())


def connect(driver: str, database: Database, *, autocommit: bool = False) -> Any:
    """A DB-API connection of ``driver``; the caller closes it."""
    url = database.url
    common: dict[str, Any] = {"host": url.host, "port": url.port, "user": url.username}
    password = url.password or ""
    if driver == "pymysql":
        return pymysql.connect(
            **common, password=password, database=url.database, autocommit=autocommit
        )
    if driver == "mysqlclient":
        have_mysqlclient()
        import MySQLdb

        made = MySQLdb.connect(
            **common, password=password, database=url.database, charset="utf8mb4"
        )
        made.autocommit(autocommit)
        return made
    import mysql.connector

    return mysql.connector.connect(
        **common,
        password=password,
        database=url.database,
        use_pure=driver == "mysql-connector",
        autocommit=autocommit,
        **_connector_options(database),
    )


def engine_url(driver: str, database: Database) -> URL:
    """The SQLAlchemy URL of the test's schema for ``driver``."""
    if driver == "mysqldb":
        have_mysqlclient()
    url = database.url.set(drivername=f"mysql+{driver}")
    return url.update_query_dict(_connector_options(database)) if "connector" in driver else url


def _connector_options(database: Database) -> dict[str, str]:
    # Its default is a collation that MariaDB does not know.
    return {"charset": "utf8mb4", "collation": "utf8mb4_general_ci"} if database.is_mariadb else {}


def run_async(
    driver: str, database: Database, body: Callable[[AsyncEngine], Awaitable[None]], **options: Any
) -> None:
    """Run ``body`` with an asynchronous engine, in an event loop of its own, bounded."""

    async def main() -> None:
        url = database.url.set(drivername=f"mysql+{driver}")
        made = create_async_engine(url, **{"poolclass": NullPool, **options})
        try:
            await asyncio.wait_for(_awaited(body(made)), 120)
        finally:
            await made.dispose()

    asyncio.run(main())


def _awaited(work: Awaitable[None]) -> Coroutine[Any, Any, None]:
    async def wrapped() -> None:
        await work

    return wrapped()
