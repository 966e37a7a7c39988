"""Pages that one codec encodes and decodes, one page at a time; every error and speed of a codec is measured here."""

from __future__ import annotations

import torch

from benchmarks.transfer.worker import warm_memory
from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.groups import Group
from kvcluster.memory import codec


class CodedPages:
    """`raw` are the bytes of whole pages of a group, and `coded` has room for the same pages encoded."""

    def __init__(self, which: Codec, group: Group, block_tokens: int, raw: memoryview) -> None:
        self._layers = len(group.layers)
        self._raw_bytes = self._layers * group.layer_bytes(block_tokens=block_tokens, heads=group.heads)
        self._coder = codec.coder(which, group, block_tokens=block_tokens, heads=group.heads)
        self.page_bytes = self._layers * layer_bytes(which, group, block_tokens=block_tokens, heads=group.heads)
        self.raw = raw
        self.coded = warm_memory(raw.nbytes // self._raw_bytes * self.page_bytes)

    def encode(self) -> None:
        for raw, coded in zip(_pages(self.raw, self._raw_bytes), self.coded_pages(), strict=True):
            assert self._coder.encode(raw, coded, self._layers), "these numbers are finite and moderate"

    def decode(self, into: memoryview) -> None:
        for raw, coded in zip(_pages(into, self._raw_bytes), self.coded_pages(), strict=True):
            self._coder.decode(coded, raw, self._layers)

    def coded_pages(self) -> list[memoryview]:
        """Returns the encoded pages."""
        return _pages(self.coded, self.page_bytes)


def _pages(memory: memoryview, page_bytes: int) -> list[memoryview]:
    return [memory[at : at + page_bytes] for at in range(0, memory.nbytes, page_bytes)]


def round_trip(which: Codec, group: Group, pages: torch.Tensor) -> torch.Tensor:
    """Returns whole pages, layers of `[planes, block_tokens, heads, dim]` of the planes' dtype, encoded and decoded."""
    raw = memoryview(bytearray(pages.contiguous().view(torch.uint8).flatten().numpy().tobytes()))
    coded = CodedPages(which, group, pages.shape[-3], raw)
    coded.encode()
    coded.decode(raw)
    return torch.frombuffer(raw, dtype=pages.dtype).view(pages.shape)
