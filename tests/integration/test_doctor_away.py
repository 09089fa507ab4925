"""The doctor and what no statement can spoil: clocks that disagree, brokers that are gone, a login
in clear. Real servers; what is mended by hand is mended as the advice says."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from cdc_relay.doctor import Finding
from tests.support.brokers import TwoBrokers
from tests.support.clock import WrongKafka, WrongMySQL
from tests.support.harness import Harness
from tests.support.sql import INSERT, Database, row
from tests.support.ward import Ward

# --- clocks ------------------------------------------------------------------------------------


def worst(ward: Ward, check: str) -> Finding:
    found = ward.finding(check)
    assert found is not None
    return found


def test_a_database_with_another_clock(servers_home: Path, kafka: str) -> None:
    server = WrongMySQL(servers_home / "wrong-clock", die_with_parent=True)
    try:
        for offset_s, level, words in (
            (90, "warning", "90.0 s ahead of this machine's"),
            (-3600, "warning", "3600.0 s behind this machine's"),
            (0, "ok", "agree"),
        ):
            server.offset_s = offset_s
            server.start()
            with Database.create(server.url()) as database:
                database.create_outbox()
                found = worst(Ward(database, kafka, database.name), "clock")
                assert found.level == level
                assert words in found.text
                assert "synchronise the clocks" in "".join(found.mend) or level == "ok"
            server.stop()
    finally:
        server.delete()


def test_brokers_with_another_clock(servers_home: Path, mysql: Database, tmp_path: Path) -> None:
    """Two hours behind: rows seem to come from the future, so they are refused. The relay lives on,
    and its checkpoint, stamped by the brokers, tells the doctor."""
    server = WrongKafka(servers_home / "wrong-kafka", -7200, die_with_parent=True)
    try:
        server.start()
        with Harness(mysql, server.bootstrap, tmp_path) as shop:
            ward = Ward(mysql, server.bootstrap, shop.name)
            assert worst(ward, "broker_clock").level == "ok"
            shop.create_topic()
            shop.ins("a", {"n": 1})
            assert shop.run("start", "--until-current").wait() == 0
            [(error,)] = mysql.sql("SELECT last_error FROM outbox_event")
            assert "timestamp" in error.lower()
            found = worst(ward, "broker_clock")
            assert found.level == "warning"
            assert "s behind the relay's machine's" in found.text
            assert "synchronise the clocks" in "".join(found.mend)

            server.stop()
            server.offset_s = 0
            server.start()
            shop.ins("b", {"n": 2})
            shop.relay()
            shop.wait_sent(2)
            shop.until(lambda: worst(ward, "broker_clock").level == "ok")
    finally:
        server.delete()


# --- brokers that are gone ---------------------------------------------------------------------


def test_partitions_without_a_leader_and_short_of_replicas(
    mysql: Database, two_brokers: TwoBrokers
) -> None:
    mysql.create_outbox()
    ward = Ward(mysql, two_brokers.bootstrap, mysql.name)
    admin = AdminClient({"bootstrap.servers": two_brokers.bootstrap, "log_level": 4})
    lonely, strict = (ward.settings.topic.format(aggregate_type=kind) for kind in ("one", "two"))
    made = admin.create_topics(
        [
            NewTopic(lonely, 2, replica_assignment=[[1], [2]]),
            NewTopic(strict, 1, replica_assignment=[[1, 2]], config={"min.insync.replicas": "2"}),
        ],
        operation_timeout=15,
    )
    for done in made.values():
        done.result(20)
    for kind in ("one", "two"):
        mysql.sql(INSERT.format(table="outbox_event"), row("k", {"n": 1}, kind=kind))
    assert ward.finding("leader") is None
    two_brokers.brokers[1].stop()
    try:
        until(lambda: ward.finding("leader") is not None)
        until(lambda: worst(ward, "min_insync_replicas").level == "failure")
        leader, replicas = worst(ward, "leader"), worst(ward, "min_insync_replicas")
        assert (leader.level, leader.how) == ("failure", "advice")
        assert f"{lonely}: 1 of 2 partitions have no leader" in leader.text
        assert leader.mend[0].startswith("start broker 2 again")
        assert f"{strict} has 1 replicas in sync and needs 2" in replicas.text
        assert replicas.mend == leader.mend
    finally:
        two_brokers.start()
    until(lambda: ward.finding("leader") is None)
    until(lambda: worst(ward, "min_insync_replicas").level != "failure")


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
