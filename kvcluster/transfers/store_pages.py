"""What a store writes: its terms, and the pages of one shard with the outcome of each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvcluster.core.groups import Part
from kvcluster.core.ids import HASH_BYTES, Attempt, BlockHash
from kvcluster.core.messages import NewPages, ShardAddress, Written
from kvcluster.core.miss import Loss


@dataclass(frozen=True, slots=True)
class StoreTerms:
    """What a store writes: these `parts` of the blocks of a chain from index `first` on. `hashes[0]` is the hash of the
    block at index `start`. Unless it is 0, the block before `first` and all of the placement run of `first` are among
    `hashes`. `loss` is that of the prefix over which the blocks were computed. `attempt` names the ticket. A shard that
    is full waits up to `wait_ns` for room."""

    hashes: Sequence[BlockHash]
    first: int
    parts: tuple[tuple[int, Part], ...]
    loss: Loss
    attempt: Attempt
    wait_ns: int
    start: int = 0

    @property
    def new(self) -> tuple[BlockHash, ...]:
        return tuple(self.hashes[self.first - self.start :])

    def before(self, block: int) -> BlockHash:
        """Returns the parent of a block, which is counted from the beginning of the chain."""
        return self.hashes[block - 1 - self.start] if block else BlockHash(bytes(HASH_BYTES))


@dataclass(eq=False, slots=True)
class PagesToStore:
    """Pages that are written to one shard by one exchange, or by several if a path breaks, with the outcome of each. An
    attempt that broke off may still hold its pages (`doubtful`), or may have committed those that it had `taken`."""

    shard: ShardAddress
    pages: NewPages
    blocks: Sequence[int]
    known: list[Written | None]
    doubtful: dict[int, None] = field(default_factory=dict)
    taken: dict[int, None] = field(default_factory=dict)
    nbytes: int = 0
    pauses: int = 0

    def open(self) -> list[int]:
        """Returns the pages without an outcome, and the pending ones that an attempt of this store may still hold."""
        return [
            at
            for at, written in enumerate(self.known)
            if written is None or (written is Written.PENDING and at in self.doubtful)
        ]

    def ended(self, items: Sequence[int], outcome: Sequence[Written]) -> None:
        """Records the outcome of an exchange of these pages."""
        for at, written in zip(items, outcome, strict=True):
            ours = written is Written.DUPLICATE and at in self.taken
            self.known[at] = Written.COMMITTED if ours else written

    def broke_off(self, items: Sequence[int], taken: Collection[int]) -> None:
        """Records that an exchange of these pages ended without an outcome. `taken` are indices into `items`."""
        self.doubtful.update(dict.fromkeys(items))
        self.taken.update(dict.fromkeys(items[at] for at in taken))


def pages_of(terms: StoreTerms, blocks: Sequence[int]) -> tuple[NewPages, Sequence[int]]:
    """Returns the pages of these new blocks, and the block of each page."""
    parts = len(terms.parts)
    of_block = [block for block in blocks for _ in range(parts)]
    depths = [terms.first + block for block in of_block]
    hashes, parents = [terms.hashes[depth - terms.start] for depth in depths], [terms.before(depth) for depth in depths]
    places, losses = list(range(parts)) * len(blocks), [terms.loss] * len(depths)
    return NewPages(hashes, places, terms.parts, parents, depths, losses), of_block
