"""One Kafka node: broker and controller in one process (KRaft combined mode)."""

import base64
import shutil
import socket
import struct
import uuid
from collections.abc import Sequence
from pathlib import Path

from dev import cache, kafka_dist, ports
from dev.console import run, say
from dev.server import ProcessServer

_JVM = (
    "-Xms256m",
    "-Xmx512m",
    # As Kafka's own start script sets them.
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-Djava.awt.headless=true",
    "-Djava.net.preferIPv4Stack=true",
    "-Xshare:auto",
    "-Xlog:cds=off",
    "-Xlog:cds+dynamic=off",
)


def new_uuid() -> str:
    """Return a random id as Kafka writes them."""
    while (text := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[:22]).startswith("-"):
        pass
    return text


class Broker(ProcessServer):
    """A node of a Kafka cluster, started, stopped and killed on its own."""

    def __init__(self, home: Path, node: int, *, die_with_parent: bool = False) -> None:
        super().__init__(home, die_with_parent=die_with_parent)
        self.node = node
        self.title = f"Kafka broker {node}"
        self.cluster = ""
        self.settings: dict[str, str] = {}

    @property
    def controller_port(self) -> int:
        """The port of the node's controller listener."""
        return ports.kept(self.home, "controller-port")

    def command(self, options: Sequence[str]) -> list[str]:
        tree = kafka_dist.fetch()
        archive = cache.artefact(
            f"kafka-{kafka_dist.VERSION}-java-{kafka_dist.java_key()}", _archive
        )
        return self.plain_command(
            tree, options, [f"-XX:SharedArchiveFile={archive / 'classes.jsa'}"]
        )

    def plain_command(self, tree: Path, options: Sequence[str], jvm: Sequence[str]) -> list[str]:
        """Return the command line with these extra JVM flags."""
        file = self.home / "server.properties"
        data = self.home / "data"
        if not data.is_dir():
            self._format(tree, data)
        settings = {**self.settings, **dict(option.split("=", 1) for option in options)}
        file.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        temporary = self.home / "tmp"
        # Native libraries are unpacked there, and stay behind after a SIGKILL.
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        return [
            kafka_dist.java(),
            *_JVM,
            *jvm,
            f"-Djava.io.tmpdir={temporary}",
            f"-XX:ErrorFile={self.home / 'java-error.log'}",
            *kafka_dist.classpath(tree),
            "kafka.Kafka",
            str(file),
        ]

    def probe(self) -> bool:
        # A broker answers no request before it has joined the cluster and is unfenced.
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
            f"version=1\ncluster.id={self.cluster}\nnode.id={self.node}\n"
            f"directory.id={new_uuid()}\n"
        )
        partial.rename(data)


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


def _archive(into: Path) -> None:
    """Run a broker once and keep its loaded classes: later starts take half the time."""
    from dev.kafka import Kafka  # here: a cluster is built of brokers

    say("preparing a fast start for Kafka")
    trial = Kafka(into / "trial")
    [broker] = trial.brokers
    trial.configure()
    flags = [f"-XX:ArchiveClassesAtExit={into / 'classes.jsa'}"]
    broker.launch(broker.plain_command(kafka_dist.fetch(), (), flags))
    broker.wait_ready()
    broker.stop(60)
    shutil.rmtree(trial.home)
