"""The compose file and the image: what would hurt if it were lost in an edit."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docker-compose.yml").read_text()
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(TEXT)["services"]
SERVERS = ("mysql", "kafka", "mariadb")
OURS = ("relay", "init", "compensator")


@pytest.mark.parametrize(
    ("service", "flags"),
    [
        ("mysql", ["--gtid-mode=ON", "--enforce-gtid-consistency=ON", "--binlog-format=ROW"]),
        ("mariadb", ["--binlog-format=ROW", "--log-bin=mariadb-bin"]),
    ],
)
def test_databases_log_rows(service: str, flags: list[str]) -> None:
    command = SERVICES[service]["command"]
    assert set(flags) <= set(command)
    assert "--binlog-row-image=FULL" in command


def test_databases_have_different_server_ids() -> None:
    ids = [
        flag
        for name in ("mysql", "mariadb")
        for flag in SERVICES[name]["command"]
        if flag.startswith("--server-id=")
    ]
    assert len(set(ids)) == 2


@pytest.mark.parametrize("service", [*SERVERS, "relay"])
def test_what_runs_for_good_has_a_health_check(service: str) -> None:
    check = SERVICES[service]["healthcheck"]
    assert check["test"][0] == "CMD"
    assert {"interval", "timeout", "retries"} <= set(check)


@pytest.mark.parametrize("service", OURS)
def test_ours_wait_for_healthy_servers(service: str) -> None:
    needs = SERVICES[service]["depends_on"]
    assert needs["mysql"]["condition"] == "service_healthy"
    assert needs["kafka"]["condition"] == "service_healthy"
    if service != "init":
        assert needs["init"]["condition"] == "service_completed_successfully"


@pytest.mark.parametrize("service", OURS)
def test_ours_run_without_rights(service: str) -> None:
    definition = SERVICES[service]
    assert definition["read_only"] is True
    assert definition["cap_drop"] == ["ALL"]
    assert definition["security_opt"] == ["no-new-privileges:true"]
    assert not definition["user"].startswith(("0", "root"))


@pytest.mark.parametrize("service", OURS)
def test_our_variables_are_settings_of_cdc_relay(service: str) -> None:
    environment = SERVICES[service]["environment"]
    assert all(name.startswith("CDC_RELAY_") for name in environment)
    assert environment["CDC_RELAY_DATABASE_URL"] == "mysql+pymysql://root@mysql:3306/shop"
    assert environment["CDC_RELAY_KAFKA_BOOTSTRAP"] == "kafka:19092"


def test_commands() -> None:
    assert {name: SERVICES[name]["command"] for name in OURS} == {
        "relay": ["start"],
        "init": ["init"],
        "compensator": ["compensate"],
    }


def test_profiles() -> None:
    profiles = {name: one["profiles"] for name, one in SERVICES.items() if "profiles" in one}
    assert profiles == {"mariadb": ["test"], "compensator": ["compensator"]}


def test_ports_are_published_on_loopback_only() -> None:
    ports = [port for one in SERVICES.values() for port in one.get("ports", [])]
    assert len(ports) == 4
    for port in ports:
        assert re.fullmatch(r"127\.0\.0\.1:\$\{CDC_RELAY_DEV_\w+_PORT:-\d+\}:\d+", port)


def test_no_service_shares_the_host() -> None:
    for definition in SERVICES.values():
        assert "privileged" not in definition
        assert "network_mode" not in definition
        assert all(not volume.startswith((".", "/")) for volume in definition.get("volumes", []))


def test_every_variable_is_ours_and_has_a_default() -> None:
    found = re.findall(r"\$\{?([^}\s:]*)(:-[^}]+)?", TEXT)
    assert found
    for name, default in found:
        assert name.startswith("CDC_RELAY_")
        assert default


def test_kafka_is_reachable_from_containers_and_from_the_host() -> None:
    environment = SERVICES["kafka"]["environment"]
    advertised = dict(
        part.split("://", 1) for part in environment["KAFKA_ADVERTISED_LISTENERS"].split(",")
    )
    assert advertised["INTERNAL"] == "kafka:19092"
    assert advertised["HOST"] == "127.0.0.1:${CDC_RELAY_DEV_KAFKA_PORT:-9092}"
    factors = {key: value for key, value in environment.items() if "REPLICATION_FACTOR" in key}
    assert len(factors) == 3
    assert set(factors.values()) == {"1"}


def test_image_runs_the_command_without_root() -> None:
    text = (ROOT / SERVICES["relay"]["build"]["dockerfile"]).read_text()
    final = text[text.rindex("FROM ") :]
    user = re.search(r"^USER (\S+)$", final, re.MULTILINE)
    assert user is not None
    assert user[1] == SERVICES["relay"]["user"]
    assert 'ENTRYPOINT ["cdc-relay"]' in final
    assert text.count("FROM python:3.12-slim") == 2


def test_build_context_has_all_that_the_image_copies() -> None:
    allowed = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    text = (ROOT / "deploy/Dockerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
    assert {name for line in copied for name in line.split()} == allowed
