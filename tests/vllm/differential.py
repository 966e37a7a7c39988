"""A differential fuzzer of the connector: engines over one cluster, driven by vLLM's own schedulers, against an oracle.

    python -m tests.vllm.differential --operations 20000 --seed 1

A scenario draws from its seed two engines (full attention, latents, layers that attend in chunks, groups with windows
or recurrent state, one or two ranks, in some pipeline ranks too, chunked prefill, overlapping steps, few blocks, with
and without vLLM's own prefix cache, loads within or beside the passes) and a cluster with too little memory. Then it
draws operations: requests with shared prefixes, salts and pictures, steps, aborts between steps and within them,
flipped bits, purges, engines that end and start again, and engines on a device that sleep. Requests whose loads have
failed are often aborted, and asked again. Engines give different pictures one name.

The oracle is toy.py's Text, which shares no code with kvcluster: what the KV of a position must be follows from the
tokens, the salt and the pictures before it. An engine that takes a block as computed whose content is anything else
fails the scenario, and so do blocks that stay in use, a request that does not end, and a broken invariant of the
cluster.

Each seed draws the same operations every time. Two scenarios in three wait before each step until nothing moves; the
others leave the order of transfers to the machine, and some of their stores take a while.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any
from unittest.mock import patch

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from kvcluster.engines.vllm import compat
from kvcluster.transfers.load_executor import LoadSink
from kvcluster.transfers.store_source import StoreSource
from tests.vllm.build import BLOCK, MODELS, format_on_a_gpu, model_folder
from tests.vllm.conftest import Bench, a_bench
from tests.vllm.scripted import PATIENT
from tests.vllm.toy import Engine, Picture
from tests.vllm.twin_toy import STAGINGS, TwinRank, copies_blocks, twins

OPERATIONS = 150
"""Of one scenario."""

TWIN_OPERATIONS = 40
"""Of one scenario of engines over a twin, which is slow."""

_LENGTH = 12 * BLOCK
_TOKENS = _LENGTH + 26
"""Of the longest request, with what is said."""

_PAUSES_S = (0, 0, 0, 0.003, 0.012)

_OPERATIONS = {
    "add": 18,
    "again": 6,
    "step": 60,
    "abort": 6,
    "restart": 1,
    "flip": 5,
    "purge": 1,
    "reset": 2,
    "spoil": 6,
    "sleep": 3,
}


@dataclass(frozen=True, slots=True)
class Traits:
    """What a scenario drew of its engines."""

    model: str
    options: dict[str, Any]
    settings: dict[str, int]
    calm: bool
    twin: bool = False
    pipeline: tuple[int, int] = (1, 1)
    """The numbers of pipeline ranks of its engines, which are started with one and the other in turn."""


class Scenario:
    """The engines of one seed, and the operations that befall them."""

    def __init__(self, bench: Bench, models: dict[str, Path], seed: int, *, twin: bool = False) -> None:
        self._random = random.Random(f"scenario {seed}")  # a number of few bits makes the first draws alike
        self._bench = bench
        self._models = models
        self._traits = self._drawn()
        if seed % 5 == 3 and self._traits.model == "llama":  # not drawn, so that all other seeds draw as before
            self._traits = replace(self._traits, model="mla")
        if seed % 15 == 9 and self._traits.model == "llama":
            self._traits = replace(self._traits, model="llama4")
        if seed % 7 == 3:
            most = 3 if self._traits.model == "gemma" else 2
            self._traits = replace(self._traits, pipeline=((most, 1), (1, 2), (2, most))[seed // 7 % 3])
        if seed % 10 == 8:
            self._traits = self._with_states(seed)
        if twin:  # loads go beside the passes, staging is as much as some blocks, and much is under way at once
            self._traits = replace(self._traits, twin=True, calm=self._random.random() < 0.2)
            self._traits.settings.update(layerwise_ms=0, staging_bytes=self._random.choice(STAGINGS))
        self._weights = {kind: weight for kind, weight in _OPERATIONS.items() if twin or kind != "sleep"}
        bench.start(shards=self._random.randint(1, 2), ram_bytes=self._random.choice(["64KiB", "128KiB", "1MiB"]))
        self._roots = [[self._random.randrange(3) for _ in range(_LENGTH)] for _ in range(3)]
        self._lives = 0
        self._requests = 0
        self._asked: list[tuple[list[int], str | None, list[tuple[int, int]]]] = []
        self._engines = [self._started() for _ in range(2)]
        self.events: Counter[str] = Counter()
        """What happened in all engines: a scenario that never loads shows nothing."""

    def run(self, operations: int = OPERATIONS) -> None:
        kinds, weights = list(self._weights), list(self._weights.values())
        drawing = self._random
        slowed = (StoreSource, LoadSink) if self._traits.twin else (StoreSource,)
        with nullcontext() if self._traits.calm else slow_copies(random.Random(drawing.getrandbits(48)), *slowed):
            for _ in range(operations):
                at, (kind,) = drawing.randrange(2), drawing.choices(kinds, weights)
                self._random = random.Random(drawing.getrandbits(48))  # what one draws may depend on what it meets
                getattr(self, f"_{kind}")(at)
            for engine, *_ in self._engines:
                self._end(engine)

    # ----------------------------------------------------------------------------------------------- operations

    def _add(self, at: int) -> None:
        draw = self._random
        root = draw.choice(self._roots)
        kept = draw.randint(0, _LENGTH - 1)
        tokens = [*root[:kept], *(draw.randrange(3) for _ in range(draw.choice([0, 1, BLOCK, 3 * BLOCK])))]
        tokens = tokens[:_LENGTH] or [1]
        salt = draw.choice([None, None, None, "one", "other"])
        shown: list[tuple[int, int]] = []
        if len(tokens) > 4 and not draw.randrange(4):
            offset = draw.choice([0, 2 * BLOCK, draw.randrange(len(tokens) - 3), len(tokens) - 3])
            if offset == len(tokens) - 3 and draw.random() < 0.7:  # the picture is the end, and the end that of a block
                tokens = tokens[: max(BLOCK, len(tokens) // BLOCK * BLOCK)]
                offset = len(tokens) - 3
            if offset + 3 <= len(tokens):
                shown.append((draw.randrange(2), offset))
        self._ask(at, tokens, salt, shown)

    def _again(self, at: int) -> None:
        self._ask_again(at, last=False)

    def _ask_again(self, at: int, *, last: bool) -> None:
        """Asks a prompt again, by either engine, and a little more: perhaps without its pictures."""
        if self._asked:
            tokens, salt, shown = self._asked[-1] if last else self._random.choice(self._asked[-8:])
            more = [self._random.randrange(3) for _ in range(self._random.choice([0, 1, BLOCK]))]
            self._ask(at, [*tokens, *more][:_LENGTH], salt, shown if self._random.random() < 0.6 else [])

    def _ask(self, at: int, tokens: list[int], salt: str | None, shown: list[tuple[int, int]]) -> None:
        """Adds a request. `shown` are the numbers of pictures, and where they are; each life has pictures of its own by
        these names."""
        engine, life, _ = self._engines[at]
        pictures = [Picture(f"uuid-{number}", 1 + 10 * life + number, offset, 3) for number, offset in shown]
        max_tokens = self._random.choice([1, 2, 5, 14, 14, 26])  # long answers are preempted, in few blocks
        self._requests += 1
        if sum(not request.is_finished() for request in engine.requests.values()) < 12:
            self._asked.append((tokens, salt, shown))
            name = f"r{self._requests}"
            engine.add(name, tokens, max_tokens=max_tokens, cache_salt=salt, pictures=pictures)

    def _step(self, at: int) -> None:
        self._make_step(at, aborts_within=0.05)

    def _make_step(self, at: int, *, aborts_within: float) -> None:
        engine, draw = self._engines[at][0], self._random
        failed = engine.counts["failed_loads"]
        if draw.random() < aborts_within:
            self._abort_within(engine)
        output = engine.step()
        if not output.total_num_scheduled_tokens and engine.scheduler.has_requests():
            engine.wait_idle()
        loads = [load for step in engine.steps[-2:] for load in step.loads]
        self.events["loads within a pass"] += sum(load.layerwise for load in engine.steps[-1].loads)
        if engine.counts["failed_loads"] > failed:
            self.events["failed loads within a pass"] += any(load.layerwise for load in loads)
            if loads and draw.random() < 0.6:
                self._abort_one(engine, [load.request for load in loads])
                self._ask_again(at, last=draw.random() < 0.5)

    def _abort_within(self, engine: Engine) -> None:
        """Aborts a request of the next step while that is out, rather one that loads."""
        before = engine.on_step

        def abort(output: SchedulerOutput) -> None:
            engine.on_step = before
            before(output)
            loading = [load.request for load in output.kv_connector_metadata.step.loads]
            self._abort_one(engine, loading or [*output.num_scheduled_tokens])

        engine.on_step = abort

    def _abort_one(self, engine: Engine, names: list[str]) -> None:
        running = [name for name in names if not engine.requests[name].is_finished()]
        if running:
            engine.abort(self._random.choice(running))

    def _abort(self, at: int) -> None:
        engine = self._engines[at][0]
        loading = [name for name, one in engine.requests.items() if one.status is RequestStatus.WAITING_FOR_REMOTE_KVS]
        aborts_a_load = self._traits.twin and loading and self._random.random() < 0.7
        self._abort_one(engine, loading if aborts_a_load else [*engine.requests])

    def _restart(self, at: int) -> None:
        engine = self._engines[at][0]
        if self._traits.twin and self._random.random() < 0.5:
            engine.run(most=2_000)
            engine.finish()  # what is under way then ends in the middle
        else:
            self._end(engine)
        engine.close()
        self._engines[at] = self._started()

    def _sleep(self, at: int) -> None:
        """As vLLM puts an engine to sleep: when no request is left, whatever still moves."""
        engine = self._engines[at][0]
        engine.run(most=2_000)
        engine.finish()
        assert engine.scheduler.reset_prefix_cache()
        for rank in engine.ranks:
            rank.sleep()
        self.events["sleeps"] += 1

    def _spoil(self, at: int) -> None:
        """A prompt that the cluster has is asked, with more behind it, while a block of it is damaged, and the engine's
        own cache has none of it: so what a step computes may be over KV that did not arrive. Then it is asked again."""
        engine, draw = self._engines[at][0], self._random
        asked = [tokens for tokens, salt, shown in self._asked[-16:] if salt is None and not shown]
        tokens = draw.choice(asked)[: _LENGTH - 3 * BLOCK] if asked else []
        if len(tokens) < BLOCK:
            return
        engine.run(most=2_000)
        engine.scheduler.reset_prefix_cache()
        self._damage(engine, tokens)
        tokens = [*tokens, *(draw.randrange(3) for _ in range(draw.choice([BLOCK, 3 * BLOCK])))]
        for _ in range(draw.randint(2, 4)):
            self._ask(at, tokens, None, [])
            for _ in range(draw.randint(1, 4)):
                self._make_step(at, aborts_within=0.5)

    def _flip(self, at: int) -> None:
        self._damage(self._engines[at][0], self._random.choice(self._roots))

    def _damage(self, engine: Engine, tokens: list[int]) -> None:
        cluster, chain = self._bench.cluster, engine.client.hashes(tokens)
        block, bit = self._random.choice(chain), self._random.randrange(8 * 1024)
        for shard in sorted(cluster.shards):
            with suppress(LookupError):  # it does not hold the block
                cluster.corrupt(shard, block=block, bit=bit)

    def _purge(self, at: int) -> None:
        client = self._engines[at][0].client
        client.purge(model=client.spec.model)

    def _reset(self, at: int) -> None:
        self._engines[at][0].scheduler.reset_prefix_cache()

    # -------------------------------------------------------------------------------------------------- engines

    def _drawn(self) -> Traits:
        draw = self._random
        caches = draw.random() < 0.6
        model = draw.choice(["llama", "llama", "gemma"])
        options = {
            "blocks": draw.choice([20, 30, 60] if model == "llama" else [64, 80, 120]),
            "overlap": draw.random() < 0.2,
            "enable_prefix_caching": caches,
            "max_model_len": _TOKENS,
            "max_num_batched_tokens": draw.choice([16, 32, 64]),
            "max_num_seqs": 8,
            "tensor_parallel_size": draw.choice([1, 1, 2]),
        }
        settings = {"prefill_tokens_per_s": 1, "layerwise_ms": draw.choice([0, 10_000, 10_000]), **PATIENT}
        return Traits(model, options, settings, draw.random() < 2 / 3)

    def _with_states(self, seed: int) -> Traits:
        """The same engines with layers of recurrent state, which want blocks for a state of each group, and vLLM's own
        prefix cache. It keeps the state of every boundary at which a step ends, of some, or of the last of a prompt."""
        options = self._traits.options | {
            "blocks": max(64, self._traits.options["blocks"]),
            "enable_prefix_caching": True,
            "prefix_cache_retention_interval": (BLOCK, 0, 2 * BLOCK)[seed // 10 % 3],
        }
        return replace(self._traits, model="conv", options=options, pipeline=(1, 1))

    def _started(self) -> tuple[Engine, int, int]:
        """Starts an engine: with its number, and the free blocks that it must end with."""
        self._lives += 1
        traits = self._traits
        model = self._models[traits.model]
        options = dict(traits.options)
        options["pipeline_parallel_size"] = stages = traits.pipeline[self._lives % 2]
        if traits.model == "gemma":  # each step that is out keeps blocks that a window has left behind
            options["blocks"] += 40 * (stages - 1)
        if traits.twin:
            seed, second, zeroes = (
                self._random.getrandbits(32),
                self._random.random() < 0.5,
                self._random.random() < 0.3,
            )
            options["rank"] = partial(TwinRank, seed=seed, second=second, zeroes=zeroes)
        engine = self._bench.engine(model, dict(traits.settings), at_once=traits.calm, **options)
        if traits.twin and zeroes:
            copies_blocks(engine, random.Random(self._random.getrandbits(32)))
        if traits.calm:
            engine.on_step = lambda output: engine.wait_idle()
        return engine, self._lives, engine.free_blocks()

    def _end(self, engine: Engine) -> None:
        """All its requests end, and it gives everything back."""
        engine.run(most=2_000)
        engine.drain(most=200)
        (free,) = {free for one, _, free in self._engines if one is engine}
        assert engine.free_blocks() == free, f"{free - engine.free_blocks()} blocks stay in use"
        self.events["loads"] += int(engine.counts["loads"] - engine.counts["failed_loads"])


@contextmanager
def slow_copies(rng: random.Random, *kinds: type) -> Iterator[None]:
    """Within it some copies to or from the engine's blocks take so long that these get a new owner meanwhile."""

    def slowed(run: Callable[..., None]) -> Callable[..., None]:
        def slow(*given: Any) -> None:
            threading.Event().wait(rng.choice(_PAUSES_S))
            run(*given)

        return slow

    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(patch.object(kind, "run", slowed(kind.run)))
        yield


@contextmanager
def models(folder: Path) -> Iterator[dict[str, Path]]:
    """The folders of the toys' models, and K and V side by side (build.py)."""
    with patch.object(compat, "kv_format", format_on_a_gpu):
        yield {name: model_folder(folder / name, of) for name, of in MODELS.items()}


def run_scenario(
    folders: dict[str, Path], seed: int, operations: int = OPERATIONS, *, twin: bool = False
) -> Counter[str]:
    """Runs the scenario of a seed; with `twin`, of engines whose KV lies in the memory of a twin. Returns what
    happened; raises AssertionError for a finding."""
    with twins() if twin else nullcontext(), a_bench() as bench:
        scenario = Scenario(bench, folders, seed, twin=twin)
        scenario.run(operations)
    return scenario.events


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=20_000, help="operations of all scenarios (20000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first scenario (0)")
    parser.add_argument("--twin", action="store_true", help="engines whose KV lies in the memory of a twin")
    chosen = parser.parse_args(arguments)
    operations = TWIN_OPERATIONS if chosen.twin else OPERATIONS
    began, done, events, failed = time.monotonic(), 0, Counter[str](), 0
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        folders = stack.enter_context(models(Path(folder)))
        seed = chosen.seed
        while done < chosen.operations:
            try:
                events += run_scenario(folders, seed, operations, twin=chosen.twin)
            except Exception as error:  # whatever it is, the other seeds still run
                failed += 1
                where = " <- ".join(f"{at.name}:{at.lineno}" for at in reversed(extract_tb(error.__traceback__)[-4:]))
                words = (str(error).splitlines() or [""])[0]
                print(f"seed {seed}: {type(error).__name__}: {words} ({where})", flush=True)
            done += operations
            seed += 1
    seconds = time.monotonic() - began
    rate = done / seconds
    print(
        f"{done:,} operations of {seed - chosen.seed} scenarios, {rate:.0f} a second; {failed} failed: "
        + ", ".join(f"{what} {count:,}" for what, count in sorted(events.items()))
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
