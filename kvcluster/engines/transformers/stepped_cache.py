"""A transformers cache that computes attention itself: what it has to keep track of, whatever holds the KV.

In one forward pass each layer first hands over its new keys and values (`update`), which it gets back as they are, and
then has its queries attended to (`attend`); when the pass is over, the tokens count (`end_step`). A layer that leaves
out either, or changes the keys in between, would compute from KV that is not there: it is refused.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from kvcluster.engines.transformers.attention_interface import LayerScores, MaskRule
from kvcluster.engines.transformers.compat import windows
from kvcluster.errors import CallerError


class SteppedLayer(CacheLayerMixin):
    """A layer of a SteppedCache. It holds no tensors."""

    supports_early_init = False

    def __init__(self, cache: SteppedCache, layer: int, *, is_sliding: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_sliding = is_sliding
        self.is_initialized = True
        self._cache = cache
        self._layer = layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: there are no tensors to make."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._cache.appended(self._layer, key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.columns

    def get_max_length(self) -> int:
        return -1


class SteppedCache(Cache):
    """See the module. `columns` is the number of columns, padding included, that have been computed; `step` that of the
    present step."""

    def __init__(self, model: PreTrainedModel) -> None:
        kinds = windows(model)
        super().__init__(layers=[SteppedLayer(self, at, is_sliding=kind is not None) for at, kind in enumerate(kinds)])
        self.columns = 0
        self._model = type(model).__name__
        self.step = 0
        self._key: tuple[int, Tensor] | None = None  # of the layer that has appended and not attended
        self._attended: dict[int, None] = {}

    @abstractmethod
    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Appends the KV of one layer for the columns of this step: `[rows, kv_heads, columns, head_dim]` each."""

    @abstractmethod
    def compute(self, layer: int, query: Tensor, rule: MaskRule, scores: LayerScores) -> Tensor:
        """As `attend`, for this layer."""

    @abstractmethod
    def count(self, columns: int, input_ids: Tensor | None) -> None:
        """The last `columns` columns, with these ids, are complete in every layer."""

    # --------------------------------------------------------------------------------- called by the model

    def appended(self, layer: int, key: Tensor, value: Tensor) -> None:
        """A layer has computed new KV."""
        if self._key is not None:
            raise self._refusal(f"layer {self._key[0]} does not attend through transformers' AttentionInterface")
        self.step = self.step or key.shape[2]
        if key.shape[2] != self.step:
            raise self._refusal(f"layer {layer} has {key.shape[2]} columns in a step of {self.step}")
        self.append(layer, key, value)
        self._key = layer, key

    def attend(self, query: Tensor, key: Tensor, rule: MaskRule, scores: LayerScores) -> Tensor:
        """See AttendingCache."""
        if self._key is None or self._key[1] is not key:
            raise self._refusal("a layer attends to keys that it did not give to the cache, or not as it gave them")
        layer = self._key[0]
        if query.shape[2] != self.step:
            raise self._refusal(f"layer {layer} has {query.shape[2]} queries for {self.step} keys")
        self._key = None
        self._attended[layer] = None
        return self.compute(layer, query, rule, scores)

    def end_step(self, input_ids: Tensor | None) -> None:
        """See AttendingCache."""
        if not self.step:
            return
        left = [layer for layer in range(len(self.layers)) if layer not in self._attended]
        if left:
            raise self._refusal(f"layer {left[0]} does not attend through transformers' AttentionInterface")
        self.count(self.step, input_ids)
        self.columns += self.step
        self.step = 0
        self._attended.clear()

    def drop_step(self) -> None:
        """Forgets a step that has not ended."""
        self.step, self._key = 0, None
        self._attended.clear()

    def _refusal(self, why: str) -> CallerError:
        return CallerError(f"{self._model} cannot generate over sequences: {why}")


def as_rows(tensor: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns `[tokens, heads, dim]` in CPU memory from `[rows, heads, columns, dim]`: of row i its last `counts[i]`
    columns, row after row."""
    import torch

    columns, by_token = tensor.shape[2], tensor.detach().transpose(1, 2)
    if all(count == columns for count in counts):
        return by_token.reshape(-1, *by_token.shape[2:]).cpu()
    return torch.cat([row[columns - count :] for row, count in zip(by_token, counts, strict=True)]).cpu()
