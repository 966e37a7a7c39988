"""Whether the KV of a long prompt, on a GPU, is stored whole: many times what the staging holds, while the engine goes
on.

    kvcluster up --shards 1 --ram-bytes 5GiB
    .venv-vllm/bin/python -m benchmarks.long_prompt --address 127.0.0.1:7070

vLLM's own scheduler schedules prompts in steps of `--step` tokens, and the connector stores them in blocks of an 8B
model's size. The device is one whose copies take as long as a link of `--gbps` and move nothing, and whose forward pass
takes `--step-ms`; the copies into the cluster are real. What is stored is garbage: the bytes are held against an oracle
in tests/vllm/test_twin_engines.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

import tests.vllm.conftest  # the environment that tests give vLLM: no network, few messages  # noqa: F401
from benchmarks.model_thread import BLOCK, DIM, HEADS, LAYERS, FreeDevice, device_kv_over
from kvcluster.config.loading import size
from kvcluster.device.device import Event, Range, Stream
from kvcluster.engines.vllm import compat, worker
from kvcluster.engines.vllm.kv_format import KVFormat
from tests.vllm.build import LLAMA, engine_config, model_folder
from tests.vllm.toy import Engine, Rank, Text, spans_of
from tests.vllm.twin_toy import twins
from tests.waiting import eventually

MODEL = LLAMA | {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": HEADS,
    "head_dim": DIM,
    "hidden_size": 32 * DIM,
    "max_position_embeddings": 2**20,
    "torch_dtype": "bfloat16",
}


class LinkDevice(FreeDevice):
    """A device whose copies take their time, one after another on each stream."""

    def __init__(self, gbps: float) -> None:
        super().__init__()
        self._ns_per_byte = 1 / gbps
        self._streams: list[float] = []
        self._model = self.stream()

    def stream(self) -> Stream:
        self._streams.append(0)
        return Stream(len(self._streams) - 1)

    def current(self) -> Stream:
        return self._model

    def busy(self, stream: Stream, ns: float) -> None:
        """Work on a stream that takes so long."""
        self._streams[stream] = max(self._streams[stream], time.perf_counter_ns()) + ns

    def copy(self, into: Range, source: Range, stream: Stream) -> None:
        self.busy(stream, into.nbytes * self._ns_per_byte)

    def record(self, stream: Stream) -> Event:
        return Event(self._streams[stream])

    def wait(self, stream: Stream, event: Event) -> None:
        self._streams[stream] = max(self._streams[stream], event)  # type: ignore[type-var, assignment]

    def done(self, event: Event) -> bool:
        return time.perf_counter_ns() >= event  # type: ignore[operator, no-any-return]


class LinkRank(Rank):
    """A worker whose KV lies on such a device. Its caches are never touched."""

    def __init__(
        self, config: VllmConfig, kv: KVCacheConfig, number: int, *, device: LinkDevice, step_ns: float
    ) -> None:
        self._device, self._step_ns = device, step_ns
        self._out: list[Event] = []
        super().__init__(config, kv, number)

    def _allocated(self, kv: KVCacheConfig) -> dict[str, torch.Tensor]:
        with patch.object(torch, "zeros", torch.empty):
            return super()._allocated(kv)

    def _register(self) -> None:
        with patch.object(worker, "device_kv", partial(device_kv_over, self._device)):
            super()._register()

    def _forward(self, output: SchedulerOutput, texts: dict[str, Text]) -> dict[str, int]:
        self._device.busy(self._device.current(), self._step_ns)
        self._out.append(self._device.record(self._device.current()))
        spans = spans_of(output, texts)
        return {name: texts[name].token(stop) for name, (_, stop, known) in spans.items() if stop >= known}

    def await_step(self) -> None:
        while self._out and not self._device.done(self._out[0]):
            time.sleep(0.0005)
        self._out.clear()


def measure(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    what = {"tokens": given.tokens, "staging": given.staging, "hold_ms": given.hold_ms, "GBps": given.gbps}
    salt = int(time.time())  # no prompt is stored already
    settings = {
        "address": given.address,
        "prefill_tokens_per_s": 10**9,  # nothing is loaded
        "staging_bytes": size(given.staging),
        "hold_ms": given.hold_ms,
        "store_ms": 60_000,
    }
    device = LinkDevice(given.gbps)
    with tempfile.TemporaryDirectory() as folder, twins():
        config = engine_config(
            model_folder(Path(folder) / "model", MODEL),
            settings,
            dtype="bfloat16",
            block_size=BLOCK,
            max_model_len=given.tokens + 1_024,
            max_num_batched_tokens=given.step,
        )
        with patch.object(compat, "kv_format", lambda config, spec: KVFormat()):
            rank = partial(LinkRank, device=device, step_ns=given.step_ms * 1e6)
            engine = Engine(config, blocks=given.blocks or 2 * given.tokens // BLOCK, at_once=True, rank=rank)
        engine.join(eventually)
        try:
            made = [[(token + salt + number) % 199 for token in range(given.tokens)] for number in range(given.prompts)]
            for at in range(0, len(made), given.at_once):
                yield {**what, **_stored(engine, made[at : at + given.at_once], given.answer)}
        finally:
            engine.close()


def _stored(engine: Engine, prompts: list[list[int]], answer: int) -> dict[str, Any]:
    """Has the engine compute prompts, and returns what became of them in the cluster."""
    engine.reports.clear()
    for number, prompt in enumerate(prompts):
        engine.add(f"{number}", prompt, max_tokens=answer)
    began = time.perf_counter()
    engine.run()
    computed = time.perf_counter()
    engine.finish()
    engine.drain()
    stored = time.perf_counter()
    blocks = sum(len(prompt) // BLOCK for prompt in prompts)
    return {
        "GiB": round(blocks * engine.client.spec.block_bytes / 2**30, 2),
        "blocks": blocks,
        "stored": sum(engine.client.lookup(prompt).blocks for prompt in prompts),
        "dropped_stores": sum(report.dropped for report in engine.reports),
        "failed_stores": sum(sum(report.store_misses.values()) for report in engine.reports),
        "compute_s": round(computed - began, 2),
        "until_stored_s": round(stored - began, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True, help="of a coordinator")
    parser.add_argument("--tokens", type=int, default=32_768, help="of the prompt (32768)")
    parser.add_argument("--step", type=int, default=8_192, help="tokens of a step (8192)")
    parser.add_argument("--step-ms", type=float, default=330, help="of the model in a step (330)")
    parser.add_argument("--prompts", type=int, default=2, help="one after another; the first finds cold memory (2)")
    parser.add_argument("--at-once", type=int, default=1, help="prompts that are asked at once (1)")
    parser.add_argument("--blocks", type=int, help="of the engine's KV (twice what a prompt takes)")
    parser.add_argument("--answer", type=int, default=1, help="tokens of the answer (1)")
    parser.add_argument("--staging", default="256MiB", help="the connector's staging_bytes (256MiB)")
    parser.add_argument("--hold-ms", type=int, default=1_000, help="the connector's hold_ms (1000)")
    parser.add_argument("--gbps", type=float, default=50, help="GB/s of the link (50)")
    for row in measure(parser.parse_args()):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
