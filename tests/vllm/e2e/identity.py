"""Engines of one model name that must not share: with other adapters, other checkpoints, or weights changed in
place."""

from __future__ import annotations

from typing import Any

from tests.vllm.e2e.run import BLOCK, House, answers, differences, loaded, prompts

LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


def check(house: House) -> None:
    """Each as two engines over one cluster."""
    asked, later = (prompts(8, seed=seed, shared=64) for seed in (11, 12))
    for several in (asked, later):  # or one is loaded that the same engine has stored a moment ago
        assert len({tuple(prompt[:BLOCK]) for prompt in several}) == len(several)
    plain: dict[str, Any] = {"prompts": asked}
    one, other = (house.model(f"adapters/{number}/tuned") for number in (1, 2))
    first = plain | {"adapter": one, "adapter_number": 1}
    second = plain | {"adapter": other, "adapter_number": 2}
    model = house.model("llama")

    control = house.run(
        {"model": model, "llm": LORA, "rounds": [plain, first, second, plain | {"nudge": True}, {"prompts": later}]}
    )
    without, with_one, with_other, nudged, nudged_later = (answers(control, number) for number in range(5))
    house.table.add(
        "identity: what is to be told apart differs",
        f"adapters in {differences(with_one, with_other)} of 8, weights in {differences(without, nudged)} of 8",
        differences(with_one, with_other) == 8 and differences(without, nudged) > 0,
    )

    connector = house.connector()
    house.run({"model": model, "connector": connector, "llm": LORA, "rounds": [plain, first]})
    # The same name and number as the adapter that has been cached, and another content.
    impostor = plain | {"adapter": other, "adapter_number": 1}
    known = plain | {"adapter": one, "adapter_number": 2}
    outcome = house.run({"model": model, "connector": connector, "llm": LORA, "rounds": [impostor, known]})
    _row(house, "identity: two adapters of one name", answers(outcome, 0), with_other, hits=False)
    _row(house, "identity: one adapter under another number", answers(outcome, 1), with_one, hits=True)

    changed = house.model("changed/llama")
    its_own = answers(house.run({"model": changed, "rounds": [plain]}))
    outcome = house.run({"model": changed, "connector": connector, "rounds": [plain]})
    _row(house, "identity: another checkpoint under one name", answers(outcome), its_own, hits=False)

    rounds = [plain, plain | {"nudge": True, "reset": True}, {"prompts": later}]
    outcome = house.run({"model": model, "connector": connector, "llm": LORA, "rounds": rounds})
    _row(house, "identity: before weights change in place", answers(outcome, 0), without, hits=True)
    _row(house, "identity: after that and a reset", answers(outcome, 1), nudged, hits=False)
    _row(house, "identity: new prompts after the reset", answers(outcome, 2), nudged_later, hits=False)

    # Two engines with the same new weights: alone since their reset, until an operator names what they have.
    named = {"prompts": asked, "nudge": True, "reset": True, "weights": "sha256:nudged"}
    house.run({"model": model, "connector": connector, "rounds": [plain, named]})
    outcome = house.run({"model": model, "connector": connector, "rounds": [named, {"prompts": later}]})
    _row(house, "identity: weights that changed, once an operator has named them", answers(outcome), nudged, hits=True)
    _row(house, "identity: and new prompts then", answers(outcome, 1), nudged_later, hits=False)

    salted = plain | {"cache_salt": "another tenant"}
    outcome = house.run({"model": model, "connector": connector, "rounds": [{"prompts": later}, salted]})
    told = answers(outcome)
    house.table.add("identity: KV computed after the reset is not shared", f"{loaded(told)} loaded", not loaded(told))
    _row(house, "identity: the same prompts under a salt", answers(outcome, 1), without, hits=False)


def _row(house: House, what: str, mine: Any, right: Any, *, hits: bool) -> None:
    differ, count = differences(mine, right), loaded(mine)
    house.table.add(what, f"{differ} of {len(mine)} differ; {count} loaded", not differ and (count > 0) == hits)
