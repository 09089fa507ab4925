"""The error tree. Every error that a user can meet is one of these, with one clear line.

The process exit codes are part of the command-line contract:

====  =========================================================
code  meaning
====  =========================================================
0     done; nothing left
1     a bug (anything that is not a ``CdcRelayError``)
2     usage or configuration
3     source: the database cannot be read as asked
4     sink: Kafka cannot be written as asked
5     position lost: the binlog no longer reaches back far enough
6     rows went dead or are still failing
====  =========================================================
"""

from __future__ import annotations


class CdcRelayError(Exception):
    """Base of every error that is meant for a user: its text is one line that says what is
    wrong, where, and what to do."""

    exit_code = 1


class ConfigError(CdcRelayError):
    """A wrong option, configuration key, URL, table or column mapping."""

    exit_code = 2


class SourceError(CdcRelayError):
    """The database cannot be read as asked, and trying again will not help: a missing grant or
    table, a wrong password, a binlog format without rows."""

    exit_code = 3


class SourceUnavailableError(SourceError):
    """The database does not answer now. Trying again may help; no row is at fault."""


class ReplicaBehindError(SourceUnavailableError):
    """Another server than the checkpoint's, which has not executed all that lies before it: a
    replica that took over, perhaps, and is still applying."""


class LockedError(SourceUnavailableError):
    """Other sessions hold rows that a statement needs, for longer than it waits."""


class ChangedTableError(SourceError):
    """A statement names a column or an index that the table does not have: it had when it was
    looked at."""


class DecodeError(SourceError):
    """Bytes of the binlog that cannot be what the protocol says. Names the position."""


class PositionLostError(SourceError):
    """The binlog no longer holds the checkpoint's position (purged, reset, another server)."""

    exit_code = 5


class SinkError(CdcRelayError):
    """Kafka cannot be written as asked, and trying again will not help."""

    exit_code = 4


class SinkUnavailableError(SinkError):
    """The brokers do not answer now. Trying again may help; no row is at fault."""


class RowsFailingError(CdcRelayError):
    """Rows went dead or are still failing; everything else was delivered."""

    exit_code = 6


class UnroutableError(CdcRelayError):
    """An event that cannot become a record whatever the brokers say: an empty key, a topic name
    that Kafka does not allow, headers that are not an object. The row is parked, not retried in
    place."""


class NotInTransactionError(CdcRelayError):
    """``Outbox.add`` was given a target that would commit each statement by itself, so the event
    and the business rows could not be one transaction."""

    exit_code = 2


class EventTooLargeError(CdcRelayError, ValueError):
    """An event is larger than the writer's limit or than one packet of the server takes; nothing
    was written."""

    exit_code = 2
