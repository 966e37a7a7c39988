"""Generates over a context that is many times larger than the resident set, beside a run with all KV in memory.

    .venv/bin/python benchmarks/generate.py --tokens 16384 --times 16

Each run is a process of its own with one thread, and a random Llama in float32. "in memory" is `model.generate`; the
others are `generate(offload=True)` over a cluster of two shards in other processes, with `--times` less resident memory
than the KV of the context takes: streamed over tcp, or borrowed from shared memory, with shards that keep pages raw or,
below a small RAM tier, in q8 or q4; or over tcp with all that is absent attended to at the shards. It prints
how far each process's own memory grew above what it had after a warm-up of the same kind, at most, prefill included;
the seconds to the first token, and the median of the others; how many of the new ids are those in memory; and the
greatest difference of their logits, as a part of the greatest logit, up to the first id that differs.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import kvcluster
from kvcluster.child_python import spawn_context, spawning
from kvcluster.client import connect
from kvcluster.config import ClientConfig
from kvcluster.engines.transformers import generate, spec_of
from kvcluster.errors import KVClusterError

BLOCK_TOKENS = 16
WARM_UP_TOKENS = 600
EAGER = {"low_free": 0.9, "high_free": 0.9}  # all goes down a tier as soon as it is stored


@dataclass(frozen=True)
class Run:
    """One process. `transport`: None without a cluster. `codec`: of the shards' pages. `shipped`: whether queries are
    sent to the shards; the context is streamed else."""

    transport: str | None = None
    codec: str = "raw"
    shipped: bool = False

    @property
    def title(self) -> str:
        if self.transport is None:
            return "in memory"
        return f"{self.transport}, {self.codec}" + (", shipped" if self.shipped else "")


@dataclass(frozen=True)
class Outcome:
    """What a process measured: ids `[new]`, logits `[new, vocabulary]`, seconds and bytes."""

    ids: list[int]
    logits: list[list[float]]
    first_s: float
    next_s: float
    grown_bytes: int


RUNS = [Run(), Run("tcp"), Run("tcp", shipped=True), Run("shm"), Run("tcp", "q8"), Run("shm", "q8"), Run("tcp", "q4")]


def model_of(layers: int) -> Any:
    """Returns a random model with 8 KiB of KV a token at 8 layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1_024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2**20,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


class TokenTimes(BaseStreamer):
    """When the tokens of a generation come: the first after `first_s` seconds, each other one after `next_s`, the
    median."""

    def __init__(self) -> None:
        self._times = [time.perf_counter()]

    def put(self, value: torch.Tensor) -> None:
        self._times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing more comes."""

    @property
    def first_s(self) -> float:
        return self._times[2] - self._times[0]  # the first that is put is the prompt

    @property
    def next_s(self) -> float:
        return statistics.median(after - before for before, after in pairwise(self._times[2:]))


@contextmanager
def own_memory() -> Iterator[list[int]]:
    """Yields a list with the most bytes of its own that this process has had within it, without shared memory."""
    most, over = [_own_bytes()], threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            most[0] = max(most[0], _own_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def _own_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024


def work(run: Run, address: str, spec: kvcluster.KVSpec, times: int, new: int, tokens: int, out: Connection) -> None:
    """What a process does."""
    torch.set_num_threads(1)
    model = model_of(len(spec.groups[0].layers))
    ids = torch.randint(1, 1_024, (1, tokens), generator=torch.Generator().manual_seed(1))
    others = torch.randint(1, 1_024, (1, WARM_UP_TOKENS), generator=torch.Generator().manual_seed(2))
    settings = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    if run.transport is None:
        call = model.generate
    else:
        resident = int(spec.token_bytes) * tokens // times
        config = ClientConfig(resident_bytes=resident, transports=(run.transport, "grpc"))
        client = connect(address, spec, config=config)

        def call(prompt: torch.Tensor, **given: Any) -> Any:
            planner = kvcluster.ShipAbsent() if run.shipped else None
            return generate(client, model, prompt, offload=True, planner=planner, **given)

    call(others, max_new_tokens=2, **settings)
    before, watch = _own_bytes(), TokenTimes()
    with own_memory() as most:
        told = call(ids, max_new_tokens=new, streamer=watch, **settings)
    logits = torch.stack(told.logits)[:, 0].tolist()
    out.send(Outcome(told.sequences[0, tokens:].tolist(), logits, watch.first_s, watch.next_s, most[0] - before))


def measured(run: Run, address: str, spec: kvcluster.KVSpec, options: argparse.Namespace) -> Outcome:
    """Returns what a process of this run measured."""
    processes = spawn_context()
    ours, its = processes.Pipe(duplex=False)
    given = run, address, spec, options.times, options.new, options.tokens, its
    process = processes.Process(target=work, args=given)
    with spawning():
        process.start()
    its.close()
    try:
        outcome: Outcome = ours.recv()
    except EOFError:
        raise SystemExit(f"the run {run.title} failed") from None
    finally:
        process.join()
    return outcome


def measure(run: Run, spec: kvcluster.KVSpec, options: argparse.Namespace) -> Outcome:
    """Runs one process, with a cluster of its own if it has one."""
    if run.transport is None:
        return measured(run, "", spec, options)
    room = int(spec.token_bytes) * options.tokens * 2 + 2**26
    config: dict[str, Any] = {}
    if run.codec != "raw":
        config["coordinator"] = {"host_codec": run.codec, "hold_ms": 0, **EAGER}
    ram = room if run.codec == "raw" else room // 4
    host = 0 if run.codec == "raw" else room
    with kvcluster.local(shards=2, ram_bytes=ram, host_bytes=host, config=config) as cluster:
        return measured(run, cluster.address, spec, options)


def difference(outcome: Outcome, right: Outcome) -> tuple[int, float]:
    """Returns how many leading ids are equal, and how far logits are off up to the first that is not."""
    equal = next((at for at, (mine, its) in enumerate(zip(outcome.ids, right.ids, strict=True)) if mine != its), None)
    compared = len(right.ids) if equal is None else equal + 1
    mine, its = (torch.tensor(each.logits[:compared]) for each in (outcome, right))
    return len(right.ids) if equal is None else equal, float((mine - its).abs().max() / its.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384, help="of the context (default 16384)")
    parser.add_argument("--times", type=int, default=16, help="how many resident sets the context is (default 16)")
    parser.add_argument("--new", type=int, default=16, help="tokens to generate (default 16)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default 8)")
    parser.add_argument("--runs", nargs="*", default=[run.title for run in RUNS], help="some of the runs, by title")
    options = parser.parse_args()
    spec = spec_of(model_of(options.layers), block_tokens=BLOCK_TOKENS)
    context = int(spec.token_bytes) * options.tokens
    print(
        f"{options.tokens:,} tokens, {context / 2**20:,.0f} MiB of KV; resident {context / options.times / 2**20:,.1f}"
    )
    print(f"{'':18} {'grown MiB':>10} {'first s':>10} {'next ms':>10} {'same ids':>10} {'logits off':>11}")
    right = measure(RUNS[0], spec, options)
    for run in [run for run in RUNS if run.title in options.runs]:
        try:
            outcome = right if run is RUNS[0] else measure(run, spec, options)
        except KVClusterError as error:
            print(f"{run.title:12} {error}")
            continue
        equal, off = difference(outcome, right)
        print(
            f"{run.title:18} {outcome.grown_bytes / 2**20:>10.1f} {outcome.first_s:>10.1f} "
            f"{outcome.next_s * 1e3:>10.1f} {f'{equal} of {len(right.ids)}':>10} {off:>11.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
