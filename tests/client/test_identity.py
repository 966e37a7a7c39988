"""KV of another spec, tenant or salt is a miss; `explain` says what differs, within one tenant only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvcluster.client.client import Client
from kvcluster.core.groups import Group, Part, Plane
from kvcluster.core.messages import Siblings
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError, ProtocolError
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.long_chains import Prompt
from kvcluster.transfers.transfer import BlockExplanation, Lookup, Stored
from kvcluster.transport.base import Unavailable
from tests.client.build import (
    BLOCK,
    DIM,
    HEADS,
    LAYERS,
    PAGE_BYTES,
    SPEC,
    Port,
    kv,
    pinned,
    prompt,
    room,
    same,
    spec_of,
    unwritten,
    watched_client,
)

TOKENS = prompt(4)
TUNED = Prompt(TOKENS, adapter="sha256:lora")


@pytest.fixture
def stored(cluster: MemoryCluster) -> MemoryCluster:
    """A cluster in which a client of SPEC has stored TOKENS."""
    client = cluster.client(SPEC)
    assert client.store(TOKENS, kv(4)).blocks == 4
    assert client.flush()
    return cluster


def planes(*named: tuple[str, int, str]) -> KVSpec:
    group = Group(tuple(range(LAYERS)), tuple(Plane(name, HEADS, dim, dtype) for name, dim, dtype in named))
    return replace(SPEC, groups=(group,))


# --------------------------------------------------------------------------------------- another namespace

OTHERS: list[tuple[KVSpec, str]] = [
    (spec_of(adapter="sha256:lora"), "adapter"),
    (spec_of(weights="sha256:2"), "weights"),
    (spec_of(model="tinier"), "model"),
    (spec_of(rope="theta=1e6"), "rope"),
    (spec_of(extra={"quantised": "fp8"}), "extra.quantised"),
    (spec_of(dtype="bfloat16"), "dtype"),
    (spec_of(head_dim=2 * DIM), "layout"),
    (spec_of(num_kv_heads=2 * HEADS), "layout"),
    (spec_of(num_layers=LAYERS + 1), "layout"),
    (planes(("latent", DIM, "float32")), "layout"),
    (planes(("k", DIM, "float32"), ("v", DIM // 2, "float32")), "layout"),
    (spec_of(block_tokens=2 * BLOCK), "block_tokens"),
    (spec_of(weights="sha256:2", rope="theta=1e6"), "weights, rope"),
]


@pytest.mark.parametrize(("spec", "named"), OTHERS, ids=[f"{i}-{named}" for i, (_, named) in enumerate(OTHERS)])
def test_another_spec_misses_and_explain_names_what_differs(stored: MemoryCluster, spec: KVSpec, named: str) -> None:
    client = stored.client(spec)
    assert client.lookup(TOKENS) == Lookup(0, 0, None, Miss(MissReason.NEVER_SEEN))
    explained = client.explain([*TOKENS, 1])
    full = len(TOKENS) // spec.block_tokens
    assert explained[:full] == [BlockExplanation(b, False, "", "", MissReason.NAMESPACE, named) for b in range(full)]
    assert [e.reason for e in explained[full:]] == [MissReason.BELOW_BLOCK]


def test_what_another_spec_has_stored_is_not_written_over(stored: MemoryCluster) -> None:
    other = stored.client(spec_of(weights="sha256:2"))
    assert other.store(TOKENS, kv(4, seed=2)) == Stored(4, 0, 0, 4 * PAGE_BYTES)
    other.flush()
    for client, seed in ((stored.client(SPEC), 0), (other, 2)):
        into = room(4)
        assert client.load(TOKENS, into) == 4 * BLOCK
        assert same(into, kv(4, seed=seed))


def test_an_adapter_of_one_call_is_an_adapter_of_the_spec(stored: MemoryCluster) -> None:
    base, tuned = stored.client(SPEC), stored.client(spec_of(adapter="sha256:lora"))
    assert base.lookup(TUNED).blocks == 0
    assert {(e.reason, e.detail) for e in base.explain(TUNED)} == {(MissReason.NAMESPACE, "adapter")}
    assert base.store(TUNED, kv(4, seed=3)).blocks == 4
    base.flush()

    into = room(4)
    assert tuned.load(TOKENS, into) == 4 * BLOCK
    assert same(into, kv(4, seed=3))
    into = room(4)
    assert tuned.load(Prompt(TOKENS, adapter=""), into) == 4 * BLOCK
    assert same(into, kv(4))


def test_an_adapter_goes_along_with_tickets_and_pins(stored: MemoryCluster) -> None:
    client, values = stored.client(SPEC), kv(2, seed=3)
    hashes = client.hashes(Prompt(TOKENS[: 2 * BLOCK], adapter="sha256:lora"))
    assert client.begin_store(hashes, values, adapter="sha256:lora").result().blocks == 2
    client.flush()
    assert client.pin(TUNED, 60.0) == pinned(2)
    assert client.unpin(TOKENS) == pinned(0), "it is the prompt without the adapter"
    assert client.unpin(TUNED) == pinned(2)
    with client.prepare_load(hashes, adapter="sha256:lora") as ticket:
        for named in ({}, {"adapter": "sha256:lora"}):
            into = room(2)
            assert client.begin_load(ticket, into, **named).result().blocks == 2, "the ticket knows what it is for"
            assert same(into, values)
        for other in ("", "sha256:another"):
            with pytest.raises(CallerError, match=f"prepared for adapter 'sha256:lora', not '{other}'"):
                client.begin_load(ticket, room(2), adapter=other)


def test_a_ticket_from_elsewhere_for_an_adapter_is_redeemed_by_naming_it(stored: MemoryCluster) -> None:
    owner, values = stored.client(SPEC), kv(2, seed=3)
    hashes = owner.hashes(Prompt(TOKENS[: 2 * BLOCK], adapter="sha256:lora"))
    assert owner.begin_store(hashes, values, adapter="sha256:lora").result().blocks == 2
    owner.flush()
    with owner.prepare_load(hashes, adapter="sha256:lora") as ticket:
        fresh, used = stored.client(SPEC), stored.client(SPEC)
        used.lookup(TOKENS)
        for client in (fresh, used):
            with pytest.raises(CallerError, match="the spec and adapter that the ticket was prepared with"):
                client.begin_load(client.redeem(bytes(ticket)), room(2)).result()
            into = room(2)
            assert client.begin_load(client.redeem(bytes(ticket)), into, adapter="sha256:lora").result().blocks == 2
            assert same(into, values)


# ---------------------------------------------------------------------------------------------- forgetting


def test_a_clear_forgets_everything_of_its_tenant_and_nothing_of_others(stored: MemoryCluster) -> None:
    client, stranger = stored.client(SPEC), stored.client(SPEC, tenant="stranger")
    assert stranger.store(TOKENS, kv(4)).blocks == 4
    assert client.store(TUNED, kv(4)).blocks == 4
    assert stranger.flush() and client.flush()
    assert client.clear() == 8
    assert client.lookup(TOKENS).blocks == client.lookup(TUNED).blocks == 0
    assert client.clear() == 0
    assert stranger.lookup(TOKENS).blocks == 4
    stored.wait_until(lambda: sum(len(host.core.pool) for host in stored.shards.values()) == 4)
    assert client.store(TOKENS, kv(4, seed=2)).blocks == 4, "blocks stored later are kept"
    assert client.flush()
    into = room(4)
    assert client.load(TOKENS, into) == 4 * BLOCK
    assert same(into, kv(4, seed=2))


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ({"model": "tiny"}, []),
        ({"weights": "sha256:1"}, ["other weights"]),
        ({"weights": "sha256:1", "adapter": ""}, ["an adapter", "other weights"]),
        ({"adapter": "sha256:lora"}, ["base", "other weights"]),
        ({"model": "another"}, ["base", "an adapter", "other weights"]),
    ],
    ids=repr,
)
def test_a_purge_forgets_what_it_names(stored: MemoryCluster, filters: dict[str, str], left: list[str]) -> None:
    clients = {
        "base": stored.client(SPEC),
        "an adapter": stored.client(spec_of(adapter="sha256:lora")),
        "other weights": stored.client(spec_of(weights="sha256:2")),
    }
    for client in clients.values():
        client.store(TOKENS, kv(4))
        assert client.flush()
    assert clients["base"].purge(**filters) == 4 * (3 - len(left))
    assert [name for name, client in clients.items() if client.lookup(TOKENS).blocks] == left


def test_a_ticket_from_before_a_purge_opens_nothing(stored: MemoryCluster) -> None:
    client = stored.client(SPEC)
    with client.prepare_load(client.hashes(TOKENS)) as ticket:
        client.clear()
        stored.wait_until(lambda: not client.begin_load(ticket, room(4)).result().blocks)
        into = room(4)
        loaded = client.begin_load(ticket, into).result()
        assert list(loaded.failed) == [0, 1, 2, 3] and unwritten(into)


def test_of_several_other_specs_the_most_alike_is_named(stored: MemoryCluster) -> None:
    far = stored.client(spec_of(weights="sha256:2", rope="other", model="larger"))
    far.store(TOKENS, kv(4))
    far.flush()
    explained = stored.client(spec_of(weights="sha256:2")).explain(TOKENS)
    assert [e.detail for e in explained] == ["weights"] * 4


def test_only_the_blocks_that_another_spec_has_are_put_down_to_it(stored: MemoryCluster) -> None:
    client = stored.client(spec_of(weights="sha256:2"))
    longer = TOKENS + prompt(2, seed=5)
    reasons = [e.reason for e in client.explain(longer)]
    assert reasons == [MissReason.NAMESPACE] * 4 + [MissReason.NEVER_SEEN] * 2


def test_part_of_a_block_under_another_spec_is_put_down_to_it_too(cluster: MemoryCluster) -> None:
    part = Part(0, LAYERS, 0, 1)
    rank = cluster.client(SPEC, part=part)
    rank.store(TOKENS, kv(4, part=part))
    rank.flush()
    explained = cluster.client(spec_of(rope="other")).explain(TOKENS)
    assert {(e.reason, e.detail) for e in explained} == {(MissReason.NAMESPACE, "rope")}


def test_a_lost_answer_about_other_specs_leaves_what_is_known(stored: MemoryCluster) -> None:
    port = Port(stored)

    def lose(message: object) -> None:
        if isinstance(message, Siblings):
            raise Unavailable(Miss(MissReason.SHARD_LOST, "lost"))

    port.after = lose
    with watched_client(stored, port=port) as client:
        explained = client.explain(TOKENS + prompt(1, seed=7))
    assert [e.hit for e in explained] == [True] * 4 + [False]
    assert str(explained[4]) == "block 4: miss, never_seen (other specs not compared: shard_lost (lost))"


# --------------------------------------------------------------------------------------------- another part


@pytest.mark.parametrize(
    ("held", "asked"),
    [
        (Part(0, LAYERS, 0, 2), Part(0, LAYERS, 2, HEADS)),
        (Part(0, LAYERS, 0, 2), Part(0, LAYERS, 1, 3)),
        (Part(0, 1, 0, HEADS), Part(1, LAYERS, 0, HEADS)),
        (Part(0, 1, 0, HEADS), Part(0, LAYERS, 0, HEADS)),
    ],
)
def test_heads_or_layers_that_were_never_stored_miss_and_explain_says_part(
    cluster: MemoryCluster, held: Part, asked: Part
) -> None:
    holder, asker = cluster.client(SPEC, part=held), cluster.client(SPEC, part=asked)
    holder.store(TOKENS, kv(4, part=held))
    holder.flush()

    touching = held if held.intersect(asked) else "nothing"
    detail = f"group 0: asked for {asked}; held: {touching}"
    assert asker.lookup(TOKENS) == Lookup(0, 0, None, Miss(MissReason.PART, detail))
    assert asker.explain(TOKENS) == [
        BlockExplanation(block, False, "", "", MissReason.PART, detail) for block in range(4)
    ]
    into = room(4, part=asked)
    assert asker.load(TOKENS, into) == 0
    assert unwritten(into)


# ----------------------------------------------------------------------------------- another tenant or salt

Ask = Callable[[Client, list[int]], Any]
QUESTIONS: list[Ask] = [
    lambda client, tokens: client.explain(tokens),
    lambda client, tokens: client.lookup(tokens),
    lambda client, tokens: client.load(tokens, room(4)),
    lambda client, tokens: client.pin(tokens, 60.0),
    lambda client, tokens: client.unpin(tokens),
]
NEVER_SEEN = prompt(4, seed=99)


@pytest.mark.parametrize("ask", QUESTIONS)
def test_another_tenants_block_looks_like_one_that_was_never_stored(stored: MemoryCluster, ask: Ask) -> None:
    stranger = stored.client(SPEC, tenant="stranger")
    assert ask(stranger, TOKENS) == ask(stranger, NEVER_SEEN)


def test_a_block_under_another_salt_looks_like_one_that_was_never_stored(stored: MemoryCluster) -> None:
    client = stored.client(SPEC)
    for salt in (b"\0", b"secret"):
        assert client.explain(Prompt(TOKENS, salt)) == client.explain(Prompt(NEVER_SEEN, salt))
        assert client.lookup(Prompt(TOKENS, salt)) == client.lookup(Prompt(NEVER_SEEN, salt))
    assert client.lookup(Prompt(TOKENS, salt=b"")).blocks == 4


def test_another_tenants_specs_are_not_told(stored: MemoryCluster) -> None:
    stranger = stored.client(spec_of(weights="sha256:2"), tenant="stranger")
    assert stranger.explain(TOKENS) == stranger.explain(NEVER_SEEN)


def test_tenants_that_store_the_same_prompt_store_it_each_for_itself(stored: MemoryCluster) -> None:
    stranger = stored.client(SPEC, tenant="stranger")
    assert stranger.store(TOKENS, kv(4, seed=2)) == Stored(4, 0, 0, 4 * PAGE_BYTES)
    stranger.flush()
    into = room(4)
    assert stored.client(SPEC).load(TOKENS, into) == 4 * BLOCK
    assert same(into, kv(4))


def test_a_salt_is_a_place_of_its_own(stored: MemoryCluster) -> None:
    client, salted = stored.client(SPEC), Prompt(TOKENS, salt=b"s")
    assert client.store(salted, kv(4, seed=2)).blocks == 4
    client.flush()
    into = room(4)
    assert client.load(salted, into) == 4 * BLOCK
    assert same(into, kv(4, seed=2))
    assert client.pin(salted, 60.0) == pinned(4)
    assert client.unpin(TOKENS) == pinned(0)
    assert client.unpin(salted) == pinned(4)


def test_hashes_of_another_tenant_open_nothing(stored: MemoryCluster) -> None:
    hashes = stored.client(SPEC).hashes(TOKENS)
    with stored.client(SPEC, tenant="stranger").prepare_load(hashes) as ticket:
        assert (ticket.blocks, ticket.miss) == (0, Miss(MissReason.NEVER_SEEN))


def test_a_ticket_of_another_tenant_or_spec_is_refused_before_a_byte_moves(stored: MemoryCluster) -> None:
    owner = stored.client(SPEC)
    with owner.prepare_load(owner.hashes(TOKENS)) as ticket:
        data = bytes(ticket)
        for client in (stored.client(SPEC, tenant="stranger"), stored.client(spec_of(rope="other"))):
            into = room(4)
            with pytest.raises(CallerError, match="the spec and adapter that the ticket was prepared with"):
                client.begin_load(client.redeem(data), into).result()
            assert unwritten(into)


@pytest.mark.parametrize("data", [b"", b"\0", b"no ticket"])
def test_what_is_no_ticket_is_not_redeemed(cluster: MemoryCluster, data: bytes) -> None:
    with pytest.raises(ProtocolError):
        cluster.client(SPEC).redeem(data)
