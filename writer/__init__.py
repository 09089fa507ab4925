"""The writer: events into the outbox table, inside the transaction of the service that has them.

    from writer import Outbox, outbox_table

    outbox = Outbox()
    with Session(engine) as session, session.begin():
        session.add(order)
        outbox.add(session, aggregate_type="order", aggregate_id=order.id,
                   event_type="ORDER_CREATED", payload={"id": order.id, "total": order.total})

It needs SQLAlchemy and loads nothing else: no driver, no Kafka client. (Imports within this
folder are relative: another distribution on PyPI owns a top-level package of the same name.)
"""

from cdc_relay.errors import NotInTransactionError
from cdc_relay.outbox import outbox_table

from .outbox import EventFields, Outbox

__all__ = ["EventFields", "NotInTransactionError", "Outbox", "outbox_table"]
