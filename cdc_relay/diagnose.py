"""What the table's rows mean: the picture by status and tries, in words, with the next command."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection

from cdc_relay.database import TableShape
from cdc_relay.outbox import DEAD, PENDING, SENT

# So many rows of each kind are looked at: the picture needs no more, and costs the same always.
_ROWS: Final = 10_000
# A row that is pending for longer is late: a relay takes milliseconds.
_LATE_S: Final = 30.0
# From this try on a refusal is no hiccup.
_MANY_TRIES: Final = 3
_DAY_S: Final = 86_400.0


class Group(NamedTuple):
    """Rows of one status and one number of tries."""

    status: int
    retry_count: int
    rows: int
    oldest_s: float


class Kind(NamedTuple):
    """Rows that fail or have failed, by what they are."""

    event_type: str
    aggregate_type: str
    rows: int
    last_error: str


@dataclass(frozen=True, slots=True)
class Picture:
    """What was seen."""

    groups: list[Group]
    failing: list[Kind] = field(default_factory=list)
    """Pending rows with many tries, most frequent first."""
    dead: list[Kind] = field(default_factory=list)
    oldest_sent_s: float = 0.0
    kafka_error: str = ""
    """Why Kafka does not answer; empty where it does."""
    members: int = 0
    """Relays of the name that run."""
    checkpoint_age_s: float | None = None
    behind: bool = True
    """Whether the relay's checkpoint names a place before the end of the log, as far as is known: a
    relay that has nothing to do writes none."""
    pass_age_s: float | None = None
    """When the compensator's last pass ended; None where none has left a record."""
    pass_error: str = ""
    """Why it failed; empty where it did not."""

    def rows(self, status: int, *, tries: range | None = None) -> int:
        return sum(group.rows for group in self._of(status, tries))

    def oldest_s(self, status: int, *, tries: range | None = None) -> float:
        return max((group.oldest_s for group in self._of(status, tries)), default=0.0)

    def _of(self, status: int, tries: range | None) -> list[Group]:
        return [
            group
            for group in self.groups
            if group.status == status and (tries is None or group.retry_count in tries)
        ]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One thing that the picture means."""

    name: str
    """Short and stable, for scripts."""
    text: str
    next: str
    """The command to run next."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def look(connection: Connection, shape: TableShape) -> Picture:
    """Read the table's part of the picture."""

    def ask(sql: str) -> list[Any]:
        return list(connection.exec_driver_sql(shape.names.sql(sql)).all())

    age = "COALESCE(TIMESTAMPDIFF(SECOND, MIN(created_at), UTC_TIMESTAMP(6)), 0)"
    groups = []
    for status in (PENDING, SENT, DEAD):
        # What waits is old, so the first of those; of the sent ones the recent.
        order = "DESC" if status == SENT else "ASC"
        groups += [
            Group(status, int(tries), int(rows), max(0.0, float(oldest)))
            for tries, rows, oldest in ask(
                f"SELECT tries, COUNT(*), {age}"
                " FROM (SELECT COALESCE(retry_count, 0) AS tries, created_at"
                f" FROM {shape.quoted} WHERE status = {status} ORDER BY id {order} LIMIT {_ROWS})"
                " AS some GROUP BY tries ORDER BY tries"
            )
        ]
    [(oldest_sent,)] = ask(f"SELECT {age} FROM {shape.quoted} WHERE status = {SENT}")
    error = "last_error" if "last_error" in shape.columns else "NULL"
    kinds = [
        [
            Kind(event_type, aggregate_type, int(rows), text or "")
            for event_type, aggregate_type, rows, text in ask(
                # No payload: the server would have to sort it, and refuses a large one.
                "SELECT event_type, aggregate_type, COUNT(*) AS many, MAX(error) FROM"
                f" (SELECT event_type, aggregate_type, {error} AS error FROM {shape.quoted}"
                f" WHERE {condition} ORDER BY id LIMIT {_ROWS})"
                " AS some GROUP BY event_type, aggregate_type ORDER BY many DESC LIMIT 5"
            )
        ]
        for condition in (
            f"status = {PENDING} AND retry_count >= {_MANY_TRIES}",
            f"status = {DEAD}",
        )
    ]
    return Picture(groups, kinds[0], kinds[1], float(oldest_sent))


def judge(
    picture: Picture,
    *,
    older_than_s: float = 600.0,
    schedule_s: float = 300.0,
    keep_s: float = 14 * _DAY_S,
    at_least_once: bool = False,
    marks: bool = True,
) -> list[Diagnosis]:
    """Return what the picture means, gravest first; one ``well`` where nothing is wrong.

    ``older_than_s`` and ``schedule_s`` are the compensator's, ``keep_s`` is how long sent rows are
    meant to stay. Without ``marks`` pending says nothing."""
    found = [
        *(_relay(picture, older_than_s, schedule_s) if marks else _unmarked(picture)),
        *_refusals(picture),
        *_dead(picture),
        *_purge(picture, keep_s),
    ]
    if not found:
        waiting = picture.rows(PENDING) if marks else 0
        text = "nothing waits, fails or is dead"
        if waiting:
            text = f"nothing is dead, late or failing for long; {waiting} rows are on their way"
        found.append(Diagnosis("well", text, "cdc-relay audit"))
    if at_least_once:
        found.append(
            Diagnosis(
                "repetitions",
                "delivery is at_least_once: after a crash an event is seen twice downstream; a "
                "consumer that minds has no inbox yet",
                "cdc-relay inbox schema",
            )
        )
    return found


def _relay(picture: Picture, older_than_s: float, schedule_s: float) -> list[Diagnosis]:
    untried = range(1)
    rows = picture.rows(PENDING, tries=untried)
    oldest = picture.oldest_s(PENDING, tries=untried)
    if rows == 0 or oldest < _LATE_S:
        return []
    waiting = f"{rows} rows are pending that nobody has tried, the oldest for {oldest:.0f} s"
    if picture.kafka_error:
        return []  # said below
    found = []
    if picture.members == 0:
        found.append(Diagnosis("no_relay", f"{waiting}: no relay is running", "cdc-relay start"))
    elif picture.checkpoint_age_s is None or (
        picture.behind and picture.checkpoint_age_s > _LATE_S
    ):
        found.append(
            Diagnosis(
                "relay_stuck",
                f"{waiting}, and the relay that runs has written no checkpoint for "
                f"{picture.checkpoint_age_s or 0:.0f} s: it is behind, waits for the database, or "
                "is stuck; its log says which",
                "cdc-relay status --watch",
            )
        )
    if oldest > older_than_s + 2 * schedule_s:
        found += _passes(picture, waiting, schedule_s)
    if picture.members and not found:
        found.append(
            Diagnosis(
                "missed",
                f"{waiting}, although the relay is at work: it could not see them (binlog off, "
                "statement format) or they wait behind a parked row; the compensator's next pass "
                "looks at them",
                "cdc-relay compensate",
            )
        )
    return found


def _unmarked(picture: Picture) -> list[Diagnosis]:
    """Without marks every row is pending for ever, and there is no compensator."""
    if picture.kafka_error:
        return []  # said below
    if picture.members == 0:
        return [Diagnosis("no_relay", "no relay is running", "cdc-relay start")]
    age = picture.checkpoint_age_s
    if age is None or (picture.behind and age > _LATE_S):
        return [
            Diagnosis(
                "relay_stuck",
                "the relay that runs is behind the end of the log and has written no checkpoint "
                f"for {age or 0:.0f} s; its log says why",
                "cdc-relay status --watch",
            )
        ]
    return []


def _passes(picture: Picture, waiting: str, schedule_s: float) -> list[Diagnosis]:
    """Why rows are old enough for a pass that should have been."""
    age = picture.pass_age_s
    if age is None or age > 2 * schedule_s:
        last = "none has left a record" if age is None else f"the last one was {age:.0f} s ago"
        return [
            Diagnosis(
                "no_compensator",
                f"{waiting}, and no compensator has passed for more than two schedules ({last}): "
                "the CronJob is suspended, or its image cannot be pulled",
                "cdc-relay compensate",
            )
        ]
    if picture.pass_error:
        return [
            Diagnosis(
                "pass_failed",
                f"{waiting}, and the compensator's last pass, {age:.0f} s ago, failed: "
                f"{picture.pass_error}",
                "cdc-relay doctor",
            )
        ]
    return []


def _refusals(picture: Picture) -> list[Diagnosis]:
    if picture.kafka_error:
        text = f"Kafka does not answer: {picture.kafka_error}"
        return [Diagnosis("kafka_away", text, "cdc-relay doctor")]
    if not picture.failing:
        return []
    total = sum(kind.rows for kind in picture.failing)
    first = picture.failing[0]
    reasons = {kind.last_error for kind in picture.failing if kind.last_error}
    if len({kind.aggregate_type for kind in picture.failing}) > 2 and len(reasons) < 3:
        return [
            Diagnosis(
                "kafka_unwell",
                f"{total} rows of several types have failed {_MANY_TRIES} times and more: the "
                f"brokers are or were unwell (last error: {first.last_error or 'not kept'})",
                "cdc-relay doctor",
            )
        ]
    return [
        Diagnosis(
            "bad_rows",
            f"{total} rows have failed {_MANY_TRIES} times and more while the brokers answer, most "
            f"of them {first.event_type} of {first.aggregate_type}: a payload or its topic is at "
            f"fault (last error: {first.last_error or 'not kept'})",
            "cdc-relay doctor",
        )
    ]


def _dead(picture: Picture) -> list[Diagnosis]:
    if not picture.dead:
        return []
    first = picture.dead[0]
    total = picture.rows(DEAD)
    return [
        Diagnosis(
            "dead",
            f"{total} rows are dead, {first.rows} of them {first.event_type} of "
            f"{first.aggregate_type} (last error: {first.last_error or 'not kept'}): mend the "
            "cause, then retry them",
            "cdc-relay dead list",
        )
    ]


def _purge(picture: Picture, keep_s: float) -> list[Diagnosis]:
    if picture.oldest_sent_s < keep_s:
        return []
    days = picture.oldest_sent_s / _DAY_S
    return [
        Diagnosis(
            "no_purge",
            f"the oldest sent row is {days:.0f} days old: no purge runs, and the table grows "
            "although all is sent",
            "cdc-relay purge --older-than 7d",
        )
    ]
