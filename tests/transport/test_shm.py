"""Pages through shared memory: the claims of every transport, which processes may map it, and what each side
refuses."""

from __future__ import annotations

import gc
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvcluster.core import limits
from kvcluster.core.ids import Caller
from kvcluster.core.messages import Refused, RefusedKind, Written
from kvcluster.core.miss import MissReason
from kvcluster.core.shard.page import PageState
from kvcluster.errors import ConfigError, CredentialError, LimitError, ProtocolError
from kvcluster.memory import arena, checksum, codec
from kvcluster.memory.arena import Arena
from kvcluster.memory.region import Mapping
from kvcluster.runtime.auth import Authenticator
from kvcluster.testing.conformance import TransportConformance, Wire, WireClaims, World, open_world
from kvcluster.testing.conformance.content import (
    Content,
    ContentSink,
    ContentSource,
    load,
    read,
    store,
    write,
)
from kvcluster.testing.conformance.wire import BadRequest, BadStore, CutStore, unserved
from kvcluster.testing.conformance.world import BOUND_S, ONE, Pause, soon
from kvcluster.transport.base import Deadline, RefusedByShard, Unavailable
from kvcluster.transport.credentials import ANONYMOUS, Credentials
from kvcluster.transport.shm_pages import ShmPages, load_streams
from kvcluster.transport.shm_server import ShmServer
from kvcluster.wire import shard, shm_frames, socket_frames
from kvcluster.wire.shm_frames import Progress, Welcome
from kvcluster.wire.socket_frames import FrameKind
from tests.transport.peers import NO_FRAMES, OTHER_VERSION, token
from tests.transport.shm_served import Raw, Served, path
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
FRAME = limits.FRAME_BYTES
EVICTED = MissReason.EVICTED


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(Served) as world:
        yield world


class TestShm(TransportConformance, WireClaims):
    """On the fixtures of this module."""


@pytest.fixture
def wire() -> Wire:
    return Wire(ShmPages, "@name", token)


@pytest.fixture(params=["", "@", "name", "127.0.0.1:7070", "@na\0me", "@" + "x" * 100])
def bad_address(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ------------------------------------------------------------------- what a shard does with what is no frame


@pytest.fixture(params=[(hello, *frame) for hello in (True, False) for frame in NO_FRAMES])
def bad_request(request: pytest.FixtureRequest) -> BadRequest:
    hello, data, says = request.param

    def send(world: World) -> str:
        with Raw(world, hello=hello) as peer:
            peer.send_bytes(data)
            said = peer.refusal()
            assert isinstance(said, ProtocolError)
            assert peer.is_closed()
        return str(said)

    return send, says


def written(*items: int, layers: int = 2, wrong: int = 0) -> bytes:
    """A WRITTEN frame of these pages, whose sums are those of nothing."""
    body = shm_frames.encode_written(Progress(items, (0,) * layers * len(items), 0)) + bytes(wrong)
    return socket_frames.encode_header(FrameKind.WRITTEN, len(body)) + body


@pytest.fixture(
    params=[
        (b"nonsense", "another service"),
        (written(7), "beyond the 3"),
        (written(2), "was not requested"),
        (written(0, 0), "must be written once"),
        (written(0, layers=3), "one sum for each"),
        (written(0, wrong=1), "one sum for each"),
        (socket_frames.encode_header(FrameKind.WRITTEN, 4) + b"\xff\xff\xff\xff", "is too short"),
        (socket_frames.encode_header(FrameKind.RENEW, 1) + b"\7", "must be one byte"),
        (socket_frames.encode_header(FrameKind.TAIL, 0), "expected"),
        (written(0) + socket_frames.encode_header(FrameKind.DONE, 0), "before page 1 was whole"),
    ],
    ids=lambda case: case[1],
)
def bad_store(request: pytest.FixtureRequest) -> BadStore:
    """Sends nonsense; its pages are kept until it has gone, because it may write into them still."""
    second, says = request.param

    def send(world: World, content: Content) -> str:
        with Raw(world) as peer:
            peer.send(FrameKind.WRITE, socket_frames.encode_write(content.write_request(), 10**10))
            assert peer.frame()[0] is FrameKind.GRANT
            peer.send_bytes(second)
            said = peer.refusal()
            if says == "before page 1 was whole":
                world.wait_until_unleased()  # it has said that it is done
            else:
                pages = [world.page(content.namespace, key) for key in content.keys[:2]]
                assert [page and page.state for page in pages] == [PageState.WRITING] * 2
        assert isinstance(said, ProtocolError)
        return str(said)

    return send, says


@pytest.fixture(params=[(kind, cut) for kind in (FrameKind.READ, FrameKind.WRITE) for cut in range(0, 400, 27)])
def cut_store(request: pytest.FixtureRequest) -> CutStore:
    """Sends so many 400ths of the bytes of a store, or of a load."""
    kind, cut = request.param

    def send(world: World, content: Content) -> None:
        if kind is FrameKind.READ:
            body = socket_frames.encode_read(content.read_request(), 10**10)
            rest = socket_frames.encode_header(FrameKind.RENEW, 1) + shm_frames.encode_renew(answer=True)
        else:
            body = socket_frames.encode_write(content.write_request(), 10**10)
            rest = written(0)
        everything = socket_frames.encode_header(kind, len(body)) + body + rest
        with Raw(world) as peer:
            peer.send_bytes(everything[: len(everything) * cut // 400])
            peer.end()
            assert peer.is_closed()

    return send


def test_an_answer_about_more_pages_than_a_frame_holds_is_a_limit_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = Content.of(world, 1, 400, 1)
    transport = world.open()
    store(transport, content)
    monkeypatch.setattr(limits, "MESSAGE_BYTES", 2_000)
    with pytest.raises(LimitError, match="ask for fewer"):
        load(transport, content)


# --------------------------------------------------------------------------------- which processes may map it


def test_a_token_is_asked_for_when_a_connection_is_opened(world: World) -> None:
    for wrong in ("", "of another user", token(ONE)[:-1]):
        stranger = ShmPages(world.served.address, Credentials(wrong))  # type: ignore[attr-defined]
        with pytest.raises(CredentialError):
            stranger.connect(soon())
        stranger.close()


def test_a_connection_whose_token_is_revoked_gets_no_lease_more(world: World) -> None:
    transport, content = world.open(), Content.of(world, 1, 1, 8)
    store(transport, content)
    assert load(transport, content) == [None]
    world.served.known = Authenticator({}, "internal")  # type: ignore[attr-defined]
    with pytest.raises(CredentialError, match="does not know this token"):
        load(transport, content)
    world.wait_until_unleased()


def in_a_child(function: str, *arguments: object) -> str:
    """What that function of this module prints, in a process of its own."""
    command = f"from {__name__} import {function}; {function}(*{arguments!r})"
    return subprocess.check_output([sys.executable, "-c", command], text=True, cwd=ROOT, timeout=60)


def connect_as_another_user(address: str) -> None:
    os.setuid(65_534)  # which takes root, as network namespaces do
    try:
        ShmPages(address, Credentials(token(ONE))).connect(soon())
    except Unavailable as trouble:
        print(trouble.miss.reason.value, trouble)
    # One that does not ask whose the shard is, and sends its token:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect("\0" + address[1:])
        peer.settimeout(BOUND_S)
        header = peer.recv(socket_frames.HEADER.size)
        kind, nbytes = socket_frames.decode_header(header)
        print(kind.name, socket_frames.decode_failure(peer.recv(nbytes)))


def test_another_user_is_refused_by_either_side_in_words(world: World) -> None:
    said = in_a_child("connect_as_another_user", world.served.address)  # type: ignore[attr-defined]
    mine, theirs = said.splitlines()
    assert mine.startswith("shard_lost") and "the shard runs as user" in mine
    assert theirs.startswith("FAILED") and f"of user {os.getuid()}, but this process runs as user 65534" in theirs


def test_if_no_process_listens_the_reason_says_what_that_may_mean() -> None:
    unused = ShmPages("@kvcluster-unused", ANONYMOUS)
    with pytest.raises(Unavailable, match="on another host or in another network namespace") as trouble:
        unused.connect(soon())
    assert trouble.value.miss.reason is MissReason.SHARD_LOST


def test_a_platform_without_such_sockets_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "SO_PEERCRED")
    with pytest.raises(Unavailable, match="this platform"):
        ShmPages("@kvcluster-unused", ANONYMOUS).connect(soon())


def test_an_arena_that_is_no_memory_file_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_memory_file", lambda: None)

    def serve(host: object) -> Served:
        with pytest.raises(ConfigError, match="cannot be shared"):
            ShmServer(host, lambda given: Caller(ONE))  # type: ignore[arg-type]
        raise ConfigError("as the test has it")

    with pytest.raises(ConfigError, match="as the test"), open_world(serve):
        """It does not come so far."""


def serve_where_dev_shm_is_full() -> None:
    """Stores and loads, in a mount namespace whose /dev/shm has no room left."""
    with pytest.raises(OSError, match="No space left"):
        Path("/dev/shm/full").write_bytes(bytes(2**20))
    with open_world(Served) as world:
        content = Content.big(world)
        transport = world.open()
        store(transport, content)
        assert load(transport, content) == [None] * 16
    print("stored and loaded")


def test_a_full_dev_shm_is_of_no_consequence() -> None:
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    python = f"{sys.executable} -c 'from {__name__} import serve_where_dev_shm_is_full as s; s()'"
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", f"{mount} && {python}"]
    assert subprocess.check_output(command, text=True, cwd=ROOT, timeout=60) == "stored and loaded\n"


# ------------------------------------------------------------------------------------ what else may listen there


@contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[ShmPages]:
    """A way to something that is perhaps no shard: it does that with everybody who comes."""
    with socket.socket(socket.AF_UNIX) as server:
        name = f"kvcluster-test-{os.urandom(8).hex()}"
        server.bind(f"\0{name}")
        server.listen()

        def serve() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer, suppress(ConnectionError):  # it may have gone
                    peer.settimeout(BOUND_S)
                    answer(peer)

        thread = threading.Thread(target=serve)
        thread.start()
        way = ShmPages(f"@{name}", ANONYMOUS)
        try:
            yield way
        finally:
            way.close()
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def frame(kind: FrameKind, body: bytes = b"") -> bytes:
    return socket_frames.encode_header(kind, len(body)) + body


class Shard:
    """What greets with an arena, and answers the frames that come with these, one after another; then it hangs up."""

    def __init__(self, *answers: bytes, arena_bytes: int = 4_096, lease_ttl_ns: int = 10**12) -> None:
        self.heard: list[FrameKind] = []
        self._answers = answers
        self._welcome = frame(FrameKind.WELCOME, shm_frames.encode_welcome(Welcome(arena_bytes, lease_ttl_ns)))

    def __call__(self, peer: socket.socket) -> None:
        with Arena(4_096) as memory:
            self._hear(peer)
            self._send(peer, self._welcome, memory.open(writable=False))
            for answer in self._answers:
                while self._hear(peer) in (FrameKind.RENEW, FrameKind.WRITTEN):
                    """A message for whose answer no caller waits."""
                self._send(peer, answer, memory.open(writable=True))

    def _hear(self, peer: socket.socket) -> FrameKind:
        kind, nbytes = socket_frames.decode_header(self._exactly(peer, socket_frames.HEADER.size))
        self._exactly(peer, nbytes)
        self.heard.append(kind)
        return kind

    def _exactly(self, peer: socket.socket, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            got = peer.recv(nbytes - len(data))
            if not got:
                raise ConnectionError
            data += got
        return data

    def _send(self, peer: socket.socket, data: bytes, descriptor: int) -> None:
        first_store = self.heard.count(FrameKind.WRITE) == 1 and self.heard[-1] is FrameKind.WRITE
        fds = [descriptor] if self.heard == [FrameKind.HELLO] or first_store else []
        try:
            if fds:
                socket.send_fds(peer, [data], fds)
            else:
                peer.sendall(data)
        finally:
            os.close(descriptor)


@pytest.mark.parametrize("answer", [b"", b"\0" * 64, b"HTTP/1.1 400 Bad Request\r\n\r\n", OTHER_VERSION])
def test_something_else_that_listens_there_is_told_as_such(answer: bytes) -> None:
    def greet(peer: socket.socket) -> None:
        peer.recv(4_096)
        peer.sendall(answer)

    with answering(greet) as way, pytest.raises((Unavailable, ProtocolError)):
        way.connect(soon())


@pytest.fixture
def silent() -> Iterator[tuple[ShmPages, str]]:
    def nothing(peer: socket.socket) -> None:
        while peer.recv(4_096):
            """Until it goes."""

    with answering(nothing) as way:
        yield way, way.address


def greeting(body: bytes, *files: int) -> Callable[[socket.socket], object]:
    """A peer that sends these descriptors with its greeting."""

    def greet(peer: socket.socket) -> None:
        peer.recv(4_096)
        socket.send_fds(peer, [frame(FrameKind.WELCOME, body)], files)

    return greet


def test_an_arena_that_is_none_or_smaller_than_it_says_is_refused(tmp_path: Path) -> None:
    welcome = shm_frames.encode_welcome(Welcome(4_096, 10**9))
    terabyte = shm_frames.encode_welcome(Welcome(2**40, 10**9))
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    os.ftruncate(file, 4_096)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4_096)
    with Arena(4_096) as memory:
        good = memory.open(writable=False)
        for body, files, says in [
            (welcome, [], "0 descriptors"),
            (welcome, [good, good], "2 descriptors"),
            (welcome, [good] * 5, "more file descriptors"),
            (welcome, [file], "not a memory file|not sealed"),
            (welcome, [unsealed], "not sealed"),
            (terabyte, [good], "a memory file of 4096"),
            (shm_frames.encode_welcome(Welcome(0, 0)), [good], "of 0 bytes"),
            (b"", [good], "a WELCOME has"),
        ]:
            with answering(greeting(body, *files)) as way, pytest.raises(ProtocolError, match=says):
                way.connect(soon())
    for descriptor in (file, unsealed, good):
        os.close(descriptor)


CONTENT = unserved(2, 3, 8)
HEAD = shm_frames.encode_read_grant([], [None] * 2, {}, {})[4:]
WRITE_HEAD = shm_frames.encode_write_grant([None] * 2, {}, {})[4:]


def grant(*numbers: int, head: bytes = HEAD) -> bytes:
    """A GRANT of pages at these offsets, of these sizes and, to be read, in these codecs; and so many sums as are
    left."""
    return frame(FrameKind.GRANT, struct.pack("<I", len(head)) + head + struct.pack(f"<{len(numbers)}Q", *numbers))


@pytest.fixture(
    params=[
        frame(FrameKind.GRANT),
        frame(FrameKind.GRANT, b"\xff\xff\xff\xff"),
        frame(FrameKind.DONE),
        frame(FrameKind.GRANT, b"\2\0\0\0\xff\xff"),
        grant(),
        grant(0, 24, 24),
        grant(0, 24, 24, 24),
        grant(0, 24, 24, 24, 1, 1, *[0] * 5),
        grant(0, 24, 24, 24, 1, 1, *[0] * 7),
        grant(0, 24, 24, 25, 1, 1, *[0] * 6),
        grant(0, 24, 24, 0, 1, 1, *[0] * 6),
        grant(0, 4_080, 24, 24, 1, 1, *[0] * 6),
        grant(0, 2**64 - 8, 24, 24, 1, 1, *[0] * 6),
        grant(0, 24, 24, 2**40 * 3, 1, 1, *[0] * 6),
    ]
)
def bad_load_answer(request: pytest.FixtureRequest) -> Iterator[tuple[ShmPages, int]]:
    with answering(Shard(request.param)) as way:
        yield way, 0


GOOD_GRANT = grant(0, 24, 24, 24, head=WRITE_HEAD)


@pytest.fixture(
    params=[
        [frame(FrameKind.GRANT)],
        [grant(0, 24, 24, head=WRITE_HEAD)],
        [grant(0, 24, 24, 24, 0, head=WRITE_HEAD)],
        [grant(0, 24, 24, 48, head=WRITE_HEAD)],
        [grant(0, 4_080, 24, 24, head=WRITE_HEAD)],
        [GOOD_GRANT, frame(FrameKind.GRANT)],
        [GOOD_GRANT, frame(FrameKind.TAIL, b"nonsense")],
        [GOOD_GRANT, frame(FrameKind.TAIL)],
    ]
)
def bad_store_answer(request: pytest.FixtureRequest) -> Iterator[ShmPages]:
    with answering(Shard(*request.param)) as way:
        yield way


@pytest.fixture
def refusing() -> Iterator[tuple[ShmPages, Refused]]:
    refused = Refused(RefusedKind.LIMIT, "too much")
    with answering(Shard(frame(FrameKind.REFUSED, socket_frames.encode_refused(refused)))) as way:
        yield way, refused


@pytest.mark.parametrize("answers", [[b""], [GOOD_GRANT, b""]])
def test_a_shard_that_hangs_up_during_a_load_or_store_is_lost(answers: list[bytes]) -> None:
    reading, writing = CONTENT.read_request(), CONTENT.write_request()
    sink = ContentSink(CONTENT, reading)
    with answering(Shard(*answers)) as way, pytest.raises(Unavailable) as trouble:
        way.write(writing, ContentSource(CONTENT, writing), soon())
    assert trouble.value.miss.reason is MissReason.SHARD_LOST
    with answering(Shard(b"")) as way, pytest.raises(Unavailable) as trouble:
        list(way.read(reading, sink, soon()))
    assert trouble.value.miss.reason is MissReason.SHARD_LOST
    assert not sink.got and not sink.corrupt


def test_a_worker_shows_that_it_lives_however_little_it_moves() -> None:
    fake = Shard(grant(0, 24, 24, 24, 1, 1, *[0] * 6), b"", lease_ttl_ns=0)
    request = CONTENT.read_request()
    with answering(fake) as way:
        sink = ContentSink(CONTENT, request)
        list(way.read(request, sink, soon()))
        assert len(sink.corrupt) == 6, "zeros match no checksum"
    assert fake.heard.count(FrameKind.RENEW) == 1, "a slice each"


# ------------------------------------------------------------------------------------------------- connections


def test_a_load_that_is_given_up_leaves_its_connection_and_its_mapping_to_the_next(world: World) -> None:
    content = Content.big(world)
    store(world.open(), content)
    file = file_of(world)
    with opened(world) as way:
        for _ in range(3):
            request = content.read_request()
            pieces = way.read(request, ContentSink(content, request), soon())
            next(pieces)
            assert mappings(file) == 4, "the shard's, two of the first store, and one more"
            pieces.close()
            with pytest.raises(ZeroDivisionError):
                list(way.read(request, ContentSink(content, request, lambda: 1 // 0), soon()))
        assert len(threads()) == 2, "the thread of the first store, and one more"
        world.wait_until_unleased()


def test_a_store_that_is_given_up_frees_its_pages_and_leaves_its_connection(world: World) -> None:
    content, transport = Content.of(world, 2, 2, FRAME // 2), world.open()
    with pytest.raises(ZeroDivisionError):
        write(transport, content, lambda: 1 // 0)
    world.wait_until_unleased()
    assert world.host.core.pool.allocator.used_bytes == 0
    store(transport, content)
    assert len(threads()) == 1


def test_a_refusal_leaves_the_connection_open(world: World) -> None:
    content, transport = Content.of(world, 1, 1, 8), world.open()
    for _ in range(2):
        with pytest.raises(RefusedByShard):
            load(transport, content)
    assert len(threads()) == 1


def threads() -> list[threading.Thread]:
    """Those of the server's connections."""
    return [thread for thread in threading.enumerate() if thread.name == "kvcluster-shm-link"]


@contextmanager
def opened(world: World) -> Iterator[ShmPages]:
    way = path(world)
    try:
        yield way
    finally:
        way.close()


def file_of(world: World) -> int:
    """The number of the memory file of its arena."""
    descriptor = world.host.open_arena(writable=False)
    number = os.fstat(descriptor).st_ino
    os.close(descriptor)
    return number


def mappings(file: int) -> int:
    """How often this process has mapped it, the shard's own time included."""
    gc.collect()  # what a traceback refers to is let go when that is
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum(arena.FILE_NAME in line and line.split()[4] == str(file) for line in lines)


def test_when_all_is_closed_the_memory_is_given_back(world: World) -> None:
    file, content, transport = file_of(world), Content.of(world, 2, 2, 1_000), world.open()
    store(transport, content)
    assert load(transport, content) == [None] * 2
    assert mappings(file) == 3, "the shard's own, and here one for reading and one for writing"
    transport.close()
    assert mappings(file) == 1


def test_the_memory_of_a_shard_that_has_gone_is_released_once_that_is_noticed(world: World) -> None:
    file, content, transport = file_of(world), Content.of(world, 2, 2, 1_000), world.open()
    store(transport, content)
    world.cut()
    assert mappings(file) == 2
    with pytest.raises(Unavailable):
        load(transport, content)
    assert mappings(file) == 0


def test_the_memory_of_a_shard_that_has_gone_is_let_go_by_who_is_asked_to_look(world: World) -> None:
    file = file_of(world)
    with opened(world) as way:
        way.connect(soon())
        way.tidy()
        assert mappings(file) == 2
        world.cut()
        assert mappings(file) == 1
        way.tidy()
        assert mappings(file) == 0


# ----------------------------------------------------------------------------------------- writers in the middle


@contextmanager
def stopped_in_a_chunk(monkeypatch: pytest.MonkeyPatch, at: int) -> Iterator[Pause]:
    """The thread that copies that chunk into an arena stands still before its first byte."""
    pause, view = Pause(at), Mapping.view

    def view_later(mapping: Mapping, offset: int, nbytes: int) -> memoryview:
        into = view(mapping, offset, nbytes)
        if not into.readonly:
            pause()
        return into

    monkeypatch.setattr(Mapping, "view", view_later)
    yield pause
    pause.release()


def test_a_transport_that_is_closed_under_a_store_ends_it_only_when_the_chunk_is_copied(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, transport = Content.of(world, 3, 2, FRAME // 2), world.open()
    with stopped_in_a_chunk(monkeypatch, at=5) as pause:
        under_way = world.meanwhile(lambda: write(transport, content))
        pause.wait_reached()
        closing = world.meanwhile(transport.close)
        world.expire_leases()  # which is as good as waiting: the shard has looked at everything since
        states = world.host.inspect(lambda: [page.state for page in world.host.core.pool.everything()])
        assert states == [PageState.WRITING] * 3
        assert not closing.done()
        pause.release()
        closing.result(BOUND_S)
        with pytest.raises(Unavailable) as trouble:
            under_way.result(BOUND_S)
    assert trouble.value.miss.reason in (MissReason.SHARD_LOST, MissReason.DEADLINE)
    world.wait_until_unleased()
    assert world.host.core.pool.allocator.used_bytes == 0


def test_a_writer_that_stands_still_keeps_its_pages_though_its_lease_has_ended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, transport = Content.of(world, 2, 2, FRAME // 2), world.open()
    room = world.host.core.pool.allocator.room(FRAME)
    others = Content.of(world, room, 2, FRAME // 2, first=100)
    with stopped_in_a_chunk(monkeypatch, at=3) as pause:
        under_way = world.meanwhile(lambda: write(transport, content))
        pause.wait_reached()
        world.expire_leases()
        fates = write(world.open(), others, lambda: None)
        assert fates == [Written.COMMITTED] * (room - 2) + [Written.FULL] * 2
        pause.release()
        with pytest.raises(Unavailable) as trouble:
            under_way.result(BOUND_S)
    assert trouble.value.miss.reason is MissReason.DEADLINE
    world.wait_until_unleased()
    assert load(transport, others) == [None] * (room - 2) + [EVICTED] * 2
    assert load(transport, content) == [EVICTED] * 2


def test_a_writer_that_stands_still_keeps_its_pages_though_its_deadline_has_passed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, transport = Content.of(world, 2, 2, FRAME // 2), world.open()
    with stopped_in_a_chunk(monkeypatch, at=3) as pause:
        under_way = world.meanwhile(lambda: write(transport, content, deadline=Deadline.after_ms(2_000)))
        pause.wait_reached()
        (control,) = transport.path._connections._busy  # type: ignore[attr-defined]
        eventually(lambda: not control.is_quiet())  # the shard has said that this is over
        states = world.host.inspect(lambda: [page.state for page in world.host.core.pool.everything()])
        assert states == [PageState.WRITING] * 2
        pause.release()
        with pytest.raises(Unavailable) as trouble:
            under_way.result(BOUND_S)
    assert trouble.value.miss.reason is MissReason.DEADLINE
    world.wait_until_unleased()
    assert world.host.core.pool.allocator.used_bytes == 0


def test_a_server_that_ends_frees_no_page_that_may_be_written_still(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, transport = Content.of(world, 2, 2, FRAME // 2), world.open()
    with stopped_in_a_chunk(monkeypatch, at=3) as pause:
        under_way = world.meanwhile(lambda: write(transport, content))
        pause.wait_reached()
        world.served.close()
        states = world.host.inspect(lambda: [page.state for page in world.host.core.pool.everything()])
        assert states == [PageState.WRITING] * 2
        pause.release()
        with pytest.raises(Unavailable):
            under_way.result(BOUND_S)
    world.cut()


@pytest.mark.parametrize("when", ["before it is told", "after it is committed"])
def test_a_writer_that_continues_after_the_sums_are_made_gives_no_reader_a_wrong_byte(world: World, when: str) -> None:
    content, transport = Content.of(world, 1, 2, 1_000), world.open()
    transport.attach(content.spec, soon())
    request = content.write_request()
    (key,) = content.keys
    page = b"".join(content.layers[key])
    sums = checksum.layer_sums(checksum.identity(content.namespace, key, codec.RAW), 0, 2, memoryview(page))
    with Raw(world) as peer:
        peer.send(FrameKind.WRITE, socket_frames.encode_write(request, 10**10))
        kind, body = peer.frame()
        assert kind is FrameKind.GRANT
        nbytes = world.host.arena_bytes
        _, places = shm_frames.decode_write_grant(body, request.pages, nbytes)
        memory = Mapping(peer.fds[-1], nbytes, writable=True).view(places.offsets[0], len(page))
        memory[:] = page
        if when == "before it is told":
            memory[1_500] ^= 1
        peer.send(FrameKind.WRITTEN, shm_frames.encode_written(Progress([0], sums, 0)))
        peer.send(FrameKind.DONE)
        kind, body = peer.frame()
        assert kind is FrameKind.TAIL
        if when == "before it is told":
            assert shard.decode_write_tail(body) == [Written.CORRUPT]
            assert load(transport, content) == [EVICTED]
            return
        assert shard.decode_write_tail(body) == [Written.COMMITTED]
        memory[1_500] ^= 1
    reading = read(transport, content)
    assert reading.finish() == [None]
    assert reading.sink.corrupt == [(0, 1)], "only that layer"


@pytest.mark.parametrize("opened", ["for writing", "for reading, and again for writing"])
def test_a_process_that_writes_outside_of_its_grant_gives_no_reader_a_wrong_byte(world: World, opened: str) -> None:
    """It has the user's rights to the memory: nothing stops it, and every reader's sums tell."""
    content, transport = Content.of(world, 4, 2, 1_000), world.open()
    store(transport, content)
    nbytes = world.host.arena_bytes
    other = Content.of(world, 1, 1, 8)
    transport.attach(other.spec, soon())
    with Raw(world) as peer:
        if opened == "for writing":
            peer.send(FrameKind.WRITE, socket_frames.encode_write(other.write_request(), 10**10))
            assert peer.frame()[0] is FrameKind.GRANT
            memory = Mapping(peer.fds[-1], nbytes, writable=True)
        else:
            again = os.open(f"/proc/self/fd/{peer.fds[0]}", os.O_RDWR)
            memory = Mapping(again, nbytes, writable=True)
            os.close(again)
        for key in content.keys[:3]:
            page = world.page(content.namespace, key)
            assert page is not None
            memory.view(page.offset, page.nbytes)[:] = bytes(page.nbytes)
    reading = read(transport, content)
    assert reading.finish() == [None] * 4
    assert sorted(reading.sink.corrupt) == [(item, layer) for item in range(3) for layer in range(2)]


@pytest.mark.parametrize(("processors", "threads"), [(1, 1), (2, 2), (4, 2), (8, 2), (12, 3), (16, 4), (192, 8)])
def test_a_load_is_copied_by_a_quarter_of_the_processors_but_by_two_where_there_are_two(
    processors: int, threads: int
) -> None:
    assert load_streams(processors) == threads
