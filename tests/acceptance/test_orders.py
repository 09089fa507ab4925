"""examples/orders on real servers: service, migrations, relay and consumer, killed on the way."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.harness import Harness
from tests.support.sql import Database

ROOT = Path(__file__).resolve().parents[2]


class Orders:
    """The example's processes on the servers of a test."""

    def __init__(self, shop: Harness, points: Database, stack: ExitStack) -> None:
        self.shop = shop
        self.points = points
        self._stack = stack
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.http = stack.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30, trust_env=False)
        )

    def _environment(self, database: Database) -> dict[str, str]:
        return {
            **os.environ,
            "DATABASE_URL": database.text,
            "KAFKA_BOOTSTRAP": self.shop.kafka,
            "TOPIC": f"{self.shop.topic_prefix}order",
            "GROUP": f"{self.shop.name}-points",
            "PYTHONPATH": str(ROOT),
        }

    def alembic(self, *arguments: str) -> None:
        """As the README says: a command on the PATH, which does not look where it is run."""
        command = [Path(sys.executable).with_name("alembic"), "-c", "examples/orders/alembic.ini"]
        environment = self._environment(self.shop.database)
        del environment["PYTHONPATH"]
        subprocess.run(
            [*command, *arguments],
            env=environment,
            cwd=ROOT,
            timeout=60,
            check=True,
        )

    def _spawn(self, database: Database, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context((self.shop.home / f"{name}.log").open("ab"))
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=self._environment(database),
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )

        def end() -> None:
            process.kill()
            process.wait(10)

        self._stack.callback(end)
        return process

    def service(self) -> subprocess.Popen[bytes]:
        """Start the service and wait until it answers."""
        process = self._spawn(
            self.shop.database,
            *("service", "uvicorn", "--factory", "examples.orders.service:create_app"),
            *("--port", str(self.port), "--log-level", "warning"),
        )
        self.shop.until(self._answers, 60)
        return process

    def _answers(self) -> bool:
        try:
            return self.http.get("/openapi.json").status_code == 200
        except httpx.TransportError:
            return False

    def consumer(self) -> subprocess.Popen[bytes]:
        return self._spawn(self.points, "points", "examples.orders.points")

    def place(self, customer: str, total: str) -> str:
        answer = self.http.post("/orders", json={"customer": customer, "total": total})
        assert answer.status_code == 201, answer.text
        number: str = answer.json()["id"]
        return number

    def accounts(self) -> dict[str, int]:
        if not self.points.sql("SHOW TABLES LIKE 'accounts'"):
            return {}
        return dict(self.points.sql("SELECT customer, points FROM accounts"))

    def wait_for(self, expected: dict[str, int], timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        while self.accounts() != expected:
            log = (self.shop.home / "points.log").read_text()[-2000:]
            assert time.monotonic() < deadline, f"{self.accounts()} is not {expected}\n{log}"
            time.sleep(0.1)


@pytest.fixture
def orders(database: Database, kafka: str, tmp_path: Path, server_url: str) -> Iterator[Orders]:
    with ExitStack() as stack:
        shop = stack.enter_context(Harness(database, kafka, tmp_path, create=False))
        points = stack.enter_context(Database.create(server_url))
        yield Orders(shop, points, stack)


def test_orders_become_points(orders: Orders) -> None:
    orders.alembic("upgrade", "head")
    orders.alembic("check")
    orders.shop.create_topic(partitions=3)
    orders.service()
    orders.shop.relay()
    consumer = orders.consumer()

    first = orders.place("ann", "12.50")
    orders.place("bob", "7.00")
    assert orders.http.post(f"/orders/{first}/cancel").json()["status"] == "cancelled"
    assert orders.http.post(f"/orders/{first}/cancel").status_code == 409
    assert orders.http.post("/orders", json={"customer": "", "total": "1"}).status_code == 422
    orders.place("ann", "30.00")
    orders.wait_for({"ann": 30, "bob": 7})

    records = orders.shop.messages()
    assert len(records) == 4
    mine = [record for record in records if record.key == first]
    assert [record.headers["event_type"] for record in mine] == [
        b"ORDER_PLACED",
        b"ORDER_CANCELLED",
    ]
    assert [record.headers["aggregate_seq"] for record in mine] == [b"1", b"2"]
    assert mine[0].json == {"order_id": first, "customer": "ann", "total": "12.50"}

    consumer.send_signal(signal.SIGTERM)
    assert consumer.wait(30) == 0


def test_kill_9_of_service_and_consumer(orders: Orders) -> None:
    """Points are given for exactly the orders that are in the database, each once."""
    orders.alembic("upgrade", "head")
    orders.shop.create_topic(partitions=3)
    service = orders.service()
    orders.shop.relay()
    consumer = orders.consumer()
    for turn in range(3):
        for _ in range(20):
            orders.place("ann", "1.00")
        for process, again in ((consumer, orders.consumer), (service, orders.service)):
            process.kill()
            process.wait(10)
            if process is consumer:
                consumer = again()
            else:
                service = again()
        orders.place(f"c{turn}", "2.00")
    orders.wait_for({"ann": 60, "c0": 2, "c1": 2, "c2": 2}, 90)
    [(committed,)] = orders.shop.database.sql("SELECT CAST(SUM(total) AS SIGNED) FROM orders")
    assert committed == 66
