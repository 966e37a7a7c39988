"""One engine replica of the demo: `python -m kvcluster.cli.demo.engine`, controlled over a connection.

The demo's model and document, `llama` and `document`, are used by a benchmark as well; neither needs Ray or a download.
The model is a Llama of random weights whose tokens are the bytes of UTF-8: it shows how KV moves; its output is
meaningless. The document is English text that every machine has: the help texts of Python.

Requests are the methods of `Engine`, served as a worker of the benchmark serves its requests; any number of
`{"progress": [done, total]}` precede an answer. The process ends when its conductor does. `Engine.answer` uses the
cache.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import kvcluster
from kvcluster.cli.child_process import answer_requests, inherited_connection
from kvcluster.cli.demo import gpu_reader, text
from kvcluster.config import ClientConfig
from kvcluster.core.position_tree import CUT_TOKENS
from kvcluster.engines.transformers import PrefixCache, generate, spec_of
from kvcluster.engines.transformers.compat import layers, planes
from kvcluster.errors import KVClusterError


def llama(max_tokens: int) -> LlamaForCausalLM:
    """Returns a model with the same float32 weights each time. A few thousand tokens take it seconds on two cores.

    The weights vary enough that greedy output does not repeat one token.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.1,
        max_position_embeddings=max_tokens,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.eval()
    return model


def encode(characters: str) -> list[int]:
    """Returns the text as tokens of the model."""
    return list(characters.encode())


def document() -> str:
    """Returns a few hundred thousand characters, the longest topics first; callers cut it to the length they need."""
    return "\n\n".join(topics[name].strip() for name in sorted(topics, key=lambda name: (-len(topics[name]), name)))


PREFIX_TOKENS = 4096
QUESTION_TOKENS = 200  # more than any question has
NEW_TOKENS = 24
BLOCK_TOKENS = 16
SPARE_BLOCKS = 8
"""Beside what streaming needs: a tail, and a chunk of the question."""

Progress = Callable[[int, int], None]


class Watch(BaseStreamer):
    """Counts layers of the prefill and new tokens as they are computed, and records the time of the first token."""

    def __init__(self, model: Any, progress: Progress) -> None:
        self.first_token_ns = 0
        self._progress = progress
        self._layers: int = model.config.num_hidden_layers
        self._model = model
        self._layers_done = 0
        self._puts = 0

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate`: first with the prompt, then with each token."""
        self._puts += 1
        if self._puts == 2:
            self.first_token_ns = time.perf_counter_ns()
        self._report()

    def end(self) -> None:
        """Called by `generate`; does nothing."""

    @contextmanager
    def prefill(self) -> Iterator[None]:
        """Counts each layer of the first forward pass within the block."""
        stacks = (m for m in self._model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == self._layers)
        hooks = [layer.register_forward_hook(self._layer_done) for layer in next(stacks, ())]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _layer_done(self, *_: object) -> None:
        if self._layers_done < self._layers:
            self._layers_done += 1
            self._report()

    def _report(self) -> None:
        self._progress(self._layers_done + max(0, self._puts - 1), self._layers + NEW_TOKENS)


class Engine:
    """A model, and a client once connected to a cluster. The public methods are the ops of the protocol."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._model: Any = None
        self._encode: Callable[[str], list[int]] = encode
        self._prefix: list[int] = []
        self._client: kvcluster.Client | None = None

    def make(self, path: str) -> dict[str, Any]:
        """Writes a Llama of random weights."""
        llama(2 * PREFIX_TOKENS).save_pretrained(path)
        return {}

    def load(self, path: str, bytes_are_tokens: bool) -> dict[str, Any]:
        """Loads the model, always in float32: in bfloat16, rounding may swap two tokens that are almost as good."""
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        if not bytes_are_tokens:
            tokenizer: Any = AutoTokenizer.from_pretrained(path)
            self._encode = lambda characters: list(tokenizer(characters, add_special_tokens=False)["input_ids"])
        room = getattr(self._model.config, "max_position_embeddings", None) or 2 * PREFIX_TOKENS
        tokens = min(PREFIX_TOKENS, room - QUESTION_TOKENS - NEW_TOKENS)
        self._prefix = self._encode(document()[: 16 * tokens])[:tokens]
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        return {"model": type(self._model).__name__, "parameters": parameters, "threads": torch.get_num_threads()}

    def connect(self, address: str) -> dict[str, Any]:
        """Connects under the fingerprint of the current weights."""
        if self._client is not None:
            self._client.close()
        self._client = kvcluster.connect(address, spec_of(self._model, block_tokens=BLOCK_TOKENS))
        return {"weights": self._client.spec.weights}

    def answer(self, question: str, cached: bool, zero_block: bool = False) -> dict[str, Any]:
        """Answers a question about the document; returns the time of the first token and the number of reused tokens.

        `zero_block` zeroes the first loaded block, to show that loaded blocks affect the answer.
        """
        ids = torch.tensor([self._prefix + self._encode(text.ask(question))])
        watch = Watch(self._model, self._progress)
        began_ns = time.perf_counter_ns()
        cache = PrefixCache.from_inputs(self._connected(), self._model, ids) if cached else None
        if cache is not None and zero_block:
            for layer in layers(cache):
                for plane in planes(layer):
                    plane[:, :, :BLOCK_TOKENS] = 0
        with watch.prefill():
            out = self._generate(ids, cache, NEW_TOKENS, watch)
        reply = {
            "first_token_ns": watch.first_token_ns - began_ns,
            "prompt_tokens": ids.shape[1],
            "cached_tokens": 0,
            "digest": _digest(out.sequences[0, ids.shape[1] :]),
            "logits": out.logits[0][0].tolist(),
        }
        if cache is not None:
            blocks = -(-cache.cached_tokens[0] // BLOCK_TOKENS)
            reply["cached_tokens"] = cache.cached_tokens[0]
            reply["loaded_bytes"] = int(blocks * BLOCK_TOKENS * self._connected().spec.token_bytes)
            if not zero_block:
                reply["stored_bytes"] = cache.save(out.sequences).nbytes
                self._connected().flush()
        return reply

    def answer_far(self, question: str, address: str, times: int, ship: bool) -> dict[str, Any]:
        """Answers a question about the document, whose KV lies on shards, with resident memory for a part of it: 1 /
        `times`, or what a model of few layers needs at least. The rest is streamed over tcp for each token, or attended
        to at the shards. Returns what that moved, or why there is no answer.
        """
        ids = torch.tensor([self._prefix + self._encode(text.ask(question))])
        spec = spec_of(self._model, block_tokens=BLOCK_TOKENS)
        streamed = 2 * (CUT_TOKENS // BLOCK_TOKENS + 1)  # blocks of one layer that have room together, at least
        blocks = max(len(self._prefix) // BLOCK_TOKENS // times, streamed // len(spec.groups[0].layers) + SPARE_BLOCKS)
        resident = blocks * int(spec.block_bytes)
        config = ClientConfig(resident_bytes=resident, transports=("tcp", "grpc"))
        planner = kvcluster.ShipAbsent() if ship else None
        watch = Watch(self._model, self._progress)
        with kvcluster.connect(address, spec, config=config) as client:
            try:
                out = generate(
                    client,
                    self._model,
                    ids,
                    offload=True,
                    planner=planner,
                    streamer=watch,
                    max_new_tokens=NEW_TOKENS,
                    do_sample=False,
                )
            except KVClusterError as error:
                return {"error": f"{type(error).__name__}: {error}"}
            moved = client.shipped()
        return {
            "digest": _digest(out[0, ids.shape[1] :]),
            "resident_bytes": resident,
            "context_bytes": int(spec.token_bytes) * ids.shape[1],
            "loaded_bytes": moved.loaded_bytes,
            "shipped_bytes": moved.query_bytes + moved.result_bytes,
        }

    def read(self, number: int, tokens: int) -> dict[str, Any]:
        """Reads one of many documents through the cache: loads its cached prefix and stores the rest. Returns the tiers
        of its blocks, and the model's next token and logits."""
        ids = torch.tensor([self._encode(document()[4 * tokens * number :][: 4 * tokens])[:tokens]])
        client = self._connected()
        lay = Counter(block.tier if block.hit else "nowhere" for block in client.explain(ids[0].tolist()))
        cache = PrefixCache.from_inputs(client, self._model, ids)
        out = self._generate(ids, cache, 1)
        stored = cache.save(out.sequences)
        client.flush()
        logits = out.logits[0][0]
        return {
            "blocks": dict(lay),
            "cached_tokens": cache.cached_tokens[0],
            "stored_blocks": stored.blocks,
            "logits": logits.tolist(),
            "next": int(logits.argmax()),
        }

    def kv_bytes(self) -> dict[str, Any]:
        """Returns the bytes of KV per token."""
        return {"token_bytes": int(spec_of(self._model, block_tokens=BLOCK_TOKENS).token_bytes)}

    def status(self) -> dict[str, Any]:
        """Returns the cluster's status from the coordinator."""
        return self._connected().status()

    def train(self, address: str) -> dict[str, Any]:
        """Changes one weight by a little and connects again, as after an update of the weights."""
        before = self._connected().spec.weights
        with torch.no_grad():
            next(iter(self._model.parameters())).view(-1)[0] += 1e-3
        return {"before": before, "after": self.connect(address)["weights"]}

    def explain(self, question: str) -> dict[str, Any]:
        """Returns the number of tokens that this replica could load now, and the misses of the other blocks."""
        tokens = self._prefix + self._encode(text.ask(question))
        misses = [block for block in self._connected().explain(tokens) if not block.hit]
        return {"tokens": self._connected().lookup(tokens).tokens, "misses": [str(block) for block in misses]}

    def has_gpu(self) -> dict[str, Any]:
        """Returns whether torch has a GPU of NVIDIA's here."""
        return {"has_gpu": torch.cuda.is_available() and torch.version.hip is None}

    def read_on_gpu(self, address: str, has_gpu: bool) -> dict[str, Any]:
        """Loads from a shard's pool into blocks on the same GPU, or on a twin of one."""
        return gpu_reader.read_on_gpu(address, has_gpu=has_gpu)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _generate(self, ids: torch.Tensor, cache: Any, tokens: int, streamer: BaseStreamer | None = None) -> Any:
        """Generates greedily, with logits."""
        return self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            streamer=streamer,
            max_new_tokens=tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )

    def _connected(self) -> kvcluster.Client:
        assert self._client is not None, "the conductor connects first"
        return self._client


def _digest(ids: torch.Tensor) -> str:
    return hashlib.sha256(repr(ids.tolist()).encode()).hexdigest()[:12]


def main() -> None:
    """Serves requests until the conductor closes the connection."""
    connection = inherited_connection()
    engine = Engine(lambda done, total: connection.send({"progress": [done, total]}))
    answer_requests(connection, engine)
    engine.close()


if __name__ == "__main__":
    main()
