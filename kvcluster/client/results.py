"""What a client's calls return: plain values, fit to print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcluster.core.miss import Loss, Miss, MissReason


@dataclass(frozen=True, slots=True)
class Lookup:
    """How far a prompt is cached: whole blocks from its start. `load_seconds` is an estimate from this client's own
    loads so far, None before the first. `reason` says why the next block missed, None where none is left. `loss`: the
    worst that any of these blocks has lost."""

    tokens: int
    blocks: int
    load_seconds: float | None
    reason: Miss | None
    loss: Loss = Loss.EXACT


@dataclass(frozen=True, slots=True)
class Loaded:
    """The leading `blocks` blocks are valid in the destination. `nbytes` of KV came and were verified, and decoded
    where they came encoded. `loss` is the worst that any of it has lost: what is computed over it has lost as much, and
    is to be stored so. `took_ns` is how long the bytes took; 0 where it was broken off.

    `failed` names, in order, every block of the ticket that is not whole there, and why; all others were filled, those
    behind it too. `miss` is the first of these reasons, None where nothing failed. Where a group needs only the blocks
    before the boundary (reuse "window" or "last"), one failed block leaves no boundary: `blocks` is 0.
    """

    blocks: int
    nbytes: int
    miss: Miss | None = None
    failed: Mapping[int, Miss] = field(default_factory=dict)
    loss: Loss = Loss.EXACT
    took_ns: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Stored:
    """Of the blocks given: `blocks` were written and committed by this call, `deduplicated` were there already,
    `pending` are being written by somebody else. `nbytes` were moved. `miss` is the first reason why any other
    was not stored."""

    blocks: int
    deduplicated: int
    pending: int
    nbytes: int
    miss: Miss | None = None


@dataclass(frozen=True, slots=True)
class Pinned:
    """The leading `blocks` blocks of a prompt, `tokens` tokens, are spared from now on (or, of an unpin, no longer).
    Fewer than it has: the rest is not cached, or the share of pins is full. `miss` says why nothing could be asked for,
    None where the cluster has answered."""

    tokens: int
    blocks: int
    miss: Miss | None = None


@dataclass(frozen=True, slots=True)
class BlockExplanation:
    """One block of an `explain`: where it is, or why it cannot be had. `block` counts from the prompt's start."""

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
