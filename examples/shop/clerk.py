"""One process of the shop: ``python -m examples.shop.clerk``.

It serves its own range of customers until they have placed ``--orders`` orders altogether, counted
in the database, so a clerk that was killed goes on where its last commit was.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from sqlalchemy import Engine, create_engine, event, func, select

from examples.shop.model import Customer
from examples.shop.naive import CommitThenSendShop
from examples.shop.service import OutboxShop, PaymentDeclinedError, Shop

DECLINED_SHARE = 0.02
"""Orders whose transaction is rolled back after everything was written."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    engine = create_engine(arguments.database_url, pool_size=1, max_overflow=0)
    if arguments.unlogged:
        event.listen(engine, "connect", _without_binlog)
    shop: Shop
    if arguments.kafka_bootstrap:
        shop = CommitThenSendShop(engine, arguments.kafka_bootstrap, arguments.topic)
    else:
        shop = OutboxShop(engine)
    placed = _placed(engine, arguments.first, arguments.last)
    if arguments.wait:
        print("ready", flush=True)
        sys.stdin.readline()
    _serve(shop, arguments, placed)
    shop.close()
    return 0


def _serve(shop: Shop, arguments: argparse.Namespace, placed: int) -> None:
    dice = random.Random(f"{arguments.seed} {arguments.first} {placed}")
    start = time.monotonic()
    if arguments.rate:
        # Somewhere within the first interval, or all clerks would act at the same instants.
        start += dice.random() / arguments.rate
    first = placed
    while placed < arguments.orders:
        if arguments.rate:
            # By the clock, not by the last answer: a slow moment is caught up, not hidden.
            due = start + (placed - first) / arguments.rate
            time.sleep(max(0.0, due - time.monotonic()))
        customer = dice.randint(arguments.first, arguments.last)
        total = Decimal(dice.randint(100, 99_999)) / 100
        try:
            shop.place_order(customer, total, declined=dice.random() < DECLINED_SHARE)
        except PaymentDeclinedError:
            continue
        placed += 1


def _placed(engine: Engine, first: int, last: int) -> int:
    orders = select(func.coalesce(func.sum(Customer.orders), 0))
    with engine.connect() as connection:
        return int(connection.scalar(orders.where(Customer.id.between(first, last))) or 0)


def _without_binlog(connection: Any, _record: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION sql_log_bin = 0")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.shop.clerk", description=__doc__)
    parser.add_argument("--database-url", required=True)
    parser.add_argument("--first", type=int, required=True, help="first customer")
    parser.add_argument("--last", type=int, required=True, help="last customer")
    parser.add_argument("--orders", type=int, required=True, help="orders of these customers")
    parser.add_argument("--rate", type=float, default=0.0, help="orders per second; 0: flat out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unlogged", action="store_true", help="write with the binlog off")
    parser.add_argument("--wait", action="store_true", help="say ready, start on a line of stdin")
    parser.add_argument("--kafka-bootstrap", default="", help="commit then send to this Kafka")
    parser.add_argument("--topic", default="", help="topic of commit-then-send")
    return parser


if __name__ == "__main__":
    sys.exit(main())
