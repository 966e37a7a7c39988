"""Claims about stopping: a reader or writer that stops, for any reason, leaves nothing behind, and a shard that has
ended is reported as lost."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from kvcluster.core import limits
from kvcluster.core.messages import Pin, RefusedKind, Renew, Reserve, Written
from kvcluster.core.miss import MissReason
from kvcluster.testing.conformance.content import (
    Content,
    ContentSink,
    ContentSource,
    Stop,
    every_call,
    load,
    read,
    read_begun,
    refused,
    stop_at,
    store,
    stored,
    unavailable,
    write,
    write_begun,
)
from kvcluster.testing.conformance.world import BOUND_S, Pause, World, soon
from kvcluster.transport.base import Deadline, Unavailable

EVICTED = MissReason.EVICTED


class StoppingClaims:
    """Claims about readers, writers, leases and shards that end early."""

    # ------------------------------------------------------------------------ readers and writers that stop

    def test_a_reader_that_stops_half_way_leaves_no_lease(self, world: World) -> None:
        transport, content = stored(world)
        reading = read_begun(transport, content)
        assert len(world.host.core.leases) == 1
        reading.pieces.close()
        world.wait_until_unleased()
        assert load(transport, content) == [None] * 16

    def test_a_sink_that_raises_is_heard_and_leaves_no_lease(self, world: World) -> None:
        transport, content = stored(world)
        with pytest.raises(Stop):
            read(transport, content, after_receive=stop_at(3)).finish()
        world.wait_until_unleased()

    @pytest.mark.parametrize("call", [1, 5, 16])
    def test_a_source_that_raises_is_heard_and_leaves_no_page(self, world: World, call: int) -> None:
        content = Content.big(world)
        transport = world.open()
        with pytest.raises(Stop):
            write(transport, content, stop_at(call))
        world.wait_until_unleased()
        assert load(transport, content) == [EVICTED] * 16
        store(transport, content)

    # ------------------------------------------------------------------------- deadlines and leases that end

    def test_a_deadline_that_is_over_ends_every_call(self, world: World) -> None:
        transport, content = stored(world, Content.of(world, 1, 1, 8))
        for call in every_call(transport, content, deadline=lambda: Deadline.after_ms(0)):
            with unavailable(MissReason.DEADLINE):
                call()

    def test_a_reader_too_slow_for_its_deadline_leaves_no_lease(self, world: World) -> None:
        transport, content = stored(world)
        deadline = Deadline.after_ms(100)

        def until_it_is_over() -> None:
            threading.Event().wait(deadline.remaining_s())

        with unavailable(MissReason.DEADLINE):
            read(transport, content, after_receive=until_it_is_over, deadline=deadline).finish()
        world.wait_until_unleased()

    def test_a_writer_too_slow_for_its_deadline_leaves_no_page(self, world: World) -> None:
        content = Content.big(world)
        transport = world.open()
        deadline = Deadline.after_ms(100)

        def until_it_is_over() -> None:
            threading.Event().wait(deadline.remaining_s())

        with unavailable(MissReason.DEADLINE):
            write(transport, content, until_it_is_over, deadline=deadline)
        world.wait_until_unleased()
        assert load(transport, content) == [EVICTED] * 16

    def test_the_pieces_of_a_load_show_that_its_reader_lives(self, world: World) -> None:
        # Not by the lease's expiry after the first piece: a stream may have sent, and renewed for, all pieces by then.
        transport, content = stored(world)
        renewed = world.watched.asked[Renew]
        reading = read_begun(transport, content)
        next(reading.pieces)
        world.watched.wait_until(lambda: world.watched.asked[Renew] > renewed, "the lease is renewed")
        reading.finish()

    def test_every_piece_of_a_store_shows_that_its_writer_lives(self, world: World) -> None:
        content = Content.big(world)
        transport, first, last = world.open(), Pause(at=1), Pause(at=16)

        def pause() -> None:
            first()
            last()

        under_way = world.meanwhile(lambda: write(transport, content, pause))
        first.wait_reached()
        begun = world.lease_expiry()
        assert begun is not None
        first.release()
        last.wait_reached()
        world.watched.wait_until(lambda: (world.lease_expiry() or 0) > begun, "the lease is renewed")
        last.release()
        assert under_way.result(BOUND_S) == [Written.COMMITTED] * 16

    def test_a_load_whose_lease_ends_gets_no_wrong_byte_and_leaves_no_lease(self, world: World) -> None:
        transport, content = stored(world)
        reading = read_begun(transport, content)
        world.expire_leases()
        with unavailable(MissReason.DEADLINE):  # the reader failed, not the shard
            reading.finish()
        assert not reading.sink.corrupt
        world.wait_until_unleased()

    def test_a_store_whose_lease_ends_commits_nothing(self, world: World) -> None:
        content = Content.of(world, 2, 2, limits.FRAME_BYTES // 2)
        transport = world.open()
        under_way, pause = write_begun(world, transport, content, at=2)
        world.expire_leases()
        pause.release()
        with unavailable(MissReason.DEADLINE):
            under_way.result(BOUND_S)
        world.wait_until_unleased()
        assert load(transport, content) == [EVICTED] * 2

    def test_a_store_that_a_purge_stops_commits_nothing_and_names_the_purge(self, world: World) -> None:
        content = Content.of(world, 2, 2, limits.FRAME_BYTES // 2)
        transport = world.open()
        under_way, pause = write_begun(world, transport, content, at=2)
        world.purge()
        pause.release()
        with pytest.raises(Unavailable, match="purge"):
            under_way.result(BOUND_S)
        world.wait_until_unleased()

    @pytest.mark.parametrize("kind", [Pin, Reserve])
    def test_a_grant_that_comes_too_late_is_given_back(self, world: World, kind: type[Pin | Reserve]) -> None:
        (transport, content), new = stored(world, Content.of(world, 2, 1, 100)), Content.of(world, 1, 1, 100, first=5)
        world.watched.answer_late(kind)
        with pytest.raises(Unavailable):
            if kind is Pin:
                load(transport, content)
            else:
                write(transport, new, stop_at(1))
        world.wait_until_unleased()

    # ------------------------------------------------------------------------- an attempt that is made twice

    def test_an_attempt_that_is_under_way_cannot_be_made_again(self, world: World) -> None:
        content = Content.of(world, 2, 2, limits.FRAME_BYTES // 2)
        transport, second, pause = world.open(), world.open(), Pause(at=2)
        transport.attach(content.spec, soon())
        request = content.write_request()
        under_way = world.meanwhile(lambda: transport.write(request, ContentSource(content, request, pause), soon()))
        pause.wait_reached()
        with refused(RefusedKind.BAD):
            second.write(request, ContentSource(content, request, stop_at(1)), soon())
        reading = replace(content.read_request(), attempt=request.attempt)
        with refused(RefusedKind.BAD):
            list(second.read(reading, ContentSink(content, reading, stop_at(1)), soon()))
        pause.release()
        assert under_way.result(BOUND_S) == [Written.COMMITTED] * 2, "the first is not affected"

    # ------------------------------------------------------------------------- a transport that is closed

    def test_a_transport_that_is_closed_under_a_load_leaves_no_lease(self, world: World) -> None:
        transport, content = stored(world)
        reading = read_begun(transport, content)
        transport.close()
        try:
            reading.finish()  # a transport within a process has nothing to close, and goes on
            reading.sink.check()
        except Unavailable as trouble:
            assert trouble.miss.reason is MissReason.SHARD_LOST
        world.wait_until_unleased()

    def test_a_transport_that_was_closed_raises_nothing_but_trouble(self, world: World) -> None:
        transport, content = stored(world, Content.of(world, 1, 1, 8))
        transport.close()
        transport.close()
        for call in every_call(transport, content):
            try:
                call()
            except Unavailable as trouble:
                assert trouble.miss.reason is MissReason.SHARD_LOST
            except Stop:
                """It goes on, and moves bytes: a transport within a process has nothing to close."""
        world.wait_until_unleased()

    # ---------------------------------------------------------------------------------- a shard that ends

    def test_a_shard_that_is_gone_is_told_as_lost(self, world: World) -> None:
        transport, content = stored(world, Content.of(world, 1, 1, 8))
        world.cut()
        for call in every_call(transport, content):
            with unavailable(MissReason.SHARD_LOST):
                call()

    def test_a_shard_that_goes_away_under_a_load_is_told_as_lost(self, world: World) -> None:
        transport, content = stored(world)
        reading = read_begun(transport, content)
        world.cut()
        with unavailable(MissReason.SHARD_LOST):
            reading.finish()
        assert not reading.sink.corrupt

    def test_a_reader_may_stop_after_the_shard_has_gone(self, world: World) -> None:
        transport, content = stored(world)
        reading = read_begun(transport, content)
        world.cut()
        reading.pieces.close()

    def test_a_shard_that_goes_away_under_a_store_is_told_as_lost(self, world: World) -> None:
        content = Content.big(world)
        under_way, pause = write_begun(world, world.open(), content, at=3)
        world.cut()
        pause.release()
        with unavailable(MissReason.SHARD_LOST):
            under_way.result(BOUND_S)
