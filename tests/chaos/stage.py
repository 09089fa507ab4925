"""Servers behind proxies, started once for all seeds and when first needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Self

from dev.database import Database as Server
from tests.support.brokers import ProxiedKafka
from tests.support.proxy import Proxy


class Stage:
    """One broker and the databases by name. Use as a context manager."""

    def __init__(
        self, servers: Mapping[str, Callable[[], Server]], broker: Callable[[], ProxiedKafka]
    ) -> None:
        """The callables return running servers; they are called once, from the main thread."""
        self._make_servers = servers
        self._make_broker = broker
        self._servers: dict[str, tuple[Server, Proxy]] = {}
        self._broker: ProxiedKafka | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def broker(self) -> ProxiedKafka:
        if self._broker is None:
            self._broker = self._make_broker()
        return self._broker

    def server(self, name: str) -> tuple[Server, Proxy]:
        """A database and the proxy before it."""
        if name not in self._servers:
            server = self._make_servers[name]()
            self._servers[name] = (server, self._stack.enter_context(Proxy(server.port)))
        return self._servers[name]

    def heal(self, name: str) -> None:
        """Let everything run that a seed has used, and wait until it does."""
        server, proxy = self.server(name)
        for one in (server, self.broker):
            one.resume()
            if not one.alive:
                one.start(wait=None)
        for net in (proxy, self.broker.proxy):
            net.delay = 0.0
            net.cut()  # whatever was dumb is forgotten on both sides
            net.restore()
            net.mend()
        for one in (server, self.broker):
            one.wait_ready()
