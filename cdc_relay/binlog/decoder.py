"""The decoder: packets of a binlog dump in, committed rows of one table and positions out.

Hot: typed for mypyc, running unchanged as plain Python. Packets are walked by their headers; an
event is looked into only when it begins or ends a transaction, maps the outbox table, or inserts
into it. Nothing of a transaction is given out before the event that commits it, and only that
event moves the position.

Grammar of a group (MySQL source documentation, "Binlog events"; MariaDB knowledge base,
"Replication protocol"): ``GTID? (BEGIN event* (XID | COMMIT | ROLLBACK) | XA START event* XA END
XA_PREPARE | statement)``; MariaDB's GTID event stands for BEGIN unless it is flagged standalone.
"""

from __future__ import annotations

import re
import zlib
from typing import Final, Protocol

from mypy_extensions import i64

from cdc_relay.binlog.rows import Layout, UnreadRow, decode_rows
from cdc_relay.errors import DecodeError, PositionLostError
from cdc_relay.outbox import OutboxEvent
from cdc_relay.position import GtidSet, MariaGtidPosition, file_number

# Event types.
QUERY: Final = 2
STOP: Final = 3
ROTATE: Final = 4
INTVAR: Final = 5
RAND: Final = 13
USER_VAR: Final = 14
FORMAT_DESCRIPTION: Final = 15
XID: Final = 16
BEGIN_LOAD_QUERY: Final = 17
EXECUTE_LOAD_QUERY: Final = 18
TABLE_MAP: Final = 19
WRITE_ROWS_V1: Final = 23
UPDATE_ROWS_V1: Final = 24
DELETE_ROWS_V1: Final = 25
INCIDENT: Final = 26
HEARTBEAT: Final = 27
IGNORABLE: Final = 28
ROWS_QUERY: Final = 29
WRITE_ROWS: Final = 30
UPDATE_ROWS: Final = 31
DELETE_ROWS: Final = 32
GTID: Final = 33
ANONYMOUS_GTID: Final = 34
PREVIOUS_GTIDS: Final = 35
TRANSACTION_CONTEXT: Final = 36
VIEW_CHANGE: Final = 37
XA_PREPARE: Final = 38
PARTIAL_UPDATE_ROWS: Final = 39
TRANSACTION_PAYLOAD: Final = 40
HEARTBEAT_V2: Final = 41
GTID_TAGGED: Final = 42
MARIA_ANNOTATE_ROWS: Final = 160
MARIA_BINLOG_CHECKPOINT: Final = 161
MARIA_GTID: Final = 162
MARIA_GTID_LIST: Final = 163
MARIA_START_ENCRYPTION: Final = 164
MARIA_QUERY_COMPRESSED: Final = 165
MARIA_WRITE_ROWS_COMPRESSED_V1: Final = 166
MARIA_UPDATE_ROWS_COMPRESSED_V1: Final = 167
MARIA_DELETE_ROWS_COMPRESSED_V1: Final = 168
MARIA_WRITE_ROWS_COMPRESSED: Final = 169
MARIA_UPDATE_ROWS_COMPRESSED: Final = 170
MARIA_DELETE_ROWS_COMPRESSED: Final = 171

# Events that never hold an inserted row and never begin or end a transaction.
_PASSED: Final = frozenset(
    (
        STOP,
        INTVAR,
        RAND,
        USER_VAR,
        UPDATE_ROWS_V1,
        DELETE_ROWS_V1,
        IGNORABLE,
        ROWS_QUERY,
        UPDATE_ROWS,
        DELETE_ROWS,
        TRANSACTION_CONTEXT,
        VIEW_CHANGE,
        PARTIAL_UPDATE_ROWS,
        BEGIN_LOAD_QUERY,
        HEARTBEAT,
        HEARTBEAT_V2,
        MARIA_ANNOTATE_ROWS,
        MARIA_UPDATE_ROWS_COMPRESSED_V1,
        MARIA_DELETE_ROWS_COMPRESSED_V1,
        MARIA_UPDATE_ROWS_COMPRESSED,
        MARIA_DELETE_ROWS_COMPRESSED,
    )
)

# What stands at the head of a file, before its first transaction. The dump's first file may be
# entered anywhere; its head then comes with place 0 or not at all.
_HEAD_OF_FILE: Final = (PREVIOUS_GTIDS, MARIA_BINLOG_CHECKPOINT, MARIA_GTID_LIST)

_HEADER: Final = 19
_ARTIFICIAL: Final = 0x20
_IGNORABLE_FLAG: Final = 0x80

# What stopped ``feed``.
NOTHING: Final = 0
STATUS: Final = 1  # an error or end-of-file packet
SPANNING: Final = 2  # an event of 16 MB or more, in several packets
FULL: Final = 3  # enough rows for one hand-over
PAYLOAD: Final = 4  # a compressed transaction: its events are the caller's to unpack
REREAD: Final = 5  # a transaction too large to hold: read it again, now that it is committed

# Rows of one open transaction are held up to this many bytes of the log; decoded, they take two to
# three times as much.
_HOLD_BYTES: Final = 4 * 1024 * 1024
# And up to this many, or ten batches of them: they may be small, or keys of large ones, and each of
# a group owes a mark.
_HOLD_ROWS: Final = 20_000
_HOLD_BATCHES: Final = 10

_PREPARED: Final = "prepared XA transaction"
_crc32: Final = zlib.crc32
_XID_TEXT: Final = re.compile(rb"X'([0-9A-Fa-f]*)',\s*X'([0-9A-Fa-f]*)',\s*(\d+)")
_FILE_NAME: Final = re.compile(r"[^\0]+\.\d+")
# What may stand before a statement: spaces, comments, the head of a comment that is executed.
_LEADING: Final = re.compile(
    rb"\A(?:\s+|/\*M?!\d*|/\*.*?\*/|--[^\n]*(?:\n|$)|#[^\n]*(?:\n|$))+", re.DOTALL
)
_DDL: Final = (b"CREATE", b"ALTER", b"DROP", b"RENAME", b"TRUNCATE")


class Resolver(Protocol):
    """What the decoder asks about shapes of the table; see ``layout.LayoutResolver``."""

    def resolve(self, shape: bytes) -> Layout:
        """The plan for a table map."""

    def doubtful(
        self, layout: Layout, buf: bytes, pos: int, end: int, committed: int
    ) -> list[OutboxEvent | UnreadRow]:
        """The rows of an event whose layout is not proved. ``committed``: when, microseconds since
        1970; 0 where that is not known."""


class Decoder:
    """Follows one dump of one server. Not thread-safe; a new connection takes a new one.

    The caller takes ``rows`` (committed, in commit order) together with the position, both as of
    the last commit seen, and clears them by ``take``.
    """

    def __init__(
        self,
        schema: str,
        table: str,
        resolver: Resolver,
        batch_rows: int,
        gtids: GtidSet | None,
        maria_gtids: MariaGtidPosition | None,
        hold_bytes: int = _HOLD_BYTES,
    ) -> None:
        """``schema`` and ``table`` as the log spells them. ``gtids`` or ``maria_gtids``: the
        transactions before the start, where the server keeps GTIDs; the decoder adds to them."""
        s, t = schema.encode(), table.encode()
        self._wanted = bytes([len(s)]) + s + b"\0" + bytes([len(t)]) + t + b"\0"
        self._name = t.lower()
        self._resolver = resolver
        self._hold_bytes: i64 = hold_bytes
        self._batch_rows: i64 = batch_rows
        self._hold_rows: i64 = min(_HOLD_ROWS, _HOLD_BATCHES * batch_rows)
        self._layouts: dict[bytes, Layout] = {}
        self._tables: dict[int, Layout] = {}
        self.gtids = gtids
        self.maria_gtids = maria_gtids
        # The run of transactions of one source that is not yet in ``gtids``.
        self._run_sid = b""
        self._run_tag = ""
        self._run_first: i64 = 0
        self._run_stop: i64 = 0
        # The open transaction.
        self._open: list[OutboxEvent | UnreadRow] = []
        self._in_transaction = False
        self._sid = b""
        self._tag = ""
        self._gno: i64 = 0
        self._maria: tuple[int, int, int] | None = None
        # How many rows had come at each, and how many of them were held.
        self._savepoints: dict[str, tuple[int, int]] = {}
        self._held: i64 = 0
        self._overflow = False
        self._looked_up = False
        self._xa_group = False
        self._only_keys = False
        # A transaction too large to hold is read twice: once to learn its outcome, then, known to
        # be committed, to give its rows out as they come.
        self._expected = ""
        self._expected_known = False
        self._known = False
        self.done: i64 = 0
        """Rows of the expected transaction that are not wanted again."""
        self._count: i64 = 0
        self.dropped: list[tuple[int, int]] = []
        """Rows of the too large transaction that it rolled back to a savepoint, by number."""
        self.doubted: i64 = 0
        """So many of its rows, from the first on, are the table's to judge."""
        self.given: i64 = 0
        """Rows of the open, known transaction that were given out already."""
        self._stamp = b""
        self._began: i64 = 0  # by MariaDB's GTID event, seconds since 1970
        self.prepared: dict[str, tuple[int, ...]] = {}
        """Keys of rows in XA transactions that are prepared and not decided, by xid."""
        self.deciding = ""
        """The prepared XA transaction that is committed here and whose keys are being given out."""
        self._checksum: i64 = 0
        # Running place in the log, and the place of the last boundary.
        self.file = ""
        self._offset: i64 = 0
        self.commit_file = ""
        self.commit_offset: i64 = 0
        # When a file was begun, seconds since 1970: with its name, what it is. 0 is not known.
        self._born: i64 = 0
        self.commit_born: i64 = 0
        self.commit_time: i64 = 0
        self.rows: list[OutboxEvent | UnreadRow] = []
        self.size: i64 = 0
        """Bytes that ``rows`` take in the log."""
        self.commits: i64 = 0
        self.stopped: i64 = NOTHING
        self.events: i64 = 0
        self.moved = False
        """Whether the position has moved since ``take``."""
        self.notices: dict[str, int] = {}
        """Things seen that may hide a row of ours, by kind, with their number."""
        self._in_payload = False

    def begin(self, file: str, offset: int, born: int = 0) -> None:
        """Say where the dump starts: a boundary, in a file that was begun at ``born``; no ``file``
        where only GTIDs tell, and another server has other files."""
        self.file = file
        self._offset = offset
        self.commit_file = file
        self.commit_offset = offset
        self.commit_born = born

    def expect(
        self, group: str, done: int, dropped: list[tuple[int, int]] | None, doubted: int = 0
    ) -> None:
        """Say that the transaction ``group`` comes next and that ``done`` of its rows are not
        wanted again. ``dropped`` (rows it rolled back to a savepoint) and ``doubted`` (so many of
        its first rows are the table's to judge) where it was read before and is known to be
        committed, else None."""
        self._expected = group
        self.done = done
        self._expected_known = dropped is not None
        self.dropped = dropped or []
        self.doubted = doubted

    def take(self) -> list[OutboxEvent | UnreadRow]:
        """Return the committed rows and start a new list."""
        rows = self.rows
        self.rows = []
        self.size = 0
        self.moved = False
        return rows

    def time(self) -> int:
        """When the last transaction was committed, microseconds since 1970; whole seconds where
        the server gives no more."""
        if len(self._stamp) == 7:
            return int.from_bytes(self._stamp, "little") & ((1 << 55) - 1)
        return int(self.commit_time)

    def gtid_text(self) -> str | None:
        """The transactions up to the last boundary in the server's text form; None where the
        server keeps no GTIDs."""
        if self.gtids is not None:
            self._close_run()
            return str(self.gtids)
        return str(self.maria_gtids) if self.maria_gtids is not None else None

    def open_group(self) -> str:
        """Name of the transaction that is open: its GTID, or where it starts."""
        if self._gno:
            return f"{self._sid.hex()}:{self._tag}:{self._gno}"
        if self._maria is not None:
            return "-".join([str(number) for number in self._maria])
        return f"{self.commit_file}:{self.commit_offset}"

    def offset(self) -> int:
        """The running place in ``file``."""
        return int(self._offset)

    def where(self) -> str:
        """The running place in the log, for messages."""
        return f"{self.file}:{self._offset}"

    # --- packets -------------------------------------------------------------------------------

    def feed(self, buf: bytes, pos: i64, limit: i64) -> i64:
        """Walk the packets in ``buf[pos:limit]`` and return where it stopped: at an incomplete
        packet (``stopped`` is NOTHING), or before a packet that is the caller's (STATUS,
        SPANNING), or after enough committed rows (FULL).

        Raises ``DecodeError`` for bytes that cannot be what the protocol says.
        """
        self.stopped = NOTHING
        if self.deciding:
            self._give_keys()
            return pos
        while pos + 4 <= limit:
            a: i64 = buf[pos]
            b: i64 = buf[pos + 1]
            c: i64 = buf[pos + 2]
            length: i64 = a | b << 8 | c << 16
            after: i64 = pos + 4 + length
            if after > limit:
                if length == 0xFFFFFF:
                    self.stopped = SPANNING
                return pos
            if length == 0xFFFFFF:
                self.stopped = SPANNING
                return pos
            if length == 0:
                raise DecodeError(f"{self.where()}: an empty packet")
            if buf[pos + 4] != 0:
                self.stopped = STATUS
                return pos
            if buf[pos + 9] == TRANSACTION_PAYLOAD:
                self.stopped = PAYLOAD
                return pos
            self.event(buf, pos + 5, after)
            pos = after
            if self.stopped != NOTHING:
                return pos
        return pos

    def single(self, packet: bytes) -> int:
        """Take one event that came in several packets (its status byte first); ``stopped``."""
        self.stopped = NOTHING
        self.event(packet, 1, len(packet))
        return int(self.stopped)

    def begin_payload(self, place: int) -> None:
        """The events that follow come out of a compressed transaction: without checksums, and
        without places of their own; it ends at ``place`` (the header's 32 bits)."""
        self._offset += (place - self._offset) & 0xFFFFFFFF
        self._in_payload = True

    def inner(self, buf: bytes, pos: i64, limit: i64) -> i64:
        """Walk the unpacked events in ``buf[pos:limit]``; return where it stopped: at an
        incomplete event (``stopped`` is NOTHING), after enough rows (FULL), or at REREAD."""
        self.stopped = NOTHING
        if self.deciding:
            self._give_keys()
            return pos
        while pos + _HEADER <= limit:
            after: i64 = pos + _u32(buf, pos + 9)
            if after < pos + _HEADER:
                raise DecodeError(f"{self.where()}: a packed event of {after - pos} bytes")
            if after > limit:
                return pos
            self.event(buf, pos, after)
            pos = after
            if self.stopped != NOTHING:
                return pos
        return pos

    def has_checksums(self) -> bool:
        """Whether events of the log end with a checksum now."""
        return self._checksum != 0

    def end_payload(self) -> None:
        """The compressed transaction is over; its outcome was its last event."""
        self._in_payload = False
        if self._gno or self._maria is not None or self._in_transaction:
            raise DecodeError(f"{self.where()}: a compressed transaction without an end")

    def event(self, buf: bytes, start: i64, after: i64) -> None:
        """Take one event, ``buf[start:after]``, header and checksum included."""
        checksum: i64 = 0 if self._in_payload else self._checksum
        if after - start < _HEADER + checksum:
            raise DecodeError(f"{self.where()}: an event of {after - start} bytes")
        kind: i64 = buf[start + 4]
        size: i64 = _u32(buf, start + 9)
        if size != after - start:
            raise DecodeError(
                f"{self.where()}: event of type {kind} says {size} bytes in a packet of "
                f"{after - start}"
            )
        end: i64 = after - checksum
        body: i64 = start + _HEADER
        self.events += 1
        if not self._in_payload:
            place: i64 = _u32(buf, start + 13)
            if place != 0:
                # The header has 32 bits for an offset that may need more.
                self._offset += (place - self._offset) & 0xFFFFFFFF
        try:
            # Of every event, also of those that are passed over: their type may be damaged.
            if (
                checksum
                and kind != FORMAT_DESCRIPTION
                and kind != ROTATE
                and _crc32(buf[start:end]) != _u32(buf, end)
            ):
                raise ValueError("the checksum does not match: the event is damaged")
            if kind == TABLE_MAP:
                self._table_map(buf, start, body, end)
            elif kind == WRITE_ROWS or kind == WRITE_ROWS_V1:
                layout = self._tables.get(_u32(buf, body) | _u16(buf, body + 4) << 32)
                if layout is not None:
                    self._write_rows(buf, start, body, end, kind, layout)
            elif kind == QUERY:
                self._query(buf, body, end)
            elif kind == XID:
                self.commit_time = _u32(buf, start) * 1_000_000
                self._commit()
            elif kind == GTID:
                self._begin_group()
                self._sid = buf[body + 1 : body + 17]
                self._tag = ""
                self._gno = _u64(buf, body + 17)
                self._stamp = buf[body + 42 : body + 49]
                if self._expected:
                    self._recognise()
            elif kind in _PASSED:
                pass
            elif kind == MARIA_GTID:
                self._maria_gtid(buf, start, body)
            else:
                self._rare(buf, kind, start, body, after, end)
        except (IndexError, ValueError) as error:
            raise DecodeError(f"{self.where()}: event of type {kind}: {error}") from None

    # --- rows ----------------------------------------------------------------------------------

    def _table_map(self, buf: bytes, start: i64, body: i64, end: i64) -> None:
        table_id: i64 = _u32(buf, body) | _u16(buf, body + 4) << 32
        if not buf.startswith(self._wanted, body + 8):
            if table_id in self._tables:
                del self._tables[table_id]
            return
        shape = buf[body + 8 : end]
        layout = self._layouts.get(shape)
        if layout is None:
            layout = self._resolver.resolve(shape)
            self._layouts[shape] = layout
        if len(self._tables) > 1000:
            self._tables.clear()
        self._tables[table_id] = layout

    def _write_rows(
        self, buf: bytes, start: i64, body: i64, end: i64, kind: i64, layout: Layout
    ) -> None:
        pos: i64 = body + 8
        if kind in (WRITE_ROWS, MARIA_WRITE_ROWS_COMPRESSED):
            pos += _u16(buf, pos)  # extra data; its length counts itself
        if kind in (MARIA_WRITE_ROWS_COMPRESSED_V1, MARIA_WRITE_ROWS_COMPRESSED):
            buf = _unpacked(buf, pos, end)
            pos = 0
            end = len(buf)
        before: i64 = len(self._open)
        if layout.proved:
            decode_rows(buf, pos, end, layout, self._open)
        else:
            committed = self.time() if self._stamp else self._began * 1_000_000
            self._open += self._resolver.doubtful(layout, buf, pos, end, committed)
            self._looked_up = True
        self._count += len(self._open) - before
        self._held += end - pos
        most: i64 = self._batch_rows if self._known else self._hold_rows
        if self._overflow:
            self._open = []
        elif self._held > self._hold_bytes or (len(self._open) >= most and not self._only_keys):
            self._too_large()

    def _too_large(self) -> None:
        """The open transaction holds more than memory should: give its rows out if it is known to
        be committed, keep only keys if its outcome comes later (XA), else drop them and read the
        transaction again after its end."""
        if self._known:
            self._give()
            self.stopped = FULL
        elif self._xa_group:
            keys: list[OutboxEvent | UnreadRow] = []
            for row in self._open:
                keys.append(UnreadRow(row.id, _PREPARED))
            self._open = keys
            self._only_keys = True
        else:
            self._overflow = True
            self._open = []
        self._held = 0

    def _give(self) -> None:
        """Give out the open rows of a transaction that is known to be committed."""
        number: i64 = self.given
        for row in self._open:
            if number >= self.done and not self._is_dropped(number):
                self.rows.append(
                    row if number >= self.doubted else UnreadRow(row.id, "an unknown savepoint")
                )
            number += 1
        self.given = number
        self.size += self._held
        self._open = []

    def _is_dropped(self, number: i64) -> bool:
        return any(first <= number < stop for first, stop in self.dropped)

    # --- transactions --------------------------------------------------------------------------

    def _nothing_open(self) -> None:
        if self._open:
            raise ValueError("a transaction begins before the one before it has ended")

    def _begin_group(self) -> None:
        self._nothing_open()
        if self._overflow:
            raise ValueError("a large transaction has no end")
        self._held = 0
        self._count = 0
        self._in_transaction = False
        self._xa_group = False
        self._only_keys = False
        self._maria = None
        if self._savepoints:
            self._savepoints = {}
        if not self._expected:
            self._forget_rollbacks()

    def _recognise(self) -> None:
        """Whether the transaction that begins is the expected one. Where some of its rows are done
        and its outcome was not read in this run, it is only walked through this time."""
        if self.open_group() == self._expected:
            self._known = self._expected_known
            self._overflow = not self._known and self.done > 0
        else:
            self.done = 0
            self._forget_rollbacks()
        self._expected = ""

    def _commit(self) -> None:
        if self._overflow or self._only_keys:  # keys: of an XA transaction of one phase
            self.stopped = REREAD
            return
        if self._known:
            self._give()
        elif self._open:
            self.rows += self._open
            self.size += self._held
            self._open = []
        self._boundary()

    def _boundary(self) -> None:
        """The group is over, whatever its outcome: move the position behind it."""
        if self._known or self._overflow:
            self._known = False
            self._overflow = False
            self.done = 0
            self.given = 0
        self._forget_rollbacks()
        self._held = 0
        if self._gno:
            if (
                self._gno == self._run_stop
                and self._sid == self._run_sid
                and self._tag == self._run_tag
            ):
                self._run_stop += 1
            else:
                self._close_run()
                self._run_sid = self._sid
                self._run_tag = self._tag
                self._run_first = self._gno
                self._run_stop = self._gno + 1
            self._gno = 0
        if self._maria is not None and self.maria_gtids is not None:
            self.maria_gtids.add(*self._maria)
            self._maria = None
        if self._open:
            self._open = []
        if self._savepoints:
            self._savepoints = {}
        self._in_transaction = False
        self.commits += 1
        self._here()
        if self._looked_up or len(self.rows) >= self._batch_rows:
            # Looking rows up takes long: what is known is handed on before the next ones.
            self._looked_up = False
            self.stopped = FULL

    def _forget_rollbacks(self) -> None:
        if self.dropped:
            self.dropped = []
        self.doubted = 0

    def _here(self) -> None:
        """The running place is a boundary."""
        self.commit_file = self.file
        self.commit_offset = self._offset
        self.commit_born = self._born
        self.moved = True

    def _close_run(self) -> None:
        if self._run_stop and self.gtids is not None:
            self.gtids.add_range(self._run_sid, self._run_tag, self._run_first, self._run_stop)
            self._run_first = self._run_stop  # it may go on
            if not self._run_sid:
                self._run_stop = 0

    def _query(self, buf: bytes, body: i64, end: i64) -> None:
        schema: i64 = buf[body + 8]
        text: i64 = body + 13 + _u16(buf, body + 11) + schema + 1
        if text > end:
            raise ValueError("a statement that ends before it begins")
        self._statement(buf[text:end])

    def _statement(self, text: bytes) -> None:
        if text == b"BEGIN":
            self._nothing_open()
            self._held = 0
            self._count = 0
            self._in_transaction = True
            return
        if text == b"COMMIT":
            self._commit()
            return
        word = text[:12].upper()
        if word.startswith(b"ROLLBACK"):
            if text.upper().startswith(b"ROLLBACK TO"):
                self._rollback_to(_folded(text[11:]))
            else:
                self._open = []
                self._boundary()
        elif word.startswith(b"SAVEPOINT"):
            self._savepoints[_folded(text[9:])] = (self._count, len(self._open))
        elif word.startswith(b"XA "):
            self._xa(text)
        else:
            if self._name in text.lower():
                head = _LEADING.sub(b"", text, 1)[:20].upper()
                if head.startswith(_DDL):
                    self._layouts.clear()
                    self._tables.clear()
                    self._notice("ddl")
                elif head.startswith((b"INSERT", b"REPLACE", b"LOAD")):
                    self._notice("statement")
            if not self._in_transaction:
                self._boundary()

    def _rollback_to(self, name: str) -> None:
        if self._known:
            return  # the first reading has noted which rows were dropped
        if name not in self._savepoints:
            self._doubt(f"ROLLBACK TO {name}, a savepoint that is not known")
            return
        first, held = self._savepoints[name]
        # Rows keep their numbers, whatever was rolled back before them: where the transaction turns
        # out to be too large to hold, the second reading counts them as they lie in the log.
        while self.dropped and self.dropped[-1][0] >= first:
            self.dropped.pop()
        self.dropped.append((first, self._count))
        del self._open[held:]  # none is held any more where it is too large already

    def _doubt(self, reason: str) -> None:
        """What of the open rows stays is not known: the table knows, once it is committed."""
        self.doubted = self._count
        keys: list[OutboxEvent | UnreadRow] = []
        for row in self._open:
            keys.append(UnreadRow(row.id, reason))
        self._open = keys

    def _notice(self, kind: str) -> None:
        self.notices[kind] = self.notices.get(kind, 0) + 1

    def _maria_gtid(self, buf: bytes, start: i64, body: i64) -> None:
        self._begin_group()
        sequence = _u64(buf, body)
        domain: i64 = _u32(buf, body + 8)
        flags: i64 = buf[body + 12]
        self._maria = (domain, _u32(buf, start + 5), sequence)
        self._in_transaction = flags & 1 == 0
        self._xa_group = flags & 64 != 0
        self._stamp = b""
        self._began = _u32(buf, start)
        if self._expected:
            self._recognise()

    # --- XA ------------------------------------------------------------------------------------

    def _xa(self, text: bytes) -> None:
        verb = text[3:].strip().upper()
        if verb.startswith((b"START", b"BEGIN")):
            self._nothing_open()
            self._in_transaction = True
            self._xa_group = True
        elif verb.startswith(b"END"):
            pass
        elif verb.startswith((b"COMMIT", b"ROLLBACK")):
            match = _XID_TEXT.search(text)
            if match is None:
                raise ValueError(f"cannot read {text!r}")
            xid = _xid(match[1].lower().decode(), match[2].lower().decode(), int(match[3]))
            if verb.startswith(b"COMMIT") and xid in self.prepared:
                # What was committed before is handed on first: these come in batches of their own.
                self.deciding = xid
                self.given = self.done
                self.stopped = FULL
                return
            if verb.startswith(b"COMMIT"):
                self._notice("xa_unknown")
            self.prepared.pop(xid, None)
            self._boundary()
        else:
            raise ValueError(f"cannot read {text[:80]!r}")

    def _give_keys(self) -> None:
        """Give out the next keys of the prepared transaction that is committed here; behind the
        last ones stands its boundary."""
        keys = self.prepared[self.deciding]
        stop: i64 = self.given + self._batch_rows
        for key in keys[self.given : stop]:
            self.rows.append(UnreadRow(key, _PREPARED))
        self.given = stop
        if stop >= len(keys):
            del self.prepared[self.deciding]
            self.deciding = ""
            self.given = 0
            self._boundary()
        self.stopped = FULL

    def _xa_prepare(self, buf: bytes, body: i64, end: i64) -> None:
        one_phase = buf[body] != 0
        format_id: i64 = _u32(buf, body + 1)
        gtrid: i64 = _u32(buf, body + 5)
        bqual: i64 = _u32(buf, body + 9)
        data: i64 = body + 13
        if data + gtrid + bqual > end:
            raise ValueError("an xid that reaches beyond the event")
        if one_phase:
            self._commit()
            return
        xid = _xid(
            buf[data : data + gtrid].hex(),
            buf[data + gtrid : data + gtrid + bqual].hex(),
            format_id,
        )
        if self._open:
            self.prepared[xid] = tuple(row.id for row in self._open)
        self._open = []
        self._boundary()

    # --- everything that is not in every transaction ---------------------------------------------

    def _rare(self, buf: bytes, kind: i64, start: i64, body: i64, after: i64, end: i64) -> None:
        if kind == FORMAT_DESCRIPTION:
            if _u16(buf, body) != 4 or buf[body + 56] != _HEADER:
                raise ValueError("not a description of version 4")
            # The last five bytes: checksum algorithm (0 none, 1 CRC32) and a checksum.
            algorithm: i64 = buf[after - 5]
            if algorithm > 1:
                raise ValueError(f"unknown checksum algorithm {algorithm}")
            if algorithm == 1 and not self._is_intact_format(buf, start, after - 4):
                raise ValueError("the checksum does not match: the event is damaged")
            self._checksum = 4 if algorithm == 1 else 0
            self._tables = {}
            # What a crash of the server left open at the end of the last file was never committed.
            self._open = []
            self._overflow = False
            self._begin_group()
            self._gno = 0
            self._born = _u32(buf, start)
            if self.commit_file == self.file and self.commit_born != self._born:
                self.commit_born = self._born
                self.moved = True
            return
        if kind == ROTATE:
            self._rotate(buf, start, body, after)
            return
        if kind == ANONYMOUS_GTID:
            self._begin_group()
            self._gno = 0
            self._stamp = buf[body + 42 : body + 49]
            if self._expected:
                self._recognise()
        elif kind == GTID_TAGGED:
            self._begin_group()
            self._tagged_gtid(buf, body, end)
            if self._expected:
                self._recognise()
        elif kind in (MARIA_WRITE_ROWS_COMPRESSED_V1, MARIA_WRITE_ROWS_COMPRESSED):
            layout = self._tables.get(_u32(buf, body) | _u16(buf, body + 4) << 32)
            if layout is not None:
                self._write_rows(buf, start, body, end, kind, layout)
        elif kind == MARIA_QUERY_COMPRESSED:
            text: i64 = body + 13 + _u16(buf, body + 11) + buf[body + 8] + 1
            self._statement(_inflated(buf, text, end))
        elif kind == XA_PREPARE:
            self._xa_prepare(buf, body, end)
        elif kind in _HEAD_OF_FILE:
            # So the end of a log that was only rotated is reached, with or without GTIDs.
            if not self._in_transaction and self._offset > self.commit_offset:
                self._here()
        elif kind == INCIDENT:
            raise PositionLostError(f"{self.where()}: the server reports lost events (INCIDENT)")
        elif kind == EXECUTE_LOAD_QUERY:
            self._notice("statement")
        elif not _u16(buf, start + 17) & _IGNORABLE_FLAG:
            self._notice(f"event type {kind}")

    def _is_intact_format(self, buf: bytes, start: i64, end: i64) -> bool:
        """Whether the description's checksum fits; it is made without the flag that says that the
        file is in use."""
        plain = bytearray(buf[start:end])
        plain[17] &= 0xFE
        wanted: i64 = _u32(buf, end)
        return _crc32(plain) == wanted or _crc32(buf[start:end]) == wanted

    def _tagged_gtid(self, buf: bytes, body: i64, end: i64) -> None:
        """GTID with a tag: a message of numbered fields (MySQL source documentation,
        "mysql::serialization"): 1 uuid, 2 number, 3 tag, 6 commit time in microseconds."""
        self._gno = 0
        pos: i64 = body
        header: list[int] = []
        for _ in range(3):  # version, size, last field that may not be ignored
            value, pos = _varlen(buf, pos)
            header.append(value)
        if header[0] > 1:
            raise ValueError(f"GTID message of version {header[0]}")
        stop: i64 = body + header[1]
        self._stamp = b""
        while pos < stop and pos < end:
            field, pos = _varlen(buf, pos)
            if field == 1:
                sid: list[int] = []
                for _ in range(16):
                    value, pos = _varlen(buf, pos)
                    sid.append(value)
                self._sid = bytes(sid)
            elif field == 2:
                value, pos = _varlen(buf, pos)
                self._gno = value >> 1  # the lowest bit is the sign
            elif field == 3:
                value, pos = _varlen(buf, pos)
                self._tag = buf[pos : pos + value].decode()
                pos += value
            else:
                value, pos = _varlen(buf, pos)
                if field == 6:
                    self._stamp = value.to_bytes(8, "little")[:7]
        if self._gno <= 0:
            raise ValueError("a GTID without a number")

    def _rotate(self, buf: bytes, start: i64, body: i64, after: i64) -> None:
        made_up = _u16(buf, start + 17) & _ARTIFICIAL != 0
        end: i64 = after
        if not made_up:
            end = after - self._checksum
            if self._checksum and _crc32(buf[start:end]) != _u32(buf, end):
                raise ValueError("the checksum does not match: the event is damaged")
        elif after - start > _HEADER + 12 and _crc32(buf[start : after - 4]) == _u32(
            buf, after - 4
        ):
            end = after - 4  # it may come with a checksum or without: the sum itself tells
        name = buf[body + 8 : end].decode()
        if _FILE_NAME.fullmatch(name) is None:
            raise ValueError(f"{name!r} is not a file of a binlog")
        if name != self.file:
            self._born = 0
        self.file = name
        self._offset = _u64(buf, body)
        if not made_up:
            if not self._in_transaction:
                self._here()
        elif not self.commit_file or (
            self._offset == 4 and file_number(name) > file_number(self.commit_file)
        ):
            # Another server's log, whose place is not known before; or the file before ended
            # without a rotate event: the server has crashed. (What was open at its end is dropped
            # by the description that follows.)
            self._here()


def _varlen(buf: bytes, pos: i64) -> tuple[int, i64]:
    """An integer of 1 to 9 bytes and the position behind it; the trailing one bits of the first
    byte count the bytes that follow."""
    first: i64 = buf[pos]
    more: i64 = 0
    while more < 8 and first >> more & 1:
        more += 1
    value = int.from_bytes(buf[pos : pos + 1 + more], "little")
    return value >> (more + 1 if more < 8 else 8), pos + 1 + more


def _inflated(buf: bytes, pos: i64, end: i64) -> bytes:
    """MariaDB's compressed part of an event: one byte of algorithm and length size, the length,
    zlib data."""
    head: i64 = buf[pos]
    if head & 0xF0 != 0x80:
        raise ValueError(f"unknown compression {head:#x}")
    size: i64 = head & 7
    length = int.from_bytes(buf[pos + 1 : pos + 1 + size], "big")
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(buf[pos + 1 + size : end], length + 1)
    except (zlib.error, OverflowError) as error:
        raise ValueError(f"a compressed event is damaged: {error}") from None
    if len(data) != length or not inflater.eof:
        raise ValueError("a compressed event of the wrong length")
    return data


def _unpacked(buf: bytes, pos: i64, end: i64) -> bytes:
    """The body of a compressed WRITE_ROWS event from its column count on: count and bitmap stand
    before the compressed rows."""
    count: i64 = buf[pos]
    rows: i64 = pos + 1
    if count >= 251:
        count = _u16(buf, pos + 1)
        rows = pos + 3
    rows += (count + 7) >> 3
    return buf[pos:rows] + _inflated(buf, rows, end)


def _folded(name: bytes) -> str:
    """A savepoint's name as the server compares it: in any case. (It also takes accents for
    equal; such a name is then not known.)"""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        text = name.decode("latin-1")
    return text.strip().removeprefix("SAVEPOINT ").casefold()


def _xid(gtrid: str, bqual: str, format_id: int) -> str:
    return f"{gtrid}:{bqual}:{format_id}"


def _u16(buf: bytes, pos: i64) -> i64:
    a: i64 = buf[pos]
    b: i64 = buf[pos + 1]
    return a | b << 8


def _u32(buf: bytes, pos: i64) -> i64:
    a: i64 = buf[pos]
    b: i64 = buf[pos + 1]
    c: i64 = buf[pos + 2]
    d: i64 = buf[pos + 3]
    return a | b << 8 | c << 16 | d << 24


def _u64(buf: bytes, pos: i64) -> i64:
    return _u32(buf, pos) | _u32(buf, pos + 4) << 32
