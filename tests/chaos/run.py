"""One seed: the faults at their times, the healing, the account."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from signal import SIGABRT, SIGCONT, SIGSTOP, SIGTERM
from subprocess import TimeoutExpired
from typing import Any, Final

import pymysql
from confluent_kafka.admin import AdminClient

from cdc_relay.errors import SinkError, SourceError
from tests.chaos import checker, swap
from tests.chaos.plan import Fault, Plan
from tests.chaos.stage import Stage
from tests.chaos.writers import HIDDEN, INVOICE, KINDS, LATE, NARROW, NARROW_BYTES, ORDER, Writers
from tests.support.harness import Harness, Process, alter_topic
from tests.support.sql import Database

PARTITIONS: Final = 4
_DRAIN_S: Final = 45.0
"""Without any progress, a relay counts as stuck."""
_LONGEST_DRAIN_S: Final = 240.0
_COMPENSATOR_S: Final = 60.0


class Run:
    """One seed on a stage; ``play`` once, from the main thread. Logs go to ``home``."""

    def __init__(self, plan: Plan, stage: Stage, home: Path) -> None:
        self.plan = plan
        self._stage = stage
        self._home = home
        self._log = (home / "schedule.log").open("a")
        self._server, self._net = stage.server(plan.server)
        self._relays: dict[int, Process] = {}
        self._compensator: Process | None = None
        self._sent_before: set[str] = set()
        self._passes: list[set[str]] = []
        self._threads: list[threading.Thread] = []
        self._has_late = False
        self._down: set[int] = set()
        self._crashes = 0

    def play(self) -> checker.Account:
        """Run it and return the account."""
        self._say(f"seed {self.plan.seed}: {self.plan}")
        for fault in self.plan.faults:
            self._say(str(fault))
        try:
            with (
                Database.create(self._server.url(), f"chaos_{self.plan.seed}") as database,
                Harness(
                    database, self._stage.broker.bootstrap, self._home, self._settings()
                ) as shop,
            ):
                return self._play(database, shop)
        finally:
            self._log.close()

    def _settings(self) -> dict[str, str]:
        plan = self.plan
        database = self._server.url(f"chaos_{plan.seed}").replace(
            f":{self._server.port}/", f":{self._net.port}/"
        )
        return {
            "DATABASE_URL": database,
            "KAFKA_BOOTSTRAP": self._stage.broker.proxied,
            "DELIVERY": plan.delivery,
            "MARK": plan.mark,
            "SOURCE": plan.source,
            "ON_DEAD": plan.on_dead,
            "MAX_TRIES": str(plan.max_tries),
            "BATCH_ROWS": str(plan.batch_rows),
            "QUEUE_ROWS": str(plan.queue_rows),
            "SESSION_TIMEOUT": f"{plan.session_timeout:g}s",
            "TRANSACTION_TIMEOUT": "5s",
            "HEARTBEAT": "500ms",
            "READ_TIMEOUT": "3s",
            "KAFKA_SOCKET_TIMEOUT_MS": "5000",
            "SEND_TIMEOUT": "10s",
        }

    def _play(self, database: Database, shop: Harness) -> checker.Account:
        self._database, self._shop = database, shop
        for kind in (ORDER, INVOICE, HIDDEN):
            shop.create_topic(kind, PARTITIONS)
        shop.create_topic(NARROW, PARTITIONS, **{"max.message.bytes": str(NARROW_BYTES)})
        self._writers = Writers(database, shop.table, self.plan)
        for number in range(self.plan.relays):
            self._start_relay(number)
        if self.plan.source == "binlog":
            shop.until(lambda: any('"streaming"' in one.text() for one in self._relays.values()))
        if self.plan.source == "polling" or self.plan.mark == "none":
            shop.until(shop.checkpoint)  # from here on everything counts
        self._writers.start()
        try:
            self._faults()
        finally:
            self._stage.heal(self.plan.server)
            self._database.close()  # the server may have been restarted under it
            self._writers.stop()
            for thread in self._threads:
                thread.join(60)
        return self._settle()

    # --- faults ----------------------------------------------------------------------------------

    def _faults(self) -> None:
        steps: list[tuple[float, str, Callable[[], object]]] = []
        for fault in self.plan.faults:
            name = fault.name.replace("-", "_")
            end = getattr(self, f"_end_{name}", None)
            steps.append((fault.at, f"{fault}", self._bound(f"_begin_{name}", fault)))
            if end is not None:
                what = f"#{fault.number} {fault.name} ends"
                steps.append((fault.at + fault.lasts, what, self._bound(f"_end_{name}", fault)))
        if 0 < self.plan.late_topic < self.plan.seconds:
            steps.append((self.plan.late_topic, "late topic created", self._create_late))
        started = time.monotonic()
        for at, what, step in sorted(steps, key=lambda item: item[0]):
            self._supervise(started + at)
            self._say(what)
            step()
        self._supervise(started + self.plan.seconds)

    def _supervise(self, until: float) -> None:
        """Start relays again that have ended by themselves, as whatever runs them would."""
        while True:
            for number, process in self._relays.items():
                if number not in self._down and not process.running:
                    self._ended_by_itself(process)
                    self._start_relay(number)
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.5))

    def _ended_by_itself(self, process: Process) -> None:
        code = process.wait(1)
        self._say(f"a relay has ended by itself with {code}: {process.log}")
        if code not in (SourceError.exit_code, SinkError.exit_code):
            self._crashes += 1

    def _bound(self, name: str, fault: Fault) -> Callable[[], object]:
        method: Callable[[Fault], object] = getattr(self, name)
        return lambda: method(fault)

    def _start_relay(self, number: int) -> None:
        self._down.discard(number)
        self._relays[number] = self._shop.spawn("start")

    def _relay(self, fault: Fault) -> tuple[int, Process]:
        number = fault.which % self.plan.relays
        return number, self._relays[number]

    def _begin_relay_kill(self, fault: Fault) -> None:
        number, process = self._relay(fault)
        self._down.add(number)
        process.kill()

    def _end_relay_kill(self, fault: Fault) -> None:
        self._start_relay(self._relay(fault)[0])

    def _begin_relay_stop(self, fault: Fault) -> None:
        number, process = self._relay(fault)
        self._down.add(number)
        if process.running:
            process.signal(SIGTERM)

    def _end_relay_stop(self, fault: Fault) -> None:
        number, process = self._relay(fault)
        process.kill()  # one that has not ended by then
        self._start_relay(number)

    def _begin_relay_pause(self, fault: Fault) -> None:
        self._relay(fault)[1].signal(SIGSTOP)

    def _end_relay_pause(self, fault: Fault) -> None:
        self._relay(fault)[1].signal(SIGCONT)

    def _begin_compensate(self, _: Fault) -> None:
        self._end_pass()
        try:
            self._sent_before = self._ids("status = 1", 0)
        except pymysql.err.Error:
            self._sent_before = set()
        self._compensator = self._shop.spawn("compensate", "--older-than", "0s", "--json")

    _begin_compensate_kill = _begin_compensate

    def _end_compensate_kill(self, _: Fault) -> None:
        self._end_pass()

    def _end_pass(self, patience: float = 0.0) -> None:
        """What the compensator may have sent: all that was not marked when it started."""
        if self._compensator is None:
            return
        with suppress(TimeoutExpired):
            self._compensator.wait(max(patience, 0.01))
        self._compensator.kill()
        self._compensator = None
        self._passes.append(self._sent_before)

    def _ids(self, condition: str, patience: float = 30.0) -> set[str]:
        sql = f"SELECT event_id FROM {self._shop.table} WHERE {condition}"
        deadline = time.monotonic() + patience
        while True:
            try:
                connection = self._database.connect(read_timeout=5, connect_timeout=3)
                try:
                    with connection.cursor() as cursor:
                        cursor.execute(sql)
                        return {event_id for (event_id,) in cursor.fetchall()}
                finally:
                    connection.close()
            except pymysql.err.Error:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _begin_database_kill(self, _: Fault) -> None:
        self._server.kill()

    def _end_database_kill(self, _: Fault) -> None:
        self._server.start(wait=None)

    def _begin_database_pause(self, _: Fault) -> None:
        self._server.pause()

    def _end_database_pause(self, _: Fault) -> None:
        self._server.resume()

    def _begin_broker_kill(self, _: Fault) -> None:
        self._stage.broker.kill()

    def _end_broker_kill(self, _: Fault) -> None:
        self._stage.broker.start(wait=None)

    def _begin_broker_pause(self, _: Fault) -> None:
        self._stage.broker.pause()

    def _end_broker_pause(self, _: Fault) -> None:
        self._stage.broker.resume()

    def _begin_database_cut(self, _: Fault) -> None:
        self._net.cut()

    def _end_database_cut(self, _: Fault) -> None:
        self._net.mend()

    def _begin_database_slow(self, fault: Fault) -> None:
        self._net.delay = 0.01 + fault.which % 150 / 1000

    def _end_database_slow(self, _: Fault) -> None:
        self._net.delay = 0.0

    def _begin_database_dumb(self, _: Fault) -> None:
        self._net.swallow()

    def _end_database_dumb(self, _: Fault) -> None:
        self._net.restore()

    def _begin_kafka_cut(self, _: Fault) -> None:
        self._stage.broker.proxy.cut()

    def _end_kafka_cut(self, _: Fault) -> None:
        self._stage.broker.proxy.mend()

    def _begin_kafka_slow(self, fault: Fault) -> None:
        self._stage.broker.proxy.delay = 0.01 + fault.which % 150 / 1000

    def _end_kafka_slow(self, _: Fault) -> None:
        self._stage.broker.proxy.delay = 0.0

    def _begin_kafka_dumb(self, _: Fault) -> None:
        self._stage.broker.proxy.swallow()

    def _end_kafka_dumb(self, _: Fault) -> None:
        self._stage.broker.proxy.restore()

    def _begin_kafka_answers_lost(self, _: Fault) -> None:
        self._stage.broker.proxy.lose_answers()

    def _end_kafka_answers_lost(self, _: Fault) -> None:
        self._stage.broker.proxy.cut()
        self._stage.broker.proxy.mend()

    def _begin_logs_purged(self, _: Fault) -> None:
        """While no relay reads: a server keeps what a replica is reading."""
        self._kill_relays()

    def _end_logs_purged(self, _: Fault) -> None:
        self._try("FLUSH BINARY LOGS")
        last = self._try("SHOW BINARY LOGS")
        if last:
            self._try(f"PURGE BINARY LOGS TO '{last[-1][0]}'")
        self._restart_relays()

    def _begin_logs_reset(self, fault: Fault) -> None:
        if fault.which % 4:  # else under the eyes of the relay
            self._kill_relays()

    def _end_logs_reset(self, fault: Fault) -> None:
        mysql = self.plan.server != "mariadb"
        self._try("RESET BINARY LOGS AND GTIDS" if mysql else "RESET MASTER")
        self._restart_relays()

    def _kill_relays(self) -> None:
        for number, process in self._relays.items():
            self._down.add(number)
            process.kill()

    def _restart_relays(self) -> None:
        for number in list(self._down):
            self._start_relay(number)

    def _begin_logs_rotated(self, _: Fault) -> None:
        self._try("FLUSH BINARY LOGS")

    def _begin_table_swapped(self, fault: Fault) -> None:
        def work() -> None:
            done = swap.swap(self._database, self._shop.table, fault.number, fault.which)
            self._say(f"#{fault.number} table swapped: {done}")

        thread = threading.Thread(target=work, name="swap")
        thread.start()
        self._threads.append(thread)

    def _begin_large_transaction(self, _: Fault) -> None:
        self._writers.large()

    def _try(self, sql: str) -> Any:
        try:
            return self._database.sql(sql)
        except pymysql.err.Error as error:
            self._say(f"{sql}: {error}")
            self._database.close()
            return ()

    # --- the end ---------------------------------------------------------------------------------

    def _settle(self) -> checker.Account:
        self._say("all healed")
        committed = self._writers.committed()
        self._end_pass(_COMPENSATOR_S)
        if self.plan.late_topic > 0 and not self._has_late:
            self._create_late()
        self._raise_limit()
        for number, process in self._relays.items():
            if number > 0:
                process.signal(SIGCONT)
                if process.running:
                    process.terminate()
        if 0 in self._down:
            self._start_relay(0)
        allowed = checker.blocked(committed, self.plan)
        hidden = {event.event_id for event in committed if event.kind == HIDDEN}
        stuck = 0
        try:
            self._drain(allowed, hidden)
        except AssertionError:
            self._say(f"STUCK: all is healed, and nothing has moved for {_DRAIN_S:g} s")
            stuck = 1
            with suppress(TimeoutExpired):
                self._relays[0].signal(SIGABRT)  # its threads' stacks go to its log
                self._relays[0].wait(5)
            self._relays[0].kill()
            self._start_relay(0)
            with suppress(AssertionError):
                self._drain(allowed, hidden)
        with suppress(Exception):
            if self._relays[0].terminate() != 0:
                stuck += 1
                self._say("the relay did not end well")
        last = self._shop.spawn("start", "--until-current")
        try:
            code = last.wait(_DRAIN_S)
        except TimeoutExpired:
            code = -1
            last.signal(SIGABRT)
        if code != 0:
            stuck += 1
            self._say(f"start --until-current ended with {code}")
        if self.plan.mark == "none" and not self._waiting() <= allowed.keys():
            # The backlog held rows that were parked only now: what waits is known from here on.
            self._start_relay(0)
            with suppress(AssertionError):
                self._drain(allowed, hidden)
            self._relays[0].terminate()
        if hidden and self.plan.mark != "none":
            self._shop.compensate()
        self._say("comparing")
        everything = {event.event_id for event in committed}
        touched = set().union(*(everything - before for before in self._passes))
        account = checker.check(self._shop, self.plan, committed, KINDS, touched)
        account.stuck += stuck
        account.crashes += self._crashes
        self._say(str(account))
        for note in account.notes:
            self._say(note)
        return account

    def _drain(self, allowed: dict[str, bool], hidden: set[str]) -> None:
        """Wait until nothing is pending but what may be. Without marks the table does not tell:
        the checkpoint says what waits, ``--until-current`` afterwards passes the rest."""
        last_deadline = time.monotonic() + _LONGEST_DRAIN_S
        deadline = time.monotonic() + _DRAIN_S
        least: int | None = None
        release = self.plan.on_dead == "release" and self.plan.max_tries == 1
        while True:
            if not self._relays[0].running:
                self._ended_by_itself(self._relays[0])
                self._start_relay(0)
            self._try(
                f"UPDATE {self._shop.table} SET next_retry_time = UTC_TIMESTAMP(6) WHERE"
                f" status = 0 AND aggregate_type IN ('{LATE}', '{NARROW}')"
                " AND next_retry_time > UTC_TIMESTAMP(6) + INTERVAL 1 SECOND"
            )
            pending = self._waiting() if self.plan.mark == "none" else self._ids("status = 0")
            pending -= hidden
            if self.plan.mark == "none":
                streams = '"streaming"' in self._relays[0].text()
                if streams and pending <= allowed.keys():
                    return
            elif release or not allowed:
                if not pending:
                    return
            elif pending <= allowed.keys() and not self._untried(allowed):
                return
            if least is None or len(pending) < least:
                least, deadline = len(pending), time.monotonic() + _DRAIN_S
            assert time.monotonic() < min(deadline, last_deadline), f"{len(pending)} are pending"
            time.sleep(0.3)

    def _waiting(self) -> set[str]:
        """What waits for a parked row, by the checkpoint's word."""
        last = self._shop.checkpoint()
        ids = [row_id for _, _, held in last.held for row_id in held] if last is not None else []
        return self._ids(f"id IN ({','.join(map(str, ids))})") if ids else set()

    def _untried(self, allowed: dict[str, bool]) -> set[str]:
        wanted = {event_id for event_id, unsendable in allowed.items() if unsendable}
        return wanted & self._ids("retry_count = 0")

    def _create_late(self) -> None:
        self._has_late = True
        self._later(lambda: self._shop.create_topic(LATE, PARTITIONS))

    def _later(self, action: Callable[[], object]) -> None:
        """Do it as soon as the broker answers."""

        def work() -> None:
            for _ in range(30):
                try:
                    action()
                    return
                except Exception as error:
                    if "ALREADY_EXISTS" in str(error):
                        return
                    time.sleep(1)

        thread = threading.Thread(target=work, name="later")
        thread.start()
        self._threads.append(thread)

    def _raise_limit(self) -> None:
        topic = self._shop.topic_prefix + NARROW
        alter_topic(self._shop.kafka, topic, {"max.message.bytes": "1000000"})

    def _say(self, line: str) -> None:
        print(checker.now(), line, file=self._log, flush=True)


def tidy(shop_prefix: str, bootstrap: str) -> None:
    """Delete the topics of a seed that went well."""
    admin: Any = AdminClient({"bootstrap.servers": bootstrap, "log_level": 4})
    found = [name for name in admin.list_topics(timeout=15).topics if shop_prefix in name]
    if found:
        for future in admin.delete_topics(found, operation_timeout=15).values():
            with suppress(Exception):
                future.result(20)
