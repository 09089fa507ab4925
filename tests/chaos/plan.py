"""What one seed means: settings, load and every fault with its time. Pure; the same for ever for
the same seed, as long as this file stays as it is."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

SECONDS: Final = 13.0
"""How long faults happen."""
_FIRST: Final = 1.5


class Kind(NamedTuple):
    """One kind of fault."""

    name: str
    weight: int
    on: tuple[str, ...]
    """What it takes hold of: no other fault touches that meanwhile."""
    shortest: float
    longest: float
    settling: float = 0.5
    """Seconds after its end that it is left alone as well."""
    needs_marks: bool = False
    """Without marks the table does not tell what was sent: a relay stops and says so."""


KINDS: Final = (
    Kind("relay-kill", 8, ("relay",), 0.0, 2.0),
    Kind("relay-stop", 3, ("relay",), 0.0, 1.5, 1.0),
    Kind("relay-pause", 4, ("relay",), 0.5, 4.0),
    Kind("compensate", 4, ("compensator",), 3.0, 4.0, 0.0, needs_marks=True),
    Kind("compensate-kill", 4, ("compensator",), 0.5, 2.0, needs_marks=True),
    Kind("database-kill", 3, ("database",), 0.0, 1.5, 4.0),
    Kind("database-pause", 2, ("database",), 0.3, 3.0),
    Kind("broker-kill", 3, ("broker",), 0.0, 1.5, 5.0),
    Kind("broker-pause", 3, ("broker",), 0.3, 4.0),
    Kind("database-cut", 2, ("database-net",), 0.0, 1.5),
    Kind("database-slow", 2, ("database-net",), 1.0, 4.0),
    Kind("database-dumb", 2, ("database-net",), 0.5, 3.0),
    Kind("kafka-cut", 3, ("kafka-net",), 0.0, 1.5),
    Kind("kafka-slow", 2, ("kafka-net",), 1.0, 4.0),
    Kind("kafka-dumb", 2, ("kafka-net",), 0.5, 3.0),
    Kind("kafka-answers-lost", 3, ("kafka-net",), 0.1, 1.5),
    Kind("logs-purged", 3, ("relays", "database"), 0.2, 1.0, 2.0, needs_marks=True),
    Kind("logs-reset", 2, ("relays", "database"), 0.2, 1.0, 2.0, needs_marks=True),
    Kind("logs-rotated", 2, ("database",), 0.0, 0.0, 0.2),
    Kind("table-swapped", 3, ("table", "database"), 0.5, 0.5, 2.0),
    Kind("large-transaction", 3, ("writers",), 0.0, 0.0, 0.5),
)


@dataclass(frozen=True)
class Fault:
    """One fault: begins at ``at`` seconds, ends ``lasts`` later."""

    number: int
    name: str
    at: float
    lasts: float
    which: int = 0
    """Of several relays, which; else a number that the fault may use."""

    def __str__(self) -> str:
        return f"#{self.number} {self.at:5.2f} s {self.name} for {self.lasts:.2f} s ({self.which})"


@dataclass(frozen=True)
class Plan:
    """One seed."""

    seed: int
    server: str
    """mysql (GTIDs), bare (MySQL without), mariadb."""
    delivery: str
    mark: str
    relays: int
    on_dead: str
    max_tries: int
    batch_rows: int
    queue_rows: int
    session_timeout: float
    hidden: bool
    """Some rows are not in the binlog: only the compensator can find them."""
    unsendable: bool
    """Some rows are larger than any Kafka client takes."""
    narrow: bool
    """Some are larger than their topic takes, until its limit is raised at the end."""
    late_topic: float
    """When the topic of one aggregate type is created; past the end: when all is healed."""
    faults: tuple[Fault, ...]
    seconds: float = SECONDS
    """How long the services write, and faults happen."""
    xa: bool = False
    """Some transactions have two phases."""
    source: str = "binlog"
    """Or polling."""

    def __str__(self) -> str:
        return (
            f"{self.server} {self.delivery} mark={self.mark} relays={self.relays}"
            f" on_dead={self.on_dead} max_tries={self.max_tries} batch_rows={self.batch_rows}"
            f" queue_rows={self.queue_rows} session_timeout={self.session_timeout}"
            f" hidden={self.hidden} unsendable={self.unsendable} narrow={self.narrow}"
            f" late_topic={self.late_topic:.1f} xa={self.xa} source={self.source}"
        )

    @property
    def compensates(self) -> bool:
        """Whether a compensator runs beside the relay."""
        return any(fault.name.startswith("compensate") for fault in self.faults)

    def only(self, numbers: set[int]) -> Plan:
        """The same with these faults alone, to find the smallest plan that fails."""
        return replace(self, faults=tuple(f for f in self.faults if f.number in numbers))


def make(seed: int) -> Plan:
    """The plan of a seed."""
    chance = random.Random(f"chaos-{seed}")
    delivery = "exactly_once" if seed % 2 else "at_least_once"
    mark = "update" if seed % 2 else chance.choice(("update", "update", "delete", "none"))
    relays = chance.choice((1, 1, 2))
    # Until relay and compensator know of each other, half the seeds have the relay alone.
    kinds = [kind for kind in KINDS if mark != "none" or not kind.needs_marks]
    if chance.random() < 0.5:
        kinds = [kind for kind in kinds if not kind.name.startswith("compensate")]
    marks = mark != "none"
    narrow = chance.random() < 0.4
    late_topic = chance.choice((0.0, chance.uniform(4, SECONDS), 99.0))
    max_tries = chance.choice((1, 10))
    server = chance.choice(("mysql", "mysql", "bare", "mariadb"))
    # Of its own, so that what else a seed means does not depend on it.
    also = random.Random(f"chaos-also-{seed}")
    return Plan(
        seed=seed,
        server=server,
        delivery=delivery,
        mark=mark,
        relays=relays,
        on_dead=chance.choice(("block", "block", "release")),
        # What can be sent at the end must not be dead by then.
        max_tries=10 if narrow or late_topic else max_tries,
        batch_rows=chance.choice((20, 500, 2000)),
        queue_rows=chance.choice((200, 20_000)),
        session_timeout=chance.choice((1.0, 2.0)),
        hidden=marks and chance.random() < 0.35,
        unsendable=chance.random() < 0.5,
        narrow=narrow,
        late_topic=late_topic,
        faults=_faults(chance, kinds, relays),
        xa=also.random() < 0.5,
        source="polling" if marks and also.random() < 0.15 else "binlog",
    )


def _faults(chance: random.Random, kinds: list[Kind], relays: int) -> tuple[Fault, ...]:
    wanted = chance.randint(5, 12)
    taken: dict[str, list[tuple[float, float]]] = {}
    found: list[Fault] = []
    for _ in range(wanted * 4):
        if len(found) == wanted:
            break
        kind = chance.choices(kinds, [kind.weight for kind in kinds])[0]
        at = round(chance.uniform(_FIRST, SECONDS), 2)
        lasts = round(chance.uniform(kind.shortest, kind.longest), 2)
        which = chance.randrange(1000)
        holds = [
            name
            for on in kind.on
            for name in (
                [f"relay-{which % relays}"]
                if on == "relay"
                else [f"relay-{number}" for number in range(relays)]
                if on == "relays"
                else [on]
            )
        ]
        begin, end = at - 0.2, at + lasts + kind.settling
        if any(
            begin < other_end and other_begin < end
            for name in holds
            for other_begin, other_end in taken.get(name, ())
        ):
            continue
        for name in holds:
            taken.setdefault(name, []).append((begin, end))
        found.append(Fault(0, kind.name, at, lasts, which))
    found.sort(key=lambda fault: fault.at)
    return tuple(replace(fault, number=number) for number, fault in enumerate(found, 1))
