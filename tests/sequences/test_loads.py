"""Bringing blocks back into the resident set: it ends by its deadline, whatever has become of a load."""

from __future__ import annotations

import pytest
import torch

from kvcluster import WindowPolicy
from kvcluster.errors import LostTokens
from kvcluster.testing import MemoryCluster
from kvcluster.transport.base import Deadline
from tests.client.conftest import Start
from tests.sequences.small_spec import HEADS, LAYERS, small_spec

DIM, BLOCK = 8, 4
SPEC = small_spec(DIM, BLOCK)
PAGE = SPEC.page_bytes(0, SPEC.whole(0))


@pytest.fixture
def cluster(start: Start) -> MemoryCluster:
    return start(shards=1, ram_bytes="4MiB", config={"client": {"resident_bytes": 8 * PAGE}})


def test_a_block_whose_load_is_not_known_any_more_is_lost_at_the_deadline(cluster: MemoryCluster) -> None:
    client = cluster.client(SPEC)
    with client.sequence(policy=WindowPolicy(tail_tokens=0, migration_tokens=1)) as one:
        dtype = one.resident_pages.dtype
        for blocks, of in ((4, one), (8, client.sequence(publish=False))):
            kv = torch.randn(2, blocks * BLOCK, HEADS, DIM).to(dtype)
            for layer in range(LAYERS):
                of.append(layer, *kv)
            of.advance(list(range(blocks * BLOCK)) if of is one else blocks * BLOCK)
            of.flush()
        of.close()
        loads, state = one.resources.loads, one._state
        absent = state.absent(range(4))
        assert absent
        with one.resources.runner.holding([state.blocks[depth] for depth in absent], Deadline.after_ms(0)):
            loads.provide([state.blocks[absent[0]]], Deadline.after_ms(10_000), lend=False)
            (fetch,) = loads.absent.fetches
            assert fetch.transfer.result().blocks == 1
            del loads.absent.fetches[fetch]  # as an interrupt may leave it
            with pytest.raises(LostTokens, match="it has not come"):
                loads.bring(state, absent[:1], Deadline.after_ms(50))
        fetch.ticket.release()
