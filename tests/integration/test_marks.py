"""The relay's own UPDATEs: what they look like to another reader of the same binlog, and what they
do about rows that others hold."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pymysqlreplication import BinLogStreamReader
from pymysqlreplication.row_event import UpdateRowsEvent

from cdc_relay.binlog.stream import random_server_id
from tests.support import sql
from tests.support.harness import Harness
from tests.support.sql import Database

# The library opens its second connection by an old name of an argument.
pytestmark = pytest.mark.filterwarnings("ignore:'db' is deprecated:DeprecationWarning")

KEYS = [f"k{number}" for number in range(30)]


class OtherReader:
    """A reader with the stock library, from now on, as a second relay or a capture of the table
    is one."""

    def __init__(self, database: Database, table: str) -> None:
        mariadb = database.is_mariadb
        # SHOW MASTER STATUS is gone in MySQL 8.4, BINARY LOG STATUS is not in MariaDB 10.
        status = "SHOW MASTER STATUS" if mariadb else "SHOW BINARY LOG STATUS"
        file, offset, *_ = database.sql(status)[0]
        url = database.url
        settings = {
            "host": url.host,
            "port": url.port,
            "user": url.username,
            "password": url.password or "",
        }
        self._stream = BinLogStreamReader(
            connection_settings=settings,
            server_id=random_server_id(),
            only_schemas=[database.name],
            only_tables=[table],
            only_events=[UpdateRowsEvent],
            log_file=file,
            log_pos=offset,
            resume_stream=True,
            is_mariadb=mariadb,
        )

    def updates(self) -> list[UpdateRowsEvent]:
        """What has come since the last call."""
        return list(self._stream)

    def close(self) -> None:
        self._stream.close()


def whole(bitmap: bytes, columns: int) -> bool:
    """Whether the image holds every column."""
    return all(bitmap[index // 8] >> index % 8 & 1 for index in range(columns))


def marks(shop: Harness, **environment: str) -> list[UpdateRowsEvent]:
    """Send and mark rows, and return the relay's updates as the other reader sees them."""
    reader = OtherReader(shop.database, shop.table)
    try:
        relay = shop.relay(**environment)
        for key in KEYS:
            shop.ins(key, {"key": key, "text": "é€𝄞" * 20}, headers={"tenant": "a"})
        shop.wait_all_sent()
        assert relay.terminate() == 0, relay.text()
        found: list[UpdateRowsEvent] = []
        deadline = time.monotonic() + 30
        while sum(len(event.rows) for event in found) < len(KEYS):
            found += reader.updates()
            assert time.monotonic() < deadline
        return found
    finally:
        reader.close()


def test_another_reader_gets_whole_rows_before_and_after_the_mark(shop: Harness) -> None:
    """Readers of other makes stop at an image that lacks columns; the default leaves none out."""
    columns = shop.database.sql(
        "SELECT column_name FROM information_schema.columns WHERE table_schema = DATABASE()"
        " AND table_name = %s ORDER BY ordinal_position",
        (shop.table,),
    )
    names = [name for (name,) in columns]
    rows: list[dict[str, Any]] = []
    for event in marks(shop):
        assert event.number_of_columns == len(names)
        for bitmap in (event.columns_present_bitmap, event.columns_present_bitmap2):
            assert whole(bitmap, len(names))
        rows += event.rows
    keys, statuses = [], []
    for row in rows:
        before, after = list(row["before_values"].values()), list(row["after_values"].values())
        keys.append(after[names.index("aggregate_id")])
        place = names.index("status")
        statuses.append((before[place], after[place]))
        changed = {name for name, old, new in zip(names, before, after, strict=True) if old != new}
        assert changed <= {"status", "sent_at", "updated_at"}, changed
    assert keys == KEYS
    assert set(statuses) == {(0, 1)}


def test_minimal_images_are_a_choice(mysql_shop: Harness) -> None:
    found = marks(mysql_shop, MARK_ROW_IMAGE="minimal")
    assert not any(whole(event.columns_present_bitmap, event.number_of_columns) for event in found)


@pytest.mark.parametrize("mark", ["delete", "none"])
def test_other_marks_write_no_updates(mysql_shop: Harness, mark: str) -> None:
    reader = OtherReader(mysql_shop.database, mysql_shop.table)
    try:
        relay = mysql_shop.relay(MARK=mark)
        for key in KEYS:
            mysql_shop.ins(key)
        mysql_shop.until(lambda: len(mysql_shop.messages()) == len(KEYS))
        assert relay.terminate() == 0, relay.text()
        assert mysql_shop.count(0) == (0 if mark == "delete" else len(KEYS))
        mysql_shop.database.sql(f"UPDATE {mysql_shop.table} SET retry_count = 7")
        mysql_shop.ins("last")
        mysql_shop.database.sql(
            f"UPDATE {mysql_shop.table} SET retry_count = 8 WHERE aggregate_id = 'last'"
        )
        found: list[UpdateRowsEvent] = []
        deadline = time.monotonic() + 30
        while not found or 8 not in list(found[-1].rows[-1]["after_values"].values()):
            found += reader.updates()
            assert time.monotonic() < deadline
        ours = [
            event for event in found if not {7, 8} & set(event.rows[0]["after_values"].values())
        ]
        assert not ours
    finally:
        reader.close()


def test_rows_that_others_hold_delay_no_marks_but_their_own(shop: Harness) -> None:
    """One row and a range of others are held all the time. Far more rows than may be owed are sent
    and marked meanwhile, also by a successor after a kill; nothing is sent twice."""

    def add(count: int) -> None:
        for _ in range(count // 500):
            values = [sql.row(f"k{number % 50}", number) for number in range(500)]
            shop.database.sql(*sql.insert(shop.table, values))

    add(500)
    held = 1 + 100
    with shop.database.connect() as holder, holder.cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")  # no row beyond
        cursor.execute(
            f"SELECT id FROM {shop.table} WHERE id = 3 OR id BETWEEN 101 AND 200 FOR UPDATE"
        )
        ids = {row_id for (row_id,) in cursor.fetchall()}
        relay = shop.relay(QUEUE_ROWS="1000")
        add(3000)
        shop.until(lambda: shop.count(1) == 3500 - held)
        last = shop.checkpoint()
        assert last is not None
        assert ids <= {row_id for row_id, _ in last.owed}
        relay.kill()
        add(500)
        relay = shop.relay(QUEUE_ROWS="1000")
        add(1500)
        shop.until(lambda: shop.count(1) == 5500 - held)
        holder.rollback()
    shop.wait_all_sent()
    assert relay.terminate() == 0, relay.text()
    last = shop.checkpoint()
    assert last is not None
    assert not last.owed
    sent = [message.event_id for message in shop.messages()]
    assert len(sent) == len(set(sent)) == 5500
