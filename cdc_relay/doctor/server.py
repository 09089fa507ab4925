"""The database server: what makes its binlog fit to be read, and what quietly spoils it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from cdc_relay.binlog.probe import probe
from cdc_relay.columns import Columns
from cdc_relay.config import Settings
from cdc_relay.database import is_mariadb, quote, seen_columns
from cdc_relay.doctor.finding import Finding, How, Level, literal
from cdc_relay.errors import SourceError
from cdc_relay.outbox import marked_columns

_DAY_S: Final = 86_400
_WEEK_S: Final = 7 * _DAY_S
# RDS for MySQL takes no more; Aurora would.
_RDS_MOST_HOURS: Final = 168
# A batch of marks is about 350 kB of SQL; the server refuses a longer statement than this.
_LEAST_PACKET: Final = 1 << 20
_SKEW_S: Final = 2.0
_LOCAL: Final = ("localhost", "127.0.0.1", "::1", "")


class Server(NamedTuple):
    """A server's answers."""

    maria: bool
    version: str
    account: str
    """The account that the server took for us, as GRANT wants it."""
    variables: Mapping[str, str]
    """Global variables by lower-case name."""
    skew_s: float
    """By how much its clock is ahead of ours."""
    rds: bool = False
    """Whether it is one of Amazon RDS, which purges binlogs by a retention of its own."""
    rds_hours: int | None = None
    """That retention; 0 where binlogs go as soon as RDS needs them no longer, None where it is not
    known."""

    def get(self, name: str) -> str:
        """A variable in upper case, empty where the server does not have it."""
        return self.variables.get(name, "").upper()

    def number(self, name: str) -> int:
        """A variable that is a number, 0 where there is none."""
        try:
            return int(float(self.variables.get(name) or 0))
        except ValueError:
            return 0

    def set(self, name: str, value: str) -> str:
        """The statement that sets a variable for good (MariaDB: until the next restart)."""
        return f"SET {'GLOBAL' if self.maria else 'PERSIST'} {name} = {value};"

    def kept_s(self) -> float | None:
        """For how long it keeps a binlog; infinity where none is purged by age, None where that is
        not known."""
        if self.rds:
            return None if self.rds_hours is None else self.rds_hours * 3600.0
        seconds = self.number("binlog_expire_logs_seconds")
        if not seconds and self.maria:
            seconds = int(float(self.variables.get("expire_logs_days") or 0) * _DAY_S)
        if not seconds or self.get("binlog_expire_logs_auto_purge") == "OFF":
            return math.inf
        return float(seconds)

    def keep(self, seconds: float) -> str:
        """The statement that has it keep binlogs for so long."""
        if self.rds:
            hours = min(math.ceil(seconds / 3600), _RDS_MOST_HOURS)
            return f"CALL mysql.rds_set_configuration('binlog retention hours', {hours});"
        return self.set("binlog_expire_logs_seconds", str(int(seconds)))


def ask(connection: Connection) -> Server:
    """Ask the server who it is and how it is set."""
    rows = connection.exec_driver_sql("SHOW GLOBAL VARIABLES").all()
    variables = {str(name).lower(): str(value) for name, value in rows}
    user, _, host = str(
        connection.exec_driver_sql("SELECT CURRENT_USER()").scalar_one()
    ).rpartition("@")
    before = time.time()
    now = connection.exec_driver_sql(
        "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    ).scalar_one()
    skew = int(now) / 1e6 - (before + time.time()) / 2
    account = f"{literal(user)}@{literal(host)}"
    rds, hours = _rds(connection, variables)
    maria = is_mariadb(connection)
    return Server(maria, variables.get("version", ""), account, variables, skew, rds, hours)


def _rds(connection: Connection, variables: Mapping[str, str]) -> tuple[bool, int | None]:
    """Whether the server is one of Amazon RDS, and for how many hours it keeps binlogs. By their
    directory they are known to every account, by the table to those that may read it.

    Source: Amazon RDS and Aurora User Guides, "mysql.rds_set_configuration" (NULL, the default:
    binlogs are not retained).
    """
    sql = "SELECT value FROM mysql.rds_configuration WHERE name = 'binlog retention hours'"
    try:
        row = connection.exec_driver_sql(sql).first()
    except DBAPIError:
        return variables.get("basedir", "").startswith("/rdsdbbin/"), None
    return True, int((row and row[0]) or 0)


def check_server(
    connection: Connection, settings: Settings, server: Server, members: int | None
) -> Iterator[Finding]:
    """Everything about the server that a relay depends on. ``members``: how many relays of the
    name run, where Kafka tells."""
    yield _version(server)
    yield from _transport(connection, settings)
    if server.get("log_bin") not in ("ON", "1"):
        yield _found(
            "log_bin",
            "failure",
            "the server writes no binlog: nothing can be streamed; it has to be started with one",
            ("[mysqld]", "log_bin = binlog"),
            "my.cnf",
        )
        return
    yield _found("log_bin", "ok", "the server writes a binlog")
    yield from _format(settings, server)
    yield from _filters(connection, settings)
    yield _durability(server)
    yield _retention(server)
    yield _gtid(server)
    yield from _identity(connection, settings, server, bool(members))
    yield _writable(settings, server)
    yield _packet(server)
    yield _clock(server)


def check_grants(connection: Connection, settings: Settings, server: Server) -> Iterator[Finding]:
    """Try what the relay does, with the relay's own account; nothing is changed."""
    schema, table = settings.schema_and_table()
    name = f"{quote(schema)}.{quote(table)}"
    everywhere = {"REPLICATION CLIENT": "SHOW BINARY LOGS"}
    if settings.mark_row_image == "minimal":
        image = "BINLOG ADMIN" if server.maria else "SESSION_VARIABLES_ADMIN"
        everywhere[image] = "SET SESSION binlog_row_image = @@session.binlog_row_image"
    named = Columns(settings.columns).sql
    marked = marked_columns(seen_columns(connection, settings))
    columns = ", ".join(f"{one} = {one}" for one in marked)
    here = {"SELECT": f"SELECT 1 FROM {name} LIMIT 0"}
    if settings.mark != "none":
        here["UPDATE"] = f"UPDATE {name} SET {columns} WHERE id = 0 AND status = -1"
    if settings.mark == "delete":
        here["DELETE"] = f"DELETE FROM {name} WHERE id = 0 AND status = -1"
    for privilege, statement in (everywhere | here).items():
        scope = "*.*" if privilege in everywhere else name
        refusal = _refused(connection, named(statement))
        yield _grant(privilege, scope, server, refusal)
    yield _grant("REPLICATION SLAVE", "*.*", server, _dump_refused(settings))


def _grant(privilege: str, scope: str, server: Server, refusal: str) -> Finding:
    check = "grant_" + privilege.lower().replace(" ", "_")
    if not refusal:
        return _found(check, "ok", f"{server.account} may {privilege} on {scope}")
    return _found(
        check,
        "failure",
        f"{server.account} lacks {privilege} on {scope}: {refusal}",
        (f"GRANT {privilege} ON {scope} TO {server.account};",),
    )


# Numbers of mysqld_error.h for a missing privilege.
_DENIED: Final = (1044, 1142, 1143, 1227)


def _refused(connection: Connection, statement: str) -> str:
    """Why the statement was refused for want of a privilege; empty where it was not."""
    try:
        connection.exec_driver_sql(statement.replace("%", "%%"))
    except DBAPIError as error:
        code, *rest = getattr(error.orig, "args", (0,))
        return str(rest[0] if rest else error.orig) if code in _DENIED else ""
    return ""


def _dump_refused(settings: Settings) -> str:
    try:
        probe(settings)
    except SourceError as error:
        return str(error) if "may not read the binlog" in str(error) else ""
    return ""


def _version(server: Server) -> Finding:
    parts = server.version.split("-")[0].split(".")
    number = tuple(int(part) for part in parts[:2] if part.isdigit())
    least = (10, 6) if server.maria else (8, 0)
    kind = "MariaDB" if server.maria else "MySQL"
    if number >= least:
        return _found("version", "ok", f"{kind} {server.version}")
    needed = ".".join(map(str, least))
    return _found(
        "version",
        "failure",
        f"{kind} {server.version} is older than {needed}, the oldest that is read",
        (f"upgrade the server to {kind} {needed} or later",),
        "advice",
    )


def _transport(connection: Connection, settings: Settings) -> Iterator[Finding]:
    cipher = connection.exec_driver_sql("SHOW SESSION STATUS LIKE 'Ssl_cipher'").one()[1]
    host = settings.url().host or ""
    if cipher:
        yield _found("tls", "ok", f"the connection is encrypted ({cipher})")
    elif host in _LOCAL:
        yield _found("tls", "ok", "the connection is not encrypted, and stays on this machine")
    else:
        yield _found(
            "tls",
            "warning",
            f"the connection to {host} is not encrypted: events cross the network in clear",
            ("set database_tls_ca to the CA of the server's certificate",),
            "advice",
        )


def _format(settings: Settings, server: Server) -> Iterator[Finding]:
    row_format = server.get("binlog_format") or "ROW"
    if row_format == "ROW":
        yield _found("binlog_format", "ok", "ROW")
    else:
        yield _found(
            "binlog_format",
            "failure",
            f"{row_format}: statements are logged instead of rows, so events are missed; sessions "
            "that are open keep their format until they connect again",
            (server.set("binlog_format", "'ROW'"),),
        )
    image = server.get("binlog_row_image") or "FULL"
    if image.startswith("FULL"):
        yield _found("binlog_row_image", "ok", image)
    else:
        yield _found(
            "binlog_row_image",
            "warning",
            f"{image}: a row may lack columns in the log, and each such row is read back by SELECT",
            (server.set("binlog_row_image", "'FULL'"),),
        )
    if settings.mark_row_image == "minimal":
        yield _found(
            "mark_row_image",
            "ok",
            "minimal: our own updates are small in the log; a reader of this log that expects "
            "whole rows (Debezium on the same table) stops at them",
        )
    metadata = server.get("binlog_row_metadata")
    if metadata == "FULL":
        yield _found("binlog_row_metadata", "ok", metadata)
    elif metadata:
        yield _found(
            "binlog_row_metadata",
            "warning",
            f"{metadata}: the log does not name columns; after an ALTER TABLE of the outbox, rows "
            "that were logged before it and read after it have to be read back by SELECT, and rows "
            "that are deleted before the relay reads them are looked for, some hundred a second",
            (server.set("binlog_row_metadata", "'FULL'"),),
        )
    partial = server.get("binlog_row_value_options")
    if partial:
        yield _found(
            "binlog_row_value_options",
            "warning",
            f"{partial}: updates of JSON are logged in part; inserts, which the relay reads, are "
            "whole, other readers of the log may stumble",
            (server.set("binlog_row_value_options", "''"),),
        )
    compressed = server.get("binlog_transaction_compression") or server.get("log_bin_compress")
    yield _found(
        "binlog_compression",
        "ok",
        "on: transactions are decompressed as they come" if compressed in ("ON", "1") else "off",
    )
    if server.get("binlog_checksum") == "NONE":
        yield _found(
            "binlog_checksum",
            "warning",
            "NONE: a damaged log or connection could go unnoticed",
            (server.set("binlog_checksum", "'CRC32'"),),
        )
    else:
        yield _found("binlog_checksum", "ok", server.get("binlog_checksum"))


def _filters(connection: Connection, settings: Settings) -> Iterator[Finding]:
    """binlog_do_db and binlog_ignore_db keep schemas out of the log."""
    schema, _ = settings.schema_and_table()
    for statement in ("SHOW BINARY LOG STATUS", "SHOW MASTER STATUS"):
        try:
            row: Any = connection.exec_driver_sql(statement).first()
        except DBAPIError:
            continue  # another version's name for it, or no grant, which has a line of its own
        lists = (str(value or "").split(",") for value in (row or ("", "", "", ""))[2:4])
        wanted, ignored = ([one.strip() for one in names if one.strip()] for names in lists)
        if (wanted and schema not in wanted) or schema in ignored:
            rule = f"binlog-do-db={','.join(wanted)}" if wanted else f"binlog-ignore-db={schema}"
            yield _found(
                "binlog_filter",
                "failure",
                f"{rule} keeps schema {schema!r} out of the binlog: its events are never seen",
                (f"take {rule} out of the server's option file and restart the server",),
                "advice",
            )
        else:
            yield _found("binlog_filter", "ok", f"schema {schema!r} is logged")
        return


def _durability(server: Server) -> Finding:
    wanted = {"sync_binlog": 1, "innodb_flush_log_at_trx_commit": 1}
    wrong = {name: value for name, value in wanted.items() if server.number(name) != value}
    if not wrong:
        return _found("durability", "ok", "the log and the tables survive a crash of the machine")
    seen = ", ".join(f"{name} = {server.get(name)}" for name in wrong)
    return _found(
        "durability",
        "warning",
        f"{seen}: after a crash of the database's machine, log and table may differ: events of "
        "transactions that are gone, or rows that only the compensator finds",
        tuple(server.set(name, str(value)) for name, value in wrong.items()),
    )


def _retention(server: Server) -> Finding:
    kept = server.kept_s()
    if kept is None:
        return _found(
            "binlog_retention",
            "warning",
            "this is Amazon RDS, which purges binlogs by a retention of its own (at once, by "
            f"default), and {server.account} may not read it: see that it is a day at least",
            ("CALL mysql.rds_show_configuration;", server.keep(_WEEK_S)),
        )
    if kept == math.inf:
        return _found("binlog_retention", "ok", "binlogs are never purged: watch the disk")
    if kept >= _DAY_S:
        return _found("binlog_retention", "ok", f"binlogs are kept for {kept / _DAY_S:g} days")
    return _found(
        "binlog_retention",
        "warning",
        f"binlogs are kept for {kept:g} s: a relay that is down for longer loses its position",
        (server.keep(_WEEK_S),),
    )


def _gtid(server: Server) -> Finding:
    if server.maria or server.get("gtid_mode") == "ON":
        return _found("gtid_mode", "ok", "positions survive a failover to a replica")
    steps = ("OFF_PERMISSIVE", "ON_PERMISSIVE", "ON")
    mode = server.get("gtid_mode")
    remaining = steps[steps.index(mode) + 1 :] if mode in steps else steps
    return _found(
        "gtid_mode",
        "warning",
        f"{mode or 'OFF'}: the position is a file of this server; after a failover to a replica it "
        "means nothing there, and the table has to be swept; let the relay run meanwhile: what it "
        "has not read before the last step can only be swept as well",
        (
            server.set("enforce_gtid_consistency", "ON"),
            *(server.set("gtid_mode", step) for step in remaining),
        ),
    )


def _identity(
    connection: Connection, settings: Settings, server: Server, running: bool
) -> Iterator[Finding]:
    own = server.number("server_id")
    if own == 0:
        yield _found(
            "server_id",
            "failure",
            "the server's own server_id is 0: it serves no replica, so no relay",
            (server.set("server_id", "1"),),
        )
        return
    ours = settings.server_id
    if ours is None:
        yield _found("server_id", "ok", f"the server's is {own}; each start of a relay draws one")
        return
    taken = ours == own
    for statement in ("SHOW REPLICAS", "SHOW SLAVE HOSTS"):
        try:
            rows = connection.exec_driver_sql(statement).all()
        except DBAPIError:
            continue  # another version's name for it, or no grant to look
        same = [str(row[1]) for row in rows if int(row[0]) == ours]
        # The relay that runs under this name is a replica too.
        taken = taken or any(not (running and host == "cdc-relay") for host in same)
        break
    if not taken:
        yield _found("server_id", "ok", f"{ours} is no other replica's")
        return
    yield Finding(
        "relay",
        "server_id",
        "failure",
        f"server_id = {ours} is the {'server' if ours == own else 'replica'}'s own: two of one id "
        "throw each other out; without the setting each start draws one",
        ("unset CDC_RELAY_SERVER_ID",),
        "shell",
    )


def _writable(settings: Settings, server: Server) -> Finding:
    on = [name for name in ("super_read_only", "read_only") if server.get(name) in ("ON", "1")]
    if not on:
        return _found("read_only", "ok", "the server takes writes")
    level: Level = "warning" if settings.mark == "none" else "failure"
    return _found(
        "read_only",
        level,
        f"{' and '.join(on)}: rows cannot be marked here; point database_url at the primary, or, "
        "if this is to be the primary, let it take writes",
        tuple(server.set(name, "OFF") for name in on),
    )


def _packet(server: Server) -> Finding:
    size = server.number("max_allowed_packet")
    if size >= _LEAST_PACKET:
        return _found("max_allowed_packet", "ok", f"{size} bytes")
    return _found(
        "max_allowed_packet",
        "failure",
        f"{size} bytes: the statement that marks a batch of rows does not fit",
        (server.set("max_allowed_packet", str(64 << 20)),),
    )


def _clock(server: Server) -> Finding:
    if abs(server.skew_s) < _SKEW_S:
        return _found("clock", "ok", "the database's clock and this machine's agree")
    return _found(
        "clock",
        "warning",
        f"the database's clock is {abs(server.skew_s):.1f} s "
        f"{'ahead of' if server.skew_s > 0 else 'behind'} this machine's: ages go by the "
        "database's and stay right, lag figures are off by as much",
        ("synchronise the clocks of both machines (timedatectl set-ntp true)",),
        "advice",
    )


def _found(
    check: str, level: Level, text: str, mend: tuple[str, ...] = (), how: How = ""
) -> Finding:
    return Finding("database", check, level, text, mend, how or ("sql" if mend else ""))
