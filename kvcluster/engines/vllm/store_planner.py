"""Which blocks of a request are stored after a step, with which loss, and which of these stores still read them.

A block is stored once the step that fills it has run over KV that is known to be good (scheduler.py has the rule); it
has at least the loss of the blocks that it was computed over. The engine's own cache hits do not carry that loss, so
the worst loss of the blocks that were loaded with one is kept by block hash, for the most recently used blocks: a
multiple of the engine's number of blocks. A store is *drained* on a rank that no longer reads the engine's own blocks
for it.

The recurrent state at a boundary is stored by an order of its own. The engine names the block that has it after the
step, and leaves that block as it is until a later step lists it as given to a new owner. A state that the engine's own
cache provided is stored again, since the cluster may have evicted it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import kvcluster.engines.vllm.compat as compat
from kvcluster.core import limits
from kvcluster.core.groups import LAST, PREFIX
from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss
from kvcluster.engines.texts import miss_of
from kvcluster.engines.vllm.request_state import LoadsInFlight, RequestState
from kvcluster.engines.vllm.step_metadata import BlockIds, StoreOrder
from kvcluster.errors import KVClusterError


class LossyBlocks:
    """Keeps at most `limit` blocks, and drops the least recently used ones first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._losses: OrderedDict[BlockHash, Loss] = OrderedDict()

    def add(self, hashes: Iterable[BlockHash], loss: Loss) -> None:
        """Records that these blocks were loaded with that loss. A worse loss recorded earlier stays."""
        for name in hashes:
            self._losses[name] = max(loss, self._losses.pop(name, Loss.EXACT))
        while len(self._losses) > self._limit:
            self._losses.popitem(last=False)

    def worst(self, hashes: Iterable[BlockHash], least: Loss) -> Loss:
        """Returns the worst loss of these blocks, at least `least`. Counts as a use of each block."""
        if not self._losses:
            return least
        for name in hashes:
            if name in self._losses:
                self._losses.move_to_end(name)
                least = max(least, self._losses[name])
        return least

    def clear(self) -> None:
        """Drops all blocks."""
        self._losses.clear()


class StorePlanner:
    """The store orders of one engine of `ranks` ranks and `engine_blocks` blocks."""

    def __init__(self, layout: compat.Layout, in_flight: LoadsInFlight, *, ranks: int, engine_blocks: int) -> None:
        self._layout = layout
        self._in_flight = in_flight
        self._ranks = ranks
        self._keeps_all = all(group.reuse in (PREFIX, LAST) for group in layout.groups)
        self._kv, self._states = layout.kv_groups, layout.state_groups
        self._order = 0
        self._undrained: dict[int, tuple[str, int]] = {}  # by store order: its request, and the ranks that still read
        self.lossy = LossyBlocks(4 * engine_blocks)

    def plan(self, request: RequestState, one: compat.Scheduled) -> StoreOrder | None:
        """Returns the order to store the KV of a request's new blocks after this step; None if there are none."""
        if not self._kv:
            return None
        of_engine, step = request.of_engine, self._layout.block_tokens
        tokens = one.computed + one.tokens
        if self._in_flight.steps:  # this step or an earlier one may run over KV that did not arrive
            tokens = min(compat.validated_tokens(of_engine), one.computed)
            if request.loading is not None or request.has(self._in_flight.in_doubt()):
                return None
        full = min(tokens, of_engine.num_tokens) // step
        full = min(full, limits.BLOCKS_PER_PROMPT, *(len(request.table[group]) for group in self._kv))
        first = request.stored
        if not self._keeps_all:  # blocks that a window has left behind may belong to another request by now
            first = max(first, compat.validated_tokens(of_engine) // step)
        new = request.storable(first, full, self._kv)
        request.stored = max(request.stored, new.stop)
        return self._order_for(request, new, request.blocks(new, self._kv))

    def plan_state(
        self, request: RequestState, one: compat.Scheduled, states: Sequence[tuple[int, int, int]]
    ) -> StoreOrder | None:
        """Returns the order to store the recurrent state of the last boundary that this step reaches, or that the
        request begins at; None if there is none. `states` are those that the engine has after this step
        (compat.boundary_states)."""
        if not self._states or self._in_flight.steps or request.loading is not None:
            return None
        step = self._layout.block_tokens
        reached = [tokens for _, _, tokens in states if one.computed < tokens <= one.computed + one.tokens]
        boundary = max(reached, default=one.computed if one.replaces else 0)
        blocks = boundary // step
        if boundary % step or not request.states_stored < blocks <= limits.BLOCKS_PER_PROMPT:
            return None
        if reached:
            at = {group: block for group, block, tokens in states if tokens == boundary}
        else:
            at = {group: request.table[group][blocks - 1] for group in self._states}
        if any(at.get(group, compat.NULL_BLOCK) == compat.NULL_BLOCK for group in self._states):
            return None
        request.states_stored = blocks
        source = tuple((at[group],) if group in self._states else () for group in range(len(self._layout.groups)))
        return self._order_for(request, range(blocks - 1, blocks), source)

    def _order_for(self, request: RequestState, new: range, source: BlockIds) -> StoreOrder | None:
        """Returns a new order for these blocks of a request's chain; None for no blocks."""
        if not new:
            return None
        of_engine = request.of_engine
        try:  # if the namespace is not known at once, nothing is stored
            request.grow(new.stop)
        except KVClusterError as error:
            request.private, request.miss = True, miss_of(error)
            return None
        self._order += 1
        self._undrained[self._order] = (of_engine.request_id, self._ranks)
        request.orders.add(self._order)
        return StoreOrder(
            number=self._order,
            request=of_engine.request_id,
            adapter=request.adapter,
            first=new.start,
            source=source,
            loss=self._loss(request, new.start),
            tokens=request.tokens(new),
        )

    def _loss(self, request: RequestState, first: int) -> Loss:
        """Returns the loss of KV computed over a request's prefix, parts of which the engine's own cache may
        provide."""
        before = request.chain[: max(first, request.local_tokens // self._layout.block_tokens)]
        request.loss = self.lossy.worst(before, request.loss)
        return request.loss

    def drain(self, number: int, ranks: int) -> str | None:
        """Records that so many more ranks no longer read for that order. Returns its request once none does."""
        if number not in self._undrained:
            return None
        request, left = self._undrained[number]
        if left > ranks:
            self._undrained[number] = request, left - ranks
            return None
        del self._undrained[number]
        return request
