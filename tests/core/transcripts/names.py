"""Short names for long things: what a transcript calls blocks, namespaces, attempts, bytes and times.

A block is a word such as `a1`, whose hash is a digest of the word, so a transcript never shows one. A page of it is
PAGE bytes, and bytes are told in pages; times are told in milliseconds since the transcript began.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

from kvcluster.core.ids import HOLDER_BYTES, Attempt, BlockHash, Epoch, Holder, NamespaceId, SequenceId, ShardId, Tenant
from kvcluster.core.messages import Need, PageKey
from kvcluster.core.shard.leases import OwnAttempts
from kvcluster.core.spec import KVSpec

MS = 1_000_000
TENANT = Tenant("t")
ROOT = "root"
SALT = " 28"
"""Goes into every hash. Chosen so that, where there is room everywhere, chain `a` goes to s1, `b` to s2, `d` to s3."""


def spec_of(weights: str = "w") -> KVSpec:
    """The one kind of KV there is here, of a model with those weights."""
    return KVSpec.uniform(
        model="m", weights=weights, num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32", block_tokens=2
    )


SPEC = spec_of()
PRIVATE_SPEC = replace(SPEC, private=True)
WHOLE = SPEC.whole(0)
PAGE = SPEC.page_bytes(0, WHOLE)
NEED = Need((WHOLE,))


class Names:
    """Gives names out and knows them again."""

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, str] = {}
        self._holders: dict[Holder, str] = {}
        self._specs: dict[NamespaceId, KVSpec] = {}

    def block(self, name: str) -> BlockHash:
        digest = BlockHash(hashlib.sha256((name + SALT).encode()).digest())
        self._blocks[digest] = name
        return digest

    def key(self, name: str) -> PageKey:
        return PageKey(self.block(name), 0, WHOLE)

    def sequence(self, name: str) -> SequenceId:
        return SequenceId(name.encode().ljust(16))

    def holder(self, worker: str) -> Holder:
        holder = Holder(int(worker[1:]).to_bytes(HOLDER_BYTES, "big"))
        self._holders[holder] = worker
        return holder

    def shard(self, shard: ShardId, epoch: Epoch) -> None:
        """From now on this incarnation's own attempts are known by its name."""
        self._holders[OwnAttempts(shard, epoch).next().holder] = shard

    def namespace(self, spec: KVSpec) -> NamespaceId:
        namespace = spec.namespace(TENANT)
        self._specs[namespace] = spec
        return namespace

    def attempt(self, attempt: Attempt) -> str:
        return f"{self._holders[attempt.holder]}#{attempt.counter}"

    def told(self, blocks: Iterable[BlockHash]) -> str:
        """Formats blocks in order; says so if there are none."""
        return " ".join(self._blocks[block] for block in blocks) or "nothing"

    def weights(self, namespace: NamespaceId) -> str:
        """Of which weights, where these are not the usual ones."""
        weights = self._specs[namespace].weights
        return "" if weights == SPEC.weights else f" of {weights}"


def expand(words: Iterable[str]) -> list[str]:
    """Blocks as they are written: `a1..a3` is `a1 a2 a3`."""
    out: list[str] = []
    for word in words:
        first, dots, last = word.partition("..")
        if dots:
            letter = first[0]
            out += [f"{letter}{number}" for number in range(int(first[1:]), int(last[1:]) + 1)]
        else:
            out.append(word)
    return out


def pages(nbytes: int) -> str:
    """Bytes as pages."""
    assert nbytes % PAGE == 0
    return str(nbytes // PAGE)
