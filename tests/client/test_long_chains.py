"""Prompts of more blocks than one message may name: the same results as by one message, and no message beyond the
limit, which is lowered here to a few blocks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvcluster.client.client import Client
from kvcluster.core import limits
from kvcluster.core.groups import LAST, Group, Part, Plane, chunk, window
from kvcluster.core.ids import HOLDER_BYTES, Attempt, BlockHash, Epoch, Holder, NamespaceId
from kvcluster.core.messages import Attached, CoordinatorQuestion, PrepareLoad, PrepareStore, Reply
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.shard.pin_handler import PinHandler
from kvcluster.core.spec import KVSpec
from kvcluster.errors import LimitError
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.coordinator_client import CoordinatorPort
from kvcluster.transfers.store_executor import StoreTerms, prepare_store
from kvcluster.transfers.transfer import Loaded, Stored
from kvcluster.transport.base import Deadline, Unavailable
from tests.client.build import BLOCK, SPEC, kv, prompt, room, same
from tests.client.conftest import Start

STEP = 4
LENGTHS = [STEP - 1, STEP, STEP + 1, 2 * STEP, 2 * STEP + 1, 3 * STEP + 1]


class Counting:
    """A port that asserts the limit of each message, and fails the messages that `fails` names by kind and number."""

    def __init__(self, port: CoordinatorPort, fails: Callable[[type[Any], int], bool] = lambda kind, at: False) -> None:
        self._port = port
        self._fails = fails
        self.asked: dict[type[Any], int] = {}

    def ask(self, question: CoordinatorQuestion, deadline: Deadline, namespace: NamespaceId | None = None) -> Reply:
        kind = type(question)
        assert len(getattr(question, "hashes", ())) <= limits.BLOCKS_PER_CALL
        at = self.asked[kind] = self.asked.get(kind, 0) + 1
        if self._fails(kind, at):
            raise Unavailable(Miss(MissReason.DEADLINE, "no answer"))
        return self._port.ask(question, deadline, namespace)

    def cut_off(self) -> None:
        self._port.cut_off()

    def close(self) -> None:
        self._port.close()


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BLOCKS_PER_CALL", STEP)


def client_of(cluster: MemoryCluster, spec: KVSpec = SPEC, **counting: Any) -> tuple[Client, Counting]:
    port = Counting(cluster.port(), **counting)
    return Client(port, cluster.opener(), spec, config=cluster.config.client), port


@pytest.mark.parametrize("blocks", LENGTHS)
def test_a_prompt_is_stored_and_loaded_in_several_messages(lowered: None, start: Start, blocks: int) -> None:
    client, port = client_of(start(shards=2, ram_bytes="4MiB"))
    messages = -(-blocks // STEP)
    with client:
        stored = client.store(prompt(blocks), kv(blocks))
        assert (stored.blocks, stored.deduplicated, stored.miss) == (blocks, 0, None)
        assert port.asked[PrepareStore] == messages and client.flush()
        assert client.lookup(prompt(blocks, rest=2)).blocks == blocks
        assert port.asked[PrepareLoad] == messages
        into = room(blocks)
        assert client.load(prompt(blocks), into) == blocks * BLOCK and same(into, kv(blocks))
        assert [block.hit for block in client.explain(prompt(blocks))] == [True] * blocks
        assert client.pin(prompt(blocks), 60).blocks == blocks == client.unpin(prompt(blocks)).blocks
        assert client.store(prompt(blocks), kv(blocks)) == Stored(0, blocks, 0, 0)


@pytest.mark.parametrize("cached", range(2 * STEP + 2))
def test_a_cached_prefix_ends_anywhere_in_a_message(lowered: None, start: Start, cached: int) -> None:
    client, _ = client_of(start(ram_bytes="4MiB"))
    tokens, blocks = prompt(2 * STEP + 2), 2 * STEP + 2
    with client:
        if cached:
            client.store(tokens[: cached * BLOCK], kv(blocks)[:cached])
            client.flush()
        found = client.lookup(tokens)
        assert (found.blocks, found.reason) == (cached, Miss(MissReason.NEVER_SEEN))
        assert client.pin(tokens, 60).blocks == cached
        assert [entry.hit for entry in client.explain(tokens)] == [True] * cached + [False] * (blocks - cached)
        rest = client.store(tokens, kv(blocks))
        assert (rest.blocks, rest.deduplicated) == (blocks - cached, cached)


def test_a_ticket_for_no_block_says_whether_the_coordinator_answers(start: Start) -> None:
    cluster = start(ram_bytes="4MiB")
    client, port = client_of(cluster)
    with client:
        with client.prepare_load([]) as ticket:
            assert ticket.from_coordinator and ticket.blocks == 0 and port.asked[PrepareLoad] == 1
        cluster.stop_coordinator()
        assert not client.prepare_load([]).from_coordinator


def test_one_ticket_holds_all_of_it_and_goes_to_another_process(lowered: None, start: Start) -> None:
    cluster = start(ram_bytes="4MiB")
    client, _ = client_of(cluster)
    blocks = 3 * STEP + 1
    with client, cluster.client(SPEC, part=Part(1, 3, 0, 2)) as other:
        client.store(prompt(blocks), kv(blocks))
        client.flush()
        tickets = cluster.coordinator_core().state.tickets
        with client.prepare_load(client.hashes(prompt(blocks)), whole=True) as ticket:
            assert ticket.blocks == blocks and len(tickets) == 4
            part = kv(blocks)[:, 1:3, :, :, 0:2]
            into = room(blocks, part=Part(1, 3, 0, 2))
            assert other.begin_load(other.redeem(bytes(ticket)), into).result().blocks == blocks
            assert same(into, part)
            tail = room(blocks - STEP - 1)
            loaded = client.begin_load(ticket, tail, first=STEP + 1).result()
            assert loaded == Loaded(blocks, tail.numel() * 4) and same(tail, kv(blocks)[STEP + 1 :])
            with client.borrow(ticket) as borrowed:
                assert borrowed.blocks == blocks
        cluster.wait_until_idle()


def test_what_lies_on_a_shard_that_has_ended_is_asked_for_elsewhere_in_several_messages(
    lowered: None, start: Start
) -> None:
    cluster = start(shards=2, ram_bytes="4MiB", config={"coordinator": {"run_blocks": 64}})
    client, _ = client_of(cluster)
    blocks = 3 * STEP
    with client:
        client.store(prompt(blocks), kv(blocks))
        client.flush()
        client.pin(prompt(blocks), 60, replicas=2)
        cluster.wait_until(
            lambda: all(sum(1 for _ in host.core.pool.ready()) == blocks for host in cluster.shards.values())
        )
        client.flush()
        with client.prepare_load(client.hashes(prompt(blocks))) as ticket:
            (named,) = {source.shard.shard for run in ticket.body.runs for source in run.plan[0] or ()}
            cluster.stop_shard(named)
            into = room(blocks)
            assert client.begin_load(ticket, into).result().blocks == blocks and same(into, kv(blocks))
        client.unpin(prompt(blocks))


# --------------------------------------------------------------------- when the coordinator stops answering


def test_what_is_known_of_a_chain_is_loaded_if_the_coordinator_stops_answering(lowered: None, start: Start) -> None:
    cluster, blocks = start(ram_bytes="4MiB"), 3 * STEP
    with cluster.client(SPEC) as first:
        first.store(prompt(blocks), kv(blocks))
        first.flush()
    client, _ = client_of(cluster, fails=lambda kind, at: kind is PrepareLoad and at > 1)
    with client:
        into = room(blocks)
        assert client.load(prompt(blocks), into) == STEP * BLOCK and same(into[:STEP], kv(blocks)[:STEP])
        cluster.wait_until_idle()


def test_what_was_granted_of_a_store_is_stored_if_the_coordinator_stops_answering(lowered: None, start: Start) -> None:
    cluster, blocks = start(ram_bytes="4MiB"), 3 * STEP
    client, _ = client_of(cluster, fails=lambda kind, at: kind is PrepareStore and at > 1)
    with client:
        stored = client.store(prompt(blocks), kv(blocks))
        assert (stored.blocks, stored.miss) == (STEP, Miss(MissReason.DEADLINE, "no answer"))
        cluster.wait_until_idle()
    with cluster.client(SPEC) as again:
        assert again.store(prompt(blocks), kv(blocks)).blocks == blocks - STEP, "no block is left pending"


def test_a_store_of_which_nothing_is_granted_leaves_no_ticket(lowered: None, start: Start) -> None:
    cluster, blocks = start(ram_bytes="4MiB"), 3 * STEP
    client, _ = client_of(cluster, fails=lambda kind, at: kind is PrepareStore)
    with client:
        assert client.store(prompt(blocks), kv(blocks)).miss == Miss(MissReason.DEADLINE, "no answer")
        cluster.wait_until_idle()


@pytest.mark.parametrize("wanted", [True, False])
def test_each_message_of_a_store_names_its_own_blocks_parent_run_and_tokens(lowered: None, wanted: bool) -> None:
    hashes = [BlockHash(bytes([number]) * 32) for number in range(14)]
    attempt = Attempt(Holder(bytes(HOLDER_BYTES)), 1)
    tokens = range(3 * BLOCK, 14 * BLOCK)
    terms = StoreTerms(SPEC, hashes, 3, ((0, SPEC.whole(0)),), Loss.EXACT, tokens, attempt, 0)
    attached = Attached(NamespaceId(bytes(32)), Epoch(1), 1, run_blocks=2, wants_tokens=wanted)
    for at, first in ((0, 3), (STEP, 3 + STEP), (2 * STEP, 3 + 2 * STEP)):
        message = prepare_store(terms, attached, at=at)
        stop = min(first + STEP, 14)
        assert (message.first, message.hashes) == (first, tuple(hashes[first:stop]))
        assert (message.parent, message.run) == (hashes[first - 1], hashes[first // 2 * 2])
        assert message.tokens == (tuple(range(first * BLOCK, stop * BLOCK)) if wanted else ())


def test_a_message_names_as_many_blocks_as_their_token_ids_allow(
    monkeypatch: pytest.MonkeyPatch, lowered: None
) -> None:
    monkeypatch.setattr(limits, "STORE_TOKENS", 2 * BLOCK + 1)
    hashes = [BlockHash(bytes([number]) * 32) for number in range(5)]
    attempt = Attempt(Holder(bytes(HOLDER_BYTES)), 1)
    terms = StoreTerms(SPEC, hashes, 0, ((0, SPEC.whole(0)),), Loss.EXACT, range(5 * BLOCK), attempt, 0)
    attached = Attached(NamespaceId(bytes(32)), Epoch(1), 1, run_blocks=2, wants_tokens=True)
    message = prepare_store(terms, attached, at=2)
    assert (message.hashes, message.tokens) == (tuple(hashes[2:4]), tuple(range(2 * BLOCK, 4 * BLOCK)))
    monkeypatch.setattr(limits, "STORE_TOKENS", 1)
    assert len(prepare_store(terms, attached).hashes) == 1, "a store goes on"


def test_a_load_of_more_pages_than_an_exchange_may_name_takes_several(
    monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    cluster, named, pin = start(ram_bytes="4MiB"), list[int](), PinHandler.pin
    client, _ = client_of(cluster)
    with client:
        assert client.store(prompt(8), kv(8)).blocks == 8 and client.flush()
        monkeypatch.setattr(limits, "READ_PAGES", 3)
        monkeypatch.setattr(
            PinHandler,
            "pin",
            lambda self, request, *rest: (named.append(len(request.question.keys)), pin(self, request, *rest))[1],
        )
        out = room(8)
        assert client.load(prompt(8), out) == 8 * BLOCK
        assert same(out, kv(8))
    assert sorted(named) == [2, 3, 3]


# ----------------------------------------------------------------- windows, chunks, and groups of last blocks


def mixed(tokens: int, *, chunks: bool) -> KVSpec:
    planes = (Plane("k", 2, 8, "float32"),)
    some = chunk(tokens) if chunks else window(tokens)
    groups = (Group((0,), planes), Group((1,), planes, some), Group((2,), planes, LAST))
    return replace(SPEC, groups=groups)


@pytest.mark.parametrize("chunks", [False, True], ids=["windows", "chunks"])
@pytest.mark.parametrize("seed", range(12))
def test_the_boundary_of_mixed_groups_is_that_of_one_message(
    monkeypatch: pytest.MonkeyPatch, start: Start, seed: int, chunks: bool
) -> None:
    rng = random.Random(seed)
    spec, blocks = mixed(rng.choice([2, 5, 9, 17, 33]), chunks=chunks), 3 * STEP + 2
    cluster, tokens = start(shards=2, ram_bytes="4MiB"), prompt(3 * STEP + 2, seed)
    sources = [bytearray(rng.randbytes(spec.page_bytes(group, spec.whole(group)) * blocks)) for group in range(3)]
    for group in range(3):  # each group lies there in parts, with gaps of its own
        with cluster.client(spec, part={group: spec.whole(group)}) as writer:
            hashes, page = writer.hashes(tokens), spec.page_bytes(group, spec.whole(group))
            for at in range(blocks):
                if rng.random() < (0.97 if group == 0 else 0.75):
                    memory: list[Any] = [None] * 3
                    memory[group] = sources[group][at * page : (at + 1) * page]
                    writer.begin_store(hashes[: at + 1], memory, first=at).result()
            writer.flush()
    with cluster.client(spec) as client:
        expected = client.lookup(tokens)
        monkeypatch.setattr(limits, "BLOCKS_PER_CALL", STEP)
        found = client.lookup(tokens)
        assert (found.blocks, found.reason) == (expected.blocks, expected.reason)
        out = [bytearray(len(source)) for source in sources]
        assert client.load(tokens, out) == expected.tokens
        for group, (got, source) in enumerate(zip(out, sources, strict=True)):
            page = spec.page_bytes(group, spec.whole(group))
            needed = spec.groups[group].reuse.blocks_needed(expected.blocks, BLOCK)
            span = slice((expected.blocks - needed) * page, expected.blocks * page)
            assert got[span] == source[span]


# ------------------------------------------------------------------------------------- the limit of a prompt


def test_a_prompt_beyond_the_limit_says_what_can_be_done(monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    monkeypatch.setattr(limits, "BLOCKS_PER_PROMPT", 9)
    client, _ = client_of(start(ram_bytes="4MiB"))
    with client:
        client.store(prompt(9), kv(9))
        with pytest.raises(LimitError, match="a prompt of 10 blocks exceeds the limit of 9: give its leading 9 blocks"):
            client.store(prompt(10), kv(10))
        for call in (client.lookup, client.explain, lambda tokens: client.pin(tokens, 1)):
            with pytest.raises(LimitError, match="or use a spec of larger block_tokens"):
                call(prompt(10))


def test_sequences_begin_with_a_long_prefix(lowered: None, start: Start) -> None:
    cluster, blocks = start(ram_bytes="4MiB"), 3 * STEP + 1
    with cluster.client(SPEC) as client:
        client.store(prompt(blocks), kv(blocks))
        client.flush()
        with client.sequence(prompt(blocks)) as sequence:
            assert sequence.length == blocks * BLOCK
