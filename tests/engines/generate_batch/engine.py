"""A small engine to test with: a random Llama under transformers' continuous batching, and prompts that share prefixes.

All requests are queued before the engine's thread starts, so that what is in which batch depends on the prompts alone,
never on the clock. That is what `model.generate_batch` does in every other respect.
"""

from __future__ import annotations

import hashlib
import math
import random
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from kvcluster.core.spec import KVSpec
from tests.engines.generate_batch.paged_cache import Hooks, batching_settings, hooked

BLOCK = 8
BATCH_TOKENS = 64
CACHE_BLOCKS = 72
REQUESTS = 4
NEW_TOKENS = 8
VOCABULARY = 256
BOUND_S = 60.0
"""How long the engine may take for one more result before a run fails; nothing is expected to take a tenth of it."""


@dataclass(frozen=True)
class Output:
    """What an engine generated for each prompt, in order: ids, and the logarithms of their probabilities. `computed`:
    tokens that its forward passes computed KV for."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    computed: int

    def differing(self, other: Output) -> int:
        """Returns how many tokens differ between two runs over the same prompts."""
        pairs = zip(self.tokens, other.tokens, strict=True)
        return sum(abs(len(a) - len(b)) + sum(x != y for x, y in zip(a, b, strict=False)) for a, b in pairs)

    def drift(self, other: Output) -> float:
        """Returns the greatest difference of a token's logarithm of probability between two runs; infinity where one of
        them has no number, as with KV from memory that was never written."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        differences = [abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=True)]
        return max(math.inf if math.isnan(one) else one for one in differences)


def tiny_llama(device: str = "cpu") -> Any:
    """Returns a random Llama in float32, the same each time: 2 layers with 2 KV heads of 16 channels."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,  # so that its greedy output does not settle on one token
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    model.set_attn_implementation("sdpa")
    return model.to(device=device, dtype=torch.float32).eval()


def spec_of(model: Any) -> KVSpec:
    """Returns the spec of the model's KV in blocks of BLOCK tokens. It is made without kvcluster.engines.transformers,
    which does not claim to work with a transformers as old as some that this engine runs with."""
    config, digest = model.config, hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode() + parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return KVSpec.uniform(
        model="tiny-llama",
        weights=f"sha256:{digest.hexdigest()}",
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype="float32",
        block_tokens=BLOCK,
    )


def shared_prompts(count: int, seed: int) -> list[list[int]]:
    """Returns prompts of 12 to 200 tokens. Each begins with a cut of one of six documents, of any length, and goes on
    with tokens of its own; every seventh is one that was there before, with another end."""
    rng = random.Random(seed)

    def drawn(tokens: int) -> list[int]:
        return [rng.randrange(1, VOCABULARY) for _ in range(tokens)]

    documents = [drawn(rng.randrange(40, 140)) for _ in range(6)]
    prompts: list[list[int]] = []
    for number in range(count):
        if prompts and number % 7 == 6:
            trunk = rng.choice(prompts)
        else:
            document = rng.choice(documents)
            trunk = document[: rng.randrange(8, len(document) + 1)]
        prompts.append(trunk + drawn(rng.randrange(4, 60)))
    return prompts


def generate(model: Any, prompts: list[list[int]], hooks: Hooks | None = None, **settings: int) -> Output:
    """Runs prompts to their end, greedily, in an engine of its own; `settings` are of batching_settings. Raises
    AssertionError if the engine failed."""
    sizes = {"num_blocks": CACHE_BLOCKS, "max_requests_per_batch": REQUESTS, **settings}
    batching = batching_settings(page_size=BLOCK, max_batch_tokens=BATCH_TOKENS, return_logprobs=True, **sizes)
    greedy = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    computed = 0

    def count(module: Any, arguments: Any, named: dict[str, Any]) -> None:
        nonlocal computed
        computed += named["input_ids"].shape[-1]

    counter = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        with hooked(hooks) if hooks is not None else nullcontext():
            manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=batching)
            request_ids = manager.add_requests(inputs=prompts, max_new_tokens=NEW_TOKENS)
            manager.start()
            try:
                results = _results(manager, len(prompts))
            finally:
                manager.stop(block=True, timeout=BOUND_S)
                manager.destroy()
    finally:
        counter.remove()
    outputs = [results[request_id] for request_id in request_ids]
    return Output([one.generated_tokens for one in outputs], [one.logprobs for one in outputs], computed)


def _results(manager: Any, count: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    while len(results) < count:
        result = manager.get_result(timeout=BOUND_S)
        assert result is not None, f"the engine has ended: {manager.background_thread_status.fatal_error!r}"
        assert result.error is None, f"request {result.request_id} failed: {result.error}"
        if result.is_finished():
            results[result.request_id] = result
    return results


@torch.no_grad()
def smallest_margin(model: Any, prompts: list[list[int]], output: Output) -> float:
    """Returns by how much the logit of a generated token exceeds every other one's, at least, in a plain forward pass
    over each prompt and what was generated; negative if another one is greater."""
    smallest = math.inf
    for prompt, tokens in zip(prompts, output.tokens, strict=True):
        ids = torch.tensor([prompt + tokens[:-1]], device=model.device)
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
        chosen = torch.tensor(tokens, device=model.device)[:, None]
        others = logits.scatter(1, chosen, float("-inf")).amax(dim=1)
        smallest = min(smallest, float((logits.gather(1, chosen)[:, 0] - others).min()))
    return smallest
