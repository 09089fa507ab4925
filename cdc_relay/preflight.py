"""What must be true of the database before the relay starts, each fault one clear line."""

from __future__ import annotations

from typing import Any

import structlog
from sqlalchemy import Connection

from cdc_relay.database import database_errors
from cdc_relay.errors import SourceError

log = structlog.get_logger(__name__)


def check_server(connection: Connection) -> None:
    """Raise ``SourceError`` for a server whose binlog cannot carry rows; warn about settings that
    make some sessions' rows invisible to the stream."""
    with database_errors(connection.engine.url):
        log_bin, row_format, image = _row(
            connection,
            "SELECT @@global.log_bin, @@global.binlog_format, @@global.binlog_row_image",
        )
    if not int(log_bin):
        raise SourceError(
            "the server writes no binlog: start it with log_bin, or rows cannot be streamed"
        )
    if str(row_format).upper() != "ROW":
        raise SourceError(
            f"binlog_format is {row_format}: rows are not in the binlog; "
            "SET GLOBAL binlog_format = 'ROW' and reconnect the services"
        )
    if str(image).upper() != "FULL":
        log.warning(
            "binlog_row_image is not FULL: rows that lack a column are read back by SELECT",
            binlog_row_image=image,
        )


def _row(connection: Connection, sql: str) -> Any:
    return connection.exec_driver_sql(sql).one()
