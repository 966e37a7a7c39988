"""In an engine with few blocks, each step names exactly the blocks that it gives to a new owner.

Schedules are random, and vLLM's scheduler makes of them what it will: requests share prefixes, take blocks from one
another, are aborted, load, fail to load and restart, while stores go on reading. What a step writes is read
off vLLM's own block tables.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.output import SchedulerOutput

from kvcluster.engines.vllm.compat import NULL_BLOCK
from tests.client.build import prompt
from tests.vllm.build import BLOCK
from tests.vllm.conftest import a_bench
from tests.vllm.scripted import ALWAYS, BESIDE, blocks_of, engine_of, fill, knows_link
from tests.vllm.toy import Engine, spans_of

TRUNKS = [prompt(10, seed, block_tokens=BLOCK) for seed in (1, 2)]

_ADD = st.tuples(st.just("add"), st.integers(0, 1), st.integers(1, 30), st.integers(0, 9), st.integers(1, 14))
_STEP = st.tuples(st.just("step"), st.integers(1, 3))
_REST = st.one_of(
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("read"), st.booleans()),
    st.tuples(st.just("come"), st.integers(0, 3)),
    st.tuples(st.just("reset")),
)
ACTIONS = st.one_of(_ADD, _ADD, _STEP, _STEP, _REST)


class Watch:
    """Holds every step against vLLM's own tables: blocks that a store reads and the step writes are named, and blocks
    from which a request continues are not."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.named = self.shared = 0
        engine.on_step = self.look

    def look(self, output: SchedulerOutput) -> None:
        step = output.kv_connector_metadata.step
        manager, spans = self._engine.scheduler.kv_cache_manager, spans_of(output, self._engine.texts)
        tables = {name: manager.get_block_ids(name) for name in self._engine.scheduler.requests}
        written = set(step.written)
        assert NULL_BLOCK not in written
        # What the step writes: what is loaded, and what is computed.
        writes = {block for load in step.loads for into in load.into for block in into}
        for name, (start, stop, _) in spans.items():
            for of_group in tables[name]:
                writes.update(of_group[start // BLOCK : (stop - 1) // BLOCK + 1])
        for rank in self._engine.ranks:
            for store in rank._reading.values():
                reads = blocks_of(store)
                assert NULL_BLOCK not in reads
                assert reads & writes <= written, "a store would read what this step writes"
                self.named += len(reads & writes)
        for store in step.stores:
            for source, of_group in zip(store.source, tables[store.request], strict=True):
                assert list(source) == of_group[store.first : store.first + len(source)], (
                    "this is not its block any more"
                )
        for name, table in tables.items():
            computed = spans[name][0] if name in spans else self._engine.requests[name].num_computed_tokens
            has = {block for of_group in table for block in of_group[: computed // BLOCK]}
            assert not (written - writes) & has, f"{name} continues from blocks that were given to a new owner"
            self.shared += len(has)


@pytest.mark.parametrize("model", ["llama", "gemma", "mla"])
def test_each_step_names_exactly_the_blocks_that_it_gives_to_a_new_owner(
    model: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(model)
    seen = {"named": 0, "shared": 0, "loads": 0, "preempted": 0}

    @given(
        st.lists(ACTIONS, min_size=30, max_size=60),
        st.sampled_from([ALWAYS, BESIDE]),
        st.booleans(),
        st.booleans(),
        st.sampled_from([8, 32]),
    )
    def hold(actions: list[Any], way: dict[str, int], caching: bool, overlap: bool, budget: int) -> None:
        few = {"max_model_len": 48, "max_num_batched_tokens": budget, "enable_prefix_caching": caching}
        blocks = 16 if model == "llama" else 44
        with a_bench() as bench:
            engine = engine_of(bench, folder, way, blocks=blocks, overlap=overlap, **few)
            watch = Watch(engine)
            engine.ranks[0].reads = True
            knows_link(engine)
            fill(engine.client, TRUNKS[1])
            for number, action in enumerate(actions):
                _act(engine, number, action)
            for rank in engine.ranks:
                rank.reads = False
            engine.run()
            engine.drain()
            assert engine.free_blocks() == blocks - 1
            assert not engine.side._requests and not engine.side._in_flight._loads
            assert not engine.side._planner._undrained
            seen["named"] += watch.named
            seen["shared"] += watch.shared
            seen["loads"] += len(engine.ranks[0].loads)
            seen["preempted"] += sum(one.num_preemptions for one in engine.requests.values())

    hold()
    assert all(seen.values()), f"schedules so tame show nothing: {seen}"


def _act(engine: Engine, number: int, action: Any) -> None:
    (rank,) = engine.ranks
    what, *more = action
    live = [name for name, request in engine.requests.items() if not request.is_finished()]
    if what == "add" and len(live) < 6:
        trunk, cut, rest, most = more
        engine.add(
            str(number), TRUNKS[trunk][:cut] + prompt(1, number, block_tokens=max(1, rest))[:rest], max_tokens=most
        )
    elif what == "step":
        for _ in range(more[0]):
            engine.step()
    elif what == "abort" and live:
        engine.abort(live[more[0] % len(live)])
    elif what == "read":
        rank.reads = more[0]
    elif what == "come":
        rank.come = lambda order: order.first + max(0, len(order.into[0]) - more[0])
    elif what == "reset":
        with suppress(RuntimeError):  # vLLM has reset its cache, and says that blocks are held for loads and stores
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
