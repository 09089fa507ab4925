"""What a check found: one line for a person, one object for a program."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

Level = Literal["ok", "warning", "failure"]
Area = Literal["installation", "database", "table", "kafka", "topics", "relay"]
How = Literal["", "sql", "shell", "my.cnf", "advice"]

# The kinds of cdc_relay.errors: which exit code a failure of an area stands for.
_CODES: Final[dict[Area, int]] = {
    "installation": 2,
    "database": 3,
    "table": 3,
    "kafka": 4,
    "topics": 4,
    "relay": 2,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One check and its outcome."""

    area: Area
    check: str
    """Short and stable, for scripts: ``binlog_format``, ``grant_update``."""
    level: Level
    text: str
    """What was seen and what it means, one line."""
    mend: tuple[str, ...] = ()
    """What to run, in this order, each line as it stands."""
    how: How = ""
    """Where ``mend`` is run: by a database administrator, in a shell, as lines of the server's
    option file before a restart; or ``advice``, which only a person can follow."""
    code: int = 0
    """Exit code of a failure where it is not the area's."""

    @property
    def exit_code(self) -> int:
        """The exit code that it calls for; 0 unless it is a failure."""
        return (self.code or _CODES[self.area]) if self.level == "failure" else 0

    def as_dict(self) -> dict[str, Any]:
        """The object of ``--json``."""
        fields = asdict(self)
        del fields["code"]
        return {**fields, "mend": list(self.mend)}


def literal(value: str) -> str:
    """``value`` as an SQL string."""
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"
