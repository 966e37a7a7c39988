"""KV events: a listener that received all of them knows what the index knows, and one that came late gets all again."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import pytest

from kvcluster.core import limits
from kvcluster.core.coordinator import event_emitter as announcing
from kvcluster.core.coordinator.event_emitter import BLOCK_BYTES, EventEmitter
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.messages import (
    Attach,
    Attached,
    Effect,
    PrepareStore,
    Publish,
    Purge,
    Purged,
    RemovedEvent,
    Republish,
    StoreGrant,
    Tier,
)
from kvcluster.core.messages.reports import AllBlocksCleared, BlocksRemoved, BlocksStored
from kvcluster.replay.core_stepper import Build, build_request
from tests.core.lone_coordinator import LoneCoordinator, Voice
from tests.core.samples import OURS, SPEC, THEIRS, WHOLE, attempt, chain, key, ours, pages, root
from tests.sim.event_picture import EventPicture, indexed

CHAIN = chain(6)


class Outsider(EventPicture):
    """A listener to all that a coordinator publishes, with the events that it `heard`."""

    def __init__(self, *, strict: bool = True) -> None:
        super().__init__(strict=strict)
        self.heard: list[Publish] = []

    def listen(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Publish):
                self.heard.append(effect)
                self.hear(effect)


def published(*, strict: bool = True) -> tuple[LoneCoordinator, Voice, Outsider]:
    coordinator, voice = LoneCoordinator.serving(announces=True)
    outsider = Outsider(strict=strict)
    coordinator.listeners.append(outsider.listen)
    return coordinator, voice, outsider


def gone(block: BlockHash, tier: Tier = Tier.RAM) -> RemovedEvent:
    return RemovedEvent(SPEC.namespace(OURS), key(block), False, tier)


def prepare(hashes: tuple[BlockHash, ...], tokens: tuple[int, ...]) -> Build:
    store = PrepareStore(attempt(1), 0, root(), hashes[0], hashes, ((0, WHOLE),), tokens=tokens)
    return ours(store, SPEC.namespace(OURS))


def test_a_chain_that_is_committed_is_one_event_and_names_its_parent() -> None:
    _, voice, outsider = published()
    voice.report(*pages(CHAIN[:3]))
    voice.report(*pages(CHAIN)[3:])
    first, second = outsider.heard
    assert first.events == (BlocksStored(Tier.RAM, None, CHAIN[:3]),)
    assert second.events == (BlocksStored(Tier.RAM, CHAIN[2], CHAIN[3:]),)
    assert (first.stream.namespace, first.stream.model, first.stream.block_tokens) == (SPEC.namespace(OURS), "m", 2)


def test_a_second_copy_is_no_news_and_neither_is_its_loss() -> None:
    coordinator, voice, outsider = published()
    other = coordinator.voice("b")
    other.join()
    voice.report(*pages(CHAIN[:2]))
    told = len(outsider.heard)
    other.report(*pages(CHAIN[:2]))
    voice.report(gone(CHAIN[1]))
    assert len(outsider.heard) == told
    other.report(gone(CHAIN[1]))
    assert outsider.heard[-1].events == (BlocksRemoved(Tier.RAM, (CHAIN[1],)),)


def test_a_block_that_moves_a_tier_down_is_stored_there_and_removed_above() -> None:
    _, voice, outsider = published()
    [page] = pages(CHAIN[:1])
    voice.report(page)
    voice.report(page._replace(tier=Tier.HOST), gone(CHAIN[0]))
    assert outsider.heard[-1].events == (
        BlocksStored(Tier.HOST, None, CHAIN[:1]),
        BlocksRemoved(Tier.RAM, CHAIN[:1]),
    )


def test_blocks_that_go_down_in_turns_are_two_events() -> None:
    _, voice, outsider = published()
    three = pages(CHAIN[:3])
    voice.report(*three)
    turns = [event for page in three for event in (page._replace(tier=Tier.HOST), gone(page.key.hash))]
    voice.report(*turns)
    assert outsider.heard[-1].events == (
        BlocksStored(Tier.HOST, None, CHAIN[:3]),
        BlocksRemoved(Tier.RAM, CHAIN[:3]),
    )


def test_a_block_that_goes_and_comes_back_in_one_step_is_told_in_that_order() -> None:
    _, voice, outsider = published()
    [page] = pages(CHAIN[:1])
    voice.report(page)
    voice.report(gone(CHAIN[0]), page)
    assert outsider.heard[-1].events == (
        BlocksRemoved(Tier.RAM, CHAIN[:1]),
        BlocksStored(Tier.RAM, None, CHAIN[:1]),
    )


def test_blocks_that_a_lost_shard_held_alone_are_removed() -> None:
    coordinator, voice, outsider = published()
    voice.report(*pages(CHAIN))
    coordinator.later(60_000_000_000)
    assert not coordinator.core.state.members.all()
    assert outsider.blocks == {}
    assert outsider.heard[-1].events == (BlocksRemoved(Tier.RAM, CHAIN),)


def test_a_purge_clears_the_stream() -> None:
    coordinator, voice, outsider = published()
    voice.report(*pages(CHAIN))
    assert coordinator.ask(Purged, ours(Purge())).blocks == len(CHAIN)
    assert outsider.heard[-1].events == (AllBlocksCleared(),)
    assert outsider.blocks == {}


def test_token_ids_that_a_store_told_come_with_its_commit_and_once() -> None:
    coordinator, voice, outsider = published()
    tokens = tuple(range(100, 106))
    coordinator.ask(StoreGrant, prepare(CHAIN[:3], tokens))
    voice.report(*pages(CHAIN[:4]))
    with_ids, without = outsider.heard[-1].events
    assert with_ids == BlocksStored(Tier.RAM, None, CHAIN[:3], array("I", tokens))
    assert without == BlocksStored(Tier.RAM, CHAIN[2], CHAIN[3:4])
    voice.report(gone(CHAIN[2]))
    voice.report(*pages(CHAIN)[2:3])
    assert outsider.heard[-1].events == (BlocksStored(Tier.RAM, CHAIN[1], CHAIN[2:3]),)


def test_token_ids_that_another_tenant_told_are_not_told_of_ours() -> None:
    coordinator, voice, outsider = published()
    theirs = coordinator.ask(Attached, build_request(Attach(SPEC), THEIRS)).namespace
    tokens = tuple(range(100, 106))
    store = PrepareStore(attempt(1), 0, root(), CHAIN[0], CHAIN[:3], ((0, WHOLE),), tokens=tokens)
    coordinator.ask(StoreGrant, build_request(store, THEIRS, theirs))
    second = PrepareStore(attempt(2), 0, root(), CHAIN[0], CHAIN[:3], ((0, WHOLE),), tokens=tuple(range(200, 206)))
    coordinator.ask(StoreGrant, ours(second, SPEC.namespace(OURS)))
    voice.report(*pages(CHAIN[:3]))
    assert outsider.heard[-1].events == (BlocksStored(Tier.RAM, None, CHAIN[:3], array("I", range(200, 206))),)


def test_token_ids_of_other_blocks_than_the_stores_are_passed_over() -> None:
    coordinator, voice, outsider = published()
    coordinator.ask(StoreGrant, prepare(CHAIN[:3], (1, 2, 3)))
    voice.report(*pages(CHAIN[:3]))
    assert outsider.tokens == {}


def test_token_ids_are_wanted_where_events_are_published_and_nowhere_else() -> None:
    for announces in (False, True):
        coordinator = LoneCoordinator(expected=1, announces=announces)
        assert coordinator.ask(Attached, ours(Attach(SPEC))).wants_tokens is announces


def test_without_outsiders_nothing_is_published() -> None:
    coordinator, voice = LoneCoordinator.serving()
    outsider = Outsider()
    coordinator.listeners.append(outsider.listen)
    voice.report(*pages(CHAIN))
    coordinator.step(Republish())
    coordinator.later(0)
    assert not outsider.heard


def test_the_memory_of_token_ids_is_bounded_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TOKEN_MEMORY_BYTES", 2 * 2 * (BLOCK_BYTES + 4 * SPEC.block_tokens))
    coordinator, voice, outsider = published()
    coordinator.ask(StoreGrant, prepare(CHAIN[:3], tuple(range(6))))
    voice.report(*pages(CHAIN[:3]))
    assert outsider.tokens == {CHAIN[1]: (2, 3), CHAIN[2]: (4, 5)}


def test_who_comes_late_is_told_all_blocks_again_some_in_each_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcing, "REPUBLISHED_BLOCKS", 2)
    coordinator, voice, _ = published(strict=False)
    voice.report(*pages(CHAIN), *pages(chain(2, seed=5)))
    voice.report(pages(CHAIN)[5]._replace(tier=Tier.HOST), gone(CHAIN[5]))
    late = Outsider(strict=False)
    coordinator.listeners.append(late.listen)
    coordinator.step(Republish())
    assert not late.heard, "not in one step"
    assert coordinator.core.next_deadline() == 0
    coordinator.later(0)
    assert late.blocks == indexed(coordinator.core)
    assert max(len(event.hashes) for told in late.heard for event in told.events if hasattr(event, "hashes")) <= 2
    assert late.parents[CHAIN[3]] == CHAIN[2]
    assert coordinator.core.next_deadline() != 0


def test_what_goes_while_all_is_told_again_is_not_told_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcing, "REPUBLISHED_BLOCKS", 1)
    coordinator, voice, _ = published(strict=False)
    voice.report(*pages(CHAIN))
    late = Outsider(strict=False)
    coordinator.listeners.append(late.listen)
    coordinator.step(Republish())
    voice.report(gone(CHAIN[4]))
    coordinator.later(0)
    assert late.blocks == indexed(coordinator.core)
    coordinator.step(Republish())
    assert coordinator.ask(Purged, ours(Purge())).blocks == 5
    coordinator.later(0)
    assert late.blocks == {}


def test_a_second_request_while_it_publishes_all_does_not_restart_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcing, "REPUBLISHED_BLOCKS", 4)
    coordinator, voice, _ = published(strict=False)
    voice.report(*pages(CHAIN))
    late = Outsider(strict=False)
    coordinator.listeners.append(late.listen)
    for _ in range(3):
        coordinator.step(Republish())
    coordinator.later(0)
    blocks = [block for told in late.heard for event in told.events for block in getattr(event, "hashes", ())]
    assert sorted(blocks) == sorted(CHAIN)


def test_a_run_longer_than_a_call_is_several_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BLOCKS_PER_CALL", 4)
    emitter = EventEmitter()
    space = NamespaceId(bytes(32))
    emitter.opened(space, OURS, SPEC)
    parent = BlockHash(b"p" * 32)
    for depth, block in enumerate(CHAIN):
        emitter.changed(space, _Record(block, parent, depth, tiers=1), 0)
        parent = block
    [told] = emitter.take(0)
    assert isinstance(told, Publish)
    assert [event.hashes for event in told.events if isinstance(event, BlocksStored)] == [CHAIN[:4], CHAIN[4:]]
    assert emitter.take(0) == []


class _Record:
    def __init__(self, block: BlockHash, parent: BlockHash, depth: int, *, tiers: int) -> None:
        self.hash, self.parent, self.depth, self.tiers = block, parent, depth, tiers


def test_a_namespace_that_is_forgotten_while_all_is_told_again_is_told_no_more() -> None:
    emitter = EventEmitter()
    space = SPEC.namespace(OURS)
    emitter.opened(space, OURS, SPEC)
    emitter.republish([(space, iter([_Record(CHAIN[0], root(), 0, tiers=1)]))])
    emitter.closed(space)
    emitter.republish_some()
    assert (emitter.take(0), emitter.republishing) == ([], False)
