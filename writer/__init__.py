"""The writer: events into the outbox table, inside the transaction of the service that has them;
and the inbox, which makes the other end safe.

    from writer import Outbox, outbox_table

    outbox = Outbox()
    with Session(engine) as session, session.begin():
        session.add(order)
        session.flush()                                 # the database gives order.id
        outbox.add(session, aggregate_type="order", aggregate_id=order.id,
                   event_type="ORDER_CREATED", payload={"id": order.id, "total": order.total})

It needs SQLAlchemy and loads nothing else: no driver, no Kafka client. (Imports within this
folder are relative: another distribution on PyPI owns a top-level package of the same name.)
"""

from cdc_relay.errors import EventTooLargeError, NotInTransactionError
from cdc_relay.outbox import inbox_sequence_table, inbox_table, outbox_table, sequence_table

from .events import RecordsEvents
from .inbox import Arrival, Inbox
from .outbox import EventFields, EventInfo, Outbox
from .received import DeadLetters, InboxEvent

__all__ = [
    "Arrival",
    "DeadLetters",
    "EventFields",
    "EventInfo",
    "EventTooLargeError",
    "Inbox",
    "InboxEvent",
    "NotInTransactionError",
    "Outbox",
    "RecordsEvents",
    "inbox_sequence_table",
    "inbox_table",
    "outbox_table",
    "sequence_table",
]
