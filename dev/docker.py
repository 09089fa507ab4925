"""The servers in containers, for machines where they cannot be fetched natively."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

from dev.console import DevError, run, say

_FILE = Path(__file__).resolve().parent.parent / "docker-compose.yml"
_PORTS = {"mysql": 3306, "mariadb": 3306, "kafka": 9092}


def answers() -> bool:
    """Tell whether a Docker daemon answers within five seconds."""
    try:
        done = subprocess.run(["docker", "info"], capture_output=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def up(names: Iterable[str]) -> None:
    """Start the services of docker-compose.yml and wait until they are healthy."""
    if not answers():
        raise DevError("no Docker daemon answers; start it and try again")
    say(f"starting {', '.join(names)} with docker compose")
    _compose("up", "--detach", "--wait", *names)


def down(*, delete: bool) -> None:
    """Stop the services, and remove their volumes when asked."""
    # The profiles' services too, or their containers and volumes would stay.
    _compose("--profile", "*", "down", *(["--volumes"] if delete else []))


def addresses(names: Iterable[str]) -> dict[str, str]:
    """Return HOST:PORT of each service that is running."""
    running = _compose("ps", "--services", "--status", "running").split()
    return {
        name: _compose("port", name, str(_PORTS[name])).strip() for name in names if name in running
    }


def environment(names: Iterable[str]) -> dict[str, str]:
    """Return the variables for the services that are running."""
    env = {}
    for name, address in addresses(names).items():
        if name == "kafka":
            env["CDC_RELAY_TEST_KAFKA_BOOTSTRAP"] = address
        else:
            env[f"CDC_RELAY_TEST_{name.upper()}_URL"] = f"mysql+pymysql://root@{address}/shop"
    return env


def _compose(*arguments: str) -> str:
    return run(["docker", "compose", "--file", _FILE, *arguments])
