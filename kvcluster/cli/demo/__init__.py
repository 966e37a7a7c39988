"""`kvcluster demo`: two engine replicas share a document's KV through a real cluster on this machine.

The conductor starts an embedded Ray cluster and two replicas, each in its own process with the same model, and lets one
compute at a time: all questions without the cache, the first one through the cache (stored), all of them on the other
replica (loaded). Then a replica changes its weights, and must find nothing; and one reads more than a RAM tier
holds, twice (tiers.py), or answers with a sixteenth of the memory that the KV takes (far.py), or reads a pool on a GPU
(gpu.py). It checks its results: the exit status is 1 if the cache changed an answer, or if the checks could not have
noticed that. `DEMO_MODEL=path` replaces the model.

Nothing outlives it: everything it starts is a context manager, and a replica ends by itself when its conductor has
ended.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any

import kvcluster
from kvcluster.child_python import module_command
from kvcluster.cli.child_process import ChildProcess
from kvcluster.cli.demo import far as fourth_act
from kvcluster.cli.demo import gpu as fifth_act
from kvcluster.cli.demo import text
from kvcluster.cli.demo import tiers as third_act
from kvcluster.cli.demo.screen import Screen
from kvcluster.cli.demo.signals import Signals
from kvcluster.runtime.private_files import private_folder

for _name in ("ray", "torch", "transformers"):
    if importlib.util.find_spec(_name) is None:  # other processes import them
        raise ModuleNotFoundError(f"No module named {_name!r}", name=_name)

SHARDS = 2
RAM_BYTES = "512MiB"
_ENGINE = module_command("kvcluster.cli.demo.engine")
_QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}

Figures = dict[str, Any]
Progress = Callable[[int, int], None]


def run(arguments: Sequence[str] = ()) -> int:
    """Runs the demo. With `--json` prints the figures as one JSON object and nothing else. Returns the exit status."""
    as_json = "--json" in arguments
    with Signals() as signals, Screen(silent=as_json) as screen:
        with _stdout_discarded():
            figures = conduct(screen, signals)
        screen.show(figures)
    if as_json:
        print(json.dumps(figures, indent=2))
    return 0 if figures["ok"] else 1


@contextmanager
def _stdout_discarded() -> Iterator[None]:
    """Discards what is printed to standard output within the block: Ray prints there what becomes of its workers."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def conduct(screen: Screen, signals: Signals) -> Figures:
    """Runs all acts and returns the figures. Raises KVClusterError if a replica or the cluster fails."""
    began = time.monotonic()
    with ExitStack() as house:
        workshop = house.enter_context(private_folder("kvcluster-demo-")).path
        given = os.environ.get("DEMO_MODEL")
        model: Figures = {"path": given or str(workshop / "model"), "bytes_are_tokens": not given}
        first = house.enter_context(_replica("the first replica"))
        acts = house.enter_context(ExitStack())
        with screen.step("start Ray, a coordinator and two shards"), signals.put_off():
            cluster = acts.enter_context(kvcluster.local(shards=SHARDS, ram_bytes=RAM_BYTES))
        with screen.step("load the model" if given else "build a Llama of random weights"):
            if not given:
                first.ask("make", path=model["path"])
            about: Figures = first.ask("load", **model)
        with screen.step(f"no cache: {len(text.QUESTIONS)} questions") as progress:
            computed = _answers(first, text.QUESTIONS, progress, cached=False)
        with screen.step("first replica: one question, KV is stored") as progress:
            first.ask("connect", address=cluster.address)
            (stored,) = _answers(first, text.QUESTIONS[:1], progress, cached=True)

        second = house.enter_context(_replica("the second replica"))
        with screen.step("start the second replica"):
            second.ask("load", **model)
            second.ask("connect", address=cluster.address)
        with screen.step(f"second replica: {len(text.QUESTIONS)} questions, KV is loaded") as progress:
            loaded = _answers(second, text.QUESTIONS, progress, cached=True)
            status = second.ask("status")
        with screen.step("the control: one loaded block zeroed") as progress:
            (spoiled,) = _answers(second, text.QUESTIONS[-1:], progress, cached=True, zero_block=True)
        with screen.step("second replica: other weights"):
            trained = second.ask("train", address=cluster.address)
            explained = second.ask("explain", question=text.QUESTIONS[0])
        far = fourth_act.conduct(first, screen, cluster, text.QUESTIONS[0], computed[0]["digest"])
        acts.close()
        tiers = third_act.conduct(first, screen, signals)
        gpu = fifth_act.conduct(first, screen, signals)
    figures = assess(computed, stored, loaded, spoiled, trained, explained)
    acts_of = {"tiers": tiers, "far": far, "gpu": gpu}
    figures |= acts_of | {"ok": figures["ok"] and all(act["ok"] for act in acts_of.values())}
    return about | figures | {"hit_rate": status["hit_rate"], "seconds": time.monotonic() - began}


def _replica(name: str) -> ChildProcess:
    """Starts a replica, whose requests are the methods of engine.Engine."""
    return ChildProcess(_ENGINE, _QUIET, name=name, shown_lines=20, kill_on_error=True)


def assess(
    computed: list[Figures],
    stored: Figures,
    loaded: list[Figures],
    spoiled: Figures,
    trained: Figures,
    explained: Figures,
) -> Figures:
    """Returns the figures of the answers. `ok` is False if the cache changed one, or if the checks could not show
    it."""
    figures = _sharing(computed, stored, loaded)
    figures["control"] = _control(spoiled, computed[-1], figures)
    figures["other_weights"] = _other_weights(trained, explained)
    identical = all(answer["identical"] for answer in figures["answers"])
    figures["ok"] = identical and figures["control"]["differs"] and figures["other_weights"]["refused"]
    return figures


def _answers(replica: ChildProcess, questions: Sequence[str], progress: Progress, **how: bool) -> list[Figures]:
    """Asks the replica the questions one after the other and returns its answers."""
    out = []
    for i, question in enumerate(questions):

        def part(done: int, total: int, before: int = i) -> None:
            progress(before * total + done, len(questions) * total)

        out.append(replica.ask("answer", part, question=question, **how))
    return out


def _sharing(computed: list[Figures], stored: Figures, loaded: list[Figures]) -> Figures:
    pairs = [("first replica", 0, stored), *(("second replica", i, answer) for i, answer in enumerate(loaded))]
    return {
        "first_token_seconds": {
            "no_cache": _seconds(computed),
            "first_replica": _seconds([stored]),
            "second_replica": _seconds(loaded),
        },
        "tokens_asked": sum(answer["prompt_tokens"] for answer in loaded),
        "tokens_reused": sum(answer["cached_tokens"] for answer in loaded),
        "stored_bytes": sum(answer["stored_bytes"] for _, _, answer in pairs),
        "loaded_bytes": sum(answer["loaded_bytes"] for _, _, answer in pairs),
        "answers": [
            {
                "replica": replica,
                "question": i + 1,
                "without_cache": computed[i]["digest"],
                "with_cache": answer["digest"],
                "identical": answer["digest"] == computed[i]["digest"],
            }
            for replica, i, answer in pairs
        ],
        "logit_difference": max(third_act.logit_difference(answer, computed[i]) for _, i, answer in pairs),
        "logit_scale": max(abs(logit) for answer in computed for logit in answer["logits"]),
    }


def _control(spoiled: Figures, computed: Figures, figures: Figures) -> Figures:
    """Compares the answer with a zeroed block: `differs` if its ids differ, or its logits by more than rounding."""
    moved = third_act.logit_difference(spoiled, computed)
    beyond_rounding = max(100 * figures["logit_difference"], 1e-3 * figures["logit_scale"])
    return {
        "without_cache": computed["digest"],
        "with_cache": spoiled["digest"],
        "logit_difference": moved,
        "differs": spoiled["digest"] != computed["digest"] or moved > beyond_rounding,
    }


def _other_weights(trained: Figures, explained: Figures) -> Figures:
    misses = explained["misses"]
    explanation = f"{misses[0]}, and {len(misses) - 1:,} more blocks" if misses else "nothing missed"
    refused = explained["tokens"] == 0 and bool(misses) and "namespace (weights" in misses[0]
    return trained | {"tokens_reused": explained["tokens"], "explanation": explanation, "refused": refused}


def _seconds(answers: list[Figures]) -> float:
    return float(statistics.median(answer["first_token_ns"] for answer in answers)) / 1e9
