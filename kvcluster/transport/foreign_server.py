"""What listens at an address that does not answer as a server of ours.

gRPC says of another program's server only that it does not answer, and after a while. So it is greeted here as gRPC
does: a server of HTTP/2 sends its settings at once, most others say what they are. One that says nothing may be ours,
and stand still.
"""

from __future__ import annotations

import socket
from contextlib import suppress

from kvcluster.errors import ProtocolError

_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_HEADER_BYTES = 9
_SETTINGS = 4
_SHOWN = 60


def check_is_ours(address: str, wait_s: float) -> None:
    """Raises ProtocolError if what listens at `address` (host:port) says within `wait_s` that it is another program's
    server. Returns if it is one of HTTP/2, or does not answer."""
    said = _answer(address, wait_s)
    if not said or (len(said) >= _HEADER_BYTES and said[3] == _SETTINGS and not any(said[5:_HEADER_BYTES])):
        return
    line = said.splitlines()[0][:_SHOWN].decode("ascii", errors="replace")
    what = "an HTTP server without HTTP/2" if said.startswith(b"HTTP/") else "another program's server"
    raise ProtocolError(
        f"what listens at {address} is no kvcluster server but {what}, which says {line!r}: give the address of the "
        "coordinator, as `kvcluster up` prints it"
    )


def _answer(address: str, wait_s: float) -> bytes:
    """Returns the first bytes that the server sends; b"" if there is none, or it sends nothing in time."""
    host, _, port = address.rpartition(":")
    with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=wait_s) as connection:
        connection.sendall(_GREETING)
        said = b""
        while len(said) < _HEADER_BYTES and (more := connection.recv(4_096)):
            said += more
        return said
    return b""
