"""The short form for every change: engines store and load, and are compared page by page with an engine without the
cache.

In float32, where K and V are tensors on every processor, and in bfloat16, which some processors' kernels pack. What the
long form adds (exactness.py and its neighbours) runs nightly.
"""

from __future__ import annotations

import pickle
import random
from typing import Any

import kvcluster
from tests.vllm.e2e import mutants_names
from tests.vllm.e2e.audit import Audit
from tests.vllm.e2e.run import BLOCK, CLIENT, House, answers, differences, loaded, prompts, tokens

REQUESTS, NEW_TOKENS = 10, 24


def check(house: House) -> None:
    """Both dtypes, one after the other."""
    _check(house, "float32")
    _check(house, "bfloat16")


def _check(house: House, dtype: str) -> None:
    """In bfloat16 an answer's last bits depend on how many tokens are computed at once: there only pages are judged."""
    exact = dtype == "float32"
    rng = random.Random(5)
    asked = prompts(REQUESTS, seed=5) if exact else [tokens(rng, rng.randrange(BLOCK, 300)) for _ in range(REQUESTS)]
    llm = {"dtype": dtype}
    serial = {"prompts": asked, "serial": True, "sampling": {"max_tokens": NEW_TOKENS}}
    batched = {"prompts": asked, "sampling": {"max_tokens": NEW_TOKENS}}
    model, connector = house.model("llama"), house.connector()
    beside = house.begin({"model": model, "llm": llm, "connector": connector, "rounds": [serial]})
    clean = house.run({"model": model, "llm": llm, "capture": True, "rounds": [serial]})
    storing = house.wait(beside)
    expected = answers(clean)
    differ = differences(answers(storing), expected)
    house.table.add(f"{dtype}: storing changes no answer", f"{differ} of {REQUESTS} differ", differ == 0 or not exact)

    rounds: list[dict[str, Any]] = [serial, batched]
    if exact:
        rounds.append(serial | {"mutant": mutants_names.LOADS[0]})
    loading = house.run({"model": model, "llm": llm, "connector": connector, "rounds": rounds})
    hits = sum(loaded(answers(loading, number)) for number in (0, 1))
    differ = sum(differences(answers(loading, number), expected) for number in (0, 1))
    house.table.add(
        f"{dtype}: loading changes no answer" if exact else f"{dtype}: a second engine loads",
        f"{differ} of {2 * REQUESTS} differ; {hits} loaded",
        hits > 0 and (differ == 0 or not exact),
    )
    if exact:
        differ = differences(answers(loading, 2), expected)
        house.table.add(f"{dtype}: mutant, {mutants_names.LOADS[0]}", f"{differ} of {REQUESTS} differ", differ > 0)

    spec = pickle.loads(bytes.fromhex(storing["spec"]))
    with kvcluster.connect(house.site.address, spec, token=house.site.token or None, config=CLIENT) as client:
        client.flush()
        audit = Audit(house, "llama", client)
        audit.take([prompt + one["choices"][0]["ids"][:-1] for prompt, one in zip(asked, expected, strict=True)], clean)
        compared = audit.compare()  # READY are also the pages of answers that the mutant has changed
        packed = spec.groups[0].planes[0].packing
        house.table.add(
            f"{dtype}: audit of every READY page{f' ({packed})' if packed else ''}",
            str(compared),
            compared.pages > 0 and not compared.wrong,
        )
        client.purge(weights=spec.weights)
