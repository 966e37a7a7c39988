"""Claims about access and visibility: which caller may read what, and when others see it."""

from __future__ import annotations

from dataclasses import replace

from kvcluster.core.groups import Part
from kvcluster.core.ids import Epoch, NamespaceId
from kvcluster.core.messages import PageKey, PageWant, RefusedKind
from kvcluster.core.miss import MissReason
from kvcluster.testing.conformance.content import (
    Content,
    ContentSink,
    ContentSource,
    load,
    opaque_spec,
    refused,
    stop_at,
    store,
    stored,
    write,
)
from kvcluster.testing.conformance.world import ONE, TWO, World, soon
from kvcluster.transport.base import Deadline, Transport, Unavailable, run_to_completion


def check_refused(
    transport: Transport,
    content: Content,
    kind: RefusedKind,
    *,
    namespace: NamespaceId | None = None,
    epoch: Epoch | None = None,
) -> None:
    """Checks that a load and a store are refused for that reason and move nothing. Raises AssertionError otherwise."""
    reading, writing = content.read_request(), content.write_request()
    namespace = reading.namespace if namespace is None else namespace
    epoch = reading.epoch if epoch is None else epoch
    reading = replace(reading, namespace=namespace, epoch=epoch)
    writing = replace(writing, namespace=namespace, epoch=epoch)
    with refused(kind):
        list(transport.read(reading, ContentSink(content, reading, stop_at(1)), soon()))
    with refused(kind):
        transport.write(writing, ContentSource(content, writing, stop_at(1)), soon())


class AskingClaims:
    """Claims about namespaces, incarnations and visibility."""

    def test_attaching_names_the_namespace_of_the_credential(self, world: World) -> None:
        spec = opaque_spec(1, 8)
        attached = [transport.attach(spec, soon()) for transport in (world.open(), world.open(), world.second_tenant())]
        assert [answer.namespace for answer in attached] == [spec.namespace(ONE)] * 2 + [spec.namespace(TWO)]
        assert {answer.epoch for answer in attached} == {world.epoch}
        assert {answer.lease_ttl_ns for answer in attached} == {world.host.core.leases.ttl_ns}

    def test_a_namespace_that_was_never_attached_is_not_known(self, world: World) -> None:
        check_refused(world.open(), Content.of(world, 1, 1, 8), RefusedKind.UNKNOWN_NAMESPACE)

    def test_the_namespace_of_another_tenant_is_as_unknown_as_one_that_does_not_exist(self, world: World) -> None:
        content = Content.of(world, 2, 1, 8)
        store(world.open(), content)
        stranger = world.second_tenant()
        check_refused(stranger, content, RefusedKind.UNKNOWN_NAMESPACE)
        stranger.attach(content.spec, soon())
        check_refused(stranger, content, RefusedKind.UNKNOWN_NAMESPACE)
        check_refused(stranger, content, RefusedKind.UNKNOWN_NAMESPACE, namespace=NamespaceId(bytes(32)))

    def test_another_tenant_of_the_same_model_shares_nothing(self, world: World) -> None:
        content = Content.of(world, 2, 1, 8)
        store(world.open(), content)
        stranger = world.second_tenant()
        request = replace(content.read_request(), namespace=stranger.attach(content.spec, soon()).namespace)
        outcome = run_to_completion(stranger.read(request, ContentSink(content, request, stop_at(1)), soon()))
        assert [miss and miss.reason for miss in outcome] == [MissReason.EVICTED] * 2

    def test_a_refusal_leaves_the_transport_to_the_next_call(self, world: World) -> None:
        transport, content = world.open(), Content.of(world, 1, 1, 8)
        for _ in range(2):
            with refused(RefusedKind.UNKNOWN_NAMESPACE):
                load(transport, content)
        store(transport, content)

    def test_another_incarnation_of_the_shard_is_not_taken_for_this_one(self, world: World) -> None:
        transport, content = stored(world, Content.of(world, 1, 1, 8))
        for epoch in (Epoch(world.epoch - 1), Epoch(world.epoch + 1)):
            check_refused(transport, content, RefusedKind.STALE, epoch=epoch)

    def test_a_suspicion_of_strangers_or_of_another_incarnation_is_not_heeded(self, world: World) -> None:
        content = Content.of(world, 1, 1, 8)
        transport, stranger = world.open(), world.second_tenant()
        store(transport, content)
        world.spoil(content.namespace, content.keys[0], 0)
        stranger.attach(content.spec, soon())
        with refused(RefusedKind.UNKNOWN_NAMESPACE):
            stranger.suspect(content.namespace, world.epoch, content.keys, soon())
        transport.suspect(content.namespace, Epoch(world.epoch - 1), content.keys, soon())
        other = Content.of(world, 1, 1, 8, first=5)
        store(transport, other)
        world.spoil(other.namespace, other.keys[0], 0)
        transport.suspect(other.namespace, world.epoch, other.keys, soon())
        world.cluster.wait_until(lambda: world.page(other.namespace, other.keys[0]) is None)
        assert world.page(content.namespace, content.keys[0]) is not None, "though it is corrupt as well"

    def test_parts_that_the_spec_does_not_have_are_refused(self, world: World) -> None:
        content = Content.of(world, 1, 2, 8)
        transport = world.open()
        transport.attach(content.spec, soon())
        for group, part in [(1, Part(0, 2, 0, 1)), (0, Part(0, 3, 0, 1)), (0, Part(0, 2, 0, 2))]:
            request = content.write_request(keys=[PageKey(content.keys[0].hash, group, part)])
            source = ContentSource(content, content.write_request(), stop_at(1))
            with refused(RefusedKind.BAD):
                transport.write(request, source, soon())

    def test_a_suspicion_condemns_what_the_shard_itself_finds_rotten_and_nothing_else(self, world: World) -> None:
        transport, content = stored(world, Content.of(world, 4, 3, 1_000))
        rotten, sound = content.keys[:2], content.keys[2:]
        for key in rotten:
            world.spoil(content.namespace, key, 1_500)
        transport.suspect(content.namespace, world.epoch, [*sound, rotten[0]], soon())
        world.cluster.wait_until(lambda: world.page(content.namespace, rotten[0]) is None)
        outcome = load(transport, content, [PageWant(key, 0, 1) for key in (rotten[0], *sound)])
        assert outcome == [MissReason.EVICTED, None, None]
        assert world.page(content.namespace, rotten[1]) is not None, "which no reader has suspected"
        transport.suspect(content.namespace, world.epoch, content.keys, soon())
        world.cluster.wait_until(lambda: world.page(content.namespace, rotten[1]) is None)
        assert load(transport, content) == [MissReason.EVICTED, MissReason.EVICTED, None, None]

    def test_what_is_flushed_is_known_to_the_coordinator(self, world: World) -> None:
        transport, content = stored(world, Content.of(world, 300, 1, 8))
        assert transport.flush(soon())
        coordinator = world.cluster.coordinator_core()

        def known() -> bool:
            space = coordinator.state.namespaces.known(content.namespace)
            return space is not None and all(space.index.get(key.hash) for key in content.keys)

        assert world.cluster.running_coordinator().inspect(known)

    def test_without_a_coordinator_nothing_is_called_flushed(self, world: World) -> None:
        content = Content.of(world, 1, 1, 8)
        transport = world.open()
        transport.attach(content.spec, soon())
        world.cluster.stop_coordinator()
        write(transport, content)
        try:
            assert not transport.flush(Deadline.after_ms(200))
        except Unavailable as trouble:  # the call itself was late
            assert trouble.miss.reason is MissReason.DEADLINE
