"""A TCP proxy that can go dumb: connections stay open and nothing comes through."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from typing import Self

_CHUNK = 64 * 1024


class Proxy:
    """Forwards a loopback port to another; one thread. Use as a context manager."""

    def __init__(self, target: int) -> None:
        self._target = ("127.0.0.1", target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, socket.socket] = {}
        self._dead: set[socket.socket] = set()
        self._swallowing = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self.accepted = 0
        """Connections so far."""

    def __enter__(self) -> Self:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(10)
        for sock in (self._listener, *self._peers, *self._dead):
            sock.close()
        self._selector.close()

    def swallow(self) -> None:
        """From now on take every byte and give none, on connections old and new; no reset."""
        self._swallowing.set()

    def restore(self) -> None:
        """Serve new connections again. Those of before stay dumb: the network has forgotten
        them."""
        self._swallowing.clear()

    def _run(self) -> None:
        dumb = False
        while not self._ending.is_set():
            ready = self._selector.select(0.05)
            if self._swallowing.is_set() != dumb:
                dumb = not dumb
                if dumb:
                    self._dead.update(self._peers)
            for key, _ in ready:
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._listener:
                    self._accept(dumb)
                elif sock.fileno() >= 0:
                    self._forward(sock)

    def _accept(self, dumb: bool) -> None:
        near, _ = self._listener.accept()
        self.accepted += 1
        far = socket.create_connection(self._target, 10)
        for sock, peer in ((near, far), (far, near)):
            self._peers[sock] = peer
            if dumb:
                self._dead.add(sock)
            self._selector.register(sock, selectors.EVENT_READ)

    def _forward(self, sock: socket.socket) -> None:
        peer = self._peers[sock]
        try:
            data = sock.recv(_CHUNK)
            if sock in self._dead:
                if not data:
                    self._selector.unregister(sock)
                return
            if data:
                peer.sendall(data)
                return
        except OSError:
            pass
        for end in (sock, peer):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(end)
            self._peers.pop(end, None)
            end.close()
