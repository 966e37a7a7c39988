"""Sequences whose KV every process knows: that of a token follows from all tokens up to it, as in a model.

So a worker that has a block from a shard, or the result of attention over it, can tell that it is this block's, without
having seen it computed. `expected` is attention over that KV in memory of its own: its bits have to be those of any
other way.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvcluster.attention import PageAddresses, PageLayout, PageSpan, QueryRow, partial
from kvcluster.core.spec import KVSpec
from tests.chaos.content import PAGE_BYTES

LAYERS, HEADS, DIM, GROUP, BLOCK_TOKENS = 2, 2, 64, 2, 64
SEQUENCE_SPEC = KVSpec.uniform(
    model="chaos-sequences",
    weights="sha256:1",
    num_layers=LAYERS,
    num_kv_heads=HEADS,
    head_dim=DIM,
    dtype="bfloat16",
    block_tokens=BLOCK_TOKENS,
)
assert SEQUENCE_SPEC.page_bytes(0, SEQUENCE_SPEC.whole(0)) == PAGE_BYTES, "the run counts pages of one size"
_LAYOUT = PageLayout(SEQUENCE_SPEC.groups[0], BLOCK_TOKENS, LAYERS, HEADS)
_NUMBERS = LAYERS * 2 * HEADS * DIM
_VOCABULARY = 50_000


@dataclass(frozen=True)
class KnownText:
    """Tokens and their KV, `[tokens, layers, k and v, heads, dim]`. `digests`: of all tokens up to each."""

    tokens: tuple[int, ...] = ()
    digests: tuple[bytes, ...] = ()
    kv: Tensor = torch.empty(0, LAYERS, 2, HEADS, DIM, dtype=torch.bfloat16)  # noqa: RUF009 - never written

    def __len__(self) -> int:
        return len(self.tokens)

    def extended(self, tokens: Sequence[int]) -> KnownText:
        """Returns it with more tokens."""
        last, digests = self.digests[-1] if self.digests else b"", list[bytes]()
        for token in tokens:
            last = hashlib.blake2b(last + token.to_bytes(8, "little"), digest_size=16).digest()
            digests.append(last)
        new = _numbers(b"".join(hashlib.shake_128(digest).digest(_NUMBERS) for digest in digests))
        return KnownText((*self.tokens, *tokens), (*self.digests, *digests), torch.cat([self.kv, new]))

    def cut(self, tokens: int) -> KnownText:
        """Returns its first tokens."""
        return KnownText(self.tokens[:tokens], self.digests[:tokens], self.kv[:tokens])

    def overwritten(self, layer: int, position: int, kv: Tensor) -> KnownText:
        """Returns it with other KV of one layer from a position on: `[tokens, k and v, heads, dim]`."""
        changed = self.kv.clone()
        changed[position : position + len(kv), layer] = kv
        return KnownText(self.tokens, self.digests, changed)

    def plane(self, layer: int, plane: int, first: int, stop: int) -> Tensor:
        """Returns K (0) or V (1) of some tokens, `[tokens, heads, dim]`."""
        return self.kv[first:stop, layer, plane].contiguous()


def drawn_kv(rng: random.Random, tokens: int) -> Tensor:
    """Returns the KV of one layer that no text has: `[tokens, k and v, heads, dim]`."""
    numbers = _numbers(rng.randbytes(-(-tokens // LAYERS) * _NUMBERS))
    return numbers.reshape(-1, 2, HEADS, DIM)[:tokens]


def drawn_query(rng: random.Random, tokens: int) -> Tensor:
    """Returns a query, `[tokens, heads, dim]`."""
    return torch.randn(tokens, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(rng.randrange(2**32)))


@functools.cache
def known_prompt(number: int, tokens: int) -> KnownText:
    """Returns prompt `number`. Those of numbers that are alike but for their last bit begin alike."""
    rng = random.Random(number // 2)
    ids = [rng.randrange(_VOCABULARY) for _ in range(tokens)]
    middle = tokens // 2
    own = random.Random(-1 - number)
    return KnownText().extended([*ids[:middle], *(own.randrange(_VOCABULARY) for _ in range(tokens - middle))])


def expected(text: KnownText, layer: int, query: Tensor, window: int | None) -> Tensor:
    """Returns attention of the last tokens of a text over all up to each, or over the last `window`."""
    tokens = len(text)
    blocks = -(-tokens // BLOCK_TOKENS)
    padded = torch.zeros(blocks * BLOCK_TOKENS, LAYERS, 2, HEADS, DIM, dtype=torch.bfloat16)
    padded[:tokens] = text.kv
    pool = padded.view(blocks, BLOCK_TOKENS, LAYERS, 2, HEADS, DIM).permute(0, 2, 3, 1, 4, 5).contiguous()
    pages = PageAddresses.from_pool(_LAYOUT, pool, torch.arange(blocks, dtype=torch.int32))
    row = QueryRow(range(tokens - len(query), tokens), [PageSpan(pages, 0, tokens)])
    return partial(query, [row], _LAYOUT, layer, scale=DIM**-0.5, window=window).out


def _numbers(data: bytes) -> Tensor:
    """Numbers that bfloat16 has exactly."""
    made = (np.frombuffer(data, dtype=np.uint8).astype(np.float32) - 128) / 64
    return torch.from_numpy(made).bfloat16().view(-1, LAYERS, 2, HEADS, DIM)
