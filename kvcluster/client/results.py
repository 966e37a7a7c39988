"""What a client's calls return: plain values, fit to print."""

from __future__ import annotations

from dataclasses import dataclass

from kvcluster.core.reasons import Miss, MissReason


@dataclass(frozen=True, slots=True)
class Lookup:
    """How far a prompt is cached: whole blocks from its start. `load_seconds` is an estimate from this client's own
    loads so far, None before the first. `reason` says why the next block missed, None where none is left."""

    tokens: int
    blocks: int
    load_seconds: float | None
    reason: Miss | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """The leading `blocks` blocks are valid in the destination; what lies behind them there is undefined. `nbytes`
    were received and verified. `miss` says what went wrong where it is fewer than the ticket promised."""

    blocks: int
    nbytes: int
    miss: Miss | None = None


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
