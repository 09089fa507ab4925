"""``python -m benchmarks [SCENARIO...]``: by default all that take no more than minutes."""

from __future__ import annotations

import sys

from benchmarks.command import run
from benchmarks.scenarios import SCENARIOS, WHEN_NAMED, WITHOUT_KAFKA

if __name__ == "__main__":
    sys.exit(
        run(
            "python -m benchmarks",
            {},
            SCENARIOS,
            when_named=WHEN_NAMED,
            without_kafka=WITHOUT_KAFKA,
        )
    )
