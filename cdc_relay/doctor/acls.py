"""Kafka's own grants: what the relay's user may do on its topics and its group."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping

from cdc_relay.config import Settings
from cdc_relay.doctor.finding import Finding
from cdc_relay.kafka.checkpoints import fallback_topic, topic_name
from cdc_relay.kafka.cluster import Allowed, Cluster
from cdc_relay.kafka.membership import group_name


def check_acls(
    cluster: Cluster, settings: Settings, output: Mapping[str, Allowed]
) -> Iterator[Finding]:
    """What brokers say that may be done on the topics of the table's rows (``output``), on our own,
    and in our group."""
    found = []
    for topic, allowed in output.items():
        lacking = _lacking(allowed, ("WRITE",))
        if lacking:
            found.append(_denied(settings, lacking, "topic", topic, "its rows are parked"))
    own = (topic_name(settings.name), fallback_topic(settings.name))
    for topic, allowed in cluster.allowed(own).items():
        lacking = _lacking(allowed, ("READ", "WRITE"))
        if lacking:
            found.append(_denied(settings, lacking, "topic", topic, "no position can be kept"))
    group = group_name(settings.name)
    if _lacking(cluster.allowed_in(group), ("READ",)):
        found.append(_denied(settings, ["READ"], "group", group, "no relay can join"))
    if found:
        yield from found
    else:
        yield Finding("kafka", "acls", "ok", "our user may read and write what it has to")


def _lacking(allowed: Allowed, wanted: Collection[str]) -> list[str]:
    # Brokers that do not tell are not guessed about.
    return [] if allowed is None else [one for one in wanted if one not in allowed]


def _denied(
    settings: Settings, operations: list[str], kind: str, name: str, consequence: str
) -> Finding:
    user = settings.kafka.get("sasl.username")
    principal = shlex.quote(f"User:{user or 'OURS'}")
    flags = " ".join(f"--operation {one.capitalize()}" for one in operations)
    mend = (
        f"kafka-acls.sh --bootstrap-server {shlex.quote(settings.kafka_bootstrap)} "
        f"--command-config client.properties --add --allow-principal {principal} "
        f"{flags} --{kind} {name}"
    )
    return Finding(
        "kafka",
        f"acl_{kind}",
        "failure",
        f"{user or 'our user'} may not {' and '.join(one.lower() for one in operations)} "
        f"{kind} {name}: {consequence}",
        (mend,),
        "shell" if user else "advice",
    )
