"""Builders for these tests: a tokenizer without a model, and prompts that a cluster holds."""

from __future__ import annotations

from pathlib import Path

import kvcluster
from kvcluster.core.spec import KVSpec
from kvcluster.transfers.long_chains import Prompt
from tests.client.build import kv
from tests.waiting import eventually

BOS = 256


def save_tokenizer(folder: Path) -> None:
    """A byte a token, one before each text, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, "<bos>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>")
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    fast.chat_template = turns + "{% if add_generation_prompt %}<answer>{% endif %}"
    fast.save_pretrained(folder)


def store(address: str, spec: KVSpec, tokens: list[int], salt: bytes = b"") -> None:
    """Puts a prompt's full blocks into the cluster, and waits until they can be found."""
    blocks = len(tokens) // spec.block_tokens
    with kvcluster.connect(address, spec, config=kvcluster.ClientConfig(deadline_ms=10_000)) as client:
        prompt = Prompt(tokens, salt)
        stored = client.store(prompt, kv(blocks, spec=spec))
        assert stored.blocks == blocks, stored
        client.flush()
        eventually(lambda: client.lookup(prompt).blocks == blocks)
