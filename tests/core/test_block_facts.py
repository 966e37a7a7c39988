"""What eviction policies are told of a block: its bytes in one tier of one shard, and the cost of computing it
again."""

from __future__ import annotations

from kvcluster.core.coordinator.block_facts import CROSSOVER_TOKENS, BlockFacts, recompute_cost
from kvcluster.core.coordinator.namespaces import NamespaceTable
from kvcluster.core.coordinator.pins import PinTable
from kvcluster.core.coordinator.replica_sets import ReplicaTable
from kvcluster.core.groups import LAST, PREFIX, Group, Plane, Reuse, chunk, window
from kvcluster.core.ids import Tenant
from kvcluster.core.messages import Tier
from kvcluster.core.spec import KVSpec
from kvcluster.core.tombstones import Tombstones
from tests.core.build import address, page, spec


def layered(*reuses: Reuse, layers: int = 10, block_tokens: int = 16) -> KVSpec:
    groups = tuple(
        Group(tuple(range(layers * at, layers * (at + 1))), (Plane("k", 1, 8, "float32"),), reuse)
        for at, reuse in enumerate(reuses)
    )
    return KVSpec(model="m", weights="sha256:w", block_tokens=block_tokens, groups=groups)


def test_a_first_block_costs_its_tokens_times_the_layers() -> None:
    assert recompute_cost(layered(PREFIX), 0) == 16 * 10 * 1_000
    assert recompute_cost(layered(PREFIX, LAST, window(64)), 0) == 3 * 16 * 10 * 1_000


def test_at_the_crossover_attention_doubles_the_cost() -> None:
    depth = CROSSOVER_TOKENS // 16
    assert recompute_cost(layered(PREFIX), depth) == 2 * recompute_cost(layered(PREFIX), 0)
    costs = [recompute_cost(layered(PREFIX), depth) for depth in range(100)]
    assert costs == sorted(costs) and costs[0] < costs[-1]


def test_attention_reaches_no_further_than_its_window_and_recurrent_state_has_none() -> None:
    assert recompute_cost(layered(chunk(64)), 4) == recompute_cost(layered(chunk(64)), 0), "a chunk begins"
    few, many = recompute_cost(layered(window(64)), 4), recompute_cost(layered(window(64)), 1_000)
    assert few == many > recompute_cost(layered(window(64)), 3)
    assert recompute_cost(layered(LAST), 1_000) == recompute_cost(layered(LAST), 0)


def test_bytes_are_of_one_tier_of_one_shard_and_at_least_one() -> None:
    book = ReplicaTable()
    slots = [book.open_slot(address(1)), book.open_slot(address(2))]
    spaces = NamespaceTable(book, Tombstones(), PinTable(0.25))
    space = spaces.attach(Tenant("alice"), spec())
    assert space is not None
    event = page(0)._replace(namespace=space.id)
    for slot in slots:
        space.index.add(event, slot, 0)
    [record] = space.index
    here, below = (BlockFacts(spaces, slots[0], tier) for tier in (Tier.RAM, Tier.HOST))
    assert here.nbytes(record) == space.page_bytes(event.key.group, event.key.part)
    assert below.nbytes(record) == 1
    assert here.tenant(record) == "alice"
    assert here.recompute(record) == recompute_cost(space.spec, record.depth)
