"""Layers of recurrent state in vLLM: what a group of them keeps, and which of them are served.

A Mamba, GDN or short convolution layer keeps no KV of a token but one state of all tokens so far. In the mode "align"
vLLM ends chunks of prompts at block boundaries, so that the block of a boundary keeps the state behind it while the
request goes on in another block. In the cluster a state is the page of the last block before its boundary (the reuse
rule LAST): a request continues from a boundary only if the state of that very boundary is there.

A state's bytes are never interpreted. vLLM shares the heads of a state out among tensor parallel ranks in ways that
differ by layer, so the state of each rank is a head of its own here, and only engines of as many ranks share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MambaSpec

from kvcluster.core.groups import Plane
from kvcluster.engines.vllm.kv_format import KVFormat
from kvcluster.errors import CallerError

_SERVED = ("MAMBA1", "MAMBA2", "GDN_ATTN", "SHORT_CONV")
"""vLLM's names of the kinds of layers whose whole state is what its MambaSpec describes."""


def keeps_state(spec: Any) -> bool:
    """Whether a group with this spec keeps recurrent state."""
    return isinstance(spec, MambaSpec)


def state_format(config: Any, spec: Any) -> KVFormat:
    """Returns the format of a group of recurrent state. Its packing names all that gives the bytes their meaning: the
    kind of layer, the kernels, the order of a convolution's inputs, and the shape and dtype of each part."""
    parts = ", ".join(
        f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    kind, kernels = spec.mamba_type.name.lower(), config.mamba_config.backend.value
    isa = ""
    if current_platform.is_cpu():
        isa = f"{kind} {torch.backends.cpu.get_cpu_capability()}"
    return KVFormat(isa, f"vllm {kind} state, {kernels}, {get_conv_state_layout()}: {parts}")


def state_plane(spec: Any, of_format: KVFormat, ranks: int) -> Plane:
    """Returns the one plane of a group of recurrent state: all bytes of a layer's state, a head for each rank."""
    return Plane.opaque("state", spec.state_content_size_bytes, heads=ranks, packing=of_format.packing)


def state_views(layer: str, cache: torch.Tensor, plane: Plane) -> torch.Tensor:
    """Returns the states of a layer of that name as an entry of `Paged.layers`, without the padding of their pages.
    `cache` is vLLM's `[blocks, 1, 1, bytes of a page]`. Raises CallerError for another shape or unknown strides."""
    rows = cache.ndim == 4 and cache.shape[1:3] == (1, 1) and cache.element_size() == cache.stride(3) == 1
    if not rows or not cache.shape[0] or cache.shape[3] < plane.dim:
        raise CallerError(
            f"kvcluster does not know the layout of the states of {layer}: {list(cache.shape)} of {cache.dtype} with "
            f"strides {list(cache.stride())}; expected [blocks, 1, 1, at least {plane.dim} bytes]"
        )
    states = cache[:, 0, 0, : plane.dim].view(torch.uint8)
    return states if plane.heads == 1 else states[:, None]


def refusals_of_states(config: Any, groups: Sequence[Any]) -> Iterator[str]:
    """Yields what is not served of an engine's groups of recurrent state, each with what to do about it."""
    block_tokens = config.cache_config.block_size
    for number, group in enumerate(groups):
        spec = group.kv_cache_spec
        if not keeps_state(spec):
            continue
        if type(spec) is not MambaSpec or spec.mamba_type.name not in _SERVED:
            yield f"group {number} keeps the state of {spec.mamba_type.name}; served are {', '.join(_SERVED)}"
        if spec.mamba_cache_mode != "align" or not config.cache_config.enable_prefix_caching:
            yield (
                f"group {number} keeps recurrent state, and vLLM keeps that of no block boundary; use "
                "--enable-prefix-caching, which sets --mamba-cache-mode align"
            )
        if spec.num_speculative_blocks:
            yield f"group {number} keeps recurrent state of draft tokens too; leave out --speculative-config"
        if spec.num_prefill_checkpoint_blocks:
            yield (
                f"group {number} ({spec.mamba_type.name}) writes the state of a boundary in the middle of a chunk, "
                "which has not been reviewed"
            )
        if config.cache_config.prefix_match_unit not in (None, block_tokens):
            yield f"group {number} keeps states within blocks; leave out --prefix-match-unit"
        if config.mamba_config.enable_stochastic_rounding:
            yield f"group {number} rounds states at random; leave out --enable-mamba-cache-stochastic-rounding"
        others = (name for other in groups if other is not group for name in other.layer_names)
        if both := set(map(extract_layer_index, group.layer_names)).intersection(map(extract_layer_index, others)):
            yield f"group {number}: layer {min(both)} keeps a state and KV, or two states, of which one is served"
