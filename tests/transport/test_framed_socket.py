"""A framed socket carries frames whole over a socket that transfers them in pieces, and ends by its deadline."""

from __future__ import annotations

import os
import random
import select
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvcluster.core.ids import Tenant
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import CallerError, CredentialError, ProtocolError
from kvcluster.testing.conformance.world import BOUND_S, soon
from kvcluster.transport.base import Deadline, Unavailable, read_whole
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.framed_socket import FramedSocket, dial
from kvcluster.transport.tenant_memory import UNCHARGED, Account, TenantMemory
from kvcluster.wire import socket_frames
from kvcluster.wire.socket_frames import FrameKind
from tests.resident import resident_bytes

MIB = 2**20


class Pair:
    """Two links that are each other's other side."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near, self.far = FramedSocket(near, "near"), FramedSocket(far, "far")


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Over unix sockets with the smallest buffers that there are."""
    near, far = socket.socketpair()
    for end in (near, far):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    pair = Pair(near, far)
    yield pair
    pair.near.close()
    pair.far.close()


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_what_follows_a_frame_arrives_in_order_however_it_is_cut(pair: Pair, aside: ThreadPoolExecutor) -> None:
    draw = random.Random(1)
    payloads = [memoryview(draw.randbytes(draw.choice([0, 1, 63, 5_000]))) for _ in range(3_000)]
    body = draw.randbytes(100_000)
    sent = aside.submit(lambda: pair.near.send(FrameKind.READ, body, soon(), payloads))
    assert pair.far.receive(FrameKind.READ, deadline=soon()) == (FrameKind.READ, body)
    for payload in payloads:
        into = bytearray(payload.nbytes)
        read_whole(pair.far.incoming(payload.nbytes, soon()), memoryview(into))
        assert into == payload
    sent.result(BOUND_S)


def test_a_payload_never_takes_what_comes_after_it(pair: Pair) -> None:
    pair.near.send(FrameKind.READ, b"", soon(), [memoryview(b"abc")])
    pair.near.send(FrameKind.DONE, b"", soon())
    pair.far.receive(FrameKind.READ, deadline=soon())
    into = memoryview(bytearray(100))
    incoming = pair.far.incoming(3, soon())
    assert incoming.read_into(into) == 3
    assert incoming.read_into(into) == 0, "it is at its end, and waits for nothing"
    assert pair.far.receive(FrameKind.DONE, deadline=soon()) == (FrameKind.DONE, b"")


@pytest.mark.parametrize(
    "wait",
    [
        lambda link: link.receive(FrameKind.READ, deadline=Deadline.after_ms(20)),
        lambda link: link.send(FrameKind.READ, b"", Deadline.after_ms(20), [memoryview(bytes(10**7))]),
        lambda link: read_whole(link.incoming(1, Deadline.after_ms(20)), memoryview(bytearray(1))),
    ],
)
def test_every_wait_ends_by_its_deadline(pair: Pair, wait: Callable[[FramedSocket], object]) -> None:
    with pytest.raises(Unavailable) as trouble:
        wait(pair.near)
    assert trouble.value.miss == Miss(MissReason.DEADLINE, "near")


@pytest.mark.parametrize(
    "wait",
    [
        lambda link: link.receive(FrameKind.READ, deadline=soon()),
        lambda link: link.send(FrameKind.READ, b"", soon(), [memoryview(bytes(10**7))]),
    ],
)
def test_any_thread_may_end_what_another_waits_for(
    pair: Pair, aside: ThreadPoolExecutor, wait: Callable[[FramedSocket], object]
) -> None:
    begun = threading.Event()

    def waiting() -> None:
        begun.set()
        wait(pair.near)

    ended = aside.submit(waiting)
    assert begun.wait(BOUND_S)
    pair.near.shutdown()
    with pytest.raises(Unavailable) as trouble:
        ended.result(BOUND_S)
    assert trouble.value.miss.reason is MissReason.SHARD_LOST


def test_why_the_other_side_takes_no_more_is_told_in_its_own_words(pair: Pair) -> None:
    pair.far.fail(CallerError("too many pages"), soon())
    pair.far.close()
    with pytest.raises(CallerError, match="too many pages"):
        pair.near.send(FrameKind.READ, b"", soon(), [memoryview(bytes(10**7))])


def test_who_waits_to_send_learns_that_the_other_side_has_ended_with_all_of_it_read(
    aside: ThreadPoolExecutor,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    pair = Pair(near, accepted)
    sending = aside.submit(lambda: pair.near.send(FrameKind.READ, b"", soon(), [memoryview(bytes(2**26))]))
    pair.far.receive(FrameKind.READ, deadline=soon())
    while select.select((), (near,), (), 0.05)[1]:
        """Its window is not full yet."""
    pair.far.shutdown()  # and what it reads from here on opens the window no more
    with pytest.raises(Unavailable):
        pair.far.fill(memoryview(bytearray(2**26)), soon())
    pair.far.close()
    with pytest.raises(Unavailable) as trouble:
        sending.result(BOUND_S / 2)
    assert trouble.value.miss.reason is MissReason.SHARD_LOST
    pair.near.close()


def test_a_frame_of_another_kind_is_refused_before_its_body_is_read(pair: Pair) -> None:
    pair.near.send(FrameKind.TAIL, bytes(1_000), soon())
    with pytest.raises(ProtocolError, match="a TAIL frame, expected HEAD or DONE"):
        pair.far.receive(FrameKind.HEAD, FrameKind.DONE, deadline=soon())


def test_descriptors_travel_with_a_frame_and_end_with_the_link(pair: Pair) -> None:
    reading, writing = os.pipe()
    pair.near.send_fds(FrameKind.WELCOME, b"hello", [reading], soon())
    os.close(reading)
    assert pair.far.receive(FrameKind.WELCOME, deadline=soon()) == (FrameKind.WELCOME, b"hello")
    (taken,) = pair.far.take_fds()
    os.write(writing, b"through")
    assert os.read(taken, 10) == b"through"
    pair.near.send_fds(FrameKind.WELCOME, b"", [taken], soon())
    os.close(taken)
    pair.far.receive(FrameKind.WELCOME, deadline=soon())
    pair.far.close()  # with a descriptor that was never received
    with pytest.raises(BrokenPipeError):
        os.write(writing, b"the other end is closed")
    os.close(writing)


def test_a_link_with_nothing_to_say_is_quiet_and_one_that_has_ended_is_not(pair: Pair) -> None:
    assert pair.near.is_quiet()
    pair.far.send(FrameKind.DONE, b"", soon())
    assert not pair.near.is_quiet()
    pair.near.receive(FrameKind.DONE, deadline=soon())
    pair.far.close()
    assert not pair.near.is_quiet()


def test_a_credential_that_is_refused_ends_the_handshake_and_its_socket(aside: ThreadPoolExecutor) -> None:
    near, far = socket.socketpair()

    def refuse() -> bytes:
        link = FramedSocket(far, "far")
        _, body = link.receive(FrameKind.HELLO, deadline=soon())
        link.fail(CredentialError("who is that?"), soon())
        link.close()
        return body

    said = aside.submit(refuse)
    with pytest.raises(CredentialError, match="who is that"):
        dial(near, "near", Credentials("a token"), soon())
    assert said.result(BOUND_S) == b"a token"
    assert near.fileno() == -1, "closed"


def test_a_failure_is_told_as_trouble_with_the_name_of_who_had_it(pair: Pair) -> None:
    pair.near.fail(Unavailable(Miss(MissReason.DEADLINE, "the lease ended")), soon())
    with pytest.raises(Unavailable) as trouble:
        pair.far.receive(FrameKind.HEAD, deadline=soon())
    assert trouble.value.miss == Miss(MissReason.DEADLINE, "far: the lease ended")


def test_who_is_hushed_hears_the_end_and_can_still_be_heard(pair: Pair) -> None:
    pair.near.shutdown_read()
    with pytest.raises(Unavailable):
        pair.near.receive(FrameKind.READ, deadline=soon())
    assert pair.near.ended
    pair.near.send(FrameKind.DONE, b"", soon())
    assert pair.far.receive(FrameKind.DONE, deadline=soon()) == (FrameKind.DONE, b"")
    assert not pair.far.ended


def test_who_is_hushed_while_it_waits_to_send_goes_on(pair: Pair, aside: ThreadPoolExecutor) -> None:
    sending = aside.submit(lambda: pair.near.send(FrameKind.READ, b"", soon(), [memoryview(bytes(300_000))]))
    pair.far.receive(FrameKind.READ, deadline=soon())
    pair.near.shutdown_read()
    pair.far.fill(memoryview(bytearray(300_000)), soon())
    sending.result(BOUND_S)


def test_the_end_of_the_other_sides_process_is_the_end_of_its_stream_once_what_it_said_is_heard(pair: Pair) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        pair.far.end_with(os.pidfd_open(process.pid))
        pair.near.send(FrameKind.READ, b"last", soon())
        with pytest.raises(Unavailable) as late:
            pair.far.receive(FrameKind.READ, deadline=soon())
            pair.far.receive(FrameKind.READ, deadline=Deadline.after_ms(20))
        assert late.value.miss.reason is MissReason.DEADLINE and not pair.far.ended
        pair.near.send(FrameKind.READ, b"words", soon())
        process.communicate(b"\n")
    assert pair.far.receive(FrameKind.READ, deadline=soon()) == (FrameKind.READ, b"words")
    with pytest.raises(Unavailable, match="has ended") as gone:
        pair.far.receive(FrameKind.READ, deadline=soon())
    assert gone.value.miss.reason is MissReason.SHARD_LOST and pair.far.ended


# ------------------------------------------------------------------------------------ what is only claimed


def test_the_memory_of_a_body_grows_as_its_bytes_arrive() -> None:
    links = [socket.socketpair() for _ in range(16)]
    for near, _ in links:
        near.sendall(socket_frames.encode_header(FrameKind.READ, 4 * MIB) + bytes(1_000))
    held, before = [], resident_bytes()
    tracemalloc.start()
    for near, far in links:
        link = FramedSocket(far, "far")
        with pytest.raises(Unavailable) as trouble:
            link.receive(FrameKind.READ, deadline=Deadline.after_ms(20))
        assert trouble.value.miss.reason is MissReason.DEADLINE
        held.append((near, link, trouble))  # with the frames of the traceback, and what they hold
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MIB and resident_bytes() - before < 16 * MIB, "of 64 MiB that the headers claim"
    for near, link, _ in held:
        near.close()
        link.close()


def test_a_frame_that_has_begun_ends_soon_even_if_its_exchange_may_take_long(pair: Pair) -> None:
    pair.far.charge(arriving=UNCHARGED, requests=UNCHARGED, frame_ms=20)
    pair.near._socket.sendall(socket_frames.encode_header(FrameKind.READ, 100) + b"a part")
    with pytest.raises(Unavailable) as trouble:
        pair.far.receive(FrameKind.READ, deadline=Deadline.after_ms(3_600_000))
    assert trouble.value.miss.reason is MissReason.DEADLINE


def test_a_large_body_is_charged_while_it_arrives_and_a_request_until_it_is_released(
    pair: Pair, aside: ThreadPoolExecutor
) -> None:
    bodies, requests = TenantMemory(2 * MIB), TenantMemory(2 * MIB)
    pair.far.charge(
        arriving=Account(bodies, Tenant("a"), 1e6), requests=Account(requests, Tenant("a"), 1e6), frame_ms=1e6
    )
    sent = aside.submit(lambda: [pair.near.send(FrameKind.READ, bytes(MIB), soon()) for _ in range(2)])
    pair.far.receive_request(FrameKind.READ, deadline=soon())
    assert (requests.total, bodies.total) == (MIB, 0)
    pair.far.receive(FrameKind.READ, deadline=soon())
    assert (requests.total, bodies.total) == (MIB, 0)
    sent.result(BOUND_S)
    pair.far.requests.release()
    assert requests.total == 0
    pair.near._socket.sendall(socket_frames.encode_header(FrameKind.READ, MIB))
    with pytest.raises(Unavailable):
        pair.far.receive(FrameKind.READ, deadline=Deadline.after_ms(20))
    assert bodies.total == 0


def test_what_is_dropped_is_read_to_its_end(pair: Pair, aside: ThreadPoolExecutor) -> None:
    sent = aside.submit(lambda: pair.near.send(FrameKind.READ, b"", soon(), [memoryview(bytes(300_001))]))
    pair.far.receive(FrameKind.READ, deadline=soon())
    pair.far.skip(300_001, soon())
    sent.result(BOUND_S)
    pair.near.send(FrameKind.DONE, b"", soon())
    assert pair.far.receive(FrameKind.DONE, deadline=soon()) == (FrameKind.DONE, b"")
