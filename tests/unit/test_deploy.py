"""The manifests and units: valid, as the contract says, and with commands and settings that
exist."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml
from sqlalchemy.engine import URL, make_url

from cdc_relay.cli import cli
from cdc_relay.config import Settings, load, seconds

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
K8S = DEPLOY / "k8s"
SYSTEMD = DEPLOY / "systemd"
OBJECTS: dict[str, dict[str, Any]] = {
    f"{one['kind']} {one['metadata']['name']}": one
    for file in sorted(K8S.glob("*.yaml"))
    if file.name != "kustomization.yaml"
    for one in yaml.safe_load_all(file.read_text())
}
RELAY = "Deployment cdc-relay"
COMPENSATE = "CronJob cdc-relay-compensate"
PURGE = "CronJob cdc-relay-purge"
CRON_JOBS = (COMPENSATE, PURGE)
WORKLOADS = (RELAY, *CRON_JOBS)
UNITS = sorted(file.name for file in SYSTEMD.glob("*.service"))


def pod(name: str) -> dict[str, Any]:
    spec = OBJECTS[name]["spec"]
    if name in CRON_JOBS:
        spec = spec["jobTemplate"]["spec"]
    found: dict[str, Any] = spec["template"]["spec"]
    return found


def container(name: str) -> dict[str, Any]:
    [only] = pod(name)["containers"]
    return dict(only)


def check_command(arguments: list[str]) -> None:
    """Raises where click would not take them."""
    command = cli.get_command(click.Context(cli), arguments[0])
    assert command is not None
    command.make_context(arguments[0], arguments[1:])


@pytest.mark.parametrize("version", ["1.29", "1.33", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("name", OBJECTS)
def test_manifests_are_valid(name: str, version: str) -> None:
    kubernetes_validate.validate(OBJECTS[name], version, strict=True)


def test_the_schema_would_notice() -> None:
    broken = {**OBJECTS[COMPENSATE], "spec": {"schedul": "* * * * *"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, kubernetes_validate.latest_version(), strict=True)


def test_the_compensator_is_the_one_of_the_contract() -> None:
    spec = OBJECTS[COMPENSATE]["spec"]
    assert {key: value for key, value in spec.items() if key != "jobTemplate"} == {
        "schedule": "*/5 * * * *",
        "concurrencyPolicy": "Forbid",
        "startingDeadlineSeconds": 300,
        "successfulJobsHistoryLimit": 3,
        "failedJobsHistoryLimit": 3,
    }
    assert pod(COMPENSATE)["restartPolicy"] == "OnFailure"
    assert container(COMPENSATE)["args"] == ["compensate", "--older-than", "10m", "--json"]


def test_the_purge_runs_once_a_day() -> None:
    spec = OBJECTS[PURGE]["spec"]
    assert re.fullmatch(r"\d+ \d+ \* \* \*", spec["schedule"])
    assert spec["concurrencyPolicy"] == "Forbid"
    assert container(PURGE)["args"] == ["purge", "--older-than", "7d", "--json"]


@pytest.mark.parametrize("name", WORKLOADS)
def test_commands_exist(name: str) -> None:
    check_command(container(name)["args"])
    assert container(name)["image"] == "cdc-relay"
    assert "command" not in container(name)  # the image's own


@pytest.mark.parametrize("name", WORKLOADS)
def test_pods_run_without_rights(name: str) -> None:
    assert pod(name)["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container(name)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod(name)["automountServiceAccountToken"] is False
    user = re.search(r"^USER (\S+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert user is not None
    assert user[1] == "10001:10001"


@pytest.mark.parametrize("name", WORKLOADS)
def test_resources_are_given(name: str) -> None:
    resources = container(name)["resources"]
    assert set(resources["requests"]) == {"cpu", "memory"}
    # No limit of the CPU: a relay that is throttled is a relay that lags.
    assert set(resources["limits"]) == {"memory"}


@pytest.mark.parametrize("name", WORKLOADS)
def test_services_of_the_cluster_do_not_become_settings(name: str) -> None:
    """They would be passed over, but what is not there cannot be mistaken."""
    assert pod(name)["enableServiceLinks"] is False


def test_stops_have_time() -> None:
    stop_grace = float(Settings.model_fields["stop_grace"].default)
    for name in WORKLOADS:
        assert pod(name)["terminationGracePeriodSeconds"] > stop_grace + 10
    for name in UNITS:
        assert int(unit(name)["Service"]["TimeoutStopSec"]) > stop_grace + 10


def test_the_relay_has_a_standby_and_probes() -> None:
    spec = OBJECTS[RELAY]["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"]["type"] == "RollingUpdate"
    relay = container(RELAY)
    assert relay["args"] == ["start", "--http", "0.0.0.0:8080"]
    assert relay["ports"] == [{"name": "http", "containerPort": 8080}]
    assert relay["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert relay["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}


def environment(name: str) -> dict[str, str]:
    """What the ConfigMaps of a workload say together; later wins."""
    variables: dict[str, str] = {}
    for source in container(name)["envFrom"]:
        variables |= OBJECTS[f"ConfigMap {source['configMapRef']['name']}"]["data"]
    return variables


def database(name: str) -> URL:
    """As its settings have it, without the password of the file."""
    return make_url(load(environ=environment(name)).database_url)


def secrets(volume: dict[str, Any]) -> list[str]:
    """The names of those that a volume shows."""
    if "projected" in volume:
        return [source["secret"]["name"] for source in volume["projected"]["sources"]]
    return [volume["secret"]["secretName"]]


@pytest.mark.parametrize("name", WORKLOADS)
def test_settings_are_settings(name: str) -> None:
    settings = load(environ=environment(name))
    [mount, _tmp] = container(name)["volumeMounts"]
    [volume, _] = pod(name)["volumes"]
    assert mount["name"] == volume["name"]
    there = {
        Path(mount["mountPath"]) / key
        for secret in secrets(volume)
        for key in OBJECTS[f"Secret {secret}"]["stringData"]
    }
    wanted = {settings.database_password_file, settings.alerts_file}
    assert wanted <= there if name == PURGE else wanted == there


def test_the_purge_has_a_user_and_a_password_of_its_own() -> None:
    """The relay's may not delete: `schema --grants --role relay`."""
    assert database(RELAY).username == database(COMPENSATE).username == "relay"
    assert database(PURGE) == database(RELAY).set(username="housekeeping")
    own = [name for name in WORKLOADS if "cdc-relay-purge" in secrets(pod(name)["volumes"][0])]
    assert own == [PURGE]
    service, nightly = (
        unit(f"{name}.service")["Service"] for name in ("cdc-relay", "cdc-relay-purge")
    )
    assert service["LoadCredential"] != nightly["LoadCredential"]
    assert nightly["EnvironmentFile"] == "/etc/cdc-relay/purge.env"
    operations = (ROOT / "docs" / "operations.md").read_text()
    variable = re.search(r"> /etc/cdc-relay/purge.env\nCDC_RELAY_DATABASE_URL=(.*)\n", operations)
    assert variable is not None
    assert make_url(variable[1]).username == "housekeeping"


def test_targets_of_alerts_are_read_from_the_secret(tmp_path: Path) -> None:
    alerts = tmp_path / "alerts"
    alerts.write_text(OBJECTS["Secret cdc-relay"]["stringData"]["alerts"])
    assert load(environ={}, flags={"alerts_file": str(alerts)}).alert_targets() == ()


def test_no_secret_is_applied_by_accident() -> None:
    kustomization = yaml.safe_load((K8S / "kustomization.yaml").read_text())
    applied = [
        f"{one['kind']} {one['metadata']['name']}"
        for name in kustomization["resources"]
        for one in yaml.safe_load_all((K8S / name).read_text())
    ]
    assert set(OBJECTS) - set(applied) == {"Secret cdc-relay", "Secret cdc-relay-purge"}
    assert kustomization["images"][0]["name"] == "cdc-relay"
    for name in WORKLOADS:
        assert database(name).password is None


def test_an_audit_has_room() -> None:
    """About 80 bytes an event in temporary files; a pod beyond the limit is evicted."""
    [tmp] = [one for one in pod(RELAY)["volumes"] if one["name"] == "tmp"]
    assert tmp["emptyDir"] == {"sizeLimit": "1Gi"}


def test_the_readme_shows_the_cron_job_as_it_is() -> None:
    [shown] = re.findall(
        r"```yaml\n(apiVersion.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    part = yaml.safe_load(shown)
    assert part["spec"]["schedule"]
    assert_part(part, OBJECTS[COMPENSATE])


def assert_part(part: Any, whole: Any) -> None:
    """Whatever the one says, the other says as well."""
    if isinstance(part, dict):
        for name, value in part.items():
            assert_part(value, whole[name])
    elif isinstance(part, list):
        assert len(part) == len(whole)
        for one, other in zip(part, whole, strict=True):
            assert_part(one, other)
    else:
        assert part == whole


# --- systemd --------------------------------------------------------------------------------


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((SYSTEMD / name).read_text())
    return parser


@pytest.mark.parametrize("name", UNITS)
def test_units(name: str) -> None:
    service = unit(name)["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert program == "/opt/cdc-relay/bin/cdc-relay"
    check_command(arguments)
    text = (SYSTEMD / name).read_text()
    for variable in re.findall(r"^Environment=CDC_RELAY_(\w+)=", text, re.MULTILINE):
        assert variable == "CONFIG" or variable.lower() in Settings.model_fields
    assert service["DynamicUser"] == "yes"
    assert service["NoNewPrivileges"] == "yes"
    assert service["CapabilityBoundingSet"] == ""
    if name == "cdc-relay.service":
        assert service["Restart"] == "on-failure"
    else:
        assert service["Type"] == "oneshot"
        assert (SYSTEMD / name).with_suffix(".timer").exists()


def test_timers() -> None:
    assert unit("cdc-relay-compensate.timer")["Timer"]["OnCalendar"] == "*:0/5"
    assert seconds("10m") == float(Settings.model_fields["older_than"].default)
