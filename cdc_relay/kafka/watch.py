"""A look at the brokers from beside the relay: whether they answer, and who the members are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from cdc_relay.config import Settings
from cdc_relay.kafka.client import base_config, create, sink_error
from cdc_relay.kafka.membership import group_name


class Member(NamedTuple):
    """A relay of the group, as the coordinator knows it."""

    id: str
    host: str
    shards: Sequence[int]
    """What it owns; nothing for one that stands by."""


class Brokers:
    """Asks the brokers with a connection of its own. One thread."""

    def __init__(self, settings: Settings) -> None:
        """Connects in the background."""
        self._settings = settings
        self._admin: Any = self._client()

    def _client(self) -> Any:
        name = f"cdc-relay-{self._settings.name}-watch"
        return create(AdminClient, base_config(self._settings, name))

    def members(self, timeout: float = 10.0) -> list[Member]:
        """The group's members, by the coordinator's word. Raises ``SinkError`` when it does not
        answer."""
        group = group_name(self._settings.name)
        try:
            asked = self._admin.describe_consumer_groups([group], request_timeout=timeout)
            described = asked[group].result()
        except KafkaException as error:
            if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                return []
            # Once its coordinator was away, librdkafka's admin client never finds it again (seen
            # with 2.16: each request times out); a new one does.
            self._admin = self._client()
            raise sink_error(error, self._settings, "cannot ask for the members") from None
        return sorted(
            Member(
                str(member.member_id),
                str(member.host).lstrip("/"),
                sorted(part.partition for part in member.assignment.topic_partitions),
            )
            for member in described.members
        )
