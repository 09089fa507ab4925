"""Logging in to Kafka as production does: SCRAM over TLS, and tokens that run out; on real
brokers."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from dev.broker import Broker
from tests.support.brokers import ProxiedKafka
from tests.support.certificates import self_signed
from tests.support.harness import Harness
from tests.support.sql import Database
from tests.support.ward import Ward, tools

SETTINGS = {"SESSION_TIMEOUT": "2s", "TRANSACTION_TIMEOUT": "5s"}
PASSWORD = "correct-horse-battery"
BOTH = pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])


class SecureKafka(ProxiedKafka):
    """The proxied listener speaks TLS and takes SCRAM-SHA-512; the other is the broker's own."""

    protocol = "SASL_SSL"

    def settings(self, broker: Broker) -> dict[str, str]:
        login = "org.apache.kafka.common.security.scram.ScramLoginModule"
        return {
            **super().settings(broker),
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.proxied.scram-sha-512.sasl.jaas.config": f"{login} required;",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",  # who comes by the plain listener: broker and test
            "listener.name.proxied.ssl.keystore.type": "PEM",
            "listener.name.proxied.ssl.keystore.location": str(self.certificate),
        }

    @property
    def certificate(self) -> Path:
        path = self.home / "server.pem"
        return path if path.exists() else self_signed(path)


@pytest.fixture(scope="module")
def secure_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafka]:
    home = tmp_path_factory.mktemp("secure-kafka")
    with SecureKafka(home, die_with_parent=True) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        user = UserScramCredentialUpsertion("relay", info, PASSWORD.encode())
        for done in admin.alter_user_scram_credentials([user]).values():
            done.result(30)
        for allowed in admin.create_acls(list(grants())).values():
            allowed.result(30)
        yield broker


def grants() -> Iterator[AclBinding]:
    """What docs/operations.md asks for, and no more; the names of this run's relays begin so."""
    names, topics = f"cdc-relay.t{os.getpid()}-", f"t{os.getpid()}-"
    own, operation = ResourceType.TOPIC, AclOperation
    for kind, name, operations in (
        (own, names, (operation.DESCRIBE, operation.CREATE, operation.READ, operation.WRITE)),
        (own, topics, (operation.DESCRIBE, operation.WRITE)),
        (ResourceType.GROUP, names, (operation.READ,)),
        (ResourceType.TRANSACTIONAL_ID, names, (operation.WRITE,)),
    ):
        for one in operations:
            yield AclBinding(
                kind, name, ResourcePatternType.PREFIXED, "User:relay", "*", one,
                AclPermissionType.ALLOW,
            )  # fmt: skip


@pytest.fixture
def shop(mysql: Database, secure_kafka: SecureKafka, tmp_path: Path) -> Iterator[Harness]:
    """A shop that reads topics in plain; ``login`` is what our processes are told."""
    with Harness(mysql, secure_kafka.bootstrap, tmp_path, SETTINGS) as shop:
        shop.create_topic()
        yield shop


def login(broker: SecureKafka, home: Path, password: str = PASSWORD) -> dict[str, str]:
    secret = home / "kafka-password"
    secret.write_text(password + "\n")
    return {
        "KAFKA_BOOTSTRAP": broker.proxied,
        "KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
        "KAFKA_SASL_MECHANISMS": "SCRAM-SHA-512",
        "KAFKA_SASL_USERNAME": "relay",
        "KAFKA_PASSWORD_FILE": str(secret),
        "KAFKA_SSL_CA_LOCATION": str(broker.certificate),
    }


@BOTH
def test_scram_over_tls(
    delivery: str, shop: Harness, secure_kafka: SecureKafka, tmp_path: Path
) -> None:
    """Stream, compensator and every command that asks Kafka, with the password from a file."""
    secrets = {**login(secure_kafka, tmp_path), "DELIVERY": delivery}
    relay = shop.relay(**secrets)
    sent = [shop.ins("a", {"n": number}) for number in range(3)]
    shop.wait_sent(3)
    status = shop.run("status", "--json", **secrets)
    assert json.loads(status.stdout or "")["checkpoint"]
    assert relay.terminate() == 0, relay.text()
    sent.append(shop.ins("a", {"n": 3}))
    assert shop.compensate("--force", **secrets)["sent"] == 1
    assert [message.event_id for message in shop.messages()] == sent
    assert PASSWORD not in relay.text() + status.text()


def test_a_killed_relay_is_succeeded_with_these_grants(
    shop: Harness, secure_kafka: SecureKafka, tmp_path: Path
) -> None:
    """Its coordinator is asked by another client library, with the same login."""
    secrets = login(secure_kafka, tmp_path)
    killed = shop.relay(TEST_FAULT="committing:3", **secrets)
    for number in range(6):
        shop.ins("a", {"n": number})
        time.sleep(0.1)
    assert killed.wait() == -signal.SIGKILL
    successor = shop.relay(**secrets)
    shop.wait_sent(6)
    assert successor.logged("a transaction is open: asking how the last ones were decided")
    assert "cannot ask" not in successor.text()
    assert PASSWORD not in successor.text()
    assert [message.json["n"] for message in shop.messages()] == list(range(6))


@pytest.mark.parametrize(
    "command", [["start"], ["compensate", "--older-than", "0s"], ["position", "show"]]
)
def test_a_wrong_password_is_said_in_one_line(
    command: list[str], shop: Harness, secure_kafka: SecureKafka, tmp_path: Path
) -> None:
    shop.ins("a", {"n": 0})
    process = shop.run(*command, **login(secure_kafka, tmp_path, "not-the-password"))
    assert process.wait() == 4, process.text()
    error = [line for line in process.text().splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert "authentication" in error[0].lower(), error
    assert "not-the-password" not in process.text()


def test_a_broker_that_is_not_trusted_is_refused(
    shop: Harness, secure_kafka: SecureKafka, tmp_path: Path
) -> None:
    other = self_signed(tmp_path / "other.pem")
    secrets = {**login(secure_kafka, tmp_path), "KAFKA_SSL_CA_LOCATION": str(other)}
    process = shop.run("start", **secrets)
    assert process.wait() == 4, process.text()
    assert "certificate" in process.text()


def test_a_password_file_that_is_not_there(shop: Harness, tmp_path: Path) -> None:
    process = shop.run("start", KAFKA_PASSWORD_FILE=str(tmp_path / "none"))
    assert process.wait() == 2
    assert "kafka_password_file: cannot read" in process.text()


@pytest.mark.parametrize(
    ("resource", "name", "operation", "check", "words"),
    [
        (ResourceType.TOPIC, "t{pid}-", "WRITE", "acl_topic", "relay may not write topic"),
        (ResourceType.TOPIC, "cdc-relay.t{pid}-", "READ", "acl_topic", "no position can be kept"),
        (ResourceType.GROUP, "cdc-relay.t{pid}-", "READ", "acl_group", "no relay can join"),
    ],
)
def test_the_doctor_names_an_acl_that_is_missing(
    resource: ResourceType,
    name: str,
    operation: str,
    check: str,
    words: str,
    shop: Harness,
    secure_kafka: SecureKafka,
    tmp_path: Path,
) -> None:
    """And the command that it prints mends it, run by the cluster's administrator."""
    secrets = login(secure_kafka, tmp_path)
    shop.ins("a", {"n": 0})
    assert shop.run("start", "--until-current", **secrets).wait() == 0
    assert shop.run("compensate", "--older-than", "0s", **secrets).wait() == 0
    ward = Ward(shop.database, shop.kafka, shop.name)
    ward.set({**secrets, "TOPIC": shop.topic_prefix + "{aggregate_type}"})
    well = ward.finding("acls")
    assert well is not None, ward.findings()
    [acl] = [
        one
        for one in grants()
        if (one.restype, one.name, one.operation.name)
        == (resource, name.format(pid=os.getpid()), operation)
    ]
    admin = AdminClient({"bootstrap.servers": shop.kafka, "log_level": 4})
    gone = AclBindingFilter(
        *(acl.restype, acl.name, acl.resource_pattern_type, acl.principal, acl.host),
        *(acl.operation, acl.permission_type),
    )
    for deleted in admin.delete_acls([gone]).values():
        assert deleted.result(30)
    try:
        shop.until(lambda: ward.finding(check))
        ill = ward.finding(check)
        assert ill is not None
        assert (ill.level, ill.exit_code, ill.how) == ("failure", 4, "shell")
        assert any(words in one.text for one in ward.findings())
        path = tools(tmp_path / "tools")
        for one in ward.findings():
            if one.check == check:
                [line] = one.mend
                assert "--command-config client.properties" in line
                # The administrator's own listener and login.
                line = line.replace(secure_kafka.proxied, shop.kafka)
                line = line.replace("--command-config client.properties ", "")
                ward.follow(replace(one, mend=(line,)), path)
        shop.until(lambda: ward.finding(check) is None)
    finally:
        for made in admin.create_acls([acl]).values():
            made.result(30)


class TokenKafka(ProxiedKafka):
    """The proxied listener takes OAUTHBEARER tokens, Kafka's own unsecured ones."""

    protocol = "SASL_PLAINTEXT"

    def settings(self, broker: Broker) -> dict[str, str]:
        login = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
        return {
            **super().settings(broker),
            "sasl.enabled.mechanisms": "OAUTHBEARER",
            "listener.name.proxied.oauthbearer.sasl.jaas.config": (
                f'{login} required unsecuredLoginStringClaim_sub="broker";'
            ),
        }


@BOTH
def test_a_token_is_renewed_while_the_relay_is_idle(
    delivery: str, mysql: Database, tmp_path: Path
) -> None:
    with (
        TokenKafka(tmp_path / "tokens", die_with_parent=True) as broker,
        Harness(mysql, broker.bootstrap, tmp_path, {**SETTINGS, "DELIVERY": delivery}) as shop,
    ):
        shop.create_topic()
        relay = shop.relay(
            KAFKA_BOOTSTRAP=broker.proxied,
            KAFKA_SECURITY_PROTOCOL="SASL_PLAINTEXT",
            KAFKA_SASL_MECHANISMS="OAUTHBEARER",
            KAFKA_ENABLE_SASL_OAUTHBEARER_UNSECURE_JWT="true",
            KAFKA_SASL_OAUTHBEARER_CONFIG="principal=relay lifeSeconds=5",
        )
        shop.ins("a", {"n": 0})
        shop.wait_sent(1)
        # Idle for longer than two tokens live; then every connection has to log in again.
        time.sleep(11)
        broker.proxy.cut()
        broker.proxy.mend()
        shop.ins("a", {"n": 1})
        shop.wait_sent(2, 20)
        assert relay.terminate() == 0, relay.text()
        assert [message.json["n"] for message in shop.messages()] == [0, 1]
