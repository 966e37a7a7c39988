"""The results of a client's calls: plain, printable values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.spec import KVSpec


@dataclass(frozen=True, slots=True)
class Lookup:
    """How much of a prompt is cached: whole blocks from its start. `load_seconds` is an estimate from this client's
    own loads so far, None before the first. `reason` says why the next block missed, None if none is left. `loss`: the
    worst loss of any of these blocks.

        found = client.lookup(token_ids)
        left_to_compute = len(token_ids) - found.tokens
    """

    tokens: int
    blocks: int
    load_seconds: float | None
    reason: Miss | None
    loss: Loss = Loss.EXACT


@dataclass(frozen=True, slots=True)
class Loaded:
    """The outcome of a load.

        loaded = client.begin_load(ticket, out).result()
        first_to_compute = loaded.blocks * spec.block_tokens

    The leading `blocks` blocks are valid in the destination. `nbytes` of KV arrived and were verified, and decoded
    if they were encoded. `loss` is the worst loss of any of it: KV computed over it has the same loss, and must be
    stored with it. `took_ns` is how long the bytes took; 0 if the load was stopped.

    `failed` names, in order, every block of the ticket that is not complete in the destination, and why; all others
    were filled, also those behind a failed one. `miss` is the first of these reasons, None if nothing failed. If a
    group needs only the blocks before the boundary (reuse "window" or "last"), one failed block leaves no usable
    boundary: `blocks` is then the load's `first`, 0 by default.
    """

    blocks: int
    nbytes: int
    miss: Miss | None = None
    failed: Mapping[int, Miss] = field(default_factory=dict)
    loss: Loss = Loss.EXACT
    took_ns: int = field(default=0, compare=False)

    def __repr__(self) -> str:
        failed = f", failed={{{len(self.failed)} blocks}}" if self.failed else ""
        return f"Loaded(blocks={self.blocks}, nbytes={self.nbytes}, miss={self.miss!r}{failed}, loss={self.loss!r})"


@dataclass(frozen=True, slots=True)
class Stored:
    """The outcome of a store. Of the blocks given, it wrote and committed `blocks`; `deduplicated` were cached already;
    another client is writing `pending`. `nbytes` were moved. `miss` is the first reason why any other block was not
    stored.

        stored = client.store(token_ids, kv)
        if stored.miss is not None:
            print("not all of it is stored:", stored.miss)
    """

    blocks: int
    deduplicated: int
    pending: int
    nbytes: int
    miss: Miss | None = None


@dataclass(frozen=True, slots=True)
class Pinned:
    """The leading `blocks` blocks of a prompt, `tokens` tokens, are now pinned (after an unpin: no longer pinned). If
    the prompt has more, the rest is not cached or the share of pins is full. `miss` says why the cluster could not be
    asked, None if it answered."""

    tokens: int
    blocks: int
    miss: Miss | None = None


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A prefix that is pinned, of a prompt under `spec` of `tenant`. `block` is the hash of its last block, in
    hexadecimal, which names it.

    `blocks` of it are pinned, `tokens` tokens, and take `nbytes` bytes in all tiers of all shards. Before them are
    `first` blocks that are not pinned: 0 unless they were unpinned, or are not cached any more. Another pinned prefix
    has `shared_blocks` of the pinned ones too, so that `nbytes` of several do not add up. In `left_s` seconds the
    first of them may be evicted again. `own` are the hashes of those that no other has, which `unpin` unpins.
    """

    block: str
    tenant: str
    spec: KVSpec
    first: int
    blocks: int
    tokens: int
    shared_blocks: int
    nbytes: int
    left_s: float
    own: tuple[BlockHash, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class PinListing:
    """The pinned prefixes of one listing, by tenant and model. `more_blocks`: pinned blocks beyond
    limits.LISTED_PINNED_BLOCKS, which were not looked at; 0 if the listing is whole.

        for pin in client.pins().pins:
            print(pin.spec.model, pin.tokens, pin.left_s)
    """

    pins: tuple[PinnedPrefix, ...]
    more_blocks: int = 0


@dataclass(frozen=True, slots=True)
class BlockExplanation:
    """One block of an `explain`: where it is, or why it cannot be loaded. `block` counts from the prompt's start;
    `tier` and `shard` are set for a hit, `reason` and `detail` for a miss. As text it is one line.

        print(*client.explain(token_ids), sep="\\n")         # block 0: hit (ram, shard-1)
    """

    block: int
    hit: bool
    tier: str = ""
    shard: str = ""
    reason: MissReason | None = None
    detail: str = ""

    def __str__(self) -> str:
        if self.hit:
            return f"block {self.block}: hit ({self.tier}, {self.shard})"
        assert self.reason is not None
        return f"block {self.block}: miss, {Miss(self.reason, self.detail)}"
