"""What every process of a chaos run knows of the right bytes: they follow from a block's hash alone.

So a process that loads a block can tell that it got this block and no other, in this state and no other, without having
seen it stored. Prompts are made from a number: the first blocks are one of a few system prompts, the rest is their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvcluster.core.ids import BlockHash
from kvcluster.core.spec import KVSpec

SPEC = KVSpec.uniform(
    model="chaos", weights="sha256:1", num_layers=4, num_kv_heads=4, head_dim=32, dtype="float32", block_tokens=16
)
PAGE_BYTES = SPEC.page_bytes(0, SPEC.whole(0))
SYSTEM_BLOCKS = 4
_SYSTEM_PROMPTS = 5
_VOCABULARY = 100_000


def right_bytes(block: BlockHash) -> bytes:
    """The page of this block."""
    return hashlib.shake_128(block).digest(PAGE_BYTES)


def prompt(number: int, blocks: int) -> list[int]:
    """The tokens of prompt `number`, so many full blocks; a longer one of the same number begins alike."""
    shared, tokens = number % _SYSTEM_PROMPTS, SPEC.block_tokens
    system = [_VOCABULARY + shared] * (min(blocks, SYSTEM_BLOCKS) * tokens)
    own = max(0, blocks - SYSTEM_BLOCKS) * tokens
    return system + [number * 31 % _VOCABULARY, number // _VOCABULARY, *range(own)][:own]


def lonely(number: int, blocks: int) -> list[int]:
    """As `prompt`, but shares no block with the prompts of other numbers."""
    return [2 * _VOCABULARY + number, *range(blocks * SPEC.block_tokens - 1)]


def wrong(hashes: Sequence[BlockHash], pages: Sequence[bytearray]) -> list[int]:
    """Which of these blocks were loaded with other bytes than theirs."""
    return [at for at, (block, page) in enumerate(zip(hashes, pages, strict=False)) if page != right_bytes(block)]
