"""Kafka 4.3.1 from Maven Central, and the Java that runs it."""

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from dev import apt, cache
from dev.console import DevError, run, say, size, watching

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
_POM = f"""<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>cdc-relay</groupId><artifactId>kafka</artifactId><version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId>
      <version>{VERSION}</version>
    </dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId><artifactId>log4j-slf4j-impl</artifactId>
      <version>{_LOGGING}</version>
    </dependency>
  </dependencies>
</project>
"""
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


def maven() -> None:
    """See to it that Maven is on PATH."""
    if shutil.which("mvn") is None:
        apt.install("maven")


def can_fetch() -> bool:
    """Tell whether Java and Maven are there or may be installed."""
    if _java_version() >= 17 and shutil.which("mvn") is not None:
        return True
    return apt.is_debian() and os.geteuid() == 0


def java_key() -> str:
    """Return a name for this exact Java: its class archives fit no other."""
    return hashlib.sha256(_java_banner().encode()).hexdigest()[:12]


def classpath(tree: Path) -> list[str]:
    """Return the Java options that put Kafka on the class path, with its logging set up."""
    jars = ":".join(str(jar) for jar in sorted((tree / "libs").glob("*.jar")))
    return ["-cp", jars, f"-Dlog4j2.configurationFile={tree / 'log4j2.properties'}"]


def _build(into: Path) -> None:
    java()
    maven()
    (into / "pom.xml").write_text(_POM)
    (into / "log4j2.properties").write_text(_LOG4J)
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime"]
    goal.append(f"-DoutputDirectory={into / 'libs'}")
    with watching(f"fetching Kafka {VERSION}", into):
        run(["mvn", "-B", "-q", "-f", into / "pom.xml", *goal])
    say(f"fetched Kafka {VERSION}: {size(into)}")


def _java_banner() -> str:
    if shutil.which("java") is None:
        return ""
    done = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False)
    return done.stderr


def _java_version() -> int:
    found = re.search(r'version "(\d+)', _java_banner())
    return int(found.group(1)) if found else 0
