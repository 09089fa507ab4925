"""The replication connection: handshake, dump command, packets, reconnects. The only import of
pymysqlreplication.

The stock library's stream is not used for reading: it reconnects by itself from places that may
lie inside a transaction. Here a connection lives and dies under our control, and every new one
starts at the last transaction boundary that was read.

Protocol: MySQL source documentation, "Replication Protocol"; MariaDB knowledge base, "Replica
connection".
"""

from __future__ import annotations

import contextlib
import random
import re
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from struct import pack
from typing import Any, Final, NoReturn

import pymysql
import structlog
from pymysqlreplication.binlogstream import ReportSlave

from cdc_relay.binlog.decoder import (
    FORMAT_DESCRIPTION,
    HEARTBEAT,
    HEARTBEAT_V2,
    MARIA_BINLOG_CHECKPOINT,
    MARIA_GTID_LIST,
    MARIA_START_ENCRYPTION,
    NOTHING,
    PAYLOAD,
    PREVIOUS_GTIDS,
    REREAD,
    ROTATE,
    SPANNING,
    STATUS,
    TRANSACTION_PAYLOAD,
    Decoder,
)
from cdc_relay.binlog.layout import LayoutResolver, SchemaColumn
from cdc_relay.binlog.packets import Packets, open_payload, read_exactly
from cdc_relay.binlog.rows import UnreadRow
from cdc_relay.catchup import CatchUp
from cdc_relay.errors import (
    DecodeError,
    PositionLostError,
    ReplicaBehindError,
    SourceError,
    SourceUnavailableError,
)
from cdc_relay.outbox import OutboxEvent
from cdc_relay.position import Flavor, GtidSet, MariaGtidPosition, Position
from cdc_relay.vitals import Reading

# The connection's own socket and packet methods are used below, which its type stubs do not know.
Connection = Any

log = structlog.get_logger(__name__)

_COM_REGISTER_SLAVE: Final = 0x15
_COM_BINLOG_DUMP: Final = 0x12
_COM_BINLOG_DUMP_GTID: Final = 0x1E
_THROUGH_GTID: Final = 0x04
_NOT_FURTHER: Final = 0x01  # an end-of-file packet at the end of the log, where others wait
_EOF: Final = 0xFE
# Events that a dump sends before those at the place where it begins.
_BEFORE_THE_PLACE: Final = (
    ROTATE,
    FORMAT_DESCRIPTION,
    HEARTBEAT,
    HEARTBEAT_V2,
    PREVIOUS_GTIDS,
    MARIA_BINLOG_CHECKPOINT,
    MARIA_GTID_LIST,
    MARIA_START_ENCRYPTION,
)
_READ_SIZE: Final = 256 * 1024
_TLS_RECORD: Final = 16 * 1024
_TLS_READ_SIZE: Final = 128 * 1024
_LOOK_AT_LEAST_S: Final = 2.0
_SHORT_FILE: Final = 50_000
"""Events of a file that is read once more for its GTIDs, at most."""
_GTID_NEXT: Final = re.compile(r"GTID_NEXT= '([^']+)'")

# Server errors that end a dump and mean that the position is gone, not the server (error 1236,
# ER_SOURCE_FATAL_ERROR_READING_BINLOG, carries every such case in its text).
_FATAL_READING: Final = 1236
_NO_BINLOG: Final = 1381
_SERVER_LOST: Final = 2013  # of the client: the answer did not come
_SAME_ID: Final = 4052  # MariaDB
_NO_GRANT: Final = (1045, 1142, 1227)
_LOST_WORDS: Final = (
    "purged",
    "could not find first log",
    # The dump is at the end of a file that RESET has taken away.
    "could not find next log",
    "not found in",
    "is not in the",
    "impossible position",
    "exceeds the file",
    "is missing",
    "not present in the",
    # No event begins there: another log of the same name, or a damaged one. The table knows better.
    "truncated in the middle of event",
    "bogus data in log event",
    "event too small",
    "exceeded max_allowed_packet",
    # GTIDs were switched on before the relay had read what was committed without.
    "cannot replicate anonymous transaction",
)
_CONFLICT_WORDS: Final = ("same server_uuid", "same server_id", "same server id")


class SilentSourceError(SourceUnavailableError):
    """Nothing was heard within the time: the database may be well, and the wire dead."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What the source hands on: committed rows in commit order, and the boundary behind them.

    ``position`` is never inside a transaction; when everything in this batch and before it is
    acknowledged, it may be saved. ``rows`` may be empty: the position moved past other tables.
    """

    rows: Sequence[OutboxEvent | UnreadRow]
    position: Position
    commit_time: int
    """Commit time of the last transaction, microseconds since 1970."""
    size: int = 0
    """Bytes that the rows take in the log."""
    before: Position | None = None
    """The position before the first row, inside its transaction, where the rows are the keys of one
    prepared (XA) transaction. How much their rows hold is not known: such a batch may be cut."""

    def cut(self, rows: int) -> tuple[Batch, Batch]:
        """The first ``rows`` rows of a batch that may be cut, with the position behind them, and
        the others."""
        if self.before is None or self.before.partial is None:
            raise ValueError("a batch that may not be cut")
        group, done = self.before.partial
        place = self.before.inside(group, done + rows)
        return (
            replace(self, rows=self.rows[:rows], position=place),
            replace(self, rows=self.rows[rows:], before=place),
        )


@dataclass(frozen=True, slots=True)
class Server:
    """What the server says of itself when a connection begins."""

    flavor: str
    version: str
    identity: str
    gtid: bool
    position: Position
    """The end of its binlog now."""


class BinlogSource:
    """Reads one table's committed inserts from one server.

    ``batches`` runs in one thread; ``stop`` may be called from any. Order: commit order. After a
    lost connection it reconnects by itself, with growing pauses, at the last boundary that it
    gave out. Errors that trying again cannot mend are raised.
    """

    def __init__(
        self,
        connect_arguments: dict[str, Any],
        schema: str,
        table: str,
        columns: dict[str, str],
        *,
        server_id: int,
        replica_uuid: uuid.UUID,
        heartbeat: float,
        read_timeout: float,
        batch_rows: int,
        idle_interval: float,
        find: Callable[[int], OutboxEvent | None],
        extras: Sequence[str] = (),
        reading: Reading | None = None,
    ) -> None:
        """``find`` reads a row of any status by its key; it settles layouts that are in doubt.
        ``extras`` are the columns of ``OutboxEvent.extra``. ``reading`` is told how the reader
        fares."""
        self._arguments = connect_arguments
        self._schema = schema
        self._table = table
        self._columns = columns
        self._server_id = server_id
        self._replica_uuid = replica_uuid
        self._heartbeat = heartbeat
        self._read_timeout = read_timeout
        self._batch_rows = batch_rows
        self._idle_interval = idle_interval
        self._find = find
        self._extras = extras
        self._charsets: dict[int, str] = {}
        self._stopped = threading.Event()
        self._connection: Connection | None = None
        self._reading = reading or Reading()
        self._again: tuple[Position, list[tuple[int, int]], int] | None = None
        self._catch_up = CatchUp()

    # --- the schema and the server ---------------------------------------------------------------

    def _control(self) -> Connection:
        """A short-lived connection for questions; autocommit, so it never holds a read view."""
        return open_connection(self._arguments, self._read_timeout)

    def inspect(self) -> Server:
        """Ask the server who and where it is."""
        with contextlib.closing(self._control()) as connection:
            return inspect(connection)

    def probe(self, start: Position | None = None) -> None:
        """Begin a dump, at the end of the log unless ``start`` is given, and end it again. Raises
        ``SourceError`` where the user may not read the binlog (better before the first record than
        after a sweep), and what ``batches`` would raise for a start that the server cannot
        serve. Under a server id of its own: a relay that stands by has that of the one at work,
        whose dump MariaDB would end."""
        with contextlib.closing(open_connection(self._arguments, self._read_timeout)) as connection:
            server = inspect(connection)
            start = start or server.position
            with self._judging(start, server):
                self._begin_and_end(connection, server, start)

    def _begin_and_end(self, connection: Connection, server: Server, start: Position) -> None:
        gtids, maria = self._check(start, server)
        with _unavailable(reading=True):
            probe_id = random_server_id()
            self._start(connection, server, start, gtids, maria, probe_id, _NOT_FURTHER)
        connection._sock.settimeout(self._read_timeout)
        packets = Packets(connection._sock, self._receive)
        kind = ROTATE
        while kind in _BEFORE_THE_PLACE:
            packet = packets.whole()
            if packet[0] == _EOF:
                return
            if packet[0] != 0:
                self._status(packet)
            kind = packet[5]

    def current(self) -> Position:
        """The end of the server's binlog now."""
        return self.inspect().position

    def waits(self, position: Position, end: Position) -> str:
        """Why ``position`` cannot be judged yet by a server whose log ends at ``end`` now, in
        words; empty where it can, and where the wait was in vain."""
        return self._catch_up.waits(position, end)

    @contextlib.contextmanager
    def _judging(self, start: Position, server: Server) -> Iterator[None]:
        """Call no position lost before a replica had its time to come to it. Some are served all
        the same: a replica of MariaDB knows what it has applied without a log of its own."""
        try:
            yield
        except PositionLostError:
            waits = self.waits(start, server.position)
            if not waits:
                raise
            raise ReplicaBehindError(waits) from None

    def anchor(self) -> Position:
        """``current``, with the time its file was begun: a relay that is killed before it has read
        anything must know the file again."""
        while True:
            before = self.current()
            born, _ = self._file(before.file)
            after = self.current()
            if before.file == after.file and not before.is_beyond(after):
                return replace(before, born=born)

    def _file(self, file: str) -> tuple[int, int]:
        """When the server began ``file``, seconds since 1970, and its size; zeros where it has no
        such file."""
        with contextlib.closing(self._control()) as connection:
            with _unavailable(), connection.cursor() as cursor:
                cursor.execute("SHOW BINARY LOGS")
                sizes = {str(row[0]): int(row[1]) for row in cursor.fetchall()}
                if file not in sizes:
                    return 0, 0
                cursor.execute("SET @master_binlog_checksum = @@global.binlog_checksum")
                cursor.execute("SET @source_binlog_checksum = @@global.binlog_checksum")
                cursor.execute("SET @mariadb_slave_capability = 4")
            with _unavailable(reading=True):
                command = pack("<IHI", 4, 0, random_server_id()) + file.encode()
                self._command(connection, bytes([_COM_BINLOG_DUMP]) + command, answer=False)
                for _ in range(3):  # a made-up rotate event, the format description
                    event = connection._read_packet().get_all_data()
                    if event[5] == FORMAT_DESCRIPTION:
                        return int.from_bytes(event[1:5], "little"), sizes[file]
            raise DecodeError(f"{file}: no format description at its head")

    def _load_columns(self) -> list[SchemaColumn]:
        found = self._select(
            "SELECT column_name, data_type, column_type, character_set_name, "
            "character_octet_length, numeric_precision, numeric_scale, datetime_precision "
            "FROM information_schema.columns WHERE table_schema = %s AND table_name = %s "
            "ORDER BY ordinal_position",
            self._schema,
            self._table,
        )
        return [SchemaColumn(*row) for row in found]

    def _load_charsets(self) -> dict[int, str]:
        """The character set of each collation, as the server numbers them."""
        if not self._charsets:
            view = "collations"
            # MariaDB's collations that serve several character sets have a number for each, which
            # stands here only. The view has no numbers on other servers.
            pairs = "collation_character_set_applicability"
            if self._select(
                "SELECT 1 FROM information_schema.columns "
                "WHERE table_schema = 'information_schema' AND table_name = %s "
                "AND column_name = 'id'",
                pairs,
            ):
                view = pairs
            found = self._select(
                f"SELECT id, character_set_name FROM information_schema.{view} "
                "WHERE id IS NOT NULL AND character_set_name IS NOT NULL"
            )
            self._charsets = {int(number): str(name) for number, name in found}
        return self._charsets

    def _look_up(self, row_id: int) -> OutboxEvent | None:
        """The row of the table. A backlog of rows in doubt takes many of these, with nothing read
        in between: each is a sign of life."""
        row = self._find(row_id)
        self._reading.heard = time.monotonic()
        return row

    def _select(self, sql: str, *values: object) -> Sequence[Any]:
        """The rows of one statement, on a connection of its own."""
        with (
            contextlib.closing(self._control()) as connection,
            _unavailable(),
            connection.cursor() as cursor,
        ):
            cursor.execute(sql, values or None)
            found: Sequence[Any] = cursor.fetchall()
            return found

    # --- reading -------------------------------------------------------------------------------

    def stop(self) -> None:
        """Make ``batches`` return soon; safe from any thread, more than once."""
        self._stopped.set()
        connection = self._connection
        sock = getattr(connection, "_sock", None)
        if sock is not None:
            with contextlib.suppress(OSError):
                # Not SSLSocket's own: that drops the cipher, and the thread that reads would take
                # what is still on its way for plain bytes of the log.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def batches(self, start: Position) -> Iterator[Batch]:
        """Yield batches from ``start`` on, until ``stop``. Blocks while the log is quiet."""
        position = start
        pause = 0.1
        while not self._stopped.is_set():
            try:
                for batch in self._dump(position):
                    position = batch.position
                    pause = 0.1
                    yield batch
                if self._stopped.is_set():
                    return
                if self._again is not None:
                    position = self._again[0]
                    log.info("a large transaction is read again, now that it is committed")
                    continue
                reason, silent = "the server ended the stream", False
            except ReplicaBehindError:
                raise  # the table is behind, too: nothing of this term is of use until it is not
            except SilentSourceError as error:
                reason, silent = str(error), True
            except SourceUnavailableError as error:
                reason, silent = str(error), False
            if self._stopped.is_set():
                return
            self._reading.lost(reason, silent=silent)
            log.warning("binlog connection lost", reason=reason, retry_in_seconds=pause)
            self._stopped.wait(pause)
            pause = min(pause * 2, 5.0)

    def _dump(self, start: Position) -> Iterator[Batch]:
        connection = open_connection(self._arguments, self._read_timeout)
        try:
            self._connection = connection
            server = inspect(connection)
            with self._judging(start, server):
                yield from self._served(connection, server, start)
        finally:
            self._connection = None
            connection._force_close()

    def _served(self, connection: Connection, server: Server, start: Position) -> Iterator[Batch]:
        gtids, maria = self._check(start, server)
        resolver = LayoutResolver(
            self._load_columns,
            self._load_charsets,
            self._look_up,
            self._columns,
            self._extras,
            mariadb=server.flavor == "mariadb",
        )
        decoder = Decoder(
            self._schema,
            self._table,
            resolver,
            self._batch_rows,
            gtids,
            maria,
        )
        decoder.prepared = dict(start.prepared)
        if start.server == server.identity:
            decoder.begin(start.file, start.offset, start.born)
        else:
            decoder.begin("", 0)
        if start.partial is not None:
            if self._again is not None and self._again[0] == start:
                decoder.expect(*start.partial, *self._again[1:])
            else:
                decoder.expect(*start.partial, None)
        self._again = None
        with _unavailable(reading=True):
            self._start(connection, server, start, gtids, maria, self._server_id)
        log.info("streaming", position=str(start), server=server.version)
        self._reading.found()
        base = Position(start.flavor, server.identity, start.file, start.offset)
        yield from self._read(connection._sock, decoder, base)

    def _check(
        self, start: Position, server: Server
    ) -> tuple[GtidSet | None, MariaGtidPosition | None]:
        """Whether ``start`` means the same place on this server; returns what GTIDs to ask for."""
        if start.flavor != server.flavor:
            raise PositionLostError(
                f"the checkpoint is from {start.flavor}, this server is {server.flavor}"
            )
        by_gtid = start.gtids is not None and server.gtid
        if start.server == server.identity:
            if start.is_far and not by_gtid:
                raise PositionLostError(
                    f"position {start.file}:{start.offset} lies beyond 4 GiB, where the protocol "
                    "cannot start by offset; with gtid_mode=ON, positions are resumed by GTID"
                )
            # GTIDs do not tell: after RESET they are given anew from 1.
            if start.is_beyond(server.position):
                raise _begun_anew(start, server.position)
            born, size = self._file(start.file)
            if born and start.born not in (0, born):
                raise _begun_anew(start)
            # A copy from before that was put back ends earlier in this file, and goes on in the
            # next one: the same GTIDs stand for other transactions since.
            if size and start.offset > size:
                raise _begun_anew(start)
        if start.gtids is not None and by_gtid:
            if server.flavor == "mariadb":
                return None, MariaGtidPosition(start.gtids)
            wanted = GtidSet(start.gtids)
            if not GtidSet(server.position.gtids or "").contains(wanted):
                raise PositionLostError(
                    "the checkpoint holds transactions that this server has never executed "
                    f"(checkpoint {start.gtids}, server {server.position.gtids or 'none'})"
                )
            return wanted, None
        if start.server != server.identity:
            raise PositionLostError(
                f"the checkpoint is from server {start.server}, this is {server.identity}, and "
                "without GTIDs a file and offset mean nothing on another server"
            )
        # GTIDs may have been switched on since.
        return self._gtids_at(start), None

    def _gtids_at(self, place: Position) -> GtidSet | None:
        """The transactions before ``place``, where it was reached without GTIDs and they are on
        now: those that the head of its file lists, those that the file holds before the place, and
        those that were purged. None where they are off, where the file holds an anonymous
        transaction (it could not be served to whoever asks by GTIDs), and where it is long or is
        not the one being written, so that later ones might: another file will do.

        Nothing anonymous comes later: GTIDs are found to be on before the file is looked at.
        Source: MySQL manual, "GTID Format and Storage" and "Enabling GTID Transactions Online"."""
        gtids = GtidSet()
        try:
            with contextlib.closing(self._control()) as connection, connection.cursor() as cursor:
                server = inspect(connection)
                if server.flavor != "mysql" or not server.gtid:
                    return None
                if (place.server, place.file) != (server.identity, server.position.file):
                    return None
                cursor.execute("SELECT @@global.gtid_purged")
                gtids.add(GtidSet(str(cursor.fetchone()[0])))
                cursor.execute(f"SHOW BINLOG EVENTS IN %s LIMIT {_SHORT_FILE:d}", (place.file,))
                events = cursor.fetchall()
        except (SourceError, pymysql.MySQLError) as error:
            log.debug("the GTIDs before the position are not known", reason=str(error))
            return None
        kinds = {str(kind) for _, _, kind, *_ in events}
        if len(events) == _SHORT_FILE or "Anonymous_Gtid" in kinds or "Previous_gtids" not in kinds:
            return None
        for _, offset, kind, _, _, text in events:
            if kind == "Previous_gtids":
                gtids.add(GtidSet(str(text)))
            elif offset < place.offset and (next_ := _GTID_NEXT.search(str(text))) is not None:
                gtids.add(GtidSet(next_[1]))
        log.info("the position has GTIDs from here on", position=f"{place.file}:{place.offset}")
        return gtids

    def _start(
        self,
        connection: Connection,
        server: Server,
        start: Position,
        gtids: GtidSet | None,
        maria: MariaGtidPosition | None,
        server_id: int,
        flags: int = 0,
    ) -> None:
        by_gtid = gtids is not None or maria is not None
        nanoseconds = int(self._heartbeat * 1e9)
        with connection.cursor() as cursor:
            for role in ("master", "source"):  # the old name and the new one
                cursor.execute(f"SET @{role}_heartbeat_period = {nanoseconds}")
                cursor.execute(f"SET @{role}_binlog_checksum = @@global.binlog_checksum")
            # The server writes into our socket; while Kafka is away we leave it full on purpose.
            cursor.execute("SET SESSION net_write_timeout = 3600")
            if server.flavor == "mariadb":
                cursor.execute("SET @mariadb_slave_capability = 4")
                if by_gtid:
                    cursor.execute("SET @slave_connect_state = %s", (str(maria),))
                    cursor.execute("SET @slave_gtid_strict_mode = 0")
                    cursor.execute("SET @slave_gtid_ignore_duplicates = 0")
            else:
                # The server ends an older dump of the same uuid: ours, whose end it did not see.
                cursor.execute(
                    "SET @slave_uuid = %s, @replica_uuid = %s", (str(self._replica_uuid),) * 2
                )
        registration: bytes = ReportSlave("cdc-relay").encoded(server_id)  # type: ignore[no-untyped-call]
        self._command(connection, registration[4:], answer=True)
        if by_gtid and gtids is not None:
            data = gtids.encode()
            command = (
                bytes([_COM_BINLOG_DUMP_GTID])
                + pack("<HIIQI", _THROUGH_GTID | flags, server_id, 0, 4, len(data))
                + data
            )
        else:
            file, offset = ("", 4) if by_gtid else (start.file, start.offset)
            place = pack("<IHI", offset, flags, server_id)
            command = bytes([_COM_BINLOG_DUMP]) + place + file.encode()
        self._command(connection, command, answer=False)

    @staticmethod
    def _command(connection: Connection, payload: bytes, *, answer: bool) -> None:
        connection._next_seq_id = 0
        connection.write_packet(payload)
        if answer:
            connection._read_packet()

    def _read(self, sock: socket.socket, decoder: Decoder, base: Position) -> Iterator[Batch]:
        """Read the dump until it ends; errors in its bytes name their place in the log."""
        try:
            yield from self._follow(sock, decoder, base)
        except DecodeError as error:
            where = decoder.where()
            text = str(error)
            raise DecodeError(text if where in text else f"{where}: {text}") from None

    def _follow(self, sock: socket.socket, decoder: Decoder, base: Position) -> Iterator[Batch]:
        """Read large chunks, feed them, hand on what is committed."""
        last_given = time.monotonic()
        watch = _Watch(self.current, base, max(self._heartbeat, _LOOK_AT_LEAST_S))
        file = base.file
        sock.settimeout(self._read_timeout)
        packets = Packets(sock, self._receive)
        while not self._stopped.is_set():
            packets.more()
            while True:
                before = self._inside(decoder, base) if decoder.deciding else None
                packets.skip(decoder.feed(packets.buf, 0, len(packets.buf)))
                stopped = decoder.stopped
                if stopped == STATUS:
                    self._status(packets.whole())
                elif stopped == SPANNING and packets.kind() != TRANSACTION_PAYLOAD:
                    stopped = decoder.single(packets.whole())
                elif stopped in (PAYLOAD, SPANNING):
                    yield from self._payload(packets, decoder, base)
                    stopped = decoder.stopped
                if decoder.rows or (
                    decoder.moved and time.monotonic() - last_given >= self._idle_interval
                ):
                    yield self._batch(decoder, base, before)
                    last_given = time.monotonic()
                if stopped == REREAD:
                    place = self._position(decoder, base)
                    group = place.inside(decoder.open_group(), int(decoder.done))
                    self._again = (group, list(decoder.dropped), int(decoder.doubted))
                    return
                if stopped == NOTHING and not packets.has_whole():
                    break
            if decoder.commit_file != file:
                file = decoder.commit_file
                if base.flavor == "mysql" and decoder.gtids is None:
                    decoder.gtids = self._gtids_at(self._position(decoder, base))
            watch.look(decoder.file, decoder.offset())

    def _payload(self, packets: Packets, decoder: Decoder, base: Position) -> Iterator[Batch]:
        """Unpack a compressed transaction piece by piece: neither its packed nor its unpacked
        bytes are ever held as a whole."""
        with contextlib.closing(packets.body()) as body:
            place, unpacked = open_payload(body)
            decoder.begin_payload(place)
            rest = b""
            reread = False
            while not reread:
                need = int.from_bytes(rest[9:13], "little") - len(rest) if len(rest) >= 13 else 0
                chunk = read_exactly(unpacked, max(need, _READ_SIZE))
                if not chunk:
                    break
                rest += chunk
                while True:
                    rest = rest[decoder.inner(rest, 0, len(rest)) :]
                    reread = decoder.stopped == REREAD
                    if decoder.stopped == NOTHING or reread:
                        break
                    if decoder.given:
                        # It was read to its end before, and found intact.
                        yield self._batch(decoder, base)
            if rest and not reread:
                raise DecodeError("a compressed transaction is cut")
            if decoder.has_checksums() and not body.intact():
                raise DecodeError("the checksum does not match: the event is damaged")
            if not reread:
                decoder.end_payload()

    def _batch(self, decoder: Decoder, base: Position, before: Position | None = None) -> Batch:
        if decoder.notices:
            for notice, count in decoder.notices.items():
                _report(notice, int(count), decoder.where())
            decoder.notices.clear()
        size = int(decoder.size)
        rows = decoder.take()
        given = decoder.given > 0
        position = self._inside(decoder, base) if given else self._position(decoder, base)
        return Batch(rows, position, decoder.time(), size, before)

    def _inside(self, decoder: Decoder, base: Position) -> Position:
        """The last boundary, with what is given out of the transaction behind it."""
        return self._position(decoder, base).inside(decoder.open_group(), int(decoder.given))

    @staticmethod
    def _position(decoder: Decoder, base: Position) -> Position:
        """The last boundary."""
        position = base.at(
            decoder.commit_file,
            int(decoder.commit_offset),
            decoder.gtid_text(),
            int(decoder.commit_born),
        )
        return position.with_prepared(decoder.prepared)

    def _receive(self, sock: socket.socket) -> bytes:
        """What has come, at least one byte; waits for it. TLS gives one record (16 KiB) at a
        time: what else has come by now is taken too, so that a backlog is not handed on in
        crumbs."""
        try:
            chunk = sock.recv(_TLS_RECORD if isinstance(sock, ssl.SSLSocket) else _READ_SIZE)
        except TimeoutError:
            raise SilentSourceError(
                f"nothing was heard for {self._read_timeout:g} s (heartbeats come every "
                f"{self._heartbeat:g} s): the connection is dead"
            ) from None
        except (OSError, ssl.SSLError) as error:
            raise SourceUnavailableError(f"the connection broke: {error}") from None
        if not chunk:
            raise SourceUnavailableError("the server closed the connection")
        self._reading.heard = time.monotonic()
        if not isinstance(sock, ssl.SSLSocket):
            return chunk
        parts = [chunk]
        size = len(chunk)
        sock.settimeout(0)
        try:
            while chunk and size < _TLS_READ_SIZE:
                chunk = sock.recv(_TLS_RECORD)
                parts.append(chunk)
                size += len(chunk)
        except OSError:
            pass  # nothing more for now; a broken connection shows again at the next wait
        finally:
            sock.settimeout(self._read_timeout)
        return b"".join(parts)

    def _status(self, packet: bytes) -> NoReturn:
        if packet[0] == _EOF:
            raise SourceUnavailableError("the server ended the stream")
        if packet[0] != 0xFF:
            raise DecodeError(f"a packet that starts with {packet[0]:#x}")
        code = int.from_bytes(packet[1:3], "little")
        text = (
            packet[9:].decode("utf-8", "replace")
            if packet[3:4] == b"#"
            else packet[3:].decode("utf-8", "replace")
        )
        lower = text.lower()
        if code == _SAME_ID or (
            code == _FATAL_READING and any(word in lower for word in _CONFLICT_WORDS)
        ):
            # Reconnecting would throw the other reader out, and it us, for ever.
            raise SourceError(
                f"another reader of this server uses server id {self._server_id}: give each its "
                f"own --server-id, or none, and the relay takes a free one ({text})"
            )
        if code == _FATAL_READING and any(word in lower for word in _LOST_WORDS):
            raise PositionLostError(f"the binlog no longer holds the position: {text}")
        if code in _NO_GRANT:
            raise _no_grant(text)
        if code in (_FATAL_READING, _NO_BINLOG):
            raise SourceError(f"the server cannot read its binlog: {text} (error {code})")
        raise SourceUnavailableError(f"{text} (error {code})")


class _Watch:
    """Notices a dump that goes on with heartbeats only, although the log does not stand still: the
    server follows files that RESET has taken away, for ever."""

    def __init__(self, current: Callable[[], Position], base: Position, pause: float) -> None:
        """``base``: any place on the server of the dump."""
        self._current = current
        self._base = base
        self._pause = pause
        self._next = time.monotonic() + pause
        self._place: tuple[str, int] | None = None
        self._end: Position | None = None
        self._moves = 0

    def look(self, file: str, offset: int) -> None:
        """Take notice of the dump's place; asks for the end of the log where it stands still.
        Raises ``PositionLostError`` or, where a new dump may do better,
        ``SourceUnavailableError``."""
        now = time.monotonic()
        if (file, offset) != self._place:
            self._place, self._end, self._moves = (file, offset), None, 0
            self._next = now + self._pause
        if now < self._next:
            return
        self._next = now + self._pause
        try:
            end = self._current()
        except SourceUnavailableError as error:
            log.debug("the end of the log is not known now", reason=str(error))
            return
        place = self._base.at(file, offset, None)
        if end.server != place.server:
            return
        if place.is_beyond(end):
            raise _begun_anew(place, end)
        self._moves += self._end is not None and self._end != end
        self._end = end
        if self._moves > 1:
            raise SourceUnavailableError(f"the dump stands at {place}, the log goes on to {end}")


def _begun_anew(position: Position, end: Position | None = None) -> PositionLostError:
    now = f", they end at {end} now" if end is not None else ""
    return PositionLostError(
        "the server's binary logs were begun anew (RESET, or an older copy that was put back) "
        f"after position {position}{now}"
    )


def _report(notice: str, count: int, where: str) -> None:
    """Say what was seen in the log that may hide a row; the compensator delivers those rows."""
    if notice == "statement":
        log.warning(
            "rows were written in statement format; the compensator will deliver them",
            statements=count,
            near=where,
        )
    elif notice == "ddl":
        log.info("a table of the outbox table's name was defined anew", near=where)
    elif notice == "xa_unknown":
        log.warning(
            "an XA transaction was committed whose prepare was not seen; the compensator will "
            "deliver its rows",
            near=where,
        )
    else:
        log.warning("the binlog holds an event that is not known", kind=notice, near=where)


def _no_grant(text: str) -> SourceError:
    return SourceError(
        "the database user may not read the binlog: GRANT REPLICATION SLAVE, REPLICATION CLIENT "
        f"ON *.* TO that user ({text})"
    )


@contextlib.contextmanager
def _unavailable(*, reading: bool = False) -> Iterator[None]:
    """Turn a driver's errors while speaking into ``SourceUnavailableError`` or, where trying
    again cannot help, ``SourceError``. ``reading``: the login was accepted, so "access denied"
    is about the binlog."""
    try:
        yield
    except (pymysql.err.OperationalError, pymysql.err.InternalError) as error:
        code = error.args[0] if error.args else 0
        text = error.args[1] if len(error.args) > 1 else str(error)
        if reading and code in _NO_GRANT:
            raise _no_grant(text) from None
        if code in (1045, 1698, 1044, 1049, 1142, 1227, 3159, 1130):
            raise SourceError(f"{text} (error {code})") from None
        if code == _SERVER_LOST and "timed out" in text:
            raise SilentSourceError(f"{text} (error {code})") from None
        raise SourceUnavailableError(f"{text} (error {code})") from None
    except (OSError, ssl.SSLError, pymysql.err.Error) as error:
        raise SourceUnavailableError(str(error)) from None


def open_connection(arguments: dict[str, Any], timeout: float) -> Connection:
    """A PyMySQL connection in autocommit, times in UTC, all waits bounded by ``timeout``."""
    with _unavailable():
        return pymysql.connect(
            **{
                **arguments,
                "autocommit": True,
                "charset": "utf8mb4",
                # Whatever the server's own defaults are; autocommit, then, as the driver finds it.
                "init_command": f"SET time_zone = '+00:00', sql_select_limit = {2**64 - 1}",
                "connect_timeout": max(1, int(timeout)),
                "read_timeout": timeout,
                "write_timeout": timeout,
            }
        )


def inspect(connection: Connection) -> Server:
    """Ask a server for its flavor, identity, GTID mode and the end of its binlog."""
    with _unavailable(), connection.cursor() as cursor:
        cursor.execute("SELECT VERSION()")
        version = str(cursor.fetchone()[0])
        maria = "mariadb" in version.lower()
        if maria:
            cursor.execute("SELECT @@global.server_id, @@global.gtid_binlog_pos")
            identity, gtids = (str(value) for value in cursor.fetchone())
            gtid = True
        else:
            cursor.execute("SELECT @@global.server_uuid, @@global.gtid_mode")
            gtids = ""
            identity, mode = (str(value) for value in cursor.fetchone())
            gtid = mode.upper() == "ON"
        status = _binlog_status(cursor)
        if status is None:
            raise SourceError("the server writes no binlog: start it with log_bin")
        executed: str | None = gtids if maria else None
        if gtid and not maria:
            executed = str(status[4]).replace("\n", "")
        flavor: Flavor = "mariadb" if maria else "mysql"
        position = Position(flavor, identity, str(status[0]), int(status[1]), executed)
        return Server(flavor, version, identity, gtid, position)


def _binlog_status(cursor: Any) -> tuple[Any, ...] | None:
    # MySQL 8.2 renamed the statement, 8.4 removed the old name; MariaDB has only the old one.
    try:
        cursor.execute("SHOW BINARY LOG STATUS")
    except pymysql.err.ProgrammingError:
        cursor.execute("SHOW MASTER STATUS")
    row: tuple[Any, ...] | None = cursor.fetchone()
    return row


def random_server_id() -> int:
    """A replica server id that is rarely taken. Each process has one of its own: a relay that was
    replaced and does not know it yet must not throw its successor out of the server."""
    return random.randrange(1_000_000_000, 4_000_000_000)
