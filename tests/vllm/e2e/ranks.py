"""Ranks as parts of one block, by heads or by layers: a block is a hit only if every rank's part is there."""

from __future__ import annotations

from typing import Any

import kvcluster
from kvcluster.core.groups import Part
from kvcluster.transfers.layouts import Dense
from tests.chaos import victims
from tests.vllm.e2e import mutants_names
from tests.vllm.e2e.audit import dense
from tests.vllm.e2e.engine import arguments_of
from tests.vllm.e2e.run import BLOCK, CLIENT, ROUNDING, House, answers, apart, differences, eventually, loaded, prompts

TWO: dict[str, Any] = {"tensor_parallel_size": 2}


def check(house: House) -> None:
    """Two ranks store and load; then one rank's page of one block is gone."""
    asked = [prompt for prompt in prompts(12, seed=21) if len(prompt) > 4 * BLOCK][:4]
    round_ = {"prompts": asked, "serial": True, "sampling": {"max_tokens": 16}}
    model = house.model("llama")
    right = answers(house.run({"model": model, "llm": TWO, "rounds": [round_]}))
    connector = house.connector()
    outcome = house.run({"model": model, "connector": connector, "llm": TWO, "rounds": [round_, round_]})
    differ = [differences(answers(outcome, number), right) for number in (0, 1)]
    house.table.add(
        "two ranks: stored and loaded",
        f"{sum(differ)} of {2 * len(asked)} differ; {loaded(answers(outcome, 1))} loaded"
        + "".join(f"; {one['report']}" for one in answers(outcome, 1) if not one["report"]["loaded_tokens"]),
        not sum(differ) and loaded(answers(outcome, 1)) == len(asked),
    )

    _lose_a_part(house, asked[0], block=2)
    outcome = house.run({"model": model, "connector": connector, "llm": TWO, "rounds": [round_]})
    told = answers(outcome)
    house.table.add(
        "two ranks: one rank's page of block 2 is gone",
        f"{differences(told, right)} of {len(asked)} differ; {told[0]['report']['loaded_tokens']} tokens loaded, "
        f"for {2 * BLOCK} before it",
        not differences(told, right) and told[0]["report"]["loaded_tokens"] == 2 * BLOCK,
    )


def check_latents(house: House) -> None:
    """A latent is stored once for two ranks, which both load it, and one rank loads what two have stored. Ranks add up
    their sums in another order than one alone, so of that only the last bits may differ."""
    asked = [prompt for prompt in prompts(12, seed=21) if len(prompt) > 4 * BLOCK][:4]
    round_ = {"prompts": asked, "serial": True, "sampling": {"max_tokens": 16}}
    model, connector = house.model("mla"), house.connector()
    right = answers(house.run({"model": model, "llm": TWO, "rounds": [round_]}))
    outcome = house.run({"model": model, "connector": connector, "llm": TWO, "rounds": [round_, round_]})
    differ = [differences(answers(outcome, number), right) for number in (0, 1)]
    house.table.add(
        "latents, two ranks: stored and loaded",
        f"{sum(differ)} of {2 * len(asked)} differ; {loaded(answers(outcome, 1))} loaded",
        not sum(differ) and loaded(answers(outcome, 1)) == len(asked),
    )

    alone = answers(house.run({"model": model, "rounds": [round_]}))
    outcome = house.run({"model": model, "connector": connector, "rounds": [round_]})
    told = answers(outcome)
    ids, most = apart(told, alone)
    with kvcluster.connect(house.site.address, house.spec, token=house.site.token or None, config=CLIENT) as client:
        status = client.status()
    pages = sum(shard["pages"] for shard in status["shards"])
    house.table.add(
        "latents, one rank over what two have stored",
        f"{ids} of {len(asked)} differ in an id, logprobs by {most:.0e} at most; {loaded(told)} loaded; {pages} pages "
        f"of {status['blocks']} blocks",
        not ids and most < ROUNDING and loaded(told) == len(asked) and pages == status["blocks"] > 0,
    )


STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}


def check_pipeline(house: House) -> None:
    """Two pipeline ranks store and load, as one rank does what they have stored, and they what it has. A load that the
    second rank skips must show in the answers."""
    for name in ("llama", "gemma", "mla"):
        _check_stages(house, name)
    model, connector = house.model("llama"), house.connector()
    asked = [prompt for prompt in prompts(12, seed=23) if len(prompt) > 4 * BLOCK][:4]
    round_ = {"prompts": asked, "serial": True, "sampling": {"max_tokens": 16}}
    right = answers(house.run({"model": model, "llm": STAGES, "rounds": [round_]}))
    harmed = round_ | {"mutant": mutants_names.LOADS[0], "at_rank": 1}
    outcome = house.run({"model": model, "connector": connector, "llm": STAGES, "rounds": [round_, harmed]})
    first, wrong = (differences(answers(outcome, number), right) for number in (0, 1))
    house.table.add(
        "pipeline, llama: the second rank's loads are skipped",
        f"{first} of {len(asked)} differ before, {wrong} then; {loaded(answers(outcome, 1))} loaded",
        not first and wrong == len(asked),
    )


def _check_stages(house: House, name: str) -> None:
    """By one rank and by two, each with and without the cluster: answers are equal to the last bit."""
    model, connector = house.model(name), house.connector()
    block = arguments_of(name)["block_size"]
    one_first, two_first = (
        [prompt for prompt in prompts(12, seed=seed) if len(prompt) > 4 * BLOCK][:4] for seed in (21, 22)
    )
    stored_by_two, stored_by_one = (
        {"prompts": asked, "serial": True, "sampling": {"max_tokens": 16}} for asked in (two_first, one_first)
    )
    both = [stored_by_two, stored_by_one]
    right = house.run({"model": model, "llm": STAGES, "rounds": both})
    alone = house.run({"model": model, "rounds": both})
    rounds = [stored_by_two, stored_by_two]
    two = house.run({"model": model, "connector": connector, "llm": STAGES, "rounds": rounds})
    one = house.run({"model": model, "connector": connector, "rounds": [stored_by_one, stored_by_two]})
    again = house.run({"model": model, "connector": connector, "llm": STAGES, "rounds": [stored_by_one]})
    seen = [
        ("without a cluster, as one rank", answers(right), answers(alone), None),
        ("stored", answers(two), answers(right), None),
        ("loaded what they stored", answers(two, 1), answers(right), two_first),
        ("one rank loaded what two stored", answers(one, 1), answers(alone), two_first),
        ("loaded what one rank stored", answers(again), answers(right, 1), one_first),
    ]
    for what, told, expected, shared in seen:
        tokens = sum(each["report"]["loaded_tokens"] for each in told) if shared else 0
        wanted = sum((len(prompt) - 1) // block * block for prompt in shared or ())
        differ = differences(told, expected)
        figures = f"; {tokens} of {wanted} shareable tokens loaded" if shared else ""
        house.table.add(
            f"pipeline, {name}: {what}", f"{differ} of {len(told)} differ{figures}", not differ and tokens == wanted
        )


def _lose_a_part(house: House, prompt: list[int], block: int) -> None:
    """Spoils the second rank's page of that block, and has its shard find out."""
    spec = house.spec
    half = spec.groups[0].heads // 2
    part = Part(0, len(spec.groups[0].layers), half, 2 * half)
    with kvcluster.connect(
        house.site.address, spec, token=house.site.token or None, part=part, config=CLIENT
    ) as client:
        hashes = client.hashes(prompt)[: block + 1]

        def load() -> Any:
            into = dense(spec, 0, block + 1)[:, :, :, :, half:].contiguous()
            with client.prepare_load(hashes) as ticket:
                return client.begin_load(ticket, [Dense(into)]).result(), into

        _, into = load()
        page = into[block].numpy().tobytes()
        pids = victims.actors(house.site.pids(), victims.SHARD)
        assert sum(victims.flip_pages(pid, [page], 2**20) for pid in pids) == 1
        eventually(lambda: load()[0].blocks == block, 30, "the spoilt page is found")
