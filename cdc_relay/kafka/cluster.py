"""What a Kafka cluster says of itself and of topics; asked by the commands that examine it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    NewTopic,
)

from cdc_relay.config import Settings
from cdc_relay.kafka.client import UNKNOWN_TOPIC, base_config, create, sink_error

Allowed = frozenset[str] | None
"""Operations as Kafka's ACLs name them (``WRITE``); None where brokers do not tell."""
_DENIED: Final = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
)


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the cluster has it."""

    name: str
    partitions: int
    replicas: int
    """Of the partition that has fewest."""
    in_sync: int
    """In-sync replicas of the partition that has fewest, of those that have a leader."""
    leaderless: int
    """Partitions without a leader: nothing can be written there."""
    away: Sequence[int]
    """Brokers that hold replicas and are not in the cluster now."""
    config: Mapping[str, str]
    """Empty where we may not look."""


class Cluster:
    """A cluster, asked when it is made. One thread. Raises ``SinkError`` where it does not answer
    or does not let us in."""

    def __init__(self, settings: Settings, timeout: float = 10.0) -> None:
        self._settings = settings
        self._timeout = timeout
        self._admin: Any = create(
            AdminClient, base_config(settings, f"cdc-relay-{settings.name}-admin")
        )
        try:
            # All topics: asking for one by name would create it where brokers do so.
            self._metadata = self._admin.list_topics(timeout=timeout)
        except KafkaException as error:
            raise sink_error(error, settings, "cannot list topics") from None
        self.brokers = len(self._metadata.brokers)
        self.names: frozenset[str] = frozenset(self._metadata.topics)

    def broker_config(self) -> Mapping[str, str]:
        """The settings of one broker; empty where we may not look."""
        broker = min(self._metadata.brokers)
        return self._configs([ConfigResource("broker", str(broker))]).get(str(broker), {})

    def topics(self, names: Sequence[str]) -> dict[str, Topic]:
        """Those of ``names`` that are there."""
        there = [name for name in names if name in self.names]
        configs = self._configs([ConfigResource("topic", name) for name in there])
        found = {}
        alive = set(self._metadata.brokers)
        for name in there:
            partitions = list(self._metadata.topics[name].partitions.values())
            replicas = min((len(one.replicas) for one in partitions), default=0)
            found[name] = Topic(
                name,
                len(partitions),
                replicas,
                min((len(one.isrs) for one in partitions if one.leader >= 0), default=replicas),
                sum(one.leader < 0 for one in partitions),
                sorted({node for one in partitions for node in one.replicas} - alive),
                configs.get(name, {}),
            )
        return found

    def allowed(self, names: Sequence[str]) -> dict[str, Allowed]:
        """What we may do on each topic; nothing where it may not even be seen."""
        if not names:
            return {}
        asked = self._admin.describe_topics(
            TopicCollection(list(names)),
            include_authorized_operations=True,
            request_timeout=self._timeout,
        )
        return {name: self._operations(future) for name, future in asked.items()}

    def allowed_in(self, group: str) -> Allowed:
        """What we may do in a consumer group."""
        asked = self._admin.describe_consumer_groups(
            [group], include_authorized_operations=True, request_timeout=self._timeout
        )
        return self._operations(asked[group])

    def _operations(self, future: Any) -> Allowed:
        try:
            found = future.result(timeout=self._timeout + 1).authorized_operations
        except KafkaException as error:
            return frozenset() if error.args[0].code() in _DENIED else None
        return None if found is None else frozenset(one.name for one in found)

    def create(self, name: str, partitions: int) -> None:
        """Create a topic, with the brokers' own replication. Raises ``SinkError``."""
        made = self._admin.create_topics(
            [NewTopic(name, num_partitions=partitions, replication_factor=-1)],
            operation_timeout=self._timeout,
        )
        self._done(made, "cannot create topic")

    def delete(self, names: Sequence[str]) -> None:
        """Delete topics, as far as they are there. Raises ``SinkError``."""
        self._done(self._admin.delete_topics(list(names)), "cannot delete topic")

    def _done(self, futures: Mapping[str, Any], doing: str) -> None:
        for name, future in futures.items():
            try:
                future.result(timeout=self._timeout + 1)
            except KafkaException as error:
                if error.args[0].code() not in UNKNOWN_TOPIC:
                    raise sink_error(error, self._settings, f"{doing} {name}") from None

    def _configs(self, resources: list[Any]) -> dict[str, Mapping[str, str]]:
        result: dict[str, Mapping[str, str]] = {}
        if not resources:
            return result
        answers = self._admin.describe_configs(resources, request_timeout=self._timeout)
        for resource, future in answers.items():
            try:
                entries = future.result(timeout=self._timeout + 1)
            except (KafkaException, TimeoutError):
                continue  # no grant to look
            result[resource.name] = {
                name: str(entry.value) for name, entry in entries.items() if entry.value is not None
            }
        return result
