"""The same shop without an outbox: commit, then send. What many services do today.

Nothing here is careless: the producer is idempotent, waits for all replicas, retries, and is
flushed at the end. Between COMMIT and acknowledgement the process can still die.
"""

from __future__ import annotations

import json
import uuid
from decimal import Decimal

from confluent_kafka import Producer
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from examples.shop.service import PaymentDeclinedError, payload, write_order


class CommitThenSendShop:
    """Publishes each order to ``topic`` right after its transaction has committed."""

    def __init__(self, engine: Engine, bootstrap: str, topic: str) -> None:
        self._engine = engine
        self._topic = topic
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "acks": "all",
                "enable.idempotence": True,
                "partitioner": "murmur2_random",
            }
        )

    def place_order(self, customer_id: int, total: Decimal, *, declined: bool) -> None:
        with Session(self._engine) as session, session.begin():
            order = write_order(session, customer_id, total)
            event = payload(order)
            if declined:
                raise PaymentDeclinedError
        self._producer.produce(
            self._topic,
            key=str(customer_id),
            value=json.dumps(event),
            headers=[("id", str(uuid.uuid4()).encode()), ("event_type", b"ORDER_PLACED")],
        )
        self._producer.poll(0)

    def close(self) -> None:
        self._producer.flush(30)
