"""With the cache every id and every logprob is the same as without; and the suite would notice if they were not.

First a control pair without the connector has to show no difference between serial, batched and preempted runs. Then
engines store and load, and are held against it; at the end every READY page is held against what a clean engine
computes for its tokens. Text is a weak oracle, logprobs a fair one, pages the strictest.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import kvcluster
from kvcluster.core.spec import KVSpec
from tests.vllm.e2e import mutants_names
from tests.vllm.e2e.audit import Audit
from tests.vllm.e2e.engine import few_blocks
from tests.vllm.e2e.run import CLIENT, ROUNDING, House, answers, apart, differences, least_distinct, loaded, prompts

REQUESTS, NEW_TOKENS = 24, 48

_UNPREEMPTED = ("chunks", "sinks")
"""Of these vLLM 0.32 preempts requests where there is a connector, and in the control pair none."""


def check(house: House, model: str) -> None:
    """All of it for one model."""
    asked = prompts(REQUESTS, seed=3)
    sampling = {"max_tokens": NEW_TOKENS}
    serial = {"prompts": asked, "serial": True, "sampling": sampling}
    batched = {"prompts": asked, "sampling": sampling}
    few = {"num_gpu_blocks_override": few_blocks(model)}
    add = house.table.add

    control = house.run({"model": house.model(model), "llm": few, "rounds": [serial, batched, batched]})
    expected = answers(control)
    differ = [differences(answers(control, number), expected) for number in (1, 2)]
    add(
        f"{model}: control pair, without the cache",
        f"{sum(differ)} of {2 * REQUESTS} differ; at least {least_distinct(expected)} distinct tokens; "
        f"{_preemptions(control):.0f} preemptions",
        not sum(differ) and least_distinct(expected) >= 8 and (_preemptions(control) > 0 or model in _UNPREEMPTED),
    )

    first = house.run({"model": house.model(model), "connector": house.connector(), "llm": few, "rounds": [batched]})
    _say(house, f"{model}: batched, preempted, storing", [answers(first)], expected, first)
    spec = pickle.loads(bytes.fromhex(first["spec"]))
    ways = {"beside the passes": 0} | ({"layer by layer": 100_000} if len(spec.groups) == 1 else {})
    for way, layerwise_ms in ways.items():
        connector = house.connector(layerwise_ms=layerwise_ms)
        second = house.run(
            {"model": house.model(model), "connector": connector, "llm": few, "rounds": [serial, batched]}
        )
        rounds = [answers(second, 0), answers(second, 1)]
        _say(house, f"{model}: a second engine, loading {way}", rounds, expected, second)
        _check_counts(house, f"{model}: loaded, not recomputed ({way})", answers(second, 0), spec)
        _check_resumed(house, f"{model}: preempted and resumed from the cluster ({way})", answers(second, 1))

    if model != "mla":  # on a CPU vLLM has no cache of its own for latents
        _check_own_cache(house, model, few, batched, serial, expected)

    with kvcluster.connect(house.site.address, spec, token=house.site.token or None, config=CLIENT) as client:
        client.flush()
        audit = Audit(house, model, client)
        audit.compute([*_sequences(asked, expected)])
        compared = audit.compare()
        add(
            f"{model}: audit of every READY page",
            str(compared),
            0 < compared.pages == compared.ready and not compared.wrong,
        )

    _check_load_mutants(house, model, asked, expected, sampling, ways)
    _check_store_mutant(house, model, asked, batched, audit)
    if model == "mla":
        _check_own_arithmetic(house, model, serial)


def _check_own_cache(
    house: House, model: str, few: dict[str, int], batched: dict[str, Any], serial: dict[str, Any], expected: Any
) -> None:
    """An engine that has a prefix cache of its own before the cluster's."""
    own = few | {"enable_prefix_caching": True}
    third = house.run(
        {"model": house.model(model), "connector": house.connector(), "llm": own, "rounds": [batched, batched, serial]}
    )
    told = [answers(third, number) for number in range(3)]
    differ, hits = sum(differences(mine, expected) for mine in told), sum(loaded(mine) for mine in told)
    local = sum(1 for mine in told for one in mine if one["report"]["local_tokens"])
    house.table.add(
        f"{model}: with the engine's own prefix cache on",
        f"{differ} of {3 * REQUESTS} differ; {hits} loaded, {local} found blocks in its own cache",
        not differ and hits > 0 and local > 0,
    )


def _check_own_arithmetic(house: House, model: str, serial: dict[str, Any]) -> None:
    """Engines without the plugin of quiet/: what follows a cached part of a prompt is computed otherwise then. What
    they store is their own."""
    without = {"VLLM_PLUGINS": ""}
    right = answers(house.run({"model": house.model(model), "rounds": [serial]}, environment=without))
    connector = house.connector(weights="sha256:own")
    job = {"model": house.model(model), "connector": connector, "rounds": [serial, serial]}
    mine = answers(house.run(job, environment=without), 1)
    ids, most = apart(mine, right)
    house.table.add(
        f"{model}: by vLLM's own arithmetic",
        f"{ids} of {REQUESTS} differ in an id, logprobs by {most:.0e} at most; {loaded(mine)} loaded",
        not ids and 0 < most < ROUNDING and loaded(mine) > 0,
    )


def _say(
    house: House, what: str, rounds: Sequence[Sequence[dict[str, Any]]], expected: Any, outcome: dict[str, Any]
) -> None:
    differ = sum(differences(mine, expected) for mine in rounds)
    count = sum(len(mine) for mine in rounds)
    hits = sum(loaded(mine) for mine in rounds)
    seen = f"{differ} of {count} differ; {hits} loaded; {_preemptions(outcome):.0f} preemptions"
    needs_hits = "loading" in what
    house.table.add(what, seen, differ == 0 and _preemptions(outcome) > 0 and (hits > 0 or not needs_hits))


def _check_counts(house: House, what: str, mine: Sequence[dict[str, Any]], spec: KVSpec) -> None:
    """By our own counter of verified bytes, of requests that ran alone."""
    step, wrong, total, tokens, known = spec.block_tokens, 0, 0, 0, 0
    for one in mine:
        report = one["report"]
        blocks = report["loaded_tokens"] // step
        nbytes = sum(
            group.reuse.blocks_needed(blocks, step) * spec.page_bytes(number, spec.whole(number))
            for number, group in enumerate(spec.groups)
        )
        total += report["loaded_bytes"]
        tokens += report["loaded_tokens"]
        known += (one["prompt"] - 1) // step * step  # of which the cluster has all full blocks
        parts = report["computed_tokens"] + report["local_tokens"] + report["loaded_tokens"]
        wrong += report["loaded_bytes"] != nbytes or parts != one["prompt"] or report["local_tokens"] != 0
    seen = (
        f"{wrong} of {len(mine)} do not add up; {total / 2**20:.1f} MiB verified and written, {tokens} of {known} "
        "tokens; local hits 0"
    )
    house.table.add(what, seen, wrong == 0 and total > 0 and 2 * tokens > known)


def _check_resumed(house: House, what: str, mine: Sequence[dict[str, Any]]) -> None:
    resumed = [one for one in mine if one["report"]["preemptions"] and one["report"]["resumed_tokens"]]
    house.table.add(what, f"{len(resumed)} requests", len(resumed) > 0)


def _check_load_mutants(
    house: House, model: str, asked: Any, expected: Any, sampling: dict[str, Any], ways: dict[str, int]
) -> None:
    """One engine, all faults of loads one after the other, by each way of loading."""
    for way, layerwise_ms in ways.items():
        rounds = [
            {"prompts": asked[:8], "serial": True, "sampling": sampling, "mutant": name} for name in mutants_names.LOADS
        ]
        connector = house.connector(layerwise_ms=layerwise_ms)
        outcome = house.run({"model": house.model(model), "connector": connector, "rounds": rounds})
        for number, name in enumerate(mutants_names.LOADS):
            differ = differences(answers(outcome, number), expected[:8])
            house.table.add(f"{model}: mutant, {name} ({way})", f"{differ} of 8 differ", differ > 0)


def _check_store_mutant(house: House, model: str, asked: Any, batched: dict[str, Any], audit: Audit) -> None:
    """It spoils what is stored, so it stores for itself; the audit is to see it."""
    (name,) = mutants_names.STORES
    job = {
        "model": house.model(model),
        "connector": house.connector(weights="sha256:mutant"),
        "llm": {"num_gpu_blocks_override": few_blocks(model)},
        "rounds": [batched | {"mutant": name}],
    }
    outcome = house.run(job)
    spec = pickle.loads(bytes.fromhex(outcome["spec"]))
    with kvcluster.connect(house.site.address, spec, token=house.site.token or None, config=CLIENT) as client:
        compared = audit.of(client).compare()
        seen = f"the audit of what it stored: {compared.wrong} of {compared.pages} pages differ"
        house.table.add(f"{model}: mutant, {name}", seen, compared.wrong > 0)
        client.purge(weights="sha256:mutant")


def _sequences(asked: Sequence[list[int]], expected: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The tokens that there is KV of: the last of an output has none."""
    return [
        prompt + choice["ids"][:-1] for prompt, one in zip(asked, expected, strict=True) for choice in one["choices"]
    ]


def _preemptions(outcome: dict[str, Any]) -> float:
    return float(outcome["metrics"].get("vllm:num_preemptions") or 0)
