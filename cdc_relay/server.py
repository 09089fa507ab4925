"""Where the server's binlog ends, asked by SQL: for those who never read the log itself."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, exc

from cdc_relay.database import database_errors, is_mariadb
from cdc_relay.errors import SourceError
from cdc_relay.position import Position


def current_position(connection: Connection) -> Position:
    """The end of the binlog now.

    SHOW BINARY LOG STATUS takes the grant REPLICATION CLIENT (BINLOG MONITOR on MariaDB). Without
    it the position is known by GTIDs alone; where the server keeps none, ``SourceError`` names the
    grant.
    """
    maria = is_mariadb(connection)
    with database_errors(connection.engine.url):
        file, offset, missing = "", 0, None
        try:
            status = _status(connection)
        except exc.DBAPIError as error:
            if error.orig is None or error.orig.args[:1] != (1227,):
                raise
            missing = error
        else:
            if status is None:
                raise SourceError("the server writes no binlog: start it with log_bin")
            file, offset = str(status[0]), int(status[1])
        # After the file's end, so that it is not behind it.
        identity, gtids = connection.exec_driver_sql(
            "SELECT @@global.server_id, @@global.gtid_binlog_pos"
            if maria
            else "SELECT @@global.server_uuid, IF(@@global.gtid_mode = 'ON',"
            " @@global.gtid_executed, NULL)"
        ).one()
        if gtids is None and missing is not None:
            raise missing
    text = None if gtids is None else str(gtids).replace("\n", "")
    return Position("mariadb" if maria else "mysql", str(identity), file, offset, text)


def _status(connection: Connection) -> Any:
    # MySQL 8.2 renamed the statement, 8.4 removed the old name; MariaDB has only the old one.
    try:
        return connection.exec_driver_sql("SHOW BINARY LOG STATUS").first()
    except exc.ProgrammingError:
        return connection.exec_driver_sql("SHOW MASTER STATUS").first()
