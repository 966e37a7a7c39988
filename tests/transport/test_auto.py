"""The choice among data paths: which is used, why the others are not, and how a call goes on when its path breaks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from kvcluster.core import limits
from kvcluster.core.ids import Epoch, ShardId, Tenant
from kvcluster.core.messages import (
    Offer,
    Offers,
    Refused,
    RefusedKind,
    ShardAddress,
    Written,
)
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import CallerError, ConfigError, CredentialError, ProtocolError
from kvcluster.runtime.auth import Authenticator, digest
from kvcluster.runtime.server import GrpcServer, unary_handlers
from kvcluster.testing.conformance import TransportConformance, World, open_world
from kvcluster.testing.conformance.content import Content, ContentSink, ContentSource, Stop, load, read, store
from kvcluster.testing.conformance.world import ONE, TWO, Pause, soon
from kvcluster.transport.auto import AutoTransport, choose, own_attempts
from kvcluster.transport.base import Cancelled, Deadline, PageHost, PathLost, RefusedByShard, Unavailable
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.grpc_pages import page_handlers
from kvcluster.transport.path_selector import LEFT_ALONE_NS, TRY_MS
from kvcluster.transport.tcp_pages import TcpPages, TcpServer
from kvcluster.wire.methods import SHARD
from tests.ports import refused
from tests.transport.frail import HERE, Ways, broken
from tests.transport.peers import InProcess

LEAVES_OUT = "this client's configuration leaves it out"


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(InProcess) as world:
        yield world


@pytest.fixture
def stored(world: World) -> Content:
    """Three pages of four layers that lie in the shard, each a record."""
    content = Content.of(world, 3, 4, 100)
    store(world.open(), content)
    return content


# ------------------------------------------------------------------------------------------ which is used


@pytest.mark.parametrize(
    ("offered", "takes", "used", "refused"),
    [
        (("tcp", "shm"), ("grpc", "tcp", "shm"), "shm", {}),
        (("tcp",), ("shm", "tcp", "grpc"), "tcp", {"shm": "not offered by the shard"}),
        (("tcp", "shm"), ("tcp", "grpc"), "tcp", {"shm": LEAVES_OUT}),
        (("shm",), ("tcp", "grpc"), "grpc", {"shm": LEAVES_OUT, "tcp": "not offered by the shard"}),
        ((), ("shm", "tcp", "grpc"), "grpc", dict.fromkeys(("shm", "tcp"), "not offered by the shard")),
    ],
)
def test_the_first_of_shm_tcp_grpc_that_both_ends_name_moves_the_pages(
    world: World, stored: Content, offered: tuple[str, ...], takes: tuple[str, ...], used: str, refused: dict[str, str]
) -> None:
    ways = Ways(world, offered=offered, takes=takes)
    assert (ways.choice.name, ways.choice.refused()) == ("grpc", {}), "nothing was looked at yet"
    assert load(ways.choice, stored) == [None] * 3
    assert (ways.choice.name, ways.choice.streams.loads) == (used, 1 if used == "grpc" else 3)
    assert ways.choice.refused() == refused
    assert [path.name for path in ways.all if path.reads] == [used]


def test_a_shard_says_why_it_does_not_offer_something(world: World, stored: Content) -> None:
    ways = Ways(world, offered=("tcp",), refused={"shm": "several tenants"})
    load(ways.choice, stored)
    assert ways.choice.refused() == {"shm": "several tenants"}


def test_shared_memory_of_another_host_is_not_tried(world: World, stored: Content) -> None:
    ways = Ways(world, shard_host="far away")
    load(ways.choice, stored)
    assert ways.choice.refused() == {"shm": f"another host: the shard is on far away, and this is {HERE}"}
    assert (ways.shm.opened, ways.choice.name) == (0, "tcp")


def test_a_path_of_another_version_is_not_tried(world: World, stored: Content) -> None:
    ways = Ways(world, version=2)
    load(ways.choice, stored)
    why = "the shard speaks version 2 of it, and this client version 0"
    assert ways.choice.refused() == {"shm": why, "tcp": why}
    assert (ways.shm.opened, ways.tcp.opened, ways.choice.name) == (0, 0, "grpc")


def test_what_this_end_cannot_open_is_passed_over(world: World, stored: Content) -> None:
    ways = Ways(world, openers={})
    load(ways.choice, stored)
    assert ways.choice.refused() == dict.fromkeys(("shm", "tcp"), "this client cannot use it on this platform")


def test_where_grpc_is_not_taken_either_the_trouble_names_every_reason(world: World, stored: Content) -> None:
    ways = Ways(world, offered=(), takes=("tcp",))
    with pytest.raises(
        Unavailable, match=r"no transport leads to shard-0: shm: .* out; tcp: not offered .*; grpc: .* out"
    ):
        load(ways.choice, stored)
    with pytest.raises(Unavailable, match="no transport leads to shard-0"):
        ways.choice.write(stored.write_request(), ContentSource(stored, stored.write_request()), soon())
    assert not ways.grpc.reads and not ways.grpc.writes
    assert ways.choice.name == "none"


def test_control_goes_over_grpc_whatever_moves_the_pages(world: World, stored: Content) -> None:
    ways = Ways(world)
    attached = ways.choice.attach(stored.spec, soon())
    assert attached.epoch == world.epoch
    assert ways.choice.flush(soon())
    ways.choice.suspect(stored.namespace, world.epoch, stored.keys, soon())
    assert ways.shm.opened == ways.tcp.opened == 0


# ---------------------------------------------------------------------------------------------- trying


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (broken("refused by 10.0.0.1"), "refused by 10.0.0.1"),
        (CredentialError("another user"), "another user"),
        (ProtocolError("an older release"), "an older release"),
        (ConfigError("no address"), "no address"),
    ],
)
def test_a_path_that_does_not_open_is_left_alone_for_a_while_and_then_tried_again(
    world: World, stored: Content, error: Exception, why: str
) -> None:
    ways = Ways(world)
    ways.shm.opening = error
    for _ in range(3):
        assert load(ways.choice, stored) == [None] * 3
    assert (ways.choice.name, ways.choice.refused()) == ("tcp", {"shm": why})
    assert (ways.shm.opened, ways.shm.closed, ways.tcp.opened) == (1, 1, 1)
    ways.later()
    load(ways.choice, stored)
    assert (ways.shm.opened, ways.choice.name) == (2, "tcp")
    ways.later()
    ways.shm.opening = None
    load(ways.choice, stored)
    assert (ways.choice.name, ways.choice.refused()) == ("shm", {})
    assert ways.tcp.closed == 1, "it has no user any more"


def test_what_is_offered_is_asked_once(world: World, stored: Content) -> None:
    ways = Ways(world)
    ways.shm.opening = broken()
    for _ in range(3):
        load(ways.choice, stored)
        ways.later()
    assert ways.grpc.asked == 1


@pytest.mark.parametrize("error", [broken("gone"), RefusedByShard(Refused(RefusedKind.BAD, "gone"))])
def test_where_a_shard_does_not_say_what_it_offers_grpc_is_used_meanwhile(
    world: World, stored: Content, error: Exception
) -> None:
    ways = Ways(world)
    ways.grpc.opening = error
    assert load(ways.choice, stored) == [None] * 3
    assert (ways.choice.name, ways.choice.refused()) == ("grpc", {"shm": "gone", "tcp": "gone"})
    ways.grpc.opening = None
    ways.later()
    load(ways.choice, stored)
    assert ways.choice.name == "shm"


def test_what_another_incarnation_offers_is_not_used(world: World, stored: Content) -> None:
    ways = Ways(world)
    ways.grpc.told = replace(ways.grpc.told, epoch=Epoch(world.epoch + 1))
    load(ways.choice, stored)
    assert ways.choice.refused() == dict.fromkeys(("shm", "tcp"), "shard-0 has restarted")


def test_a_trial_takes_a_share_of_the_calls_time_and_no_more_than_a_second(world: World, stored: Content) -> None:
    ways = Ways(world)
    ways.shm.opening = broken()
    deadline = soon()
    read(ways.choice, stored, deadline=deadline).finish()
    assert all(trial.remaining_s() <= TRY_MS / 1e3 for trial in ways.shm.trials + ways.tcp.trials)
    hurried = Ways(world)
    deadline = Deadline.after_ms(TRY_MS)
    with suppress(Unavailable):
        read(hurried.choice, stored, deadline=deadline).finish()
    assert all(2 * (deadline.at_ns - trial.at_ns) > TRY_MS * 1_000_000 for trial in hurried.shm.trials)
    assert hurried.shm.trials


def test_a_path_on_which_another_shard_answers_is_not_taken(world: World, stored: Content) -> None:
    ways = Ways(world)
    ways.shm.opening = RefusedByShard(Refused(RefusedKind.STALE, "this is epoch 2, not 1"))
    load(ways.choice, stored)
    why = "another shard, or another incarnation of it, answers there: this is epoch 2, not 1"
    assert (ways.choice.name, ways.choice.refused()) == ("tcp", {"shm": why})


@pytest.mark.parametrize("call_ms", [TRY_MS, 60_000])
def test_a_path_that_answers_late_is_tried_again_after_as_long_as_the_trial_had(
    world: World, stored: Content, call_ms: int
) -> None:
    ways = Ways(world)
    ways.shm.opening = Unavailable(Miss(MissReason.DEADLINE, "at shm"))
    read(ways.choice, stored, deadline=Deadline.after_ms(call_ms)).finish()
    had_ms = min(call_ms // 4, TRY_MS)
    assert (ways.choice.name, ways.choice.refused()) == ("tcp", {"shm": f"no answer within {had_ms} ms: at shm"})
    load(ways.choice, stored)
    assert ways.shm.opened == 1, "it is left alone"
    ways.shm.opening = None
    ways.now += had_ms * 1_000_000
    load(ways.choice, stored)
    assert ways.choice.name == "shm"


def test_a_path_that_never_answers_is_tried_less_and_less_often_until_it_does(world: World, stored: Content) -> None:
    ways = Ways(world)
    ways.shm.opening = Unavailable(Miss(MissReason.DEADLINE))
    for pause_ms in (*(TRY_MS << times for times in range(5)), LEFT_ALONE_NS // 1_000_000, LEFT_ALONE_NS // 1_000_000):
        tried = ways.shm.opened
        load(ways.choice, stored)
        ways.now += pause_ms * 1_000_000 - 1
        load(ways.choice, stored)
        assert ways.shm.opened == tried + 1
        ways.now += 1
    ways.shm.opening = None
    load(ways.choice, stored)
    assert ways.choice.name == "shm"
    ways.shm.opening = ways.shm.error = Unavailable(Miss(MissReason.DEADLINE))
    ways.shm.read_bytes = 0
    with pytest.raises(Unavailable):
        load(ways.choice, stored)
    load(ways.choice, stored)
    assert ways.choice.name == "tcp"
    ways.shm.opening, ways.shm.read_bytes, ways.now = None, None, ways.now + TRY_MS * 1_000_000
    load(ways.choice, stored)
    assert ways.choice.name == "shm", "an answer makes up for what was late before"


def test_a_path_is_opened_once_however_many_come_at_the_same_time(world: World, stored: Content) -> None:
    ways, together = Ways(world), threading.Barrier(4)

    def begin() -> list[MissReason | None]:
        together.wait()
        return load(ways.choice, stored)

    outcomes = [world.meanwhile(begin) for _ in range(4)]
    assert [outcome.result() for outcome in outcomes] == [[None] * 3] * 4
    assert (ways.shm.opened, ways.grpc.asked) == (1, 1)


# ---------------------------------------------------------------------------------------- a path that breaks


@pytest.mark.parametrize("breaks_in_wait", [True, False])
@pytest.mark.parametrize("at", [0, 1, 99, 100, 101, 650, 1_199, 1_200])
def test_a_load_whose_path_breaks_is_told_that_there_is_another(
    world: World, stored: Content, at: int, breaks_in_wait: bool
) -> None:
    ways = Ways(world)
    ways.shm.read_bytes, ways.shm.breaks_in_wait = at, breaks_in_wait
    with pytest.raises(PathLost, match="the wire is cut"):
        load(ways.choice, stored)
    assert load(ways.choice, stored) == [None] * 3
    assert len(ways.shm.reads) == 1, "it is left alone"
    assert (ways.choice.name, ways.choice.refused()) == ("tcp", {"shm": "the wire is cut"})
    assert not ways.grpc.reads
    assert ways.shm.closed == 1


@pytest.mark.parametrize("error", [ProtocolError("nonsense"), CredentialError("no longer")])
def test_a_path_that_talks_nonsense_has_failed_as_well(world: World, stored: Content, error: Exception) -> None:
    ways = Ways(world)
    ways.shm.read_bytes, ways.shm.error = 450, error
    with pytest.raises(PathLost, match=str(error)):
        load(ways.choice, stored)
    assert ways.choice.refused() == {"shm": str(error)}


@pytest.mark.parametrize("error", [Cancelled(Miss(MissReason.DEADLINE)), CallerError("mine"), Stop()])
def test_what_the_sink_raises_ends_the_load_and_is_no_fault_of_the_path(
    world: World, stored: Content, error: Exception
) -> None:
    ways = Ways(world)

    def end() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        read(ways.choice, stored, after_receive=end).finish()
    assert raised.value is error
    assert ways.choice.refused() == {} and not ways.tcp.reads
    world.wait_until_unleased()


def test_a_shard_that_is_gone_is_told_as_grpc_tells_it(world: World, stored: Content) -> None:
    ways = Ways(world)
    for path in ways.all:
        path.read_bytes, path.error = 100, broken(f"{path.name} is cut")
    for name in ("shm", "tcp"):
        with pytest.raises(PathLost, match=f"{name} is cut"):
            read(ways.choice, stored).finish()
    with pytest.raises(Unavailable, match="grpc is cut") as trouble:
        read(ways.choice, stored).finish()
    assert not isinstance(trouble.value, PathLost), "it is the last"
    assert ways.choice.refused() == {"shm": "shm is cut", "tcp": "tcp is cut"}


def out_of_time(deadline: Deadline) -> None:
    """As a path that waits until its deadline."""
    threading.Event().wait(deadline.remaining_s())
    deadline.check()


def test_a_call_whose_time_is_up_does_not_go_on_and_the_path_is_tried_before_it_is_used_again(
    world: World, stored: Content
) -> None:
    ways = Ways(world)
    load(ways.choice, stored)
    ways.shm.on_read = out_of_time
    with pytest.raises(Unavailable) as trouble:
        read(ways.choice, stored, deadline=Deadline.after_ms(20)).finish()
    assert trouble.value.miss.reason is MissReason.DEADLINE
    assert not ways.tcp.reads
    ways.shm.on_read = lambda deadline: None
    load(ways.choice, stored)
    assert (ways.shm.opened, ways.shm.closed, ways.choice.name) == (2, 1, "shm")


def test_a_lease_that_ended_ends_the_call_since_no_path_is_to_blame(world: World, stored: Content) -> None:
    ways = Ways(world)
    ways.shm.read_bytes, ways.shm.error = 450, Unavailable(Miss(MissReason.DEADLINE, "the lease ended: too slow"))
    with pytest.raises(Unavailable, match="the lease ended"):
        read(ways.choice, stored).finish()
    assert not ways.tcp.reads and ways.choice.refused() == {}
    ways.shm.read_bytes = None
    assert load(ways.choice, stored) == [None] * 3
    assert ways.choice.name == "shm"


def test_a_refusal_is_an_answer_and_no_reason_to_ask_over_another_path(world: World, stored: Content) -> None:
    ways = Ways(world)
    request = replace(stored.read_request(), epoch=Epoch(world.epoch + 1))
    with pytest.raises(RefusedByShard) as refused:
        list(ways.choice.read(request, ContentSink(stored, request), soon()))
    assert refused.value.refused.kind is RefusedKind.STALE
    assert not ways.tcp.reads and ways.choice.name == "shm"


def test_a_caller_that_stops_reading_gives_its_pins_back(world: World, stored: Content) -> None:
    ways = Ways(world)
    big = Content.big(world, first=100)
    store(world.open(), big)
    reading = read(ways.choice, big)
    next(reading.pieces)
    reading.pieces.close()
    world.wait_until_unleased()
    assert ways.choice.refused() == {}


def test_a_path_that_failed_is_closed_only_when_its_last_exchange_has_ended(world: World) -> None:
    ways = Ways(world)
    ways.shm.portion = ways.tcp.portion = limits.CHUNK_BYTES
    big = Content.big(world, first=100)
    store(world.open(), big)
    slow = read(ways.choice, big)
    next(slow.pieces)
    ways.shm.read_bytes = limits.FRAME_BYTES
    with pytest.raises(PathLost):
        load(ways.choice, big)
    assert load(ways.choice, big) == [None] * 16
    assert (ways.choice.name, ways.shm.closed) == ("tcp", 0)
    assert slow.finish() == [None] * 16
    assert ways.shm.closed == 1


def test_many_loads_at_once_survive_paths_that_come_and_break(world: World, stored: Content) -> None:
    ways = Ways(world)
    ways.shm.read_bytes, ways.tcp.read_bytes = 450, 700

    def again_and_again() -> list[list[MissReason | None]]:
        outcomes = []
        for _ in range(10):
            ways.later()
            while True:
                with suppress(PathLost):
                    outcomes.append(load(ways.choice, stored))
                    break
        return outcomes

    under_way = [world.meanwhile(again_and_again) for _ in range(4)]
    assert [loads.result() for loads in under_way] == [[[None] * 3] * 10] * 4
    assert len(ways.shm.reads) > 1 and len(ways.tcp.reads) > 1, "each was tried again and broke again"


def test_closing_ends_every_path_and_the_calls_after_it(world: World, stored: Content) -> None:
    ways = Ways(world)
    load(ways.choice, stored)
    ways.choice.close()
    assert (ways.shm.closed, ways.grpc.closed) == (1, 1)
    with pytest.raises(Unavailable, match="this connection was closed"):
        load(ways.choice, stored)


def test_what_breaks_since_it_was_closed_goes_on_nowhere(world: World, stored: Content) -> None:
    ways = Ways(world)
    ways.shm.read_bytes, ways.shm.on_break = 500, ways.choice.close
    with pytest.raises(Unavailable, match="the wire is cut"):
        read(ways.choice, stored).finish()
    assert not ways.tcp.reads


# -------------------------------------------------------------------------------- a store whose path breaks


def written(ways: Ways, content: Content, before_copy: Callable[[], object] = lambda: None) -> list[Written]:
    """Stores all of it by the choice. The source was drained once, at the end."""
    ways.choice.attach(content.spec, soon())
    request = content.write_request()
    source = ContentSource(content, request, before_copy)
    outcome = ways.choice.write(request, source, soon())
    assert source.drained_calls == 1
    return outcome


@pytest.fixture
def new(world: World) -> Content:
    """Three pages of two frames each that the shard has never seen."""
    return Content.of(world, 3, 2, limits.FRAME_BYTES, first=10)


@pytest.mark.parametrize("pieces", range(7))
def test_a_store_whose_path_breaks_is_told_that_there_is_another(world: World, new: Content, pieces: int) -> None:
    ways = Ways(world)
    ways.shm.pieces = pieces
    with pytest.raises(PathLost, match="the wire is cut"):
        written(ways, new)
    assert written(ways, new) == [Written.COMMITTED] * 3
    assert (ways.choice.name, ways.choice.refused()) == ("tcp", {"shm": "the wire is cut"})


@pytest.mark.parametrize("error", [Cancelled(Miss(MissReason.DEADLINE)), Stop(), CallerError("mine")])
def test_what_the_source_raises_ends_the_store_and_is_no_fault_of_the_path(
    world: World, new: Content, error: Exception
) -> None:
    ways, calls = Ways(world), itertools.count()

    def end() -> None:
        if next(calls) == 2:
            raise error

    with pytest.raises(type(error)) as raised:
        written(ways, new, end)
    assert raised.value is error
    assert ways.choice.refused() == {} and not ways.tcp.writes
    world.wait_until_unleased()


def test_a_store_to_a_shard_that_is_gone_is_told_as_grpc_tells_it(world: World, new: Content) -> None:
    ways = Ways(world)
    for path in ways.all:
        path.pieces, path.error = 2, broken(f"{path.name} is cut")
    for name in ("shm", "tcp"):
        with pytest.raises(PathLost, match=f"{name} is cut"):
            written(ways, new)
    with pytest.raises(Unavailable, match="grpc is cut") as trouble:
        written(ways, new)
    assert not isinstance(trouble.value, PathLost), "it is the last"


def test_over_the_last_path_a_source_is_free_before_the_store_has_ended(world: World, new: Content) -> None:
    ways, pause = Ways(world, offered=()), Pause()
    ways.choice.attach(new.spec, soon())
    request = new.write_request()
    source = ContentSource(new, request)
    drained = source.drained

    def drained_and_wait() -> None:
        drained()
        pause()

    source.drained = drained_and_wait  # type: ignore[method-assign]
    under_way = world.meanwhile(lambda: ways.choice.write(request, source, soon()))
    pause.wait_reached()
    assert not under_way.done()
    pause.release()
    assert under_way.result() == [Written.COMMITTED] * 3
    assert source.drained_calls == 1


# ------------------------------------------------------------------------------------------ real sockets


class Served:
    """A shard's gRPC server and its TCP server on loopback, with a token for tenant one."""

    def __init__(self, host: PageHost) -> None:
        auth = Authenticator({digest(f"token of {tenant}"): tenant for tenant in (ONE, TWO)}, "secret")
        handlers = unary_handlers(SHARD, host.ask) | page_handlers(host)
        self.epoch = Epoch(0)
        self.grpc = GrpcServer(handlers, auth, "127.0.0.1", 0, threads=8)
        self.tcp = TcpServer(host, auth.caller, "127.0.0.1")
        self.grpc.start()
        self.tcp.start()

    def open(self, tenant: Tenant) -> AutoTransport:
        shard = ShardAddress(ShardId("shard-0"), self.epoch, self.grpc.address, "anywhere")
        return choose(shard, Credentials(f"token of {tenant}"), own_attempts())

    def close(self) -> None:
        self.tcp.close()
        self.grpc.close(grace_s=0)

    def told(self, epoch: Epoch) -> Offers:
        self.epoch = epoch
        return Offers(epoch, (Offer("tcp", self.tcp.address),), (("shm", "not here"),))


@pytest.fixture
def real() -> Iterator[tuple[World, Served]]:
    served: list[Served] = []

    def serve(host: PageHost) -> Served:
        served.append(Served(host))
        return served[0]

    with open_world(serve) as world:
        world.host.core.offers = served[0].told(world.epoch)
        yield world, served[0]


class TestChoice(TransportConformance):
    """A choice is a transport like any other: over TCP here, with gRPC behind it."""

    @pytest.fixture
    def world(self, real: tuple[World, Served]) -> World:
        return real[0]


def test_over_real_sockets_pages_go_over_tcp_until_it_goes_and_then_over_grpc(real: tuple[World, Served]) -> None:
    world, served = real
    choice = world.open()
    assert isinstance(choice, AutoTransport)
    first, second = Content.big(world), Content.of(world, 3, 2, limits.FRAME_BYTES, first=100)
    store(choice, first)
    assert (choice.name, choice.streams, list(choice.refused())) == ("tcp", TcpPages.streams, ["shm"])
    reading = read(choice, first)
    next(reading.pieces)
    served.tcp.close()
    with refused(int(served.tcp.address.rpartition(":")[2])):
        with pytest.raises(PathLost):
            reading.finish()
        assert load(choice, first) == [None] * 16
        assert choice.name == "grpc"
        assert choice.refused().keys() == {"shm", "tcp"}
        store(choice, second)
        assert load(choice, second) == [None] * 3
