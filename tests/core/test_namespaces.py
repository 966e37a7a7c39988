from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace

import pytest

from kvcluster.core import codecs, limits
from kvcluster.core.codecs import Codec
from kvcluster.core.coordinator.namespaces import CoordinatorNamespace, NamespaceTable
from kvcluster.core.coordinator.pins import PinTable
from kvcluster.core.coordinator.replica_sets import ReplicaTable
from kvcluster.core.groups import LAST, PREFIX, Group, Part, Plane
from kvcluster.core.ids import HASH_BYTES, NamespaceId, Tenant
from kvcluster.core.messages import Need, Tombstone
from kvcluster.core.spec import KVSpec
from kvcluster.core.tombstones import Tombstones
from tests.core.build import WHOLE, address, page, spec

ALICE, BOB = Tenant("alice"), Tenant("bob")


def directory() -> NamespaceTable:
    book = ReplicaTable()
    book.open_slot(address(1))
    return NamespaceTable(book, Tombstones(), PinTable(0.25))


def attached(spaces: NamespaceTable, what: KVSpec, tenant: Tenant = ALICE) -> CoordinatorNamespace:
    space = spaces.attach(tenant, what)
    assert space is not None and space.tenant == tenant and space.spec == what
    return space


def holding(spaces: NamespaceTable, what: KVSpec, tenant: Tenant = ALICE, blocks: int = 1) -> CoordinatorNamespace:
    """An attached namespace in which blocks are cached."""
    space = attached(spaces, what, tenant)
    for number in range(blocks):
        space.index.add(page(number)._replace(namespace=space.id), slot=1, now=0)
    return space


def test_attaching_again_finds_the_same_namespace() -> None:
    spaces = directory()
    assert attached(spaces, spec()) is attached(spaces, spec())
    assert len(spaces) == 1


def test_the_same_spec_of_two_tenants_is_two_namespaces() -> None:
    spaces = directory()
    hers, his = attached(spaces, spec()), attached(spaces, spec(), BOB)
    assert hers is not his and hers.id != his.id
    assert list(spaces) == [hers, his]


def test_a_namespace_is_found_with_its_tenant_only() -> None:
    spaces = directory()
    space = attached(spaces, spec())
    assert spaces.find(space.id, ALICE) is space
    assert spaces.find(space.id, BOB) is None
    assert spaces.find(NamespaceId(b"?" * HASH_BYTES), ALICE) is None


def test_shards_speak_for_every_tenant() -> None:
    spaces = directory()
    space = attached(spaces, spec())
    assert spaces.known(space.id) is space
    assert spaces.known(NamespaceId(b"?" * HASH_BYTES)) is None


def test_blocks_of_all_namespaces_are_counted() -> None:
    spaces = directory()
    assert spaces.blocks == 0
    holding(spaces, spec(), blocks=2)
    holding(spaces, spec(), BOB, blocks=3)
    assert spaces.blocks == 5


def test_a_tenant_has_no_more_namespaces_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 2)
    spaces = directory()
    first = holding(spaces, spec(adapter="1"))
    holding(spaces, spec(adapter="2"))
    assert spaces.attach(ALICE, spec(adapter="3")) is None
    assert spaces.attach(ALICE, spec(adapter="1")) is first, "it may attach to a namespace that it has"
    assert spaces.attach(BOB, spec(adapter="3")) is not None, "one tenant's bound is none of another"


def test_a_namespace_that_holds_nothing_makes_room_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 3)
    spaces = directory()
    others = attached(spaces, spec(adapter="1"), BOB)
    full = holding(spaces, spec(adapter="1"))
    holding(spaces, spec(adapter="0"))
    bare = attached(spaces, spec(adapter="2"))
    for number in range(3, 6):
        attached(spaces, spec(adapter=str(number)))
        assert len(spaces) == 4
    assert spaces.find(bare.id, ALICE) is None
    assert spaces.find(full.id, ALICE) is full
    assert spaces.find(others.id, BOB) is others, "one tenant's namespaces make no room for another's"


def test_a_need_fits_where_each_part_lies_within_its_group_and_something_is_asked() -> None:
    space = attached(directory(), spec(PREFIX, LAST))
    assert space.fits(Need((WHOLE, WHOLE))) and space.fits(Need((None, Part(1, 2, 0, 1))))
    assert not space.fits(Need((WHOLE,))), "one group too few"
    assert not space.fits(Need((WHOLE, WHOLE, None))), "one too many"
    assert not space.fits(Need((WHOLE, Part(0, 3, 0, 2)))), "more layers than there are"
    assert not space.fits(Need((Part(0, 2, 1, 3), None))), "more heads than there are"
    assert not space.fits(Need((Part(1, 1, 0, 2), None))), "no layer at all"
    assert not space.fits(Need((None, None))), "blocks that no shard has would do"


@pytest.mark.parametrize("group", [-1, 1, 7])
def test_a_spec_has_no_group_beyond_its_own(group: int) -> None:
    space = attached(directory(), spec())
    assert space.has(0, WHOLE) and not space.has(group, WHOLE)


def test_page_bytes_are_those_of_the_spec_also_when_more_parts_are_asked_for_than_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "PAGE_SIZES", 2)
    what = spec(PREFIX, LAST)
    assert what.page_bytes(0, WHOLE) == 2 * 2 * 4 * 2 * 4 * 2  # layers, planes, tokens, heads, dim, bytes of float16
    space = attached(directory(), what)
    wanted = [(group, part) for group in (0, 1) for part in (WHOLE, Part(0, 1, 0, 2), Part(0, 1, 0, 1))]
    expected = [what.page_bytes(group, part) for group, part in wanted]
    asked: list[tuple[int, Part]] = []

    def page_bytes(_codec: Codec, _spec: KVSpec, group: int, part: Part) -> int:
        asked.append((group, part))
        return expected[wanted.index((group, part))]

    monkeypatch.setattr(codecs, "page_bytes", page_bytes)
    for _ in range(2):
        assert [space.page_bytes(group, part) for group, part in wanted for _ in range(2)] == [
            nbytes for nbytes in expected for _ in range(2)
        ]
    assert asked == wanted * 2, "worked out once, and again where it was forgotten"


def test_page_sizes_are_kept_for_a_bounded_number_of_parts_of_all_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PAGE_SIZES", 256)
    spaces = directory()
    gc.collect()
    tracemalloc.start()
    for number in range(20):
        planes = (Plane("k", 2, 4, "float16"),)
        group = Group(tuple(range(64)), planes)
        space = attached(spaces, replace(spec(), model=f"m{number}", groups=(group,)))
        for start in range(32):
            for stop in range(start + 1, start + 32):
                space.page_bytes(0, Part(start, stop, 0, 1))
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 256 * 400 + 20 * 8_192


def test_a_tenants_namespaces_are_listed_by_model_the_fullest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    spaces = directory()
    small, large = spec(), spec(weights="sha256:2")
    other = replace(spec(), model="another")
    holding(spaces, small)
    holding(spaces, large, blocks=3)
    attached(spaces, other)
    holding(spaces, spec(weights="sha256:3"), BOB, blocks=2)
    assert spaces.listed(ALICE) == ((other, 0), (large, 3), (small, 1))
    monkeypatch.setattr(limits, "LISTED_NAMESPACES", 2)
    assert spaces.listed(ALICE) == ((other, 0), (large, 3))


def test_siblings_are_the_tenants_other_namespaces_the_most_alike_first() -> None:
    spaces = directory()
    mine = holding(spaces, spec())
    far, near = spec(weights="sha256:2", rope="yarn", dtype="float32"), spec(weights="sha256:2")
    holding(spaces, far)
    holding(spaces, near)
    holding(spaces, spec(weights="sha256:3"), BOB)
    attached(spaces, spec(weights="sha256:4"))
    assert spaces.siblings(mine) == (near, far), "neither of another tenant, nor what holds nothing, nor itself"


def test_no_more_siblings_are_named_than_an_explanation_may_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EXPLAINED_NAMESPACES", 2)
    spaces = directory()
    mine = attached(spaces, spec())
    for number in range(2, 7):
        holding(spaces, spec(weights=f"sha256:{number}"))
    assert len(spaces.siblings(mine)) == 2
    assert spaces.siblings(mine) == spaces.siblings(mine), "the same ones each time"


def test_an_older_tombstone_that_is_learnt_late_takes_nothing_from_a_newer_one() -> None:
    spaces = directory()
    space = holding(spaces, spec(), blocks=2)
    for number in (5, 3):
        spaces.apply_tombstone(Tombstone(number, ALICE))
    assert (space.purged, len(space.index)) == (5, 0)


def test_all_tenants_together_have_a_bounded_number_of_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES", 1)
    known = directory()
    attached(known, spec())
    assert known.attach(BOB, spec()) is None
    attached(known, spec(weights="sha256:2"))  # in the place of an empty one of the same tenant
