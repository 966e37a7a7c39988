"""The correct data: the models, the conversations, and the bytes of every page, as seen from outside the system.

The content of a page follows from its name, its codec and its loss, so that any reader's bytes can be judged without
asking the system that is judged. Nothing is really encoded here: the encoded form of a page, and what is decoded from
it again, are bytes of their own, of the right length. Hash chains and contents are the same for every seed, and are
computed once a process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

from kvcluster.core import codecs, hashing
from kvcluster.core.codecs import Codec
from kvcluster.core.groups import PREFIX, Group, Part, Plane, window
from kvcluster.core.ids import BlockHash, Caller, Holder, NamespaceId, Tenant
from kvcluster.core.messages import Need, PageKey, request_of
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec
from kvcluster.memory import checksum
from kvcluster.replay.core_stepper import Build

LONGEST = 8
"""Blocks of the longest conversation."""
PROMPT = 3
"""Blocks that all conversations under one system prompt have in common."""

RED, BLUE = Tenant("red"), Tenant("blue")


def _plain(model: str, weights: str) -> KVSpec:
    return KVSpec.uniform(
        model=model, weights=weights, num_layers=2, num_kv_heads=1, head_dim=8, dtype="bfloat16", block_tokens=1
    )


@dataclass(frozen=True, eq=False, slots=True)  # there is one of each, so that they hash and compare by identity
class Model:
    """A spec of one tenant: a namespace. `reader`: another tenant, who reads it by a grant; None for its own."""

    name: str
    tenant: Tenant
    spec: KVSpec
    space: NamespaceId
    reader: Tenant | None = None

    @property
    def caller(self) -> Caller:
        """Who asks about it."""
        if self.reader is None:
            return Caller(self.tenant, operator=True)
        return Caller(self.reader, operator=True, reads=frozenset({self.tenant}))

    def asks(self, question: Any, namespace: NamespaceId | None = None) -> Build:
        """Returns a function that makes the request of its caller."""
        return partial(request_of, self.caller, namespace=namespace, question=question)

    @property
    def owner(self) -> Tenant | None:
        """Whom an Attach names."""
        return self.tenant if self.reader is not None else None

    def whole(self) -> tuple[tuple[int, Part], ...]:
        """Returns all groups, each with its whole part."""
        return tuple((group, self.spec.whole(group)) for group in range(len(self.spec.groups)))

    def halves(self) -> tuple[tuple[int, Part], ...]:
        """Returns all groups as two ranks write them, the heads divided; a group with one head is whole."""
        out: list[tuple[int, Part]] = []
        for group, part in self.whole():
            if part.heads < 2:
                out.append((group, part))
                continue
            middle = part.heads // 2
            out.append((group, part._replace(head_stop=middle)))
            out.append((group, part._replace(head_start=middle)))
        return tuple(out)

    def first_half(self) -> tuple[tuple[int, Part], ...]:
        """Returns all groups as the first of those two ranks reads and writes them."""
        return tuple(dict(reversed(self.halves())).items())

    def need(self, accept: Loss = Loss.Q4, *, half: bool = False) -> Need:
        """Returns the need for all groups, whole or as the first of two ranks reads them."""
        parts = dict(self.first_half() if half else self.whole())
        return Need(tuple(parts[group] for group in range(len(self.spec.groups))), accept)


_WIDE = KVSpec(
    model="wide",
    weights="sha256:3",
    block_tokens=2,
    groups=(
        Group((0, 2), (Plane("k", 2, 4, "uint8"), Plane("v", 2, 4, "uint8")), PREFIX),
        Group((1, 3), (Plane("k", 2, 6, "uint8"), Plane("v", 2, 6, "uint8")), window(4)),
    ),
)
_NEW_WEIGHTS = _plain("m", "sha256:2")
_SPECS = {"old": _plain("m", "sha256:1"), "new": _NEW_WEIGHTS, "wide": _WIDE}

MODELS: tuple[Model, ...] = tuple(
    Model(f"{tenant}.{name}", tenant, spec, spec.namespace(tenant))
    for tenant in (RED, BLUE)
    for name, spec in _SPECS.items()
)

_LONG = KVSpec.uniform(
    model="long", weights="sha256:4", num_layers=2, num_kv_heads=1, head_dim=8, dtype="bfloat16", block_tokens=2
)
SEQUENCE_MODELS: tuple[Model, ...] = tuple(
    Model(f"{tenant}.long", tenant, _LONG, _LONG.namespace(tenant)) for tenant in (RED, BLUE)
)
"""The models of workers with open sequences. Requests of engines (workload.py) use MODELS."""
_PRIVATE_LONG = replace(_LONG, private=True)
PRIVATE: dict[Model, Model] = {
    model: Model(f"{model.name}.private", model.tenant, _PRIVATE_LONG, _PRIVATE_LONG.namespace(model.tenant))
    for model in SEQUENCE_MODELS
}
"""The namespace of the private pages beside that of each of SEQUENCE_MODELS."""

_OF_RUN = {"old": _plain("m", "run:sim/1/0"), "new": _plain("m", "run:sim/2/0")}
TRAINED: dict[Model, Model] = {
    model: Model(f"{model.name}.trained", model.tenant, spec, spec.namespace(model.tenant))
    for model in MODELS
    for name, spec in _OF_RUN.items()
    if model.name.endswith(f".{name}")
}
"""What takes the place of the plain models where weights are those of a training run."""

SEQUENCE_SPACES = {model.space: model for model in (*SEQUENCE_MODELS, *PRIVATE.values())}
BY_SPACE = {model.space: model for model in (*MODELS, *TRAINED.values())} | SEQUENCE_SPACES


@cache
def read_by_another(model: Model) -> Model:
    """Returns the same namespace as the other tenant reads it."""
    return replace(model, reader=RED if model.tenant == BLUE else BLUE)


_ORIGINS: dict[tuple[NamespaceId, BlockHash], tuple[BlockHash | None, tuple[int, ...]]] = {}


@cache
def chain(model: Model, prompt: int, conversation: int) -> tuple[BlockHash, ...]:
    """Returns the LONGEST blocks of a conversation, which begins with its system prompt."""
    step = model.spec.block_tokens
    tokens = [prompt] * (step * PROMPT) + [1_000 + conversation] * (step * (LONGEST - PROMPT))
    blocks = tuple(hashing.chain(hashing.root(model.space), tokens, step))
    for at, block in enumerate(blocks):
        parent = blocks[at - 1] if at else None
        _ORIGINS[model.space, block] = parent, tuple(tokens[at * step : (at + 1) * step])
    return blocks


def named(model: Model, tokens: Sequence[int]) -> list[BlockHash]:
    """Returns the blocks of a sequence that begins with these token ids, and remembers where each comes from."""
    step = model.spec.block_tokens
    blocks = hashing.chain(root(model), tokens, step)
    parent: BlockHash | None = None
    for at, block in enumerate(blocks):
        _ORIGINS[model.space, block] = parent, tuple(tokens[at * step : (at + 1) * step])
        parent = block
    return blocks


def computed(context: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Returns the numbers that stand for the KV of these token ids. As with attention, each depends on all that it is
    computed from: `context`, the numbers of the tokens that are attended to, and the tokens before it."""
    values = list(context)
    for token in tokens:
        values.append(hash((token, *values)))  # of integers: the same in every process
    return values[len(context) :]


@lru_cache(maxsize=1 << 12)
def computed_whole(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Returns what `computed` does for a sequence of these token ids, of which each attends to all before it."""
    return tuple(computed((), tokens))


_PRIVATE_MARK = b"private!"


def private_id(holder: Holder, number: int) -> BlockHash:
    """Returns the id of a holder's private block of that number. It shows whose it is."""
    return BlockHash(hashlib.sha256(holder + b"%d" % number).digest()[:8] + holder + _PRIVATE_MARK)


def private_holder(block: BlockHash) -> Holder | None:
    """Returns the holder of a private block; None if the block is public."""
    return Holder(block[8:-8]) if block.endswith(_PRIVATE_MARK) else None


def origin(model: Model, block: BlockHash) -> tuple[BlockHash | None, tuple[int, ...]]:
    """Returns the block before this one, None at the beginning of a conversation, and its token ids."""
    return _ORIGINS[model.space, block]


@cache
def root(model: Model) -> BlockHash:
    """Returns the root hash, which the first block of a conversation follows."""
    return hashing.root(model.space)


class PageContent(NamedTuple):
    """The right bytes of a page, and their checksums."""

    data: bytes
    sums: tuple[int, ...]
    packed: bytes
    layer_bytes: int

    def layer(self, layer: int) -> bytes:
        return self.data[layer * self.layer_bytes : (layer + 1) * self.layer_bytes]


@lru_cache(maxsize=1 << 16)  # blocks of sequences differ from seed to seed
def content(space: NamespaceId, key: PageKey, codec: Codec = Codec.RAW, loss: Loss = Loss.EXACT) -> PageContent:
    """Returns what this page must hold. RAW with a loss means what was decoded."""
    nbytes = codecs.page_bytes(codec, BY_SPACE[space].spec, key.group, key.part)
    layers = key.part.layers
    name = b"".join((space, key.hash, repr((key.group, *key.part, codec, loss)).encode()))
    data = hashlib.shake_128(name).digest(nbytes)
    sums = checksum.layer_sums(identity(space, key, codec), 0, layers, memoryview(data))
    return PageContent(data, sums, checksum.pack_sums(sums), nbytes // layers)


@lru_cache(maxsize=1 << 16)
def identity(space: NamespaceId, key: PageKey, codec: Codec = Codec.RAW) -> int:
    """Returns the checksum identity, as a reader computes it from what it asked for and the codec in which it came."""
    return checksum.identity(space, key, codec)


def encodable(key: PageKey) -> bool:
    """Whether the page can be encoded: some pages hold values that no codec encodes."""
    return key.hash[0] % 8 > 0
