"""Engines of models with recurrent layers: with the cache every id and every logprob is as without.

Rounds that are compared bit by bit are of requests one after the other, with nothing of a prompt in the engine's own
prefix cache: what an engine does not compute came from the cluster. Batched rounds run beside that cache, as engines
do, and are preempted.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from kvcluster.core.groups import LAST
from kvcluster.core.spec import KVSpec
from tests.vllm.e2e import mutants_names
from tests.vllm.e2e.engine import few_blocks
from tests.vllm.e2e.run import ROUNDING, House, answers, apart, differences, least_distinct, loaded, prompts

REQUESTS, NEW_TOKENS = 24, 48

DISTINCT = 4
"""Token ids of each answer. Models of convolutions repeat themselves more than others; logprobs differ all the same."""

TURN_TOKENS = 40
"""What a second turn adds to a conversation."""


def check(house: House, model: str) -> None:
    """All of it for one model."""
    asked = prompts(REQUESTS, seed=3)
    serial = {"prompts": asked, "serial": True, "fresh": True, "sampling": {"max_tokens": NEW_TOKENS}}
    control = house.run({"model": house.model(model), "rounds": [serial, serial]})
    expected = answers(control)
    house.table.add(
        f"{model}: control pair, without the cache",
        f"{differences(answers(control, 1), expected)} of {REQUESTS} differ; at least {least_distinct(expected)} "
        "distinct tokens",
        not differences(answers(control, 1), expected) and least_distinct(expected) >= DISTINCT,
    )
    first = house.run({"model": house.model(model), "connector": house.connector(), "rounds": [serial]})
    spec = pickle.loads(bytes.fromhex(first["spec"]))
    _compare(house, f"{model}: storing", [answers(first)], expected, least_loaded=0)
    second = house.run({"model": house.model(model), "connector": house.connector(), "rounds": [serial, serial]})
    rounds = [answers(second, number) for number in range(2)]
    _compare(house, f"{model}: a second engine, loading", rounds, expected, least_loaded=REQUESTS)
    _check_counts(house, f"{model}: loaded, not recomputed", rounds, spec)
    if model in _ALIKE:
        _check_batches(house, model, asked, expected)
    _check_turns(house, model, asked, expected)
    _check_mutants(house, model, serial, expected)


def _compare(house: House, what: str, rounds: Sequence[Any], expected: Any, *, least_loaded: int) -> None:
    differ, hits = sum(differences(mine, expected) for mine in rounds), sum(map(loaded, rounds))
    seen = f"{differ} of {len(rounds) * len(expected)} differ; {hits} loaded"
    house.table.add(what, seen, not differ and hits >= least_loaded)


_ALIKE = ("conv",)
"""Whose kernels compute a request in a batch as they do alone."""


def _check_batches(house: House, model: str, asked: Sequence[list[int]], expected: Any) -> None:
    """Beside the engine's own cache, and preempted. vLLM computes the tokens that a preempted request had answered once
    more as a prompt, whose last bits may be others; no other request differs at all."""
    batched = {"prompts": asked, "sampling": {"max_tokens": NEW_TOKENS}}
    llm = {"num_gpu_blocks_override": few_blocks(model)}
    job = {"model": house.model(model), "llm": llm, "connector": house.connector(), "rounds": [batched, batched]}
    outcome = house.run(job)
    rounds = [answers(outcome, number) for number in range(2)]
    each = [pair for mine in rounds for pair in zip(mine, expected, strict=True)]
    others = [(mine, right) for mine, right in each if not mine["report"]["preemptions"]]
    differ = sum(mine["choices"] != right["choices"] for mine, right in others)
    ids, most = apart([mine for mine, _ in each], [right for _, right in each])
    again, rest = sum(map(loaded, rounds)), len(each) - len(others)
    seen = f"{differ} of {len(others)} differ; {rest} preempted, {ids} of all differ in an id, logprobs by {most:.0e}"
    house.table.add(
        f"{model}: batched, preempted",
        f"{seen}; {again} loaded",
        not differ and not ids and most < ROUNDING and again > 0 and rest > 0,
    )


def _check_counts(house: House, what: str, rounds: Sequence[Any], spec: KVSpec) -> None:
    """By our own counter of verified bytes: of each layer's state the one at the boundary, and no other."""
    step, wrong, total, tokens, known = spec.block_tokens, 0, 0, 0, 0
    for one in [one for mine in rounds for one in mine]:
        report = one["report"]
        blocks = report["loaded_tokens"] // step
        nbytes = sum(
            group.reuse.blocks_needed(blocks, step) * spec.page_bytes(number, spec.whole(number))
            for number, group in enumerate(spec.groups)
        )
        total, tokens = total + report["loaded_bytes"], tokens + report["loaded_tokens"]
        known += (one["prompt"] - 1) // step * step
        parts = report["computed_tokens"] + report["local_tokens"] + report["loaded_tokens"]
        wrong += report["loaded_bytes"] != nbytes or parts != one["prompt"] or report["local_tokens"] != 0
    states = sum(len(group.layers) for group in spec.groups if group.reuse == LAST)
    seen = f"{wrong} do not add up; {total / 2**20:.1f} MiB, {tokens} of {known} tokens, {states} layers of state"
    house.table.add(what, seen, not wrong and states > 0 and 2 * tokens > known)


def _check_turns(house: House, model: str, asked: Sequence[list[int]], expected: Sequence[dict[str, Any]]) -> None:
    """A second turn continues behind an answer, from a state that decoding has left: its last bits may differ from
    those of a prompt that is computed whole, and no id does."""
    each = zip(asked, expected, strict=True)
    turns = [prompt + one["choices"][0]["ids"] + prompt[:TURN_TOKENS] for prompt, one in each]
    serial = {"prompts": turns, "serial": True, "fresh": True, "sampling": {"max_tokens": 16}}
    right = answers(house.run({"model": house.model(model), "rounds": [serial]}))
    job = {"model": house.model(model), "connector": house.connector(), "rounds": [serial]}
    mine = answers(house.run(job))
    behind = sum(one["report"]["loaded_tokens"] > len(prompt) for prompt, one in zip(asked, mine, strict=True))
    ids = sum(a["choices"][0]["ids"] != b["choices"][0]["ids"] for a, b in zip(mine, right, strict=True))
    seen = f"{ids} of {len(turns)} differ in an id, {differences(mine, right)} in a last bit; {behind} from an answer"
    house.table.add(f"{model}: a second turn", seen, not ids and behind > 0)


def _check_mutants(house: House, model: str, serial: dict[str, Any], expected: Sequence[dict[str, Any]]) -> None:
    """One engine, all faults of loads one after the other."""
    rounds = [serial | {"prompts": serial["prompts"][:8], "mutant": name} for name in mutants_names.RECURRENT]
    outcome = house.run({"model": house.model(model), "connector": house.connector(), "rounds": rounds})
    for number, name in enumerate(mutants_names.RECURRENT):
        differ = differences(answers(outcome, number), expected[:8])
        house.table.add(f"{model}: mutant, {name}", f"{differ} of 8 differ", differ > 0)
