"""A webhook on loopback that keeps what it was sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Webhook:
    """What a webhook has received; it answers with ``status``."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.status = 200
        self.answers = threading.Event()
        """Cleared, it keeps who has sent something waiting."""
        self.answers.set()
        self.arrived = threading.Semaphore(0)
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator[None]:
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                webhook.received.append(json.loads(body))
                webhook.answers.wait(60)
                self.send_response(webhook.status)
                self.end_headers()
                webhook.arrived.release()

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            self.url = f"json://127.0.0.1:{server.server_port}/s3cret-hook"
            try:
                yield
            finally:
                server.shutdown()
                thread.join()
