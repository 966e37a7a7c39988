"""What `client.pins()` lists, and that what it lists can be unpinned."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from kvcluster.client.client import Client
from kvcluster.client.pinning import pinned_prefixes
from kvcluster.core import limits
from kvcluster.core.ids import BlockHash, Tenant
from kvcluster.core.messages import PinnedRun
from kvcluster.errors import CallerError, Unreachable
from kvcluster.transfers.transfer import PinListing, PinnedPrefix
from tests.client.build import BLOCK, PAGE_BYTES, SPEC, kv, pinned, prompt, spec_of
from tests.client.conftest import Start

SYSTEM = prompt(4)
ONE, OTHER = [*SYSTEM, *prompt(2, 1)], [*SYSTEM, *prompt(3, 2)]


@pytest.fixture
def client(start: Start) -> Client:
    """One that has stored a system prompt with two continuations."""
    client = start(shards=1, ram_bytes="1MiB").client(SPEC)
    for tokens in (ONE, OTHER):
        client.store(tokens, kv(len(tokens) // BLOCK))
    assert client.flush()
    return client


def shown(listing: PinListing) -> list[tuple[int, int, int]]:
    """The blocks before each pin, its own, and those that it shares."""
    assert not listing.more_blocks
    return [(each.first, each.blocks, each.shared_blocks) for each in listing.pins]


def test_a_pin_is_listed_with_its_size_and_its_end(client: Client) -> None:
    assert client.pins() == PinListing(())
    client.pin(ONE, 60.0)
    [pin] = client.pins().pins
    assert (pin.spec, pin.tenant, pin.first, pin.blocks, pin.shared_blocks) == (SPEC, "default", 0, 6, 0)
    assert (pin.tokens, pin.nbytes) == (6 * BLOCK, 6 * PAGE_BYTES)
    assert 0 < pin.left_s <= 60.0
    assert pin.own == tuple(client.hashes(ONE)) and pin.block == pin.own[-1].hex()


def test_prompts_that_begin_alike_share_the_pin_of_what_they_share(client: Client) -> None:
    client.pin(ONE, 60.0)
    client.pin(OTHER, 600.0)
    assert shown(client.pins()) == [(0, 7, 4), (0, 6, 4)]
    longer, shorter = client.pins().pins
    assert client.unpin(longer) == pinned(3), "the other needs what both have"
    assert shown(client.pins()) == [(0, 6, 0)]
    assert client.unpin(client.pins().pins[0]) == pinned(6)
    assert client.pins().pins == () and client.unpin(shorter) == pinned(0)


def test_what_was_unpinned_of_a_pin_is_not_listed(client: Client) -> None:
    client.pin(ONE, 60.0)
    client.unpin(SYSTEM)
    assert shown(client.pins()) == [(4, 2, 0)]


def test_a_pin_ends_when_the_first_of_its_blocks_is_no_longer_pinned(client: Client) -> None:
    client.pin(ONE, 600.0)
    client.pin(SYSTEM, 60.0)
    [pin] = client.pins().pins
    assert (pin.blocks, pin.tokens) == (6, 6 * BLOCK) and pin.left_s <= 60.0


def test_pins_are_listed_across_messages_up_to_a_limit(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.pin(ONE, 60.0)
    client.pin(OTHER, 60.0)
    whole = shown(client.pins())
    monkeypatch.setattr(limits, "BLOCKS_PER_CALL", 2)
    assert shown(client.pins()) == whole
    monkeypatch.setattr(limits, "LISTED_PINNED_BLOCKS", 4)
    cut = client.pins()
    assert (cut.more_blocks, [each.blocks for each in cut.pins]) == (5, [4])


def test_pins_of_one_model_are_listed(start: Start) -> None:
    cluster = start(shards=1, ram_bytes="1MiB")
    for model in ("tiny", "big"):
        client = cluster.client(spec_of(model=model))
        client.store(SYSTEM, kv(4))
        assert client.flush() and client.pin(SYSTEM, 60.0) == pinned(4)
    assert [each.spec.model for each in client.pins().pins] == ["big", "tiny"]
    assert [each.spec.model for each in client.pins(model="tiny").pins] == ["tiny"]
    tiny = client.pins(model="tiny").pins[0]
    assert client.unpin(tiny) == pinned(4), "although the client is of another model"
    with pytest.raises(CallerError, match="model is a int; expected the text"):
        client.pins(model=1)  # type: ignore[arg-type]


def test_a_pin_of_another_tenant_is_not_unpinned(client: Client) -> None:
    client.pin(ONE, 60.0)
    [pin] = client.pins().pins
    with pytest.raises(CallerError, match="of tenant 'other': unpin it with a token of that tenant"):
        client.unpin(replace(pin, tenant="other"))


def test_pins_can_be_awaited(client: Client) -> None:
    async def listed() -> PinListing:
        await client.aio.pin(ONE, 60.0)
        return await client.aio.pins()

    assert shown(asyncio.run(listed())) == [(0, 6, 0)]


def test_without_a_coordinator_there_is_no_listing(start: Start) -> None:
    cluster = start(shards=1, ram_bytes="1MiB")
    client = cluster.client(SPEC)
    client.store(ONE, kv(6))
    assert client.flush() and client.pin(ONE, 60.0)
    [pin] = client.pins().pins
    cluster.stop_coordinator()
    with pytest.raises(Unreachable, match="the coordinator does not answer"):
        client.pins()
    assert client.unpin(pin).miss is not None


# ------------------------------------------------------------------------------------ any tree of blocks


def plainly(parents: dict[BlockHash, BlockHash], depths: dict[BlockHash, int]) -> set[tuple[bytes, int, int, int]]:
    """Each pinned block that none follows: the depth of the first, the number of blocks, and of those that others
    have."""
    ends = [block for block in parents if block not in parents.values()]
    paths = []
    for block in ends:
        path = [block]
        while parents[path[-1]] in parents:
            path.append(parents[path[-1]])
        paths.append(path)
    found = set()
    for path in paths:
        shared = sum(any(block in other for other in paths if other is not path) for block in path)
        found.add((path[0], depths[path[-1]], len(path), shared))
    return found


@pytest.mark.parametrize("seed", range(50))
def test_runs_of_any_tree_are_joined(seed: int) -> None:
    rng = random.Random(seed)
    tree: dict[BlockHash, BlockHash] = {}
    depths = {BlockHash(bytes(32)): -1}
    for _ in range(rng.randint(1, 60)):
        parent = rng.choice([*depths][-rng.randint(1, 60) :])
        block = BlockHash(rng.randbytes(32))
        tree[block], depths[block] = parent, depths[parent] + 1
    kept = {block: parent for block, parent in tree.items() if rng.random() < 0.9}
    runs: list[PinnedRun] = []
    for block, parent in kept.items():
        if runs and runs[-1].blocks[-1] == parent and rng.random() < 0.8:
            runs[-1] = replace(runs[-1], blocks=(*runs[-1].blocks, block))
        else:
            runs.append(PinnedRun(Tenant("t"), SPEC, parent, depths[block], (block,), 7, rng.randrange(1, 9)))
    rng.shuffle(runs)
    found: list[PinnedPrefix] = pinned_prefixes(runs)
    assert {(bytes.fromhex(p.block), p.first, p.blocks, p.shared_blocks) for p in found} == plainly(kept, depths)
    assert all(p.nbytes == 7 * p.blocks and len(p.own) == p.blocks - p.shared_blocks for p in found)
    ends = {block: run.left_ns for run in runs for block in run.blocks}
    for p in found:
        block, left = BlockHash(bytes.fromhex(p.block)), []
        while block in kept:
            left.append(ends[block])
            block = kept[block]
        assert p.left_s == min(left) / 1e9


def test_another_tenant_that_stores_under_the_same_hashes_changes_nothing_of_a_pin() -> None:
    blocks = tuple(BlockHash(bytes([at]) * 32) for at in range(4))
    mine = PinnedRun(Tenant("one"), SPEC, BlockHash(bytes(32)), 0, blocks, 7, 9)
    theirs = replace(mine, tenant=Tenant("two"), blocks=blocks[1:2], before=blocks[0], first=1)
    alone, both = pinned_prefixes([mine]), pinned_prefixes([theirs, mine])
    assert [each for each in both if each.tenant == "one"] == alone
    assert [(each.first, each.blocks) for each in both if each.tenant == "two"] == [(1, 1)]
