"""What is remembered of where the layers of absent blocks lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcluster.core.ids import BlockHash
from kvcluster.sequences.blocks import SequenceBlock
from kvcluster.sequences.layer_query import LayerLoads
from kvcluster.sequences.step_lock import StepLock
from kvcluster.transport.base import Deadline
from tests.client.build import SPEC

NOW = Deadline.after_ms(10**7)


def test_a_block_that_is_written_again_is_looked_for_again() -> None:
    asked: list[BlockHash | None] = []

    def find(blocks: Sequence[SequenceBlock], deadline: Deadline) -> list[Any]:
        asked.append(blocks[0].name)
        return [(SPEC, blocks, None)]

    nothing: Any = None
    loads = LayerLoads(nothing, SPEC.whole(0), find=find, lost=nothing, lock=StepLock())
    block = SequenceBlock(None, None, nothing)
    block.name, block.references = BlockHash(b"a" * 32), 1
    for _ in range(2):
        loads.runs((block,), NOW)
    assert asked == [b"a" * 32]
    block.name = BlockHash(b"b" * 32)  # as when a sequence takes back its last block and seals it again
    loads.runs((block,), NOW)
    assert asked == [b"a" * 32, b"b" * 32]
