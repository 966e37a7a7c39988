"""The paged KV cache of transformers' continuous batching, as an integration needs it. All that differs between
versions of transformers is in this file.

transformers has no plug-in interface for its paged cache. `hooked` replaces the class of the cache, for as long as its
`with` block runs, by a subclass that calls `Hooks` at four moments: a request looks for its prefix, a pass has
completed blocks, a request gives its blocks up, and blocks are handed out to be written. It also has the scheduler ask
which waiting requests may run, and whether hooks can give blocks back before requests lose theirs.

`Blocks` is the cache's bookkeeping in plain words. A block is in one of four states: free; in a request's table; cached
(complete, with a hash, in no table); or taken, which is ours: handed out, but in no table yet. Taken blocks end as
cached ones (`keep`) or as free ones (`give_back`).

Only models whose layers all have full attention, in one process, without forks of requests and without asynchronous
batching are served: `state.position_offset` is then the number of tokens whose KV has been written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from unittest.mock import patch

import torch
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.scheduler import Scheduler

Layer = torch.Tensor | tuple[torch.Tensor, ...]
"""One layer of all blocks, as kvcluster.Paged takes it."""


class Hooks(Protocol):
    """What is called by the engine's own thread, between two passes."""

    def opened(self, blocks: Blocks) -> None:
        """An engine has made its cache."""

    def ready(self, waiting: Sequence[tuple[str, list[int]]], idle: bool) -> list[str]:
        """Returns which of the waiting requests, given in order with their prompts, may be scheduled now. `idle`: no
        request runs."""

    def pressed(self) -> bool:
        """A request cannot go on for want of blocks. Returns whether some have been given back."""

    def arriving(self, request_id: str, prompt_ids: list[int]) -> None:
        """The engine is about to look for a prompt's prefix among its own blocks."""

    def matched(self, request_id: str, tokens: int) -> None:
        """The engine has found that many leading tokens of the request among its own blocks."""

    def completed(self, request_id: str, token_ids: list[int], written_tokens: int) -> None:
        """A pass has written KV: the request's blocks now hold that of its first `written_tokens` tokens."""

    def freed(self, request_id: str) -> None:
        """The request's table is about to be dropped."""

    def reused(self, block_ids: Sequence[int]) -> None:
        """These blocks have been handed out, and will be written by the next pass or load."""


class Blocks(ABC):
    """The blocks of one engine's cache. Its methods are called by the engine's thread alone."""

    block_tokens: int
    layers: list[Layer]

    @abstractmethod
    def table(self, request_id: str) -> list[int]:
        """Returns the ids of a request's blocks; [] if it has none."""

    @abstractmethod
    def room(self, spared: Sequence[int] = ()) -> int:
        """Returns how many blocks `take` can hand out, none of them in `spared`."""

    @abstractmethod
    def take(self, count: int, spared: Sequence[int]) -> list[int]:
        """Hands out blocks that are in no table, none of them one of the cached ones in `spared`."""

    @abstractmethod
    def give_back(self, block_ids: Sequence[int]) -> None:
        """Frees blocks that were taken."""

    @abstractmethod
    def unaccounted(self) -> int:
        """Returns how many blocks are neither free nor cached. When no request is left, that must be 0."""

    @abstractmethod
    def read(self, block: int) -> torch.Tensor:
        """Returns a copy, in memory of the CPU, of the K and V of a block, `[layers, 2, tokens, heads, dim]`, read by
        the indices and views that the engine's own attention reads it by. It does not use `layers`."""

    @abstractmethod
    def _hash(self, parent: int | None, tokens: list[int]) -> int:
        """Returns the engine's own hash of a block."""

    @abstractmethod
    def _find(self, block_hash: int) -> int | None:
        """Returns the block that has this hash."""

    @abstractmethod
    def _register(self, block: int, block_hash: int) -> None:
        """Makes a taken block a cached one, of this hash."""

    @abstractmethod
    def watch(self, reused: Callable[[Sequence[int]], None]) -> None:
        """Has `reused` called with the ids of all blocks that are handed out from now on."""

    def matchable(self, prompt_ids: list[int]) -> list[int]:
        """Returns what the engine's search may be asked for, so that at least one token is left to compute and no
        complete block is written again."""
        return prompt_ids

    def held(self, prompt_ids: list[int]) -> list[int]:
        """Returns the ids of the leading blocks of a prompt that this cache has, cached or in a table."""
        found: list[int] = []
        for block_hash in self._hashes(prompt_ids):
            block = self._find(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def keep(self, prompt_ids: list[int], first: int, taken: Sequence[int]) -> None:
        """Makes taken blocks, which hold the KV of the prompt's blocks from `first` on, cached ones, which the engine's
        search finds. A block that the cache has by now is freed."""
        hashes = self._hashes(prompt_ids)[first:]
        for block, block_hash in zip(taken, hashes[: len(taken)], strict=True):
            if self._find(block_hash) is None:
                self._register(block, block_hash)
            else:
                self.give_back([block])

    def _hashes(self, prompt_ids: list[int]) -> list[int]:
        hashes: list[int] = []
        for start in range(0, len(prompt_ids) - self.block_tokens + 1, self.block_tokens):
            tokens = prompt_ids[start : start + self.block_tokens]
            hashes.append(self._hash(hashes[-1] if hashes else None, tokens))
        return hashes


class SectorBlocks(Blocks):
    """As in transformers 5.23: one tensor for all layers, in which a block is `[layers, 2, tokens, heads, dim]`,
    without gaps; blocks are cut from sectors; cached ones are handed out only after the scheduler has evicted all."""

    def __init__(self, cache: Any) -> None:
        assert list(cache.cache_allocators) == ["full_attention"], "only full attention is served"
        self._allocator = allocator = cache.cache_allocators["full_attention"]
        self._pool, self._ledger = allocator.pool, allocator.ledger
        self.block_tokens = allocator.tokens_per_page
        page = (2, self.block_tokens, allocator.num_key_value_heads, allocator.head_dim)
        self.layers = list(allocator.cache_tensor.view(-1, allocator.pages_per_block, *page).unbind(1))

    def table(self, request_id: str) -> list[int]:
        return list(self._allocator.block_table.get(request_id, ()))

    def room(self, spared: Sequence[int] = ()) -> int:
        sectors: int = self._pool.num_free_sectors * self._allocator.blocks_per_sector
        return sectors + int(self._pool.count_free_blocks(self._allocator.index))

    def take(self, count: int, spared: Sequence[int]) -> list[int]:
        index = self._allocator.index
        while self._pool.count_free_blocks(index) < count:
            self._pool.allocate_sector(index)
        return list(self._pool.get_free_blocks(index, count))

    def give_back(self, block_ids: Sequence[int]) -> None:
        self._pool.free_blocks(self._allocator.index, list(block_ids))

    def unaccounted(self) -> int:
        cached = set(self._ledger.cached_blocks)
        assert cached == set(self._ledger.block_to_hash) == set(self._ledger.hash_to_block.values())
        return int(self._allocator.num_blocks) - self.room() - len(cached)

    def read(self, block: int) -> torch.Tensor:
        rows = slice(start := block * self._allocator.block_physical_stride, start + self.block_tokens)
        views = [self._allocator._kv_token_views[layer] for layer in self._allocator.layer_indices]
        return torch.stack([torch.stack([k[rows], v[rows]]) for k, v in views]).cpu()

    def watch(self, reused: Callable[[Sequence[int]], None]) -> None:
        hand_out = self._pool.get_free_blocks

        def get_free_blocks(index: int, num_blocks: int) -> list[int]:
            block_ids: list[int] = hand_out(index, num_blocks)
            reused(block_ids)
            return block_ids

        self._pool.get_free_blocks = get_free_blocks

    def _hash(self, parent: int | None, tokens: list[int]) -> int:
        from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash

        return int(compute_block_hash(parent, tokens))

    def _find(self, block_hash: int) -> int | None:
        block: int | None = self._ledger.hash_to_block.get(block_hash)
        return block

    def _register(self, block: int, block_hash: int) -> None:
        twin = self._ledger.register_new_hash(block, block_hash)
        assert twin is None, "no other block has this hash"
        freed = self._ledger.release(block)
        assert not freed, "a block with a hash stays cached"


class SeparateBlocks(Blocks):
    """As in transformers 5.17: a tensor for K and one for V of each layer; cached blocks count as free, and are handed
    out when no others are left."""

    def __init__(self, cache: Any) -> None:
        assert cache.use_prefix_sharing and len(cache.group_cache_managers) == 1, "only full attention is served"
        self._tables, self._manager = cache.group_cache_managers[0].block_table, cache._block_manager
        self._keys, self._values, self.block_tokens = cache.key_cache, cache.value_cache, cache.block_size
        shape = (-1, self.block_tokens, *self._keys[0].shape[1:])
        planes = zip(self._keys, self._values, strict=True)
        self.layers = [(keys.view(*shape), values.view(*shape)) for keys, values in planes]

    def matchable(self, prompt_ids: list[int]) -> list[int]:
        # This search would match a whole prompt, and its last token would then be computed once more into a block that
        # is complete and may be shared.
        return prompt_ids[:-1]

    def table(self, request_id: str) -> list[int]:
        return list(self._tables.get(request_id, ()))

    def room(self, spared: Sequence[int] = ()) -> int:
        return int(self._manager.num_free_blocks) - sum(block in self._manager._init_block_ids for block in spared)

    def take(self, count: int, spared: Sequence[int]) -> list[int]:
        for block in spared:
            self._manager.increase_ref_count(block)
        try:
            block_ids = self._manager.get_free_blocks(count, None, True, 0)
        finally:
            for block in spared:
                self._manager.decrease_ref_count(block)
        return [] if block_ids is None else list(block_ids)

    def give_back(self, block_ids: Sequence[int]) -> None:
        self._manager.free_blocks(list(block_ids), shareable=True)

    def unaccounted(self) -> int:
        cached = self._manager._init_block_ids
        assert set(cached) == set(self._manager._hash_to_id.values())
        return int(self._manager.num_blocks) - self.room()

    def read(self, block: int) -> torch.Tensor:
        rows = slice(start := block * self.block_tokens, start + self.block_tokens)
        planes = zip(self._keys, self._values, strict=True)
        return torch.stack([torch.stack([keys[rows], values[rows]]) for keys, values in planes]).cpu()

    def watch(self, reused: Callable[[Sequence[int]], None]) -> None:
        hand_out = self._manager.get_free_blocks

        def get_free_blocks(*arguments: Any) -> list[int] | None:
            block_ids: list[int] | None = hand_out(*arguments)
            reused(block_ids or ())
            return block_ids

        self._manager.get_free_blocks = get_free_blocks

    def _hash(self, parent: int | None, tokens: list[int]) -> int:
        return int(self._manager.compute_hash(parent, tokens, group_id=0))

    def _find(self, block_hash: int) -> int | None:
        block: int | None = self._manager._hash_to_id.get(block_hash)
        return block

    def _register(self, block: int, block_hash: int) -> None:
        self._manager._id_to_block[block].hash = block_hash
        self._manager._hash_to_id[block_hash] = block
        self._manager.decrease_ref_count(block)


def blocks_of(cache: Any) -> Blocks:
    """Returns the bookkeeping of a PagedAttentionCache, whatever its version."""
    return SectorBlocks(cache) if hasattr(cache, "cache_allocators") else SeparateBlocks(cache)


@contextmanager
def hooked(hooks: Hooks) -> Iterator[None]:
    """Within the block, engines of transformers' continuous batching call `hooks`. One engine at a time."""
    waiting, offload = Scheduler._get_waiting_candidates, OffloadingManager.offload_requests

    def candidates(scheduler: Any) -> list[Any]:
        states: list[Any] = waiting(scheduler)
        asked = [(state.request_id, state.remaining_prefill_tokens) for state in states]
        ready = hooks.ready(asked, not scheduler.active_requests)
        return [state for state in states if state.request_id in ready]

    def offload_requests(manager: Any) -> bool:
        return hooks.pressed() or offload(manager)

    with (
        patch.object(continuous_api, "PagedAttentionCache", _hooked_cache(hooks)),
        patch.object(Scheduler, "_get_waiting_candidates", candidates),
        patch.object(OffloadingManager, "offload_requests", offload_requests),
    ):
        yield


def _hooked_cache(hooks: Hooks) -> type[PagedAttentionCache]:

    class HookedCache(PagedAttentionCache):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            self._blocks = blocks_of(self)
            self._blocks.watch(hooks.reused)
            hooks.opened(self._blocks)

        def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
            hooks.arriving(request_id, prompt_ids)
            tokens = int(super().search_prefix_match(request_id, self._blocks.matchable(prompt_ids)))
            hooks.matched(request_id, tokens)
            return tokens

        def free_blocks(self, request_id: str, *flags: Any, **named: Any) -> None:
            hooks.freed(request_id)
            super().free_blocks(request_id, *flags, **named)

        def mark_complete_blocks(self, state: Any, complete_blocks: Any) -> None:  # transformers 5.23
            super().mark_complete_blocks(state, complete_blocks)
            self._completed(state)

        def mark_shareable_blocks_as_complete(self, state: Any, num_complete_blocks: int) -> None:  # transformers 5.17
            parent: Any = super()
            parent.mark_shareable_blocks_as_complete(state, num_complete_blocks)
            self._completed(state)

        def _completed(self, state: Any) -> None:
            token_ids = state.initial_tokens + state.generated_tokens
            hooks.completed(state.request_id, token_ids, state.position_offset)

    return HookedCache


def batching_settings(**settings: Any) -> Any:
    """Returns a ContinuousBatchingConfig of these settings, by their newest names, without what would make a run depend
    on the clock: asynchronous batches, and graphs that are padded."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    fixed = {
        "use_async_batching": False,
        "use_cuda_graph": False,
        "allow_block_sharing": True,
        "max_blocks_per_request": 0,
    }
    given = {**fixed, "auto_switch_to_flash": False, **settings}
    known = ContinuousBatchingConfig.__dataclass_fields__
    if "page_size" not in known:
        given["block_size"] = given.pop("page_size")
    return ContinuousBatchingConfig(**{name: value for name, value in given.items() if name in known})


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Returns token ids as bytes, for a digest."""
    return array("q", token_ids).tobytes()
