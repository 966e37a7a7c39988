"""Placement: which shard a run of blocks is written to. It knows names, hosts and weights, and keeps nothing.

Blocks of one chain go together, up to a *run*, so that a prefix is loaded from one shard in few ranges; the
hash of the run's first block is its key. Among the shards that may be chosen, weighted rendezvous hashing
decides: each shard draws an exponential variate from the digest of (run, shard), at a rate equal to its
capacity, and the earliest wins. Therefore a shard's share is proportional to its weight, and a change moves as
little as can be: one that comes takes runs from the others and moves nothing between them, one that goes
leaves only its own behind. No ring and no table, so there is nothing to keep, to rebuild or to agree on.
(Thaler and Ravishankar, Using name-based mappings to increase hit rates, 1998; with weights: Schindelhauer and
Schomaker, Weighted distributed hash tables, 2005.)

Placement is advice. Where a block lies is what its shard reports; no reader ever computes it from here.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvcluster.core.ids import BlockHash, ShardId


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shard as placement sees it. `available`: neither full nor draining, and its inventory is known."""

    shard: ShardId
    host: str
    weight_bytes: int
    available: bool


def run_start(depth: int, run_blocks: int) -> int:
    """The depth of the block whose hash is the key of the run that holds block number `depth`."""
    assert depth >= 0 and run_blocks >= 1
    return depth - depth % run_blocks


def choose(run: BlockHash, candidates: Sequence[Candidate], host: str) -> Candidate | None:
    """Where to put the run whose first hash is `run`: on the asking worker's `host` if a shard there may take it,
    else on any that may, else None.

    Equal in every process, and in whatever order the candidates come. An empty `host` is nobody's.
    """
    possible = [candidate for candidate in candidates if candidate.available and candidate.weight_bytes > 0]
    near = [candidate for candidate in possible if host and candidate.host == host]
    return min(near or possible, key=lambda candidate: (_arrival(run, candidate), candidate.shard), default=None)


def _arrival(run: BlockHash, candidate: Candidate) -> float:
    """An exponential variate at the rate of the weight, drawn by the digest."""
    digest = hashlib.sha256(run + candidate.shard.encode()).digest()
    # 52 bits and a half: a float holds them exactly, so that this is neither 0 nor 1 and has a finite logarithm.
    uniform = ((int.from_bytes(digest[:8], "little") >> 12) + 0.5) / 2.0**52
    return -math.log(uniform) / candidate.weight_bytes
