"""Clients of other tenants who may read an owner's KV, and clients whose token only reads: against plain tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvcluster.client.client import Client
from kvcluster.core.ids import Caller, Tenant
from kvcluster.core.miss import MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError
from kvcluster.testing import MemoryCluster
from tests.client.build import BLOCK, SPEC, kv, prompt, room, same, spec_of
from tests.client.conftest import Start

OWNER, TEAM = "public", "team-a"
TOKENS = prompt(4)


def client_of(cluster: MemoryCluster, caller: Caller, spec: KVSpec = SPEC, *, reads: str | None = None) -> Client:
    port, opener = cluster.port_of(lambda: caller), cluster.opener_of(caller)
    return Client(port, opener, spec, config=cluster.config.client, reads=reads)


def reader(cluster: MemoryCluster, spec: KVSpec = SPEC, *, tenant: str = TEAM) -> Client:
    """Of a tenant that may read the owner's KV."""
    return client_of(cluster, Caller(Tenant(tenant), reads=frozenset({Tenant(OWNER)})), spec, reads=OWNER)


def test_a_reader_loads_what_the_owner_stored_and_its_own_clients_see_nothing_of_it(cluster: MemoryCluster) -> None:
    owner, own = cluster.client(SPEC, tenant=OWNER), cluster.client(SPEC, tenant=TEAM)
    owner.store(TOKENS, kv(4))
    owner.flush()
    with reader(cluster) as client:
        assert client.read_only and client.lookup(TOKENS).tokens == 4 * BLOCK
        out = room(4)
        assert client.load(TOKENS, out) == 4 * BLOCK and same(out, kv(4))
        assert all(block.hit for block in client.explain(TOKENS))
    assert own.lookup(TOKENS).tokens == 0 and not own.read_only


def test_it_changes_nothing(cluster: MemoryCluster) -> None:
    owner = cluster.client(SPEC, tenant=OWNER)
    owner.store(TOKENS, kv(4))
    owner.flush()
    with reader(cluster) as client:
        changes: dict[str, Callable[[], object]] = {
            "store": lambda: client.store(TOKENS, kv(4, seed=1)),
            "begin_store": lambda: client.begin_store(client.hashes(TOKENS), kv(4, seed=1)),
            "pin": lambda: client.pin(TOKENS, 60.0),
            "unpin": lambda: client.unpin(TOKENS),
            "purge": lambda: client.purge(model=SPEC.model),
            "clear": client.clear,
            "sequence": lambda: client.sequence(TOKENS),
        }
        for name, change in changes.items():
            with pytest.raises(CallerError, match=f"reads the KV of tenant '{OWNER}'"):
                change()
            assert owner.lookup(TOKENS).tokens == 4 * BLOCK, name


def test_without_a_grant_it_is_told_which_line_is_missing(cluster: MemoryCluster) -> None:
    for owner in (OWNER, "nobody"):
        missing = pytest.raises(CallerError, match=f"grant  {TEAM}  reads  {owner}")
        with client_of(cluster, Caller(Tenant(TEAM)), reads=owner) as client, missing:
            client.lookup(TOKENS)


@pytest.mark.parametrize("name", ["", "two words", "-", "*", b"public", 7])
def test_what_is_no_tenant_is_refused_at_once(cluster: MemoryCluster, name: Any) -> None:
    with pytest.raises(CallerError, match="not the name of a tenant"):
        client_of(cluster, Caller(Tenant(TEAM)), reads=name)


def test_while_the_owner_has_nothing_it_is_a_miss_that_says_what_differs(cluster: MemoryCluster) -> None:
    owner, other = cluster.client(SPEC, tenant=OWNER), replace(SPEC, weights="sha256:new")
    with reader(cluster, other) as client:
        found = client.lookup(TOKENS)
        assert found.tokens == 0 and found.reason is not None and found.reason.reason is MissReason.NEVER_SEEN
        assert found.reason.detail == f"tenant '{OWNER}' has no KV of this spec"
        owner.store(TOKENS, kv(4))
        owner.flush()
        found = client.lookup(TOKENS)
        assert found.reason is not None and found.reason.detail.endswith("its nearest spec differs in weights")
        with client.prepare_load(client.hashes(TOKENS)) as ticket:
            assert not ticket.blocks and ticket.miss is not None and ticket.miss.reason is MissReason.NEVER_SEEN
        cluster.client(other, tenant=OWNER).store(TOKENS, kv(4, seed=2))
        owner.flush()
        cluster.wait_until_idle()
        assert client.lookup(TOKENS).tokens == 4 * BLOCK, "the same client finds it"
        owner.clear()
        assert client.lookup(TOKENS).tokens == 0


def test_a_client_whose_token_is_read_only_loads_and_stores_nothing(cluster: MemoryCluster) -> None:
    owner = cluster.client(SPEC, tenant=OWNER)
    owner.store(TOKENS, kv(4))
    owner.flush()
    with client_of(cluster, Caller(Tenant(OWNER), read_only=True)) as client:
        out = room(4)
        assert client.load(TOKENS, out) == 4 * BLOCK and same(out, kv(4))
        assert client.read_only
        for change in (lambda: client.store(prompt(1, seed=5), kv(1)), client.clear, lambda: client.sequence(TOKENS)):
            with pytest.raises(CallerError, match="token is read-only"):
                change()


def test_one_that_has_asked_nothing_yet_is_refused_by_the_cluster(cluster: MemoryCluster) -> None:
    refused = pytest.raises(CallerError, match="token is read-only")
    with client_of(cluster, Caller(Tenant(OWNER), read_only=True)) as client, refused:
        client.clear()


def test_owners_and_readers_in_too_little_memory_against_plain_tensors(start: Start) -> None:
    """Two owners, two readers of each, three specs; every load must be what that owner stored for those tokens."""
    cluster = start(shards=2, ram_bytes="256KiB")
    specs = [SPEC, spec_of(weights="sha256:second"), spec_of(model="third")]
    owners, draw = ["public", "shared"], random.Random(52)
    writers = {(owner, n): cluster.client(spec, tenant=owner) for owner in owners for n, spec in enumerate(specs)}
    grants = frozenset(map(Tenant, owners))
    readers = {
        (tenant, owner, n): client_of(cluster, Caller(Tenant(tenant), reads=grants), spec, reads=owner)
        for tenant in ("team-a", "team-b", "shared")
        for owner in owners
        for n, spec in enumerate(specs)
    }
    kept: dict[tuple[str, int, int], torch.Tensor] = {}
    hits = 0
    for step in range(400):
        owner, n, seed = draw.choice(owners), draw.randrange(3), draw.randrange(12)
        if draw.random() < 0.35:
            if (owner, n, seed) not in kept:
                kept[owner, n, seed] = kv(3, seed=1_000 * step + seed)
            writers[owner, n].store(prompt(3, seed=seed), kept[owner, n, seed])
            continue
        tenant, out = draw.choice(("team-a", "team-b", "shared")), room(3)
        tokens = readers[tenant, owner, n].load(prompt(3, seed=seed), out)
        if tokens:
            hits += 1
            blocks = tokens // BLOCK
            assert same(out[:blocks], kept[owner, n, seed][:blocks]), f"step {step}: another's KV"
    for client in readers.values():
        client.close()
    assert 20 < hits < 260 and writers["public", 0].status()["totals"]["evicted"], "too little or too much memory"
