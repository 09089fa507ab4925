"""Java libraries from Maven Central, with all that they need."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from dev import apt
from dev.console import run, say, size, watching


def is_there() -> bool:
    """Tell whether Maven is on PATH."""
    return shutil.which("mvn") is not None


def jars(tree: Path) -> str:
    """Return all jars of what was fetched into `tree`, as Java's class path."""
    return ":".join(str(jar) for jar in sorted((tree / "libs").glob("*.jar")))


def fetch(what: str, dependencies: Iterable[tuple[str, str, str]], into: Path) -> None:
    """Put the jars of (group, artifact, version) into `into`/libs; installs Maven where it may."""
    if not is_there():
        apt.install("maven")
    named = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId>"
        f"<version>{version}</version></dependency>"
        for group, name, version in dependencies
    )
    (into / "pom.xml").write_text(
        "<project><modelVersion>4.0.0</modelVersion><groupId>cdc-relay</groupId>"
        "<artifactId>libraries</artifactId><version>1</version><packaging>pom</packaging>"
        f"<dependencies>{named}</dependencies></project>\n"
    )
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime"]
    goal.append(f"-DoutputDirectory={into / 'libs'}")
    with watching(f"fetching {what}", into):
        run(["mvn", "-B", "-q", "-f", into / "pom.xml", *goal])
    say(f"fetched {what}: {size(into)}")
