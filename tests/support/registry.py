"""A small schema registry that speaks the HTTP interface of Confluent's, on a loopback port.

Subjects, versions, ids shared by equal schemas, look-ups and the error codes that clients act on
(https://docs.confluent.io/platform/current/schema-registry/develop/api.html). Schemas are checked
for being JSON (Avro, JSON Schema), not for compatibility.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Answer = tuple[int, Any]


class SchemaRegistry:
    """The schemas, and the requests that came (``"POST /subjects/x/versions"``)."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self._schemas: list[dict[str, Any]] = []
        self._subjects: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        self.url = ""

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[SchemaRegistry]:
        """A registry that answers until the body ends."""
        made = cls()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                self._answer(made.get)

            def do_POST(self) -> None:
                self._answer(made.post)

            def _answer(self, work: Callable[[list[str], Any], Answer]) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"null")
                path = urlsplit(self.path).path
                made.requests.append(f"{self.command} {path}")
                parts = [unquote(part) for part in path.strip("/").split("/")]
                with made._lock:
                    status, answer = work(parts, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        made.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            server.server_close()
            thread.join(10)

    def get(self, path: list[str], _: Any) -> Answer:
        match path:
            case ["subjects"]:
                return 200, sorted(self._subjects)
            case ["schemas", "ids", number]:
                if not 0 < int(number) <= len(self._schemas):
                    return _error(40403, "Schema not found")
                return 200, self._schemas[int(number) - 1]
            case ["subjects", subject, "versions"]:
                return 200, list(range(1, len(self._subjects[subject]) + 1))
            case ["subjects", subject, "versions", version]:
                ids = self._subjects.get(subject)
                if ids is None:
                    return _error(40401, f"Subject '{subject}' not found.")
                number = len(ids) if version == "latest" else int(version)
                if not 0 < number <= len(ids):
                    return _error(40402, f"Version {version} not found.")
                return 200, self._version(subject, number)
        return _error(404, "HTTP 404 Not Found")

    def post(self, path: list[str], body: Any) -> Answer:
        match path:
            case ["subjects", subject, "versions"]:
                if body.get("schemaType", "AVRO") != "PROTOBUF":
                    try:
                        json.loads(body["schema"])
                    except ValueError:
                        return _error(42201, "Input schema is an invalid schema")
                number = self._id(_schema(body))
                ids = self._subjects.setdefault(subject, [])
                if number not in ids:
                    ids.append(number)
                return 200, {"id": number}
            case ["subjects", subject]:
                ids = self._subjects.get(subject)
                if ids is None:
                    return _error(40401, f"Subject '{subject}' not found.")
                number = self._id(_schema(body))
                if number not in ids:
                    return _error(40403, "Schema not found")
                return 200, self._version(subject, ids.index(number) + 1)
        return _error(404, "HTTP 404 Not Found")

    def _id(self, schema: dict[str, Any]) -> int:
        if schema not in self._schemas:
            self._schemas.append(schema)
        return self._schemas.index(schema) + 1

    def _version(self, subject: str, number: int) -> dict[str, Any]:
        schema_id = self._subjects[subject][number - 1]
        schema = self._schemas[schema_id - 1]
        return {"subject": subject, "version": number, "id": schema_id, **schema}


def _schema(body: dict[str, Any]) -> dict[str, Any]:
    kept = {key: body[key] for key in ("schema", "schemaType", "references") if body.get(key)}
    return {"schemaType": "AVRO", **kept}


def _error(code: int, message: str) -> Answer:
    return int(str(code)[:3]), {"error_code": code, "message": message}
