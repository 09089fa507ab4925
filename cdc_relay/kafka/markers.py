"""End markers that the brokers forgot: a transaction that is decided and stays open in a partition.

A transaction is committed when its coordinator has noted it; then the coordinator writes a marker
into each partition. Kafka 4 leaves out every partition that has no leader at that moment (4.3.1:
its look-up of a leader answers the same for "none now" and for "no such partition", and what is
deleted needs no marker), and calls the transaction complete. So it goes when a lone broker is
killed between the two, or when all replicas of a partition are away. A ``read_committed`` reader is
given nothing behind it then, and it ends as the next transaction of the same producer ends there.

Therefore, before a predecessor is fenced, which makes the coordinator forget how its last
transaction was decided, what is still open in our partitions is ended as was decided: by a
transaction of the same producer, without records, in those partitions. The client library has no
call for that; ``kafka-python`` sends the requests (KIP-98; to ask how it was decided: KIP-664).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import closing
from typing import Any, Final, NamedTuple, TypeVar

import structlog
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from cdc_relay.config import Settings
from cdc_relay.errors import SinkUnavailableError
from cdc_relay.kafka.client import UNKNOWN_TOPIC, base_config, create, final, sink_error, text
from cdc_relay.kafka.sink import FencedError
from cdc_relay.router import Record

log: Any = structlog.get_logger(__name__)

_TOPICS: Final = "topics"
# Two producers take turns, so at most the last two transactions are open. Each takes two offsets of
# the checkpoints' partition, and there may be aborted ones among them.
_LOOK_BACK: Final = 16
_ANSWER_S: Final = 5.0
_NOT_THERE: Final = UNKNOWN_TOPIC | {KafkaError.TOPIC_AUTHORIZATION_FAILED}
_LOOK_S: Final = 1.0
_PAUSE_S: Final = 0.1
# Of which the topics are remembered: the last of each producer, and some that were given up.
_TRANSACTIONS: Final = 8
# The markers of a transaction are written within milliseconds of its commit.
_FORGOTTEN_S: Final = 1.0
_T = TypeVar("_T")


class Place(NamedTuple):
    """A partition."""

    topic: str
    partition: int


class Writer(NamedTuple):
    """Who wrote what may be open."""

    transactional_ids: Sequence[str]
    checkpoints: Place
    group: str
    """Whose offset was in its transactions; empty where none was."""


class Partitions:
    """What the brokers say of partitions. One thread."""

    def __init__(self, settings: Settings, timeout: float) -> None:
        """``timeout``: of one answer, in seconds."""
        self._timeout = timeout
        self._admin: Any = create(
            AdminClient, base_config(settings, f"cdc-relay-{settings.name}-markers")
        )

    def of(self, topics: Iterable[str]) -> list[Place]:
        """The partitions of ``topics``, as far as they are there. Raises ``KafkaException``."""
        asked = sorted(set(topics))
        # Not by their metadata: asking for those creates a topic, where brokers do so.
        answers = self._admin.describe_topics(TopicCollection(asked), request_timeout=self._timeout)
        found = []
        for topic in asked:
            try:
                known = self._answer(answers[topic]).partitions
            except KafkaException as error:
                if error.args[0].code() not in _NOT_THERE:
                    raise
            else:
                found += [Place(topic, one.id) for one in known]
        return found

    def open(self, places: Iterable[Place]) -> list[Place]:
        """Those in which a transaction, of whomever, has not ended. Raises ``KafkaException``
        where one does not answer now."""
        visible = self._ends(places, IsolationLevel.READ_COMMITTED)
        ends = self._ends(visible, IsolationLevel.READ_UNCOMMITTED)
        return [place for place, end in ends.items() if visible[place] < end]

    def _ends(self, places: Iterable[Place], isolation: Any) -> dict[Place, int]:
        latest: Any = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        asked = {TopicPartition(*place): latest for place in places}
        if not asked:
            return {}
        answers = self._admin.list_offsets(
            asked, isolation_level=isolation, request_timeout=self._timeout
        )
        return {
            Place(where.topic, where.partition): self._answer(answer).offset
            for where, answer in answers.items()
        }

    def end(self, place: Place) -> int:
        """The offset behind the last record. Raises ``KafkaException``."""
        return self._ends([place], IsolationLevel.READ_UNCOMMITTED)[place]

    def _answer(self, future: Any) -> Any:
        try:
            return future.result(self._timeout + 1)
        except TimeoutError:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer")) from None


class Ends:
    """Whether the last transactions of a writer have ended in every partition, asked when a broker
    was away. One thread."""

    def __init__(self, settings: Settings, writer: Writer, losses: Callable[[], int]) -> None:
        """``losses``: how often a broker was found to be away, so far."""
        self._settings = settings
        self._writer = writer
        self._losses = losses
        self._seen = losses()
        self._wrote: deque[Set[str]] = deque(maxlen=_TRANSACTIONS)
        self._partitions: Partitions | None = None
        self._open_since: float | None = None

    def wrote(self, topics: Set[str]) -> None:
        """A transaction goes to ``topics``."""
        self._wrote.append(topics)

    def named(self, checkpoint: Record) -> Record:
        """The transaction's checkpoint, with a header that names its topics."""
        return checkpoint._replace(
            headers=[*checkpoint.headers, (_TOPICS, ",".join(sorted(self._wrote[-1])).encode())]
        )

    def settled(self) -> bool:
        """Whether all have ended, or no broker was away; False: not known now, ask again.

        Raises ``FencedError`` where one does not end: the next one in that partition would end it
        its own way, so it is for the next term to write what is missing.
        """
        losses = self._losses()
        if losses == self._seen:
            return True
        try:
            if self._partitions is None:
                self._partitions = Partitions(self._settings, _LOOK_S)
            topics: Set[str] = set().union(*self._wrote)
            found = self._partitions.open([self._writer.checkpoints, *self._partitions.of(topics)])
        except KafkaException as error:
            if not final(error.args[0]):
                return False
            log.warning("cannot look for open transactions", reason=text(error))
            found = []
        if not found:
            self._seen, self._open_since, self._partitions = losses, None, None
            return True
        now = time.monotonic()
        if self._open_since is None:
            self._open_since = now
        if now - self._open_since > _FORGOTTEN_S:
            raise FencedError(
                f"a broker was away, and a transaction does not end in {found[0].topic}, "
                f"partition {found[0].partition}"
            )
        return False


def write_forgotten(settings: Settings, writer: Writer, going_on: Callable[[], bool]) -> None:
    """End what the brokers have left open of the last transactions of ``writer``, as it was
    decided, and abort one that is not decided. To be called before its producers are taken over.

    Waits for the brokers while ``going_on``, not for ever: raises ``SinkUnavailableError``. Where
    only the coordinator cannot be asked (no grant, an older broker, a login that ``kafka-python``
    does not know), it says so and leaves things as they are.
    """
    give_up_at = time.monotonic() + settings.transaction_timeout
    while True:
        try:
            partitions = Partitions(settings, _ANSWER_S)
            if writer.checkpoints not in partitions.of([writer.checkpoints.topic]):
                return
            end = partitions.end(writer.checkpoints)
            topics = _last_topics(settings, writer.checkpoints, end)
            places = [writer.checkpoints, *partitions.of(topics)]
            if not partitions.open(places):
                return
            break
        except KafkaException as error:
            if final(error.args[0]) or not going_on() or time.monotonic() > give_up_at:
                raise sink_error(error, settings, "cannot look for open transactions") from None
            time.sleep(_PAUSE_S)
    log.info("a transaction is open: asking how the last ones were decided")
    try:
        _write(settings, writer, partitions, places, going_on)
    except KafkaException as error:
        raise sink_error(error, settings, "cannot look for open transactions") from None
    except _CannotAskError as error:
        log.warning(
            "cannot ask how the last transaction was decided: if a broker has left it open, "
            "readers wait behind it",
            reason=str(error),
        )


def _write(
    settings: Settings,
    writer: Writer,
    partitions: Partitions,
    places: Sequence[Place],
    going_on: Callable[[], bool],
) -> None:
    with closing(_Coordinator(settings, going_on)) as coordinator:
        decisions = {one: coordinator.decision(one) for one in writer.transactional_ids}
        for transactional_id, committed in decisions.items():
            found = partitions.open(places)
            if not found:
                return
            if committed is None:
                continue
            coordinator.end(transactional_id, committed, found, writer.group)
            if ended := set(found) - set(partitions.open(found)):
                log.warning(
                    "a transaction that the brokers had left open is ended as it was decided",
                    transactional_id=transactional_id,
                    committed=committed,
                    partitions=[f"{place.topic}/{place.partition}" for place in sorted(ended)],
                )


def _last_topics(settings: Settings, where: Place, end: int) -> Set[str]:
    """The topics that the last checkpoints before offset ``end`` name, committed or not."""
    topics: set[str] = set()
    if end == 0:
        return topics
    consumer: Any = create(
        Consumer,
        {
            **base_config(settings, f"cdc-relay-{settings.name}-markers"),
            "group.id": f"cdc-relay.{settings.name}.reader",
            "enable.auto.commit": False,
            "isolation.level": "read_uncommitted",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
            "auto.offset.reset": "earliest",
            "allow.auto.create.topics": False,
        },
    )
    try:
        start = max(0, end - _LOOK_BACK)
        consumer.assign([TopicPartition(*where, start or OFFSET_BEGINNING)])
        deadline = time.monotonic() + _ANSWER_S
        while True:
            message = consumer.poll(max(0.0, deadline - time.monotonic()))
            if message is None:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer"))
            said = message.error()
            if said is None:
                for name, value in message.headers() or ():
                    if name == _TOPICS and value:
                        topics.update(value.decode().split(","))
            elif said.code() == KafkaError._PARTITION_EOF:
                return topics
            elif final(said):
                raise KafkaException(said)
    finally:
        consumer.close()


class _CannotAskError(Exception):
    """The coordinator cannot be asked in this way."""


class _Coordinator:
    """Asks the coordinators of transactional ids. Calls wait for them while ``going_on``, not for
    ever. Close it at the end."""

    def __init__(self, settings: Settings, going_on: Callable[[], bool]) -> None:
        self._config = _client_config(settings)
        self._timeout = settings.transaction_timeout
        self._going_on = going_on
        self._client: Any = None

    def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def decision(self, transactional_id: str) -> bool | None:
        """How the last transaction was decided: True, it is committed. None where there is none:
        one that was under way is aborted here. Waits until the coordinator has finished."""
        from kafka.admin import TransactionState as State
        from kafka.errors import ConcurrentTransactionsError, TransactionalIdNotFoundError

        def decided() -> bool | None:
            try:
                state = self._describe(transactional_id).state
            except TransactionalIdNotFoundError:
                return None
            if state in (State.COMPLETE_COMMIT, State.COMPLETE_ABORT):
                return bool(state == State.COMPLETE_COMMIT)
            if state in (State.PREPARE_COMMIT, State.PREPARE_ABORT):
                raise ConcurrentTransactionsError
            if state in (State.ONGOING, State.PREPARE_EPOCH_FENCE):
                self._take_over(transactional_id)
            return None

        return self._insist(decided)

    def end(
        self, transactional_id: str, committed: bool, places: Sequence[Place], group: str
    ) -> None:
        """End what is open of its producer in ``places``, and of its offset of ``group``."""
        from kafka.protocol.producer import (
            AddOffsetsToTxnRequest,
            AddPartitionsToTxnRequest,
            EndTxnRequest,
        )

        producer_id, epoch = self._insist(lambda: self._take_over(transactional_id))
        ours = {
            "transactional_id": transactional_id,
            "producer_id": producer_id,
            "producer_epoch": epoch,
        }
        # The versions before transaction.version 2, in which a producer may add partitions without
        # writing to them.
        to_topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
        add = AddPartitionsToTxnRequest(
            **{f"v3_and_below_{name}": value for name, value in ours.items()},
            v3_and_below_topics=[
                to_topic(
                    name=topic, partitions=[at.partition for at in places if at.topic == topic]
                )
                for topic in sorted({place.topic for place in places})
            ],
            max_version=3,
        )

        def add_partitions() -> None:
            answer = self._send(transactional_id, add)
            for topic in answer.results_by_topic_v3_and_below:
                for partition in topic.results_by_partition:
                    _check(partition.partition_error_code)

        self._insist(add_partitions)
        if group:
            offsets = AddOffsetsToTxnRequest(**ours, group_id=group, max_version=3)
            self._insist(lambda: _check(self._send(transactional_id, offsets).error_code))
        end = EndTxnRequest(**ours, committed=committed, max_version=4)
        self._insist(lambda: _check(self._send(transactional_id, end).error_code))
        self.decision(transactional_id)  # until the markers are written

    def _take_over(self, transactional_id: str) -> tuple[int, int]:
        """The producer's id and its new epoch; a transaction under way is aborted by this."""
        from kafka.protocol.producer import InitProducerIdRequest

        request = InitProducerIdRequest(
            transactional_id=transactional_id,
            transaction_timeout_ms=int(self._timeout * 1000),
            producer_id=-1,
            producer_epoch=-1,
            max_version=4,
        )
        answer = self._send(transactional_id, request)
        _check(answer.error_code)
        return answer.producer_id, answer.producer_epoch

    def _describe(self, transactional_id: str) -> Any:
        return self._client.describe_transactions([transactional_id])[transactional_id]

    def _send(self, transactional_id: str, request: Any) -> Any:
        # The client has calls to ask a coordinator, and none to send it these requests.
        node, manager = self._describe(transactional_id).coordinator_id, self._client._manager

        async def sent() -> Any:
            return await manager.send(request, node_id=node)

        return manager.run(sent)

    def _insist(self, step: Callable[[], _T]) -> _T:
        """Again while the failure is one that passes, each time with a new client: one remembers
        where a coordinator was."""
        from kafka.admin import KafkaAdminClient
        from kafka.errors import ConcurrentTransactionsError, KafkaError

        give_up_at = time.monotonic() + self._timeout
        while True:
            try:
                if self._client is None:
                    self._client = KafkaAdminClient(**self._config)
                return step()
            except KafkaError as error:
                busy = isinstance(error, ConcurrentTransactionsError)
                if not busy:
                    self.close()
                if not self._going_on():
                    raise SinkUnavailableError(
                        "stopped while an open transaction is ended"
                    ) from None
                if not error.retriable or time.monotonic() > give_up_at:
                    if busy:
                        raise SinkUnavailableError(
                            "Kafka: the coordinator does not come to an end with a transaction"
                        ) from None
                    raise _CannotAskError(str(error)) from None
            time.sleep(_PAUSE_S)


def _check(code: int) -> None:
    from kafka.errors import for_code

    kind = for_code(code)
    if code != 0:
        raise kind


_CHECKS_HOSTNAME: Final = "ssl.endpoint.identification.algorithm"
_SAME: Final = {
    "security.protocol": "security_protocol",
    "ssl.ca.location": "ssl_cafile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.key.location": "ssl_keyfile",
    "ssl.key.password": "ssl_password",
    "ssl.crl.location": "ssl_crlfile",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
}


def _client_config(settings: Settings) -> dict[str, Any]:
    """``kafka-python``'s properties for the same brokers and login. What it does not know (tokens,
    certificates that are no files) it will say."""
    ours = base_config(settings, f"cdc-relay-{settings.name}-markers")
    config = {theirs: ours[name] for name, theirs in _SAME.items() if name in ours}
    if "security_protocol" in config:
        config["security_protocol"] = str(config["security_protocol"]).upper()
    if str(ours.get(_CHECKS_HOSTNAME, "https")).lower() == "none":
        config["ssl_check_hostname"] = False
    return {
        **config,
        "bootstrap_servers": settings.kafka_bootstrap.split(","),
        "client_id": ours["client.id"],
        "request_timeout_ms": int(_ANSWER_S * 1000),
        "bootstrap_timeout_ms": int(_ANSWER_S * 1000),
    }
