"""Kafka Connect and Debezium's MySQL connector from Maven Central."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dev import cache, kafka_dist, maven

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


def _build(into: Path) -> None:
    kafka_dist.java()
    maven.fetch(f"Debezium {DEBEZIUM} and Kafka Connect {CONNECT}", _DEPENDENCIES, into)
