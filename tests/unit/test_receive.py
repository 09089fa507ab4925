"""Reading from the network over TLS: all that has come, nothing lost at its end."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from cdc_relay.binlog.stream import BinlogSource
from cdc_relay.errors import SourceUnavailableError
from tests.support.certificates import self_signed

_RECORD = 16 * 1024
_RESET = struct.pack("ii", 1, 0)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return self_signed(tmp_path_factory.mktemp("tls") / "server.pem")


@pytest.fixture
def ends(certificate: Path) -> Iterator[tuple[ssl.SSLSocket, ssl.SSLSocket]]:
    """The server's and the client's end of a connection."""
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate)
    client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_side.check_hostname = False
    client_side.verify_mode = ssl.CERT_NONE
    with ExitStack() as opened, socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=10)
        server, _ = listener.accept()
        server.settimeout(10)
        found: list[ssl.SSLSocket] = []
        thread = threading.Thread(
            target=lambda: found.append(server_side.wrap_socket(server, server_side=True))
        )
        thread.start()
        wrapped = opened.enter_context(client_side.wrap_socket(client))
        thread.join(10)
        yield opened.enter_context(found[0]), wrapped


def source(read_timeout: float = 10.0) -> BinlogSource:
    return BinlogSource(
        {}, "shop", "outbox_event", {},
        server_id=1, replica_uuid=uuid.UUID(int=0), heartbeat=1.0, read_timeout=read_timeout,
        batch_rows=100, idle_interval=1.0, find=lambda _: None,
    )  # fmt: skip


def receive_all(end: ssl.SSLSocket, size: int) -> list[bytes]:
    end.settimeout(10)
    found: list[bytes] = []
    while sum(map(len, found)) < size:
        found.append(source()._receive(end))
    return found


def test_records_that_have_come_are_taken_together(
    ends: tuple[ssl.SSLSocket, ssl.SSLSocket],
) -> None:
    server, client = ends
    data = bytes(range(256)) * 64 * 4
    server.sendall(data)
    server.sendall(b"the end")
    client.settimeout(10)
    client.recv(1)  # so that the rest is here, in the kernel
    found = receive_all(client, len(data) + 6)
    assert b"".join(found) == data[1:] + b"the end"
    assert len(found) < 5
    assert client.gettimeout() == 10


def test_one_reading_is_bounded(ends: tuple[ssl.SSLSocket, ssl.SSLSocket]) -> None:
    server, client = ends
    data = b"x" * (64 * _RECORD)
    thread = threading.Thread(target=lambda: server.sendall(data))
    thread.start()
    found = receive_all(client, len(data))
    thread.join(10)
    assert b"".join(found) == data
    assert max(map(len, found)) < 10 * _RECORD


def test_a_single_byte_is_not_waited_upon(ends: tuple[ssl.SSLSocket, ssl.SSLSocket]) -> None:
    server, client = ends
    client.settimeout(10)
    server.sendall(b"x")
    assert source()._receive(client) == b"x"


@pytest.mark.parametrize("how", ["close", "reset"])
def test_what_came_before_the_end_is_given_and_then_the_end(
    ends: tuple[ssl.SSLSocket, ssl.SSLSocket], how: str
) -> None:
    server, client = ends
    client.settimeout(10)
    server.sendall(b"last words")
    if how == "close":
        server.close()
        found = source()._receive(client)
    else:
        found = source()._receive(client)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        server.close()
    assert found == b"last words"
    for _ in range(2):
        with pytest.raises(SourceUnavailableError, match=r"closed the connection|broke"):
            source()._receive(client)


def test_silence_counts_as_death_after_the_read_timeout(
    ends: tuple[ssl.SSLSocket, ssl.SSLSocket],
) -> None:
    server, client = ends
    client.settimeout(0.2)
    server.sendall(b"x" * (2 * _RECORD))
    short = source(read_timeout=0.2)
    left = 2 * _RECORD
    while left:
        left -= len(short._receive(client))
    with pytest.raises(SourceUnavailableError, match=r"nothing was heard for 0\.2 s"):
        short._receive(client)


def test_what_comes_after_a_stop_is_still_deciphered(
    ends: tuple[ssl.SSLSocket, ssl.SSLSocket],
) -> None:
    """The thread that reads may be behind: it must never take cipher for the log's bytes."""
    server, client = ends
    client.settimeout(10)
    data = b"x" * (4 * _RECORD)
    server.sendall(data)
    client.recv(1)  # so that the rest is here, in the kernel
    stopped = source()
    stopped._connection = SimpleNamespace(_sock=client)
    stopped.stop()
    found = b""
    with suppress(SourceUnavailableError):  # its end
        while len(found) < 2 * len(data):
            found += stopped._receive(client)
    assert set(found) <= {ord("x")}
    assert len(found) < len(data)
