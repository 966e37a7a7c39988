"""What the connector costs an engine and what it saves: ratios of interleaved runs, with their spread; and a picture,
build/vllm-ttft.png.

Engines stay up and take turns, all pinned to one core, and the cluster to the other; while one runs the others are
idle. So a pair of runs sees the same machine. Times come from the engine's own loop, one reading a step.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import kvcluster
from tests.ports import free_port
from tests.vllm.e2e.engine import ENVIRONMENT
from tests.vllm.e2e.picture import draw
from tests.vllm.e2e.run import CLIENT, ROOT, House

ENGINE_CORE, CLUSTER_CORE = 0, 1
MODEL = "middling"
LLM = {"max_model_len": 4096, "max_num_batched_tokens": 2048}


class Engine:
    """An engine that stays up and runs what it is told, round by round."""

    def __init__(
        self, house: House, name: str, connector: dict[str, Any] | None, llm: dict[str, Any] | None = None
    ) -> None:
        job = {"model": house.model(MODEL), "connector": connector, "llm": llm or LLM}
        self.name = name
        self._said = house.folder / f"cost-{name.replace(' ', '-')}.txt"
        with open(self._said, "wb") as said:
            self._process = subprocess.Popen(
                ["taskset", "-c", str(ENGINE_CORE), str(house.python), "-m", "tests.vllm.e2e.timed", json.dumps(job)],
                cwd=ROOT,
                env=os.environ | ENVIRONMENT | house.surroundings | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
        self._hear()  # it is up

    def run(self, prompts: Sequence[list[int]], new_tokens: int, **more: Any) -> dict[str, Any]:
        """Times, in seconds: of the whole, of the processor, to each first token, between tokens, of each step; and the
        connector's reports of requests, if any."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens, **more}) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                heard: dict[str, Any] = json.loads(line)
                return heard
        raise AssertionError(f"{self.name} ended:\n{self._said.read_text(errors='replace')[-4000:]}")


@contextmanager
def engines(house: House, **connectors: dict[str, Any] | None) -> Iterator[dict[str, Engine]]:
    with ExitStack() as stack:
        started = {}
        for name, connector in connectors.items():
            started[name] = Engine(house, name, connector)
            stack.callback(started[name].close)
        yield started


def check(house: House, rounds: int = 7) -> None:
    """Every figure, beside its goal where it has one."""
    for pid in house.site.pids():
        os.sched_setaffinity(pid, {CLUSTER_CORE})
    nowhere = house.connector() | {"address": f"127.0.0.1:{free_port()}"}
    learn = {"prefill_tokens_per_s": 0}
    with engines(
        house,
        none=None,
        cached=house.connector(**learn),
        unreachable=nowhere | learn,
        always=house.connector(),
    ) as up:
        _no_reuse(house, up, rounds)
        _between_tokens(house, up, rounds)
        _unreachable(house, up, rounds)
        _visible(house, up, rounds)
        _hits(house, up, rounds)


def _no_reuse(house: House, up: dict[str, Engine], rounds: int) -> None:
    rng, ratios = random.Random(1), []
    for number in range(2 * rounds):  # one figure a run, where others have hundreds
        took = {}
        for name in ("none", "cached")[:: -1 if number % 2 else 1]:
            took[name] = up[name].run([_text(rng, 512) for _ in range(6)], 24)["seconds"]
        ratios.append(took["none"] / took["cached"])
    _row(house, "cost: throughput without reuse, of no connector", ratios, least=0.97)


def _between_tokens(house: House, up: dict[str, Engine], rounds: int) -> None:
    rng = random.Random(2)
    p50, p99, gained = [], [], []
    for _ in range(rounds):
        fresh = [[_text(rng, 128) for _ in range(6)] for _ in range(2)]
        none, cached = up["none"].run(fresh[0], 96), up["cached"].run(fresh[1], 96)
        p50.append(_quantile(cached["between"], 50) / _quantile(none["between"], 50))
        p99.append(_quantile(cached["between"], 99) / _quantile(none["between"], 99))
        gained.append(1e3 * (statistics.mean(cached["steps"]) - statistics.mean(none["steps"])))
    _row(house, "cost: time between tokens while storing, p50", p50, most=1.05)
    _row(house, "cost: the same, p99", p99, most=1.10)
    text = f"{statistics.median(gained):.2f} ms ({min(gained):.2f} to {max(gained):.2f})"
    house.table.add("cost: a scheduler step takes longer by", text, True)


def _unreachable(house: House, up: dict[str, Engine], rounds: int) -> None:
    rng, ratios = random.Random(3), []
    for _ in range(2 * rounds):
        fresh = [[_text(rng, 512)] for _ in range(2)]
        none, gone = up["none"].run(fresh[0], 2), up["unreachable"].run(fresh[1], 2)
        ratios.append(gone["first"][0] / none["first"][0])
    _row(house, "cost: time to first token, coordinator unreachable", ratios, most=1.02)


def _visible(house: House, up: dict[str, Engine], rounds: int) -> None:
    """From the first token, when all of a prompt's KV has been computed, until another process finds all of it."""
    house.run({"model": house.model(MODEL), "connector": house.connector(), "llm": LLM, "rounds": []})  # tells the spec
    rng, waits = random.Random(5), []
    with kvcluster.connect(house.site.address, house.spec, token=house.site.token or None, config=CLIENT) as client:
        for _ in range(rounds):
            prompt = _text(rng, 512)
            seen: list[float] = []

            def watch(prompt: list[int] = prompt, seen: list[float] = seen) -> None:
                until = time.perf_counter() + 30
                while client.lookup(prompt).tokens < len(prompt) and time.perf_counter() < until:
                    threading.Event().wait(0.002)
                seen.append(time.perf_counter())

            watcher = threading.Thread(target=watch)
            watcher.start()
            ran = up["cached"].run([prompt], 2)
            watcher.join()
            waits.append(1e3 * (seen[0] - ran["began"] - ran["first"][0]))
    text = f"{statistics.median(waits):.0f} ms ({min(waits):.0f} to {max(waits):.0f}), 512 tokens, 24 MiB"
    house.table.add("cost: from a prefill's end until others find it", text, True)


def _hits(house: House, up: dict[str, Engine], rounds: int) -> None:
    """Computed by one engine, loaded by another; and what the connector would have chosen."""
    rng = random.Random(4)
    told: list[tuple[int, float, float, float]] = []
    for tokens in (64, 128, 256, 512, 1024, 2048, 4000):
        computed, hit, chosen = [], [], []
        for _ in range(max(3, rounds // 2)):
            prompt = [_text(rng, tokens)]
            up["cached"].run(prompt, 2)  # computes and stores
            computed.append(up["none"].run(prompt, 2)["first"][0])
            hit.append(up["always"].run(prompt, 2)["first"][0])
            chosen.append(up["cached"].run(prompt, 2)["first"][0])
        told.append((tokens, *(1e3 * statistics.median(values) for values in (computed, hit, chosen))))
        of = (
            f"computed {told[-1][1]:.0f} ms, loaded {told[-1][2]:.0f} ms, as the connector chooses {told[-1][3]:.0f} ms"
        )
        house.table.add(f"cost: time to first token, {tokens} tokens", of, True)
    pays = next((tokens for tokens, computed_ms, hit_ms, _ in told if hit_ms < computed_ms), None)
    house.table.add("cost: loads pay from", f"{pays} tokens on", True)
    Path(ROOT, "build").mkdir(exist_ok=True)
    draw(told, pays, str(ROOT / "build" / "vllm-ttft.png"))


def _row(house: House, what: str, ratios: Sequence[float], least: float = 0, most: float = 0) -> None:
    """A figure beside its goal. Machines are noisy, so that a goal which is missed is said and fails nothing."""
    middle = statistics.median(ratios)
    goal = f"at least {least}" if least else f"at most {most}"
    met = "met" if (middle >= least if least else middle <= most) else "missed"
    house.table.add(what, f"{middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f}); goal {goal}: {met}", True)


def _text(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(256) for _ in range(tokens)]


def _quantile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]
