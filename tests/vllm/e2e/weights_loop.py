"""Weights that change in memory ten times, as in a training loop: every answer equals that of an engine without a cache
at the same version.

Two engines run through the versions at once, and a third behind them: it asks for old versions when the others have
long left them, and loads the KV of each. All ask the same prompts under each version, so that any KV of another version
would be found by its tokens. Their own prefix caches are on, and vLLM does not reset them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tests.vllm.e2e.run import House, answers, differences, loaded, prompts

VERSIONS = 10
RUN = "run:e2e"


def check(house: House) -> None:
    """See above; and an engine of another run, which gives its versions the same names, loads nothing of them."""
    asked = prompts(8, seed=21, shared=64)
    rounds: list[dict[str, Any]] = [{"prompts": asked}]
    rounds += [{"prompts": asked, "nudge": True, "version": f"step-{number + 1}"} for number in range(VERSIONS)]
    job: dict[str, Any] = {"model": house.model("llama"), "rounds": rounds}
    outcome = house.run(job)
    control = [answers(outcome, number) for number in range(len(rounds))]
    changes = [differences(before, after) for before, after in pairwise(control)]
    house.table.add(
        "weights-loop: each change of weights shows", f"in {min(changes)} to {max(changes)} of 8", all(changes)
    )

    cached = job | {"connector": house.connector(weights=RUN), "llm": {"enable_prefix_caching": True}}
    at_once = [house.begin(cached) for _ in range(2)]
    for name, running in zip(("one", "another at once"), at_once, strict=True):
        _row(house, name, house.wait(running), control)
    _row(house, "a third behind them", house.run(cached), control, hits=True)

    other = job | {"connector": house.connector(weights="run:other"), "rounds": rounds[1:]}
    outcome = house.run(other)
    mine = [answers(outcome, number) for number in range(VERSIONS)]
    differ = sum(differences(one, right) for one, right in zip(mine, control[1:], strict=True))
    hits = sum(map(loaded, mine))
    house.table.add(
        "weights-loop: another run, with versions of the same names",
        f"{differ} of {8 * VERSIONS} differ; {hits} loaded",
        not differ and not hits,
    )


def _row(
    house: House, name: str, outcome: dict[str, Any], control: list[list[dict[str, Any]]], *, hits: bool = False
) -> None:
    mine = [answers(outcome, number) for number in range(len(control))]
    differ = sum(differences(one, right) for one, right in zip(mine, control, strict=True))
    counts = [loaded(one) for one in mine]
    house.table.add(
        f"weights-loop: {VERSIONS} versions, {name}",
        f"{differ} of {8 * len(control)} differ; {sum(counts)} loaded, under {sum(map(bool, counts))} versions",
        not differ and (all(counts) or not hits),
    )
