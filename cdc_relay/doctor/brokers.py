"""Kafka: topics that would lose, refuse or forget records, and brokers that refuse the relay."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final

from cdc_relay.config import Settings
from cdc_relay.doctor.acls import check_acls
from cdc_relay.doctor.finding import Area, Finding, How, Level
from cdc_relay.doctor.traffic import RECENT_ROWS, Seen, Traffic
from cdc_relay.kafka.checkpoints import fallback_topic, topic_name
from cdc_relay.kafka.cluster import Cluster, Topic
from cdc_relay.kafka.sink import producer_config

_MOST_TOPICS: Final = 50
_SKEW_S: Final = 2.0
_DAY_MS: Final = 86_400_000
# Headers, key and the batch's own head, beside the payload.
_OVERHEAD: Final = 2048
_NEVER: Final = 9223372036854775807
# librdkafka's own default of message.max.bytes.
_PRODUCER_BYTES: Final = 1_000_000


def check_brokers(cluster: Cluster, settings: Settings) -> Iterator[Finding]:
    """What the brokers demand of a relay."""
    yield _found("brokers", "ok", f"{cluster.brokers} at {settings.kafka_bootstrap}", area="kafka")
    config = cluster.broker_config()
    if not config:
        yield _found(
            "broker_settings",
            "warning",
            "the brokers do not tell their settings (DESCRIBE_CONFIGS on the cluster is missing)",
            area="kafka",
        )
        return
    if settings.delivery == "exactly_once":
        yield _longest_transaction(settings, config)
    yield _session(settings, config)
    internal = cluster.topics(["__transaction_state", "__consumer_offsets"])
    for topic in internal.values():
        yield from _durable(topic, cluster.brokers, settings, area="kafka")
    yield _found(
        "partitioner",
        "ok",
        f"{producer_config(settings, '-')['partitioner']}: keys go where every Java client puts "
        "them",
        area="kafka",
    )


def check_clock(ahead: float | None, settings: Settings) -> Finding:
    """By how many seconds the brokers' clock is ahead of the relay's machine's, as the last
    checkpoint tells; None where there is none that does."""
    if ahead is None:
        text = "not known: the brokers have stamped no checkpoint of this name yet"
        return _found("broker_clock", "ok", text, area="kafka")
    # A checkpoint may wait for its brokers as long as its transaction may be open.
    if -_SKEW_S < ahead < _SKEW_S + settings.transaction_timeout:
        text = "the brokers' clock and the relay's machine's agree (its last checkpoint tells)"
        return _found("broker_clock", "ok", text, area="kafka")
    return _found(
        "broker_clock",
        "warning",
        f"the brokers' clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the "
        "relay's machine's (its last checkpoint tells): they delete records, and refuse those that "
        "seem to come from the future, by theirs",
        ("synchronise the clocks of brokers and relay (timedatectl set-ntp true)",),
        "advice",
        area="kafka",
    )


def check_topics(cluster: Cluster, settings: Settings, rows: Traffic | None) -> Iterator[Finding]:
    """The topics of relay and compensator, and the topics that the table's recent rows go to."""
    yield from _checkpoint_topic(cluster, settings)
    output = cluster.allowed(list(rows.topics)[:_MOST_TOPICS] if rows is not None else [])
    yield from check_acls(cluster, settings, output)
    if rows is None:
        return
    for reason in rows.unroutable:
        yield _found(
            "routing",
            "failure",
            f"{reason}: these rows are parked and die",
            ("mend what the service writes, or the topic template",),
            "advice",
        )
    if not rows.topics:
        yield _found(
            "topics",
            "warning" if "{" in settings.topic else "ok",
            "the table is empty, so no topic is known yet: run this again after the first events",
        )
    elif len(rows.topics) > _MOST_TOPICS:
        yield _found(
            "topics",
            "warning",
            f"the last {RECENT_ROWS} rows go to {len(rows.topics)} topics, of which {_MOST_TOPICS} "
            "are looked at: brokers are made for thousands, not for one an event",
            ("take a column of few values for the topic, and leave the others to the key",),
            "advice",
        )
    config = cluster.broker_config()
    topics = cluster.topics(list(rows.topics))
    for name, seen in sorted(islice(rows.topics.items(), _MOST_TOPICS)):
        if name not in topics and output.get(name) is not None:
            continue  # hidden from us: said above
        if name not in topics:
            yield _absent(name, cluster, settings, config)
            continue
        topic = topics[name]
        yield from _durable(topic, cluster.brokers, settings)
        yield from _keeps(topic, settings)
        yield from _takes(topic, settings, seen, rows)


def _checkpoint_topic(cluster: Cluster, settings: Settings) -> Iterator[Finding]:
    ours = (topic_name(settings.name), fallback_topic(settings.name))
    topics = cluster.topics(ours)
    for name in ours:
        if name in topics:
            yield from _compacted(topics[name], cluster, settings)
        else:
            yield _found("checkpoint_topic", "ok", f"{name} is made when it is needed first")


def _compacted(topic: Topic, cluster: Cluster, settings: Settings) -> Iterator[Finding]:
    name = topic.name
    policy = topic.config.get("cleanup.policy", "compact")
    if policy == "compact":
        yield _found("checkpoint_topic", "ok", f"{name} is compacted")
    else:
        yield _found(
            "checkpoint_topic",
            "failure",
            f"{name} has cleanup.policy={policy}: after its retention time the last word of an "
            "idle relay, or of the last pass that sent something, is gone",
            (_alter(settings, name, "cleanup.policy=compact"),),
            "shell",
        )
    yield from _durable(topic, cluster.brokers, settings)


def _longest_transaction(settings: Settings, config: Mapping[str, str]) -> Finding:
    limit_ms = int(config.get("transaction.max.timeout.ms", 900_000))
    if settings.transaction_timeout * 1000 <= limit_ms:
        return _found("transactions", "ok", f"up to {limit_ms / 1000:g} s", area="kafka")
    return _found(
        "transactions",
        "failure",
        f"transaction_timeout is {settings.transaction_timeout:g} s, and the brokers allow "
        f"{limit_ms / 1000:g} s: they refuse the producer",
        (f"export CDC_RELAY_TRANSACTION_TIMEOUT={limit_ms}ms",),
        "shell",
        area="kafka",
    )


def _session(settings: Settings, config: Mapping[str, str]) -> Finding:
    least = int(config.get("group.min.session.timeout.ms", 6_000))
    most = int(config.get("group.max.session.timeout.ms", 1_800_000))
    wanted = round(settings.session_timeout * 1000)
    if least <= wanted <= most:
        return _found("session_timeout", "ok", f"{settings.session_timeout:g} s", area="kafka")
    return _found(
        "session_timeout",
        "failure",
        f"session_timeout is {wanted} ms, and the brokers take {least} to {most} ms: they let no "
        "member in",
        (f"export CDC_RELAY_SESSION_TIMEOUT={min(max(wanted, least), most)}ms",),
        "shell",
        area="kafka",
    )


def _absent(name: str, cluster: Cluster, settings: Settings, config: Mapping[str, str]) -> Finding:
    replicas = min(3, cluster.brokers)
    create = (
        _command(settings, "kafka-topics.sh")
        + f" --create --topic {name} --partitions 6 --replication-factor {replicas}"
        + f" --config min.insync.replicas={max(1, replicas - 1)}"
    )
    if config.get("auto.create.topics.enable") == "true":
        return _found(
            "topic_missing",
            "warning",
            f"{name} is not there; the brokers will create it with {config.get('num.partitions')} "
            f"partitions and {config.get('default.replication.factor')} replicas, and a later "
            "change of partitions moves keys",
            (create,),
            "shell",
        )
    return _found(
        "topic_missing",
        "failure",
        f"{name} is not there and the brokers create none: its rows are parked",
        (create,),
        "shell",
    )


def _durable(
    topic: Topic, brokers: int, settings: Settings, *, area: Area = "topics"
) -> Iterator[Finding]:
    name, replicas = topic.name, topic.replicas
    needed = int(topic.config.get("min.insync.replicas", 1))
    if topic.leaderless:
        yield _found(
            "leader",
            "failure",
            f"{name}: {topic.leaderless} of {topic.partitions} partitions have no leader: nothing "
            "can be written there, and what goes there waits",
            _bring_back(topic),
            "advice",
            area=area,
        )
    if needed > replicas:
        yield _found(
            "min_insync_replicas",
            "failure",
            f"{name} has {replicas} replicas and min.insync.replicas={needed}: every write is "
            "refused",
            (_alter(settings, name, f"min.insync.replicas={max(1, replicas - 1)}"),),
            "shell",
            area=area,
        )
    elif needed > topic.in_sync:
        yield _found(
            "min_insync_replicas",
            "failure",
            f"{name} has {topic.in_sync} replicas in sync and needs {needed}: writes wait until "
            "brokers are back",
            _bring_back(topic),
            "advice",
            area=area,
        )
    elif replicas > 1 and needed < 2:
        yield _found(
            "min_insync_replicas",
            "warning",
            f"{name}: min.insync.replicas={needed} lets a record be acknowledged that one broker "
            "holds; with that broker it is lost",
            (_alter(settings, name, "min.insync.replicas=2"),),
            "shell",
            area=area,
        )
    elif replicas < min(3, brokers) or replicas < 2:
        yield _found(
            "replication_factor",
            "warning",
            f"{name} has its records on {replicas} of {brokers} brokers: with one disk they are "
            "lost; three brokers and three replicas are usual",
            area=area,
        )
    else:
        yield _found(
            "min_insync_replicas", "ok", f"{name}: {needed} of {replicas} replicas", area=area
        )
    if topic.config.get("unclean.leader.election.enable") == "true":
        yield _found(
            "unclean_leader_election",
            "warning",
            f"{name}: a replica that lags may become leader and drop acknowledged records",
            (_alter(settings, name, "unclean.leader.election.enable=false"),),
            "shell",
            area=area,
        )


def _bring_back(topic: Topic) -> tuple[str, ...]:
    if topic.away:
        which = ", ".join(map(str, topic.away))
        return (f"start broker {which} again, or move its replicas (kafka-reassign-partitions.sh)",)
    return (f"see why replicas of {topic.name} lag: the logs of its brokers",)


def _keeps(topic: Topic, settings: Settings) -> Iterator[Finding]:
    """Whether what was sent stays as it was sent, and long enough."""
    name, config = topic.name, topic.config
    policy = config.get("cleanup.policy", "delete")
    if "compact" in policy:
        yield _found(
            "cleanup_policy",
            "failure",
            f"{name} has cleanup.policy={policy}: of each aggregate only the last event stays",
            (_alter(settings, name, "cleanup.policy=delete"),),
            "shell",
        )
    else:
        yield _found("cleanup_policy", "ok", f"{name}: {policy}")
    retention = int(config.get("retention.ms", -1))
    if 0 <= retention < _DAY_MS:
        yield _found(
            "retention",
            "warning",
            f"{name} keeps records for {retention / 1000:g} s: a consumer that is down for longer "
            "misses events",
            (_alter(settings, name, f"retention.ms={7 * _DAY_MS}"),),
            "shell",
        )
    if config.get("message.timestamp.type") == "LogAppendTime":
        yield _found(
            "timestamp_type",
            "warning",
            f"{name} stamps records with the time of their arrival: created_at is left in the "
            "header occurred_at only",
            (_alter(settings, name, "message.timestamp.type=CreateTime"),),
            "shell",
        )


def _takes(topic: Topic, settings: Settings, seen: Seen, rows: Traffic) -> Iterator[Finding]:
    """Whether the topic takes the rows that the table has."""
    name, config, largest = topic.name, topic.config, seen.largest
    if seen.partition >= topic.partitions:
        yield _found(
            "partition",
            "failure",
            f"{name} has {topic.partitions} partitions, and {settings.partition_column} of a "
            f"recent row names partition {seen.partition}: such rows are parked",
            (
                _command(settings, "kafka-topics.sh")
                + f" --alter --topic {name} --partitions {seen.partition + 1}",
            ),
            "shell",
        )
    before = int(config.get("message.timestamp.before.max.ms", _NEVER))
    if before <= rows.oldest_pending_ms:
        yield _found(
            "timestamp_limit",
            "failure",
            f"{name} refuses records older than {before / 1000:g} s, and a row has been pending "
            f"for {rows.oldest_pending_ms / 1000:g} s",
            (_alter(settings, name, f"message.timestamp.before.max.ms={_NEVER}"),),
            "shell",
        )
    after = int(config.get("message.timestamp.after.max.ms", _NEVER))
    if after <= rows.ahead_ms:
        yield _found(
            "timestamp_limit",
            "failure",
            f"{name} refuses records stamped more than {after / 1000:g} s ahead of the brokers' "
            f"clock, and a recent row is {rows.ahead_ms / 1000:g} s ahead: such rows are parked",
            (_alter(settings, name, f"message.timestamp.after.max.ms={_NEVER}"),),
            "shell",
        )
    need = largest + _OVERHEAD
    limit = int(config.get("max.message.bytes", _PRODUCER_BYTES))
    ours = int(settings.kafka.get("message.max.bytes", _PRODUCER_BYTES))
    if need > limit:
        yield _found(
            "max_message_bytes",
            "failure",
            f"{name} takes {limit} bytes, and a recent payload has {largest}: such rows are parked",
            (_alter(settings, name, f"max.message.bytes={max(1_048_588, 2 * need)}"),),
            "shell",
        )
    elif need > ours:
        yield _found(
            "message_max_bytes",
            "failure",
            f"our own producer takes {ours} bytes, and a recent payload for {name} has {largest}: "
            "such rows are parked",
            (f"export CDC_RELAY_KAFKA_MESSAGE_MAX_BYTES={limit}",),
            "shell",
        )
    else:
        yield _found(
            "max_message_bytes", "ok", f"{name}: {min(limit, ours)}, largest recent {largest}"
        )


def _alter(settings: Settings, topic: str, change: str) -> str:
    return (
        _command(settings, "kafka-configs.sh")
        + f" --alter --entity-type topics --entity-name {topic} --add-config {change}"
    )


def _command(settings: Settings, tool: str) -> str:
    # Kafka's tools read how to log in from a file of their own.
    login = " --command-config client.properties" if "security.protocol" in settings.kafka else ""
    return f"{tool} --bootstrap-server {shlex.quote(settings.kafka_bootstrap)}{login}"


def _found(
    check: str,
    level: Level,
    text: str,
    mend: tuple[str, ...] = (),
    how: How = "",
    *,
    area: Area = "topics",
) -> Finding:
    return Finding(area, check, level, text, mend, how)
