"""The HTTP server: a handful of read-only paths, answered from memory.

waitress serves them in threads of its own; none of them is one of the relay's. Nothing that a
client sends is kept, shown or logged.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import hmac
import ipaddress
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

import structlog

from cdc_relay.config import Settings
from cdc_relay.errors import ConfigError
from cdc_relay.store import Store
from cdc_relay.vitals import Vitals

if TYPE_CHECKING:
    from cdc_relay.http.report import Report

log: Any = structlog.get_logger(__name__)

Answer = tuple[str, list[tuple[str, str]], bytes]
"""Status line, headers, body."""

_THREADS: Final = 2
_LOOP_S: Final = 1.0
# Beyond so many connections those that ask nothing make room, the longest silent first.
_MOST_CONNECTIONS: Final = 50
_OPEN_PATHS: Final = ("/metrics", "/healthz", "/readyz")
_STATIC: Final = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "uplot.js": "text/javascript; charset=utf-8",
    "uplot.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_HEADERS: Final = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Permissions-Policy", "camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
)


class Listener:
    """The address, taken before anything else is begun: a port that is not free is found out
    at once."""

    def __init__(self, host: str, port: int) -> None:
        """Raises ``ConfigError`` where the address cannot be had."""
        try:
            [(family, _, _, _, address), *_] = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            self.socket = socket.socket(family, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"http: {host} is not an address here: {reason}") from None
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind(address)
            self.socket.listen(64)
        except OSError as error:
            self.socket.close()
            taken = error.errno == errno.EADDRINUSE
            why = "is taken" if taken else f"cannot be had: {error.strerror}"
            raise ConfigError(
                f"http: {host}:{port} {why}; give --http another port, 0 for a free one, or off"
            ) from None
        self.host, self.port = self.socket.getsockname()[:2]
        self.loopback = ipaddress.ip_address(self.host.partition("%")[0]).is_loopback

    @property
    def address(self) -> str:
        """Host and port as they stand in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def close(self) -> None:
        """Give the address back."""
        self.socket.close()


class Application:
    """The WSGI application. Threads may share it."""

    def __init__(self, report: Report, *, token: str, loopback: bool) -> None:
        """``token`` protects the page; without one it is shown only to this machine."""
        from cdc_relay.http import metrics

        self._report = report
        self._token = token
        self._loopback = loopback
        self._registry = metrics.make_registry(report)

    def __call__(
        self, environ: Mapping[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Answer one request."""
        try:
            status, headers, body = self._answer(environ)
        except Exception as error:  # told to the log, not to whoever asks
            log.error("a request failed", reason=f"{type(error).__name__}: {error}")
            status, headers, body = _text("500 Internal Server Error", "internal error\n")
        sent = [*headers, ("Content-Length", str(len(body))), *_HEADERS]
        if not any(name == "Cache-Control" for name, _ in headers):
            sent.append(("Cache-Control", "no-store"))
        start_response(status, sent)
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]

    def _answer(self, environ: Mapping[str, Any]) -> Answer:
        path = environ.get("PATH_INFO") or "/"
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            status, headers, body = _text("405 Method Not Allowed", "read-only: GET\n")
            return status, [*headers, ("Allow", "GET, HEAD")], body
        if path == "/metrics":
            from cdc_relay.http import metrics

            return (
                "200 OK",
                [("Content-Type", metrics.CONTENT_TYPE)],
                metrics.render(self._registry),
            )
        if path == "/healthz":
            return self._probe(self._report.alive())
        if path == "/readyz":
            return self._probe(self._report.ready())
        refusal = self._refusal(environ)
        if refusal is not None:
            return refusal
        return self._page(path, environ)

    def _probe(self, reasons: list[str]) -> Answer:
        status = "503 Service Unavailable" if reasons else "200 OK"
        body = {
            "status": "failing" if reasons else "ok",
            "role": self._report.vitals.role,
            "reasons": reasons,
        }
        return _json(status, body)

    def _page(self, path: str, environ: Mapping[str, Any]) -> Answer:
        from cdc_relay.http import page

        if path == "/":
            text = page.render(self._report)
            return "200 OK", [("Content-Type", "text/html; charset=utf-8")], text.encode()
        if path == "/data.json":
            wanted = parse_qs(str(environ.get("QUERY_STRING", ""))).get("range", ["1h"])[0]
            return _json("200 OK", page.data(self._report, wanted))
        name = path.removeprefix("/static/")
        if path.startswith("/static/") and name in _STATIC:
            body = resources.files("cdc_relay.http").joinpath("static", name).read_bytes()
            headers = [("Content-Type", _STATIC[name]), ("Cache-Control", "max-age=3600")]
            return "200 OK", headers, body
        return _text("404 Not Found", "not found\n")

    def _refusal(self, environ: Mapping[str, Any]) -> Answer | None:
        """Why the page is not shown to this request; None where it is."""
        if self._token:
            if _is_given(str(environ.get("HTTP_AUTHORIZATION", "")), self._token):
                return None
            status, headers, body = _text("401 Unauthorized", "the token is needed\n")
            challenge = ("WWW-Authenticate", 'Basic realm="cdc-relay", charset="UTF-8"')
            return status, [*headers, challenge], body
        if not self._loopback:
            return _text(
                "403 Forbidden",
                "the page is shown on loopback only; set http_token to show it here\n",
            )
        # A foreign name that was made to point here is another site's script (DNS rebinding).
        if not _is_local(str(environ.get("HTTP_HOST", ""))):
            return _text("403 Forbidden", "ask for it by localhost or 127.0.0.1\n")
        return None


def _is_given(header: str, token: str) -> bool:
    """Whether an Authorization header holds the token: Bearer, or Basic with it as password."""
    kind, _, value = header.partition(" ")
    given = b""
    if kind.lower() == "bearer":
        # WSGI gives the bytes of a header as Latin-1 (PEP 3333).
        given = value.strip().encode("latin-1", "replace")
    elif kind.lower() == "basic":
        with contextlib.suppress(binascii.Error, ValueError):
            given = base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    return hmac.compare_digest(given, token.encode())


def _is_local(host: str) -> bool:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _text(status: str, body: str) -> Answer:
    return status, [("Content-Type", "text/plain; charset=utf-8")], body.encode()


def _json(status: str, body: object) -> Answer:
    text = json.dumps(body, ensure_ascii=False, allow_nan=False) + "\n"
    return status, [("Content-Type", "application/json")], text.encode()


class Served:
    """A running server. ``close`` ends it and the looks behind it."""

    def __init__(
        self, listener: Listener, settings: Settings, vitals: Vitals, store: Store
    ) -> None:
        """Loads what it needs and begins to answer."""
        import waitress.server

        from cdc_relay.http.history import History
        from cdc_relay.http.looks import Looks
        from cdc_relay.http.report import Report

        # It warns whenever a request waits for a thread.
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)
        self._looks = Looks(settings, store)
        self._history = History(settings.sample_interval, vitals, self._looks)
        report = Report(settings, vitals, self._looks, self._history)
        token = settings.page_token()
        self._ended = False
        self._map: dict[int, Any] = {}
        create_server: Any = waitress.server.create_server
        self._server = create_server(
            Application(report, token=token, loopback=listener.loopback),
            self._map,
            sockets=[listener.socket],
            threads=_THREADS,
            # At its own limit waitress accepts nobody, the probes of an orchestrator included.
            connection_limit=2 * _MOST_CONNECTIONS,
            channel_timeout=30,
            max_request_header_size=16 * 1024,
            max_request_body_size=1024,
            ident=None,
            clear_untrusted_proxy_headers=True,
        )
        self._looks.start()
        self._history.start()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()
        log.info(
            "serving HTTP",
            url=f"http://{listener.address}/",
            page="with the token" if token else "open" if listener.loopback else "off",
        )

    def _run(self) -> None:
        asyncore = self._server.asyncore
        while not self._ended:
            asyncore.loop(timeout=_LOOP_S, use_poll=True, map=self._map, count=1)
            self._make_room()

    def _make_room(self) -> None:
        """Let browsers that keep their connections open, or who never ends a request, hold up
        nobody else. One connection is accepted in each turn of the loop, so this is in time."""
        channels = self._server.active_channels.values()
        excess = len(channels) - _MOST_CONNECTIONS
        if excess > 0:
            silent = [channel for channel in channels if not channel.requests]
            for channel in sorted(silent, key=lambda one: float(one.last_activity))[:excess]:
                channel.will_close = True

    def close(self) -> None:
        """End it; what is being answered is left."""
        self._ended = True
        self._looks.stop()
        self._history.stop()
        self._server.pull_trigger()
        self._thread.join(5)
        self._server.task_dispatcher.shutdown(timeout=1)
        for one in list(self._map.values()):
            with contextlib.suppress(OSError):
                one.close()
