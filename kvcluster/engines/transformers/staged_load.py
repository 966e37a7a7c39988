"""Loads blocks for a model on a device through buffers in host memory: each chunk of blocks arrives, verified, in a
buffer, is copied to the device as it is, and is distributed there over the layers of the cache.

A cache of many GiB is not allocated in host memory a second time: allocating and touching it for the first time would
take longer than loading. The buffers are two, so that a chunk arrives while the one before is copied. For CUDA they are
pinned, and torch keeps their memory for the next load of this process.

A buffer is loaded into again only after its copy to the device has ended. The copies and what distributes them are
queued on the caller's current stream, and have ended when the load returns: a model may run on any stream.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch

from kvcluster.client.client import Client
from kvcluster.transfers.deadlines import remaining_ms
from kvcluster.transfers.tickets import Ticket
from kvcluster.transfers.transfer import Loaded
from kvcluster.transport.base import Deadline

BUFFER_BYTES = 256 * 2**20
"""Of each of two buffers. A load of 32 MiB takes twice as long for each byte as one of 256 MiB."""

Place = Callable[[int, torch.Tensor], None]
"""Gets the number of the first block of a chunk, and the chunk on the device, `[blocks, layers, planes, block_tokens,
kv_heads, head_dim]`."""


class _PinnedChunk:
    """A chunk in host memory, and the end of its copy to the device."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._device = device
        self.host = torch.empty(shape, dtype=dtype, pin_memory=on_cuda)
        self._copied = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]

    def to_device(self, blocks: int) -> torch.Tensor:
        """Queues the copy of the leading blocks and returns them on the device."""
        blocks_here = self.host[:blocks]
        if self._copied is None:
            return blocks_here.to(self._device, copy=True)
        with torch.cuda.device(self._device):  # the event belongs to the stream of this device
            copy = blocks_here.to(self._device, non_blocking=True, copy=True)
            self._copied.record()
        return copy

    def wait(self) -> None:
        """Waits until the buffer may be written again."""
        if self._copied is not None:
            self._copied.synchronize()


def load_staged(client: Client, ticket: Ticket, device: torch.device, place: Place, deadline: Deadline) -> Loaded:
    """Loads the blocks of a ticket of `client`, and calls `place` with each chunk in order. Returns the outcome of all
    chunks together when the device has them: its `blocks` have been placed, and `miss` is the reason why no more.

    The client's spec has one group of planes of one shape. What fails in the cluster is a miss; what `place` raises is
    raised.
    """
    spec, blocks = client.spec, ticket.blocks
    (group,) = spec.groups
    plane = group.planes[0]
    step = max(1, BUFFER_BYTES // spec.page_bytes(0, spec.whole(0)))
    shape = (min(step, blocks), len(group.layers), len(group.planes), spec.block_tokens, group.heads, plane.dim)
    buffers = [_PinnedChunk(shape, getattr(torch, plane.dtype), device) for _ in range(2 if step < blocks else 1)]
    total = Loaded(0, 0)
    for number, first in enumerate(range(0, blocks, step)):
        buffer, stop = buffers[number % len(buffers)], min(first + step, blocks)
        buffer.wait()
        chunk = _load_chunk(client, ticket, first, stop, buffer, deadline)
        total = Loaded(
            max(first, chunk.blocks), total.nbytes + chunk.nbytes, chunk.miss, loss=max(total.loss, chunk.loss)
        )
        if total.blocks > first:
            place(first, buffer.to_device(total.blocks - first))
        if total.blocks < stop:
            break
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return total


def _load_chunk(
    client: Client, ticket: Ticket, first: int, stop: int, buffer: _PinnedChunk, deadline: Deadline
) -> Loaded:
    """Loads the blocks from `first` up to `stop` into the buffer."""
    with ExitStack() as parts:
        part = ticket
        if stop < ticket.blocks:
            chain = ticket.hashes[:stop]
            part = parts.enter_context(client.prepare_load(chain, again=True, deadline_ms=remaining_ms(deadline)))
        if part.blocks <= first:
            return Loaded(first, 0, part.miss)
        into = buffer.host[: part.blocks - first]
        loaded = client.begin_load(part, into, first=first, deadline_ms=remaining_ms(deadline)).result()
    return loaded if part is ticket else replace(loaded, miss=loaded.miss or part.miss)
