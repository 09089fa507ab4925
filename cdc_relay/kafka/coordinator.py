"""The coordinator of transactional ids, asked what the client library has no calls for.

How a transaction was decided (KIP-664), and a transaction without records, which ends in some
partitions what a broker forgot to end there (KIP-98). ``kafka-python`` sends the requests; it is
loaded only where something is open, and takes a quarter of a second and 18 MiB.

Taking a producer over makes its coordinator forget how its last transaction was decided. Whoever
does it here notes that where the coordinator keeps it, in the last digit of the transaction's
timeout, so that being cut short does not lose it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, Final, TypeVar

import structlog

from cdc_relay.config import Settings
from cdc_relay.errors import SinkUnavailableError
from cdc_relay.kafka.calls import Calls
from cdc_relay.kafka.client import base_config
from cdc_relay.kafka.unfinished import Place

log: Any = structlog.get_logger(__name__)

_ANSWER_S: Final = 5.0
_CALL_S: Final = 15.0
_PAUSE_S: Final = 0.1
# Of a transaction that only ends something: long, so that the coordinator does not abort it when
# its maker is killed. A cluster may allow less (transaction.max.timeout.ms, by default 900,000).
_LONG_MS: Final = 600_000
_DIGITS: Final = {True: 1, False: 2}
_NOTED: Final = {digit: committed for committed, digit in _DIGITS.items()}
_T = TypeVar("_T")


def timeout_ms(settings: Settings) -> int:
    """The timeout of ordinary transactions: its last digit notes nothing."""
    return int(settings.transaction_timeout * 100) * 10


class CannotAskError(Exception):
    """The coordinator cannot be asked in this way."""


class Coordinator:
    """Asks the coordinators of transactional ids. Calls wait for them while ``going_on``, not for
    ever. Close it at the end.

    Raises ``CannotAskError`` as long as nothing was taken over; from then on
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
            noted = _NOTED.get(found.transaction_timeout_ms % 10)
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
                    raise CannotAskError(reason) from None
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
    """``kafka-python``'s properties for the same brokers and login. Raises ``CannotAskError`` for
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
        raise CannotAskError(f"kafka-python does not know {', '.join(unknown)}")
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
