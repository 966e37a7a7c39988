"""A prompt that lies on several shards in runs, under pressure: what stays of it can be loaded."""

from __future__ import annotations

from tests.client.build import SPEC, kv, prompt
from tests.client.conftest import Start, start

__all__ = ["start"]
RUN = 64


def test_under_pressure_no_block_stays_behind_the_first_miss(start: Start) -> None:
    config = {"coordinator": {"hold_ms": 0, "run_blocks": RUN}, "shard": {"scrub_bytes": 0}}
    cluster = start(shards=3, ram_bytes="1MiB", config=config)
    client = cluster.client(SPEC)
    for seed in range(100, 200):  # a prompt of which each shard has a run: placement is by hash
        long = prompt(3 * RUN, seed)
        assert client.store(long, kv(3 * RUN)).blocks == 3 * RUN and client.flush()
        if len({entry.shard for entry in client.explain(long)}) == 3:
            break
        client.clear()
    behind = []
    for seed in range(1, 40):  # other prompts, until much of the first is evicted
        client.store(prompt(24, seed), kv(24, seed))
        client.flush()
        hits = [entry.hit for entry in client.explain(long)]
        behind.append(sum(hits[hits.index(False) :]) if False in hits else 0)
    assert not client.explain(long)[-1].hit, "there was pressure"
    assert behind[-1] == 0
