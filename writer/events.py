"""Domain events that ORM objects record, written by the session's own flush.

class Order(RecordsEvents, Base):
    __tablename__ = "orders"
    __outbox__ = Outbox()
    ...
    def pay(self) -> None:
        self.paid = True
        self.record(OrderPaid(order_id=self.id))
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple
from weakref import WeakKeyDictionary

from sqlalchemy import event as listeners
from sqlalchemy import inspect
from sqlalchemy.orm import Session, SessionTransaction, UOWTransaction, object_session
from sqlalchemy.orm.attributes import flag_dirty

if TYPE_CHECKING:
    from .outbox import EventFields, Outbox

VERSION_HEADER: Final = "event_version"

# Kept in the object's __dict__, beside what SQLAlchemy keeps there.
_PENDING: Final = "_recorded_events"
_WRITTEN: Final = "_written_events"
# Key of Session.info: new objects with written events, until the transaction ends.
_NEW: Final = "cdc_relay_new"
# Another: objects that recorded something while a flush was under way.
_LATE: Final = "cdc_relay_late"

_numbers = itertools.count()
# The number at which a savepoint began. What was recorded before it was written before it.
_began: WeakKeyDictionary[SessionTransaction, int] = WeakKeyDictionary()


class _Recorded(NamedTuple):
    number: int
    """In the order of recording, across objects."""
    event: object
    headers: Mapping[str, object]


class RecordsEvents:
    """Mixin for ORM classes that record domain events.

    An event becomes a row of ``__outbox__`` when the session flushes, behind the business rows and
    in the same transaction, in the order in which the events of all objects were recorded. It is
    gone with a rollback, of a savepoint as well; a later flush does not write it again. An object
    that was new in what was rolled back keeps its events as it keeps its attributes: added again,
    it tells them again.

    Any session works, synchronous or not; nothing has to be registered. Events of objects that
    never reach a session (of a detached one that is merged, not added), and of objects written by
    ``bulk_save_objects``, are not written. ``Session.expire`` and ``refresh`` discard events that
    were not flushed with the changes that were not.
    """

    __outbox__: ClassVar[Outbox]
    """Where the events go."""
    __aggregate_type__: ClassVar[str]
    """The aggregate type; unless given, the class's name (that of the base class, where classes
    inherit in the database) in snake case: ``OrderLine`` is ``order_line``."""
    __aggregate_id__: ClassVar[str]
    """Name of the attribute that has the aggregate id; unless given, the primary key."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        _listen()

    def record(self, event: object, *, headers: Mapping[str, object] | None = None) -> None:
        """Record ``event``, an object of an event class (dataclass, attrs, pydantic, msgspec).

        The class gives the event type and the header ``event_version``: by its attributes
        ``event_type`` and ``event_version``, or by its name, so that ``OrderPaid`` is
        ``ORDER_PAID`` in version 1 and ``OrderPaidV2`` the same in version 2.

        Raises ``TypeError`` for a class without ``__outbox__`` and for an event that is not an
        object of a class of its own. Not for several threads at once, as the object itself.
        """
        if not hasattr(self, "__outbox__"):
            raise TypeError(f"{type(self).__name__} has no __outbox__ to write its events to")
        if isinstance(event, (type, str, bytes, dict, list, tuple, int, float, type(None))):
            raise TypeError(f"{event!r} is not an object of an event class")
        recorded = _Recorded(next(_numbers), event, headers or {})
        self.__dict__.setdefault(_PENDING, []).append(recorded)
        # An object without other changes has to take part in the flush as well.
        flag_dirty(self)
        session = object_session(self)
        if session is not None and getattr(session, "_flushing", False):
            session.info.setdefault(_LATE, []).append(self)


def event_type_of(event: object) -> tuple[str, int]:
    """Return the event type and version of an event, as ``RecordsEvents.record`` says."""
    name, version = _by_name(type(event).__name__)
    return (
        str(getattr(event, "event_type", None) or name),
        int(getattr(event, "event_version", None) or version),
    )


@lru_cache(maxsize=1000)
def _by_name(name: str) -> tuple[str, int]:
    versioned = re.fullmatch(r"(.+?)V(\d+)", name)
    stem, version = versioned.groups() if versioned else (name, 1)
    return _snake(stem).upper(), int(version)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _fields(thing: RecordsEvents, recorded: _Recorded) -> EventFields:
    event_type, version = event_type_of(recorded.event)
    return {
        "aggregate_type": _aggregate_type(thing),
        "aggregate_id": _aggregate_id(thing),
        "event_type": event_type,
        "payload": recorded.event,
        "headers": {VERSION_HEADER: version, **recorded.headers},
    }


def _aggregate_type(thing: RecordsEvents) -> str:
    given: str | None = getattr(thing, "__aggregate_type__", None)
    return given or _snake(inspect(type(thing), raiseerr=True).base_mapper.class_.__name__)


def _aggregate_id(thing: RecordsEvents) -> Any:
    name: str | None = getattr(thing, "__aggregate_id__", None)
    if name is not None:
        return getattr(thing, name)
    key = inspect(type(thing), raiseerr=True).primary_key_from_instance(thing)
    if len(key) != 1:
        raise TypeError(
            f"{type(thing).__name__} has a primary key of {len(key)} columns: name the attribute "
            "that has its aggregate id, __aggregate_id__ = '...'"
        )
    return key[0]


# --- the session's events --------------------------------------------------------------------


def _listen() -> None:
    if not listeners.contains(Session, "after_flush", _after_flush):
        listeners.listen(Session, "after_flush", _after_flush)
        listeners.listen(Session, "after_flush_postexec", _after_flush_postexec)
        listeners.listen(Session, "after_transaction_create", _after_transaction_create)
        listeners.listen(Session, "after_soft_rollback", _after_soft_rollback)
        listeners.listen(Session, "persistent_to_transient", _new_again)
        listeners.listen(Session, "pending_to_transient", _new_again)
        listeners.listen(RecordsEvents, "expire", _expire, propagate=True)
        listeners.listen(Session, "after_transaction_end", _after_transaction_end)


def _after_flush(session: Session, _: UOWTransaction) -> None:
    """Write what was recorded. The business rows are there, their keys are known."""
    new = session.new
    found: list[tuple[_Recorded, RecordsEvents]] = []
    for thing in chain(new, session.dirty, session.deleted):
        # Taken off: what is written is not written again.
        for recorded in thing.__dict__.pop(_PENDING, ()):
            found.append((recorded, thing))
    if not found:
        return
    found.sort(key=lambda pair: pair[0].number)
    try:
        for outbox, group in itertools.groupby(found, key=lambda pair: pair[1].__outbox__):
            pairs = list(group)
            outbox.add_all(session, [_fields(thing, recorded) for recorded, thing in pairs])
    except BaseException:
        # Nothing was written: a new object that is added again has its events as its attributes.
        for recorded, thing in found:
            thing.__dict__.setdefault(_PENDING, []).append(recorded)
        raise
    for recorded, thing in found:
        if thing in new or _WRITTEN in thing.__dict__:
            thing.__dict__.setdefault(_WRITTEN, []).append(recorded)
            session.info.setdefault(_NEW, []).append(thing)


def _after_flush_postexec(session: Session, _: UOWTransaction) -> None:
    """What was recorded behind ``_after_flush``, by listeners of the service's, waits for the next
    flush; the end of this one has called the objects clean."""
    for thing in session.info.pop(_LATE, ()):
        if _PENDING in thing.__dict__ and thing in session:
            flag_dirty(thing)


def _after_transaction_create(_: Session, transaction: SessionTransaction) -> None:
    if transaction.nested:
        _began[transaction] = next(_numbers)


def _after_soft_rollback(session: Session, ended: SessionTransaction) -> None:
    """Drop what was recorded since the savepoint. What was recorded before has been written:
    begin_nested() flushes."""
    for thing in session.identity_map.values():
        thing.__dict__.pop(_PENDING, None)
    began = _began.get(ended)
    for thing in session.info.get(_NEW, ()) if began is not None else ():
        written = thing.__dict__.get(_WRITTEN)
        if written is not None:
            written[:] = [recorded for recorded in written if recorded.number < began]


def _expire(thing: Any, names: object) -> None:
    """The object's changes are discarded; so are its events. (After a flush it has none.)"""
    if names is None and thing is not None:  # None: nobody holds it any more
        thing.__dict__.pop(_PENDING, None)


def _new_again(_: Session, thing: Any) -> None:
    """A flushed new object is new again; so are its events."""
    written = thing.__dict__.pop(_WRITTEN, None)
    if written:
        thing.__dict__[_PENDING] = written + thing.__dict__.get(_PENDING, [])


def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None:
        session.info.pop(_LATE, None)
        for thing in session.info.pop(_NEW, ()):
            thing.__dict__.pop(_WRITTEN, None)
