"""The progress of a load: for every block and every layer, what has not come. There is no other count of it.

Readers of several shards write here at once, each when bytes lie verified in the caller's memory and never before. The
load's plan (load_plan.py) and callers that wait for a layer read it. Counts fall to zero exactly when everything has
come: a piece that is replaced by others counts until those have come, and is replaced only while no reader owns it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from kvcluster.client.pieces import Piece, Pieces, each, layer_counts
from kvcluster.client.results import Loaded
from kvcluster.core.messages import TicketBody
from kvcluster.core.miss import Loss, Miss
from kvcluster.core.spec import KVSpec


class LoadProgress:
    """Of one load. Thread-safe. It stays as it is once every exchange of the load has been stopped."""

    def __init__(self, body: TicketBody, spec: KVSpec, pieces: Pieces, first: int = 0) -> None:
        self._spec = spec
        self._first = first  # the blocks before it are whole without this load
        self._lock = threading.Lock()  # held for counting only, never while bytes move
        self._nbytes = 0
        self._loss = body.loss
        self._why: dict[int, Miss] = {}  # by block, the first thing that went wrong
        self._layers = layer_counts(each(pieces), spec)  # model layer -> pieces that have not arrived
        self._left = [0] * len(body.hashes)  # by block, layers of pieces that have not come
        for piece in each(pieces):
            self._left[piece.block] += piece.layers
        # A block that fails in a group that is needed only at the end leaves no boundary that is known to be good.
        needed = [group for group, part in enumerate(body.need.parts) if part is not None]
        self._whole_prefix = all(spec.groups[group].reuse.kind == "prefix" for group in needed)

    def layer_left(self, layer: int) -> int:
        """Pieces of this model layer that have not come."""
        return self._layers.get(layer, 0)

    def came(self, block: int, layers: Sequence[int], nbytes: int) -> bool:
        """These model layers of a piece of that block are in place. True where one of them is whole by that."""
        left = self._layers
        whole = False
        with self._lock:
            self._left[block] -= len(layers)
            self._nbytes += nbytes
            for layer in layers:
                left[layer] -= 1
                whole = whole or not left[layer]
        return whole

    @property
    def loss(self) -> Loss:
        """The worst that anything which comes may have lost: records do not say it, so that more is not to be taken."""
        with self._lock:
            return self._loss

    def expect_loss(self, loss: Loss) -> None:
        """Something of that loss is to come too."""
        with self._lock:
            self._loss = max(self._loss, loss)

    def replace(self, rest: Piece, others: Iterable[Piece]) -> None:
        """These stand for `rest` from now on, which will not come: no exchange owns it any more."""
        others = list(others)
        with self._lock:
            self._left[rest.block] += sum(piece.layers for piece in others) - rest.layers
            for layer, count in layer_counts(others, self._spec).items():
                self._layers[layer] += count - 1  # one is `rest` itself

    def failed(self, block: int, why: Miss) -> None:
        """Something went wrong with that block. What went wrong first is told, unless it comes after all."""
        with self._lock:
            self._why.setdefault(block, why)

    def loaded(self, otherwise: Miss) -> Loaded:
        """The outcome as it stands. `otherwise` is why a block has not come of which nothing else is known."""
        with self._lock:
            failed = {block: self._why.get(block, otherwise) for block, left in enumerate(self._left) if left}
            if not failed:
                return Loaded(len(self._left), self._nbytes, loss=self._loss)
            first = min(failed)
            return Loaded(first if self._whole_prefix else self._first, self._nbytes, failed[first], failed, self._loss)
