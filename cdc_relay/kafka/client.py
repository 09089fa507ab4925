"""What every Kafka client of ours has in common: configuration, logging, error texts."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from confluent_kafka import KafkaError, KafkaException

from cdc_relay.config import Settings
from cdc_relay.errors import ConfigError, SinkError, SinkUnavailableError

_REPEAT_S: Final = 30.0
_T = TypeVar("_T")


class Repeats:
    """Lets a line of the client library through once in 30 s: it repeats each failure with every
    try, many times a second where a name does not resolve."""

    def __init__(self) -> None:
        self._said: dict[str, float] = {}

    def __call__(self, line: logging.LogRecord) -> bool:
        now = time.monotonic()
        words = re.sub(r"\(after [^)]*\)", "", line.getMessage())
        if now - self._said.get(words, -_REPEAT_S) < _REPEAT_S:
            return False
        self._said = {text: when for text, when in self._said.items() if now - when < _REPEAT_S}
        self._said[words] = now
        return True


# librdkafka's own lines go through the standard library's logging, so that they look like ours.
_logger = logging.getLogger("librdkafka")
_logger.addFilter(Repeats())
# What a refused batch and every start of a producer say about the property by which none is
# overtaken (sink.py): nothing that an operator could act on.
_logger.addFilter(lambda line: re.search("enable.gapless|gap-less", line.getMessage()) is None)


# What Python calls librdkafka's levels, those of syslog: 0 is an emergency, 7 is debug.
_PYTHON_LEVELS: Final = (
    *(logging.CRITICAL,) * 3,
    logging.ERROR,
    logging.WARNING,
    *(logging.INFO,) * 2,
    logging.DEBUG,
)
# That of the line which tells of a closed connection.
_NOTICING_LEVEL: Final = 6


def noticing(settings: Settings, lost: Callable[[], None]) -> dict[str, Any]:
    """The properties of a client that notices when a broker closes a connection that is not idle:
    ``lost`` is called then, in the thread that polls. The ``error_cb`` is told of failed connects
    only; where nothing is sent, there is none.

    It rests on a line of the client's log, which is written whatever the user's ``log_level`` and
    ``log.connection.close`` are; what is shown is what these say.
    """
    given = settings.kafka.get("log_level", "")
    level = int(given) if given in tuple("01234567") else _NOTICING_LEVEL
    shown = logging.DEBUG if settings.kafka.get("debug") else _PYTHON_LEVELS[level]
    closes = settings.kafka.get("log.connection.close") == "true"

    def notice(line: logging.LogRecord) -> bool:
        if "Disconnected: " in line.getMessage():
            lost()
            if not closes:
                return False
        least = max(shown, _logger.getEffectiveLevel())
        return line.levelno >= least and bool(_logger.filter(line))

    logger = logging.Logger("librdkafka", logging.DEBUG)
    logger.parent = _logger
    logger.addFilter(notice)
    return {
        "logger": logger,
        "log.connection.close": True,
        "log_level": max(level, _NOTICING_LEVEL),
    }


def base_config(settings: Settings, client_id: str) -> dict[str, Any]:
    """Return the properties that all clients share, the user's passed-through ones included."""
    settings.require("kafka_bootstrap")
    return {
        "client.id": client_id,
        "logger": _logger,
        "log.connection.close": False,
        # librdkafka's own are 60 s until a dumb connection is noticed and 10 s until the next try.
        "socket.timeout.ms": int(min(10.0, settings.transaction_timeout) * 1000),
        "reconnect.backoff.max.ms": 1000,
        **settings.kafka,
        **settings.kafka_password(),
        "bootstrap.servers": settings.kafka_bootstrap,
    }


def topic_reader_config(settings: Settings, client_id: str, isolation: str) -> dict[str, Any]:
    """Return the properties of a consumer that reads a few records of a partition by hand: the
    group is never joined, no offset is committed, no topic is made. The end is told by an event."""
    return {
        # The end is told by an empty answer: wait for one no longer than this.
        "fetch.wait.max.ms": 10,
        **base_config(settings, client_id),
        "group.id": f"cdc-relay.{settings.name}.reader",
        "enable.auto.commit": False,
        "isolation.level": isolation,
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",
        "allow.auto.create.topics": False,
    }


def create(kind: Any, config: dict[str, Any]) -> Any:
    """Construct a client. librdkafka judges properties here: a wrong one is the user's to mend."""
    try:
        return kind(config)
    except (KafkaException, ValueError, TypeError) as error:
        raise ConfigError(f"kafka: {text(error)}") from None


def served(call: Callable[[], _T]) -> _T:
    """Make a call in which the client library hands out reports, and raise its own error.

    A fatal error is pending in its C code while that goes on and calls us with the next report;
    Python makes a ``SystemError`` of it then, and that report is cut short.
    """
    try:
        return call()
    except SystemError as error:
        own: BaseException | None = error
        while own is not None and not isinstance(own, KafkaException):
            own = own.__cause__
        raise own or error from None


_FINAL: Final = frozenset(
    (
        KafkaError._AUTHENTICATION,
        KafkaError._SSL,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.INVALID_SESSION_TIMEOUT,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.UNSUPPORTED_VERSION,
        KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    )
)


# What a client says of a topic that is not there, or that it does not know yet.
UNKNOWN_TOPIC: Final = frozenset((KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC))
# No answer at all, or none in the time that the call was given.
SILENT: Final = (
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
)


def final(error: KafkaError) -> bool:
    """Whether asking again cannot mend what the brokers or the client said: a wrong set-up. All
    else may pass, a leader that changes or a broker that has just started; the client's own
    ``retriable()`` says so of what belongs to transactions only.
    """
    return error.code() in _FINAL or error.fatal()


class Complaints:
    """The ``error_cb`` of a client whose calls only time out where a login or a name is wrong:
    remembers what was wrong."""

    def __init__(self) -> None:
        self._last: KafkaError | None = None

    def __call__(self, error: KafkaError) -> None:
        if error.code() in _FINAL or error.code() == KafkaError._RESOLVE:
            self._last = error

    def behind(self, error: KafkaException, client: Any) -> KafkaError:
        """Why a call failed: what the client has said by now, or the error itself."""
        client.poll(0)  # hands out what it has to say
        own: KafkaError = error.args[0]
        return self._last if self._last is not None and own.code() in SILENT else own


def sink_error(error: KafkaError | KafkaException, settings: Settings, doing: str) -> SinkError:
    """Return the error of ours for a failure that is not a record's: a wrong set-up, which trying
    again cannot mend, or brokers that do not answer now."""
    inner = error.args[0] if isinstance(error, KafkaException) else error
    silent = " does not answer" if inner.code() in SILENT else ""
    if inner.code() == KafkaError.INVALID_SESSION_TIMEOUT:
        return SinkError(
            f"session_timeout: Kafka at {settings.kafka_bootstrap} refuses "
            f"{settings.session_timeout:g} s: it is outside of the brokers' "
            "group.min.session.timeout.ms and group.max.session.timeout.ms (by default 6 s and "
            "30 min)"
        )
    if inner.code() == KafkaError.INVALID_TRANSACTION_TIMEOUT:
        return SinkError(
            f"transaction_timeout: Kafka at {settings.kafka_bootstrap} refuses "
            f"{settings.transaction_timeout:g} s: it is more than the brokers' "
            "transaction.max.timeout.ms"
        )
    line = f"Kafka at {settings.kafka_bootstrap}{silent}: {doing}: {text(error)}"
    if final(inner):
        return SinkError(line)
    return SinkUnavailableError(line)


def text(error: BaseException | KafkaError) -> str:
    """One line for an error of the client library."""
    inner = error.args[0] if isinstance(error, KafkaException) and error.args else error
    if isinstance(inner, KafkaError):
        return f"{inner.str()} ({inner.name()})"
    return str(inner)
