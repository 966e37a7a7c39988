"""Placement: which shard a run of blocks is written to. It knows names, hosts and weights, and keeps no state.

Blocks of one chain stay together, up to a *run*, so that a prefix is loaded from one shard in few ranges; the hash of
the run's first block is its key. Among the available shards, weighted rendezvous hashing decides: each shard draws an
exponential variate from the digest of (run, shard), at a rate equal to its capacity, and the smallest wins. Therefore a
shard's share is proportional to its weight, and a change of membership moves as little as possible: a new shard takes
runs from the others and moves none between them; the runs of a removed shard are the only ones that move. There is no
ring and no table, so there is no state to keep, to rebuild or to agree on. (Thaler and Ravishankar, Using name-based
mappings to increase hit rates, 1998; with weights: Schindelhauer and Schomaker, Weighted distributed hash tables,
2005.)

Placement is advice. The location of a block is what its shard reports; no reader ever computes it from here.

A process states where it runs in a text, the *host*, from which others derive two facts that a host's name does not
give.

*Same node*: both run on one machine, so that bytes between them cross no network. *May share memory*: one can connect
to the other's local socket, over which memory is handed: they are in one network namespace of that machine, or both
name the same directory of sockets there. Two containers of one machine are on the same node, and need such a directory.
The text is `NAME@MACHINE/NAMESPACE` or `NAME@MACHINE/NAMESPACE/DIRECTORY`; the name is for people.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcluster.core.ids import BlockHash, ShardId


def host_text(name: str, machine: str, namespace: str) -> str:
    """Returns the text for a process on this machine and in this network namespace."""
    return f"{name}@{machine}/{namespace}"


def name_of(host: str) -> str:
    """Returns the name in a text, such as Ray knows the host by."""
    return host.partition("@")[0]


def same_node(one: str, other: str) -> bool:
    """Whether both texts are of processes on one machine. An empty text is on no machine."""
    return bool(one) and _alike(one, other, lambda host: _place(host).partition("/")[0])


def same_namespace(one: str, other: str) -> bool:
    """Whether both texts are of processes in one network namespace: of one machine, or of one pod."""
    return bool(one) and _alike(one, other, lambda host: _place(host).split("/")[:2])


def may_share_memory(one: str, other: str) -> bool:
    """Whether both texts are of processes that can hand one another memory."""
    directory = socket_directory(one)
    same_directory = bool(directory) and directory == socket_directory(other) and same_node(one, other)
    return same_namespace(one, other) or same_directory


def socket_directory(host: str) -> str:
    """Returns what identifies the directory of sockets in a text, "" if it names none."""
    return "".join(_place(host).split("/")[2:])


def _alike(one: str, other: str, of: Callable[[str], object]) -> bool:
    """Whether both texts have the same part; the same name, if one is of a release that stated its name alone."""
    if "@" in one and "@" in other:
        return of(one) == of(other)
    return name_of(one) == name_of(other)


def _place(host: str) -> str:
    """Returns machine, namespace and, if there is one, directory."""
    return host.partition("@")[2]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shard as placement sees it. `available`: neither full nor draining, and its inventory is known."""

    shard: ShardId
    host: str
    weight_bytes: int
    available: bool


def run_start(depth: int, run_blocks: int) -> int:
    """Returns the depth of the first block of the run that holds the block at `depth`. Its hash is the run's key."""
    assert depth >= 0 and run_blocks >= 1
    return depth - depth % run_blocks


def choose(run: BlockHash, candidates: Sequence[Candidate], host: str) -> Candidate | None:
    """Returns the shard for the run whose first hash is `run`: one that may share memory with the asking worker at
    `host` if any such is available, otherwise one on its node, otherwise any available one, or None.

    The result is the same in every process and for every order of the candidates. An empty `host` matches no shard.
    """
    possible = [candidate for candidate in candidates if candidate.available and candidate.weight_bytes > 0]
    sharing = [candidate for candidate in possible if may_share_memory(candidate.host, host)]
    near = sharing or [candidate for candidate in possible if same_node(candidate.host, host)]
    return min(near or possible, key=lambda candidate: (_arrival(run, candidate), candidate.shard), default=None)


def _arrival(run: BlockHash, candidate: Candidate) -> float:
    """Returns an exponential variate at the rate of the weight, drawn from the digest."""
    digest = hashlib.sha256(run + candidate.shard.encode()).digest()
    # 52 bits plus one half: a float holds this exactly, so it is neither 0 nor 1 and has a finite logarithm.
    uniform = ((int.from_bytes(digest[:8], "little") >> 12) + 0.5) / 2.0**52
    return -math.log(uniform) / candidate.weight_bytes
