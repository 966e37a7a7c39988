"""transformers with PrefixCache: loading a cached prefix against computing it, for a model of random weights in the
shape of Llama-3-8B. Loaded KV must be the stored KV bit for bit, and the tokens generated over it those that the model
generates over its own KV of the same prefix, as far as it repeats itself: attention runs by torch's FlashAttention or
plain mathematics, since cuDNN's, the default on some cards, may give other bits each time. On CUDA the KV passes
through host memory, and then straight to and from the card (`device_staging_bytes`). Without a card: a small model.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvcluster
from benchmarks.gpu_steps.cluster import cluster
from benchmarks.gpu_steps.rows import attempt, row
from kvcluster.client import Client
from kvcluster.config import ClientConfig
from kvcluster.engines.transformers import PrefixCache, spec_of
from kvcluster.engines.transformers.compat import layers, planes

LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "max_position_embeddings": 65_536,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 4_096,
    "initializer_range": 0.2,
}
NEW_TOKENS = 16


def model_of(settings: dict[str, Any], device: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**settings, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    made = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began, made


def run(model: Any, ids: torch.Tensor, cache: Any, new_tokens: int) -> Any:
    mask = torch.ones_like(ids)
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=new_tokens, do_sample=False, use_cache=True
    )


def kv(cache: DynamicCache, columns: int) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(plane[:, :, :columns].clone() for plane in planes(layer)) for layer in layers(cache)]


def same(one: list[tuple[torch.Tensor, ...]], other: list[tuple[torch.Tensor, ...]]) -> bool:
    pairs = (pair for ours, theirs in zip(one, other, strict=True) for pair in zip(ours, theirs, strict=True))
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


def measure(model: Any, client: Client, tokens: int, way: str) -> None:
    generator = torch.Generator().manual_seed(tokens + client.takes_device_tensors)
    ids = torch.randint(1, model.config.vocab_size, (1, tokens + 1), generator=generator).to(model.device)
    run(model, ids, DynamicCache(config=model.config), 1)
    computing, own = [], DynamicCache(config=model.config)
    for _ in range(3):
        own = DynamicCache(config=model.config)
        computing.append(timed(lambda cache=own: run(model, ids, cache, 1))[0])

    first = PrefixCache.from_inputs(client, model, ids)
    out = run(model, ids, first, 1)
    storing, stored = timed(lambda: first.save(out))
    flushed = client.flush()
    mine = kv(first, tokens)

    loading, answering, found, exact = [], [], 0, True
    for _ in range(3):
        load_s, cache = timed(lambda: PrefixCache.from_inputs(client, model, ids))
        found = cache.cached_tokens[0]
        exact = exact and same(kv(cache, found), _cut(mine, found))
        first_s, _ = timed(lambda cache=cache: run(model, ids, cache, 1))
        loading.append(load_s)
        answering.append(load_s + first_s)
    alone = DynamicCache(_cut(mine, found))
    over_own = run(model, ids, alone, NEW_TOKENS)
    repeats = torch.equal(over_own, run(model, ids, DynamicCache(_cut(mine, found)), NEW_TOKENS))
    over_loaded = PrefixCache.from_inputs(client, model, ids)
    exact = exact and same(kv(over_loaded, found), _cut(mine, found))
    equal = torch.equal(over_own, run(model, ids, over_loaded, NEW_TOKENS))
    compute, hit = sorted(computing)[1], sorted(answering)[1]
    row(
        "first token",
        way=way,
        tokens=tokens,
        loaded=found,
        MiB=stored.nbytes >> 20,
        computed_s=compute,
        hit_s=hit,
        of_which_load_s=sorted(loading)[1],
        store_s=storing,
        ratio=compute / hit,
        all_loaded=flushed and found == tokens,
        bytes_equal=exact,
        model_repeats_itself=repeats,
        tokens_equal=equal,
        right=flushed and found == tokens and exact and (equal or not repeats),
    )


def _cut(kv: list[tuple[torch.Tensor, ...]], columns: int) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(plane[:, :, :columns].clone() for plane in layer) for layer in kv]


@torch.no_grad()
def main(device: str) -> None:
    transformers.logging.set_verbosity_error()
    on_card = device == "cuda"
    model = model_of(LARGE if on_card else SMALL, "cuda" if on_card else "cpu")
    spec = spec_of(model, weights="sha256:" + "0" * 64)
    exact = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    with cluster("14GiB" if on_card else "64MiB") as served, exact:
        for way, staging in (("through host memory", 0), ("straight", 2**28)) if on_card else (("on a CPU", 0),):
            config = ClientConfig(deadline_ms=60_000, connect_ms=20_000, device_staging_bytes=staging)
            with kvcluster.connect(served.address, spec, config=config) as client:
                for tokens in (2_048, 8_192, 32_768) if on_card else (64, 256):
                    attempt(partial(measure, model, client, tokens, way), f"{tokens} tokens {way}")


if __name__ == "__main__":
    main(sys.argv[1])
