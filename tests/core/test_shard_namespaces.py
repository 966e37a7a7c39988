"""What a shard knows of namespaces: their tenants, the sizes of their pages, and when one may be forgotten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvcluster.core import limits
from kvcluster.core.allocator import PageAllocator
from kvcluster.core.codecs import Codec
from kvcluster.core.groups import Group, Plane
from kvcluster.core.ids import Epoch
from kvcluster.core.messages import (
    Abort,
    AttachedShard,
    NewPage,
    PageKey,
    PageSlot,
    RefusedKind,
    Reserve,
    Tier,
    Written,
)
from kvcluster.core.miss import Loss
from kvcluster.core.shard.disk_recovery import RecoveredPages
from kvcluster.core.shard.page import Page, PageState
from kvcluster.core.shard.pool import PagePool
from kvcluster.core.shard.shard_namespaces import ShardNamespace, ShardNamespaces
from kvcluster.core.spec import KVSpec
from kvcluster.replay.core_stepper import build_request
from tests.core.lone_shard import (
    OTHER,
    A,
    B,
    LoneShard,
    end,
    granted,
    pinned,
    refusal,
    slots,
)
from tests.core.samples import (
    CODED,
    HYBRID,
    LEFT,
    MIXED,
    MS,
    OURS,
    RIGHT,
    SECOND,
    SPEC,
    SUMS,
    THEIRS,
    WHOLE,
    attempt,
    key,
    root,
)


def test_attach_names_the_namespace_the_epoch_and_how_long_leases_run() -> None:
    shard = LoneShard(lease_ttl_ms=1_500)
    assert shard.attach() == AttachedShard(SPEC.namespace(OURS), Epoch(7), 1_500 * MS)
    assert shard.attach(tenant=THEIRS) == AttachedShard(SPEC.namespace(THEIRS), Epoch(7), 1_500 * MS)


def test_a_namespace_that_no_worker_attached_is_unknown() -> None:
    shard = LoneShard()
    shard.settle()
    assert refusal(shard.pin(attempt(1), A)) is RefusedKind.UNKNOWN_NAMESPACE
    assert refusal(shard.replies[shard.reserving(attempt(1), A)]) is RefusedKind.UNKNOWN_NAMESPACE


def test_a_namespace_of_which_no_page_was_found_on_disk_is_known_all_the_same() -> None:
    spaces = ShardNamespaces(lambda space: False)
    spaces.adopt(Tier.DISK, RecoveredPages(specs=((OURS, SPEC), (THEIRS, SPEC))), PagePool(PageAllocator(4_096, 64)))
    assert [space.id for space in spaces] == [SPEC.namespace(OURS), SPEC.namespace(THEIRS)]


def test_the_namespace_of_another_tenant_looks_like_none() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    unknown = shard.pin(attempt(2), A, tenant=THEIRS)
    assert refusal(unknown) is RefusedKind.UNKNOWN_NAMESPACE
    assert unknown == LoneShard().pin(attempt(2), A, tenant=THEIRS)


def test_a_tenant_has_a_bounded_number_of_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 1)
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    assert refusal(shard.attach(HYBRID)) is RefusedKind.LIMIT
    assert isinstance(shard.attach(HYBRID, THEIRS), AttachedShard)
    assert isinstance(shard.attach(), AttachedShard), "which it has already"


def test_a_namespace_of_which_nothing_is_left_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 2)
    shard = LoneShard.joined(pages=1)
    shard.attach(OTHER, THEIRS)
    shard.attach(OTHER)
    shard.store(attempt(1), A)
    assert isinstance(shard.attach(HYBRID), AttachedShard), "`OTHER` holds nothing"
    shard.settle()
    assert isinstance(shard.attach(OTHER), AttachedShard), "and now `HYBRID`"
    assert pinned(shard.pin(attempt(2), A))


def test_a_namespace_that_a_reservation_waits_for_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 1)
    shard = LoneShard.joined(pages=2)
    shard.attach(HYBRID, THEIRS)
    theirs = HYBRID.namespace(THEIRS)
    big = NewPage(PageKey(A, 0, HYBRID.whole(0)), root(), 0)
    shard.reserve(attempt(1), A, B)
    shard.settle()
    waiting = shard.call(build_request(Reserve(attempt(2), shard.epoch, (big,), SECOND), THEIRS, theirs))
    shard.settle()
    assert refusal(shard.attach(SPEC, THEIRS)) is RefusedKind.LIMIT
    assert end(shard, attempt(1), Abort)
    assert slots(granted(shard, waiting))


# ---------------------------------------------------------------------------------------- pages by codec


def withdrawing(pool: PagePool) -> Callable[[Page], None]:
    """What a shard does to a page that gives way, as far as its pool is concerned."""

    def withdraw(page: Page) -> None:
        pool.condemn(page)

    return withdraw


def two_tiers(pages: int = 4, host_bytes: int = 4_096) -> PagePool:
    ram = PageAllocator(pages * CODED.page_bytes(0, WHOLE), 64)
    host = {Tier.HOST: PageAllocator(host_bytes, 64)} if host_bytes else {}
    return PagePool(ram, host)


def offered(pool: PagePool, loss: Loss, codec: Codec = Codec.RAW, spec: KVSpec = CODED) -> Page | Written:
    space = ShardNamespace(spec.namespace(OURS), OURS, spec)
    return space.offer(
        pool,
        NewPage(key(A), root(), 0, loss),
        withdrawing(pool),
        codec,
        Tier.RAM if codec is Codec.RAW else Tier.HOST,
    )


def committed(pool: PagePool, loss: Loss, codec: Codec = Codec.RAW) -> Page:
    page = offered(pool, loss, codec)
    assert isinstance(page, Page)
    pool.commit(page, SUMS)
    return page


@pytest.mark.parametrize("codec", Codec)
def test_a_page_takes_as_many_bytes_as_its_codec_makes_of_it(codec: Codec) -> None:
    space = ShardNamespace(CODED.namespace(OURS), OURS, CODED)
    assert space.page_bytes(0, WHOLE, codec) == {Codec.RAW: 512, Codec.Q8: 192, Codec.Q4: 144}[codec]
    assert space.page_bytes(0, LEFT, codec) * 2 == space.page_bytes(0, WHOLE, codec)
    assert space.page_bytes(0, WHOLE, codec) == space.page_bytes(0, WHOLE, codec)


@pytest.mark.parametrize("codec", Codec)
def test_a_codec_fits_where_it_makes_pages_smaller(codec: Codec) -> None:
    assert ShardNamespace(CODED.namespace(OURS), OURS, CODED).fitting(0, WHOLE, codec) is codec
    assert ShardNamespace(SPEC.namespace(OURS), OURS, SPEC).fitting(0, WHOLE, codec) is Codec.RAW
    mixed = ShardNamespace(MIXED.namespace(OURS), OURS, MIXED)
    assert [mixed.fitting(group, MIXED.whole(group), codec) for group in range(2)] == [codec, Codec.RAW]


def test_a_codec_that_makes_pages_longer_is_not_used() -> None:
    spec = replace(SPEC, block_tokens=1, groups=(Group((0,), (Plane("k", 2, 8, "float16"),)),))
    space = ShardNamespace(spec.namespace(OURS), OURS, spec)
    assert space.page_bytes(0, spec.whole(0), Codec.Q4) > space.page_bytes(0, spec.whole(0))
    assert space.fitting(0, spec.whole(0), Codec.Q4) is Codec.RAW


def test_an_encoded_page_is_offered_below_and_a_raw_one_above() -> None:
    pool = two_tiers()
    page = offered(pool, Loss.EXACT)
    assert isinstance(page, Page) and (page.tier, page.codec, page.loss) == (Tier.RAM, Codec.RAW, Loss.EXACT)
    pool = two_tiers()
    page = offered(pool, Loss.EXACT, Codec.Q4)
    assert isinstance(page, Page) and (page.tier, page.codec, page.loss) == (Tier.HOST, Codec.Q4, Loss.Q4)
    assert page.nbytes == 144


def test_where_there_is_no_tier_or_no_room_below_an_encoded_page_finds_none() -> None:
    assert offered(two_tiers(host_bytes=0), Loss.Q8, Codec.Q8) is Written.FULL
    assert offered(two_tiers(host_bytes=128), Loss.Q8, Codec.Q8) is Written.FULL


@pytest.mark.parametrize("there", Loss)
@pytest.mark.parametrize("new", Loss)
def test_a_page_gives_way_to_one_that_has_lost_less_and_to_no_other(there: Loss, new: Loss) -> None:
    pool = two_tiers()
    old = committed(pool, there)
    offer = offered(pool, new)
    if new >= there:
        assert offer is Written.DUPLICATE
        assert old.state is PageState.READY
    else:
        assert isinstance(offer, Page) and offer.loss is new
        assert old.state is PageState.FREE


def test_a_page_gives_way_only_once_there_is_room_for_the_other() -> None:
    pool = two_tiers(pages=1)
    old = committed(pool, Loss.Q8)
    assert offered(pool, Loss.EXACT) is Written.FULL
    assert old.state is PageState.READY


def test_a_page_in_the_other_tier_does_not_give_way_before_there_is_a_better_one() -> None:
    pool = two_tiers()
    old = committed(pool, Loss.Q8, Codec.Q8)
    assert isinstance(offered(pool, Loss.EXACT), Page)
    assert old.state is PageState.READY
    assert offered(pool, Loss.EXACT) is Written.PENDING
    assert offered(pool, Loss.Q8) is Written.DUPLICATE, "it is there already"


def test_a_namespace_has_a_bounded_number_of_parts_at_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PARTS_PER_BLOCK", 1)
    shard = LoneShard.joined()
    shard.store(attempt(1), key(A, LEFT))
    assert refusal(shard.replies[shard.reserving(attempt(2), key(A, RIGHT))]) is RefusedKind.LIMIT
    shard.evict(A)
    shard.settle()
    shard.store(attempt(3), key(A, RIGHT))


def test_of_more_parts_than_may_be_in_one_reservation_the_first_get_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PARTS_PER_BLOCK", 1)
    granted, refused = LoneShard.joined().reserve(attempt(1), key(A, LEFT), key(A, RIGHT))
    assert isinstance(granted, PageSlot) and refused is Written.FULL
