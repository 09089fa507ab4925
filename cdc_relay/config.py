"""Settings: the only reader of the configuration file and of the environment.

Three layers, later wins: one TOML file (``--config``), environment variables ``CDC_RELAY_*``,
command-line flags. Every field below is a key of the file (``older_than = "10m"``), a variable
(``CDC_RELAY_OLDER_THAN``) and, where a command offers it, a flag (``--older-than``). librdkafka
properties stand in the file's ``[kafka]`` table or in ``CDC_RELAY_KAFKA_<NAME>``.

Wrong input never gets past ``load``: it raises ``ConfigError`` with one line that names the key,
where it was read and what is allowed.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from cdc_relay import columns as outbox_columns
from cdc_relay.cloudevents import PayloadKind
from cdc_relay.errors import ConfigError
from cdc_relay.outbox import DEFAULT_TABLE
from cdc_relay.router import Router, ShapedRouter, ValueKind, check_extra_columns
from cdc_relay.routing import ExtraColumn, Route, Routing, check_template

ENV_PREFIX: Final = "CDC_RELAY_"
_KAFKA_ENV_PREFIX: Final = "CDC_RELAY_KAFKA_"

# All names have dots, which variables write as underscores, but this one.
_KAFKA_UNDERSCORED: Final = {"log.level": "log_level"}

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")

# librdkafka properties that the guarantees rest on, with the reason a user is told.
REFUSED_KAFKA_PROPERTIES: Final[Mapping[str, str]] = {
    "bootstrap.servers": "set kafka_bootstrap instead",
    "metadata.broker.list": "set kafka_bootstrap instead",
    "acks": "nothing lost needs acks=all",
    "request.required.acks": "nothing lost needs acks=all",
    "enable.idempotence": "order and no duplicates need the idempotent producer",
    "max.in.flight": "order needs the idempotent producer's own limit",
    "max.in.flight.requests.per.connection": "order needs the idempotent producer's own limit",
    "retries": "a retry that gives up would lose or reorder events",
    "message.send.max.retries": "a retry that gives up would lose or reorder events",
    "partitioner": "the key's partition must be the same for stream, compensator and Java clients",
    "sticky.partitioning.linger.ms": "it changes the partition of records",
    "queuing.strategy": "order needs first in, first out",
    "message.timeout.ms": "a record is tried as long as its transaction; set transaction_timeout",
    "delivery.timeout.ms": "a record is tried as long as its transaction; set transaction_timeout",
    "transaction.timeout.ms": "set transaction_timeout instead",
    "transactional.id": "it is derived from the relay's name; it fences the predecessor",
    "enable.gapless.guarantee": "a gap would let a later event overtake a failed one",
    "isolation.level": "checkpoints must be read committed",
    "enable.auto.commit": "offsets are committed with the records",
    "enable.auto.offset.store": "offsets are committed with the records",
    "enable.partition.eof": "the relay knows the end of its topics by it",
    "allow.auto.create.topics": "a look at a topic must not make it; what sending makes is the "
    "brokers' auto.create.topics.enable",
    "group.id": "it is derived from the relay's name",
    "group.instance.id": "relays of one name would be one and the same member; leave it out: each "
    "start is a member of its own",
    "group.protocol": "members join by the classic one, with session_timeout",
    "group.protocol.type": "members join by the classic one, with session_timeout",
    "session.timeout.ms": "set session_timeout instead",
    "max.poll.interval.ms": "it follows session_timeout; set that instead",
    "heartbeat.interval.ms": "it follows session_timeout; set that instead",
    "partition.assignment.strategy": "who joins or leaves must not interrupt the others' streams",
    "auto.offset.reset": "the relay reads its checkpoints from the position it chooses",
    "dr_cb": "delivery reports are the relay's",
    "delivery.report.only.error": "every delivery report counts",
    "enabled_events": "delivery reports are the relay's",
    "logger": "the client's lines go to the relay's log; set log_level instead",
    "log.queue": "the client's lines go to the relay's log; set log_level instead",
    "test.mock.num.brokers": "events would go to brokers that are made up",
}


def seconds(value: object) -> float:
    """Parse a duration (``500ms``, ``30s``, ``10m``, ``2h``, ``7d``) into seconds."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError(f"{value} has no unit; write a duration such as 500ms, 30s, 10m, 2h or 7d")
    match = _DURATION.fullmatch(str(value).strip())
    if match is None:
        raise ValueError(f"{value!r} is not a duration; write 500ms, 30s, 10m, 2h or 7d")
    return float(match[1]) * _UNITS[match[2]]


Seconds = Annotated[float, BeforeValidator(seconds), Field(ge=0, le=315_360_000)]
PositiveSeconds = Annotated[float, BeforeValidator(seconds), Field(ge=0.01, le=315_360_000)]


def _within(least: float, most: float) -> AfterValidator:
    """What the Kafka client takes: anything else would end the relay with a line of its own."""

    def check(value: float) -> float:
        if not least <= value <= most:
            raise ValueError(f"{value:.10g} s is not between {least:.10g} s and {most:.10g} s")
        return value

    return AfterValidator(check)


_ADDRESS: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]/@]*)):(\d{1,5})")
_SHORTEST_TOKEN: Final = 16


def _address(value: str) -> tuple[str, int] | None:
    """Host and port of ``http``; None for off. An empty host is every address."""
    if value == "off":
        return None
    match = _ADDRESS.fullmatch(value)
    if match is None or int(match[3]) > 65535:
        raise ValueError(f"{value!r} is not an address; write host:port, [IPv6]:port or off")
    return match[1] or match[2] or "0.0.0.0", int(match[3])


class Settings(BaseModel):
    """All settings, validated and frozen. Durations are in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    database_url: str = Field("", description="SQLAlchemy URL of the database, with its schema.")
    database_password_file: Path | None = Field(
        None, description="File that holds the password, instead of one in the URL."
    )
    database_tls_ca: Path | None = Field(
        None, description="CA file; when set, every database connection uses verified TLS."
    )
    database_tls_cert: Path | None = Field(None, description="Client certificate file.")
    database_tls_key: Path | None = Field(None, description="Client key file.")
    kafka_bootstrap: str = Field("", description="Kafka bootstrap servers, host:port,host:port.")
    kafka: Mapping[str, str] = Field(
        default_factory=dict, description="librdkafka properties, passed through."
    )
    kafka_password_file: Path | None = Field(
        None, description="File that holds Kafka's password, instead of sasl.password."
    )
    name: str = Field(
        "outbox",
        description="Name of this relay, one for each table; its checkpoint topic and identity "
        "derive from it.",
    )
    table: str = Field(DEFAULT_TABLE, description="Outbox table, optionally schema.table.")
    columns: Mapping[str, str] = Field(
        default_factory=dict,
        description="What the table calls our columns, ours=theirs,ours=theirs, or the preset "
        "debezium; a table in the file.",
    )
    topic: str = Field(
        "outbox.event.{aggregate_type}",
        description="Topic template; {aggregate_type}, {event_type} or any other column.",
    )
    routes: tuple[Route, ...] = Field(
        (),
        description="Topics by regular expression, tables of match, topic and column; the first "
        "that matches wins over topic. JSON in the variable.",
    )
    topic_column: str = Field(
        "", description="Column that names the topic of its row; NULL or empty leaves it to topic."
    )
    partition_column: str = Field(
        "", description="Column that names the partition of its row; NULL leaves it to the key."
    )
    extra_columns: tuple[ExtraColumn, ...] = Field(
        (),
        description="Columns that records carry besides: column:header or column:envelope, each "
        "with :name behind it for another name; commas between.",
    )
    format: Literal["raw", "cloudevents", "cloudevents-structured"] = Field(
        "raw", description="Form of a record: the payload itself, or CloudEvents 1.0."
    )
    cloudevents_source: str = Field(
        "/cdc-relay",
        max_length=500,
        description="CloudEvents: the source attribute, a URI reference that names your service.",
    )
    delivery: Literal["exactly_once", "at_least_once"] = Field(
        "exactly_once", description="Delivery guarantee."
    )
    source: Literal["binlog", "polling"] = Field("binlog", description="How rows are read.")
    mark: Literal["update", "delete", "none"] = Field(
        "update", description="What happens to a sent row."
    )
    mark_row_image: Literal["server", "minimal"] = Field(
        "server",
        description="Row image of our own updates in the binlog; minimal is small, and stops "
        "readers that expect whole rows.",
    )
    on_dead: Literal["block", "release"] = Field(
        "block", description="Whether a dead row keeps its aggregate blocked."
    )
    session_timeout: Annotated[Seconds, _within(1, 300)] = Field(
        6.0, description="Silence after which a relay is replaced by a standby."
    )
    transaction_timeout: Annotated[Seconds, _within(1, 2_147_483)] = Field(
        15.0, description="Longest Kafka transaction; a killed relay holds readers up this long."
    )
    shards: int = Field(
        1, ge=1, le=1, description="Shards of one relay name (more than 1 is not available yet)."
    )
    http: str = Field(
        "127.0.0.1:8080",
        description="Address of the page, /metrics, /healthz and /readyz, host:port; port 0 takes "
        "a free one, off serves nothing.",
    )
    http_token: str = Field(
        "",
        repr=False,
        description="Token that the page asks for. Without one it is shown on loopback only.",
    )
    http_token_file: Path | None = Field(
        None, description="File that holds the token, instead of http_token."
    )
    traces: bool = Field(
        False,
        description="OpenTelemetry spans of what is sent, linked to the services' (needs the extra "
        "traces; OTEL_* variables say where they go).",
    )
    health_timeout: PositiveSeconds | None = Field(
        None,
        description="Silence of the database, or of the relay's own loop, that turns /healthz red; "
        "by default read_timeout and heartbeat together.",
    )
    sample_interval: PositiveSeconds = Field(
        5.0,
        description="Time between two looks at the table and the brokers, for page and metrics.",
    )
    server_id: int | None = Field(
        None, ge=1, le=4294967295, description="Replica server id; without it each start draws one."
    )
    batch_rows: int = Field(2000, ge=1, le=100_000, description="Rows handed on at once, at most.")
    queue_rows: int = Field(
        8_000,
        ge=1,
        le=1_000_000,
        description="Rows delivered and not yet marked, at most; also of those read ahead.",
    )
    poll_batch: int = Field(
        200,
        ge=1,
        le=100_000,
        description="Polling: rows of one look; more while there is a backlog.",
    )
    poll_interval: PositiveSeconds = Field(
        0.2, description="Polling: pause between two looks while little is pending."
    )
    heartbeat: PositiveSeconds = Field(5.0, description="Heartbeat interval asked of the database.")
    read_timeout: PositiveSeconds = Field(
        20.0, description="Silence after which the replication connection counts as dead."
    )
    checkpoint_interval: Seconds = Field(
        1.0, description="Longest time between checkpoints while only other tables write."
    )
    stop_grace: Seconds = Field(
        25.0, description="Time that SIGTERM leaves for acknowledging and marking what was read."
    )
    older_than: Seconds = Field(600.0, description="Compensator: age of rows that it looks at.")
    batch: int = Field(500, ge=1, le=100_000, description="Compensator: rows of one batch.")
    max_tries: int = Field(
        10, ge=1, le=1000, description="Failures that a row is forgiven: with the next it is dead."
    )
    send_timeout: Seconds = Field(
        60.0, description="Compensator: wait for the brokers before the pass gives up."
    )
    alerts: tuple[str, ...] = Field(
        (),
        repr=False,
        description="Targets that hear of dead rows, apprise URLs: DingTalk, WeCom, Slack, e-mail, "
        "webhooks, … They hold secrets: better in alerts_file.",
    )
    alerts_file: Path | None = Field(
        None, description="File with more alert targets, one a line; # begins a comment."
    )
    replicas: tuple[str, ...] = Field(
        (),
        description="Purge and archive: replicas whose lag they watch, host:port each, reached as "
        "database_url is.",
    )
    relay_wait: Seconds = Field(
        30.0,
        description="Compensator: wait for a living relay to reach the end of the log; rows that "
        "it has not reached by then are left to it.",
    )
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="Log format; auto is console on a terminal, else JSON."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level that is logged."
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        # Python takes True for 1.
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and kind in (int, int | None):
            raise ValueError(f"{str(value).lower()} is not a number")
        return value

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", value):
            raise ValueError(
                f"{value!r} cannot be part of a topic's name; letters, digits, '.', '_' and '-' "
                "can, 64 at most, a letter or digit first"
            )
        return value

    @field_validator("cloudevents_source")
    @classmethod
    def _check_source(cls, value: str) -> str:
        if not re.fullmatch(r"[!-~]+", value):
            raise ValueError(f"{value!r} is not a URI reference; write it without spaces, in ASCII")
        return value

    @field_validator("database_url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        if not value:
            return value
        try:
            url = make_url(value)
        except (ArgumentError, ValueError):
            raise ValueError(
                "is not a SQLAlchemy URL; write mysql+pymysql://user@host:3306/schema"
            ) from None
        if url.get_backend_name() not in ("mysql", "mariadb"):
            raise ValueError(
                f"names {url.get_backend_name()!r}; only mysql and mariadb are relayed"
            )
        if "@" in (url.host or "") or "@" in (url.database or ""):
            raise ValueError("has an @ or / in its password: percent-encode it (%40, %2F)")
        if not url.database:
            raise ValueError("names no schema; end it with /schema")
        return value

    @field_validator("kafka", mode="before")
    @classmethod
    def _check_kafka(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        rendered: dict[str, str] = {}
        for key, item in value.items():
            if key in REFUSED_KAFKA_PROPERTIES:
                raise ValueError(f"{key} cannot be set: {REFUSED_KAFKA_PROPERTIES[key]}")
            if isinstance(item, Mapping):
                raise ValueError(f'{key} is a table; quote dotted names: "{key}.…" = …')
            rendered[str(key)] = str(item).lower() if isinstance(item, bool) else str(item)
        return rendered

    @field_validator("alerts", mode="before")
    @classmethod
    def _check_alerts(cls, value: object) -> object:
        # A target may hold commas; the next one begins with its scheme.
        if isinstance(value, str):
            return [one for one in re.split(r"[\s,]+(?=[A-Za-z0-9+.-]+://)", value.strip()) if one]
        return value

    @field_validator("replicas", mode="before")
    @classmethod
    def _check_replicas(cls, value: object) -> object:
        addresses = value.replace(",", " ").split() if isinstance(value, str) else value
        for address in addresses if isinstance(addresses, (list, tuple)) else ():
            if not re.fullmatch(r"[A-Za-z0-9._-]+(:\d{1,5})?", str(address)):
                raise ValueError("is not host:port,host:port; user and password are database_url's")
        return addresses

    @field_validator("shards", mode="before")
    @classmethod
    def _check_shards(cls, value: object) -> object:
        if str(value).strip() not in ("1", "1.0"):
            raise ValueError(f"{value!r}: this version has one shard for each name; leave it at 1")
        return value

    @field_validator("table")
    @classmethod
    def _check_table(cls, value: str) -> str:
        return table_name(value)

    @field_validator("routes", mode="before")
    @classmethod
    def _check_routes(cls, value: object) -> object:
        if isinstance(value, str):
            try:
                value = json.loads(value) if value.strip() else ()
            except ValueError:
                raise ValueError(
                    'is not JSON; write [{"match": "…", "topic": "…", "column": "…"}]'
                ) from None
        if not isinstance(value, (list, tuple)):
            raise ValueError("is not a list; write [[routes]] with match, topic and column")
        return tuple(one if isinstance(one, Route) else Route.parse(one) for one in value)

    @field_validator("extra_columns", mode="before")
    @classmethod
    def _check_extra_columns(cls, value: object) -> object:
        if isinstance(value, str):
            value = [one for one in value.split(",") if one.strip()]
        if not isinstance(value, (list, tuple)):
            raise ValueError('is not a list; write ["column:header", …]')
        return tuple(
            one if isinstance(one, ExtraColumn) else ExtraColumn.parse(one) for one in value
        )

    @field_validator("columns", mode="before")
    @classmethod
    def _check_columns(cls, value: object) -> object:
        return outbox_columns.parse(value)

    @field_validator("http")
    @classmethod
    def _check_http(cls, value: str) -> str:
        _address(value)
        return value

    @field_validator("topic")
    @classmethod
    def _check_topic(cls, value: str) -> str:
        check_template(value)
        return value

    @model_validator(mode="after")
    def _check_routing(self) -> Self:
        self.routing()
        check_extra_columns(self.extra_columns, self.format)
        return self

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if self.read_timeout <= self.heartbeat:
            raise ValueError(
                "read_timeout must be longer than heartbeat, or a quiet server looks dead"
            )
        return self

    def url(self) -> URL:
        """The database URL with the driver that all of ours use and the password filled in."""
        url = make_url(self.database_url).set(drivername="mysql+pymysql")
        if self.database_password_file is not None:
            url = url.set(password=self._secret("database_password_file"))
        return url

    def kafka_password(self) -> dict[str, str]:
        """The librdkafka property of ``kafka_password_file``, read anew; empty without one."""
        if self.kafka_password_file is None:
            return {}
        return {"sasl.password": self._secret("kafka_password_file")}

    def _secret(self, field: str) -> str:
        """What the file of that setting holds, without the end of its line."""
        file: Path = getattr(self, field)
        try:
            found = file.read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise ConfigError(f"{field}: cannot read {file}: {reason}") from None
        if not found:
            raise ConfigError(f"{field}: {file} is empty")
        return found

    def http_address(self) -> tuple[str, int] | None:
        """Host and port to serve HTTP on; None where nothing is served."""
        return _address(self.http)

    def page_token(self) -> str:
        """The token that the page asks for; empty where there is none."""
        token = self.http_token
        if self.http_token_file is not None:
            token = self._secret("http_token_file").strip()
        if token and len(token) < _SHORTEST_TOKEN:
            raise ConfigError(
                f"http_token has {len(token)} characters: it takes {_SHORTEST_TOKEN} at least "
                "(openssl rand -hex 16 makes one)"
            )
        return token

    def silence(self) -> float:
        """Seconds of silence that turn /healthz red."""
        return self.health_timeout or self.read_timeout + self.heartbeat

    def routing(self) -> Routing:
        """Where records go, and what they carry besides."""
        return Routing(
            self.topic,
            self.routes,
            self.topic_column,
            self.partition_column,
            self.extra_columns,
            outbox_columns.Columns(self.columns),
        )

    def router(
        self, payload_kind: PayloadKind, extra: Mapping[str, ValueKind] | None = None
    ) -> Router:
        """The router of rows whose payload and extra columns are of these kinds."""
        routing = self.routing()
        if not self.partition_column and not self.extra_columns:
            return Router(routing, payload_kind, self.format, self.cloudevents_source)
        return ShapedRouter(
            routing, payload_kind, self.format, self.cloudevents_source, extra or {}
        )

    def schema_and_table(self) -> tuple[str, str]:
        """Schema and table; the schema is the URL's where ``table`` names none."""
        schema, _, table = self.table.rpartition(".")
        return schema or str(make_url(self.database_url).database), table

    def alert_targets(self) -> tuple[str, ...]:
        """The targets of ``alerts`` and ``alerts_file``."""
        if self.alerts_file is None:
            return self.alerts
        try:
            lines = self.alerts_file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"alerts_file: cannot read {self.alerts_file}: {reason}") from None
        written = [line.strip() for line in lines]
        return (*self.alerts, *(one for one in written if one and not one.startswith("#")))

    def require_alerts(self) -> None:
        """Raise ``ConfigError`` where there is no alert target."""
        if not self.alert_targets():
            raise ConfigError(
                f"no alert target: write alerts or alerts_file into the file given by --config, or "
                f"set {ENV_PREFIX}ALERTS or {ENV_PREFIX}ALERTS_FILE"
            )

    def require(self, *fields: str) -> None:
        """Raise ``ConfigError`` for the first of ``fields`` that is empty, saying how to set it."""
        for field in fields:
            if not getattr(self, field):
                flag = field.replace("_", "-")
                raise ConfigError(
                    f"{field} is not set: pass --{flag}, set {ENV_PREFIX}{field.upper()} or write "
                    f"it into the file given by --config"
                )


def table_name(value: str) -> str:
    """Return ``value`` where it may name a table, ``table`` or ``schema.table``; else raise
    ``ValueError``."""
    parts = value.split(".")
    if len(parts) > 2 or not all(re.fullmatch(r"[^`\0/\\]{1,64}", part) for part in parts):
        raise ValueError(f"{value!r} is not a table name; write table or schema.table")
    return value


def load(
    path: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Settings:
    """Read the three layers and return the settings, or raise ``ConfigError``.

    ``flags`` holds what was given on the command line; values that are None were not given.
    """
    merged: dict[str, Any] = {}
    where: dict[str, str] = {}

    def put(key: str, value: object, origin: str) -> None:
        if key == "kafka" and isinstance(value, Mapping):
            value = {**merged.get("kafka", {}), **value}
        merged[key] = value
        where[key] = origin

    if path is not None:
        for key, value in _read_file(path).items():
            put(key, value, str(path))
    for key, value in sorted((os.environ if environ is None else environ).items()):
        if key.startswith(ENV_PREFIX):
            _put_variable(key, value, put)
    for key, value in (flags or {}).items():
        if value is not None:
            put(key, value, "--" + key.replace("_", "-"))
    for key in merged:
        if key not in Settings.model_fields:
            raise ConfigError(f"{where[key]}: unknown key {key!r}{_nearest(key)}")
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = str(first["loc"][0]) if first["loc"] else ""
        message = first["msg"].removeprefix("Value error, ")
        prefix = f"{where[field]}: {field}: " if field in where else ""
        raise ConfigError(prefix + message) from None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


# Variables of ours with the prefix that are not settings: the development servers print them.
_NOT_SETTINGS: Final = ("CDC_RELAY_TEST_", "CDC_RELAY_DEV_")
# Kubernetes' own, in each pod that has not set enableServiceLinks: false, for a Service that is
# named cdc-relay or begins with it (its documentation, "Accessing the Service", and the variables
# of Docker links): CDC_RELAY_SERVICE_HOST, CDC_RELAY_HTTP_PORT_8080_TCP_ADDR and the like.
_SERVICE_LINK: Final = re.compile(
    r"CDC_RELAY_(\w+_)?("
    r"SERVICE_(HOST|PORT(_\w+)?)=.*"
    r"|PORT(_\d+_(TCP|UDP|SCTP))?=(tcp|udp|sctp)://.*"
    r"|PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)=.*)"
)


def _put_variable(key: str, value: str, put: Any) -> None:
    field = key.removeprefix(ENV_PREFIX).lower()
    if key.startswith(_NOT_SETTINGS) or key in ("CDC_RELAY_CONFIG", "CDC_RELAY_PURE"):
        return
    if field in Settings.model_fields and field != "kafka":
        put(field, value, key)
    elif _SERVICE_LINK.fullmatch(f"{key}={value}"):
        return
    elif key.startswith(_KAFKA_ENV_PREFIX):
        prop = key.removeprefix(_KAFKA_ENV_PREFIX).lower().replace("_", ".")
        put("kafka", {_KAFKA_UNDERSCORED.get(prop, prop): value}, key)
    else:
        raise ConfigError(f"{key}: unknown variable{_nearest(field, ENV_PREFIX)}")


def _nearest(key: str, prefix: str = "") -> str:
    close = difflib.get_close_matches(key, Settings.model_fields, n=1, cutoff=0.5)
    if not close:
        return ""
    name = prefix + close[0].upper() if prefix else close[0]
    return f"; did you mean {name}?"
