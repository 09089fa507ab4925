"""A Kafka 4.3.1 cluster of one or more brokers on this machine."""

import time
from collections.abc import Sequence
from pathlib import Path

from dev import cache, kafka_dist
from dev.broker import Broker, new_uuid
from dev.server import Server

fetch = kafka_dist.fetch


class Kafka(Server):
    """A cluster; `brokers[i]` has the same methods for a single broker.

    Options are broker properties such as `auto.create.topics.enable=false`. `brokers` counts when
    the home is new; later the home's own number holds.
    """

    def __init__(self, home: Path, brokers: int = 1, *, die_with_parent: bool = False) -> None:
        self.home = Path(home).resolve()
        count = len(list(self.home.glob("broker-*/port"))) or brokers
        self.brokers = [
            Broker(self.home / f"broker-{node}", node, die_with_parent=die_with_parent)
            for node in range(1, count + 1)
        ]

    @property
    def port(self) -> int:
        return self.brokers[0].port

    @property
    def bootstrap(self) -> str:
        """All brokers, as clients take them."""
        return ",".join(f"127.0.0.1:{broker.port}" for broker in self.brokers)

    @property
    def pid(self) -> int | None:
        """The pid of the first broker, or None when any broker is down."""
        pids = [broker.pid for broker in self.brokers]
        return None if None in pids else pids[0]

    def start(
        self, options: Sequence[str] = (), port: int | None = None, *, wait: float | None = 90
    ) -> None:
        """Start the brokers that are down; `port` is the first one's."""
        self.configure()
        for broker in self.brokers:
            broker.start(options, port if broker is self.brokers[0] else None, wait=None)
        if wait is not None:
            self.wait_ready(wait)

    def wait_ready(self, timeout: float = 90) -> None:
        deadline = time.monotonic() + timeout
        for broker in self.brokers:
            broker.wait_ready(max(deadline - time.monotonic(), 0.1))

    def stop(self, timeout: float = 30) -> None:
        deadline = time.monotonic() + timeout
        for broker in self.brokers:
            broker.terminate()
        for broker in self.brokers:
            broker.stop(max(deadline - time.monotonic(), 0.1))

    def kill(self) -> None:
        for broker in self.brokers:
            broker.kill()

    def pause(self) -> None:
        for broker in self.brokers:
            broker.pause()

    def resume(self) -> None:
        for broker in self.brokers:
            broker.resume()

    def configure(self) -> None:
        """Give every broker the properties of this cluster; needed before one is started alone."""
        cluster = self._cluster_id()
        voters = ",".join(f"{b.node}@127.0.0.1:{b.controller_port}" for b in self.brokers)
        replicas = min(3, len(self.brokers))
        for broker in self.brokers:
            broker.cluster = cluster
            broker.settings = _settings(broker, voters, replicas)

    def _cluster_id(self) -> str:
        file = self.home / "cluster-id"
        with cache.lock(self.home / "lock"):
            if not file.exists():
                partial = file.with_name("cluster-id.partial")
                partial.write_text(new_uuid())
                partial.replace(file)
            return file.read_text()


def _settings(broker: Broker, voters: str, replicas: int) -> dict[str, str]:
    client, controller = f"127.0.0.1:{broker.port}", f"127.0.0.1:{broker.controller_port}"
    return {
        "process.roles": "broker,controller",
        "node.id": str(broker.node),
        "controller.quorum.voters": voters,
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://{client},CONTROLLER://{controller}",
        "advertised.listeners": f"PLAINTEXT://{client}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": str(broker.home / "data"),
        "auto.create.topics.enable": "true",
        "default.replication.factor": str(replicas),
        "offsets.topic.replication.factor": str(replicas),
        "offsets.topic.num.partitions": "8",
        "transaction.state.log.replication.factor": str(replicas),
        "transaction.state.log.min.isr": str(max(replicas - 1, 1)),
        "transaction.state.log.num.partitions": "8",
        "share.coordinator.state.topic.replication.factor": str(replicas),
        "share.coordinator.state.topic.min.isr": str(max(replicas - 1, 1)),
        "group.initial.rebalance.delay.ms": "0",
        # A killed broker may come back, and is replaced, only when its session is over.
        "broker.session.timeout.ms": "4000",
        "broker.heartbeat.interval.ms": "1000",
    }
