"""Observe mode beside what then happens: two engines observe a workload, `kvcluster report` predicts, and two others in
mode "on" run the same workload over a cluster. Then what observing costs, by interleaved runs and by its own clock.

Engines are pinned to one core and the cluster to the other, as in cost.py. Machines are noisy, so that a goal which is
missed is said and fails nothing, but for the prediction of tokens, which no clock decides.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import statistics
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcluster.cli.main import main
from tests.vllm.e2e.cost import CLUSTER_CORE, LLM, MODEL, Engine, engines
from tests.vllm.e2e.run import BLOCK, House

DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS, NEW_TOKENS = 8, 640, 40, 8
QUESTIONS = 48
SMALL = {"max_model_len": 1024, "max_num_batched_tokens": 1024, "num_gpu_blocks_override": 48}
OWN_CACHE = SMALL | {"enable_prefix_caching": True}
"""An engine's own cache holds two of the eight documents."""

PAUSE_S = 0.6
"""Between two questions: shards report twice a second what others can find from then on."""

WITHIN = 0.10
MOST = 1.01


@dataclass
class Question:
    """One request of the workload, and at which engine it is asked."""

    engine: int
    prompt: list[int]


def workload(seed: int = 1) -> list[Question]:
    """Questions about documents, some asked more often than others, at engines that are drawn."""
    rng = random.Random(seed)
    documents = [_text(rng, DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    popular = [1 / (1 + number) for number in range(DOCUMENTS)]
    return [
        Question(rng.randrange(2), [*rng.choices(documents, popular)[0], *_text(rng, QUESTION_TOKENS)])
        for _ in range(QUESTIONS)
    ]


def check(house: House, rounds: int = 10) -> None:
    """The prediction, what happened, and what observing cost."""
    for pid in house.site.pids():
        os.sched_setaffinity(pid, {CLUSTER_CORE})
    asked = workload()
    traces = house.folder / "traces"
    observing = {"mode": "observe", "trace_dir": str(traces)}
    seen = _run(house, asked, observing)
    prefill = _report(str(traces))["groups"][0]["prefill_tokens_per_s"]
    link = _measured_link(house, prefill)
    predicted = _report(str(traces), "--link", str(link))
    happened = _run(house, asked, house.connector(prefill_tokens_per_s=0))
    _compare(house, predicted["groups"][0], seen, happened)
    _clock(house, predicted["engines"])
    _cost(house, {"mode": "observe", "trace_dir": str(house.folder / "cost-traces")}, rounds)


# -------------------------------------------------------------------------------------------------- prediction


def _run(house: House, asked: Sequence[Question], connector: dict[str, Any]) -> dict[str, float]:
    """Asks one question after the other. Returns the sum of the times to first token, and of the tokens loaded."""
    llm = LLM | OWN_CACHE
    seconds = loaded = 0.0
    with _pair(house, connector, llm) as pair:
        for question in asked:
            ran = pair[question.engine].run([question.prompt], NEW_TOKENS)
            seconds += ran["first"][0]
            loaded += sum(report["loaded_tokens"] for report in ran["reports"])
            threading.Event().wait(PAUSE_S)
    return {"first_ms": 1e3 * seconds, "loaded_tokens": loaded}


@contextlib.contextmanager
def _pair(house: House, connector: dict[str, Any], llm: dict[str, Any]) -> Iterator[list[Engine]]:
    with contextlib.ExitStack() as stack:
        pair = []
        for number in range(2):
            pair.append(Engine(house, f"{connector.get('mode', 'on')}-{number}", connector, llm))
            stack.callback(pair[-1].close)
        yield pair


def _measured_link(house: House, prefill: int) -> Path:
    """The speed of loads, as `kvcluster breakeven` measures it on this cluster."""
    file = house.folder / "breakeven.json"
    model = Path(house.model(MODEL)) / "config.json"
    arguments = ["breakeven", "--model", str(model), "--prefill", str(prefill), "--block-tokens", str(BLOCK), "--json"]
    token = house.folder / "token"
    given = ["--token-from", str(token)] if house.site.token else []
    file.write_text(_said(*arguments, "--address", house.site.address, *given), encoding="utf-8")
    return file


def _report(*arguments: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(_said("report", *arguments, "--json"))
    return figures


def _said(*arguments: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(arguments) == 0, arguments
    return out.getvalue()


def _compare(house: House, predicted: dict[str, Any], seen: dict[str, float], happened: dict[str, float]) -> None:
    tokens, real = predicted["loaded_tokens"], happened["loaded_tokens"]
    off = tokens / real - 1 if real else float("inf")
    house.table.add(
        f"observe: tokens loaded of {predicted['prompt_tokens']:,}",
        f"predicted {tokens:,}, then loaded {real:,.0f}: {off:+.1%}; goal within {WITHIN:.0%}",
        abs(off) <= WITHIN,
    )
    link = predicted["link"]
    house.table.add(
        "observe: by the measured link",
        f"{link['path']}, {link['bytes_per_s'] / 1e9:.2f} GB/s after {link['fixed_ms']:.1f} ms, pays from "
        f"{link['pays_from_tokens']} tokens; prefill {predicted['prefill_tokens_per_s']:,} tokens/s",
        link["measured"],
    )
    before, after = seen["first_ms"], happened["first_ms"]
    saved, really = predicted["saved_ms"], before - after
    met = "met" if abs(saved / really - 1) <= WITHIN else "missed"
    house.table.add(
        "observe: time to first token saved, all questions",
        f"predicted {saved:,.0f} ms, then {really:,.0f} ms ({before:,.0f} without, {after:,.0f} with): "
        f"{saved / really - 1:+.1%}; goal within {WITHIN:.0%}: {met}",
        True,
    )
    alone = predicted["alone_found_tokens"]
    text = f"{predicted['local_tokens']:,} in their own caches, {predicted['found_tokens']:,} more in a cluster, "
    house.table.add("observe: where tokens are", text + f"{alone:,} if nothing were shared", True)


# -------------------------------------------------------------------------------------------------------- cost


def _clock(house: House, observed: Sequence[dict[str, Any]]) -> None:
    for number, engine in enumerate(observed):
        house.table.add(
            f"observe: time in hooks, engine {number}",
            f"{engine['us_per_request']:.0f} us a request, {engine['us_per_step']:.1f} us a step (longest "
            f"{engine['worst_step_us']:.0f}), {engine['steps']:,} steps; {engine['dropped_lines']} lines dropped",
            engine["dropped_lines"] == 0,
        )


def _cost(house: House, observing: dict[str, Any], rounds: int) -> None:
    """Times beside an engine without a connector, which takes turns."""
    rng = random.Random(3)
    ratios: dict[str, dict[str, list[float]]] = {"observe": {}, "control": {}}

    def add(what: str, took: dict[str, float]) -> None:
        for name, of_name in ratios.items():
            of_name.setdefault(what, []).append(took[name] / took["none"])

    with engines(house, none=None, observe=observing, control=None) as up:
        for number in range(2 * rounds):
            prompts = [_text(rng, 512)]
            ran = {name: up[name].run(prompts, 2) for name in _in_turn(number)}
            add("time to first token", {name: one["first"][0] for name, one in ran.items()})
            add("processor time of a prompt", {name: one["cpu_seconds"] for name, one in ran.items()})
        for number in range(rounds):
            prompts = [_text(rng, 128) for _ in range(6)]
            ran = {name: up[name].run(prompts, 96) for name in _in_turn(number)}
            for share in (50, 99):
                between = {name: _quantile(one["between"], share) for name, one in ran.items()}
                add(f"time between tokens, p{share}", between)
            add("processor time of 576 tokens", {name: one["cpu_seconds"] for name, one in ran.items()})
        _same_process(house, up["observe"], rounds)
    for what in ratios["observe"]:
        _ratio(house, f"observe: {what}, of no connector", ratios["observe"][what], ratios["control"][what])


def _same_process(house: House, engine: Engine, rounds: int) -> None:
    """Processes that do the same work differ, by where their memory lies: so one engine observes in every other
    round, and does nothing in the rounds between."""
    rng = random.Random(4)
    ratios: dict[str, list[float]] = {}
    for number in range(3 * rounds):
        prompts, ran = [_text(rng, 256)], {}
        for observing in (True, False)[:: 1 if number % 2 else -1]:
            ran[observing] = engine.run(prompts, 16, observing=observing)
        for what, key in (("time", "seconds"), ("processor time", "cpu_seconds")):
            ratios.setdefault(what, []).append(ran[True][key] / ran[False][key])
    for what, of_pairs in ratios.items():
        low, middle, high = statistics.quantiles(of_pairs, n=4)
        text = f"{middle:.3f} ({low:.3f} to {high:.3f}), {len(of_pairs)} pairs; goal at most {MOST}"
        house.table.add(f"observe: {what} of a request, of the same process not observing", text, True)


def _in_turn(number: int) -> tuple[str, ...]:
    names = ("none", "observe", "control")
    return names[number % 3 :] + names[: number % 3]


def _ratio(house: House, what: str, ratios: Sequence[float], control: Sequence[float]) -> None:
    """A figure with the middle half of its pairs, beside the goal and that of a second engine without a connector,
    which tells how much of it is the machine's noise."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    met = "met" if middle <= MOST else "missed"
    noise = statistics.quantiles(control, n=4)
    text = f"{middle:.3f} ({low:.3f} to {high:.3f}), {len(ratios)} pairs; goal at most {MOST}: {met}"
    house.table.add(what, f"{text}; control {noise[1]:.3f} ({noise[0]:.3f} to {noise[2]:.3f})", True)


def _text(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(256) for _ in range(tokens)]


def _quantile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]
