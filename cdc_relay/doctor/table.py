"""The outbox table: what it must be, and what makes it slow or treacherous."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, MetaData
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateColumn

from cdc_relay.columns import Columns
from cdc_relay.config import Settings
from cdc_relay.database import describe_table, is_mariadb, quote
from cdc_relay.doctor.finding import Finding, How, Level
from cdc_relay.doctor.traffic import RECENT_ROWS
from cdc_relay.errors import ConfigError, SourceError
from cdc_relay.outbox import OPTIONAL_COLUMNS, REQUIRED_COLUMNS, outbox_table, upgrade_ddl

_VISIBLE: Final = ("VISIBLE", "IS_VISIBLE = 'YES'")
_LIMITS: Final = {
    "tinyint": 1 << 7,
    "smallint": 1 << 15,
    "mediumint": 1 << 23,
    "int": 1 << 31,
    "bigint": 1 << 63,
}
_HEADROOM: Final = 0.8
_AHEAD_S: Final = 60
_NO_SUCH_TABLE: Final = (1146, 1932)


class _Column(NamedTuple):
    data_type: str
    column_type: str
    nullable: bool
    default: str
    charset: str
    collation: str
    extra: str


def check_table(connection: Connection, settings: Settings) -> Iterator[Finding]:
    """Everything about the table; ends early where it cannot be read at all."""
    names = Columns(settings.columns)
    for finding in _check_table(connection, settings, names):
        sql = finding.how == "sql"
        yield replace(finding, mend=tuple(map(names.sql, finding.mend))) if sql else finding


def _check_table(connection: Connection, settings: Settings, names: Columns) -> Iterator[Finding]:
    """The findings, their statements in our names of the columns."""
    schema, table = settings.schema_and_table()
    name = f"{quote(schema)}.{quote(table)}"
    found = connection.exec_driver_sql(
        "SELECT TABLE_SCHEMA, TABLE_NAME, TABLE_TYPE, ENGINE, AUTO_INCREMENT"
        " FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s",
        (schema, table),
    ).first()
    if found is None:
        yield _missing(connection, settings, schema, table)
        return
    yield _found("table", "ok", f"{name} is there")
    if found[2] == "BASE TABLE":
        yield _engine(name, str(found[3]))
    columns = {names.key(key): column for key, column in _columns(connection, schema, table)}
    lacking = [column for column in REQUIRED_COLUMNS if column not in columns]
    if lacking:
        yield _found(
            "columns",
            "failure",
            f"{name} lacks {', '.join(names[column] for column in lacking)}",
            _adding(name, lacking, columns, _indexed(connection, schema, table, names)[0]),
        )
        return
    yield from _key(name, columns, found[4])
    yield from _status(name, columns)
    yield from _identity(connection, name, columns, names)
    yield _created_at(connection, name, columns["created_at"])
    yield from _indexes(connection, schema, table, names)
    yield from _triggers(connection, schema, table)
    yield from _foreign_keys(connection, schema, table)
    try:
        describe_table(connection, settings)
    except (ConfigError, SourceError) as error:
        yield _found("shape", "failure", str(error), _statement(name, str(error), names))
    else:
        yield _found("shape", "ok", "the relay can read and mark its rows")
        yield from _ahead(connection, name, names)


def _missing(connection: Connection, settings: Settings, schema: str, table: str) -> Finding:
    try:
        sql = f"SELECT 1 FROM {quote(schema)}.{quote(table)} LIMIT 0"
        connection.exec_driver_sql(sql.replace("%", "%%"))
    except DBAPIError as error:
        if getattr(error.orig, "args", (0,))[0] not in _NO_SUCH_TABLE:
            # information_schema hides what may not be seen: the grants' lines say the rest.
            return _found("table", "failure", f"{schema}.{table} cannot be seen: SELECT is missing")
    rows: Any = connection.exec_driver_sql(
        "SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.TABLES"
        " WHERE LOWER(TABLE_SCHEMA) = LOWER(%s) AND LOWER(TABLE_NAME) = LOWER(%s) LIMIT 1",
        (schema, table),
    ).first()
    if rows is not None:
        right = f"{rows[0]}.{rows[1]}"
        return _found(
            "table",
            "failure",
            f"there is no table {schema}.{table}, but there is {right}: this server, and its "
            "binlog, tell upper from lower case",
            (f"export CDC_RELAY_TABLE={right}",),
            "shell",
        )
    return _found(
        "table",
        "failure",
        f"there is no table {schema}.{table}",
        (f"cdc-relay init --table {settings.table}",),
        "shell",
    )


def _engine(name: str, engine: str) -> Finding:
    if engine.lower() in ("innodb", "ndbcluster", "rocksdb"):
        return _found("engine", "ok", engine)
    return _found(
        "engine",
        "failure",
        f"{engine} has no transactions: an event would outlive the rollback of its order",
        (f"ALTER TABLE {name} ENGINE = InnoDB;",),
    )


def _columns(connection: Connection, schema: str, table: str) -> list[tuple[str, _Column]]:
    rows = connection.exec_driver_sql(
        "SELECT LOWER(COLUMN_NAME), LOWER(DATA_TYPE), LOWER(COLUMN_TYPE), IS_NULLABLE = 'YES',"
        " COALESCE(COLUMN_DEFAULT, ''), COALESCE(CHARACTER_SET_NAME, ''),"
        " COALESCE(COLLATION_NAME, ''), LOWER(EXTRA)"
        " FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s",
        (schema, table),
    ).all()
    return [
        (row[0], _Column(row[1], row[2], bool(row[3]), str(row[4]), row[5], row[6], row[7]))
        for row in rows
    ]


def _adding(
    name: str,
    lacking: list[str],
    there: Collection[str],
    indexes: Mapping[str, tuple[str, ...]],
) -> tuple[str, ...]:
    """The statements that add required columns. Rows of a table that had no number count as sent:
    another relay has sent them, and their order is not known. Whoever thinks otherwise sets their
    status to 0. It gets the optional columns as well: it is rewritten anyway."""
    parts = []
    if "id" in lacking:
        # One that has a key of another kind (a UUID) keeps it as a unique one.
        key = indexes.get("PRIMARY")
        if key is not None:
            parts += ["DROP PRIMARY KEY", f"ADD UNIQUE KEY uk_event_id ({', '.join(key)})"]
        parts.append(f"ADD COLUMN {_ours('id')} PRIMARY KEY")
        lacking = [*lacking, *(column for column in OPTIONAL_COLUMNS if column not in there)]
    for column in lacking:
        if column != "id":
            kind = _ours(column)
            foreign = column == "status" and "id" in lacking
            parts.append(f"ADD COLUMN {kind.replace('0', '1') if foreign else kind}")
    statements = [f"ALTER TABLE {name} {', '.join(parts)};"]
    if {"id", "status"} <= set(lacking):
        statements.append(f"ALTER TABLE {name} ALTER COLUMN status SET DEFAULT 0;")
    return tuple(statements)


def _key(name: str, columns: Mapping[str, _Column], next_id: object) -> Iterator[Finding]:
    column = columns["id"]
    limit = _LIMITS.get(column.data_type)
    mend = (f"ALTER TABLE {name} MODIFY id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT;",)
    if limit is None:
        return  # a wrong type is described below
    if "auto_increment" not in column.extra:
        yield _found(
            "auto_increment",
            "failure",
            "id is not AUTO_INCREMENT: compensator and retries send an aggregate's rows by id",
            mend,
        )
        return
    limit = 2 * limit if "unsigned" in column.column_type else limit
    used = int(str(next_id or 0)) / limit
    if used < _HEADROOM:
        yield _found("auto_increment", "ok", f"{used:.0%} of {column.column_type} is used")
    else:
        yield _found(
            "auto_increment",
            "failure",
            f"{used:.0%} of {column.column_type} is used: at its end no service can insert, so no "
            "order is taken",
            mend,
        )


def _status(name: str, columns: Mapping[str, _Column]) -> Iterator[Finding]:
    if columns["status"].nullable:
        yield _found(
            "status",
            "failure",
            "status may be NULL: such a row is neither pending nor sent, and never goes out",
            (
                f"UPDATE {name} SET status = 0 WHERE status IS NULL;",
                f"ALTER TABLE {name} MODIFY status TINYINT NOT NULL DEFAULT 0;",
            ),
        )
    elif columns["status"].default.strip("'") != "0":
        yield _found(
            "status",
            "failure",
            f"status defaults to {columns['status'].default or 'nothing'}: a row that a service "
            "inserts without it is not pending",
            (f"ALTER TABLE {name} ALTER COLUMN status SET DEFAULT 0;",),
        )


def _identity(
    connection: Connection, name: str, columns: Mapping[str, _Column], names: Columns
) -> Iterator[Finding]:
    loose = [
        column
        for column in ("event_id", "aggregate_type", "aggregate_id")
        if columns[column].collation.endswith("_ci")
    ]
    if loose:
        yield _found(
            "collation",
            "warning",
            f"{', '.join(loose)} compare without case: 'A1' and 'a1' are one aggregate to the "
            "database and two keys to Kafka",
            _bytewise(connection, name, {names[one]: columns[one].charset for one in loose}),
        )
    else:
        yield _found("collation", "ok", "event and aggregate ids are compared byte by byte")


# A column's line: its name, its type (of which an enumeration's words may hold anything), and what
# else it is. The manuals' "SHOW CREATE TABLE" name neither where it is the table's.
_DEFINITION: Final = re.compile(
    r"^ *`(?P<name>[^`]+)` (?P<type>\w+(?:\((?:'(?:[^']|'')*'|[^')])*\))?)"
    r"(?: CHARACTER SET \w+)?(?: COLLATE \w+)?(?P<rest>.*?),?$",
    re.MULTILINE,
)


def _bytewise(connection: Connection, name: str, charsets: Mapping[str, str]) -> tuple[str, ...]:
    """The statement that has these columns, by the table's names, compared by the bytes of their
    character sets; length, nullability, default and all else stay as they are."""
    shown = str(connection.exec_driver_sql(f"SHOW CREATE TABLE {name}".replace("%", "%%")).one()[1])
    parts = [
        f"MODIFY `{column['name']}` {column['type']} CHARACTER SET {charset}"
        f" COLLATE {charset}_bin{column['rest']}"
        for column in _DEFINITION.finditer(shown)
        if (charset := charsets.get(column["name"].lower()))
    ]
    return (f"ALTER TABLE {name} {', '.join(parts)};",) if parts else ()


def _created_at(connection: Connection, name: str, column: _Column) -> Finding:
    default = column.default.lower()
    if column.data_type != "datetime" or "utc_timestamp" in default:
        return _found("created_at", "ok", "created_at is UTC by the database's clock")
    if not default or default == "null":
        return _found(
            "created_at",
            "warning",
            "created_at has no default: each service stamps rows by a clock of its own, and ages "
            "are as right as the worst of them",
            (f"ALTER TABLE {name} ALTER COLUMN created_at SET DEFAULT (UTC_TIMESTAMP(6));",),
        )
    zone = connection.exec_driver_sql("SELECT @@global.time_zone, @@system_time_zone").one()
    where = zone[1] if str(zone[0]).upper() == "SYSTEM" else zone[0]
    return _found(
        "created_at",
        "warning",
        f"created_at defaults to {column.default}, which follows the session's time zone (the "
        f"server's is {where}): read as UTC, ages and occurred_at are off by its offset",
        (f"ALTER TABLE {name} ALTER COLUMN created_at SET DEFAULT (UTC_TIMESTAMP(6));",),
    )


def _ahead(connection: Connection, name: str, names: Columns) -> Iterator[Finding]:
    """Whether services stamp rows by a clock, or in a time zone, of their own."""
    sql = names.sql(
        "SELECT TIMESTAMPDIFF(SECOND, UTC_TIMESTAMP(6), MAX(created_at)) FROM"
        f" (SELECT created_at FROM {name} ORDER BY id DESC LIMIT {RECENT_ROWS}) AS recent"
    )
    ahead = int(connection.exec_driver_sql(sql.replace("%", "%%")).scalar() or 0)
    if ahead >= _AHEAD_S:
        yield _found(
            "created_at",
            "warning",
            f"a recent row is stamped {ahead} s ahead of the database's clock: a service writes "
            "its local time, or its clock is wrong; ages and occurred_at are off by as much, and "
            "brokers refuse what comes from too far in the future",
            ("leave created_at to its default, or write UTC (datetime.now(UTC))",),
            "advice",
        )


def _indexed(
    connection: Connection, schema: str, table: str, names: Columns
) -> tuple[dict[str, tuple[str, ...]], set[str]]:
    """The columns of each index, and which indexes are unique."""
    rows = connection.exec_driver_sql(
        "SELECT INDEX_NAME, LOWER(COLUMN_NAME), NON_UNIQUE FROM information_schema.STATISTICS"
        " WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s ORDER BY INDEX_NAME, SEQ_IN_INDEX",
        (schema, table),
    ).all()
    indexes: dict[str, tuple[str, ...]] = {}
    for index, column, _ in rows:
        indexes[index] = (*indexes.get(index, ()), names.key(str(column)))
    return indexes, {index for index, _, shared in rows if not int(shared)}


def _indexes(connection: Connection, schema: str, table: str, names: Columns) -> Iterator[Finding]:
    name = f"{quote(schema)}.{quote(table)}"
    indexes, unique = _indexed(connection, schema, table, names)
    if indexes.get("PRIMARY", ("",))[0] != "id":
        yield _found(
            "primary_key",
            "failure",
            "id is not the primary key: rows cannot be marked one by one",
            (f"ALTER TABLE {name} ADD PRIMARY KEY (id);",)
            if "PRIMARY" not in indexes
            else (f"ALTER TABLE {name} DROP PRIMARY KEY, ADD PRIMARY KEY (id);",),
        )
    if not any(indexes[index] == ("event_id",) for index in unique):
        yield _found(
            "uk_event_id",
            "warning",
            "nothing keeps an event id unique: who inserts an event twice is not stopped",
            (f"CREATE UNIQUE INDEX uk_event_id ON {name} (event_id);",),
        )
    else:
        yield _found("uk_event_id", "ok", "event ids are unique")
    shown, used = ("NOT IGNORED", "IGNORED = 'NO'") if is_mariadb(connection) else _VISIBLE
    sql = (
        "SELECT DISTINCT INDEX_NAME FROM information_schema.STATISTICS"
        f" WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s AND NOT {used}"
    )
    hidden = set(connection.exec_driver_sql(sql, (schema, table)).scalars())
    ours = outbox_table(MetaData(), f"{schema}.{table}")
    for wanted in sorted(ours.indexes, key=lambda index: str(index.name)):
        over = tuple(column.name for column in wanted.columns)
        check = str(wanted.name)
        fitting = [index for index, indexed in indexes.items() if indexed[: len(over)] == over]
        if not hidden.issuperset(fitting):
            yield _found(check, "ok", f"an index begins with {', '.join(over)}")
            continue
        if fitting:
            yield _found(
                check,
                "warning",
                f"the index {fitting[0]} is hidden from statements, and no other begins with "
                f"{', '.join(over)}: scans read the whole table as it grows",
                (f"ALTER TABLE {name} ALTER INDEX {quote(fitting[0])} {shown};",),
            )
            continue
        others = [str(index.name) for index in ours.indexes if index is not wanted]
        # An index of this name over other columns has to give way.
        drop = (f"DROP INDEX {check} ON {name};",) if check in indexes else ()
        yield _found(
            check,
            "warning",
            f"no index begins with {', '.join(over)}: scans read the whole table as it grows",
            (*drop, *(line + ";" for line in upgrade_ddl(ours, ours.columns.keys(), others))),
        )


def _triggers(connection: Connection, schema: str, table: str) -> Iterator[Finding]:
    rows = connection.exec_driver_sql(
        "SELECT TRIGGER_NAME, EVENT_MANIPULATION FROM information_schema.TRIGGERS"
        " WHERE EVENT_OBJECT_SCHEMA = %s AND EVENT_OBJECT_TABLE = %s ORDER BY TRIGGER_NAME",
        (schema, table),
    ).all()
    ours = [name for name, event in rows if event in ("UPDATE", "DELETE")]
    if not ours:
        yield _found("triggers", "ok", "no trigger runs when rows are marked")
        return
    yield _found(
        "triggers",
        "warning",
        f"{', '.join(ours)}: runs for every row that is marked, in the relay's transaction, and "
        "can make it fail",
        tuple(f"DROP TRIGGER {quote(schema)}.{quote(name)};" for name in ours),
    )


def _foreign_keys(connection: Connection, schema: str, table: str) -> Iterator[Finding]:
    rows = connection.exec_driver_sql(
        "SELECT CONSTRAINT_SCHEMA, TABLE_NAME, CONSTRAINT_NAME, REFERENCED_TABLE_NAME, DELETE_RULE"
        " FROM information_schema.REFERENTIAL_CONSTRAINTS"
        " WHERE CONSTRAINT_SCHEMA = %s AND TABLE_NAME = %s"
        " OR UNIQUE_CONSTRAINT_SCHEMA = %s AND REFERENCED_TABLE_NAME = %s",
        (schema, table, schema, table),
    ).all()
    if not rows:
        yield _found("foreign_keys", "ok", "no foreign key from or to the table")
    for key_schema, owner, key, target, rule in rows:
        cascades = owner == table and rule == "CASCADE"
        yield _found(
            "foreign_keys",
            "failure" if cascades else "warning",
            f"{key} deletes events that are still pending together with their row of {target}, and "
            "the binlog does not show it"
            if cascades
            else f"{key} ({owner} to {target}) adds locks to each insert and delete of events",
            (f"ALTER TABLE {quote(key_schema)}.{quote(owner)} DROP FOREIGN KEY {quote(key)};",),
        )


def _ours(column: str) -> str:
    """A column as ``cdc-relay schema`` defines it."""
    table = outbox_table(MetaData())
    return str(CreateColumn(table.columns[column]).compile(dialect=mysql.dialect()))


def _statement(name: str, text: str, names: Columns) -> tuple[str, ...]:
    """The statement that mends what an error of ours says: its own end, or the column's type."""
    _, found, statement = text.rpartition(": ALTER TABLE ")
    if found:
        return (f"ALTER TABLE {statement};",)
    wrong = re.search(r"column (\w+) is of type", text)
    ours = names.ours(wrong[1]) if wrong else None
    return (f"ALTER TABLE {name} MODIFY {_ours(ours)};",) if ours else ()


def _found(
    check: str, level: Level, text: str, mend: tuple[str, ...] = (), how: How = ""
) -> Finding:
    return Finding("table", check, level, text, mend, how or ("sql" if mend else ""))
