"""What a shard's process keeps of its descriptors, whatever connects to it."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from kvcluster.testing.conformance.world import BOUND_S, ONE, TWO
from kvcluster.transport.listener import Descriptors
from kvcluster.wire import socket_frames
from kvcluster.wire.socket_frames import FrameKind
from tests.transport.peers import token

LIMIT = 256
OWN_FILES = 32
MANY = 300

SHARD = f"""
import resource
import sys

resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))
from kvcluster.testing.conformance import open_world
from tests.transport.test_tcp import Served

with open_world(Served) as world:
    print(world.served.address, flush=True)
    for _ in sys.stdin:
        own = [open(__file__ if "__file__" in globals() else sys.executable, "rb") for _ in range({OWN_FILES})]
        print(len(own), flush=True)
        for file in own:
            file.close()
"""


@contextmanager
def shard() -> Iterator[subprocess.Popen[str]]:
    """A process with few descriptors, and a shard in it; it opens files of its own with each line that it is sent."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SHARD], text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def opened(address: str, given: str, house: ExitStack) -> bool:
    """Whether one connection more is served. It is kept."""
    host, _, port = address.rpartition(":")
    link = house.enter_context(socket.create_connection((host, int(port)), timeout=BOUND_S))
    body = given.encode()
    link.sendall(socket_frames.encode_header(FrameKind.HELLO, len(body)) + body)
    with suppress(ConnectionError):
        return link.recv(socket_frames.HEADER.size)[3:4] == bytes([FrameKind.WELCOME])
    return False


def test_connections_leave_a_shard_the_descriptors_for_its_own_files() -> None:
    with shard() as process, ExitStack() as house:
        assert process.stdin is not None and process.stdout is not None
        address = process.stdout.readline().strip()
        served: dict[str, int] = {}
        for given in map(token, (ONE, TWO)):
            count = 0
            while count < MANY and opened(address, given, house):
                count += 1
            served[given] = count
            print("\n", file=process.stdin, end="", flush=True)
            assert process.stdout.readline().strip() == str(OWN_FILES), f"with {served} connections"
        assert all(0 < count < LIMIT // 4 for count in served.values()), "and each tenant has some"


@pytest.mark.parametrize("limit", [64, 256, 1_024])
def test_all_servers_of_a_process_leave_it_three_tenths(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    most = 10**9
    listener = Descriptors.STREAMS.bound(most) + Descriptors.UNKNOWN.bound(most)
    shm = 2 * (Descriptors.STREAMS.bound(most, 2) + Descriptors.UNKNOWN.bound(most, 2))
    scrapes = 4 * Descriptors.SCRAPES.bound(most)
    assert Descriptors.CALLS.bound(most) + listener + shm + scrapes <= 0.7 * limit, "of a shard"
    assert 2 * Descriptors.CALLS.bound(most) + scrapes <= 0.7 * limit, "of a coordinator"


def test_a_high_limit_or_none_leaves_the_bounds_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (2**20, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (limit, limit))
        assert [part.bound(512) for part in Descriptors] == [512] * len(Descriptors)
