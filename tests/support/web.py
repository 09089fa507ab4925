"""What a relay serves over HTTP, as a client sees it."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.support.harness import Harness, Process


class Reply(NamedTuple):
    """One answer."""

    status: int
    headers: Mapping[str, str]
    """Names in any case."""
    body: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Web:
    """Asks one relay. Made for a relay that was started with ``HTTP=127.0.0.1:0`` or the like."""

    def __init__(self, shop: Harness, process: Process) -> None:
        shop.until(lambda: process.logged("serving HTTP") or not process.running)
        assert process.running, process.text()
        url = process.logged("serving HTTP")[-1]["url"]
        self.port = int(re.search(r":(\d+)/$", url)[1])  # type: ignore[index]

    def ask(
        self, path: str, headers: Mapping[str, str] | None = None, *, method: str = "GET"
    ) -> Reply:
        """Any request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=15)
        try:
            connection.request(method, path, headers=dict(headers or {}))
            answer = connection.getresponse()
            return Reply(answer.status, answer.headers, answer.read().decode())
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """The samples by their name, labels included as they are written."""
        text = self.ask("/metrics").body
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def healthy(self) -> bool:
        return self.ask("/healthz").status == 200

    def ready(self) -> bool:
        return self.ask("/readyz").status == 200

    def figures(self) -> dict[str, float]:
        """The numbers on the page, as it is sent."""
        html = self.ask("/").body
        found = re.findall(r'<data data-figure="(\w+)" data-level="\w+" value="([^"]+)">', html)
        return {name: float(value) for name, value in found}
