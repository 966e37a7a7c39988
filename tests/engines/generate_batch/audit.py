"""The audit of loaded blocks: an oracle that shares no code with kvcluster.

When a block is stored, the audit copies its bytes out of the engine's cache, by the indices by which the engine's own
attention reads it, and files them under a SHA-256 of all tokens up to the block's end. When a block was loaded, it is
read in the same way, and must equal what was filed. The same tokens may be filed with several contents: the sums of a
forward pass depend on what else is in its batch, so that a block that was dropped and computed again may differ in its
last bits. Which of them the cluster has is not known, but it must be one of them.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.engines.generate_batch.paged_cache import Blocks, token_bytes


class Audit:
    """Files the bytes of stored blocks, and compares those of loaded ones. `wrong` says what did not match."""

    def __init__(self) -> None:
        self.blocks = 0
        self.wrong: list[str] = []
        self._filed: dict[bytes, set[bytes]] = {}
        self._before: frozenset[bytes] = frozenset()

    def begin_engine(self) -> None:
        """From now on `known_before` speaks of what is filed at this moment."""
        self._before = frozenset(self._filed)

    def known_before(self, blocks: Blocks, token_ids: Sequence[int], number: int) -> bool:
        """Whether another engine had stored this block before the present one began."""
        return self._key(blocks, token_ids, number) in self._before

    def stored(self, blocks: Blocks, token_ids: Sequence[int], first: int, block_ids: Sequence[int]) -> None:
        """Files blocks that are about to be stored: those of `token_ids` from number `first` on."""
        for number, block in enumerate(block_ids, start=first):
            self._filed.setdefault(self._key(blocks, token_ids, number), set()).add(_content(blocks.read(block)))

    def loaded(self, blocks: Blocks, token_ids: Sequence[int], first: int, block_ids: Sequence[int]) -> None:
        """Compares blocks that have been loaded."""
        for number, block in enumerate(block_ids, start=first):
            self.blocks += 1
            filed = self._filed.get(self._key(blocks, token_ids, number))
            if filed is None:
                self.wrong.append(f"block {number} of a prompt of {len(token_ids)} tokens was loaded, but never stored")
            elif _content(blocks.read(block)) not in filed:
                self.wrong.append(f"block {number} of a prompt of {len(token_ids)} tokens is not what was stored")

    def save(self, path: Path) -> None:
        """Writes what was filed, for the audit of another process."""
        path.write_bytes(pickle.dumps(self._filed))

    def restore(self, path: Path) -> None:
        """Adds what the audit of another process has saved."""
        for key, contents in pickle.loads(path.read_bytes()).items():
            self._filed.setdefault(key, set()).update(contents)

    def _key(self, blocks: Blocks, token_ids: Sequence[int], number: int) -> bytes:
        end = (number + 1) * blocks.block_tokens
        assert end <= len(token_ids), "a block that is stored or loaded is full"
        return _digest(token_ids[:end])


def _digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.sha256(token_bytes(token_ids)).digest()


def _content(block: torch.Tensor) -> bytes:
    return block.contiguous().view(torch.uint8).numpy().tobytes()
