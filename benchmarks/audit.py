"""Time and memory of ``cdc-relay audit`` over a number of events.

``python -m benchmarks.audit --rows 1000000`` on the servers that ``python3 -m dev env`` names.
``--aggregates`` sets how many there are (one of each event without it); with at most 1,000 of them
faults are planted: in each hundredth batch of 10,000 ten records are left out, ten are sent twice,
and ten come behind later ones of their aggregate. All of them, and no other, have to be found.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time

from confluent_kafka import Producer
from sqlalchemy import create_engine, text

from cdc_relay.outbox import table_ddl

_HALF = """
INSERT INTO {t} (event_id, aggregate_type, aggregate_id, event_type, payload, status)
SELECT UUID(), 'bench', CONCAT('k', ({n} + id) % {k}), 'CREATED', '{{"total": 12.5}}', 1
FROM {t} LIMIT {m}"""
_PLANTED = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--aggregates", type=int, default=0)
    arguments = parser.parse_args()
    rows: int = arguments.rows
    name = f"audit_bench_{os.getpid()}"
    environment = {
        **os.environ,
        "CDC_RELAY_TABLE": name,
        "CDC_RELAY_NAME": name,
        "CDC_RELAY_TOPIC": name,
    }
    engine = create_engine(os.environ["CDC_RELAY_DATABASE_URL"], isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("SET SESSION sql_log_bin = 0"))
        for statement in table_ddl(name):
            connection.execute(text(statement))
        try:
            _fill(connection, name, rows, arguments.aggregates or 2**62)
            planted = _send(connection, name, faulty=0 < arguments.aggregates <= 1000)
            started = time.monotonic()
            command = [sys.executable, "-m", "cdc_relay", "audit", "--until", "0s", "--json"]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
            seconds = time.monotonic() - started
        finally:
            connection.execute(text(f"DROP TABLE {name}"))
    report = json.loads(done.stdout)
    assert (report["rows"], report["records"]) == (rows, rows), report
    found = (report["missing"]["sent"], report["duplicates"], report["out_of_order"])
    assert found == (planted,) * 3, report
    assert done.returncode == report["exit_code"] == (6 if planted else 0)
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"{rows:,} events: {seconds:.1f} s, {rows / seconds:,.0f}/s, {memory:.0f} MiB at most")
    if planted:
        print(
            f"{planted} missing, {planted} twice and {planted} out of order were planted and found"
        )


def _fill(connection: object, name: str, rows: int, aggregates: int) -> None:
    """Double the table until it has so many rows."""
    run = connection.execute  # type: ignore[attr-defined]
    run(
        text(
            f"INSERT INTO {name} (event_id, aggregate_type, aggregate_id, event_type, status)"
            " VALUES (UUID(), 'bench', 'k0', 'CREATED', 1)"
        )
    )
    there = 1
    while there < rows:
        step = min(there, rows - there, 100_000)
        run(text(_HALF.format(t=name, n=there, m=step, k=aggregates).replace(":", "\\:")))
        there += step


def _send(connection: object, name: str, *, faulty: bool) -> int:
    """Records as the relay would have sent them, but for so many faults of each kind."""
    producer = Producer(
        {
            "bootstrap.servers": os.environ["CDC_RELAY_KAFKA_BOOTSTRAP"],
            "enable.idempotence": True,
            "linger.ms": 50,
            "compression.type": "lz4",
        }
    )
    last = batches = planted = 0
    while True:
        found = connection.execute(  # type: ignore[attr-defined]
            text(
                "SELECT id, event_id, aggregate_id, CAST(UNIX_TIMESTAMP(created_at) * 1000 AS"
                f" UNSIGNED) FROM {name} WHERE id > {last} ORDER BY id LIMIT 10000"
            )
        ).all()
        if not found:
            break
        last = found[-1][0]
        if faulty and batches % 100 == 0 and len(found) == 10_000:
            # Of aggregates that are in the batch ten times at least.
            late, twice = found[_PLANTED : 2 * _PLANTED], found[2 * _PLANTED : 3 * _PLANTED]
            found = [*found[2 * _PLANTED :], *late, *twice]
            planted += _PLANTED
        batches += 1
        for _, event_id, key, at in found:
            headers = [("id", event_id.encode()), ("event_type", b"CREATED")]
            while True:
                try:
                    producer.produce(name, b'{"total": 12.5}', key, headers=headers, timestamp=at)
                    break
                except BufferError:
                    producer.poll(0.1)
        producer.poll(0)
    assert producer.flush(120) == 0
    return planted


if __name__ == "__main__":
    main()
