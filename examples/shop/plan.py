"""What the demo will do, drawn from one seed before anything runs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

CLERKS: Final = 4
CUSTOMERS_PER_CLERK: Final = 50
QUIET_RATE: Final = 200.0
"""Orders per second of all clerks of a shop before the first kill."""


@dataclass(frozen=True)
class Task:
    """The customers of one clerk and how many orders they place."""

    first: int
    last: int
    orders: int
    paced: int = 0
    """So many of the orders at the clerk's share of QUIET_RATE, the rest flat out."""
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
    tasks: tuple[Task, ...]
    warm_up: Task
    """What both shops place before everything else, so that no server is cold when it counts."""
    unlogged: Task
    unlogged_at: float
    """Share of all orders after which they are placed."""
    kills: tuple[Kill, ...]

    @property
    def customers(self) -> int:
        return self.warm_up.last

    @property
    def quiet_s(self) -> float:
        return sum(task.paced for task in self.tasks) / QUIET_RATE

    @classmethod
    def draw(cls, orders: int, seed: int, kills: int) -> Plan:
        """Return the plan for at least 100 orders and at least one kill."""
        dice = random.Random(seed)
        paced = min(2000, orders // 4) // CLERKS
        # Less than 1 %, so that their long wait is not what the p99 shows.
        unlogged = min(50, orders // 250 + 1)
        warm_up = min(500, orders // 10)
        shares = _shares(orders - warm_up - unlogged, CLERKS)
        tasks = tuple(
            Task(
                first=index * CUSTOMERS_PER_CLERK + 1,
                last=(index + 1) * CUSTOMERS_PER_CLERK,
                orders=share,
                paced=paced,
            )
            for index, share in enumerate(shares)
        )
        others = CLERKS * CUSTOMERS_PER_CLERK
        # One moment in each of so many equal stretches of the time that is not quiet; the last
        # one early enough that both shops are still at work.
        begin = (warm_up + paced * CLERKS) / orders + 0.03
        stretch = (0.88 - begin) / kills
        moments = [begin + stretch * (index + dice.random()) for index in range(kills)]
        return cls(
            orders=orders,
            seed=seed,
            tasks=tasks,
            warm_up=Task(first=others + 11, last=others + 20, orders=warm_up),
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


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (index < total % parts) for index in range(parts)]
