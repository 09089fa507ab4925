"""Just enough of the MySQL protocol to know that a server runs statements."""

import socket
import struct

_CAPABILITIES = 0x0008_8201  # LONG_PASSWORD, PROTOCOL_41, SECURE_CONNECTION, PLUGIN_AUTH
_OK, _MORE, _SWITCH, _ERROR = 0x00, 0x01, 0xFE, 0xFF

# A server that judges logins serves, whatever a test has done to root or demands of clients.
_REFUSED = {1044, 1045, 1698, 1862, 3159}


def answers(port: int, timeout: float = 2.0) -> bool:
    """Tell whether the server on the port lets root in and runs a statement.

    A login refused for its account also counts; a closed port or silence does not.
    """
    try:
        with socket.create_connection(("127.0.0.1", port), timeout) as wire:
            return _asks(wire)
    except (OSError, struct.error, IndexError):
        return False


def _asks(wire: socket.socket) -> bool:
    _, greeting = _read(wire)
    if greeting[0] != 10:
        return False
    login = struct.pack("<IIB23x", _CAPABILITIES, 1 << 24, 45)
    _write(wire, 1, login + b"root\0\0caching_sha2_password\0")
    while True:
        number, answer = _read(wire)
        if answer[0] == _SWITCH:
            _write(wire, number + 1, b"")
        elif answer[0] == _ERROR:
            return struct.unpack_from("<H", answer, 1)[0] in _REFUSED
        elif answer[0] == _OK:
            break
        elif answer[0] != _MORE:
            return False
    _write(wire, 0, b"\x03SELECT 1")
    works = _read(wire)[1][0] != _ERROR
    _write(wire, 0, b"\x01")  # COM_QUIT: no aborted connection in the server's log
    return works


def _read(wire: socket.socket) -> tuple[int, bytes]:
    header = _exactly(wire, 4)
    return header[3], _exactly(wire, int.from_bytes(header[:3], "little"))


def _exactly(wire: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = wire.recv(count - len(data))
        if not part:
            raise ConnectionError("connection closed")
        data += part
    return data


def _write(wire: socket.socket, number: int, body: bytes) -> None:
    wire.sendall(len(body).to_bytes(3, "little") + bytes([number]) + body)
