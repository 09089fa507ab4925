"""A Kafka 4.3.1 cluster of one or more brokers on this machine."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from dev import cache, kafka_dist
from dev.broker import Broker, Cluster, new_uuid
from dev.console import say
from dev.server import Server

fetch = kafka_dist.fetch


class Kafka(Server, Cluster):
    """A cluster; `brokers[i]` has the same methods for a single broker.

    Options are broker properties such as `auto.create.topics.enable=false`. `brokers` counts when
    the home is new; later the home's own number holds.
    """

    def __init__(self, home: Path, brokers: int = 1, *, die_with_parent: bool = False) -> None:
        self.home = Path(home).resolve()
        count = int(self._kept("brokers", str(brokers)))
        self.brokers = [
            Broker(self.home / f"broker-{node}", node, self, die_with_parent=die_with_parent)
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

    def cluster_id(self) -> str:
        return self._kept("cluster-id", new_uuid())

    def jvm(self) -> list[str]:
        name = f"kafka-{kafka_dist.VERSION}-java-{kafka_dist.java_key()}"
        return [f"-XX:SharedArchiveFile={cache.artefact(name, _archive) / 'classes.jsa'}"]

    def settings(self, broker: Broker) -> dict[str, str]:
        client, controller = f"127.0.0.1:{broker.port}", f"127.0.0.1:{broker.controller_port}"
        replicas = str(min(3, len(self.brokers)))
        in_sync = str(max(min(3, len(self.brokers)) - 1, 1))
        return {
            "process.roles": "broker,controller",
            "node.id": str(broker.node),
            "controller.quorum.voters": ",".join(
                f"{one.node}@127.0.0.1:{one.controller_port}" for one in self.brokers
            ),
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://{client},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{client}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": str(broker.home / "data"),
            "auto.create.topics.enable": "true",
            "default.replication.factor": replicas,
            "offsets.topic.replication.factor": replicas,
            "offsets.topic.num.partitions": "8",
            "transaction.state.log.replication.factor": replicas,
            "transaction.state.log.min.isr": in_sync,
            "transaction.state.log.num.partitions": "8",
            "share.coordinator.state.topic.replication.factor": replicas,
            "share.coordinator.state.topic.min.isr": in_sync,
            "group.initial.rebalance.delay.ms": "0",
            # A killed broker may come back, and is replaced, only when its session is over.
            "broker.session.timeout.ms": "4000",
            "broker.heartbeat.interval.ms": "1000",
        }

    def _kept(self, name: str, first: str) -> str:
        """Return what is kept in the home under that name, `first` the first time."""
        file = self.home / name
        with cache.lock(self.home / "lock"):
            if not file.exists():
                partial = file.with_name(f"{name}.partial")
                partial.write_text(first)
                partial.replace(file)
            return file.read_text()


class _Trial(Kafka):
    """A broker that writes the archive of its loaded classes at its end."""

    def jvm(self) -> list[str]:
        return [f"-XX:ArchiveClassesAtExit={self.home.parent / 'classes.jsa'}"]


def _archive(into: Path) -> None:
    """Run a broker once and keep its loaded classes: later starts take half the time."""
    say("preparing a fast start for Kafka")
    trial = _Trial(into / "trial", die_with_parent=True)
    trial.start()
    trial.stop(60)
    shutil.rmtree(trial.home)
