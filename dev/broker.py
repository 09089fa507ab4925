"""One Kafka node: broker and controller in one process (KRaft combined mode)."""

import base64
import shutil
import socket
import struct
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from dev import cache, kafka_dist, ports
from dev.console import run
from dev.server import ProcessServer

_JVM = (
    "-Xms256m",
    "-Xmx512m",
    *kafka_dist.JVM,
    "-Djava.net.preferIPv4Stack=true",
    # A class archive that does not fit is not used, silently.
    "-Xshare:auto",
    "-Xlog:cds=off",
    "-Xlog:cds+dynamic=off",
)


class Cluster(ABC):
    """What a node has to know of its cluster."""

    @abstractmethod
    def cluster_id(self) -> str:
        """Return the id all nodes share."""

    @abstractmethod
    def settings(self, broker: "Broker") -> dict[str, str]:
        """Return the properties of one node."""

    @abstractmethod
    def jvm(self) -> list[str]:
        """Return flags of the Java machine for every node."""


class Broker(ProcessServer):
    """A node of a Kafka cluster, started, stopped and killed on its own."""

    def __init__(
        self, home: Path, node: int, cluster: Cluster, *, die_with_parent: bool = False
    ) -> None:
        super().__init__(home, die_with_parent=die_with_parent)
        self.node = node
        self.title = f"Kafka broker {node}"
        self._cluster = cluster

    @property
    def controller_port(self) -> int:
        """The port of the node's controller listener."""
        return ports.kept(self.home, "controller-port")

    def command(self, options: Sequence[str]) -> list[str]:
        tree = kafka_dist.fetch()
        data = self.home / "data"
        if not data.is_dir():
            self._format(tree, data)
        settings = self._cluster.settings(self)
        settings |= dict(option.split("=", 1) for option in options)
        file = self.home / "server.properties"
        file.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        temporary = self.home / "tmp"
        # Native libraries are unpacked there, and stay behind after a SIGKILL.
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        return [
            kafka_dist.java(),
            *_JVM,
            *self._cluster.jvm(),
            f"-Djava.io.tmpdir={temporary}",
            f"-XX:ErrorFile={self.home / 'java-error.log'}",
            *kafka_dist.classpath(tree),
            "kafka.Kafka",
            str(file),
        ]

    def probe(self) -> bool:
        # An ApiVersions request: a broker answers none before it has joined the cluster.
        try:
            with socket.create_connection(("127.0.0.1", self.port), 2.0) as wire:
                wire.sendall(struct.pack(">ihhihB", 11, 18, 0, 7, 1, ord("p")))
                answer = wire.recv(10, socket.MSG_WAITALL)
        except OSError:
            return False
        return len(answer) == 10 and struct.unpack_from(">ih", answer, 4) == (7, 0)

    def _format(self, tree: Path, data: Path) -> None:
        template = cache.artefact(f"{tree.name}-data", _template)
        partial = data.with_name("data.partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(template / "data", partial)
        (partial / "meta.properties").write_text(
            f"version=1\ncluster.id={self._cluster.cluster_id()}\nnode.id={self.node}\n"
            f"directory.id={new_uuid()}\n"
        )
        partial.rename(data)


def new_uuid() -> str:
    """Return a random id as Kafka writes them."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[:22]
        # Kafka's tools would take it for an option.
        if not text.startswith("-"):
            return text


def _template(into: Path) -> None:
    """Format a log directory with Kafka's own tool; only its ids differ between nodes."""
    file = into / "format.properties"
    file.write_text(
        "process.roles=broker,controller\nnode.id=1\ncontroller.quorum.voters=1@127.0.0.1:1\n"
        "listeners=PLAINTEXT://127.0.0.1:2,CONTROLLER://127.0.0.1:1\n"
        f"controller.listener.names=CONTROLLER\nlog.dirs={into / 'data'}\n"
    )
    tool = ["kafka.tools.StorageTool", "format", "-t", new_uuid(), "-c", str(file)]
    run([kafka_dist.java(), *kafka_dist.classpath(kafka_dist.fetch()), *tool])
