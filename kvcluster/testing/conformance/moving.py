"""Claims about moving pages: a load returns what was stored, each page has an outcome of its own, and no byte is
wrong."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from functools import partial

import pytest

from kvcluster.core import limits
from kvcluster.core.groups import LAST, PREFIX, Group, Part, Plane
from kvcluster.core.messages import PageKey, PageWant, Written
from kvcluster.core.miss import MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.testing.conformance.content import (
    Content,
    ContentSource,
    block,
    load,
    read,
    read_begun,
    store,
    stored,
    write,
    write_begun,
)
from kvcluster.testing.conformance.world import BOUND_S, World, soon
from kvcluster.transport.base import Deadline, Transport, Unavailable

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
    (2_048, 1, 24),
]
"""Pages, layers, bytes of a layer: many layers in a frame, exactly one, several frames for a layer, and thousands of
pages in a call."""

COMMITTED, DUPLICATE, PENDING, FULL = Written.COMMITTED, Written.DUPLICATE, Written.PENDING, Written.FULL
EVICTED = MissReason.EVICTED


def fill(world: World, transport: Transport) -> Content:
    """Stores pages of a frame until there is no room for another; returns them."""
    content = Content.of(world, world.host.core.pool.allocator.capacity_bytes // FRAME, 2, FRAME // 2)
    store(transport, content)
    return content


class MovingClaims:
    """Claims about pages and their bytes."""

    # ----------------------------------------------------------------------------- what goes in comes out

    @pytest.mark.parametrize(("pages", "layers", "layer_bytes"), SHAPES)
    def test_what_is_stored_is_what_is_loaded(self, world: World, pages: int, layers: int, layer_bytes: int) -> None:
        _, content = stored(world, Content.of(world, pages, layers, layer_bytes))
        assert load(world.open(), content) == [None] * pages

    @pytest.mark.parametrize("layer_bytes", [5, FRAME // 3, FRAME + 1])
    def test_any_range_of_layers_can_be_loaded_alone(self, world: World, layer_bytes: int) -> None:
        transport, content = stored(world, Content.of(world, 2, 4, layer_bytes))
        for start, end in itertools.combinations(range(5), 2):
            assert load(transport, content, [PageWant(key, start, end) for key in content.keys]) == [None, None]

    def test_pages_of_all_groups_and_parts_travel_in_one_call(self, world: World) -> None:
        planes = (Plane("k", 4, 8, "float16"), Plane("v", 4, 6, "uint8"))
        state = (Plane.opaque("state", 2 * FRAME + 3),)
        spec = KVSpec("conformance", "sha256:0", 16, (Group((0, 2, 4, 6), planes, PREFIX), Group((1, 3), state, LAST)))
        quarters = [Part(layer, layer + 2, head, head + 2) for layer in (0, 2) for head in (0, 2)]
        keys = [PageKey(block(number), 0, part) for number in range(5) for part in quarters]
        keys += [PageKey(block(number), 1, spec.whole(1)) for number in range(3)]
        random.Random(1).shuffle(keys)
        transport, content = stored(world, Content(world, spec, keys))
        wants = content.wants()
        random.Random(2).shuffle(wants)
        assert load(transport, content, wants) == [None] * len(keys)

    def test_a_page_may_be_wanted_twice_in_a_call(self, world: World) -> None:
        transport, content = stored(world, Content.of(world, 1, 3, 1_000))
        (key,) = content.keys
        assert load(transport, content, [PageWant(key, 0, 2), PageWant(key, 1, 3)]) == [None, None]

    def test_a_call_about_no_page_has_an_empty_outcome(self, world: World) -> None:
        transport, content = world.open(), Content.of(world, 0, 1, 8)
        assert write(transport, content) == []
        assert load(transport, content) == []

    def test_the_source_is_asked_page_by_page_and_told_when_it_is_free(self, world: World) -> None:
        transport, content = world.open(), Content.of(world, 3, 2, FRAME // 2)
        transport.attach(content.spec, soon())
        request = content.write_request()
        source = ContentSource(content, request)
        transport.write(request, source, soon())
        assert source.copied == sorted(source.copied)
        assert source.drained_calls == 1

    def test_readers_at_the_same_time_get_the_same(self, world: World) -> None:
        _, content = stored(world)
        readers = [world.meanwhile(lambda: load(world.open(), content)) for _ in range(3)]
        assert [reader.result(BOUND_S) for reader in readers] == [[None] * len(content.keys)] * 3

    def test_one_transport_serves_several_loads_in_turns(self, world: World) -> None:
        transport, content = stored(world)
        readings = [read(transport, content) for _ in range(2)]
        for _ in itertools.zip_longest(*[reading.pieces for reading in readings]):
            """A piece of each."""
        for reading in readings:
            reading.sink.check()

    def test_threads_share_one_transport(self, world: World) -> None:
        transport, shared = stored(world, Content.of(world, 4, 2, FRAME // 2))
        together = threading.Barrier(4)

        def use(number: int) -> None:
            mine = Content.of(world, 3, 2, FRAME // 2, first=100 * (number + 1))
            together.wait(BOUND_S)
            for _ in range(3):
                assert load(transport, shared) == [None] * 4
            store(transport, mine)
            assert load(transport, mine) == [None] * 3
            assert transport.flush(soon())
            transport.suspect(mine.namespace, world.epoch, mine.keys, soon())

        for user in [world.meanwhile(partial(use, number)) for number in range(4)]:
            user.result(BOUND_S)

    def test_a_load_that_is_not_driven_on_holds_up_no_other_call(self, world: World) -> None:
        (transport, content), new = stored(world), Content.of(world, 1, 1, 100, first=100)
        reading = read_begun(transport, content)
        store(transport, new)
        assert transport.flush(soon())
        assert load(transport, new) == [None]
        assert reading.finish() == [None] * 16
        reading.sink.check()

    # ------------------------------------------------------------------------- an outcome for every page

    def test_a_load_says_for_each_page_why_it_misses(self, world: World) -> None:
        ready, writing, never = (Content.of(world, 2, 2, 300, first=first) for first in (0, 10, 20))
        transport, _ = stored(world, ready)
        under_way, pause = write_begun(world, world.open(), writing)
        outcome = load(transport, ready, [*never.wants(), *ready.wants(), *writing.wants()])
        assert outcome == [EVICTED, EVICTED, None, None, MissReason.PENDING, MissReason.PENDING]
        pause.release()
        assert under_way.result(BOUND_S) == [COMMITTED] * 2

    def test_a_store_says_for_each_page_what_became_of_it(self, world: World) -> None:
        ready, writing, new = (Content.of(world, 2, 2, 300, first=first) for first in (0, 10, 20))
        transport, _ = stored(world, ready)
        under_way, pause = write_begun(world, world.open(), writing)
        everything = Content(world, new.spec, [*new.keys[:1], *ready.keys, *writing.keys, *new.keys[1:]], seed=3)
        request = everything.write_request()
        source = ContentSource(everything, request)
        outcome = transport.write(request, source, soon())
        assert outcome == [COMMITTED, DUPLICATE, DUPLICATE, PENDING, PENDING, COMMITTED]
        assert sorted(set(source.copied)) == [0, 5], "only what was granted is moved"
        pause.release()
        assert under_way.result(BOUND_S) == [COMMITTED] * 2

    def test_each_page_has_one_writer_however_many_come(self, world: World) -> None:
        content = Content.of(world, 64, 2, 5_000)
        start = threading.Barrier(3)

        def write_with_the_others() -> list[Written]:
            transport = world.open()
            transport.attach(content.spec, soon())
            start.wait(BOUND_S)
            return write(transport, content)

        writers = [world.meanwhile(write_with_the_others) for _ in range(3)]
        outcomes = [Counter(fate) for fate in zip(*[writer.result(BOUND_S) for writer in writers], strict=True)]
        assert all(fates[COMMITTED] == 1 and fates[DUPLICATE] + fates[PENDING] == 2 for fates in outcomes)
        assert load(world.open(), content) == [None] * 64

    def test_a_full_shard_takes_what_fits_and_says_so_at_once(self, world: World) -> None:
        content = Content.of(world, 40, 2, FRAME // 2)
        room = world.host.core.pool.allocator.room(FRAME)
        assert 0 < room < 40
        assert write(world.open(), content) == [COMMITTED] * room + [FULL] * (40 - room)

    def test_a_store_that_waits_gets_the_room_that_is_made(self, world: World) -> None:
        transport, new = world.open(), Content.of(world, 8, 2, FRAME // 2, first=100)
        fill(world, transport)
        assert write(transport, new, wait_ns=int(BOUND_S * 1e9)) == [COMMITTED] * 8
        assert load(transport, new) == [None] * 8

    def test_a_store_that_waits_in_vain_is_full(self, world: World) -> None:
        transport, new = world.open(), Content.of(world, 1, 2, FRAME // 2, first=100)
        reading = read_begun(world.open(), fill(world, transport))  # keeps what is evicted until it ends
        assert write(transport, new, wait_ns=20_000_000) == [FULL]
        reading.pieces.close()

    def test_waiting_for_room_ends_by_the_deadline(self, world: World) -> None:
        transport, new = world.open(), Content.of(world, 1, 2, FRAME // 2, first=100)
        reading = read_begun(world.open(), fill(world, transport))
        try:
            assert write(transport, new, wait_ns=int(BOUND_S * 1e9), deadline=Deadline.after_ms(50)) == [FULL]
        except Unavailable as trouble:
            assert trouble.miss.reason is MissReason.DEADLINE
        assert world.leased(reading.request.attempt), "long before the lease of the reader in the way expired"
        reading.pieces.close()

    # --------------------------------------------------------------------------------- never a wrong byte

    def test_a_page_that_does_not_match_its_checksum_is_never_readable(self, world: World) -> None:
        transport, content = world.open(), Content.of(world, 3, 2, 1_000)
        assert write(transport, content, lies_about=[1]) == [COMMITTED, Written.CORRUPT, COMMITTED]
        assert load(transport, content) == [None, EVICTED, None]
        assert write(transport, content) == [DUPLICATE, COMMITTED, DUPLICATE]

    def test_a_byte_that_rots_reaches_the_reader_as_a_checksum_that_fails(self, world: World) -> None:
        transport, content = stored(world, Content.of(world, 3, 4, 1_000))
        world.spoil(content.namespace, content.keys[1], 2_500)
        reading = read(transport, content)
        assert reading.finish() == [None] * 3
        assert reading.sink.corrupt == [(1, 2)], "that layer, and no other"

    def test_a_page_of_another_block_does_not_verify(self, world: World) -> None:
        transport, content = stored(world, Content.of(world, 2, 1, 1_000))
        one, other = (world.page(content.namespace, key) for key in content.keys)
        assert one is not None
        assert other is not None
        with world.host.fill(one.slot()) as room:
            room[:] = world.host.read(other.slot())
        reading = read(transport, content)
        assert reading.finish() == [None] * 2
        assert reading.sink.corrupt == [(0, 0)]

    def test_what_is_evicted_while_it_is_read_arrives_whole(self, world: World) -> None:
        (transport, content), other = stored(world), Content.of(world, 12, 2, FRAME // 2, first=100)
        reading = read_begun(transport, content)
        pool = world.host.core.pool
        world.host.inspect(lambda: list(map(pool.condemn, list(pool.ready()))))
        store(world.open(), other)  # into memory that is not kept for the reader
        reading.finish()
        reading.sink.check()
        assert load(transport, content) == [EVICTED] * 16
