"""Faults that are planted in the connector, one at a time, to show that the suite would see them.

Each does its harm behind the checksums: what arrives is right, and then is not where it belongs, or what is stored was
right and is not any more. `planted("")` plants nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from kvcluster.core.groups import LAST
from kvcluster.engines.vllm import worker
from kvcluster.engines.vllm.step_metadata import LoadOrder, StoreOrder
from tests.vllm.e2e import mutants_names as names

Harm = Callable[[list[list[torch.Tensor]], list[list[torch.Tensor]], LoadOrder], None]


def _planes(views: list[tuple[torch.Tensor, ...] | torch.Tensor]) -> list[torch.Tensor]:
    """The planes of all layers of a group, layer by layer."""
    return [plane for view in views for plane in (view if isinstance(view, tuple) else (view,))]


def _per_layer(views: list[tuple[torch.Tensor, ...] | torch.Tensor]) -> int:
    return len(views[0]) if isinstance(views[0], tuple) else 1


def _blocks(side: Any, order: LoadOrder) -> list[list[torch.Tensor]]:
    """By group and plane, the blocks of a load: views `[blocks, ...]` of the engine's memory, gathered as copies."""
    return [
        [plane[list(blocks)].clone() for plane in _planes(views)]
        for views, blocks in zip(side._layers, order.into, strict=True)
    ]


def _put(side: Any, order: LoadOrder, content: list[list[torch.Tensor]], only: Callable[[int, int], bool]) -> None:
    """Writes `content` back where `only(layer, block)` says so."""
    layer = 0
    for views, blocks, tensors in zip(side._layers, order.into, content, strict=True):
        for number, (plane, tensor) in enumerate(zip(_planes(views), tensors, strict=True)):
            for at, block in enumerate(blocks):
                if only(layer + number // _per_layer(views), at):
                    plane[block] = tensor[at]
        layer += len(views)


def _skip_load(side: Any, order: LoadOrder, before: list[list[torch.Tensor]]) -> None:
    _put(side, order, before, lambda layer, block: True)


def _skip_last_block(side: Any, order: LoadOrder, before: list[list[torch.Tensor]]) -> None:
    last = len(order.into[0]) - 1
    _put(side, order, before, lambda layer, block: block == last)


def _skip_layer(side: Any, order: LoadOrder, before: list[list[torch.Tensor]]) -> None:
    _put(side, order, before, lambda layer, block: layer == 1)


def _swap_blocks(side: Any, order: LoadOrder, before: list[list[torch.Tensor]]) -> None:
    for views, blocks in zip(side._layers, order.into, strict=True):
        for plane in _planes(views):
            last, other = blocks[-1], blocks[-2] if len(blocks) > 1 else blocks[-1]
            kept = plane[last].clone()
            plane[last] = plane[other]
            plane[other] = kept


def _change_element(side: Any, order: LoadOrder, before: list[list[torch.Tensor]]) -> None:
    element = side._layers[0][0][0][order.into[0][-1]][0, 0, 0]
    if element.element_size() == 1:  # fp8, in which torch does not add
        element.view(torch.uint8).bitwise_xor_(1)
    else:
        element += 1e-3


def _state_groups(side: Any) -> list[int]:
    return [number for number, group in enumerate(side._layout.groups) if group.reuse == LAST]


def _skip_states(side: Any, order: LoadOrder, before: list[list[torch.Tensor]]) -> None:
    for group in _state_groups(side):
        for plane, tensor in zip(_planes(side._layers[group]), before[group], strict=True):
            plane[order.into[group][-1]] = tensor[-1]


def _other_boundary(side: Any, order: LoadOrder, before: list[list[torch.Tensor]]) -> None:
    """The state of another boundary, of the load before this one."""
    for group in _state_groups(side):
        for layer, plane in enumerate(_planes(side._layers[group])):
            right = plane[order.into[group][-1]].clone()
            plane[order.into[group][-1]] = _EARLIER.get((group, layer), torch.zeros_like(right))
            _EARLIER[group, layer] = right


_EARLIER: dict[tuple[int, int], torch.Tensor] = {}
_HARMS: dict[str, Harm] = {"states skipped": _skip_states, "state of another boundary": _other_boundary}
_HARMS |= dict(
    zip(names.LOADS, (_skip_load, _skip_last_block, _skip_layer, _swap_blocks, _change_element), strict=True)
)


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Within it the connector of this process has that fault."""
    if not name:
        yield
        return
    side = worker.WorkerSide
    kept = {method: getattr(side, method) for method in ("_begin_load", "_end_load", "_begin_store", "before")}
    if name in _HARMS:
        _plant_load(side, _HARMS[name])
    else:
        assert name in names.STORES, name
        _plant_store(side)
    try:
        yield
    finally:
        for method, function in kept.items():
            setattr(side, method, function)


_PLANTED: list[ExitStack] = []
"""For good, in this process."""


def plant_at(worker: Any, rank: int, name: str) -> None:
    """Called in the process of each of vLLM's workers: plants the fault in that of this rank, until it ends."""
    if worker.rank == rank:
        stack = ExitStack()
        stack.enter_context(planted(name))
        _PLANTED.append(stack)


def _plant_load(side: Any, harm: Callable[..., None]) -> None:
    begin, end = side._begin_load, side._end_load
    contents: dict[str, Any] = {}

    def begin_load(self: Any, order: LoadOrder) -> Any:
        contents[order.request] = _blocks(self, order)
        begun = begin(self, order)
        if order.layerwise and begun[0] is not None:  # the pass reads it as soon as it is there
            begun[0].result()
            harm(self, order, contents[order.request])
        return begun

    def end_load(self: Any, load: Any) -> None:
        if not load.order.layerwise and load.transfer is not None:
            load.transfer.result()
            harm(self, load.order, contents[load.order.request])
        end(self, load)

    side._begin_load, side._end_load = begin_load, end_load


def _plant_store(side: Any) -> None:
    """Stores begin some steps late, without a check of who owns their blocks by then."""
    begin = side._begin_store
    waiting: list[StoreOrder] = []

    def begin_store(self: Any, order: StoreOrder) -> None:
        self._report.drained[order.number] += 1
        waiting.append(order)
        if len(waiting) > 12:
            late = waiting.pop(0)
            if late.request in self._chains:
                begin(self, late)

    def before(self: Any, step: Any) -> None:
        for name, first, hashes in step.chains:
            self._chains.setdefault(name, [])[first:] = hashes
        self._held.update(dict.fromkeys(step.held, 0))  # given back at once, or the engine would wait for ever

    side._begin_store, side.before = begin_store, before
