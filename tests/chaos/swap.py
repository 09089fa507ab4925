"""The table replaced under load, as online schema changes by triggers do it."""

from __future__ import annotations

import time
from typing import Any

import pymysql

from tests.support.sql import Database


def swap(database: Database, table: str, number: int, which: int) -> str:
    """Give the table a new column: copy into a new table, which triggers keep up to date, and
    rename. What happened, in words; where the server was in the way, nothing has."""
    new, old = f"_{table}_new{number}", f"_{table}_old{number}"
    triggers = [f"swap{number}_{what}" for what in ("insert", "update", "delete")]
    try:
        connection = database.connect(autocommit=True, read_timeout=30)
    except pymysql.err.Error as error:
        return f"not begun: {error}"
    try:
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION lock_wait_timeout = 5, innodb_lock_wait_timeout = 5")
            _swap(cursor, table, new, old, triggers, which)
        return "done"
    except pymysql.err.Error as error:
        return f"given up: {error}"
    finally:
        connection.close()
        _clean(database, table, new, triggers)


def _swap(cursor: Any, table: str, new: str, old: str, triggers: list[str], which: int) -> None:
    cursor.execute(
        "SELECT column_name FROM information_schema.columns"
        " WHERE table_schema = DATABASE() AND table_name = %s ORDER BY ordinal_position",
        (table,),
    )
    names = [name for (name,) in cursor.fetchall()]
    columns = ", ".join(f"`{name}`" for name in names)
    values = ", ".join(f"NEW.`{name}`" for name in names)
    place = ("", " FIRST", " AFTER event_id")[which % 3]
    keep = f"REPLACE INTO {new} ({columns}) VALUES ({values})"
    drop = f"DELETE IGNORE FROM {new} WHERE id = OLD.id"
    bodies = (keep, f"BEGIN {drop}; {keep}; END", drop)
    cursor.execute(f"CREATE TABLE {new} LIKE {table}")
    cursor.execute(f"ALTER TABLE {new} ADD COLUMN extra{which % 1000} INT NULL{place}")
    for name, what, body in zip(triggers, ("INSERT", "UPDATE", "DELETE"), bodies, strict=True):
        cursor.execute(f"CREATE TRIGGER {name} AFTER {what} ON {table} FOR EACH ROW {body}")
    cursor.execute(
        f"INSERT IGNORE INTO {new} ({columns}) SELECT {columns} FROM {table} LOCK IN SHARE MODE"
    )
    cursor.execute(f"RENAME TABLE {table} TO {old}, {new} TO {table}")
    cursor.execute(f"DROP TABLE {old}")


def _clean(database: Database, table: str, new: str, triggers: list[str]) -> None:
    """What an unfinished swap left: triggers first, they are part of every INSERT."""
    for _ in range(50):
        try:
            connection = database.connect(autocommit=True, read_timeout=30)
            with connection.cursor() as cursor:
                for name in triggers:
                    cursor.execute(f"DROP TRIGGER IF EXISTS {name}")
                cursor.execute(f"DROP TABLE IF EXISTS {new}")
            connection.close()
            return
        except pymysql.err.Error:
            time.sleep(0.3)
