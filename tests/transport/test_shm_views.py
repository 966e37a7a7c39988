"""Pages that are read in place in a shard's arena."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvcluster.core import limits
from kvcluster.core.messages import PageWant, RefusedKind
from kvcluster.core.miss import Miss, MissReason
from kvcluster.testing.conformance import World, open_world
from kvcluster.testing.conformance.content import Content, ContentSource, load, store
from kvcluster.testing.conformance.world import BOUND_S, soon
from kvcluster.transport.base import Deadline, RefusedByShard, Unavailable
from kvcluster.transport.shm_control import Turn
from kvcluster.transport.shm_pages import ShmPages
from kvcluster.wire.socket_frames import FrameKind
from tests.transport.shm_served import Served, path


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(Served) as world:
        yield world


@pytest.fixture
def way(world: World) -> Iterator[ShmPages]:
    way = path(world)
    yield way
    way.close()


def stored(world: World, pages: int = 3) -> Content:
    content = Content.of(world, pages, 4, 1_000)
    store(world.open(), content)
    return content


def page_of(content: Content, item: int, start: int = 0, stop: int = 4) -> bytes:
    return b"".join(content.layers[content.keys[item]][start:stop])


def test_what_is_borrowed_is_read_where_it_lies_and_cannot_be_written(world: World, way: ShmPages) -> None:
    content = stored(world)
    with way.borrow(content.read_request(), soon()) as borrowed:
        assert list(borrowed.outcome) == [None] * 3
        assert [bytes(view or b"") for view in borrowed.views] == [page_of(content, item) for item in range(3)]
        view = borrowed.views[0]
        assert view is not None and view.readonly
        world.spoil(content.namespace, content.keys[0], 7)
        assert view[7] == page_of(content, 0)[7] ^ 1, "it is the arena itself"
        assert borrowed.valid(soon())
    with pytest.raises(ValueError, match="released"):
        view[7]


def test_any_range_of_layers_can_be_borrowed(world: World, way: ShmPages) -> None:
    content = stored(world)
    wants = [PageWant(content.keys[2], 1, 3), PageWant(content.keys[0], 3, 4)]
    with way.borrow(content.read_request(wants), soon()) as borrowed:
        one, other = borrowed.views
        assert (one, other) == (page_of(content, 2, 1, 3), page_of(content, 0, 3, 4))


def test_what_misses_and_what_does_not_verify_is_not_handed_out(world: World, way: ShmPages) -> None:
    content, never = stored(world), Content.of(world, 1, 4, 1_000, first=10)
    world.spoil(content.namespace, content.keys[1], 2_500)
    with way.borrow(content.read_request([*content.wants(), *never.wants()]), soon()) as borrowed:
        reasons = [miss and miss.reason for miss in borrowed.outcome]
        assert reasons == [None, MissReason.CORRUPT, None, MissReason.EVICTED]
        assert [view is None for view in borrowed.views] == [False, True, False, True]


def test_a_borrowed_page_is_not_reused(world: World, way: ShmPages) -> None:
    content = stored(world)
    pool = world.host.core.pool
    with way.borrow(content.read_request(), soon()) as borrowed:
        world.host.inspect(lambda: list(map(pool.condemn, list(pool.ready()))))
        while room := pool.allocator.room(4_000):
            pages = min(room, limits.WRITE_PAGES)
            store(world.open(), Content.of(world, pages, 4, 1_000, first=100 + room))
        assert [bytes(view or b"") for view in borrowed.views] == [page_of(content, item) for item in range(3)]
        assert borrowed.valid(soon())
    world.wait_until_unleased()
    assert pool.allocator.room(4_000), "now they are free"


def test_renewing_keeps_it_and_waits_for_nothing(world: World, way: ShmPages) -> None:
    content = stored(world)
    with way.borrow(content.read_request(), soon()) as borrowed:
        begun = world.lease_expiry()
        assert begun is not None
        borrowed.renew(soon())
        world.watched.wait_until(lambda: (world.lease_expiry() or 0) > begun, "the lease is renewed")


def test_renewing_does_not_wait_for_a_thread_that_asks_whether_it_was_valid(world: World, way: ShmPages) -> None:
    content, asking, go_on = stored(world), threading.Event(), threading.Event()
    with way.borrow(content.read_request(), soon()) as borrowed:
        control = borrowed._control
        receive = control.receive

        def held(kind: FrameKind, deadline: Deadline, *, then: Turn) -> bytes:
            asking.set()
            assert go_on.wait(BOUND_S)
            return receive(kind, deadline, then=then)

        control.receive = held  # type: ignore[method-assign]
        valid = world.meanwhile(lambda: borrowed.valid(soon()))
        assert asking.wait(BOUND_S)
        assert borrowed.renew(soon()), "that thread renews it"
        go_on.set()
        assert valid.result(BOUND_S)


def test_asking_whether_it_was_valid_renews_it(world: World, way: ShmPages) -> None:
    content = stored(world)
    with way.borrow(content.read_request(), soon()) as borrowed:
        begun = world.lease_expiry()
        assert borrowed.valid(soon())
        assert (world.lease_expiry() or 0) > (begun or 0)


def test_after_its_lease_has_ended_it_is_not_valid_and_never_again(world: World, way: ShmPages) -> None:
    content = stored(world)
    with way.borrow(content.read_request(), soon()) as borrowed:
        world.expire_leases()
        assert not borrowed.valid(soon())
        assert not borrowed.renew(soon())
        assert not borrowed.valid(soon())
        world.wait_until_unleased()
        view = borrowed.views[0]
        assert view is not None and len(bytes(view)) == 4_000, "to look at it is no error, only of no worth"


def test_a_lease_that_ended_unheard_is_not_made_valid_by_renewing(world: World, way: ShmPages) -> None:
    content = stored(world)
    with way.borrow(content.read_request(), soon()) as borrowed:
        world.expire_leases()
        borrowed.renew(soon())
        assert not borrowed.valid(soon())


def test_of_a_shard_that_is_gone_nothing_is_valid(world: World, way: ShmPages) -> None:
    content = stored(world)
    with way.borrow(content.read_request(), soon()) as borrowed:
        world.cut()
        assert not borrowed.valid(soon())


def test_an_answer_that_does_not_come_in_time_is_none(world: World, way: ShmPages) -> None:
    content = stored(world)
    with way.borrow(content.read_request(), soon()) as borrowed:
        assert not borrowed.valid(Deadline.after_ms(0))
    world.wait_until_unleased()


def test_a_transport_that_is_closed_takes_with_it_what_was_borrowed(world: World, way: ShmPages) -> None:
    content = stored(world)
    with way.borrow(content.read_request(), soon()) as borrowed:
        way.close()
        assert not borrowed.valid(soon())
    world.wait_until_unleased()
    with pytest.raises(Unavailable):
        way.borrow(content.read_request(), soon())


def test_its_connection_serves_the_next_and_loads_go_on_beside_it(world: World, way: ShmPages) -> None:
    content = stored(world)
    for _ in range(3):
        with way.borrow(content.read_request(), soon()) as borrowed:
            assert load(world.open(), content) == [None] * 3
            assert borrowed.valid(soon())
    way.tidy()
    assert len(way._connections._idle) == 1
    world.wait_until_unleased()


def test_one_thread_may_renew_what_another_asks_about(world: World, way: ShmPages) -> None:
    content = stored(world)
    with way.borrow(content.read_request(), soon()) as borrowed:
        done = threading.Event()

        def keep() -> int:
            renewals = 0
            while not done.is_set():
                borrowed.renew(soon())
                renewals += 1
            return renewals

        keeper = world.meanwhile(keep)
        assert all(borrowed.valid(soon()) for _ in range(50))
        done.set()
        assert keeper.result(BOUND_S) > 0


def test_what_was_made_of_a_view_keeps_the_memory_after_the_end(world: World, way: ShmPages) -> None:
    content = stored(world)
    with way.borrow(content.read_request(), soon()) as borrowed:
        view = borrowed.views[1]
        assert view is not None
        kept = memoryview(view)[:1_000]
    world.close()
    assert kept == page_of(content, 1, 0, 1)


def test_a_refusal_is_raised_and_nothing_is_held(world: World, way: ShmPages) -> None:
    content = Content.of(world, 1, 1, 8)
    with pytest.raises(RefusedByShard) as refused:
        way.borrow(content.read_request(), soon())
    assert refused.value.refused.kind is RefusedKind.UNKNOWN_NAMESPACE
    assert not len(world.host.core.leases)


def test_what_is_being_written_cannot_be_borrowed(world: World, way: ShmPages) -> None:
    content = Content.of(world, 1, 2, 1_000)
    transport = world.open()
    transport.attach(content.spec, soon())
    outcomes: list[Miss | None] = []

    def borrow() -> None:
        with way.borrow(content.read_request(), soon()) as borrowed:
            outcomes.extend(borrowed.outcome)

    request = content.write_request()
    transport.write(request, ContentSource(content, request, borrow), soon())
    assert [miss and miss.reason for miss in outcomes] == [MissReason.PENDING]
