"""Builders for the tests of the core's classes: short names for hashes, parts, shards and events.

Block number i of the one chain here follows block i - 1; the first follows ROOT.
"""

from __future__ import annotations

from kvcluster.core.groups import PREFIX, Group, Part, Plane, Reuse
from kvcluster.core.ids import HASH_BYTES, HOLDER_BYTES, Attempt, BlockHash, Epoch, Holder, NamespaceId, ShardId, Tenant
from kvcluster.core.messages import PageEvent, PageKey, RemovedEvent, ShardAddress, Tier
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec
from kvcluster.core.tenant_shares import Owner

SPACE = NamespaceId(b"n" * HASH_BYTES)
ROOT = BlockHash(b"r" * HASH_BYTES)
WHOLE = Part(0, 2, 0, 2)
SECOND_NS = 1_000_000_000


def block(number: int) -> BlockHash:
    """The hash of block `number`, distinct already in its first eight bytes."""
    return BlockHash(number.to_bytes(8, "big") * (HASH_BYTES // 8))


def chain(count: int) -> tuple[BlockHash, ...]:
    return tuple(block(number) for number in range(count))


def parent(number: int) -> BlockHash:
    return block(number - 1) if number else ROOT


def holder(number: int) -> Holder:
    return Holder(number.to_bytes(HOLDER_BYTES, "big"))


def tenant(number: int) -> Tenant:
    """The tenant of the holder with that number. Each has every other one."""
    return Tenant("odd" if number % 2 else "even")


def owner(number: int) -> Owner:
    return tenant(number), holder(number)


def attempt(counter: int, of: int = 0) -> Attempt:
    return Attempt(holder(of), counter)


def address(number: int) -> ShardAddress:
    return ShardAddress(ShardId(f"shard-{number}"), Epoch(1), f"127.0.0.1:{7000 + number}")


def key(number: int, group: int = 0, part: Part = WHOLE) -> PageKey:
    return PageKey(block(number), group, part)


def page(number: int, group: int = 0, part: Part = WHOLE, loss: Loss = Loss.EXACT) -> PageEvent:
    return PageEvent(SPACE, key(number, group, part), parent(number), number, Tier.RAM, loss)


def gone(number: int, group: int = 0, part: Part = WHOLE) -> RemovedEvent:
    return RemovedEvent(SPACE, key(number, group, part), corrupt=False)


def spec(
    *reuses: Reuse, weights: str = "sha256:1", adapter: str = "", rope: str = "", dtype: str = "float16"
) -> KVSpec:
    """A small model of two layers and two heads a group, one group for each reuse rule (or one of PREFIX)."""
    planes = (Plane("k", 2, 4, dtype), Plane("v", 2, 4, dtype))
    groups = tuple(Group((2 * at, 2 * at + 1), planes, reuse) for at, reuse in enumerate(reuses or (PREFIX,)))
    return KVSpec("model", weights, block_tokens=4, groups=groups, adapter=adapter, rope=rope)
