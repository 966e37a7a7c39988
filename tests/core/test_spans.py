"""Registered spans at a shard: what is attended to is what the shard has of the named blocks now, or nothing."""

from __future__ import annotations

from typing import Any

import pytest

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt, BlockHash, CallId, Epoch, Holder, NamespaceId, SpanId, Tenant
from kvcluster.core.messages import (
    Done,
    PageKey,
    PinSpans,
    Refused,
    RefusedKind,
    RegisterSpans,
    Reply,
    Request,
    SpanBlocks,
    SpanGrant,
    SpanMiss,
    SpanPages,
    SpansPending,
    Tier,
    Unpin,
)
from kvcluster.core.miss import Loss
from kvcluster.core.shard.page import PageState
from kvcluster.core.shard.pool import PagePool
from kvcluster.replay.core_stepper import build_request
from tests.core.lone_shard import BLOCKS, A, B, C, D, LoneShard
from tests.core.samples import CODED, MEMBERSHIP_MS, MS, OURS, SPEC, THEIRS, WHOLE, chain

ME, OTHER = Holder(b"m" * 16), Holder(b"o" * 16)
SPAN = SpanId(1)


def blocks(
    *hashes: BlockHash,
    span: int = SPAN,
    group: int = 0,
    part: Part = WHOLE,
    depth: int = 0,
    accept: Loss = Loss.EXACT,
) -> SpanBlocks:
    return SpanBlocks(SpanId(span), group, part, depth, hashes, accept)


def register(
    shard: LoneShard,
    *spans: SpanBlocks,
    holder: Holder = ME,
    tenant: Tenant = OURS,
    ended: tuple[int, ...] = (),
    epoch: Epoch | None = None,
) -> Reply:
    message = RegisterSpans(holder, shard.epoch if epoch is None else epoch, spans, tuple(map(SpanId, ended)))
    return shard.ask_now(build_request(message, tenant, shard.space))


def pin(
    shard: LoneShard,
    *spans: int,
    number: int = 1,
    holder: Holder = ME,
    tenant: Tenant = OURS,
    epoch: Epoch | None = None,
) -> Reply:
    at = shard.epoch if epoch is None else epoch
    message = PinSpans(Attempt(holder, number), at, tuple(map(SpanId, spans)))
    return shard.ask_now(build_request(message, tenant))


def granted(reply: Reply) -> list[SpanPages]:
    assert isinstance(reply, SpanGrant)
    assert all(isinstance(each, SpanPages) for each in reply.spans), reply
    return [each for each in reply.spans if isinstance(each, SpanPages)]


def lacking(reply: Reply) -> tuple[SpanMiss | None, ...]:
    assert isinstance(reply, SpanGrant)
    return tuple(each if isinstance(each, SpanMiss) else None for each in reply.spans)


def kind_of(reply: Reply) -> RefusedKind:
    assert isinstance(reply, Refused), reply
    return reply.kind


def unpin(shard: LoneShard, number: int = 1, holder: Holder = ME) -> Reply:
    return shard.ask_now(build_request(Unpin(Attempt(holder, number)), OURS))


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[PageKey]:
    """The keys that shards look up in their pools from now on."""
    made: list[PageKey] = []
    find = PagePool.find

    def counted(pool: PagePool, space: NamespaceId, key: PageKey, *given: Any, **named: Any) -> Any:
        made.append(key)
        return find(pool, space, key, *given, **named)

    monkeypatch.setattr(PagePool, "find", counted)
    return made


def made_up(count: int, seed: int = 99) -> list[BlockHash]:
    return [BlockHash(seed.to_bytes(4, "big") + at.to_bytes(28, "big")) for at in range(count)]


@pytest.fixture
def shard() -> LoneShard:
    """One with A, B and C."""
    made = LoneShard.joined()
    made.store(Attempt(Holder(b"w" * 16), 1), A, B, C)
    return made


def pins(shard: LoneShard) -> int:
    return sum(page.pins for page in shard.core.pool.everything())


def test_a_span_names_its_pages_in_order_and_pins_them_until_the_compute_ends(shard: LoneShard) -> None:
    assert register(shard, blocks(B, C, depth=1)) == Done()
    assert pins(shard) == 0
    (pages,) = granted(pin(shard, SPAN))
    assert [slot.key.hash for slot in pages.slots] == [B, C]
    assert (pages.depth, pages.part, pages.spec) == (1, WHOLE, SPEC)
    assert pins(shard) == 2
    assert unpin(shard) == Done()
    assert pins(shard) == 0 and not len(shard.core.leases)


def test_between_two_computes_pages_are_evicted_and_the_span_says_so(shard: LoneShard) -> None:
    register(shard, blocks(A, B, C))
    granted(pin(shard, SPAN))
    unpin(shard)
    shard.evict(C)
    assert lacking(pin(shard, SPAN, number=2)) == (SpanMiss.GONE,)
    assert not len(shard.core.leases), "nothing is pinned for a span that lacks a page"


def test_a_page_that_is_evicted_while_it_is_computed_over_stays_until_the_end(shard: LoneShard) -> None:
    register(shard, blocks(A))
    (pages,) = granted(pin(shard, SPAN))
    shard.evict(A)
    states = {page.key.hash: page.state for page in shard.core.pool.everything()}
    assert states[A] is PageState.CONDEMNED
    assert lacking(pin(shard, SPAN, number=2)) == (SpanMiss.GONE,), "a stale generation is not read"
    unpin(shard)
    assert pages.slots[0].generation not in [page.generation for page in shard.core.pool.everything()]


def test_a_block_that_comes_back_is_another_generation(shard: LoneShard) -> None:
    register(shard, blocks(A, B))
    (before,) = granted(pin(shard, SPAN))
    unpin(shard)
    shard.evict(A)
    shard.store(Attempt(Holder(b"w" * 16), 2), A)
    (after,) = granted(pin(shard, SPAN, number=2))
    assert after.slots[0].generation > before.slots[0].generation
    assert after.slots[1] == before.slots[1]


def test_layers_of_a_step_get_the_same_object_while_no_page_moves(shard: LoneShard) -> None:
    register(shard, blocks(A, B))
    (first,) = granted(pin(shard, SPAN))
    shard.store(Attempt(Holder(b"w" * 16), 2), D)  # the pool changes, and not these pages
    (second,) = granted(pin(shard, SPAN, number=2))
    assert first is second


def test_one_lease_covers_every_span_of_a_message(shard: LoneShard) -> None:
    register(shard, blocks(A, span=1), blocks(B, C, span=2, depth=1))
    assert [len(each.slots) for each in granted(pin(shard, 2, 1))] == [2, 1]
    assert len(shard.core.leases) == 1 and pins(shard) == 3


def test_a_span_that_was_never_registered_or_has_ended_is_unknown(shard: LoneShard) -> None:
    assert lacking(pin(shard, SPAN)) == (SpanMiss.UNKNOWN,)
    register(shard, blocks(A))
    assert lacking(pin(shard, SPAN, 2)) == (None, SpanMiss.UNKNOWN)
    register(shard, ended=(SPAN, 77))
    assert lacking(pin(shard, SPAN)) == (SpanMiss.UNKNOWN,)
    assert pins(shard) == 0


def test_spans_belong_to_their_tenant_and_holder(shard: LoneShard) -> None:
    register(shard, blocks(A))
    shard.attach(SPEC, THEIRS)
    assert lacking(pin(shard, SPAN, holder=OTHER)) == (SpanMiss.UNKNOWN,)
    assert lacking(pin(shard, SPAN, tenant=THEIRS)) == (SpanMiss.UNKNOWN,)
    assert kind_of(register(shard, blocks(A), tenant=THEIRS)) is RefusedKind.UNKNOWN_NAMESPACE


def test_a_name_is_never_that_of_other_blocks(shard: LoneShard) -> None:
    assert register(shard, blocks(A, B)) == Done()
    assert register(shard, blocks(A, B)) == Done(), "a repeat changes nothing"
    assert kind_of(register(shard, blocks(A))) is RefusedKind.BAD
    assert kind_of(register(shard, blocks(A, B, depth=1))) is RefusedKind.BAD
    assert len(granted(pin(shard, SPAN))[0].slots) == 2


def test_another_incarnation_knows_nothing(shard: LoneShard) -> None:
    old = Epoch(shard.epoch - 1)
    assert kind_of(register(shard, blocks(A), epoch=old)) is RefusedKind.STALE
    register(shard, blocks(A))
    assert kind_of(pin(shard, SPAN, epoch=old)) is RefusedKind.STALE


def test_an_attempt_has_one_lease(shard: LoneShard) -> None:
    register(shard, blocks(A))
    granted(pin(shard, SPAN))
    assert kind_of(pin(shard, SPAN)) is RefusedKind.BAD


def test_a_part_that_the_spec_does_not_have_is_refused(shard: LoneShard) -> None:
    assert kind_of(register(shard, blocks(A, group=1))) is RefusedKind.BAD
    assert kind_of(register(shard, blocks(A, part=Part(0, 9, 0, 2)))) is RefusedKind.BAD


def test_spans_of_different_parts_are_not_attended_to_together(shard: LoneShard) -> None:
    half = Part(0, 2, 0, 1)
    register(shard, blocks(A, span=1), blocks(B, span=2, part=half))
    assert lacking(pin(shard, 1, 2)) == (None, SpanMiss.GONE)
    assert kind_of(pin(shard)) is RefusedKind.BAD, "nothing at all"


def test_more_loss_than_accepted_is_told_by_name() -> None:
    shard = LoneShard.joined(host_pages=4, spec=CODED)
    first, second = chain(2, spec=CODED)
    shard.store(Attempt(Holder(b"w" * 16), 1), first, second, loss=Loss.Q8)
    register(shard, blocks(first, second), blocks(first, second, span=2, accept=Loss.Q8))
    assert lacking(pin(shard, SPAN)) == (SpanMiss.LOSSY,)
    assert len(granted(pin(shard, 2))) == 1


def test_a_demoted_page_is_attended_to_where_it_lies_now() -> None:
    shard = LoneShard.joined(host_pages=4, spec=CODED)
    (first,) = chain(1, spec=CODED)
    shard.store(Attempt(Holder(b"w" * 16), 1), first)
    register(shard, blocks(first, accept=Loss.Q8))
    shard.demote(first)
    shard.move_all()
    (pages,) = granted(pin(shard, SPAN))
    assert [slot.tier for slot in pages.slots] == [Tier.HOST]


def test_spans_of_a_worker_that_names_none_end(shard: LoneShard) -> None:
    register(shard, blocks(A))
    for _ in range(3):
        shard.now += limits.SPAN_IDLE_NS // 2
        shard.hear()
        granted(pin(shard, SPAN, number=shard.now))
        unpin(shard, number=shard.now)
    shard.now += limits.SPAN_IDLE_NS + 1
    shard.later(0)
    shard.settle()
    assert lacking(pin(shard, SPAN)) == (SpanMiss.UNKNOWN,)
    assert len(shard.core.spans.registry) == 0


def test_a_worker_and_a_tenant_have_bounded_spans(shard: LoneShard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SPANS_PER_HOLDER", 2)
    assert register(shard, blocks(A, span=1), blocks(B, span=2)) == Done()
    assert kind_of(register(shard, blocks(C, span=3))) is RefusedKind.LIMIT
    assert register(shard, blocks(C, span=3), ended=(1,)) == Done()
    assert register(shard, blocks(C, span=3), holder=OTHER) == Done()


def test_blocks_of_spans_are_shared_by_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SPAN_BLOCKS", 8)
    shard = LoneShard.joined()
    assert kind_of(register(shard, blocks(*BLOCKS[:5]))) is RefusedKind.LIMIT, "half of all for one alone"
    assert register(shard, blocks(*BLOCKS[:4])) == Done()
    assert kind_of(register(shard, blocks(A, span=2), holder=OTHER)) is RefusedKind.LIMIT
    assert register(shard, ended=(SPAN,)) == Done()
    assert register(shard, blocks(A, span=2), holder=OTHER) == Done()


def test_a_shard_that_is_cut_off_attends_to_nothing(shard: LoneShard) -> None:
    register(shard, blocks(A))
    shard.now += (MEMBERSHIP_MS + 1) * MS
    assert lacking(pin(shard, SPAN)) == (SpanMiss.GONE,)
    assert pins(shard) == 0


def test_other_shards_register_nothing(shard: LoneShard) -> None:
    message = RegisterSpans(ME, shard.epoch, (blocks(A),))
    reply = shard.ask_now(lambda call: Request(CallId(call), Tenant(""), shard.space, message))
    assert kind_of(reply) is RefusedKind.UNKNOWN_NAMESPACE


def test_registered_spans_pin_nothing_when_the_shard_is_drained(shard: LoneShard) -> None:
    register(shard, blocks(A, B, C))
    assert shard.core.pool.count(Tier.RAM) == 3
    shard.evict(A, B, C)
    assert shard.core.pool.count(Tier.RAM) == 0


def test_spans_of_made_up_blocks_cost_a_lookup_each(shard: LoneShard, lookups: list[PageKey]) -> None:
    fake = made_up(63 * 100)
    register(shard, *(blocks(*fake[at * 100 : at * 100 + 100], span=at) for at in range(63)))
    assert lacking(pin(shard, *range(63))) == (SpanMiss.GONE,) * 63
    assert len(lookups) == 63, "a span without its first page lacks it, whatever follows"
    assert lacking(pin(shard, *range(63), number=2)) == (SpanMiss.GONE,) * 63
    assert len(lookups) == 63, "nothing has changed since"


def test_spans_of_more_pages_than_a_message_may_name_are_refused_before_any_is_looked_up(
    shard: LoneShard, lookups: list[PageKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PAGES_PER_CALL", 3)
    register(shard, blocks(A, B, span=1), blocks(B, C, span=2, depth=1))
    assert kind_of(pin(shard, 1, 2)) is RefusedKind.LIMIT
    assert not lookups
    assert len(granted(pin(shard, 1))) == 1


def test_the_block_that_is_missing_is_looked_up_first_the_next_time(shard: LoneShard, lookups: list[PageKey]) -> None:
    register(shard, blocks(A, B, C, D))
    assert lacking(pin(shard, SPAN)) == (SpanMiss.GONE,)
    assert [key.hash for key in lookups] == [A, B, C, D]
    shard.store(Attempt(Holder(b"w" * 16), 2), BLOCKS[5])  # the pool changes, and D does not come
    lookups.clear()
    assert lacking(pin(shard, SPAN, number=2)) == (SpanMiss.GONE,)
    assert [key.hash for key in lookups] == [D]
    shard.store(Attempt(Holder(b"w" * 16), 3), D)
    (pages,) = granted(pin(shard, SPAN, number=3))
    assert [slot.key.hash for slot in pages.slots] == [A, B, C, D]


def test_one_step_makes_a_bounded_number_of_lookups_and_the_next_goes_on(
    shard: LoneShard, lookups: list[PageKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SPAN_LOOKUPS", 2)
    shard.store(Attempt(Holder(b"w" * 16), 2), D)
    register(shard, blocks(A, span=1), blocks(B, C, D, span=2, depth=1))
    assert pin(shard, 1, 2) == SpansPending()
    assert len(lookups) == 2 and not pins(shard) and not len(shard.core.leases)
    assert [len(each.slots) for each in granted(pin(shard, 1, 2))] == [1, 3]
    assert [key.hash for key in lookups] == [A, B, C, D], "none of them twice"


def test_idle_spans_end_some_at_a_time(shard: LoneShard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SPANS_PER_CALL", 2)
    register(shard, *(blocks(A, span=at) for at in range(3)))
    register(shard, *(blocks(A, span=at) for at in range(2)), holder=OTHER)
    registry, late = shard.core.spans.registry, shard.now + limits.SPAN_IDLE_NS + 1
    for left in (3, 1, 0):
        assert registry.next_deadline is not None and registry.next_deadline < late, "more is due at once"
        registry.expire(late)
        assert len(registry) == left
    assert registry.next_deadline is None
