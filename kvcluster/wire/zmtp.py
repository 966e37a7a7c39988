"""ZMTP 3.0, the protocol of ZeroMQ over TCP, as much of it as a publisher needs: https://rfc.zeromq.org/spec/23/

    both       greeting: 64 bytes with the version and the mechanism, here NULL
    both       READY, a command with the type of the socket
    both       messages of one or more frames; PING and PONG, commands of peers that look for signs of life

libzmq keeps what a peer sends without a bound: subscriptions, and messages whose last frame never arrives. So the
publisher of KV events reads what peers send with this module (docs/adr/0074). `Inbound` holds one message at most, and
refuses a frame by its header, before any of its bytes is kept.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvcluster.wire.checks import at_most, must

GREETING_BYTES = 64
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_NULL = b"NULL".ljust(20, b"\0")
_VERSION = slice(10, 12)
_MECHANISM = slice(12, 32)
GREETING = (_SIGNATURE + b"\x03\x00" + _NULL).ljust(GREETING_BYTES, b"\0")
"""Peers of a newer version answer with version 3.0, in which subscriptions are messages."""

_MORE, _LONG, _COMMAND = 1, 2, 4
_LENGTH = struct.Struct(">Q")
_SHORT_BYTES = 255
_COMMAND_BYTES = 1_024
"""READY with an identity of 255 bytes, and a name or two of other implementations."""

_PING_CONTEXT = slice(7, 23)
"""Behind the name and the two bytes of a time to live: at most 16 bytes, which PONG sends back."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a peer may send: the sockets that it may be, and the frames and bytes of one message."""

    sockets: Collection[bytes]
    frames: int
    nbytes: int


class Inbound:
    """What one peer sends. `feed` at most `room` bytes, then take messages from `next` until there is none.

    Raises ProtocolError or LimitError for a peer that does not keep to the protocol; its connection is to be closed."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._buffer = bytearray()
        self._frames: list[bytes] = []
        self._nbytes = 0
        self._greeted = False
        self.ready = False
        """Whether the peer has stated the type of its socket."""
        self.answer = b""
        """What is to be sent for the last PING; the caller empties it."""

    @property
    def room(self) -> int:
        """The bytes that may be fed now: some is always wanted while `next` returns None."""
        return max(self._bounds.nbytes, _COMMAND_BYTES, GREETING_BYTES) + 9 - len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Takes bytes of the peer."""
        self._buffer += data
        assert self.room >= 0, "no more than there is room for"

    def next(self) -> list[bytes] | None:
        """Returns the frames of the next message; [] for a command; None if neither is there yet."""
        while (frame := self._frame()) is not None:
            flags, body = frame
            if flags & _COMMAND:
                self._command(body)
                return []
            must(self.ready, "a message of ZMTP before READY")
            self._nbytes += len(body)
            self._frames.append(body)
            if not flags & _MORE:
                message, self._frames, self._nbytes = self._frames, [], 0
                return message
            at_most(len(self._frames) + 1, self._bounds.frames, "frames of a message of ZMTP")
        return None

    def _frame(self) -> tuple[int, bytes] | None:
        """Returns the flags and the body of the next frame, None if it is not whole yet."""
        if not self._greeted and not self._greeting():
            return None
        buffer = self._buffer
        if not buffer:
            return None
        flags = buffer[0]
        must(not flags & ~(_MORE | _LONG | _COMMAND), f"a frame of ZMTP with flags {flags:#x}")
        head = 9 if flags & _LONG else 2
        if len(buffer) < head:
            return None
        size = _LENGTH.unpack_from(buffer, 1)[0] if flags & _LONG else buffer[1]
        if flags & _COMMAND:
            at_most(size, _COMMAND_BYTES, "bytes of a command of ZMTP")
        else:
            at_most(self._nbytes + size, self._bounds.nbytes, "bytes of a message of ZMTP")
        if len(buffer) < head + size:
            return None
        body = bytes(buffer[head : head + size])
        del buffer[: head + size]
        return flags, body

    def _greeting(self) -> bool:
        """Reads the greeting as far as it is there. Returns whether it is whole."""
        head = bytes(self._buffer[:GREETING_BYTES])
        must(
            head[:1] in (b"", b"\xff") and (len(head) < 10 or head[9] & 1), "this is not ZMTP, or of a version before 2"
        )
        must(len(head) < 11 or head[_VERSION][0] >= 3, "ZMTP of a version before 3.0, of a ZeroMQ before 4.0")
        if len(head) < GREETING_BYTES:
            return False
        must(head[_MECHANISM] == _NULL, "ZMTP with another mechanism than NULL")
        del self._buffer[:GREETING_BYTES]
        self._greeted = True
        return True

    def _command(self, body: bytes) -> None:
        name = body[1 : 1 + body[0]] if body else b""
        if name == b"READY":
            must(not self.ready, "a second READY of ZMTP")
            kind = _properties(body[6:]).get(b"socket-type", b"")
            must(kind in self._bounds.sockets, f"a ZMTP socket of type {kind!r:.40} does not connect here")
            self.ready = True
        elif name == b"PING":
            must(self.ready, "a PING of ZMTP before READY")
            must(len(body) <= _PING_CONTEXT.stop, "a PING of ZMTP with a long context")
            self.answer = encode_frame(b"\x04PONG" + body[_PING_CONTEXT], _COMMAND)
        else:
            must(name == b"PONG", f"an unknown command of ZMTP: {name!r:.40}")


def _properties(data: bytes) -> dict[bytes, bytes]:
    found, at = {}, 0
    while at < len(data):
        name = data[at + 1 : at + 1 + data[at]].lower()
        start = at + 1 + data[at] + 4
        must(start <= len(data), "properties of ZMTP that are cut short")
        at = start + int.from_bytes(data[start - 4 : start], "big")
        must(at <= len(data), "properties of ZMTP that are cut short")
        found[name] = data[start:at]
    return found


def encode_ready(socket: bytes) -> bytes:
    """Returns the READY of a socket of that type."""
    return encode_frame(b"\x05READY\x0bSocket-Type" + len(socket).to_bytes(4, "big") + socket, _COMMAND)


def encode_frame(body: bytes, flags: int = 0) -> bytes:
    """Returns one frame."""
    if len(body) <= _SHORT_BYTES:
        return bytes((flags, len(body))) + body
    return bytes((flags | _LONG,)) + _LENGTH.pack(len(body)) + body


def encode_message(frames: Sequence[bytes]) -> bytes:
    """Returns a message of these frames."""
    last = len(frames) - 1
    return b"".join(encode_frame(body, _MORE if at < last else 0) for at, body in enumerate(frames))
