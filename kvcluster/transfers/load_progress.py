"""The progress of a load: for every block and every layer, what has not arrived. Nothing else counts that.

Readers of several shards write here at once, each only after bytes lie verified in the caller's memory. The load's plan
(load_plan.py) and callers that wait for a layer read it. Counts fall to zero exactly when everything has arrived: a
piece that is replaced by others counts until those have arrived, and is replaced only while no reader owns it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvcluster.core.messages import ShardAddress, TicketBody
from kvcluster.core.miss import Loss, Miss
from kvcluster.core.spec import KVSpec
from kvcluster.transfers.pieces import Piece, PieceList, layer_counts
from kvcluster.transfers.transfer import Loaded


class LoadProgress:
    """The progress of one load. Thread-safe. It no longer changes once every exchange of the load has been stopped."""

    def __init__(
        self, body: TicketBody, spec: KVSpec, pieces: Mapping[ShardAddress, Sequence[Piece]], first: int = 0
    ) -> None:
        self.body = body
        self.spec = spec
        self._first = first  # the caller already has the blocks before it
        self._lock = threading.Lock()  # held for counting only, never while bytes move
        self._nbytes = 0
        self._loss = body.loss
        self._why: dict[int, Miss] = {}  # by block, the first thing that went wrong
        columns = [PieceList.of(of_shard) for of_shard in pieces.values()]
        self._layers: Counter[int] = Counter()  # model layer -> pieces that have not arrived
        self._left = [0] * len(body.hashes)  # by block, layers of pieces that have not arrived
        for of_shard in columns:
            self._layers.update(layer_counts(of_shard, spec))
            layers = of_shard.column([stop - start for _, _, start, stop in of_shard.wants.kinds])
            for block, count in zip(of_shard.blocks, layers, strict=True):
                self._left[block] += count
        # If a group needs only the last blocks, a failed block leaves no shorter prefix that is known to be usable.
        needed = [group for group, part in enumerate(body.need.parts) if part is not None]
        self._whole_prefix = all(spec.groups[group].reuse.kind == "prefix" for group in needed)

    def layer_left(self, layer: int) -> int:
        """Returns the number of pieces of this model layer that have not arrived."""
        return self._layers.get(layer, 0)

    def arrived(self, layers_of: Mapping[tuple[int, ...], Sequence[int]], nbytes: int) -> bool:
        """Records that pieces of these blocks, by their model layers, are in place: `nbytes` in all. True if that
        completes a layer."""
        left, whole = self._layers, False
        with self._lock:
            self._nbytes += nbytes
            for layers, blocks in layers_of.items():
                for block in blocks:
                    self._left[block] -= len(layers)
                for layer in layers:
                    left[layer] -= len(blocks)
                    whole = whole or not left[layer]
        return whole

    @property
    def loss(self) -> Loss:
        """The worst loss that any arriving piece may have. Records do not state their loss, so no worse loss may be
        accepted."""
        with self._lock:
            return self._loss

    def expect_loss(self, loss: Loss) -> None:
        """Records that a piece with this loss will be read too."""
        with self._lock:
            self._loss = max(self._loss, loss)

    def replace(self, rest: Piece, others: Iterable[Piece]) -> None:
        """Replaces `rest`, which will not arrive and which no exchange owns any more, by `others`."""
        others = list(others)
        with self._lock:
            self._left[rest.block] += sum(piece.layers for piece in others) - rest.layers
            for layer, count in layer_counts(PieceList.of(others), self.spec).items():
                self._layers[layer] += count - 1  # one is `rest` itself

    def failed(self, block: int, why: Miss) -> None:
        """Records why `block` failed. The first reason is reported, unless the block arrives after all."""
        with self._lock:
            self._why.setdefault(block, why)

    def loaded(self, otherwise: Miss) -> Loaded:
        """Returns the outcome so far. `otherwise` is the reason of missing blocks without a recorded failure."""
        with self._lock:
            failed = {block: self._why.get(block, otherwise) for block, left in enumerate(self._left) if left}
            if not failed:
                return Loaded(len(self._left), self._nbytes, loss=self._loss)
            first = min(failed)
            return Loaded(first if self._whole_prefix else self._first, self._nbytes, failed[first], failed, self._loss)
