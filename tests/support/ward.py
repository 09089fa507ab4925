"""A set-up to be spoilt, examined by the doctor, and mended by what the doctor prints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from cdc_relay.config import Settings, load
from cdc_relay.doctor import Finding, examine
from dev import cache, kafka_dist
from tests.support.brokers import fetch_tools
from tests.support.harness import CHECKOUT
from tests.support.sql import Database

_RANK = {"ok": 0, "warning": 1, "failure": 2}


def tools(directory: Path) -> Path:
    """A directory for PATH with ``cdc-relay`` and Kafka's own tools under their usual names."""
    directory.mkdir(exist_ok=True)
    tree = kafka_dist.fetch()
    jars = cache.artefact(f"kafka-tools-{kafka_dist.VERSION}", fetch_tools)
    option, classpath, *rest = kafka_dist.classpath(tree)
    java = [kafka_dist.java(), "-XX:TieredStopAtLevel=1", option]
    java += [f"{classpath}:{next(jars.glob('*.jar'))}", *rest]
    commands = {
        "cdc-relay": [sys.executable, "-m", "cdc_relay"],
        "kafka-acls.sh": [*java, "org.apache.kafka.tools.AclCommand"],
        "kafka-configs.sh": [*java, "kafka.admin.ConfigCommand"],
        "kafka-topics.sh": [*java, "org.apache.kafka.tools.TopicCommand"],
    }
    for name, command in commands.items():
        script = directory / name
        script.write_text('#!/bin/sh\nexec "' + '" "'.join(command) + '" "$@"\n')
        script.chmod(0o755)
    return directory


class Ward:
    """``database`` is the relay's view (its user), ``admin`` may do everything there."""

    def __init__(
        self, database: Database, kafka: str, name: str, *, admin: Database | None = None
    ) -> None:
        self.admin = admin or database
        self.environment = {
            "CDC_RELAY_DATABASE_URL": database.text,
            "CDC_RELAY_KAFKA_BOOTSTRAP": kafka,
            "CDC_RELAY_NAME": name,
            "CDC_RELAY_TOPIC": name + ".event.{aggregate_type}",
        }

    def set(self, values: Mapping[str, str]) -> None:
        """Settings, by their variables without the prefix."""
        self.environment |= {f"CDC_RELAY_{key}": value for key, value in values.items()}

    @property
    def settings(self) -> Settings:
        return load(environ=self.environment)

    def findings(self) -> list[Finding]:
        return list(examine(self.settings))

    def finding(self, check: str) -> Finding | None:
        """The worst of a check; None where it said nothing."""
        found = [finding for finding in self.findings() if finding.check == check]
        return max(found, key=lambda finding: _RANK[finding.level], default=None)

    def follow(self, finding: Finding, path: Path | None = None) -> None:
        """Run what was printed, as it was printed."""
        assert finding.mend, finding
        for line in finding.mend:
            if finding.how == "sql":
                assert line.endswith(";")
                self.admin.sql(line)
            elif line.startswith("export "):
                key, _, value = line.removeprefix("export ").partition("=")
                self.environment[key] = value
            elif line.startswith("unset "):
                del self.environment[line.removeprefix("unset ")]
            else:
                assert (finding.how, path) != ("shell", None)
                self._shell(line, str(path))

    def _shell(self, line: str, path: str) -> None:
        environment = {**os.environ, **self.environment, "PATH": f"{path}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=CHECKOUT,
            env=environment,
            capture_output=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
