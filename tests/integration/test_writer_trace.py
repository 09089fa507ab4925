"""OpenTelemetry: a producer span at ``add``, its context in the headers; nothing without it.

The SDK is set up once in a process and for good, so each test is a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.sql import Database

ROOT = Path(__file__).resolve().parents[2]

PRELUDE = """
import json, sys
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from writer import Outbox
engine = create_engine(sys.argv[1])
EVENT = dict(aggregate_type="order", aggregate_id=7, event_type="PLACED", payload={})
"""
SDK = """
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("test")
"""


def run(database: Database, code: str) -> Any:
    """Run ``code`` after ``PRELUDE``; returns what its last line printed, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, database.text],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout or "null")


def headers(database: Database) -> list[Any]:
    found = database.sql("SELECT headers FROM outbox_event ORDER BY id")
    return [None if row[0] is None else json.loads(row[0]) for row in found]


@pytest.fixture(autouse=True)
def _table(mysql: Database) -> None:
    mysql.create_outbox()


def test_a_producer_span_and_its_context(mysql: Database) -> None:
    code = """
with Session(engine) as session, session.begin():
    context.attach(baggage.set_baggage("tenant", "t1"))
    with tracer.start_as_current_span("place order") as parent:
        event_id = Outbox().add(session, **EVENT, headers={"a": "b"})
        Outbox().add_all(session, [EVENT, EVENT])
        Outbox().add(session, **EVENT, headers={"traceparent": "00-own"})
spans = [span for span in exporter.get_finished_spans() if span.name != "place order"]
print(json.dumps({
    "parent": f"{parent.context.trace_id:032x}",
    "children": [span.parent.span_id == parent.context.span_id for span in spans],
    "ids": [f"{span.context.span_id:016x}-{span.context.trace_flags:02x}" for span in spans],
    "names": [span.name for span in spans],
    "kinds": [span.kind.name for span in spans],
    "attributes": [dict(span.attributes) for span in spans],
    "event_id": event_id,
}))
"""
    told = run(mysql, SDK + code)
    assert told["names"] == ["create order"] * 3
    assert told["kinds"] == ["PRODUCER"] * 3
    assert told["children"] == [True] * 3
    assert told["attributes"][0]["messaging.message.id"] == told["event_id"]
    assert told["attributes"][1]["messaging.batch.message_count"] == 2
    one, batch, _ = (f"00-{told['parent']}-{span}" for span in told["ids"])
    assert headers(mysql) == [
        {"traceparent": one, "baggage": "tenant=t1", "a": "b"},
        {"traceparent": batch, "baggage": "tenant=t1"},
        {"traceparent": batch, "baggage": "tenant=t1"},
        {"traceparent": "00-own"},
    ]


@pytest.mark.parametrize("prelude", ["", "from opentelemetry import trace\n"])
def test_headers_are_untouched_without_an_sdk(mysql: Database, prelude: str) -> None:
    code = """
with Session(engine) as session, session.begin():
    Outbox().add(session, **EVENT)
    Outbox().add(session, **EVENT, headers={"a": "b"})
print(json.dumps("opentelemetry" in sys.modules))
"""
    assert run(mysql, prelude + code) is bool(prelude)
    assert headers(mysql) == [None, {"a": "b"}]


def test_a_failed_insert_is_the_spans_error(mysql: Database) -> None:
    code = """
from sqlalchemy.exc import IntegrityError
with Session(engine) as session:
    Outbox().add(session, **EVENT, event_id="e-1")
    try:
        Outbox().add(session, **EVENT, event_id="e-1")
    except IntegrityError:
        pass
print(json.dumps([span.status.status_code.name for span in exporter.get_finished_spans()]))
"""
    assert run(mysql, SDK + code) == ["UNSET", "ERROR"]
