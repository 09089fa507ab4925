"""Kafka clusters with what single tests need."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Self

from dev import cache, kafka_dist, ports
from dev.broker import Broker
from dev.console import run
from dev.kafka import Kafka
from tests.support.proxy import Proxy


class QuickKafka(Kafka):
    """Takes group sessions of a second (Kafka's own least is six): a relay that was killed is
    replaced soon. Creates no topic by itself."""

    def settings(self, broker: Broker) -> dict[str, str]:
        return {
            **super().settings(broker),
            "group.min.session.timeout.ms": "1000",
            "auto.create.topics.enable": "false",
        }


class ProxiedKafka(QuickKafka):
    """One broker with a second listener that is reached, and advertised, through a proxy."""

    protocol = "PLAINTEXT"
    """Of the second listener."""

    def __init__(self, home: Path, *, die_with_parent: bool = False) -> None:
        super().__init__(home, die_with_parent=die_with_parent)
        self.proxy = Proxy(ports.kept(self.home, "proxied-port"))

    def __enter__(self) -> Self:
        self.proxy.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[arg-type]
        self.proxy.__exit__()

    @property
    def proxied(self) -> str:
        """The address through the proxy; ``bootstrap`` goes around it."""
        return f"127.0.0.1:{self.proxy.port}"

    def settings(self, broker: Broker) -> dict[str, str]:
        ours = super().settings(broker)
        near = f"PROXIED://127.0.0.1:{ports.kept(self.home, 'proxied-port')}"
        return {
            **ours,
            "listeners": f"{ours['listeners']},{near}",
            "advertised.listeners": f"{ours['advertised.listeners']},PROXIED://{self.proxied}",
            "listener.security.protocol.map": (
                f"{ours['listener.security.protocol.map']},PROXIED:{self.protocol}"
            ),
        }


class TwoBrokers(Kafka):
    """Broker 1 is the controller too, so the cluster notices when broker 2 is gone."""

    def __init__(self, home: Path, *, die_with_parent: bool = False) -> None:
        super().__init__(home, brokers=2, die_with_parent=die_with_parent)

    def settings(self, broker: Broker) -> dict[str, str]:
        ours = super().settings(broker)
        ours["controller.quorum.voters"] = f"1@127.0.0.1:{self.brokers[0].controller_port}"
        if broker.node == 1:
            return ours
        listeners = f"PLAINTEXT://127.0.0.1:{broker.port}"
        return {**ours, "process.roles": "broker", "listeners": listeners}


def console_producer(bootstrap: str, topic: str, lines: bytes) -> None:
    """Send ``key|value`` lines with Kafka's own console producer: Java's partitioner."""
    tree = kafka_dist.fetch()
    tools = cache.artefact(f"kafka-tools-{kafka_dist.VERSION}", fetch_tools)
    java, jars, *options = kafka_dist.classpath(tree)
    command = [kafka_dist.java(), java, f"{jars}:{next(tools.glob('*.jar'))}", *options]
    command += ["org.apache.kafka.tools.ConsoleProducer", "--bootstrap-server", bootstrap]
    command += ["--topic", topic, "--reader-property", "parse.key=true"]
    command += ["--reader-property", "key.separator=|"]
    done = subprocess.run(command, input=lines, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()


def fetch_tools(into: Path) -> None:
    """Kafka's command-line tools, for ``cache.artefact``."""
    artifact = f"org.apache.kafka:kafka-tools:{kafka_dist.VERSION}"
    goal = ["dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={into}"]
    run(["mvn", "-B", "-q", *goal], cwd=into)
