"""What the demo will do, drawn from one seed before anything runs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

CLERKS: Final = 4
CUSTOMERS_PER_CLERK: Final = 50
CALM_RATE: Final = 200.0
"""Orders per second of all clerks of a shop after the storm."""


@dataclass(frozen=True)
class Task:
    """The customers of one clerk and how many orders they shall have when it is done."""

    first: int
    last: int
    orders: int
    rate: float = 0.0
    """Orders per second; 0 is flat out."""
    unlogged: bool = False
    """Written with the binlog off: no relay can see them, only the compensator."""


@dataclass(frozen=True)
class Kill:
    """One moment of kill -9: some clerks, the same ones in both shops, and the relay."""

    at: float
    """Share of all orders that is committed by then."""
    clerks: tuple[int, ...]
    patience_s: float
    """The relay is spared when it has not delivered for so long since its last start: killed
    again and again on the same rows, it would only show how often one can send them."""
    silence_s: float
    """How long the relay stays dead."""


@dataclass(frozen=True)
class Plan:
    orders: int
    seed: int
    warm_up: Task
    """What both shops place before everything else, so that no server is cold when it counts."""
    storm: tuple[Task, ...]
    """Flat out, with the kills."""
    calm: tuple[Task, ...]
    """The same customers afterwards, at CALM_RATE and without a kill: here latency is measured."""
    unlogged: Task
    unlogged_at: float
    """Share of all orders after which they are placed."""
    kills: tuple[Kill, ...]

    @property
    def customers(self) -> int:
        return self.warm_up.last

    @property
    def calm_s(self) -> float:
        orders = sum(task.orders for task in self.calm) - sum(task.orders for task in self.storm)
        return orders / CALM_RATE

    @classmethod
    def draw(cls, orders: int, seed: int, kills: int) -> Plan:
        """Return the plan for at least 100 orders and at least one kill."""
        dice = random.Random(seed)
        # Less than 1 %, so that their long wait is not what the p99 shows.
        unlogged = min(50, orders // 250 + 1)
        warm_up = min(500, orders // 10)
        calm = min(2000, orders // 4)
        storm = orders - warm_up - unlogged - calm
        # One moment in each of so many equal stretches of the storm; the last one early enough
        # that both shops are still at work.
        begin, end = (warm_up + 0.03 * storm) / orders, (warm_up + 0.88 * storm) / orders
        stretch = (end - begin) / kills
        moments = [begin + stretch * (index + dice.random()) for index in range(kills)]
        others = CLERKS * CUSTOMERS_PER_CLERK
        return cls(
            orders=orders,
            seed=seed,
            warm_up=Task(first=others + 11, last=others + 20, orders=warm_up),
            storm=_tasks(storm),
            calm=_tasks(storm + calm, CALM_RATE / CLERKS),
            unlogged=Task(first=others + 1, last=others + 10, orders=unlogged, unlogged=True),
            unlogged_at=(moments[0] + moments[-1]) / 2,
            kills=tuple(
                Kill(
                    at=moment,
                    clerks=tuple(
                        sorted(dice.sample(range(CLERKS), dice.choice((CLERKS - 1, CLERKS))))
                    ),
                    patience_s=dice.uniform(0.1, 1.5),
                    silence_s=dice.uniform(0.3, 1.2),
                )
                for moment in moments
            ),
        )


def _tasks(orders: int, rate: float = 0.0) -> tuple[Task, ...]:
    """Return one task for each clerk, all orders shared out between them."""
    return tuple(
        Task(
            first=index * CUSTOMERS_PER_CLERK + 1,
            last=(index + 1) * CUSTOMERS_PER_CLERK,
            orders=orders // CLERKS + (index < orders % CLERKS),
            rate=rate,
        )
        for index in range(CLERKS)
    )
