"""A TCP proxy that stands for a bad network: dumb, cut, slow, or losing the answers."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Self

_CHUNK = 64 * 1024
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Forwards a loopback port to another, each direction of a connection in a thread of its own,
    so one that is not read holds up no other. Use as a context manager."""

    def __init__(self, target: int) -> None:
        self._target = ("127.0.0.1", target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._dumb: set[socket.socket] = set()
        self._swallowing = False
        self._losing = False
        self._is_cut = False
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self.accepted = 0
        """Connections so far."""
        self.delay = 0.0
        """Seconds by which every piece of data comes later."""
        self.watch: Callable[[], Callable[[bytes], None]] | None = None
        """Makes what looks at the data that a client sends, one for each connection."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)
        self._reset_all()

    def swallow(self) -> None:
        """From now on take every byte and give none, on connections old and new; no reset."""
        with self._lock:
            self._swallowing = True
            self._dumb |= self._open

    def restore(self) -> None:
        """Serve new connections again. Those of before stay dumb: the network has forgotten
        them."""
        self._swallowing = False

    def lose_answers(self) -> None:
        """What clients send arrives, and they never hear of it, until ``cut``."""
        self._losing = True

    def cut(self) -> None:
        """Reset every connection; new ones are reset too until ``mend``."""
        self._is_cut = True
        self._reset_all()
        self._losing = False

    def mend(self) -> None:
        """Serve again."""
        self._is_cut = False

    def lead_to(self, target: int) -> None:
        """Let new connections go to another port, as an address that moves to another server."""
        self._target = ("127.0.0.1", target)

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                if self._ending:
                    return
                continue
            self.accepted += 1
            if self._is_cut:
                self._reset(near)
                continue
            try:
                far = socket.create_connection(self._target, 10)
            except OSError:  # the server is down
                self._reset(near)
                continue
            far.settimeout(None)
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {near, far}
                if self._swallowing:
                    self._dumb |= {near, far}
            for source, target, answers in ((near, far, False), (far, near, True)):
                pump = threading.Thread(
                    target=self._pump, args=(source, target, answers), daemon=True
                )
                pump.start()

    def _pump(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        look = self.watch() if self.watch is not None and not answers else None
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                if look is not None:
                    look(data)
                if self.delay:
                    time.sleep(self.delay)
                if not (source in self._dumb or (answers and self._losing)):
                    target.sendall(data)
            if source in self._dumb:
                return  # the other end must not hear of it
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            self._forget(sock)
            sock.close()

    def _reset_all(self) -> None:
        with self._lock:
            sockets = list(self._open)
        for sock in sockets:
            self._reset(sock)

    def _reset(self, sock: socket.socket) -> None:
        """Close with a reset, and wake the thread that reads it."""
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RD)
        self._forget(sock)
        sock.close()

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.discard(sock)
            self._dumb.discard(sock)
