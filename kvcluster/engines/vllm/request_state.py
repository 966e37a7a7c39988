"""One request of an engine as the scheduler's side knows it: its hash chain, its block table, and what came of it; and
its load, which may outlive it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import kvcluster.engines.vllm.compat as compat
import kvcluster.engines.vllm.pd_disagg as handover
from kvcluster.client.client import Client
from kvcluster.core import hashing
from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss, Miss
from kvcluster.engines.vllm.async_lookup import PendingLookup
from kvcluster.engines.vllm.step_metadata import BlockIds, LoadOrder, LoadReport


@dataclass(eq=False, slots=True)
class RequestState:
    """`chain` are hashes of its leading blocks, of which the workers know `told`. `table` has the engine's blocks, a
    list a group; it is as the engine told it, and an entry that a window has left behind may be somebody else's by now.
    Blocks before `stored` are in the cluster or on their way there. `orders` are stores whose source is still read.
    What is `private` is stored no more."""

    of_engine: Any
    client: Client
    adapter: str
    block_tokens: int
    chain: list[BlockHash] = field(default_factory=list)
    told: int = 0
    table: list[list[int]] = field(default_factory=list)
    stored: int = 0
    loss: Loss = Loss.EXACT
    private: bool = False
    orders: set[int] = field(default_factory=set)

    # Of its next load, or the one that is under way.
    lookup: PendingLookup | None = None
    look_again_ns: int = 0  # not before, where blocks are on their way that were not found
    comes_until_ns: int = 0
    layerwise: bool = False
    loading: LoadOrder | None = None
    load_failed: bool = False

    # What is said of it in the end.
    preemptions: int = 0
    local_tokens: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    resumed_tokens: int = 0
    computed_tokens: int = 0
    miss: Miss | None = None

    def grower(self, blocks: int, deadline_ms: int) -> Callable[[], list[BlockHash]]:
        """Makes its chain up to that block, on whatever thread. What it needs of the engine is taken now."""
        step, known, client, adapter = self.block_tokens, self.chain[:blocks], self.client, self.adapter
        tokens = list(self.of_engine.all_token_ids[len(known) * step : blocks * step])
        extra = {
            block - len(known): key
            for block, key in compat.extra_keys(self.of_engine, step, len(known), blocks).items()
        }
        salt = compat.salt(self.of_engine)

        def grow() -> list[BlockHash]:
            if known:
                return known + hashing.chain(known[-1], tokens, step, extra)
            return client.hashes(tokens, salt=salt, adapter=adapter, extra_keys=extra, deadline_ms=deadline_ms)

        return grow

    def note(self, one: compat.Scheduled) -> None:
        """What the engine says of it in a step."""
        prompt = self.of_engine.num_prompt_tokens
        self.computed_tokens += max(0, min(prompt, one.computed + one.tokens) - one.computed)
        if one.new_blocks is None:
            return
        if one.replaces:
            self.table = [list(of_group) for of_group in one.new_blocks]
        elif self.table:
            for mine, new in zip(self.table, one.new_blocks, strict=True):
                mine += new
        else:  # blocks are added to a table that was never told: nobody knows which of its blocks these are
            self.private = True

    def hands_over(self, one: compat.Scheduled) -> bool:
        """Does this step end its prompt, so that another server goes on from there?"""
        ends = self.of_engine.max_tokens == 1 and one.computed + one.tokens >= self.of_engine.num_prompt_tokens
        return ends and handover.is_asked(compat.transfer_params(self.of_engine))

    def lose_blocks(self) -> None:
        """It was preempted: its blocks are somebody else's now, and it will be looked up again."""
        self.table = []
        self.orders.clear()
        self.loading = None
        self.look_again_ns = self.comes_until_ns = 0
        self.stored = 0  # stores that lost their source came to nothing
        self.load_failed = self.private

    def loaded(self, came: int, nbytes: int, loss: Loss) -> None:
        """Its load is over, and its leading `came` blocks are there."""
        assert self.loading is not None
        tokens = (came - self.loading.first) * self.block_tokens
        self.loading = None
        self.loaded_tokens += tokens
        self.loaded_bytes += nbytes
        self.resumed_tokens += tokens if self.preemptions else 0
        self.loss = max(self.loss, loss)

    def has(self, blocks: set[int]) -> bool:
        """Is any of these in its table?"""
        return any(not blocks.isdisjoint(of_group) for of_group in self.table)

    def storable(self, first: int, full: int) -> range:
        """The blocks to store among those from `first` to `full`: what a window has left behind, or never had, is not
        the engine's to give."""
        while first < full and any(of_group[first] == compat.NULL_BLOCK for of_group in self.table):
            first += 1
        stop = first
        while stop < full and all(of_group[stop] != compat.NULL_BLOCK for of_group in self.table):
            stop += 1
        return range(first, stop)

    def tokens(self, which: range) -> tuple[int, ...]:
        """The token ids of these blocks, where the cluster wants them."""
        if not self.client.wants_tokens:
            return ()
        return tuple(self.of_engine.all_token_ids[which.start * self.block_tokens : which.stop * self.block_tokens])

    def blocks(self, which: range) -> BlockIds:
        """The engine's own numbers of these."""
        return tuple(tuple(of_group[which.start : which.stop]) for of_group in self.table)

    def report(self) -> dict[str, Any]:
        """What its answer may say."""
        return {
            "local_tokens": self.local_tokens,
            "loaded_tokens": self.loaded_tokens,
            "loaded_bytes": self.loaded_bytes,
            "computed_tokens": self.computed_tokens,
            "resumed_tokens": self.resumed_tokens,
            "preemptions": self.preemptions,
            "miss": str(self.miss) if self.miss is not None else None,
        }


@dataclass(slots=True)
class Loading:
    """A load that is under way at some rank at least. `names` are the hashes of its blocks; `told` is what the ranks
    have reported that ended it."""

    order: LoadOrder
    names: tuple[BlockHash, ...]
    told: LoadReport | None = None
