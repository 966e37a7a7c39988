"""The memory of a simulated resident set: a number for each token and layer of a page, which stands for its KV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcluster.client.sequences.block_table import PageCopy, TokenRun

NEVER_WRITTEN = -1


class ResidentNumbers:
    """Pages of `block_tokens` tokens and `layers` layers."""

    def __init__(self, block_tokens: int, layers: int) -> None:
        self._block_tokens = block_tokens
        self._layers = layers
        self._numbers: dict[tuple[int, int, int], int] = {}  # by page, layer and slot

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

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Copies pages, in this order."""
        for copy in copies:
            for layer in range(self._layers):
                for slot in range(self._block_tokens):
                    number = self._numbers.get((copy.source, layer, slot), NEVER_WRITTEN)
                    self._numbers[copy.target, layer, slot] = number

    def read(self, runs: Iterable[TokenRun]) -> list[int]:
        """Returns the numbers of consecutive tokens, as `page` does."""
        return [self.page(run.entry)[slot] for run in runs for slot in range(run.first, run.first + run.tokens)]

    def page(self, index: int) -> tuple[int, ...]:
        """Returns the numbers of a page; NEVER_WRITTEN for a token whose layers differ."""
        held: list[int] = []
        for slot in range(self._block_tokens):
            layers = dict.fromkeys(
                self._numbers.get((index, layer, slot), NEVER_WRITTEN) for layer in range(self._layers)
            )
            held.append(next(iter(layers)) if len(layers) == 1 else NEVER_WRITTEN)
        return tuple(held)
