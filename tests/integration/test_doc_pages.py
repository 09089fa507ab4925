"""The Python in the manuals for developers runs, from top to bottom, as it stands there."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType

from confluent_kafka import Producer

from tests.support.harness import create_topic
from tests.support.sql import Database

DOCS = Path(__file__).resolve().parents[2] / "docs"
URL = "://root@127.0.0.1:3306/shop"
BOOTSTRAP = "127.0.0.1:9092"
_numbers = itertools.count(1)


def run_page(name: str, database: Database, replaced: dict[str, str]) -> None:
    """Run a page's blocks in one namespace, on the test's servers."""
    page = DOCS / name
    text = page.read_text()
    replaced = {URL: database.text.removeprefix("mysql+pymysql"), **replaced}
    # A module of its own: SQLAlchemy and dataclasses look names up there.
    module = ModuleType(f"page_{next(_numbers)}")
    sys.modules[module.__name__] = module
    namespace = module.__dict__
    for match in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        code = match[1]
        for old, new in replaced.items():
            code = code.replace(old, new)
        line = text.count("\n", 0, match.start(1))
        exec(compile("\n" * line + code, str(page), "exec", dont_inherit=True), namespace)
    namespace["engine"].dispose()
    del sys.modules[module.__name__]


def test_writer(database: Database) -> None:
    run_page("writer.md", database, {})
    found = database.sql(
        "SELECT event_type, aggregate_type, aggregate_id FROM outbox_event"
        " WHERE payload NOT LIKE '%\"n\"%' ORDER BY id"
    )
    assert [" ".join(row) for row in found] == [
        "ORDER_PLACED order 1",
        "KEPT order 1",
        "PLACED order 2",
        "TIMED order 1",
        "INVOICE_PAID invoice 1",
        "PLACED order 9",
        "PAID order 9",
    ]
    assert database.sql("SELECT COUNT(*) FROM outbox_event")[0][0] == 2507


def test_inbox(database: Database, kafka: str) -> None:
    topic = f"doc-inbox-{os.getpid()}-{next(_numbers)}"
    create_topic(kafka, topic, 1)
    producer = Producer({"bootstrap.servers": kafka, "log_level": 4})
    value = json.dumps({"customer": "bob", "total": "7.50"}).encode()
    for _ in range(2):
        producer.produce(topic, key="1", value=value, headers={"id": b"e-1"})
    assert producer.flush(30) == 0
    replaced = {"outbox.event.order": topic, '"points",\n        "ena': f'"{topic}",\n        "ena'}
    replaced['"group.id": "visits"'] = f'"group.id": "{topic}-visits"'
    run_page("inbox.md", database, {BOOTSTRAP: kafka, **replaced})
    assert dict(database.sql("SELECT customer, points FROM accounts")) == {"ann": 12, "bob": 8}
