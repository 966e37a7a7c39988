"""What a shard knows of namespaces: whose each is, and when one may be forgotten."""

from __future__ import annotations

import pytest

from kvcluster.core import limits
from kvcluster.core.ids import Epoch
from kvcluster.core.messages import (
    Abort,
    AttachedShard,
    NewPage,
    PageKey,
    RefusedKind,
    Reserve,
)
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
from tests.core.world import (
    HYBRID,
    MS,
    OURS,
    SECOND,
    SPEC,
    THEIRS,
    attempt,
    root,
)


def test_attach_names_the_namespace_the_epoch_and_how_long_leases_run() -> None:
    shard = LoneShard(lease_ttl_ms=1_500)
    assert shard.attach() == AttachedShard(SPEC.namespace(OURS), Epoch(7), 1_500 * MS)
    assert shard.attach(tenant=THEIRS) == AttachedShard(SPEC.namespace(THEIRS), Epoch(7), 1_500 * MS)


def test_a_namespace_that_nobody_attached_is_unknown() -> None:
    shard = LoneShard()
    shard.settle()
    assert refusal(shard.pin(attempt(1), A)) is RefusedKind.UNKNOWN_NAMESPACE
    assert refusal(shard.replies[shard.reserving(attempt(1), A)]) is RefusedKind.UNKNOWN_NAMESPACE


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
    waiting = shard.call(lambda call: Reserve(call, THEIRS, theirs, attempt(2), shard.epoch, (big,), SECOND))
    shard.settle()
    assert refusal(shard.attach(SPEC, THEIRS)) is RefusedKind.LIMIT
    assert end(shard, attempt(1), Abort)
    assert slots(granted(shard, waiting))
