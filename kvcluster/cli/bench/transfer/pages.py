"""The pages that are moved: for each page size a spec with a real model's shape, and the adapters of their blocks.

Both levels of the benchmark use them, so that a page has equally many layers and checksums in both.
"""

from __future__ import annotations

from dataclasses import replace

from kvcluster.cli.bench.transfer.thresholds import size_text
from kvcluster.core.spec import KVSpec
from kvcluster.errors import ConfigError

KEPT = ""
"""The adapter of blocks that are loaded in every turn."""

PASSING = "bench-stores"
"""The adapter of blocks that are stored in a turn and purged after it."""

_SHAPES = {  # layers, KV heads, tokens a block; 128 dimensions of bfloat16
    64 * 2**10: (4, 2, 16),
    2 * 2**20: (32, 8, 16),
    16 * 2**20: (32, 8, 128),
}
SIZES = tuple(_SHAPES)
HEAD_DIM = 128


def shape(page_bytes: int) -> tuple[int, int, int, int, int]:
    """Returns a page's [layers, planes, block_tokens, heads, dim]. Raises ConfigError for a size that is not
    measured."""
    if page_bytes not in _SHAPES:
        sizes = ", ".join(map(size_text, SIZES))
        raise ConfigError(f"pages of {page_bytes} bytes are not measured; these are: {sizes}")
    layers, heads, block_tokens = _SHAPES[page_bytes]
    return layers, 2, block_tokens, heads, HEAD_DIM


def spec(page_bytes: int, adapter: str = KEPT) -> KVSpec:
    """Returns the spec whose pages have that size."""
    layers, _, block_tokens, heads, dim = shape(page_bytes)
    uniform = KVSpec.uniform(
        model=f"bench-{page_bytes}",
        weights="sha256:bench",
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=dim,
        dtype="bfloat16",
        block_tokens=block_tokens,
    )
    assert uniform.page_bytes(0, uniform.whole(0)) == page_bytes
    return replace(uniform, adapter=adapter)
