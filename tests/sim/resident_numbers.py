"""The memory of a simulated resident set: a number for each token and layer of a page, which stands for its KV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcluster.sequences.block_table import CodedPage, PageCopy, TokenRun, coded_page
from kvcluster.sequences.resident_window import Encoding

NEVER_WRITTEN = -1


class ResidentNumbers:
    """Pages of `block_tokens` tokens and `layers` layers."""

    def __init__(self, block_tokens: int, layers: int) -> None:
        self._block_tokens = block_tokens
        self._layers = layers
        self._numbers: dict[tuple[int, int, int], int] = {}  # by page, layer and slot
        self._coded: dict[CodedPage, tuple[int, ...]] = {}

    def write(self, layer: int, runs: Iterable[TokenRun], values: Iterable[int]) -> None:
        """Writes consecutive tokens of one layer to where they lie."""
        numbers = iter(values)
        for run in runs:
            for slot in range(run.first, run.first + run.tokens):
                self._numbers[run.entry, layer, slot] = next(numbers)

    def fill(self, page_index: int, values: Sequence[int]) -> None:
        """Writes the tokens of a block to all layers of a page, as a load does."""
        for layer in range(self._layers):
            self.write(layer, [TokenRun(page_index, 0, len(values))], values)

    def encode(self, encoding: Encoding) -> bool:
        """Encodes a page, without loss."""
        self._coded[encoding.into] = self.page(encoding.page)
        return True

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Copies pages, in this order."""
        for copy in copies:
            self.fill(copy.target, self.page(copy.source))

    def read(self, runs: Iterable[TokenRun]) -> list[int]:
        """Returns the numbers of consecutive tokens, as `page` does."""
        return [self.page(run.entry)[slot] for run in runs for slot in range(run.first, run.first + run.tokens)]

    def page(self, entry: int) -> tuple[int, ...]:
        """Returns the numbers of the page of an entry of a block table; NEVER_WRITTEN for a token whose layers
        differ."""
        coded = coded_page(entry)
        if coded is not None:
            return self._coded[coded]
        held: list[int] = []
        for slot in range(self._block_tokens):
            layers = dict.fromkeys(
                self._numbers.get((entry, layer, slot), NEVER_WRITTEN) for layer in range(self._layers)
            )
            held.append(next(iter(layers)) if len(layers) == 1 else NEVER_WRITTEN)
        return tuple(held)
