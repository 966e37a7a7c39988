"""The memory that a load fills, as the oracle sees it: which exchange writes each place, and whether it holds the
correct bytes.

A place is one head of one layer of one block. The promises of a load are judged here: a place has one owner at a time,
is written by its owner alone and never after the outcome was reported, and everything that is reported as loaded is
correct.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec
from kvcluster.transfers.load_progress import LoadProgress
from kvcluster.transfers.pieces import Piece
from kvcluster.transfers.transfer import Loaded
from tests.sim.violation import require

Place = tuple[int, int, int, int]
"""Block, group, layer of the group, head."""


class Destination:
    """The destination of one load. Exchanges are named by their numbers."""

    def __init__(self, spec: KVSpec, pieces: Iterable[Piece], progress: LoadProgress) -> None:
        self._spec = spec
        self._progress = progress
        self._right: dict[Place, bool] = {}
        self._owners: dict[Place, int] = {}
        self._told = False
        self._loss = Loss.EXACT
        for place in _all_places(pieces):
            require(place not in self._right, "two pieces of one load fill the same place")
            self._right[place] = False

    def take(self, exchange: int, pieces: Iterable[Piece]) -> None:
        """Makes an exchange the owner of these pieces' places."""
        for place in _all_places(pieces):
            require(place not in self._owners, "memory is given to an exchange while another may write it")
            self._owners[place] = exchange

    def give_back(self, exchange: int, pieces: Iterable[Piece]) -> None:
        """Ends the exchange's ownership of these pieces' places."""
        for place in _all_places(pieces):
            if self._owners.get(place) == exchange:
                del self._owners[place]

    def write(self, exchange: int, piece: Piece, layer: int, *, right: bool) -> None:
        """Records that one layer of a piece, counted as its want counts them, was written."""
        require(not self._told, "memory is written after the outcome of the load was reported")
        for place in places(piece, layer, layer + 1):
            require(self._owners.get(place) == exchange, "memory is written by an exchange that does not own it")
            self._right[place] = right

    def came(self, loss: Loss) -> None:
        """Records that data with this loss was accepted."""
        self._loss = max(self._loss, loss)

    def check_layers(self, layers: Iterable[int]) -> None:
        """Checks that a layer with nothing left to come is correct in every block."""
        for layer in layers:
            if self._progress.layer_left(layer) == 0:
                require(
                    all(self._right[place] for place in self._of_layer(layer)),
                    "a layer is reported too early",
                )

    def tell(self, loaded: Loaded) -> None:
        """Judges the outcome of the load."""
        require(not self._owners, "the outcome of a load is reported while an exchange may write")
        self._told = True
        require(self._loss <= loaded.loss, f"a load reports loss {loaded.loss.name} for data of loss {self._loss.name}")
        wrong = {place[0] for place, right in self._right.items() if not right}
        require(wrong <= loaded.failed.keys(), "a block is reported as loaded that was not")
        if loaded.miss is None:
            require(not wrong, "a load is reported as complete that is not")
        whole_prefix = all(group.reuse.kind == "prefix" for group in self._spec.groups)
        if whole_prefix:
            require(
                all(block >= loaded.blocks for block in wrong), "blocks are reported as loaded that are not correct"
            )

    def _of_layer(self, layer: int) -> Iterator[Place]:
        return (place for place in self._right if self._spec.groups[place[1]].layers[place[2]] == layer)


def _all_places(pieces: Iterable[Piece]) -> Iterator[Place]:
    for piece in pieces:
        yield from places(piece, piece.want.layer_start, piece.want.layer_stop)


def places(piece: Piece, layer_start: int, layer_stop: int) -> Iterator[Place]:
    """Yields the places that these layers of a piece fill, counted as its want counts them."""
    rect, fills = piece.rect_of(layer_start, layer_stop), piece.fills
    for layer in range(rect.layer_start, rect.layer_stop):
        for head in range(fills.head_start, fills.head_stop):
            yield piece.block, piece.group, layer, head
