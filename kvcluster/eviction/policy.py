"""The seam of eviction policies: what a policy sees of a block, and what it answers."""

from __future__ import annotations

from typing import Protocol

USES = 255
"""A block's uses are counted up to here: eight bits, and an integer that Python shares and does not allocate."""


class Block(Protocol):
    """A cached block, as the prefix index records it. Along a chain `stamp` never grows from a block to the next."""

    @property
    def stamp(self) -> int:
        """Nanoseconds of the coordinator's clock: when it was last used."""

    @property
    def uses(self) -> int:
        """How many loads were promised it since it was recorded, at most USES."""

    @property
    def depth(self) -> int:
        """Its place in its chain: 0 is the first block of a prompt."""


class Facts(Protocol):
    """What the coordinator can say of a block beside its record; each answer is worked out when it is asked for.

    All are of one tier of one shard.
    """

    def nbytes(self, block: Block) -> int:
        """The bytes that its eviction frees. At least 1."""

    def recompute(self, block: Block) -> int:
        """What computing it again costs, in thousandths of a token-layer (core/block_facts.py). At least 1."""

    def tenant(self, block: Block) -> str:
        """Whose it is."""


class EvictionPolicy(Protocol):
    """Scores blocks of one tier of one shard: the lowest goes first. Made from the Facts of that tier.

    `falls`: a score may be lower than the score of the same block was before. Where it is False, a score depends on
    the block alone and never falls while its stamp and uses grow; eviction is then exact. Where it is True, scores may
    change with time and with `taken`, up and down; what is guaranteed then stands in core/eviction_queue.py.
    """

    falls: bool

    def score(self, block: Block, now: int) -> int:
        """An integer. It changes nothing, and depends on nothing but the block, `now`, the Facts, and what `taken` was
        told. `now` may be a little before the block's stamp."""

    def taken(self, score: int, now: int) -> None:
        """The block of that score is evicted."""
