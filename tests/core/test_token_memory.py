"""Token ids kept for KV events: bounded in bytes that are really taken, by shares of tenants, and not for ever."""

from __future__ import annotations

import gc
import random
import tracemalloc
from array import array

import pytest

from kvcluster.core import limits
from kvcluster.core.coordinator.event_emitter import BLOCK_BYTES, TokenMemory
from kvcluster.core.ids import HASH_BYTES, BlockHash, Caller, CallId, NamespaceId, Tenant
from kvcluster.core.messages import Attach, Attached, PrepareStore, StoreGrant
from kvcluster.core.spec import KVSpec
from kvcluster.replay.core_stepper import build_request
from kvcluster.wire.methods import COORDINATOR
from tests.core.lone_coordinator import LoneCoordinator
from tests.core.samples import OURS, THEIRS, WHOLE, attempt, pages, root

SPACE = NamespaceId(bytes(32))
MIB = 2**20


def blocks(count: int, seed: int) -> tuple[BlockHash, ...]:
    draw = random.Random(seed)
    return tuple(BlockHash(draw.randbytes(HASH_BYTES)) for _ in range(count))


def remember(memory: TokenMemory, hashes: tuple[BlockHash, ...], tenant: Tenant = OURS, now: int = 0) -> None:
    memory.add(tenant, SPACE, hashes, range(2 * len(hashes)), 2, now)


def known(memory: TokenMemory, hashes: tuple[BlockHash, ...], tenant: Tenant = OURS) -> list[int]:
    """The places of the blocks that are remembered; they are forgotten by this."""
    return [at for at, block in enumerate(hashes) if memory.take(tenant, SPACE, block)]


def few(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Bounds the memory to so many blocks of two tokens, of which a tenant alone may have half."""
    monkeypatch.setattr(limits, "TOKEN_MEMORY_BYTES", most * (BLOCK_BYTES + 8))


@pytest.mark.parametrize("block_tokens", [1, 16, 1_024])
def test_stores_without_a_commit_take_no_more_memory_than_the_share_of_their_tenant(
    monkeypatch: pytest.MonkeyPatch, block_tokens: int
) -> None:
    monkeypatch.setattr(limits, "TOKEN_MEMORY_BYTES", 4 * MIB)
    coordinator, _ = LoneCoordinator.serving(announces=True)
    spec = KVSpec.uniform(
        model="m", weights="w", num_layers=1, num_kv_heads=1, head_dim=1, dtype="float16", block_tokens=block_tokens
    )
    space = coordinator.ask(Attached, build_request(Attach(spec), OURS)).namespace
    parts, count = ((0, spec.whole(0)),), min(1_024, 131_072 // block_tokens)
    method = COORDINATOR["PrepareStore"]
    gc.collect()
    tracemalloc.start()
    for number in range(3 * MIB // (count * (BLOCK_BYTES + 4 * block_tokens)) + 1):
        hashes = blocks(count, number)
        tokens = [10**6 + at for at in range(count * block_tokens)]
        store = PrepareStore(attempt(number), 0, root(), hashes[0], hashes, parts, tokens=tokens)
        asked = method.decode_request(method.encode_request(store, space), CallId(number), Caller(OURS))
        coordinator.ask(StoreGrant, build_request(asked.question, OURS, space))
        coordinator.core.state.tickets.end((OURS, attempt(number)))
        del store, asked, tokens, hashes
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept <= limits.TOKEN_MEMORY_BYTES // 2 + MIB


def test_more_token_ids_than_a_message_may_have_are_passed_over() -> None:
    method, space = COORDINATOR["PrepareStore"], LoneCoordinator(expected=1).space
    hashes = blocks(2, 1)
    for tokens, kept in ((limits.STORE_TOKENS, limits.STORE_TOKENS), (limits.STORE_TOKENS + 2, 0)):
        store = PrepareStore(attempt(1), 0, root(), hashes[0], hashes, ((0, WHOLE),), tokens=range(tokens))
        asked = method.decode_request(method.encode_request(store, space), CallId(1), Caller(OURS)).question
        assert isinstance(asked, PrepareStore) and len(asked.tokens) == kept


def test_what_is_charged_is_what_is_taken() -> None:
    memory = TokenMemory()
    names = blocks(4_096, 1)
    gc.collect()
    tracemalloc.start()
    copies = tuple(BlockHash(bytes(bytearray(block))) for block in names)  # they stay for as long as the memory
    memory.add(OURS, SPACE, copies, array("I", range(16 * len(names))), 16, 0)
    del copies
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.5 * memory.nbytes <= kept <= memory.nbytes


def test_a_tenant_that_takes_all_it_can_costs_no_other_its_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, 12)
    memory = TokenMemory()
    theirs, many = blocks(2, 1), blocks(100, 2)
    remember(memory, theirs, THEIRS)
    remember(memory, many)
    remember(memory, blocks(1, 3), Tenant("a third"))
    assert known(memory, theirs, THEIRS) == [0, 1]
    assert known(memory, many) == [95, 96, 97, 98, 99], "its own oldest are forgotten"


def test_what_is_taken_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, 4)
    memory = TokenMemory()
    first, second = blocks(2, 1), blocks(2, 2)
    remember(memory, first)
    assert known(memory, first) == [0, 1]
    assert known(memory, first) == [] and memory.nbytes == 0
    remember(memory, second)
    assert known(memory, second) == [0, 1]


def test_the_first_token_ids_of_a_block_hold_and_are_charged_once() -> None:
    memory = TokenMemory()
    [block] = blocks(1, 1)
    memory.add(OURS, SPACE, (block,), (1, 2), 2, 0)
    memory.add(OURS, SPACE, (block,), (3, 4), 2, 0)
    assert memory.nbytes == BLOCK_BYTES + 8
    assert array("I", memory.take(OURS, SPACE, block)).tolist() == [1, 2]
    assert memory.nbytes == 0


def test_a_block_that_exceeds_the_share_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, 1)
    memory = TokenMemory()
    remember(memory, blocks(3, 1))
    assert memory.nbytes == 0 and known(memory, blocks(3, 1)) == []


def test_what_no_commit_asks_for_is_forgotten() -> None:
    coordinator, voice = LoneCoordinator.serving(announces=True)
    emitter = coordinator.core.state.emitter
    assert emitter is not None
    space = NamespaceId(coordinator.space)
    emitter.remember(space, blocks(2, 1), range(4), 2, coordinator.now)
    coordinator.now += limits.TOKENS_KEPT_NS
    emitter.remember(space, blocks(2, 2), range(4), 2, coordinator.now)
    voice.report(*pages(blocks(1, 3)))  # any message does
    assert emitter.remembered_bytes == 2 * (BLOCK_BYTES + 8)
