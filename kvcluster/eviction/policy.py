"""The interface of eviction policies: what a policy sees of a block, and what it returns."""

from __future__ import annotations

from typing import Protocol

USES = 255
"""The maximum of a block's count of uses: eight bits, and an integer that Python shares and does not allocate."""


class Block(Protocol):
    """A cached block, as the prefix index records it. Along a chain `stamp` never grows from a block to the next."""

    @property
    def stamp(self) -> int:
        """Time of the last use, in nanoseconds of the coordinator's clock."""

    @property
    def uses(self) -> int:
        """Number of loads that were promised the block since it was recorded, at most USES."""

    @property
    def depth(self) -> int:
        """Index of the block in its chain: 0 is the first block of a prompt."""


class Facts(Protocol):
    """What the coordinator knows about a block besides its record, computed on request.

    All of it is about one tier of one shard.
    """

    def nbytes(self, block: Block) -> int:
        """Returns the bytes that evicting the block frees. At least 1."""

    def recompute(self, block: Block) -> int:
        """Returns the cost of computing the block again, in thousandths of a token-layer
        (core/coordinator/block_facts.py). At least 1."""

    def tenant(self, block: Block) -> str:
        """Returns the tenant of the block."""


class EvictionPolicy(Protocol):
    """Scores blocks of one tier of one shard: the lowest is evicted first. Made from the Facts of that tier.

    `scores_fall`: the score of a block may become lower than it was. If False, a score depends on the block alone and
    never falls while its stamp and uses grow; eviction is then exact. If True, scores may rise and fall with time and
    with `evicted`; core/coordinator/eviction_queue.py states what is then guaranteed.
    """

    scores_fall: bool

    def score(self, block: Block, now: int) -> int:
        """Returns an integer. Changes nothing, and depends only on the block, `now`, the Facts, and the earlier calls
        of `evicted`. `now` may be a little before the block's stamp."""

    def evicted(self, score: int, now: int) -> None:
        """Records that the block with that score is evicted."""
