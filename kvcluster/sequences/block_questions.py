"""The questions to the coordinator, where blocks of a worker's sequences lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import ShardId
from kvcluster.core.messages import Explain, Need
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec
from kvcluster.sequences.blocks import SequenceBlock


def block_questions(
    specs: Mapping[bool, KVSpec], part: Part, accept: Loss, blocks: Sequence[SequenceBlock], avoid: tuple[ShardId, ...]
) -> Iterator[tuple[KVSpec, Sequence[SequenceBlock], Explain]]:
    """Yields the questions where `part` of these blocks lies, but on shards to `avoid`: each with its spec, and the
    blocks that it is about. `specs` are those of public and of `private` blocks. A block may have lost as much as
    `accept`, or as it has lost already."""
    for private, spec in specs.items():
        mine = [block for block in blocks if block.private == private]
        for first in range(0, len(mine), limits.BLOCKS_PER_CALL):
            some = mine[first : first + limits.BLOCKS_PER_CALL]
            names = tuple(block.name for block in some if block.name is not None)
            assert len(names) == len(some), "a block without a name lies on no shard"
            need = Need((part,), max(accept, *(block.loss for block in some)), avoid)
            yield spec, some, Explain(names, need)
