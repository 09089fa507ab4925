"""Spans of the relay and the compensator, received by a collector that speaks OTLP over HTTP."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.support.harness import Harness

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SAMPLED = f"00-{TRACE}-00f067aa0ba902b7-01"
NOT_SAMPLED = f"00-{TRACE}-00f067aa0ba902b8-00"


class Collector:
    """Keeps what was exported to it."""

    def __init__(self) -> None:
        self.resources: list[dict[str, str]] = []
        self.spans: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                for found in ExportTraceServiceRequest.FromString(body).resource_spans:
                    attributes = found.resource.attributes
                    collector.resources.append(
                        {one.key: one.value.string_value for one in attributes}
                    )
                    for scope in found.scope_spans:
                        collector.spans += scope.spans
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    one = Collector()
    thread = threading.Thread(target=one.server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", one.url)
    try:
        yield one
    finally:
        one.server.shutdown()
        one.server.server_close()
        thread.join(10)


def insert(shop: Harness, key: str, parent: str | None) -> str:
    headers = None if parent is None else {"traceparent": parent, "tracestate": "a=b"}
    return shop.ins(key, {"n": 1}, headers=headers)


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_a_span_in_the_services_trace(
    delivery: str, mysql_shop: Harness, collector: Collector
) -> None:
    shop = mysql_shop
    relay = shop.relay(TRACES="true", DELIVERY=delivery)
    for key, parent in (("a", SAMPLED), ("b", NOT_SAMPLED), ("c", None), ("d", "no context")):
        insert(shop, key, parent)
    shop.wait_sent(4)
    assert relay.terminate() == 0, relay.text()
    insert(shop, "e", SAMPLED)
    assert shop.compensate("--force", TRACES="true", DELIVERY=delivery)["sent"] == 1

    spans = collector.spans
    topic = shop.topic_prefix + "order"
    assert [span.name for span in spans] == [f"send {topic}"] * 2
    for span, key in zip(spans, "ae", strict=True):
        assert span.trace_id.hex() == TRACE
        assert span.parent_span_id.hex() == "00f067aa0ba902b7"
        assert [link.span_id.hex() for link in span.links] == ["00f067aa0ba902b7"]
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
        found = {one.key: one.value.string_value for one in span.attributes}
        assert found["messaging.destination.name"] == topic
        assert found["messaging.kafka.message.key"] == key
    assert {one["service.name"] for one in collector.resources} == {"cdc-relay"}
    # What a consumer goes on from is the service's own context, untouched.
    sent = {message.key: message.headers.get("traceparent") for message in shop.messages()}
    expected = {"a": SAMPLED, "b": NOT_SAMPLED, "c": None, "d": "no context", "e": SAMPLED}
    assert sent == {key: value and value.encode() for key, value in expected.items()}


def test_a_collector_that_is_away_costs_nothing_but_its_spans(
    mysql_shop: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    relay = mysql_shop.relay(TRACES="true")
    event_id = insert(mysql_shop, "a", SAMPLED)
    mysql_shop.wait_sent(1)
    assert relay.terminate() == 0, relay.text()
    assert [message.event_id for message in mysql_shop.messages()] == [event_id]
