"""End markers that the brokers forgot: a transaction that is decided and stays open in a partition.

A transaction is committed when its coordinator has noted it; then the coordinator writes a marker
into each partition. Kafka 4 leaves out every partition that has no leader at that moment
(KAFKA-20734; seen with 4.3.1), and calls the transaction complete. So it goes when a lone broker is
killed between the two, or when all replicas of a partition are away. A ``read_committed`` reader is
given nothing behind it then, and it ends as the next transaction of the same producer ends there.

Therefore, before a predecessor is taken over, which makes the coordinator forget how its last
transaction was decided, what is still open in our partitions is ended as was decided: by a
transaction of the same producer, without records, in those partitions. The client library has no
call for that; ``kafka-python`` sends the requests (KIP-98; to ask how it was decided: KIP-664).

That can be cut short as well. So whoever takes over to end something notes the decision where the
coordinator keeps it: in the last digit of the transaction's timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import closing, suppress
from typing import Any, Final, NamedTuple, TypeVar

import structlog
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from cdc_relay.config import Settings
from cdc_relay.errors import SinkUnavailableError
from cdc_relay.kafka.calls import Calls
from cdc_relay.kafka.client import base_config, create, final, sink_error, text
from cdc_relay.kafka.unfinished import LEADERLESS_S, Look, Partitions, Place, Written, leave

log: Any = structlog.get_logger(__name__)

# Two producers take turns, and each transaction takes two offsets of the checkpoints' partition.
_LOOK_BACK: Final = 16
_ANSWER_S: Final = 5.0
_CALL_S: Final = 15.0
_PAUSE_S: Final = 0.1
_MISSING_S: Final = 0.5
_DOING: Final = "cannot look for open transactions"
# Of a transaction that only ends something: long, so that the coordinator does not abort it when
# its maker is killed. A cluster may allow less (transaction.max.timeout.ms, by default 900,000).
_LONG_MS: Final = 600_000
_DIGITS: Final = {True: 1, False: 2}
_T = TypeVar("_T")


def timeout_ms(settings: Settings) -> int:
    """The timeout of ordinary transactions: its last digit notes nothing."""
    return int(settings.transaction_timeout * 100) * 10


class Writer(NamedTuple):
    """Who wrote what may be open."""

    transactional_ids: Sequence[str]
    checkpoints: Place
    group: str
    """Whose offset was in its transactions; empty where none was."""


def write_forgotten(
    settings: Settings, writer: Writer, topics: Iterable[str], going_on: Callable[[], bool]
) -> Mapping[Place, int]:
    """End what the brokers have left open of the last transactions of ``writer``, as it was
    decided, and abort one that is not decided. To be called before its producers are taken over.

    Looks at ``topics`` and at those that the last checkpoints name. Waits for the brokers while
    ``going_on``, not for ever: raises ``SinkUnavailableError``. Where only the coordinator cannot
    be asked (no grant, an older broker, a login that ``kafka-python`` does not know), it says so
    and leaves things as they are. Returns what is still open, and up to which offset a reader
    sees: it is not ours.
    """
    partitions = Partitions(settings, _ANSWER_S)
    places, found = _places(settings, partitions, writer, set(topics), going_on)
    if not found:
        return {}
    log.info("a transaction is open: asking how the last ones were decided")
    ours = set(found)

    def still_open() -> Mapping[Place, int]:
        look = partitions.look(places)
        if away := look.silent & ours:
            # Who took over now would have what is noted forgotten.
            raise sink_error(_no_leader(min(away)), settings, _DOING)
        return look.open

    try:
        with closing(_Coordinator(settings, going_on)) as coordinator:
            decisions = {}
            for transactional_id in writer.transactional_ids:
                decisions[transactional_id], went_to = coordinator.decision(transactional_id)
                ours |= {place for place in went_to if not place.topic.startswith("__")}
            places |= ours
            for transactional_id, committed in decisions.items():
                found = still_open()
                if not found:
                    return {}
                if committed is not None:
                    coordinator.end(transactional_id, committed, sorted(found), writer.group)
                    _say(transactional_id, committed, found, still_open())
            return still_open()
    except _CannotAskError as error:
        found = still_open()
        log.warning(
            "cannot ask how the last transactions were decided: if a broker has left one open, "
            "readers wait behind it",
            reason=str(error),
            partitions=[str(place) for place in sorted(found)],
        )
        return found
    except KafkaException as error:
        raise sink_error(error, settings, _DOING) from None


def _say(
    transactional_id: str, committed: bool, before: Iterable[Place], after: Mapping[Place, int]
) -> None:
    if ended := set(before) - after.keys():
        log.warning(
            "a transaction that the brokers had left open is ended as it was decided",
            transactional_id=transactional_id,
            committed=committed,
            partitions=[str(place) for place in sorted(ended)],
        )


def _places(
    settings: Settings,
    partitions: Partitions,
    writer: Writer,
    topics: Set[str],
    going_on: Callable[[], bool],
) -> tuple[set[Place], Mapping[Place, int]]:
    """Where something may be open, as far as it answers, and where something is."""
    began, said = time.monotonic(), False
    while True:
        waited = time.monotonic() - began
        give_up = waited > settings.transaction_timeout
        try:
            places, look = _candidates(settings, partitions, writer, topics)
            if not places:
                # A pass may never have run; the relay's own topic was there a moment ago.
                if not writer.group or waited > _MISSING_S:
                    return places, {}
                reason = _no_leader(writer.checkpoints)
            elif not look.silent:
                return places, look.open
            else:
                reason = _no_leader(min(look.silent))
                if writer.checkpoints not in look.silent:
                    give_up = False
                    if waited > LEADERLESS_S:
                        leave(look.silent)
                        return places - look.silent, look.open
        except KafkaException as error:
            if final(error.args[0]):
                raise sink_error(error, settings, _DOING) from None
            reason = error
        if give_up or not going_on():
            raise sink_error(reason, settings, _DOING) from None
        if waited > 1.0 and not said:
            said = True
            log.warning("waiting for Kafka", reason=text(reason))
        time.sleep(_PAUSE_S)


def _candidates(
    settings: Settings, partitions: Partitions, writer: Writer, topics: Set[str]
) -> tuple[set[Place], Look]:
    """Where something may be open, and what is seen there; nothing where there are no
    checkpoints."""
    where = writer.checkpoints
    if where not in partitions.of([where.topic]):
        return set(), Look({}, frozenset())
    end = partitions.end(where)
    if end is None:
        raise _no_leader(where)
    places = {where, *partitions.of(topics | _last_topics(settings, where, end))}
    return places, partitions.look(places)


def _no_leader(place: Place) -> KafkaException:
    return KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE, f"no answer about {place}"))


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
                raise _no_leader(where)
            said = message.error()
            if said is None:
                topics |= Written.read(message.headers() or ())
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
    ever. Close it at the end.

    Raises ``_CannotAskError`` as long as nothing was taken over; from then on
    ``SinkUnavailableError``, because who went on would have it aborted.
    """

    def __init__(self, settings: Settings, going_on: Callable[[], bool]) -> None:
        self._config = _client_config(settings)
        self._timeout = settings.transaction_timeout
        self._timeout_ms = timeout_ms(settings)
        self._going_on = going_on
        self._calls = Calls("markers")
        self._client: Any = None
        self._reached = False
        self._took_over = False

    def close(self) -> None:
        """Close the connections."""
        self._close_client()
        self._calls.close()

    def _close_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def decision(self, transactional_id: str) -> tuple[bool | None, Set[Place]]:
        """How the last transaction was decided: True, it is committed; None where there is none.
        One that was under way is aborted here. Waits until the coordinator has finished.

        Also the partitions of a transaction that was not finished when it was asked.
        """
        from kafka.admin import TransactionState as State
        from kafka.errors import ConcurrentTransactionsError, TransactionalIdNotFoundError

        went_to: set[Place] = set()
        began_abort = False

        def decided() -> bool | None:
            nonlocal began_abort
            try:
                found = self._describe(transactional_id)
            except TransactionalIdNotFoundError:
                return None
            went_to.update(Place(one.topic, one.partition) for one in found.topic_partitions)
            noted = {1: True, 2: False}.get(found.transaction_timeout_ms % 10)
            if found.state == State.ONGOING and noted is not None and not began_abort:
                self._took_over = True  # as somebody else has
                self._end(transactional_id, found.producer_id, found.producer_epoch, noted)
                raise ConcurrentTransactionsError
            if found.state == State.ONGOING:
                began_abort = True
                self._take_over(transactional_id, False)
                return False
            if found.state in (State.EMPTY, State.DEAD):
                return noted
            if found.state in (State.COMPLETE_COMMIT, State.COMPLETE_ABORT):
                return noted if noted is not None else bool(found.state == State.COMPLETE_COMMIT)
            raise ConcurrentTransactionsError

        return self._insist(decided), went_to

    def end(
        self, transactional_id: str, committed: bool, places: Sequence[Place], group: str
    ) -> None:
        """End what is open of its producer in ``places``, and of its offset of ``group``."""
        before = self._insist(lambda: self._describe(transactional_id)).producer_id
        producer_id, epoch = self._insist(lambda: self._take_over(transactional_id, committed))
        if producer_id != before:  # after 32,000 epochs
            log.warning("the producer has a new id: what is open stays so", was=before)
            return
        ours = (transactional_id, producer_id, epoch)
        added = self._add(ours, places)
        if group:
            added |= self._add_group(ours, group)
        if not added:
            return  # there is no transaction then
        self._insist(lambda: self._end(*ours, committed))
        self.decision(transactional_id)  # until the markers are written

    def _add(self, ours: tuple[str, int, int], places: Sequence[Place]) -> bool:
        """Whether anything is in the transaction: it may be that we may not write there."""
        from kafka.errors import OperationNotAttemptedError, for_code
        from kafka.protocol.producer import AddPartitionsToTxnRequest as Request

        left = set(places)

        def added() -> bool:
            request = Request(
                v3_and_below_transactional_id=ours[0],
                v3_and_below_producer_id=ours[1],
                v3_and_below_producer_epoch=ours[2],
                v3_and_below_topics=[
                    Request.AddPartitionsToTxnTopic(
                        name=topic, partitions=[at.partition for at in left if at.topic == topic]
                    )
                    for topic in sorted({place.topic for place in left})
                ],
                # Before transaction.version 2: a producer may add what it does not write to.
                max_version=3,
            )
            all_in = True
            for topic in self._send(ours[0], request).results_by_topic_v3_and_below:
                for one in topic.results_by_partition:
                    if one.partition_error_code == 0:
                        continue
                    all_in, error = False, for_code(one.partition_error_code)
                    if error is OperationNotAttemptedError:
                        continue  # because of another one
                    if error.retriable or not issubclass(error, _refusals()):
                        raise error
                    place = Place(topic.name, one.partition_index)
                    log.warning("not ended", partition=str(place), reason=error.__name__)
                    left.discard(place)
            return all_in

        while left and not self._insist(added):
            pass
        return bool(left)

    def _add_group(self, ours: tuple[str, int, int], group: str) -> bool:
        from kafka.errors import GroupAuthorizationFailedError
        from kafka.protocol.producer import AddOffsetsToTxnRequest

        request = AddOffsetsToTxnRequest(
            transactional_id=ours[0],
            producer_id=ours[1],
            producer_epoch=ours[2],
            group_id=group,
            max_version=3,
        )

        def added() -> bool:
            try:
                _check(self._send(ours[0], request).error_code)
            except GroupAuthorizationFailedError:
                return False
            return True

        return self._insist(added)

    def _end(self, transactional_id: str, producer_id: int, epoch: int, committed: bool) -> None:
        from kafka.protocol.producer import EndTxnRequest

        request = EndTxnRequest(
            transactional_id=transactional_id,
            producer_id=producer_id,
            producer_epoch=epoch,
            committed=committed,
            max_version=4,
        )
        _check(self._send(transactional_id, request).error_code)

    def _take_over(self, transactional_id: str, committed: bool) -> tuple[int, int]:
        """The producer's id and its new epoch; a transaction under way is aborted by this. Notes
        how its last one was decided."""
        from kafka.errors import InvalidTransactionTimeoutError
        from kafka.protocol.producer import InitProducerIdRequest

        self._took_over = True
        for timeout in (_LONG_MS, self._timeout_ms, self._timeout_ms - 10):
            request = InitProducerIdRequest(
                transactional_id=transactional_id,
                transaction_timeout_ms=timeout + _DIGITS[committed],
                producer_id=-1,
                producer_epoch=-1,
                max_version=4,
            )
            answer = self._send(transactional_id, request)
            try:
                _check(answer.error_code)
            except InvalidTransactionTimeoutError:
                continue
            return answer.producer_id, answer.producer_epoch
        raise InvalidTransactionTimeoutError

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
        from kafka.errors import ConcurrentTransactionsError

        def connected() -> _T:
            if self._client is None:
                self._client = _client(self._config)
                self._reached = True
            return step()

        give_up_at = time.monotonic() + self._timeout
        while True:
            try:
                return self._bounded(connected)
            except SinkUnavailableError:
                raise
            except Exception as error:  # also what the library itself stumbles over
                passing = bool(getattr(error, "retriable", isinstance(error, TimeoutError)))
                busy = isinstance(error, ConcurrentTransactionsError)
                if not busy:
                    self._close_client()
                if not passing or time.monotonic() > give_up_at:
                    reason = f"{type(error).__name__}: {error}"
                    if self._took_over or (passing and self._reached):
                        raise SinkUnavailableError(
                            f"Kafka: a transaction does not come to its end: {reason}"
                        ) from None
                    raise _CannotAskError(reason) from None
            time.sleep(_PAUSE_S)

    def _bounded(self, call: Callable[[], _T]) -> _T:
        """A call that may hang: that library waits without end for a broker that accepts a
        connection and says nothing over TLS. Raises ``TimeoutError`` then."""
        overrun = time.monotonic() + _CALL_S

        def look() -> None:
            if not self._going_on():
                raise SinkUnavailableError("stopped while the end of a transaction is waited for")
            if time.monotonic() > overrun:
                raise TimeoutError("a call of kafka-python does not return")

        look()
        try:
            return self._calls.make(call, look, _PAUSE_S)
        except (SinkUnavailableError, TimeoutError):
            if not self._calls.idle(0):  # left behind with its thread
                self._calls.close()
                self._calls, client, self._client = Calls("markers"), self._client, None
                with suppress(Exception):
                    client._net.stop()
            raise


def _refusals() -> tuple[type[Exception], ...]:
    from kafka.errors import InvalidTopicError, TopicAuthorizationFailedError

    return (InvalidTopicError, TopicAuthorizationFailedError)


def _check(code: int) -> None:
    from kafka.errors import for_code

    if code != 0:
        raise for_code(code)


def _client(config: Mapping[str, Any]) -> Any:
    """A client that is connected. Where it cannot be, nothing of it is left."""
    # Loaded only where something is open: it takes a quarter of a second and 18 MiB.
    from kafka.admin import KafkaAdminClient
    from kafka.net.compat import KafkaNetClient

    made: list[Any] = []

    def remembered(**given: Any) -> Any:
        made.append(KafkaNetClient(**given))
        return made[0]

    try:
        return KafkaAdminClient(**config, kafka_client=remembered)
    except BaseException:
        for client in made:  # its thread was started before it connected
            client.close()
            client._net.stop()
        raise


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
_HOSTNAMES: Final = "ssl.endpoint.identification.algorithm"


def _client_config(settings: Settings) -> dict[str, Any]:
    """``kafka-python``'s properties for the same brokers and login. Raises ``_CannotAskError`` for
    one that it does not have."""
    ours = base_config(settings, f"cdc-relay-{settings.name}-markers")
    config = {theirs: ours[name] for name, theirs in _SAME.items() if name in ours}
    unknown = sorted(
        name
        for name in ours
        if name.startswith(("ssl.", "sasl.", "enable.ssl"))
        and name not in _SAME
        and name != _HOSTNAMES
    )
    if str(config.get("sasl_mechanism", "")).upper() in ("OAUTHBEARER", "GSSAPI"):
        unknown.append(f"sasl.mechanism {config['sasl_mechanism']}")
    if unknown:
        raise _CannotAskError(f"kafka-python does not know {', '.join(unknown)}")
    for name in ("security_protocol", "sasl_mechanism"):
        if name in config:
            config[name] = str(config[name]).upper()
    if str(ours.get(_HOSTNAMES, "https")).lower() == "none":
        config["ssl_check_hostname"] = False
    return {
        **config,
        "bootstrap_servers": settings.kafka_bootstrap.split(","),
        "client_id": ours["client.id"],
        "request_timeout_ms": int(_ANSWER_S * 1000),
        "bootstrap_timeout_ms": int(_ANSWER_S * 1000),
    }
