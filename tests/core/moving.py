"""Shards that move pages between their tiers, played by a test, and what such pages look like."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvcluster.core.codecs import Codec
from kvcluster.core.file_allocator import HEAD_BYTES, SECTOR_BYTES
from kvcluster.core.ids import BlockHash, Epoch, ShardId
from kvcluster.core.messages import LeaveReason, NewPage, PageEvent, PullOrder, RemovedEvent, ShardAddress, Tier
from kvcluster.core.miss import Loss
from kvcluster.core.shard.disk_recovery import NO_STORE, RecoveredPages
from kvcluster.core.spec import KVSpec
from tests.core.lone_shard import A, LoneShard
from tests.core.samples import CODED, OURS, SECOND, attempt, key, root

RAW, Q8 = CODED.page_bytes(0, CODED.whole(0)), 192
SOURCE = ShardAddress(ShardId("b"), Epoch(3), "b:1")


def tiered(
    pages: int = 8, host_pages: int = 8, *, found: RecoveredPages = NO_STORE, spec: KVSpec = CODED, **config: int
) -> LoneShard:
    """A shard with a host tier, in which each page takes no more room than it is long, and perhaps a disk tier."""
    return LoneShard.joined(pages, host_pages=host_pages, found=found, spec=spec, **({"extent_bytes": 64} | config))


def disk(files: int = 4, pages: int = 4) -> RecoveredPages:
    """An empty disk tier of so many files, each for so many pages of CODED, in whatever codec: one a sector, and one
    sector for all their records."""
    file_bytes = HEAD_BYTES + SECTOR_BYTES * (1 + pages)
    return RecoveredPages(files * file_bytes, file_bytes)


def holding(*blocks: BlockHash, loss: Loss = Loss.EXACT, found: RecoveredPages = NO_STORE, **config: int) -> LoneShard:
    """A shard that holds these on its RAM tier."""
    shard = tiered(found=found, spec=CODED, **config)
    shard.store(attempt(1), *blocks, loss=loss)
    return shard


def lowered(*blocks: BlockHash, codec: Codec = Codec.Q8, found: RecoveredPages = NO_STORE, **config: int) -> LoneShard:
    """A shard that has demoted these."""
    shard = holding(*blocks, loss=Loss.EXACT, found=found, **config)
    shard.demote(*blocks, codec=codec)
    shard.move_all()
    shard.settle()
    return shard


def doubled(*blocks: BlockHash, codec: Codec = Codec.Q8, **config: int) -> LoneShard:
    """A shard that has demoted these and promoted them again."""
    shard = lowered(*blocks, codec=codec, found=NO_STORE, **config)
    shard.promote(*blocks)
    shard.move_all()
    shard.settle()
    return shard


def on_disk(
    *blocks: BlockHash, codec: Codec = Codec.Q8, found: RecoveredPages | None = None, **config: int
) -> LoneShard:
    """A shard that has demoted these to disk."""
    shard = lowered(*blocks, codec=codec, found=found or disk(), **config)
    shard.demote(*blocks, to=Tier.DISK)
    shard.move_all()
    shard.settle()
    return shard


def lies(shard: LoneShard, block: BlockHash = A) -> list[tuple[Tier, Codec, Loss]]:
    """Returns tier, codec and loss of each readable page of a block."""
    found = (page for page in shard.core.pool.ready() if page.key.hash == block)
    return [(page.tier, page.codec, page.loss) for page in found]


def free(shard: LoneShard, tier: Tier = Tier.RAM) -> int:
    return shard.core.pool.allocators[tier].free_bytes


INTERRUPTIONS = ("a drain", "its lease expires", "no coordinator", "the end")


def interrupt(shard: LoneShard, how: str) -> None:
    """Has one of INTERRUPTIONS come while a batch is under way, of leases of a second for "its lease expires"."""
    assert shard.moving is not None
    match how:
        case "a drain":
            shard.hear(drain=True)
        case "its lease expires":
            shard.settle()
            shard.later(SECOND)
            assert shard.moving.attempt in shard.revoked
        case "no coordinator":
            shard.settle()
            shard.later(6 * SECOND)
            assert not shard.core.state.member(shard.now)
        case "the end":
            shard.hear(leave=LeaveReason.DRAINED)
            assert shard.moving.attempt in shard.revoked


def sources(shard: LoneShard) -> list[BlockHash]:
    """The blocks of the batch that is under way."""
    return [page.source.key.hash for page in shard.moving.pages] if shard.moving is not None else []


def one_page(new: NewPage, codec: Codec, into: Tier) -> Callable[[int], PullOrder]:
    """The order to pull this page of CODED, by its number."""
    return partial(PullOrder, source=SOURCE, tenant=OURS, spec=CODED, pages=(new,), codec=codec, into=into)


def arrived(block: BlockHash, tier: Tier, codec: Codec, loss: Loss) -> PageEvent:
    return PageEvent(CODED.namespace(OURS), key(block), root(), 0, tier, loss, codec)


def left(block: BlockHash, tier: Tier, *, corrupt: bool = False) -> RemovedEvent:
    return RemovedEvent(CODED.namespace(OURS), key(block), corrupt, tier)


IN_RAM = (Tier.RAM, Codec.RAW, Loss.EXACT)
BELOW = (Tier.HOST, Codec.Q8, Loss.Q8)
ON_DISK = (Tier.DISK, Codec.Q8, Loss.Q8)
DECODED = (Tier.RAM, Codec.RAW, Loss.Q8)
