"""Whole engines over a cluster: what one has computed others load, and none ever reads a wrong byte.

The random schedules are what found most that was ever wrong here: two replicas with few blocks, prompts that share
their beginnings, loads that fail in part or as a whole, aborts, and engines that restart, with steps that overlap or
do not, on one rank or two. Every answer is checked, and in the end every byte that the cluster has.
"""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcluster.core.ids import Caller, ShardId, Tenant
from kvcluster.core.miss import Miss, MissReason
from kvcluster.engines.vllm import registration
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.layouts import Dense
from kvcluster.transport.base import Unavailable
from tests.client.build import prompt
from tests.vllm.build import BLOCK
from tests.vllm.conftest import Bench, a_bench
from tests.vllm.scripted import ALWAYS, BESIDE, knows_link
from tests.vllm.toy import Engine, rows

SIX = prompt(6, block_tokens=BLOCK, rest=2)
LOST = Miss(MissReason.SHARD_LOST, "gone")


pytestmark = pytest.mark.usefixtures("stores_have_their_time")


def audit(cluster: MemoryCluster, engine: Engine, tenant: str = "default") -> int:
    """Holds every block of the engine's texts that its tenant has in the cluster against what it should be. How many
    those are."""
    spec, seen = engine.client.spec, 0
    client = cluster.client(spec, tenant=tenant)
    for name, text in engine.texts.items():
        known = engine.requests[name].num_tokens
        hashes = client.hashes([text.token(at) for at in range(known)])
        with client.prepare_load(hashes) as ticket:
            if not ticket.blocks:
                continue
            memory = [
                torch.zeros(ticket.blocks, len(of.layers), len(of.planes), BLOCK, of.heads, of.planes[0].dim)
                for of in spec.groups
            ]
            into = [Dense(tensor) for tensor in memory]
            loaded = client.begin_load(ticket, into if len(into) > 1 else into[0]).result()
        for group, tensor in zip(spec.groups, memory, strict=True):
            first = loaded.blocks - group.reuse.blocks_needed(loaded.blocks, BLOCK)
            values = text.values(first * BLOCK, loaded.blocks * BLOCK)
            for at, layer in enumerate(group.layers):
                pages = tensor[first : loaded.blocks, at].view(torch.int32)  # [blocks, planes, tokens, heads, dim]
                found = pages.permute(0, 2, 3, 1, 4).flatten(0, 1).flatten(2)  # [positions, heads, K beside V]
                assert torch.equal(found, rows(values, layer, range(group.heads), found.shape[2])), (name, layer)
        seen += loaded.blocks
    return seen


# ------------------------------------------------------------------------------------------------------ one by one


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", ["llama", "gemma", "mla"])
def test_what_one_engine_computed_another_loads(
    bench: Bench, model: str, ranks: int, overlap: bool, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(model)
    first, second = (bench.engine(folder, BESIDE, overlap=overlap, tensor_parallel_size=ranks) for _ in range(2))
    first.add("a", SIX, max_tokens=4)
    first.run()
    first.drain()
    assert audit(bench.cluster, first) == 7
    second.add("b", SIX, max_tokens=4)
    second.run()
    second.drain()
    assert sum(report.loads["b"].ranks for report in second.reports if report.loads) == ranks
    spec = second.client.spec
    needed = [
        group.reuse.blocks_needed(6, BLOCK) * spec.page_bytes(g, spec.whole(g)) for g, group in enumerate(spec.groups)
    ]
    copies = ranks if model == "mla" else 1  # each rank has all of a latent, and its own heads of K and V
    assert second.counts["loaded_bytes"] == copies * sum(needed)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("way", [ALWAYS, BESIDE])
@pytest.mark.parametrize("model", ["llama", "gemma", "mla"])
def test_an_engine_of_another_tenant_loads_what_it_is_granted_and_stores_it_as_its_own(
    bench: Bench, model: str, way: dict[str, int], overlap: bool, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(model)
    owner = bench.engine(folder, way, overlap=overlap)
    team = bench.engine(folder, {**way, **reader_of_default(bench)}, overlap=overlap)
    owner.add("a", SIX)
    owner.run()
    owner.drain()
    longer = SIX[: 6 * BLOCK] + prompt(3, seed=4, block_tokens=BLOCK)
    team.add("b", longer)
    team.run()
    team.drain()
    loads = [load for step in team.steps for load in step.loads]
    assert [(load.of_another, load.first + len(load.into[0])) for load in loads] == [(True, 6)]
    if model == "llama":  # of a window the blocks that it has left behind are not stored
        assert audit(bench.cluster, team, "team") >= 9, "its own chain has no hole"
    team.add("c", longer + prompt(1, seed=8, block_tokens=BLOCK))
    team.run()
    assert not bench.cluster.client(team.client.spec).lookup(longer).blocks > 6, "the owner has nothing of it"


def test_a_grant_that_comes_later_is_taken_without_a_restart(
    bench: Bench, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_REGISTER_S", 0.02)
    owner, settings = bench.engine(llama, BESIDE), reader_of_default(bench)
    bench.callers["team's"] = Caller(Tenant("team"))
    team = bench.engine(llama, {**BESIDE, **settings})
    members = [team.side._registration, *(rank.member for rank in team.ranks)]
    owner.add("a", SIX)
    owner.run()
    owner.drain()
    team.add("b", SIX)
    team.run()
    assert not any(step.loads for step in team.steps) and not any(member.reader for member in members)
    bench.callers["team's"] = Caller(Tenant("team"), reads=frozenset({Tenant("default")}))
    bench.cluster.wait_until(lambda: all(member.reader is not None for member in members))
    other = prompt(6, seed=9, block_tokens=BLOCK, rest=2)
    for engine in (owner, team):
        engine.add("c", other)
        engine.run()
        engine.drain()
    assert [load.of_another for step in team.steps for load in step.loads] == [True]


def test_its_own_blocks_come_first(bench: Bench, llama: Path) -> None:
    owner, (one, two) = (
        bench.engine(llama, BESIDE),
        (bench.engine(llama, {**BESIDE, **reader_of_default(bench)}) for _ in range(2)),
    )
    for number, engine in enumerate((owner, one)):
        engine.add(str(number), SIX)
        engine.run()
        engine.drain()
    two.add("c", SIX)
    two.run()
    assert [load.of_another for step in two.steps for load in step.loads] == [False]


def test_an_engine_whose_token_is_read_only_loads_and_tries_to_store_nothing(bench: Bench, llama: Path) -> None:
    first = bench.engine(llama, BESIDE)
    looks = bench.engine(llama, {**BESIDE, **bench.token("looks", Caller(Tenant("default"), read_only=True))})
    first.add("a", SIX)
    first.run()
    first.drain()
    looks.add("b", SIX + prompt(2, seed=3, block_tokens=BLOCK))
    looks.run()
    looks.drain()
    assert looks.counts["loads"] and not looks.counts["failed_stores"]
    assert not any(step.stores for step in looks.steps)


def test_ranks_of_another_number_share_too(bench: Bench, llama: Path) -> None:
    one, two = bench.engine(llama, BESIDE), bench.engine(llama, BESIDE, tensor_parallel_size=2)
    one.add("a", SIX)
    one.run()
    one.drain()
    two.add("b", SIX + prompt(2, seed=3, block_tokens=BLOCK))
    two.run()
    two.drain()
    assert [load.first + len(load.into[0]) for step in two.steps for load in step.loads] == [6]
    one.add("c", SIX + prompt(2, seed=3, block_tokens=BLOCK))
    one.run()
    assert [len(load.into[0]) for step in one.steps for load in step.loads] == [2], "its own prefix it has"


def test_a_preempted_request_goes_on_from_what_it_stored_itself(bench: Bench, llama: Path) -> None:
    few = {"max_model_len": 64, "max_num_batched_tokens": 32, "enable_prefix_caching": False}
    engine = bench.engine(llama, {**BESIDE, "report": True}, blocks=17, **few)
    for name, seed in (("a", 1), ("b", 2)):
        engine.add(name, prompt(6, seed, block_tokens=BLOCK), max_tokens=24)
    while not all(request.is_finished() for request in engine.requests.values()):
        engine.step()
        engine.wait_idle()
        engine.flush()
    resumed = sum(told["kvcluster"]["resumed_tokens"] for told in engine.params.values())
    assert sum(request.num_preemptions for request in engine.requests.values())
    assert resumed >= 6 * BLOCK


def test_a_shard_that_dies_with_a_load_costs_a_computation_and_no_answer(bench: Bench, llama: Path) -> None:
    bench.start(shards=1, ram_bytes="8MiB")
    first, second = bench.engine(llama, BESIDE), bench.engine(llama, {**BESIDE, "report": True, "load_ms": 1_000})
    first.add("a", SIX)
    first.run()
    first.drain()
    second.add("b", SIX, max_tokens=3)
    while not any(step.loads for step in second.steps):
        bench.steps.read = lambda: bench.cluster.shards and bench.cluster.stop_shard(ShardId("shard-0"))  # type: ignore[assignment]
        second.step()
        second.wait_idle()
    second.run()
    assert second.params["b"]["kvcluster"]["loaded_tokens"] == 0


def test_a_page_that_rots_is_computed(bench: Bench, llama: Path) -> None:
    first, second = bench.engine(llama, BESIDE), bench.engine(llama, {**BESIDE, "report": True})
    first.add("a", SIX)
    first.run()
    first.drain()
    bench.cluster.corrupt(ShardId("shard-0"), block=first.client.hashes(SIX)[3])
    second.add("b", SIX, max_tokens=3)
    second.run()
    told = second.params["b"]["kvcluster"]
    assert told["loaded_tokens"] == 3 * BLOCK
    assert told["miss"].startswith("corrupt")


# ------------------------------------------------------------------------------------------------- as they come


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", ["llama", "gemma", "mla"])
def test_no_schedule_brings_about_a_wrong_byte(model: str, ranks: int, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(model)
    seen = {"loads": 0, "failed": 0, "preempted": 0, "audited": 0, "of another": 0}

    @settings(max_examples=settings().max_examples // 4)
    @given(st.integers(0, 2**32), st.booleans(), st.booleans(), st.sampled_from([ALWAYS, BESIDE]), st.booleans())
    def hold(seed: int, overlap: bool, caching: bool, way: dict[str, int], chunks: bool) -> None:
        rng = random.Random(seed)
        with a_bench() as bench:
            bench.start(ram_bytes=rng.choice(["4MiB", "40KiB"]))
            bench.steps.receive = _failing(rng, rng.choice([0.03, 0.3]))
            options: dict[str, Any] = {
                "max_model_len": 64,
                "max_num_batched_tokens": rng.choice([8, 16, 64]),
                "max_num_seqs": 4,
                "enable_prefix_caching": caching,
                "tensor_parallel_size": ranks,
                "blocks": rng.choice([18, 24, 40] if model == "llama" else [60, 70, 90]),
            }
            if chunks:
                options["long_prefill_token_threshold"] = 8
            tenants, way = ["default", "default"], {**way, "load_ms": 2_000}
            others = [way, way]
            if rng.random() < 0.5:  # the second is another tenant's, who reads what the first has stored
                tenants[1], others[1] = "team", {**way, **reader_of_default(bench)}
            engines = [bench.engine(folder, other, overlap=overlap, **options) for other in others]
            for engine in engines:
                knows_link(engine)
            _play(rng, engines)
            seen["of another"] += sum(load.of_another for step in engines[1].steps for load in step.loads)
            for engine, tenant in zip(engines, tenants, strict=True):
                engine.run()
                engine.drain(flush=False)
                assert engine.free_blocks() == options["blocks"] - 1
                seen["loads"] += engine.counts["loads"]
                seen["failed"] += engine.counts["failed_loads"]
                seen["preempted"] += sum(one.num_preemptions for one in engine.requests.values())
                seen["audited"] += audit(bench.cluster, engine, tenant)

    hold()
    assert all(seen.values()), f"schedules so tame show nothing: {seen}"


def reader_of_default(bench: Bench, **rights: Any) -> dict[str, str]:
    """The settings of an engine of the tenant `team`, which also reads the KV of `default`."""
    caller = Caller(Tenant("team"), reads=frozenset({Tenant("default")}), **rights)
    return {"also_reads": "default", **bench.token("team's", caller)}


def _failing(rng: random.Random, part: float) -> Any:
    def receive() -> None:
        if rng.random() < part:
            raise Unavailable(LOST)

    return receive


def _play(rng: random.Random, engines: list[Engine]) -> None:
    trunks = [[rng.randrange(200) for _ in range(60)] for _ in range(2)]
    for number in range(rng.randrange(20, 60)):
        engine = rng.choice(engines)
        live = [name for name, one in engine.requests.items() if not one.is_finished()]
        act = rng.random()
        if act < 0.3 and len(live) < 6:
            tail = [rng.randrange(200) for _ in range(rng.choice([0, 0, 3, 9]))]
            engine.add(str(number), rng.choice(trunks)[: rng.randrange(1, 40)] + tail, max_tokens=rng.randrange(1, 12))
        elif act < 0.35 and live:
            engine.abort(rng.choice(live))
        elif act < 0.38:
            with suppress(RuntimeError):  # vLLM says that blocks are held for loads and stores
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        else:
            engine.step()
            if rng.random() < 0.3:
                engine.wait_idle()


# --------------------------------------------------------------------------------------------- data parallel ranks


def test_data_parallel_ranks_share_like_any_replicas(bench: Bench, llama: Path) -> None:
    """With one another, and with an engine that has no such ranks."""
    engines = [bench.engine(llama, ALWAYS, data_parallel_size=2) for _ in range(2)] + [bench.engine(llama, ALWAYS)]
    for number, engine in enumerate(engines[:2]):
        for config in (engine.config, *(rank.config for rank in engine.ranks)):
            config.parallel_config.data_parallel_rank = number
    assert len({engine.client.spec for engine in engines}) == 1
    for number, engine in enumerate(engines):
        engine.add(f"of {number}", SIX, max_tokens=4)
        engine.run()
        engine.drain()
        assert engine.counts["loads"] == min(number, 1)
    audit(bench.cluster, engines[-1])
