"""One request of an engine as the scheduler's side knows it: its hash chain, its block table and its outcome.

`LoadsInFlight` holds the loads that at least one rank has not ended: which requests they are for, and which blocks they
fill. A load may outlive its request. The blocks of a load within a forward pass are *in doubt*: what is computed over
them is wrong if they do not arrive. So it also keeps the block tables of requests that ended over such blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from kvcluster.transfers.long_chains import Prompt


@dataclass(eq=False, slots=True)
class RequestState:
    """`chain` are hashes of the request's leading blocks; the first `sent` of them have been sent to the workers.
    `table` holds the engine's block numbers, one list per group, as the engine reported them; an entry that a
    sliding window has left behind may belong to another request by now. The KV of blocks before `stored` is in the
    cluster or being stored, and so is the recurrent state behind block `states_stored`, if that is not 0. `orders` are
    stores whose source is still read. A request that is `private` stores nothing more.
    `reader` is a client of the tenant that the engine also reads, None if there is none. `engine` are random bytes
    of this engine, which are in the hashes of blocks that no other engine may share."""

    of_engine: Any
    client: Client
    adapter: str
    block_tokens: int
    engine: bytes
    reader: Client | None = None
    chain: list[BlockHash] = field(default_factory=list)
    sent: int = 0
    table: list[list[int]] = field(default_factory=list)
    stored: int = 0
    states_stored: int = 0
    loss: Loss = Loss.EXACT
    private: bool = False
    orders: set[int] = field(default_factory=set)

    # Its next load, or the load in progress.
    lookup: PendingLookup | None = None
    look_again_ns: int = 0  # no lookup before this time, while blocks that were not found are being stored
    wait_until_ns: int = 0  # waits for such blocks until then
    is_last_lookup: bool = False  # the lookup in progress began when that time was over
    layerwise: bool = False
    loading: LoadOrder | None = None
    load_failed: bool = False

    # Reported when the request ends.
    preemptions: int = 0
    local_tokens: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    resumed_tokens: int = 0
    computed_tokens: int = 0
    miss: Miss | None = None

    def grower(self, blocks: int, deadline_ms: int, *, of: Client | None = None) -> Callable[[], list[BlockHash]]:
        """Returns a function that computes the chain up to block `blocks`, on any thread: the request's own, or that in
        the namespace of another client. Copies what it needs from the engine's request now."""
        step, client, adapter = self.block_tokens, of or self.client, self.adapter
        known = self.chain[:blocks] if of is None else []
        tokens = list(self.of_engine.all_token_ids[len(known) * step : blocks * step])
        extra = {
            block - len(known): key
            for block, key in compat.extra_keys(self.of_engine, step, len(known), blocks, self.engine).items()
        }
        salt = compat.salt(self.of_engine)

        def grow() -> list[BlockHash]:
            if known:
                return known + hashing.chain(known[-1], tokens, step, extra)
            return client.hashes(Prompt(tokens, salt, adapter, extra), deadline_ms=deadline_ms)

        return grow

    def grow(self, blocks: int) -> None:
        """Extends the chain to at least `blocks` blocks, without asking the cluster anything. Raises KVClusterError if
        the namespace is not known yet."""
        if blocks > len(self.chain):
            self.chain = self.grower(blocks, deadline_ms=0)()

    @property
    def shared_blocks(self) -> int:
        """The number of leading blocks that other engines can find."""
        return compat.shared_tokens(self.of_engine) // self.block_tokens

    def note(self, one: compat.Scheduled) -> None:
        """Records what the engine has scheduled for the request in a step."""
        prompt = self.of_engine.num_prompt_tokens
        self.computed_tokens += max(0, min(prompt, one.computed + one.tokens) - one.computed)
        if one.new_blocks is None:
            return
        if one.replaces:
            self.table = [list(of_group) for of_group in one.new_blocks]
            # Of an own hit that ended behind the last recurrent state the engine takes back what is behind that.
            self.local_tokens = min(self.local_tokens, one.computed)
        elif self.table:
            for mine, new in zip(self.table, one.new_blocks, strict=True):
                mine += new
        else:  # blocks are appended to an unknown table, so their positions are unknown
            self.private = True

    def end_lookup(self) -> None:
        """Ends the lookup, if there is one, and releases its ticket."""
        if self.lookup is not None:
            self.lookup.leave()
            self.lookup = None

    def hands_over(self, one: compat.Scheduled) -> bool:
        """Whether this step ends the prompt, and another server continues from there."""
        ends = self.of_engine.max_tokens == 1 and one.computed + one.tokens >= self.of_engine.num_prompt_tokens
        return ends and handover.is_asked(compat.transfer_params(self.of_engine))

    def lose_blocks(self) -> None:
        """Resets the state after a preemption: the blocks are freed, and the request will be looked up again."""
        self.table = []
        self.orders.clear()
        self.loading = None
        self.look_again_ns = self.wait_until_ns = 0
        self.stored = self.states_stored = 0  # stores that lost their source were cancelled
        self.load_failed = self.private

    def loaded(self, arrived: int, nbytes: int, loss: Loss) -> None:
        """Records that the load has ended, and that the leading `arrived` blocks have their KV."""
        assert self.loading is not None
        tokens = (arrived - self.loading.first) * self.block_tokens
        self.loading = None
        self.loaded_tokens += tokens
        self.loaded_bytes += nbytes
        self.resumed_tokens += tokens if self.preemptions else 0
        self.loss = max(self.loss, loss)

    def has(self, blocks: set[int]) -> bool:
        """Whether any of these blocks is in the table."""
        return any(not blocks.isdisjoint(of_group) for of_group in self.table)

    def storable(self, first: int, full: int, groups: Sequence[int]) -> range:
        """Returns the blocks to store of these groups among those from `first` to `full`, without blocks that a sliding
        window has left behind or that the engine never had."""
        tables = [self.table[group] for group in groups]
        while first < full and any(of_group[first] == compat.NULL_BLOCK for of_group in tables):
            first += 1
        stop = first
        while stop < full and all(of_group[stop] != compat.NULL_BLOCK for of_group in tables):
            stop += 1
        return range(first, stop)

    def tokens(self, which: range) -> tuple[int, ...]:
        """Returns the token ids of these blocks if the cluster wants them, otherwise (). Subscribers of events have no
        use for the tokens of blocks that no other engine can find."""
        if not self.client.wants_tokens or which.stop > self.shared_blocks:
            return ()
        return tuple(self.of_engine.all_token_ids[which.start * self.block_tokens : which.stop * self.block_tokens])

    def blocks(self, which: range, groups: Sequence[int]) -> BlockIds:
        """Returns the engine's own numbers of these blocks, of these groups."""
        return tuple(
            tuple(of_group[which.start : which.stop]) if group in groups else ()
            for group, of_group in enumerate(self.table)
        )

    def report(self) -> dict[str, Any]:
        """Returns the counts that the request's answer may contain."""
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
class _Loading:
    """A load that is in progress on at least one rank. `hashes` are those of its blocks; `reported` merges the reports
    of the ranks that have ended it."""

    order: LoadOrder
    hashes: tuple[BlockHash, ...]
    reported: LoadReport | None = None


class LoadsInFlight:
    """The loads of one engine of `ranks` ranks, by request."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._loads: dict[str, _Loading] = {}
        self.steps: set[int] = set()
        """Outstanding steps with a load in their forward pass."""
        self.ended_tables: list[list[int]] = []
        """The block tables of requests that ended while they held blocks in doubt."""

    def add(self, order: LoadOrder, hashes: tuple[BlockHash, ...]) -> None:
        self._loads[order.request] = _Loading(order, hashes)

    def report(self, request: str, load: LoadReport) -> tuple[LoadOrder, tuple[BlockHash, ...], LoadReport] | None:
        """Merges a report on a request's load. Once all ranks have ended it, removes and returns it, with the merged
        report; otherwise returns None."""
        loading = self._loads.get(request)
        if loading is None:
            return None
        loading.reported = merged = load if loading.reported is None else loading.reported.with_others(load)
        if merged.ranks < self._ranks:
            return None
        del self._loads[request]
        return loading.order, loading.hashes, merged

    def end_steps(self, step: int) -> None:
        """Records that all steps up to this one have ended."""
        self.steps = {number for number in self.steps if number > step}

    def hashes_within(self) -> set[BlockHash]:
        """Returns the hashes of the blocks that loads within forward passes fill."""
        return {block for load in self._loads.values() if load.order.layerwise for block in load.hashes}

    def in_doubt(self) -> set[int]:
        """Returns the engine's own numbers of the same blocks."""
        within = (load.order for load in self._loads.values() if load.order.layerwise)
        return {block for order in within for block in order.into[0]}
