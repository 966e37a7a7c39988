"""Sockets in a directory that pods share: who may listen there, who may connect, and what each is told."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from kvcluster.core import limits
from kvcluster.core.miss import MissReason
from kvcluster.core.placement import may_share_memory, same_namespace, same_node
from kvcluster.core.shard.page import PageState
from kvcluster.errors import ConfigError, CredentialError
from kvcluster.testing.conformance import World, open_world
from kvcluster.testing.conformance.content import Content, ContentSink, ContentSource, load, store
from kvcluster.testing.conformance.wire import unserved
from kvcluster.testing.conformance.world import BOUND_S, ONE, soon
from kvcluster.transport.base import Deadline, Unavailable, run_to_completion
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.local_sockets import LocalListener, connect, machine, open_directory
from kvcluster.transport.process_location import SOCKET_DIR, locate, locate_server
from kvcluster.transport.shm_pages import ShmPages
from kvcluster.transport.shm_server import ShmHost
from tests.other_users import ROOT, OtherUser, become
from tests.transport.peers import token
from tests.transport.shm_served import Served
from tests.transport.test_shm_processes import states, stop_myself_before_chunk
from tests.waiting import eventually

FRAME = limits.FRAME_BYTES
GROUP, USER = 4_321, 5_678
MINE = 3
"""Pages, each of two chunks."""

IN_POD = [False, True] if os.geteuid() == 0 else []
"""Only root can become another user, so that nothing of this runs as anyone else."""


@pytest.fixture
def sockets(tmp_path: Path) -> Path:
    """A socket directory as the chart makes it, within folders that everyone may search."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    directory = tmp_path / "sockets"
    directory.mkdir()
    directory.chmod(0o2755)
    return directory


@pytest.fixture
def world(sockets: Path) -> Iterator[World]:
    """A shard whose socket lies in the directory."""
    with open_world(lambda host: ServedInDirectory(host, sockets)) as world:
        yield world


class ServedInDirectory(Served):
    """As Served, with its socket in this directory."""

    def __init__(self, host: ShmHost, sockets: Path) -> None:
        super().__init__(host, str(sockets))


def refusal(address: str) -> str:
    """What a worker is told that may not, or does not, connect."""
    with pytest.raises(Unavailable) as trouble, connect(address, soon()):
        """It does not come so far."""
    assert trouble.value.miss.reason is MissReason.SHARD_LOST
    return str(trouble.value)


# ------------------------------------------------------------------------------------------ the directory


def test_pages_go_over_a_socket_in_a_directory(world: World, sockets: Path) -> None:
    [entry] = list(sockets.iterdir())
    assert stat.S_ISSOCK(entry.stat().st_mode)
    assert stat.S_IMODE(entry.stat().st_mode) == 0o660
    transport, content = world.open(), Content.of(world, 3, 2, 64)
    store(transport, content)
    assert load(transport, content) == [None] * 3


def test_the_socket_goes_with_its_server(sockets: Path) -> None:
    listener = LocalListener(str(sockets))
    assert [entry.name for entry in sockets.iterdir()] == [listener.address]
    listener.close()
    listener.close()
    assert list(sockets.iterdir()) == []


def test_what_a_dead_server_left_is_removed_and_the_living_stay(sockets: Path) -> None:
    alive, dead = LocalListener(str(sockets)), LocalListener(str(sockets))
    left, dead.address = dead.address, ""  # so that it removes nothing, as one that is killed
    dead.close()
    of_another_machine = left.replace(machine(), "0" * 12)
    hidden, forgotten = (f".{left.replace(left[-9:-5], mark)}" for mark in ("aaaa", "bbbb"))
    for name in (of_another_machine, hidden, forgotten, "kv-notes.txt"):
        (sockets / name).write_text("")
    os.utime(sockets / forgotten, (0, 0))
    stay = {alive.address, of_another_machine, hidden, "kv-notes.txt"}
    assert {entry.name for entry in sockets.iterdir()} == stay | {left, forgotten}
    after = LocalListener(str(sockets))
    assert {entry.name for entry in sockets.iterdir()} == stay | {after.address}
    alive.close()
    after.close()


def test_a_directory_is_made_where_its_parent_is(sockets: Path) -> None:
    inner = sockets / "inner"
    LocalListener(str(inner)).close()
    assert stat.S_IMODE(inner.stat().st_mode) & 0o777 == 0o750
    with pytest.raises(ConfigError, match="No such file"):
        LocalListener(str(sockets / "not" / "there"))


def test_a_directory_may_lie_deeper_than_a_unix_socket_s_path_reaches(sockets: Path) -> None:
    deep = sockets
    for _ in range(8):
        deep = deep / ("d" * 30)
        deep.mkdir()
    listener = LocalListener(str(deep))
    with connect(str(deep / listener.address), soon()):
        """Connected."""
    listener.close()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757])
def test_where_everyone_may_write_neither_side_does_anything(sockets: Path, mode: int) -> None:
    sockets.chmod(mode)
    with pytest.raises(ConfigError, match="everyone may write to it"):
        LocalListener(str(sockets))
    with socket.socket(socket.AF_UNIX) as thief:
        thief.bind(str(sockets / "kv.sock"))
        thief.listen()
        assert "everyone may write to it" in refusal(str(sockets / "kv.sock"))
        thief.setblocking(False)
        with pytest.raises(BlockingIOError):
            thief.accept()


@pytest.mark.parametrize("group", [0, GROUP])
@pytest.mark.parametrize("mode", [0o2770, 0o3775])
def test_nor_where_a_group_may(sockets: Path, group: int, mode: int) -> None:
    os.chown(sockets, -1, group if os.geteuid() == 0 else -1)
    sockets.chmod(mode)
    for serving in (False, True):
        with pytest.raises(ConfigError, match="may write to it, or others that its access control list names"):
            open_directory(str(sockets), serving=serving)


@pytest.mark.parametrize("owner", [GROUP] if os.geteuid() == 0 else [])
def test_a_shard_serves_in_no_directory_of_another_user(sockets: Path, owner: int) -> None:
    os.chown(sockets, owner, -1)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}"):
        LocalListener(str(sockets))
    assert locate_server(str(sockets)).host == locate().host


def test_a_directory_that_takes_the_place_of_another_is_not_looked_into(
    sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its path, and the name of the socket, are the same: whoever may write to the parent can do that."""
    listener = LocalListener(str(sockets))
    worker = locate(str(sockets))
    with socket.socket(socket.AF_UNIX) as thief:
        sockets.rename(sockets.with_name("moved"))
        sockets.mkdir(0o755)
        monkeypatch.chdir(sockets)
        thief.bind(listener.address)
        thief.listen()
        thief.setblocking(False)
        with connect(worker.socket_path(listener.address), soon()):
            """Connected."""
        with pytest.raises(BlockingIOError):
            thief.accept()
    assert not may_share_memory(worker.host.replace("/", "/7", 1), locate(str(sockets)).host)
    listener.close()


@pytest.mark.parametrize("how", ["no more files", "not writable"] if os.geteuid() == 0 else [])
def test_a_directory_in_which_no_socket_can_be_made_costs_shared_memory_alone(how: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", _MOUNTED, "sh", _OPTIONS[how], str(tmp_path), sys.executable, __name__],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "no socket can be made, nothing is left open\n" * 3, done.stderr


_OPTIONS = {"no more files": "nr_inodes=1", "not writable": "ro"}
_MOUNTED = 'mount -t tmpfs -o "$1,mode=755" tmpfs "$2"; exec "$3" -c "from $4 import serve_in as s; s(\'$2\')"'


def serve_in(directory: str) -> None:
    """Tries to listen there, a few times."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        try:
            LocalListener(directory)
        except ConfigError as error:
            assert "no socket can be made" in str(error)
            assert len(os.listdir("/proc/self/fd")) == before and os.listdir(directory) == []
            print("no socket can be made, nothing is left open")


PASSES_NO_RIGHTS = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (6, 16)


@pytest.mark.parametrize("directory", [True, False] if PASSES_NO_RIGHTS else [])
def test_a_shard_is_sent_no_descriptors(sockets: Path, directory: bool) -> None:
    """Closing that of a socket that lingers would hold the shard's thread for as long as its sender has chosen."""
    listener = LocalListener(str(sockets) if directory else "")
    address = str(sockets / listener.address) if directory else listener.address
    with connect(address, soon()) as worker:
        with pytest.raises(PermissionError):
            socket.send_fds(worker, [b"hello"], [0])
        accepted, _ = listener.socket.accept()
        with accepted:
            with pytest.raises(PermissionError):
                socket.send_fds(worker, [b"hello"], [0])
            worker.sendall(b"hello")
            assert accepted.recv(9) == b"hello"
            socket.send_fds(accepted, [b"arena"], [0])
            _, received, _, _ = socket.recv_fds(worker, 9, 1)
            assert len(received) == 1, "a worker does receive them"
            os.close(received[0])
    listener.close()


def test_a_server_whose_queue_is_full_is_asked_again(sockets: Path) -> None:
    listener = LocalListener(str(sockets))
    listener.socket.listen(0)
    path = str(sockets / listener.address)
    with connect(path, soon()), ThreadPoolExecutor(1) as other:
        waiting = other.submit(connect, path, soon())
        with pytest.raises(Unavailable, match="does not answer"):
            connect(path, Deadline.after_ms(20))
        listener.socket.accept()[0].close()
        waiting.result(BOUND_S).close()
    listener.close()


@pytest.mark.parametrize("wrong", ["file", "missing", "relative", "link to nothing"])
def test_what_is_no_directory_is_said(sockets: Path, wrong: str) -> None:
    path = sockets / "it"
    if wrong == "file":
        path.write_text("")
    if wrong == "link to nothing":
        path.symlink_to("nowhere")
    given = "sockets/it" if wrong == "relative" else str(path)
    with pytest.raises(ConfigError, match=r"absolute path|cannot be opened"):
        open_directory(given)


def test_a_socket_that_is_not_there_or_answers_no_more(sockets: Path) -> None:
    assert "the shard has ended" in refusal(str(sockets / "kv-none.sock"))
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(sockets / "kv-ended.sock"))
    assert "the shard has ended" in refusal(str(sockets / "kv-ended.sock"))
    (sockets / "kv-file.sock").write_text("")
    assert "the shard has ended" in refusal(str(sockets / "kv-file.sock"))


# ----------------------------------------------------------------------------------------- where each one is


def test_two_processes_share_memory_if_they_see_one_directory(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = locate_server(str(sockets))
    monkeypatch.setenv(SOCKET_DIR, str(sockets))
    worker = locate()
    assert worker == locate(str(sockets))
    assert shard.host == worker.host
    with pytest.raises(ConfigError, match=f"name it in {SOCKET_DIR}"):
        replace(worker, sockets=None).socket_path("kv.sock")
    elsewhere = worker.host.replace("/", "/7", 1)  # another network namespace
    assert may_share_memory(shard.host, elsewhere) and not same_namespace(shard.host, elsewhere)
    other = sockets / "other"
    other.mkdir()
    beside = locate(str(other)).host.replace("/", "/7", 1)
    assert same_node(shard.host, beside) and not may_share_memory(shard.host, beside)
    on_another_machine = worker.host.replace("@", "@f", 1)
    assert not may_share_memory(shard.host, on_another_machine)


def test_a_directory_that_cannot_be_used_is_left_out_and_the_reason_kept(sockets: Path) -> None:
    sockets.chmod(0o777)
    location = locate(str(sockets))
    assert (location.socket_dir, location.host) == ("", locate().host)
    with pytest.raises(ConfigError, match="everyone may write to it"):
        location.socket_path("kv.sock")
    with pytest.raises(ConfigError, match=f"name it in {SOCKET_DIR}"):
        locate().socket_path("kv.sock")


@pytest.mark.parametrize("name", ["", ".", "..", "../kv.sock", "/etc/kv.sock", "a/b", "kv\0.sock"])
def test_a_shard_names_a_file_of_the_directory_and_nothing_else(sockets: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="not the name of a file"):
        locate(str(sockets)).socket_path(name)


# --------------------------------------------------------------------------------------------- other users


def mine(epoch: int) -> Content:
    return unserved(MINE, 4, FRAME // 4, epoch=epoch)


def load_twice(address: str, epoch: int, in_pod: bool) -> None:
    """Loads as another user with the tenant's token and with a stranger's."""
    become(USER, GROUP, in_pod=in_pod)
    for given in (token(ONE), "of a stranger"):
        path, content = ShmPages(address, Credentials(given)), mine(epoch)
        request = content.read_request()
        sink = ContentSink(content, request)
        try:
            missing = run_to_completion(path.read(request, sink, soon()))
            right = all(data == content.layers[content.keys[item]][layer] for (item, layer), data in sink.got.items())
            print(missing, right, len(sink.got), flush=True)
        except (Unavailable, CredentialError) as error:
            print(type(error).__name__, error, flush=True)
        path.close()


def store_half(address: str, epoch: int, in_pod: bool) -> None:
    """Stores as another user, and is stopped within the second page."""
    become(USER, GROUP, in_pod=in_pod)
    stop_myself_before_chunk(4)
    content = mine(epoch)
    request = content.write_request()
    ShmPages(address, Credentials(token(ONE))).write(request, ContentSource(content, request), soon())


def somebody(world: World, sockets: Path, function: Callable[..., None], *, in_pod: bool) -> OtherUser:
    """A process that runs `function(address, epoch, in_pod)` of this module as another user."""
    [entry] = sockets.iterdir()
    call = f"{function.__name__}({str(entry)!r}, {world.epoch}, {in_pod})"
    code = f"from {__name__} import {function.__name__}; {call}"
    return OtherUser([sys.executable, "-c", code], GROUP, in_pod=in_pod)


@pytest.mark.parametrize("in_pod", IN_POD)
def test_another_user_of_the_group_loads_with_the_tenant_s_token_alone(
    world: World, sockets: Path, in_pod: bool
) -> None:
    store(world.open(), mine(world.epoch))
    admit(sockets, GROUP)
    with somebody(world, sockets, load_twice, in_pod=in_pod) as other:
        assert other.says() == f"{[None] * MINE} True {MINE * 4}"
        assert other.says().startswith("CredentialError")


@pytest.mark.parametrize("in_pod", IN_POD)
def test_a_user_without_the_group_is_told_which_it_takes(world: World, sockets: Path, in_pod: bool) -> None:
    admit(sockets, 99)
    with somebody(world, sockets, load_twice, in_pod=in_pod) as other:
        told = other.says()
        assert told.startswith("Unavailable") and f"user {USER} with the groups" in told and str(GROUP) in told
        assert f"it takes the group {65_534 if in_pod else 99}" in told


@pytest.mark.parametrize("in_pod", IN_POD)
def test_a_writer_of_another_user_that_is_killed_gives_its_pages_back_and_not_before(
    world: World, sockets: Path, in_pod: bool
) -> None:
    world.open().attach(mine(world.epoch).spec, soon())
    admit(sockets, GROUP)
    with somebody(world, sockets, store_half, in_pod=in_pod) as other:
        eventually(other.is_stopped, BOUND_S)
        world.expire_leases()
        assert states(world).count(PageState.WRITING) == MINE
        other.kill()
        eventually(lambda: not states(world), BOUND_S)


def admit(sockets: Path, group: int) -> None:
    """Gives the directory and its socket to this group of the machine, as a directory with setgid does."""
    [entry] = sockets.iterdir()
    sockets.chmod(0o2750)
    for path in (sockets, entry):
        os.chown(path, -1, group)
