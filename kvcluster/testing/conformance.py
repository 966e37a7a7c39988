"""What every transport has to hold, as tests to inherit.

    class TestMine(TransportConformance):
        @pytest.fixture
        def world(self) -> Iterator[World]:
            with open_world(serve_mine) as world:
                yield world

`serve_mine(host)` puts the transport before a shard and returns a Served (world.py). The claims, in the order of
this file: what is stored is what is loaded; each page has an outcome of its own; nobody gets a wrong byte; whoever
stops, for whatever reason, leaves nothing behind; strangers get nothing; a shard that is gone is told as such. After
each test the world looks whether any lease, half-written page or unaccounted room is left. To see values where a
claim fails, let pytest rewrite this module and world.py (`pytest.register_assert_rewrite`, in a conftest.py).
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from kvcluster.core import limits
from kvcluster.core.ids import Epoch
from kvcluster.core.messages import (
    PageKey,
    PageWant,
    Pin,
    ReadRequest,
    RefusedKind,
    Reserve,
    WriteRequest,
    Written,
)
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.core.spec import LAST, PREFIX, Group, KVSpec, Part, Plane
from kvcluster.testing.world import (
    BOUND_S,
    ONE,
    TWO,
    Content,
    ContentSink,
    ContentSource,
    Pause,
    World,
    block,
    opaque_spec,
    soon,
)
from kvcluster.transport.seam import Deadline, RefusedByShard, Transport, Trouble

FRAME = limits.FRAME_BYTES
SHAPES = [
    (1, 1, 1),
    (3, 2, 7),
    (5, 4, 4_096),
    (7, 13, 100_003),
    (3, 5, FRAME // 2),
    (2, 2, FRAME),
    (3, 2, FRAME + 1),
    (2, 2, 5 * FRAME),
    (4_096, 1, 24),
]
"""Pages, layers, bytes of a layer: many in a frame, exactly one, several frames a layer, and thousands in a call."""

COMMITTED, DUPLICATE, PENDING = Written.COMMITTED, Written.DUPLICATE, Written.PENDING


def load(transport: Transport, request: ReadRequest, sink: ContentSink) -> list[Miss | None]:
    """Reads to the end."""
    pieces = transport.read(request, sink, soon())
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            outcome: list[Miss | None] = end.value
            return outcome


def store(transport: Transport, content: Content) -> None:
    """Attaches and commits all of it."""
    transport.attach(content.spec, soon())
    request = content.write_request()
    assert transport.write(request, ContentSource(content, request), soon()) == [COMMITTED] * len(content.keys)


def loaded(transport: Transport, content: Content, wants: Sequence[PageWant] | None = None) -> list[Miss | None]:
    """Reads these wants, and checks that what came, of those that did not miss, is right and complete."""
    request = content.read_request(wants)
    sink = ContentSink(content, request)
    outcome = load(transport, request, sink)
    sink.check(without=[item for item, miss in enumerate(outcome) if miss is not None])
    return outcome


def reasons(outcome: Sequence[Miss | None]) -> list[MissReason | None]:
    """What `outcome` says, without its details."""
    return [None if miss is None else miss.reason for miss in outcome]


def big(world: World, *, first: int = 0) -> Content:
    """More than any transport keeps under way: 16 pages of a frame each."""
    return Content.of(world, 16, 2, FRAME // 2, first=first)


class Stop(Exception):
    """What a caller's own code raises."""


def stop_at(number: int) -> Callable[[], None]:
    """Raises Stop when it is called for that time."""
    calls = itertools.count(1)

    def call() -> None:
        if next(calls) == number:
            raise Stop

    return call


class TransportConformance:
    """Inherit it, and provide the fixture `world`."""

    # ----------------------------------------------------------------------------- what goes in comes out

    @pytest.mark.parametrize(("pages", "layers", "layer_bytes"), SHAPES)
    def test_what_is_stored_is_what_is_loaded(self, world: World, pages: int, layers: int, layer_bytes: int) -> None:
        content = Content.of(world, pages, layers, layer_bytes)
        store(world.open(), content)
        reader = world.open()
        assert loaded(reader, content) == [None] * pages

    @pytest.mark.parametrize("layer_bytes", [5, FRAME // 3, FRAME + 1])
    def test_any_range_of_layers_can_be_loaded_alone(self, world: World, layer_bytes: int) -> None:
        content = Content.of(world, 2, 4, layer_bytes)
        transport = world.open()
        store(transport, content)
        for start, end in itertools.combinations(range(5), 2):
            assert loaded(transport, content, [PageWant(key, start, end) for key in content.keys]) == [None, None]

    def test_pages_of_all_groups_and_parts_travel_in_one_call(self, world: World) -> None:
        planes = (Plane("k", 4, 8, "float16"), Plane("v", 4, 6, "uint8"))
        state = (Plane.opaque("state", 2 * FRAME + 3),)
        spec = KVSpec("conformance", "sha256:0", 16, (Group((0, 2, 4, 6), planes, PREFIX), Group((1, 3), state, LAST)))
        quarters = [Part(layer, layer + 2, head, head + 2) for layer in (0, 2) for head in (0, 2)]
        keys = [PageKey(block(number), 0, part) for number in range(5) for part in quarters]
        keys += [PageKey(block(number), 1, spec.whole(1)) for number in range(3)]
        random.Random(1).shuffle(keys)
        content = Content(world, spec, keys)
        transport = world.open()
        store(transport, content)
        wants = content.wants()
        random.Random(2).shuffle(wants)
        assert loaded(transport, content, wants) == [None] * len(keys)

    def test_a_page_may_be_wanted_twice_in_a_call(self, world: World) -> None:
        content = Content.of(world, 1, 3, 1_000)
        transport = world.open()
        store(transport, content)
        (key,) = content.keys
        assert loaded(transport, content, [PageWant(key, 0, 2), PageWant(key, 1, 3)]) == [None, None]

    def test_a_call_about_no_page_has_an_empty_outcome(self, world: World) -> None:
        transport, content = world.open(), Content.of(world, 0, 1, 8)
        store(transport, content)
        assert loaded(transport, content) == []

    def test_the_source_is_free_when_the_store_has_ended(self, world: World) -> None:
        transport, content = world.open(), Content.of(world, 3, 2, FRAME // 2)
        transport.attach(content.spec, soon())
        request = content.write_request()
        source = ContentSource(content, request)
        transport.write(request, source, soon())
        assert source.drained_calls == 1
        assert source.sent == sorted(source.sent), "page after page"

    def test_readers_at_the_same_time_get_the_same(self, world: World) -> None:
        content = big(world)
        store(world.open(), content)
        readers = [world.meanwhile(lambda: loaded(world.open(), content)) for _ in range(3)]
        assert [reader.result(BOUND_S) for reader in readers] == [[None] * len(content.keys)] * 3

    def test_one_transport_serves_several_loads_in_turns(self, world: World) -> None:
        content = big(world)
        transport = world.open()
        store(transport, content)
        requests = [content.read_request() for _ in range(2)]
        sinks = [ContentSink(content, request) for request in requests]
        reads = [transport.read(request, sink, soon()) for request, sink in zip(requests, sinks, strict=True)]
        for _ in itertools.zip_longest(*reads):
            """A piece of each."""
        for sink in sinks:
            sink.check()

    # ------------------------------------------------------------------------- an outcome for every page

    def test_a_load_says_for_each_page_why_it_misses(self, world: World) -> None:
        stored = Content.of(world, 2, 2, 300)
        writing = Content.of(world, 2, 2, 300, first=10)
        transport = world.open()
        store(transport, stored)
        pause, request = Pause(), writing.write_request()
        writer = world.open()
        under_way = world.meanwhile(lambda: writer.write(request, ContentSource(writing, request, pause), soon()))
        pause.wait_reached()
        never = Content.of(world, 1, 2, 300, first=20)
        wants = [*never.wants(), *stored.wants(), *writing.wants()]
        outcome = loaded(transport, stored, wants)
        assert reasons(outcome) == [MissReason.EVICTED, None, None, MissReason.PENDING, MissReason.PENDING]
        pause.release()
        assert under_way.result(BOUND_S) == [COMMITTED] * 2

    def test_a_store_says_for_each_page_what_became_of_it(self, world: World) -> None:
        ready, writing, new = (Content.of(world, 2, 2, 300, first=first) for first in (0, 10, 20))
        transport = world.open()
        store(transport, ready)
        pause, request = Pause(), writing.write_request()
        writer = world.open()
        under_way = world.meanwhile(lambda: writer.write(request, ContentSource(writing, request, pause), soon()))
        pause.wait_reached()
        everything = Content(world, new.spec, [*new.keys[:1], *ready.keys, *writing.keys, *new.keys[1:]], seed=3)
        request_all = everything.write_request()
        source = ContentSource(everything, request_all)
        outcome = transport.write(request_all, source, soon())
        assert outcome == [COMMITTED, DUPLICATE, DUPLICATE, PENDING, PENDING, COMMITTED]
        assert sorted(set(source.sent)) == [0, 5], "only what was granted is moved"
        pause.release()
        assert under_way.result(BOUND_S) == [COMMITTED] * 2

    def test_each_page_has_one_writer_however_many_come(self, world: World) -> None:
        content = Content.of(world, 64, 2, 5_000)
        start = threading.Barrier(3)

        def write() -> list[Written]:
            transport = world.open()
            transport.attach(content.spec, soon())
            request = content.write_request()
            start.wait(BOUND_S)
            return transport.write(request, ContentSource(content, request), soon())

        writers = [world.meanwhile(write) for _ in range(3)]
        outcomes = [Counter(fate) for fate in zip(*[writer.result(BOUND_S) for writer in writers], strict=True)]
        assert all(fates[COMMITTED] == 1 and fates[DUPLICATE] + fates[PENDING] == 2 for fates in outcomes)
        assert loaded(world.open(), content) == [None] * 64

    def test_a_full_shard_takes_what_fits_and_says_so_at_once(self, world: World) -> None:
        content = Content.of(world, 40, 2, FRAME // 2)
        transport = world.open()
        transport.attach(content.spec, soon())
        room = world.host.core.pool.allocator.room(FRAME)
        request = content.write_request()
        outcome = transport.write(request, ContentSource(content, request), soon())
        assert 0 < room < 40
        assert outcome == [COMMITTED] * room + [Written.FULL] * (40 - room)

    def test_a_store_that_waits_gets_the_room_that_is_made(self, world: World) -> None:
        old, new = Content.of(world, 40, 2, FRAME // 2), Content.of(world, 8, 2, FRAME // 2, first=100)
        transport = world.open()
        transport.attach(old.spec, soon())
        request = old.write_request()
        transport.write(request, ContentSource(old, request), soon())
        request = new.write_request(wait_ns=int(BOUND_S * 1e9))
        assert transport.write(request, ContentSource(new, request), soon()) == [COMMITTED] * 8
        assert loaded(transport, new) == [None] * 8

    def test_a_store_that_waits_in_vain_is_full(self, world: World) -> None:
        old, new = Content.of(world, 40, 2, FRAME // 2), Content.of(world, 1, 2, FRAME // 2, first=100)
        transport, reader = world.open(), world.open()
        transport.attach(old.spec, soon())
        request = old.write_request()
        transport.write(request, ContentSource(old, request), soon())
        reading = old.read_request()
        sink = ContentSink(old, reading)
        pieces = reader.read(reading, sink, soon())
        next(pieces)  # whatever is evicted now stays where it is until this load has ended
        request = new.write_request(wait_ns=20_000_000)
        assert transport.write(request, ContentSource(new, request), soon()) == [Written.FULL]
        pieces.close()

    def test_waiting_for_room_ends_by_the_deadline(self, world: World) -> None:
        old, new = Content.of(world, 40, 2, FRAME // 2), Content.of(world, 1, 2, FRAME // 2, first=100)
        transport, reader = world.open(), world.open()
        transport.attach(old.spec, soon())
        request = old.write_request()
        transport.write(request, ContentSource(old, request), soon())
        reading = old.read_request()
        pieces = reader.read(reading, ContentSink(old, reading), soon())
        next(pieces)
        request = new.write_request(wait_ns=5_000_000_000)
        deadline = Deadline.after_ms(50)
        with pytest.raises(Trouble) as trouble:
            transport.write(request, ContentSource(new, request), deadline)
        assert trouble.value.miss.reason is MissReason.DEADLINE
        assert not world.host.inspect(lambda: world.page(new, new.keys[0]))
        assert len(world.host.core.leases) == 1, "the reader is still at it: the writer did not wait for it"
        pieces.close()

    # --------------------------------------------------------------------------------- never a wrong byte

    def test_a_page_that_does_not_match_its_checksum_is_never_readable(self, world: World) -> None:
        content = Content.of(world, 3, 2, 1_000)
        transport = world.open()
        transport.attach(content.spec, soon())
        request = content.write_request()
        outcome = transport.write(request, ContentSource(content, request, lies_about=[1]), soon())
        assert outcome == [COMMITTED, Written.CORRUPT, COMMITTED]
        assert reasons(loaded(transport, content)) == [None, MissReason.EVICTED, None]
        request = content.write_request()
        assert transport.write(request, ContentSource(content, request), soon()) == [DUPLICATE, COMMITTED, DUPLICATE]

    def test_a_byte_that_rots_reaches_the_reader_as_a_checksum_that_fails(self, world: World) -> None:
        content = Content.of(world, 3, 4, 1_000)
        transport = world.open()
        store(transport, content)
        world.spoil(content, content.keys[1], at=2_500)
        request = content.read_request()
        sink = ContentSink(content, request)
        assert load(transport, request, sink) == [None] * 3
        assert sink.corrupt == [(1, 2)], "that layer, and no other"

    def test_a_page_of_another_block_does_not_verify(self, world: World) -> None:
        content = Content.of(world, 2, 1, 1_000)
        transport = world.open()
        store(transport, content)
        slots = [page.slot() for key in content.keys if (page := world.page(content, key))]
        world.host.view(slots[0])[:] = world.host.view(slots[1])
        request = content.read_request()
        sink = ContentSink(content, request)
        load(transport, request, sink)
        assert sink.corrupt == [(0, 0)]

    def test_what_is_evicted_while_it_is_read_arrives_whole(self, world: World) -> None:
        content = big(world)
        transport = world.open()
        store(transport, content)
        request = content.read_request()
        sink = ContentSink(content, request)
        pieces = transport.read(request, sink, soon())
        next(pieces)
        pool = world.host.core.pool
        world.host.inspect(lambda: [pool.condemn(page) for page in list(pool.ready())])
        other = Content.of(world, 12, 2, FRAME // 2, first=100)
        store(world.open(), other)  # would overwrite what is not kept for its reader
        for _ in pieces:
            """To the end."""
        sink.check()
        assert reasons(loaded(transport, content)) == [MissReason.EVICTED] * 16

    # ------------------------------------------------------------------ whoever stops leaves nothing behind

    def test_a_reader_that_stops_half_way_leaves_no_lease(self, world: World) -> None:
        content = big(world)
        transport = world.open()
        store(transport, content)
        request = content.read_request()
        pieces = transport.read(request, ContentSink(content, request), soon())
        next(pieces)
        assert len(world.host.core.leases) == 1
        pieces.close()
        world.wait_until_unleased()
        assert loaded(transport, content) == [None] * 16

    def test_a_sink_that_raises_is_heard_and_leaves_no_lease(self, world: World) -> None:
        content = big(world)
        transport = world.open()
        store(transport, content)
        request = content.read_request()
        pieces = transport.read(request, ContentSink(content, request, stop_at(3)), soon())
        with pytest.raises(Stop):
            for _ in pieces:
                """Until it raises."""
        world.wait_until_unleased()

    @pytest.mark.parametrize("call", [1, 5])
    def test_a_source_that_raises_is_heard_and_leaves_no_page(self, world: World, call: int) -> None:
        content = big(world)
        transport = world.open()
        transport.attach(content.spec, soon())
        request = content.write_request()
        source = ContentSource(content, request, stop_at(call))
        with pytest.raises(Stop):
            transport.write(request, source, soon())
        assert not source.drained_calls
        world.wait_until_unleased()
        assert reasons(loaded(transport, content)) == [MissReason.EVICTED] * 16
        store(transport, content)

    def test_a_deadline_that_is_over_ends_every_call(self, world: World) -> None:
        content = Content.of(world, 1, 1, 8)
        transport = world.open()
        store(transport, content)
        over = Deadline.after_ms(0)
        reading, writing = content.read_request(), Content.of(world, 1, 1, 8, first=1).write_request()
        calls: list[Callable[[], object]] = [
            lambda: transport.attach(content.spec, over),
            lambda: list(transport.read(reading, ContentSink(content, reading), over)),
            lambda: transport.write(writing, ContentSource(content, writing, stop_at(1)), over),
            lambda: transport.flush(over),
        ]
        for call in calls:
            with pytest.raises(Trouble) as trouble:
                call()
            assert trouble.value.miss.reason is MissReason.DEADLINE

    def test_a_reader_too_slow_for_its_deadline_leaves_no_lease(self, world: World) -> None:
        content = big(world)
        transport = world.open()
        store(transport, content)
        deadline = Deadline.after_ms(100)
        request = content.read_request()

        def until_it_is_over() -> None:
            threading.Event().wait(deadline.remaining_s())

        pieces = transport.read(request, ContentSink(content, request, until_it_is_over), deadline)
        with pytest.raises(Trouble) as trouble:
            for _ in pieces:
                """Until it is too late."""
        assert trouble.value.miss.reason is MissReason.DEADLINE
        world.wait_until_unleased()

    def test_a_writer_too_slow_for_its_deadline_leaves_no_page(self, world: World) -> None:
        content = big(world)
        transport = world.open()
        transport.attach(content.spec, soon())
        deadline = Deadline.after_ms(100)
        request = content.write_request()

        def until_it_is_over() -> None:
            threading.Event().wait(deadline.remaining_s())

        with pytest.raises(Trouble) as trouble:
            transport.write(request, ContentSource(content, request, until_it_is_over), deadline)
        assert trouble.value.miss.reason is MissReason.DEADLINE
        world.wait_until_unleased()
        assert reasons(loaded(transport, content)) == [MissReason.EVICTED] * 16

    def test_a_load_whose_lease_ends_gets_no_wrong_byte_and_leaves_no_lease(self, world: World) -> None:
        content = big(world)
        transport = world.open()
        store(transport, content)
        request = content.read_request()
        sink = ContentSink(content, request)
        pieces = transport.read(request, sink, soon())
        next(pieces)
        world.expire_leases()
        with pytest.raises(Trouble) as trouble:
            for _ in pieces:
                """What is under way may still arrive."""
        assert trouble.value.miss.reason is MissReason.DEADLINE, "the shard is there: it was the reader"
        assert not sink.corrupt
        world.wait_until_unleased()

    def test_a_store_whose_lease_ends_commits_nothing(self, world: World) -> None:
        content = Content.of(world, 2, 2, FRAME // 2)
        transport = world.open()
        transport.attach(content.spec, soon())
        pause, request = Pause(at=2), content.write_request()
        under_way = world.meanwhile(lambda: transport.write(request, ContentSource(content, request, pause), soon()))
        pause.wait_reached()
        world.expire_leases()
        pause.release()
        with pytest.raises(Trouble) as trouble:
            under_way.result(BOUND_S)
        assert trouble.value.miss.reason is MissReason.DEADLINE
        world.wait_until_unleased()
        assert reasons(loaded(transport, content)) == [MissReason.EVICTED] * 2

    @pytest.mark.parametrize("kind", [Pin, Reserve])
    def test_a_grant_that_comes_too_late_is_given_back(self, world: World, kind: type[Pin | Reserve]) -> None:
        content = Content.of(world, 2, 1, 100)
        transport = world.open()
        store(transport, content)
        reading, writing = content.read_request(), Content.of(world, 1, 1, 100, first=5).write_request()
        world.watched.answer_late(kind)
        with pytest.raises(Trouble):
            if kind is Pin:
                load(transport, reading, ContentSink(content, reading))
            else:
                transport.write(writing, ContentSource(content, writing, stop_at(1)), soon())
        world.wait_until_unleased()

    def test_an_attempt_that_is_under_way_cannot_be_made_again(self, world: World) -> None:
        content = Content.of(world, 2, 2, FRAME // 2)
        transport, second = world.open(), world.open()
        transport.attach(content.spec, soon())
        pause, request = Pause(at=2), content.write_request()
        under_way = world.meanwhile(lambda: transport.write(request, ContentSource(content, request, pause), soon()))
        pause.wait_reached()
        reading = ReadRequest(request.namespace, request.attempt, request.epoch, tuple(content.wants()))
        for again in (
            lambda: second.write(request, ContentSource(content, request), soon()),
            lambda: load(second, reading, ContentSink(content, reading)),
        ):
            with pytest.raises(RefusedByShard) as refused:
                again()
            assert refused.value.refused.kind is RefusedKind.BAD
        pause.release()
        assert under_way.result(BOUND_S) == [COMMITTED] * 2, "the first is none the worse for it"

    def test_a_transport_that_is_closed_under_a_load_leaves_no_lease(self, world: World) -> None:
        content = big(world)
        transport = world.open()
        store(transport, content)
        request = content.read_request()
        sink = ContentSink(content, request)
        pieces = transport.read(request, sink, soon())
        next(pieces)
        transport.close()
        try:
            for _ in pieces:
                """A transport within a process has nothing to close, and goes on."""
        except Trouble as trouble:
            assert trouble.miss.reason is MissReason.SHARD_LOST
        else:
            sink.check()
        world.wait_until_unleased()

    def test_a_transport_that_was_closed_raises_nothing_but_trouble(self, world: World) -> None:
        content = Content.of(world, 1, 1, 8)
        transport = world.open()
        store(transport, content)
        transport.close()
        transport.close()
        reading, writing = content.read_request(), content.write_request()
        for call in (
            lambda: transport.attach(content.spec, soon()),
            lambda: load(transport, reading, ContentSink(content, reading)),
            lambda: transport.write(writing, ContentSource(content, writing), soon()),
            lambda: transport.flush(soon()),
        ):
            try:
                call()
            except Trouble as trouble:
                assert trouble.miss.reason is MissReason.SHARD_LOST
        world.wait_until_unleased()

    # ---------------------------------------------------------------------------------- who may have what

    def test_attaching_names_the_namespace_of_the_credential(self, world: World) -> None:
        spec = opaque_spec((1, 8))
        attached = [transport.attach(spec, soon()) for transport in (world.open(), world.open(), world.second_tenant())]
        assert [answer.namespace for answer in attached] == [spec.namespace(ONE)] * 2 + [spec.namespace(TWO)]
        assert {answer.epoch for answer in attached} == {world.epoch}
        assert {answer.lease_ttl_ns for answer in attached} == {world.host.core.leases.ttl_ns}

    def test_a_namespace_that_nobody_attached_is_not_known(self, world: World) -> None:
        content = Content.of(world, 1, 1, 8)
        self.check_refused(world.open(), content, RefusedKind.UNKNOWN_NAMESPACE)

    def test_the_namespace_of_another_tenant_is_not_known(self, world: World) -> None:
        content = Content.of(world, 2, 1, 8)
        store(world.open(), content)
        stranger = world.second_tenant()
        self.check_refused(stranger, content, RefusedKind.UNKNOWN_NAMESPACE)
        stranger.attach(content.spec, soon())
        self.check_refused(stranger, content, RefusedKind.UNKNOWN_NAMESPACE)

    def test_another_tenant_shares_nothing_but_the_room(self, world: World) -> None:
        content = Content.of(world, 2, 1, 8)
        store(world.open(), content)
        stranger = world.second_tenant()
        own = stranger.attach(content.spec, soon()).namespace
        request = content.read_request()
        request = ReadRequest(own, request.attempt, request.epoch, request.wants)
        assert reasons(load(stranger, request, ContentSink(content, request))) == [MissReason.EVICTED] * 2

    def test_another_incarnation_of_the_shard_is_not_taken_for_this_one(self, world: World) -> None:
        content = Content.of(world, 1, 1, 8)
        transport = world.open()
        store(transport, content)
        for epoch in (world.epoch - 1, world.epoch + 1):
            self.check_refused(transport, content, RefusedKind.STALE, epoch=Epoch(epoch))

    def test_parts_that_the_spec_does_not_have_are_refused(self, world: World) -> None:
        content = Content.of(world, 1, 2, 8)
        transport = world.open()
        transport.attach(content.spec, soon())
        for group, part in [(1, Part(0, 2, 0, 1)), (0, Part(0, 3, 0, 1)), (0, Part(0, 2, 0, 2))]:
            request = content.write_request(keys=[PageKey(content.keys[0].hash, group, part)])
            with pytest.raises(RefusedByShard) as refused:
                transport.write(request, ContentSource(content, content.write_request(), stop_at(1)), soon())
            assert refused.value.refused.kind is RefusedKind.BAD

    # --------------------------------------------------------------------------- when the shard goes away

    def test_a_shard_that_is_gone_is_told_as_lost(self, world: World) -> None:
        content = Content.of(world, 1, 1, 8)
        transport = world.open()
        store(transport, content)
        world.cut()
        reading, writing = content.read_request(), content.write_request()
        for call in (
            lambda: transport.attach(content.spec, soon()),
            lambda: load(transport, reading, ContentSink(content, reading)),
            lambda: transport.write(writing, ContentSource(content, writing, stop_at(1)), soon()),
            lambda: transport.flush(soon()),
        ):
            with pytest.raises(Trouble) as trouble:
                call()
            assert trouble.value.miss.reason is MissReason.SHARD_LOST

    def test_a_shard_that_goes_away_under_a_load_is_told_as_lost(self, world: World) -> None:
        content = big(world)
        transport = world.open()
        store(transport, content)
        request = content.read_request()
        sink = ContentSink(content, request)
        pieces = transport.read(request, sink, soon())
        next(pieces)
        world.cut()
        with pytest.raises(Trouble) as trouble:
            for _ in pieces:
                """What is under way may still arrive."""
        assert trouble.value.miss.reason is MissReason.SHARD_LOST
        assert not sink.corrupt

    def test_a_reader_may_stop_after_the_shard_has_gone(self, world: World) -> None:
        content = big(world)
        transport = world.open()
        store(transport, content)
        request = content.read_request()
        pieces = transport.read(request, ContentSink(content, request), soon())
        next(pieces)
        world.cut()
        pieces.close()

    def test_a_shard_that_goes_away_under_a_store_is_told_as_lost(self, world: World) -> None:
        content = big(world)
        transport = world.open()
        transport.attach(content.spec, soon())
        pause, request = Pause(at=2), content.write_request()
        under_way = world.meanwhile(lambda: transport.write(request, ContentSource(content, request, pause), soon()))
        pause.wait_reached()
        world.cut()
        pause.release()
        with pytest.raises(Trouble) as trouble:
            under_way.result(BOUND_S)
        assert trouble.value.miss.reason is MissReason.SHARD_LOST

    # ------------------------------------------------------------------------------------------- visible

    def test_what_is_flushed_is_known_to_the_coordinator(self, world: World) -> None:
        content = Content.of(world, 300, 1, 8)
        transport = world.open()
        store(transport, content)
        assert transport.flush(soon())
        coordinator = world.cluster.coordinator_core()

        def known() -> bool:
            space = coordinator.directory.known(content.namespace)
            return space is not None and all(space.index.get(key.hash) for key in content.keys)

        assert world.cluster.running_coordinator().inspect(known)

    def test_without_a_coordinator_nothing_is_called_flushed(self, world: World) -> None:
        content = Content.of(world, 1, 1, 8)
        transport = world.open()
        transport.attach(content.spec, soon())
        world.cluster.stop_coordinator()
        request = content.write_request()
        assert transport.write(request, ContentSource(content, request), soon()) == [COMMITTED]
        assert not transport.flush(Deadline.after_ms(200))

    # ------------------------------------------------------------------------------------------- helpers

    def check_refused(
        self, transport: Transport, content: Content, kind: RefusedKind, *, epoch: Epoch | None = None
    ) -> None:
        """A load and a store are refused for that reason, and nothing is sent."""
        reading, writing = content.read_request(), content.write_request()
        epoch = reading.epoch if epoch is None else epoch
        reading = ReadRequest(reading.namespace, reading.attempt, epoch, reading.wants)
        writing = WriteRequest(writing.namespace, writing.attempt, epoch, writing.pages)
        sink = ContentSink(content, reading, stop_at(1))
        for call in (
            lambda: load(transport, reading, sink),
            lambda: transport.write(writing, ContentSource(content, writing, stop_at(1)), soon()),
        ):
            with pytest.raises(RefusedByShard) as refused:
                call()
            assert refused.value.refused.kind is kind
        assert not sink.got
