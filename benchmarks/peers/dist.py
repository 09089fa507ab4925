"""Kafka Connect and Debezium's MySQL connector from Maven Central."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dev import cache, kafka_dist
from dev.console import run, say, size, watching

DEBEZIUM: Final = "3.6.1.Final"
CONNECT: Final = kafka_dist.VERSION

_DEPENDENCIES: Final = (
    *(
        ("org.apache.kafka", name, CONNECT)
        for name in (
            "connect-runtime",
            "connect-api",
            "connect-json",
            "connect-transforms",
            "kafka-clients",
        )
    ),
    ("io.debezium", "debezium-connector-mysql", DEBEZIUM),
    # As old as the interface that Connect 4 is written against.
    ("org.slf4j", "slf4j-simple", "1.7.36"),
)


def fetch() -> Path:
    """The directory with ``libs/``, fetched the first time."""
    return cache.artefact(f"debezium-{DEBEZIUM}-connect-{CONNECT}", _build)


def classpath(tree: Path) -> str:
    """All jars, as Java takes them."""
    return ":".join(str(jar) for jar in sorted((tree / "libs").glob("*.jar")))


def _build(into: Path) -> None:
    kafka_dist.java()
    kafka_dist.maven()
    dependencies = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId>"
        f"<version>{version}</version></dependency>"
        for group, name, version in _DEPENDENCIES
    )
    (into / "pom.xml").write_text(
        "<project><modelVersion>4.0.0</modelVersion><groupId>cdc-relay</groupId>"
        "<artifactId>peers</artifactId><version>1</version><packaging>pom</packaging>"
        f"<dependencies>{dependencies}</dependencies></project>\n"
    )
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime"]
    goal.append(f"-DoutputDirectory={into / 'libs'}")
    with watching(f"fetching Debezium {DEBEZIUM}", into):
        run(["mvn", "-B", "-q", "-f", into / "pom.xml", *goal])
    say(f"fetched Debezium {DEBEZIUM} and Kafka Connect {CONNECT}: {size(into)}")
