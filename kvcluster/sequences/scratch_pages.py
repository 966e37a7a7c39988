"""Scratch pages: pages of the resident set that hold single layers of absent blocks while one call of attention streams
them (streamed_attention.py). A raw page of `layers` layers has as many slots, each for one layer of one block.

Attention reads a page at the address of its first layer plus that of the layer it computes. So a slot is named by the
address where a whole page would begin whose layer it is; nothing lies there but that layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcluster.sequences.blocks import PageNumber
from kvcluster.sequences.resident_memory import ResidentMemory
from kvcluster.transfers.layouts import Paged


class ScratchPages:
    """The slots of these raw pages, which hold no block. They are numbered from 0; the first half and the second half
    are two buffers, so that one can be loaded while the other is read."""

    def __init__(self, memory: ResidentMemory, pages: Sequence[PageNumber]) -> None:
        self.pages = pages
        self._memory = memory
        self._layers = memory.layers
        self._layer_bytes = memory.address(1) - memory.address(0)
        self._layer_bytes //= self._layers

    @property
    def buffer_slots(self) -> int:
        """The number of slots of each buffer."""
        return len(self.pages) * self._layers // 2

    def addresses(self, buffer: int, slots: int, layer: int) -> list[int]:
        """Returns the addresses of the first `slots` slots of a buffer, as pages of which only `layer` counts."""
        first = buffer * self.buffer_slots
        return [
            self._memory.address(self.pages[slot // self._layers]) + (slot % self._layers - layer) * self._layer_bytes
            for slot in range(first, first + slots)
        ]

    def paged(self, buffer: int, first: int, slots: int) -> Paged:
        """Returns `slots` slots of a buffer, from its slot `first` on, as the blocks of a paged cache of one layer."""
        start = buffer * self.buffer_slots + first
        numbers = [
            self.pages[slot // self._layers] * self._layers + slot % self._layers
            for slot in range(start, start + slots)
        ]
        return self._memory.paged_layers(numbers)
