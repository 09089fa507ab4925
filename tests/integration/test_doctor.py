"""The doctor: each set-up below is spoilt on real servers, named by the doctor, and mended by the
statement or command that it prints, run as printed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from sqlalchemy.engine import make_url

from cdc_relay.config import load
from cdc_relay.database import engine
from cdc_relay.doctor.server import Server as Answers
from cdc_relay.doctor.server import _rds, _retention
from dev.mariadb import MariaDB
from dev.mysql import MySQL
from dev.server import Server
from tests.support.brokers import ProxiedKafka
from tests.support.harness import CHECKOUT, Harness, create_topic
from tests.support.sql import INSERT, Database, purge_logs, row
from tests.support.ward import Ward, tools

RELAY = ("REPLICATION SLAVE, REPLICATION CLIENT ON *.*",)
TABLE = "ON {schema}.outbox_event"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tools(tmp_path_factory.mktemp("tools"))


@pytest.fixture
def ward(mysql: Database, kafka: str) -> Ward:
    """A fresh outbox on MySQL."""
    mysql.create_outbox()
    return Ward(mysql, kafka, mysql.name)


def falls_ill_and_is_mended(
    ward: Ward, check: str, level: str, words: str, path: Path | None = None
) -> None:
    ill = ward.finding(check)
    assert ill is not None
    assert ill.level == level, ill
    assert words in ill.text
    ward.follow(ill, path)
    well = ward.finding(check)
    assert well is None or well.level == "ok", well


# --- server variables --------------------------------------------------------------------------

MYSQL_VARIABLES = [
    ("binlog_format", "'STATEMENT'", "binlog_format", "failure"),
    ("binlog_format", "'MIXED'", "binlog_format", "failure"),
    ("binlog_row_image", "'MINIMAL'", "binlog_row_image", "warning"),
    ("binlog_row_image", "'NOBLOB'", "binlog_row_image", "warning"),
    ("binlog_row_metadata", "'MINIMAL'", "binlog_row_metadata", "warning"),
    ("binlog_row_value_options", "'PARTIAL_JSON'", "binlog_row_value_options", "warning"),
    ("binlog_checksum", "'NONE'", "binlog_checksum", "warning"),
    ("binlog_expire_logs_seconds", "60", "binlog_retention", "warning"),
    ("sync_binlog", "0", "durability", "warning"),
    ("innodb_flush_log_at_trx_commit", "2", "durability", "warning"),
    ("max_allowed_packet", "65536", "max_allowed_packet", "failure"),
    ("server_id", "0", "server_id", "failure"),
    ("read_only", "ON", "read_only", "failure"),
    ("super_read_only", "ON", "read_only", "failure"),
]
MARIADB_VARIABLES = [
    ("binlog_format", "'STATEMENT'", "binlog_format", "failure"),
    ("binlog_row_image", "'MINIMAL'", "binlog_row_image", "warning"),
    ("binlog_row_metadata", "'NO_LOG'", "binlog_row_metadata", "warning"),
    ("binlog_checksum", "'NONE'", "binlog_checksum", "warning"),
    ("binlog_expire_logs_seconds", "60", "binlog_retention", "warning"),
    ("sync_binlog", "0", "durability", "warning"),
    ("read_only", "ON", "read_only", "failure"),
]


@contextmanager
def variable(admin: Database, name: str, value: str) -> Iterator[None]:
    [(_, before)] = admin.sql("SHOW GLOBAL VARIABLES LIKE %s", (name,))
    admin.sql(f"SET GLOBAL {name} = {value}")
    try:
        yield
    finally:
        admin.close()  # a session that began under another max_allowed_packet
        if name == "super_read_only":
            admin.sql("SET GLOBAL read_only = OFF")
        kept = before if before.isdigit() else f"'{before}'"
        admin.sql(f"SET GLOBAL {name} = {kept}")
        if not admin.is_mariadb:
            admin.sql("RESET PERSIST")


@pytest.mark.parametrize(("name", "value", "check", "level"), MYSQL_VARIABLES)
def test_a_variable_of_mysql(
    own_mysql: MySQL, kafka: str, name: str, value: str, check: str, level: str
) -> None:
    spoils_a_variable(own_mysql.url(), kafka, name, value, check, level)


@pytest.mark.parametrize(("name", "value", "check", "level"), MARIADB_VARIABLES)
def test_a_variable_of_mariadb(
    own_mariadb: MariaDB, kafka: str, name: str, value: str, check: str, level: str
) -> None:
    spoils_a_variable(own_mariadb.url(), kafka, name, value, check, level)


def spoils_a_variable(url: str, kafka: str, name: str, value: str, check: str, level: str) -> None:
    with Database.create(url) as database:
        database.create_outbox()
        ward = Ward(database, kafka, database.name)
        with variable(database, name, value):
            falls_ill_and_is_mended(ward, check, level, value.strip("'") if value[0] == "'" else "")


def test_the_retention_of_rds(own_mysql: MySQL, kafka: str) -> None:
    """What RDS keeps is in a table of its own, whatever the server's variable says; it is not
    known to an account that may not read it."""
    with Database.create(own_mysql.url()) as database:
        database.create_outbox()
        ward = Ward(database, kafka, database.name)
        database.sql(
            "CREATE TABLE mysql.rds_configuration"
            " (name VARCHAR(64), value VARCHAR(64), description VARCHAR(64))"
        )
        try:
            database.sql(
                "INSERT INTO mysql.rds_configuration VALUES ('binlog retention hours', NULL, '')"
            )
            ill = ward.finding("binlog_retention")
            assert ill is not None
            assert (ill.level, ill.mend) == (
                "warning",
                ("CALL mysql.rds_set_configuration('binlog retention hours', 168);",),
            )
            database.sql("UPDATE mysql.rds_configuration SET value = '48'")
            well = ward.finding("binlog_retention")
            assert well is not None
            assert (well.level, "2 days" in well.text) == ("ok", True)
            with database.user("SELECT ON {schema}.*") as user:
                pool = engine(load(environ={}, flags={"database_url": user.text}))
                with pool.connect() as connection:
                    there = {"basedir": "/rdsdbbin/mysql-8.4.3.R1/"}
                    assert _rds(connection, there) == (True, None)
                    assert _rds(connection, {"basedir": "/usr/"}) == (False, None)
                pool.dispose()
            unknown = _retention(Answers(False, "8.4.3", "'relay'@'%'", {}, 0.0, rds=True))
            assert (unknown.level, "may not read it" in unknown.text) == ("warning", True)
        finally:
            database.sql("DROP TABLE mysql.rds_configuration")


def test_positions_of_one_server_only(bare_mysql: MySQL, kafka: str) -> None:
    with Database.create(bare_mysql.url()) as database:
        database.create_outbox()
        ward = Ward(database, kafka, database.name)
        try:
            falls_ill_and_is_mended(ward, "gtid_mode", "warning", "failover")
        finally:
            for mode in ("ON_PERMISSIVE", "OFF_PERMISSIVE", "OFF"):
                database.sql(f"SET GLOBAL gtid_mode = {mode}")
            database.sql("SET GLOBAL enforce_gtid_consistency = OFF")
            database.sql("RESET PERSIST")


@pytest.mark.parametrize(
    ("option", "check", "words"),
    [
        ("--skip-log-bin", "log_bin", "writes no binlog"),
        ("--binlog-ignore-db=shop", "binlog_filter", "binlog-ignore-db=shop"),
        ("--binlog-do-db=other", "binlog_filter", "binlog-do-db=other"),
    ],
)
def test_a_server_started_wrong(
    bare_mysql: Server, kafka: str, option: str, check: str, words: str
) -> None:
    assert isinstance(bare_mysql, MySQL)
    database = Database(make_url(bare_mysql.url()))
    database.sql("DROP TABLE IF EXISTS outbox_event")
    database.create_outbox()
    database.close()
    bare_mysql.stop()
    bare_mysql.start([option])
    try:
        ill = Ward(database, kafka, "started-wrong").finding(check)
        assert ill is not None
        assert ill.level == "failure"
        assert words in ill.text
        assert ill.how in ("my.cnf", "advice")
        options = [
            "--" + line.replace(" ", "").replace("_", "-")
            for line in (ill.mend if ill.how == "my.cnf" else ())
            if not line.startswith("[")
        ]
    finally:
        bare_mysql.stop()
    bare_mysql.start(options)
    try:
        well = Ward(database, kafka, "started-wrong").finding(check)
        assert well is not None
        assert well.level == "ok"
    finally:
        database.sql("DROP TABLE outbox_event")
        database.close()
        bare_mysql.stop()
        bare_mysql.start()


# --- grants ------------------------------------------------------------------------------------

GRANTS = {
    "grant_select": (*RELAY, f"UPDATE {TABLE}"),
    "grant_update": (*RELAY, f"SELECT {TABLE}"),
    "grant_delete": (*RELAY, f"SELECT, UPDATE {TABLE}"),
    "grant_replication_slave": ("REPLICATION CLIENT ON *.*", f"SELECT, UPDATE {TABLE}"),
    "grant_replication_client": ("REPLICATION SLAVE ON *.*", f"SELECT, UPDATE {TABLE}"),
}


def test_a_grant_on_an_optional_column_is_missing(database: Database, kafka: str) -> None:
    """Of a mark's columns the grant leaves one out: every mark would fail."""
    database.create_outbox()
    columns = "status, retry_count, next_retry_time, updated_at, last_error"
    with database.user(*RELAY, f"SELECT, UPDATE ({columns}) {TABLE}") as user:
        ward = Ward(user, kafka, database.name, admin=database)
        falls_ill_and_is_mended(ward, "grant_update", "failure", "sent_at")


def test_a_grant_for_small_marks_is_missing(database: Database, kafka: str) -> None:
    database.create_outbox()
    with database.user(*RELAY, f"SELECT, UPDATE {TABLE}") as user:
        ward = Ward(user, kafka, database.name, admin=database)
        ward.set({"MARK_ROW_IMAGE": "minimal"})
        image = "binlog_admin" if database.is_mariadb else "session_variables_admin"
        falls_ill_and_is_mended(ward, f"grant_{image}", "failure", "lacks")
        explained = ward.finding("mark_row_image")
        assert explained is not None
        assert "Debezium" in explained.text


@pytest.mark.parametrize("check", GRANTS)
def test_a_grant_is_missing(database: Database, kafka: str, check: str) -> None:
    database.create_outbox()
    with database.user(*GRANTS[check]) as user:
        ward = Ward(user, kafka, database.name, admin=database)
        if check == "grant_delete":
            ward.set({"MARK": "delete"})
        falls_ill_and_is_mended(ward, check, "failure", "lacks")


# --- the table ---------------------------------------------------------------------------------


class Case(NamedTuple):
    check: str
    level: str
    words: str
    spoil: Sequence[str]


TABLES = {
    "missing": Case("table", "failure", "there is no table", ["DROP TABLE outbox_event"]),
    "engine": Case("engine", "failure", "MyISAM", ["ALTER TABLE outbox_event ENGINE = MyISAM"]),
    "column": Case(
        "columns",
        "failure",
        "lacks retry_count",
        ["ALTER TABLE outbox_event DROP COLUMN retry_count"],
    ),
    "column-type": Case(
        "shape",
        "failure",
        "column retry_count is of type varchar",
        ["ALTER TABLE outbox_event MODIFY retry_count VARCHAR(10) NOT NULL DEFAULT '0'"],
    ),
    "last-ids": Case(
        "auto_increment",
        "failure",
        "88%",
        [
            "ALTER TABLE outbox_event MODIFY id INT NOT NULL AUTO_INCREMENT",
            "ALTER TABLE outbox_event AUTO_INCREMENT = 1900000000",
        ],
    ),
    "ids-given": Case(
        "auto_increment",
        "failure",
        "not AUTO_INCREMENT",
        ["ALTER TABLE outbox_event MODIFY id BIGINT UNSIGNED NOT NULL"],
    ),
    "status-null": Case(
        "status",
        "failure",
        "may be NULL",
        ["ALTER TABLE outbox_event MODIFY status TINYINT NULL DEFAULT 0"],
    ),
    "status-default": Case(
        "status",
        "failure",
        "defaults to 1",
        ["ALTER TABLE outbox_event MODIFY status TINYINT NOT NULL DEFAULT 1"],
    ),
    "collation": Case(
        "collation",
        "warning",
        "aggregate_id compare without case",
        [
            "ALTER TABLE outbox_event MODIFY aggregate_id VARCHAR(64) CHARACTER SET utf8mb4"
            " COLLATE utf8mb4_general_ci NOT NULL"
        ],
    ),
    "local-time": Case(
        "created_at",
        "warning",
        "time zone",
        [
            "ALTER TABLE outbox_event MODIFY created_at DATETIME(6) NOT NULL"
            " DEFAULT CURRENT_TIMESTAMP(6)"
        ],
    ),
    "no-time": Case(
        "created_at",
        "warning",
        "no default",
        ["ALTER TABLE outbox_event MODIFY created_at DATETIME(6) NOT NULL"],
    ),
    "event-ids": Case(
        "uk_event_id", "warning", "unique", ["DROP INDEX uk_event_id ON outbox_event"]
    ),
    "scan-index": Case(
        "idx_status_next_retry",
        "warning",
        "no index begins with status, next_retry_time",
        ["DROP INDEX idx_status_next_retry ON outbox_event"],
    ),
    "aggregate-index": Case(
        "idx_status_aggregate",
        "warning",
        "no index begins with",
        ["DROP INDEX idx_status_aggregate ON outbox_event"],
    ),
    "index-of-another": Case(
        "idx_status_created",
        "warning",
        "no index begins with status, created_at",
        [
            "DROP INDEX idx_status_created ON outbox_event",
            "CREATE INDEX idx_status_created ON outbox_event (created_at)",
        ],
    ),
    "trigger": Case(
        "triggers",
        "warning",
        "runs for every row",
        ["CREATE TRIGGER audit BEFORE UPDATE ON outbox_event FOR EACH ROW SET @seen = NEW.id"],
    ),
    "cascade": Case(
        "foreign_keys",
        "failure",
        "still pending",
        [
            "CREATE TABLE orders (id BIGINT UNSIGNED PRIMARY KEY)",
            "ALTER TABLE outbox_event ADD COLUMN order_id BIGINT UNSIGNED NULL,"
            " ADD CONSTRAINT of_order FOREIGN KEY (order_id) REFERENCES orders (id)"
            " ON DELETE CASCADE",
        ],
    ),
    "foreign-key": Case(
        "foreign_keys",
        "warning",
        "adds locks",
        [
            "CREATE TABLE audit (event BIGINT UNSIGNED,"
            " CONSTRAINT of_event FOREIGN KEY (event) REFERENCES outbox_event (id))"
        ],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_is_wrong(database: Database, kafka: str, path: Path, name: str) -> None:
    case = TABLES[name]
    database.create_outbox()
    ward = Ward(database, kafka, database.name)
    for statement in case.spoil:
        database.sql(statement)
    falls_ill_and_is_mended(ward, case.check, case.level, case.words, path)


def test_ids_of_another_length(database: Database, kafka: str) -> None:
    """A collation is mended without touching anything else of the column."""
    database.create_outbox()
    database.sql(
        "ALTER TABLE outbox_event"
        " MODIFY event_id CHAR(36) CHARACTER SET ascii COLLATE ascii_general_ci NOT NULL,"
        " MODIFY aggregate_type VARCHAR(255) CHARACTER SET latin1 COLLATE latin1_swedish_ci"
        " NULL DEFAULT 'it''s, (a) type' COMMENT 'aggregate_id, `quoted`',"
        " MODIFY aggregate_id VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci"
        " NOT NULL"
    )
    shape = (
        "SELECT COLUMN_NAME, COLUMN_TYPE, CHARACTER_SET_NAME, IS_NULLABLE, COLUMN_DEFAULT,"
        " COLUMN_COMMENT, ORDINAL_POSITION FROM information_schema.COLUMNS"
        " WHERE TABLE_SCHEMA = DATABASE() ORDER BY ORDINAL_POSITION"
    )
    before = database.sql(shape)
    key = "k" * 255
    database.sql(INSERT.format(table="outbox_event"), row(key))
    falls_ill_and_is_mended(
        Ward(database, kafka, database.name),
        "collation",
        "warning",
        "event_id, aggregate_type, aggregate_id compare without case",
    )
    assert database.sql(shape) == before
    assert database.sql("SELECT aggregate_id FROM outbox_event") == ((key,),)


def test_an_index_that_statements_do_not_see(database: Database, kafka: str) -> None:
    """It is there by name, so a CREATE INDEX would not mend it."""
    database.create_outbox()
    hidden = "IGNORED" if database.is_mariadb else "INVISIBLE"
    database.sql(f"ALTER TABLE outbox_event ALTER INDEX idx_status_created {hidden}")
    falls_ill_and_is_mended(
        Ward(database, kafka, database.name), "idx_status_created", "warning", "hidden"
    )


def test_rows_of_the_future(ward: Ward, kafka: str, path: Path) -> None:
    """A service east of Greenwich writes its local time; brokers refuse what comes from further
    ahead than an hour."""
    topic = ward.settings.topic.format(aggregate_type="order")
    create_topic(kafka, topic, 1, {"message.timestamp.after.max.ms": "3600000"})
    insert(ward, "order")
    ward.admin.sql("UPDATE outbox_event SET created_at = created_at + INTERVAL 8 HOUR")
    ill = ward.finding("created_at")
    assert ill is not None
    assert (ill.level, ill.how) == ("warning", "advice")
    assert "local time" in ill.text
    falls_ill_and_is_mended(ward, "timestamp_limit", "failure", "ahead", path)
    ward.admin.sql("UPDATE outbox_event SET created_at = UTC_TIMESTAMP(6)")
    well = ward.finding("created_at")
    assert well is not None
    assert well.level == "ok"


def test_a_table_of_another_case(ward: Ward) -> None:
    """The binlog names tables as the server does, letter for letter."""
    ward.set({"TABLE": "Outbox_Event"})
    falls_ill_and_is_mended(ward, "table", "failure", "upper from lower case")


def test_a_system_versioned_table(mariadb: Database, kafka: str) -> None:
    mariadb.create_outbox()
    mariadb.sql("ALTER TABLE outbox_event ADD SYSTEM VERSIONING")
    ward = Ward(mariadb, kafka, mariadb.name)
    falls_ill_and_is_mended(ward, "shape", "failure", "system-versioned")


# --- topics and brokers ------------------------------------------------------------------------

TOPICS = {
    "compacted": ("cleanup_policy", "failure", {"cleanup.policy": "compact"}),
    "unwritable": ("min_insync_replicas", "failure", {"min.insync.replicas": "2"}),
    "forgetful": ("retention", "warning", {"retention.ms": "60000"}),
    "own-time": ("timestamp_type", "warning", {"message.timestamp.type": "LogAppendTime"}),
    "small": ("max_message_bytes", "failure", {"max.message.bytes": "1000"}),
    "young-only": ("timestamp_limit", "failure", {"message.timestamp.before.max.ms": "60000"}),
    "unclean": (
        "unclean_leader_election",
        "warning",
        {"unclean.leader.election.enable": "true"},
    ),
}


def insert(ward: Ward, kind: str, payload: object = None) -> None:
    ward.admin.sql(INSERT.format(table="outbox_event"), row("k", payload or {"n": 1}, kind=kind))


@pytest.mark.parametrize("name", TOPICS)
def test_a_topic_that_is_wrong(ward: Ward, kafka: str, path: Path, name: str) -> None:
    check, level, config = TOPICS[name]
    topic = ward.settings.topic.format(aggregate_type=name)
    create_topic(kafka, topic, 1, config)
    insert(ward, name, {"pad": "x" * 2000})
    ward.admin.sql("UPDATE outbox_event SET created_at = created_at - INTERVAL 1 HOUR")
    falls_ill_and_is_mended(ward, check, level, topic, path)


@pytest.mark.parametrize(
    ("template", "topic"),
    [
        ("{name}.of.{id}", "{name}.of.{row[0]}"),
        ("{name}.{aggregate_id}.{event_type}", "{name}.k.CREATED"),
        ("{name}.{shop_id}", "{name}.7"),
    ],
)
def test_topics_made_of_other_columns(
    ward: Ward, kafka: str, path: Path, template: str, topic: str
) -> None:
    """The rows' own topics are looked at, whatever columns the template has."""
    ward.admin.sql("ALTER TABLE outbox_event ADD COLUMN shop_id BIGINT NOT NULL DEFAULT 7")
    insert(ward, "order")
    [ids] = ward.admin.sql("SELECT id FROM outbox_event")
    name = ward.settings.name
    ward.set({"TOPIC": template.replace("{name}", name)})
    create_topic(kafka, topic.format(name=name, row=ids), 1, {"cleanup.policy": "compact"})
    words = topic.format(name=name, row=ids)
    falls_ill_and_is_mended(ward, "cleanup_policy", "failure", words, path)
    assert ward.finding("topic_missing") is None


def test_a_topic_for_each_event(ward: Ward) -> None:
    statement = INSERT.format(table="outbox_event")
    for _ in range(51):
        ward.admin.sql(statement, row("k", {"n": 1}))
    ward.set({"TOPIC": ward.settings.name + ".{id}"})
    found = ward.finding("topics")
    assert found is not None
    assert (found.level, found.how) == ("warning", "advice")
    assert "51 topics" in found.text


def test_a_partition_that_is_not_there(ward: Ward, kafka: str, path: Path) -> None:
    ward.admin.sql("ALTER TABLE outbox_event ADD COLUMN place INT NULL")
    create_topic(kafka, ward.settings.topic.format(aggregate_type="order"), 2)
    insert(ward, "order")
    ward.set({"PARTITION_COLUMN": "place"})
    assert ward.finding("partition") is None
    ward.admin.sql("UPDATE outbox_event SET place = 4")
    falls_ill_and_is_mended(ward, "partition", "failure", "names partition 4", path)


def test_a_topic_that_brokers_would_make_as_they_like(ward: Ward, path: Path) -> None:
    insert(ward, "order")
    falls_ill_and_is_mended(ward, "topic_missing", "warning", "will create it", path)


def test_a_topic_that_nobody_makes(mysql: Database, quick_kafka: ProxiedKafka, path: Path) -> None:
    mysql.create_outbox()
    ward = Ward(mysql, quick_kafka.bootstrap, mysql.name)
    insert(ward, "order")
    falls_ill_and_is_mended(ward, "topic_missing", "failure", "parked", path)


@pytest.mark.parametrize("whose", ["checkpoints", "fallback"])
def test_a_checkpoint_topic_that_forgets(ward: Ward, kafka: str, path: Path, whose: str) -> None:
    topic = f"cdc-relay.{ward.settings.name}.{whose}"
    create_topic(kafka, topic, 1, {"cleanup.policy": "delete"})
    falls_ill_and_is_mended(ward, "checkpoint_topic", "failure", "cleanup.policy=delete", path)


@pytest.mark.parametrize(
    ("setting", "value", "check"),
    [
        ("TRANSACTION_TIMEOUT", "20m", "transactions"),
        ("SESSION_TIMEOUT", "1s", "session_timeout"),
    ],
)
def test_a_time_that_the_brokers_refuse(ward: Ward, setting: str, value: str, check: str) -> None:
    ward.set({setting: value})
    falls_ill_and_is_mended(ward, check, "failure", "the brokers")


def test_a_producer_that_takes_less_than_the_topic(ward: Ward, kafka: str) -> None:
    create_topic(kafka, ward.settings.topic.format(aggregate_type="order"), 1)
    insert(ward, "order", {"pad": "x" * 5000})
    ward.set({"KAFKA_MESSAGE_MAX_BYTES": "2000"})
    falls_ill_and_is_mended(ward, "message_max_bytes", "failure", "our own producer")


def test_a_type_that_is_no_topic(ward: Ward) -> None:
    insert(ward, "order/eu")
    found = ward.finding("routing")
    assert found is not None
    assert (found.level, found.how) == ("failure", "advice")
    assert "order/eu" in found.text


# --- the relay ---------------------------------------------------------------------------------


def test_a_server_id_that_is_the_servers_own(ward: Ward) -> None:
    [(own,)] = ward.admin.sql("SELECT @@server_id")
    ward.set({"SERVER_ID": str(own)})
    falls_ill_and_is_mended(ward, "server_id", "failure", "the server's own")


def test_a_server_id_of_another_relay(mysql_shop: Harness) -> None:
    relay = mysql_shop.relay(SERVER_ID="424242")
    ward = Ward(mysql_shop.database, mysql_shop.kafka, mysql_shop.name)
    ward.set({"SERVER_ID": "424242"})
    mysql_shop.until(lambda: mysql_shop.database.sql("SHOW REPLICAS"))
    own = ward.finding("server_id")
    assert own is not None
    assert own.level == "ok", own
    ward.set({"NAME": mysql_shop.name + "-other"})
    falls_ill_and_is_mended(ward, "server_id", "failure", "throw each other out")
    assert relay.running


def test_no_relay_runs(mysql_shop: Harness) -> None:
    ward = Ward(mysql_shop.database, mysql_shop.kafka, mysql_shop.name)
    ill = ward.finding("members")
    assert ill is not None
    assert (ill.level, ill.mend) == ("warning", ("cdc-relay start",))
    mysql_shop.relay()
    well = ward.finding("members")
    assert well is not None
    assert well.level == "ok"


@pytest.mark.parametrize("mark", ["none", "update"])
def test_a_position_that_was_purged(
    own_mysql: MySQL, harness: Callable[..., Harness], mark: str, path: Path
) -> None:
    with Database.create(own_mysql.url()) as database:
        shop = harness(database, MARK=mark)
        shop.ins("a")
        assert shop.run("start", "--until-current").wait() == 0
        shop.ins("a")
        database.sql("FLUSH BINARY LOGS")
        purge_logs(database)
        ward = Ward(database, shop.kafka, shop.name)
        ward.set({"MARK": mark})
        if mark == "none":
            ill = ward.finding("position")
            assert ill is not None
            assert ill.exit_code == 5
            falls_ill_and_is_mended(ward, "position", "failure", "the position is lost", path)
            return
        ill = ward.finding("position")
        assert ill is not None
        assert (ill.level, ill.mend) == ("warning", ("cdc-relay start",))
        shop.relay()
        shop.wait_sent(2)
        shop.until(lambda: getattr(ward.finding("position"), "level", "") == "ok")


def test_a_checkpoint_as_old_as_the_binlog(
    own_mysql: MySQL, harness: Callable[..., Harness]
) -> None:
    """Half of the retention time has gone since the relay's last word."""
    with Database.create(own_mysql.url()) as database:
        shop = harness(database)
        shop.ins("a")
        assert shop.run("start", "--until-current").wait() == 0
        ward = Ward(database, shop.kafka, shop.name)
        with variable(database, "binlog_expire_logs_seconds", "2"):
            shop.until(lambda: getattr(ward.finding("position"), "level", "") == "warning")
            falls_ill_and_is_mended(ward, "position", "warning", "about to be lost")


def test_a_login_in_clear(mysql: Database, kafka: str) -> None:
    """The server is on this machine, under a way to write its address that does not say so."""
    mysql.create_outbox()
    far = mysql.url.set(host="127.1", query={"ssl_disabled": "true"})
    ward = Ward(Database(far), kafka, mysql.name, admin=mysql)
    ill = ward.finding("tls")
    assert ill is not None
    assert (ill.level, ill.how) == ("warning", "advice")
    assert "not encrypted" in ill.text
    [(data,)] = mysql.sql("SELECT @@datadir")
    ward.set({"DATABASE_URL": ward.environment["CDC_RELAY_DATABASE_URL"].partition("?")[0]})
    ward.environment["CDC_RELAY_DATABASE_URL"] += "?ssl_check_hostname=false"
    ward.set({"DATABASE_TLS_CA": str(Path(data) / "ca.pem")})
    well = ward.finding("tls")
    assert well is not None
    assert well.level == "ok", well


# --- what answers nothing, and the command itself ----------------------------------------------


def test_a_schema_that_is_not_there(mysql: Database, kafka: str) -> None:
    name = f"{mysql.name}_new"
    ward = Ward(Database(mysql.url.set(database=name)), kafka, mysql.name, admin=mysql)
    try:
        ill = ward.finding("connection")
        assert ill is not None
        assert "has no schema" in ill.text
        ward.follow(ill)
        well = ward.finding("connection")
        assert well is not None
        assert well.level == "ok"
    finally:
        mysql.sql(f"DROP DATABASE IF EXISTS `{name}`")


def test_a_wrong_password(mysql: Database, kafka: str) -> None:
    wrong = Database(mysql.url.set(username="nobody", password="wr0ng-secret"))
    findings = Ward(wrong, kafka, mysql.name).findings()
    [ill] = [one for one in findings if one.level == "failure" and one.area == "database"]
    assert "refused the login" in ill.text
    assert "wr0ng-secret" not in str(findings)


def test_an_account_that_is_locked(mysql: Database, kafka: str) -> None:
    mysql.create_outbox()
    with mysql.user(*RELAY, f"SELECT, UPDATE {TABLE}") as user:
        mysql.sql(f"ALTER USER {user.url.username}@'%' ACCOUNT LOCK")
        ward = Ward(user, kafka, mysql.name, admin=mysql)
        falls_ill_and_is_mended(ward, "connection", "failure", "is locked")


@pytest.mark.parametrize(
    ("spoil", "advice"),
    [("PASSWORD EXPIRE", "IDENTIFIED BY"), ("REQUIRE X509", "database_tls_cert")],
)
def test_an_account_that_asks_for_more(
    mysql: Database, kafka: str, spoil: str, advice: str
) -> None:
    with mysql.user() as user:
        mysql.sql(f"ALTER USER {user.url.username}@'%' {spoil}")
        found = Ward(user, kafka, mysql.name, admin=mysql).finding("connection")
        assert found is not None
        assert (found.level, found.how) == ("failure", "advice")
        assert advice in " ".join(found.mend)


def test_kafka_is_away(mysql: Database) -> None:
    mysql.create_outbox()
    findings = Ward(mysql, "127.0.0.1:1", mysql.name).findings()
    [ill] = [one for one in findings if one.level == "failure"]
    assert (ill.area, ill.exit_code) == ("kafka", 4)
    assert any(one.check == "shape" for one in findings), "the database is looked at all the same"


def test_another_writer_stands_before_ours(mysql_shop: Harness, tmp_path: Path) -> None:
    other = tmp_path / "writer"
    other.mkdir()
    (other / "__init__.py").write_text("")
    environment = {**mysql_shop.environment(), "PYTHONPATH": f"{tmp_path}:{CHECKOUT}"}
    command = [sys.executable, "-P", "-m", "cdc_relay", "doctor", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=False
    )
    report = json.loads(done.stdout)
    assert (done.returncode, report["exit_code"]) == (2, 2)
    [ill] = [one for one in report["findings"] if one["check"] == "writer"]
    assert str(tmp_path) in ill["text"] + ill["mend"][0]


def test_the_command(mysql_shop: Harness) -> None:
    """Colourless when piped, one line a finding, the mend as it stands, the exit code by kind."""
    mysql_shop.database.sql("ALTER TABLE outbox_event ALTER COLUMN status SET DEFAULT 2")
    process = mysql_shop.run("doctor", "--quiet")
    assert process.wait() == 3
    text = process.stdout.decode()
    assert "\x1b" not in text
    [at] = [n for n, line in enumerate(text.splitlines()) if line.startswith("FAILURE")]
    assert "table status: " in text.splitlines()[at]
    statement = text.splitlines()[at + 2].strip()
    mysql_shop.database.sql(statement)
    process = mysql_shop.run("doctor", "--json")
    report = json.loads(process.stdout)
    assert process.wait() == report["exit_code"] == 0
    assert {"area", "check", "level", "text", "mend", "how"} == set(report["findings"][0])
