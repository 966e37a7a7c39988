"""Sample specs, block chains and page events for the tests of both state machines.

Hashes are real ones, of the tokens of conversations under a spec and a tenant. Tests of single nouns that need no spec
take shorter names from build.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcluster.core import hashing
from kvcluster.core.codecs import Codec
from kvcluster.core.groups import PREFIX, Group, Part, Plane, window
from kvcluster.core.ids import Attempt, BlockHash, Holder, NamespaceId, Tenant
from kvcluster.core.messages import Need, PageEvent, PageKey, RemovedEvent, Tier
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec
from kvcluster.replay.core_stepper import Build, build_request

MS = 1_000_000
SECOND = 1_000 * MS
OURS, THEIRS = Tenant("ours"), Tenant("theirs")
MEMBERSHIP_MS = 5_000
SUMS = b"sums"

SPEC = KVSpec.uniform(
    model="m", weights="sha256:1", num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32", block_tokens=2
)
"""The plain case. A page is PAGE bytes, and so is an extent here."""
WHOLE = SPEC.whole(0)
PAGE = SPEC.page_bytes(0, WHOLE)
LEFT, RIGHT = Part(0, 2, 0, 1), Part(0, 2, 1, 2)
"""Half the heads each."""

HYBRID = KVSpec(
    model="hybrid",
    weights="sha256:2",
    block_tokens=2,
    groups=(
        Group((0, 2), (Plane("k", 2, 4, "float32"),), PREFIX),
        Group((1, 3), (Plane("k", 2, 6, "float32"),), window(4)),
    ),
)
"""Two groups with pages of other sizes than SPEC's, one of which needs only the last blocks."""

CODED = KVSpec.uniform(
    model="m", weights="sha256:1", num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_tokens=2
)
"""What codecs make smaller: a page is 512 bytes raw, 192 in q8 and 144 in q4. They leave SPEC's pages as they are."""

MIXED = KVSpec(
    model="mixed",
    weights="sha256:3",
    block_tokens=2,
    groups=(
        Group((0, 2), (Plane("k", 2, 8, "float32"),), PREFIX),
        Group((1, 3), (Plane("k", 2, 6, "float32"),), window(4)),
    ),
)
"""Two groups, of which codecs make only the first any smaller: from 256 bytes to 96 in q8. The second has 192."""


def ours(question: object, namespace: NamespaceId | None = None) -> Build:
    """Returns what makes a Request of this question."""
    return build_request(question, OURS, namespace)


def chain(length: int, seed: int = 0, spec: KVSpec = SPEC, tenant: Tenant = OURS) -> tuple[BlockHash, ...]:
    """The first blocks of the conversation `seed`. All conversations with the same `seed // 2` begin alike."""
    tokens = [seed // 2, 0, seed, *range(2 * length)][: 2 * length]
    return tuple(hashing.chain(hashing.root(spec.namespace(tenant)), tokens, 2))


def root(spec: KVSpec = SPEC, tenant: Tenant = OURS) -> BlockHash:
    return hashing.root(spec.namespace(tenant))


def key(block: BlockHash, part: Part = WHOLE, group: int = 0) -> PageKey:
    return PageKey(block, group, part)


def holder(number: int) -> Holder:
    return Holder(number.to_bytes(16, "big"))


def attempt(counter: int, worker: int = 0) -> Attempt:
    return Attempt(holder(worker), counter)


def whole(spec: KVSpec = SPEC, accept: Loss = Loss.EXACT) -> Need:
    return Need(tuple(spec.whole(group) for group in range(len(spec.groups))), accept)


def page(
    block: BlockHash,
    part: Part = WHOLE,
    *,
    parent: BlockHash | None = None,
    depth: int = 0,
    loss: Loss | None = None,
    tier: Tier = Tier.RAM,
    codec: Codec = Codec.RAW,
    spec: KVSpec = SPEC,
) -> PageEvent:
    """What a shard tells of a page of SPEC that became READY. It has lost what its codec loses, where not said."""
    told = codec.loss if loss is None else loss
    return PageEvent(spec.namespace(OURS), key(block, part), parent or root(), depth, tier, told, codec)


def pages(
    hashes: Sequence[BlockHash],
    part: Part = WHOLE,
    *,
    tier: Tier = Tier.RAM,
    codec: Codec = Codec.RAW,
    loss: Loss | None = None,
    spec: KVSpec = SPEC,
) -> list[PageEvent]:
    """A chain of them, from its first block on."""
    parents = (root(), *hashes)
    return [
        page(block, part, parent=parents[depth], depth=depth, tier=tier, codec=codec, loss=loss, spec=spec)
        for depth, block in enumerate(hashes)
    ]


def gone(
    block: BlockHash,
    part: Part = WHOLE,
    *,
    corrupt: bool = False,
    tier: Tier = Tier.RAM,
    spec: KVSpec = SPEC,
) -> RemovedEvent:
    return RemovedEvent(spec.namespace(OURS), key(block, part), corrupt, tier)
