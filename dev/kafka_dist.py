"""Kafka 4.3.1 from Maven Central, and the Java that runs it."""

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from dev import apt, cache, maven
from dev.console import DevError

VERSION = "4.3.1"
_LOGGING = "2.25.4"
# As Kafka's own start script sets them.
JVM = (
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-Djava.awt.headless=true",
)
_LIBRARIES = (
    ("org.apache.kafka", "kafka_2.13", VERSION),
    ("org.apache.logging.log4j", "log4j-slf4j-impl", _LOGGING),
)
_LOG4J = """rootLogger.level = INFO
rootLogger.appenderRef.out.ref = out
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d %p %m (%c{1})%n
"""


def fetch() -> Path:
    """Return the directory with `libs/`, fetched the first time."""
    return cache.artefact(f"kafka-{VERSION}", _build)


def java() -> str:
    """Return a Java 17 or newer, installed as root on Debian when there is none."""
    if _java_version() < 17:
        apt.install("openjdk-17-jre-headless")
    found = shutil.which("java")
    version = _java_version()
    if found is None or version < 17:
        raise DevError(f"Kafka needs Java 17 or newer on PATH; found {version or 'none'}")
    return found


def can_fetch() -> bool:
    """Tell whether Java and Maven are there or may be installed."""
    if _java_version() >= 17 and maven.is_there():
        return True
    return apt.is_debian() and os.geteuid() == 0


def java_key() -> str:
    """Return a name for this exact Java: its class archives fit no other."""
    return hashlib.sha256(_java_banner().encode()).hexdigest()[:12]


def classpath(tree: Path) -> list[str]:
    """Return the Java options that put Kafka on the class path, with its logging set up."""
    return ["-cp", maven.jars(tree), f"-Dlog4j2.configurationFile={tree / 'log4j2.properties'}"]


def _build(into: Path) -> None:
    java()
    (into / "log4j2.properties").write_text(_LOG4J)
    maven.fetch(f"Kafka {VERSION}", _LIBRARIES, into)


def _java_banner() -> str:
    if shutil.which("java") is None:
        return ""
    done = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False)
    return done.stderr


def _java_version() -> int:
    found = re.search(r'version "(\d+)', _java_banner())
    return int(found.group(1)) if found else 0
