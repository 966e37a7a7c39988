"""Tensors of an engine in the memory of a twin."""

from __future__ import annotations

from typing import Any

import torch

from kvcluster.device.software_twin import Twin
from kvcluster.memory.region import bytes_at
from tests.device.programs import finish


class Engine:
    """An engine whose caches lie in the memory of a twin. Its work goes on the current stream, and it never waits."""

    def __init__(self, twin: Twin, dtype: torch.dtype = torch.bfloat16) -> None:
        self.twin = twin
        self._dtype = dtype
        self._whole: list[tuple[torch.Tensor, Any]] = []

    def tensor(self, *shape: int) -> torch.Tensor:
        """A new tensor, whose memory is garbage."""
        memory = self.twin.allocate(self._dtype.itemsize * torch.Size(shape).numel())
        tensor = torch.frombuffer(bytes_at(*memory.range), dtype=self._dtype).view(shape)
        self._whole.append((tensor, memory))
        return tensor

    def write(self, tensor: torch.Tensor, content: torch.Tensor) -> None:
        """Enqueues a write of all of a tensor, as a forward pass would."""
        memory = next(memory for each, memory in self._whole if each is tensor)
        pinned = self.twin.pin(memory.range.nbytes)
        with pinned.opened(0, memory.range.nbytes, writes=True) as view:
            view[:] = content.contiguous().view(torch.uint8).numpy().tobytes()
        self.twin.copy(memory.range, pinned.range, self.twin.current())

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the engine reads there, behind all that it has enqueued."""
        memory = next(memory for each, memory in self._whole if each is tensor)
        pinned, stream = self.twin.pin(memory.range.nbytes), self.twin.current()
        self.twin.copy(pinned.range, memory.range, stream)
        finish(self.twin, self.twin.record(stream))
        with pinned.opened(0, memory.range.nbytes, writes=False) as view:
            return torch.frombuffer(bytearray(view), dtype=self._dtype).view(tensor.shape)
