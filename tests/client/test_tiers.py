"""Pages that do not fit the RAM tier are demoted and encoded; a load names their loss and returns no wrong byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from kvcluster.client.client import Client
from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.groups import LAST, Group, Part, Plane
from kvcluster.core.ids import BlockHash, ShardId
from kvcluster.core.messages import Done, Drain, ReadRequest, Tier
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.shard.page import Page
from kvcluster.core.spec import KVSpec
from kvcluster.memory.codec_torch import TorchCoder
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.transfer import Stored
from kvcluster.transport.base import Deadline, Streams
from kvcluster.transport.in_process_transport import MemoryTransport
from tests.client.build import BLOCK, BOUND_S, HEADS, LAYERS, counters, noise, prompt, room, same, shape_of, spec_of
from tests.client.conftest import Start
from tests.client.test_zero_copy import Desk

NUMBERS = spec_of(head_dim=32)
"""A page of it is 12 KiB, and a RAM tier of RAM_BYTES has no room for one within the tenth that EAGER leaves."""

RAM_BYTES = 120_000
EAGER = {"low_free": 0.9, "high_free": 0.9}
"""Everything goes down as soon as it is stored."""

WITH_ROOM = {"low_free": 0.3, "high_free": 0.9}
"""Everything goes down once eight blocks are stored, and five of them may come up again."""

FIRST = ShardId("shard-0")
TOKENS, BLOCKS = prompt(6), 6
FURTHEST = {"q8": 0.01, "q4": 0.12}
LOSSES = {"raw": Loss.EXACT, "q8": Loss.Q8, "q4": Loss.Q4}
HALVES = [Part(0, LAYERS, 0, HEADS // 2), Part(0, LAYERS, HEADS // 2, HEADS)]


def tiers(
    start: Start,
    codec: str = "q8",
    *,
    shards: int = 1,
    ram_bytes: int = RAM_BYTES,
    client: str = "q4",
    **coordinator: Any,
) -> MemoryCluster:
    """A cluster whose shards have a host tier, and verify no page unless a reader suspects it."""
    settings = {"hold_ms": 0, "host_codec": codec, **EAGER, **coordinator}
    config = {"coordinator": settings, "shard": {"host_bytes": "2MiB", "scrub_bytes": 0}, "client": {"accept": client}}
    return start(shards=shards, ram_bytes=ram_bytes, config=config)


def numbers(blocks: int = BLOCKS, seed: int = 0, spec: KVSpec = NUMBERS, part: Part | None = None) -> torch.Tensor:
    """KV such as a model makes."""
    dtype = getattr(torch, spec.groups[0].planes[0].dtype)
    return torch.randn(shape_of(blocks, spec, part), generator=torch.Generator().manual_seed(seed)).to(dtype)


def stored(client: Client, source: Any, tokens: Sequence[int] = TOKENS, **options: Any) -> None:
    assert client.store(tokens, source, **options).blocks == len(tokens) // BLOCK
    assert client.flush()


def where(client: Client, tokens: Sequence[int] = TOKENS) -> list[str]:
    return [block.tier for block in client.explain(tokens)]


def wait_until_below(cluster: MemoryCluster, client: Client, tokens: Sequence[int] = TOKENS) -> None:
    cluster.wait_until(lambda: where(client, tokens) == ["host"] * (len(tokens) // BLOCK))


def went_down(cluster: MemoryCluster, source: Any, spec: KVSpec = NUMBERS, **options: Any) -> Client:
    """A client that has stored TOKENS, all of which are in the host tier now."""
    client = cluster.client(spec)
    stored(client, source, **options)
    wait_until_below(cluster, client)
    return client


def loaded(
    client: Client, blocks: int = BLOCKS, tokens: Sequence[int] = TOKENS, spec: KVSpec = NUMBERS
) -> torch.Tensor:
    """All of it, by token ids."""
    into = room(blocks, spec)
    assert client.load(tokens, into) == blocks * BLOCK
    return into


def far(after: torch.Tensor, before: torch.Tensor) -> list[float]:
    """Returns for each block the error, relative to the stored values."""
    wrong, whole = (after.double() - before.double()).flatten(1), before.double().flatten(1)
    return [float(error) for error in wrong.norm(dim=1) / whole.norm(dim=1)]


def pages(cluster: MemoryCluster, shard: ShardId = FIRST, block: BlockHash | None = None) -> list[Page]:
    """Returns the readable pages there, of that block or of all."""
    return [page for page in cluster.shard_core(shard).pool.ready() if block in (None, page.key.hash)]


def held(cluster: MemoryCluster, shard: ShardId) -> dict[BlockHash, tuple[Codec, Loss, bytes, bytes]]:
    """Every page of the host tier there: its codec, what it has lost, its sums and its bytes."""

    def look() -> dict[BlockHash, tuple[Codec, Loss, bytes, bytes]]:
        found = [page for page in pages(cluster, shard) if page.tier is Tier.HOST]
        read = cluster.shards[shard].read
        return {page.key.hash: (page.codec, page.loss, page.sums, bytes(read(page.slot()))) for page in found}

    answer = cluster.shards[shard].inspect(look)
    assert isinstance(answer, dict)
    return answer


# ------------------------------------------------------------------------------------------------ there and back


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("codec", ["q8", "q4"])
def test_what_went_down_comes_back_as_near_as_its_codec_and_the_first_block_bit_for_bit(
    start: Start, codec: str, dtype: str
) -> None:
    spec = spec_of(head_dim=32 if dtype == "float32" else 64, dtype=dtype)
    cluster, values = tiers(start, codec), numbers(spec=spec)
    client = went_down(cluster, values, spec)
    into = loaded(client, spec=spec)
    assert same(into[0], values[0])
    errors = far(into, values)
    assert not errors[0] and all(0 < error < FURTHEST[codec] for error in errors[1:])
    assert client.status()["totals"]["demoted"] == BLOCKS


@pytest.mark.parametrize(("codec", "exchanges"), [("q8", 1), ("q4", 2)])
def test_what_lies_in_q4_is_read_by_as_many_exchanges_as_decode_it_fastest(
    start: Start, monkeypatch: pytest.MonkeyPatch, codec: str, exchanges: int
) -> None:
    monkeypatch.setattr(MemoryTransport, "streams", Streams(stores=1, loads=1, decoding=2))
    monkeypatch.setattr(limits, "STREAM_BYTES", 1)
    monkeypatch.setattr(limits, "WIDE_STREAM_BYTES", 1)
    client = went_down(tiers(start, codec), numbers())
    reads: list[ReadRequest] = []
    original = MemoryTransport.read

    def read(self: MemoryTransport, request: ReadRequest, *rest: Any) -> Any:
        reads.append(request)
        return original(self, request, *rest)

    monkeypatch.setattr(MemoryTransport, "read", read)
    loaded(client)
    assert len(reads) == exchanges


def test_a_host_tier_that_keeps_everything_raw_loses_nothing(start: Start) -> None:
    cluster, values = tiers(start, "raw"), noise(shape_of(BLOCKS, NUMBERS))
    client = went_down(cluster, values)
    assert same(loaded(client), values)
    assert client.lookup(TOKENS, accept=Loss.EXACT).loss is Loss.EXACT


@pytest.mark.parametrize("raw_blocks", [0, 2, 100])
def test_so_many_first_blocks_stay_raw_as_are_to(start: Start, raw_blocks: int) -> None:
    cluster, values = tiers(start, "q4", host_raw_blocks=raw_blocks), numbers()
    client = went_down(cluster, values)
    exact = min(raw_blocks, BLOCKS)
    assert [error == 0 for error in far(loaded(client), values)] == [block < exact for block in range(BLOCKS)]
    assert client.lookup(TOKENS, accept=Loss.EXACT).blocks == exact


def test_what_does_not_fit_above_is_there_all_the_same(start: Start) -> None:
    """Far more than the RAM tier holds, with nothing but those who wait for room to push the rest down."""
    cluster = tiers(start, low_free=0.0, high_free=0.0)
    client = cluster.client(NUMBERS)
    for seed in range(6):
        stored(client, numbers(seed=seed), prompt(BLOCKS, seed))
    found = [where(client, prompt(BLOCKS, seed)) for seed in range(6)]
    assert {tier for of_prompt in found for tier in of_prompt} == {"ram", "host"}
    for seed in range(6):
        errors = far(loaded(client, tokens=prompt(BLOCKS, seed)), numbers(seed=seed))
        assert errors[0] == 0 and all(error < FURTHEST["q8"] for error in errors)
    assert client.status()["totals"]["evicted"] == 0


def test_what_is_opaque_or_8_bits_already_goes_down_as_it_is(start: Start) -> None:
    narrow = spec_of(head_dim=64, dtype="float8_e4m3fn", num_kv_heads=8)
    state = KVSpec("tiny", "sha256:1", BLOCK, (Group((0, 1), (Plane.opaque("state", 7_001),)),))
    cluster, tokens = tiers(start, "q4", client="exact"), prompt(BLOCKS)
    for spec, shape in ((narrow, shape_of(BLOCKS, narrow)), (state, [BLOCKS, 2, 7_001])):
        client, values = cluster.client(spec), noise(shape, torch.uint8)
        into = torch.zeros_like(values)
        of_dtype = torch.float8_e4m3fn if spec is narrow else torch.uint8
        stored(client, values.view(of_dtype), tokens)
        wait_until_below(cluster, client, tokens)
        with client.prepare_load(client.hashes(tokens)) as ticket:
            assert client.begin_load(ticket, into.view(of_dtype)).result().loss is Loss.EXACT
        assert torch.equal(into, values)


def test_of_groups_of_several_kinds_what_has_numbers_is_encoded_and_the_rest_is_not(start: Start) -> None:
    planes = (Plane("k", HEADS, 32, "float32"), Plane("v", HEADS, 32, "float32"))
    spec = KVSpec("tiny", "sha256:1", BLOCK, (Group((0, 2, 4), planes), Group((1, 3), (Plane.opaque("s", 999),), LAST)))
    cluster, values, state = tiers(start, "q8"), numbers(), noise([BLOCKS, 2, 999], torch.uint8)
    client = went_down(cluster, [values, state], spec)
    into, states = room(BLOCKS, spec), torch.zeros_like(state)
    assert client.load(TOKENS, [into, states]) == BLOCKS * BLOCK
    errors = far(into, values)
    assert errors[0] == 0 and all(0 < error < FURTHEST["q8"] for error in errors[1:])
    assert torch.equal(states[-1], state[-1]), "the only one that is needed"


@pytest.mark.parametrize("codec", ["q8", "q4"])
def test_halves_of_the_heads_are_encoded_each_for_itself_and_make_a_whole(start: Start, codec: str) -> None:
    cluster, values = tiers(start, codec, ram_bytes=RAM_BYTES // 2), numbers()  # no room for half a page either
    workers = [cluster.client(NUMBERS, part=part) for part in HALVES]
    for worker, part in zip(workers, HALVES, strict=True):
        stored(worker, values[..., part.head_start : part.head_stop, :].contiguous())
        wait_until_below(cluster, worker)
    client = cluster.client(NUMBERS)
    into = loaded(client)
    errors = far(into, values)
    assert errors[0] == 0 and all(0 < error < FURTHEST[codec] for error in errors[1:])
    for worker, part in zip(workers, HALVES, strict=True):
        half = room(BLOCKS, NUMBERS, part)
        assert worker.load(TOKENS, half) == BLOCKS * BLOCK
        assert same(half, into[..., part.head_start : part.head_stop, :])


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_block_that_holds_what_is_no_number_goes_down_raw_and_the_others_encoded(start: Start, wrong: float) -> None:
    cluster, values = tiers(start, "q8"), numbers()
    values[2, 1, 0, 3, 1, 17] = wrong
    client = went_down(cluster, values)
    into = loaded(client)
    assert same(into[2], values[2])
    assert [same(into[block], values[block]) for block in range(BLOCKS)] == [True, False, True, False, False, False]
    names = client.hashes(TOKENS)
    assert [(page.codec, page.loss) for page in pages(cluster, block=names[2])] == [(Codec.RAW, Loss.EXACT)]
    assert client.lookup(TOKENS).loss is Loss.Q8


# ------------------------------------------------------------------------------------------- what it has lost


@pytest.mark.parametrize("codec", ["q8", "q4"])
def test_who_accepts_no_loss_gets_the_exact_prefix_and_is_told_why_no_more(start: Start, codec: str) -> None:
    cluster, values = tiers(start, codec), numbers()
    client = went_down(cluster, values)
    into, lossy = room(BLOCKS, NUMBERS), Miss(MissReason.LOSSY, f"only with {codec}")
    assert client.load(TOKENS, into, accept=Loss.EXACT) == BLOCK
    assert same(into[0], values[0])
    lookup = client.lookup(TOKENS, accept=Loss.EXACT)
    assert (lookup.blocks, lookup.reason, lookup.loss) == (1, lossy, Loss.EXACT)
    first, *rest = client.explain(TOKENS, accept=Loss.EXACT)
    assert (first.hit, first.tier, first.shard) == (True, "host", FIRST)
    assert [(block.hit, block.reason, block.detail) for block in rest] == [(False, *vars_of(lossy))] * 5
    with client.prepare_load(client.hashes(TOKENS), accept=Loss.EXACT) as ticket:
        assert (ticket.blocks, ticket.miss, ticket.loss) == (1, lossy, Loss.EXACT)


def vars_of(miss: Miss) -> tuple[MissReason, str]:
    return miss.reason, miss.detail


@pytest.mark.parametrize("accept", [Loss.EXACT, Loss.Q8, Loss.Q4])
@pytest.mark.parametrize("codec", ["raw", "q8", "q4"])
def test_what_a_client_accepts_by_its_configuration_is_what_its_calls_ask_for(
    start: Start, codec: str, accept: Loss
) -> None:
    cluster = tiers(start, codec, client=accept.name.lower())
    writer = went_down_by_another(cluster)
    blocks = BLOCKS if LOSSES[codec] <= accept else 1
    assert writer.lookup(TOKENS).blocks == blocks
    assert sum(block.hit for block in writer.explain(TOKENS)) == blocks
    assert writer.prepare_load(writer.hashes(TOKENS)).blocks == blocks
    assert writer.load(TOKENS, room(BLOCKS, NUMBERS)) == blocks * BLOCK
    assert writer.load(TOKENS, room(BLOCKS, NUMBERS), accept=Loss.Q4) == BLOCKS * BLOCK, "a call may ask for more"


def went_down_by_another(cluster: MemoryCluster) -> Client:
    """A client of the cluster's own configuration, where TOKENS has gone down."""
    client = cluster.client(NUMBERS)
    stored(client, numbers())
    below = ["host"] * BLOCKS
    cluster.wait_until(lambda: [block.tier for block in client.explain(TOKENS, accept=Loss.Q4)] == below)
    return client


@pytest.mark.parametrize("codec", ["raw", "q8", "q4"])
def test_the_loss_is_told_by_the_lookup_the_ticket_and_the_load(start: Start, codec: str) -> None:
    client = went_down(tiers(start, codec), numbers())
    assert client.lookup(TOKENS).loss is LOSSES[codec]
    assert client.lookup(TOKENS[:BLOCK]).loss is Loss.EXACT
    with client.prepare_load(client.hashes(TOKENS)) as ticket:
        assert ticket.loss is LOSSES[codec]
        assert client.redeem(bytes(ticket)).loss is LOSSES[codec]
        outcome = client.begin_load(ticket, room(BLOCKS, NUMBERS)).result()
    assert (outcome.blocks, outcome.miss, outcome.loss) == (BLOCKS, None, LOSSES[codec])
    assert outcome.nbytes == BLOCKS * NUMBERS.page_bytes(0, NUMBERS.whole(0)), (
        "bytes of KV, in whichever codec they were sent"
    )


@pytest.mark.parametrize("loss", [Loss.Q8, Loss.Q4])
def test_what_was_computed_over_a_lossy_prefix_is_stored_and_found_as_such(start: Start, loss: Loss) -> None:
    cluster, values = tiers(start, low_free=0.0, high_free=0.0), numbers()
    client = cluster.client(NUMBERS)
    stored(client, values, loss=loss)
    assert where(client) == ["ram"] * BLOCKS
    assert client.lookup(TOKENS).loss is loss
    miss = Miss(MissReason.LOSSY, f"only with {loss.name.lower()}")
    assert client.lookup(TOKENS, accept=Loss.EXACT).reason == miss
    with client.prepare_load(client.hashes(TOKENS)) as ticket:
        outcome = client.begin_load(ticket, room(BLOCKS, NUMBERS)).result()
    assert outcome.loss is loss, "though it came raw"


def test_an_exact_store_takes_the_place_of_a_lossy_one_and_never_the_other_way_round(start: Start) -> None:
    cluster, lossy, exact = tiers(start, low_free=0.0, high_free=0.0), numbers(4, seed=1), numbers(4, seed=2)
    client, tokens = cluster.client(NUMBERS), prompt(4)
    for loss in (Loss.Q4, Loss.Q8):
        stored(client, lossy, tokens, loss=loss)
        assert client.lookup(tokens).loss is loss
    stored(client, exact, tokens)
    assert client.lookup(tokens, accept=Loss.EXACT).blocks == 4
    assert same(loaded(client, 4, tokens), exact)
    for loss in (Loss.Q8, Loss.Q4, Loss.EXACT):
        assert client.store(tokens, lossy, loss=loss) == Stored(0, 4, 0, 0)
    assert same(loaded(client, 4, tokens), exact)


def test_an_exact_store_takes_the_place_of_what_lies_below_encoded(start: Start) -> None:
    cluster, values = tiers(start, "q4", **WITH_ROOM), numbers(5)
    tokens = prompt(5)
    client = cluster.client(NUMBERS)
    stored(client, values, tokens)
    stored(client, numbers(3, seed=9), prompt(3, seed=9))
    wait_until_below(cluster, client, tokens)
    again = client.store(tokens, values)
    assert (again.blocks, again.deduplicated) == (4, 1), "the first went down raw"
    assert client.flush()
    cluster.wait_until(lambda: client.lookup(tokens, accept=Loss.EXACT).blocks == 5)
    assert same(loaded(client, 5, tokens), values)
    assert all(page.loss is Loss.EXACT for name in client.hashes(tokens) for page in pages(cluster, block=name))


def test_what_has_lost_before_it_goes_down_has_lost_the_worse_of_both(start: Start) -> None:
    cluster = tiers(start, "q8")
    client = went_down(cluster, numbers(), loss=Loss.Q4)
    assert client.lookup(TOKENS, accept=Loss.Q8).blocks == 0
    with client.prepare_load(client.hashes(TOKENS)) as ticket:
        assert client.begin_load(ticket, room(BLOCKS, NUMBERS)).result().loss is Loss.Q4


# --------------------------------------------------------------------------------------------------- coming up


@pytest.mark.parametrize("codec", ["q8", "q4"])
def test_what_is_loaded_often_comes_up_again_with_the_values_it_had_below(start: Start, codec: str) -> None:
    cluster, values, tokens = tiers(start, codec, promote_loads=3, **WITH_ROOM), numbers(5), prompt(5)
    client = cluster.client(NUMBERS)
    stored(client, values, tokens)
    stored(client, numbers(3, seed=9), prompt(3, seed=9))
    wait_until_below(cluster, client, tokens)
    below = [loaded(client, 5, tokens) for _ in range(3)]
    cluster.wait_until(lambda: where(client, tokens) == ["ram"] * 5)
    assert client.status()["totals"]["promoted"] == 5
    for came in (*below, loaded(client, 5, tokens)):
        assert same(came, below[0])
    assert client.lookup(tokens).loss is LOSSES[codec]
    assert client.lookup(tokens, accept=Loss.EXACT).blocks == 1
    with client.prepare_load(client.hashes(tokens)) as ticket:
        assert client.begin_load(ticket, room(5, NUMBERS)).result().loss is LOSSES[codec], "though it came raw"


def test_what_came_up_goes_down_again_as_it_had_been_encoded(start: Start) -> None:
    cluster, tokens, others = tiers(start, promote_loads=1, **WITH_ROOM), prompt(5), prompt(5, seed=9)
    client = cluster.client(NUMBERS)
    stored(client, numbers(5), tokens)
    stored(client, numbers(3, seed=8), prompt(3, seed=8))
    wait_until_below(cluster, client, tokens)
    before, first = held(cluster, FIRST), loaded(client, 5, tokens)
    cluster.wait_until(lambda: where(client, tokens) == ["ram"] * 5)
    stored(client, numbers(5, seed=9), others)
    wait_until_below(cluster, client, tokens)
    after = held(cluster, FIRST)
    assert {name: after[name] for name in before} == before
    assert same(loaded(client, 5, tokens), first)


# ------------------------------------------------------------------------------------------- what goes wrong


def test_a_new_coordinator_learns_of_both_tiers(start: Start) -> None:
    cluster, tokens, hot = tiers(start, promote_loads=10**6, **WITH_ROOM), prompt(6), prompt(2, seed=9)
    client = cluster.client(NUMBERS)
    stored(client, numbers(6), tokens)
    stored(client, numbers(2, seed=8), prompt(2, seed=8))
    wait_until_below(cluster, client, tokens)
    stored(client, numbers(2, seed=9), hot)
    before = loaded(client, 6, tokens)
    cluster.stop_coordinator()
    cluster.start_coordinator()
    cluster.wait_until_up()
    assert where(client, tokens) == ["host"] * 6
    assert where(client, hot) == ["ram"] * 2
    assert client.lookup(tokens).loss is Loss.Q8
    assert client.lookup(tokens, accept=Loss.EXACT).blocks == 1
    assert same(loaded(client, 6, tokens), before)
    assert same(loaded(client, 2, hot), numbers(2, seed=9))


@pytest.mark.parametrize("bit", [0, 8 * 1_000 + 3, -1])
@pytest.mark.parametrize("codec", ["q8", "q4"])
def test_an_encoded_page_that_rots_is_a_miss_and_then_gone_and_can_be_stored_again(
    start: Start, codec: str, bit: int
) -> None:
    cluster, values = tiers(start, codec), numbers()
    client = went_down(cluster, values)
    sound = loaded(client)
    cluster.corrupt(FIRST, block=client.hashes(TOKENS)[3], bit=bit)
    into = room(BLOCKS, NUMBERS)
    with client.prepare_load(client.hashes(TOKENS)) as ticket:
        outcome = client.begin_load(ticket, into).result()
    assert (outcome.blocks, dict(outcome.failed)) == (3, {3: Miss(MissReason.CORRUPT)})
    whole = [block for block in range(BLOCKS) if block != 3]
    assert same(into[whole], sound[whole])
    cluster.wait_until(lambda: client.explain(TOKENS)[3].reason is MissReason.CORRUPT)
    assert counters(client)[FIRST]["corrupt"] == client.status()["counters"]["corrupt_pages"] == 1
    again = client.store(TOKENS[: 4 * BLOCK], values[:4], loss=Loss.Q4)
    assert (again.blocks, again.deduplicated) == (1, 3)
    assert client.flush()
    assert client.lookup(TOKENS).blocks == BLOCKS


def test_a_page_that_rotted_above_is_not_taken_down(start: Start) -> None:
    cluster, tokens = tiers(start, **WITH_ROOM), prompt(5)
    client = cluster.client(NUMBERS)
    stored(client, numbers(5), tokens)
    cluster.corrupt(FIRST, block=client.hashes(tokens)[2], bit=12_345)
    stored(client, numbers(3, seed=9), prompt(3, seed=9))
    cluster.wait_until(lambda: client.explain(tokens)[2].reason is MissReason.CORRUPT)
    cluster.wait_until(lambda: where(client, tokens) == ["host", "host", "", "host", "host"])
    assert counters(client)[FIRST]["corrupt"] == 1


def test_an_encoded_page_is_not_lent_and_says_that_it_is_to_be_loaded(start: Start) -> None:
    cluster = tiers(start)
    client = went_down(cluster, numbers())
    with ExitStack() as stack:
        borrower = Desk(cluster, stack).connect(NUMBERS)
        ticket = stack.enter_context(borrower.prepare_load(borrower.hashes(TOKENS)))
        with borrower.borrow(ticket) as blocks:
            assert blocks.why(0) is None and blocks.page(0) is not None, "it is raw, wherever it lies"
            for block in range(1, BLOCKS):
                assert str(blocks.why(block)) == (
                    "lossy (it lies there encoded, and what is borrowed is not decoded: load it)"
                )
                assert blocks.page(block) is None and blocks.tensor(block) is None
            decoded = [decode(*found) for block in range(BLOCKS) if (found := blocks.coded_page(block)) is not None]
            assert blocks.valid()
        into = room(BLOCKS, NUMBERS)
        assert borrower.begin_load(ticket, into).result().blocks == BLOCKS, "over shared memory"
        assert same(into, loaded(client))
        assert b"".join(decoded) == bytes(into.view(torch.uint8).flatten().tolist()), "what is lent encoded says so"


def decode(page: memoryview, codec: Codec) -> bytes:
    group = NUMBERS.groups[0]
    coder = TorchCoder(codec, group, block_tokens=NUMBERS.block_tokens, heads=group.heads)
    raw = memoryview(bytearray(NUMBERS.page_bytes(0, NUMBERS.whole(0))))
    coder.decode(memoryview(bytearray(page)), raw, len(group.layers))
    return bytes(raw)


# ------------------------------------------------------------------------------------------- several shards


def drain(cluster: MemoryCluster, shard: ShardId) -> None:
    answer = cluster.port().ask(Drain(shard), Deadline.after_ms(BOUND_S * 1e3))
    assert answer == Done(True)


def holders(cluster: MemoryCluster) -> list[ShardId]:
    return [shard for shard in cluster.shards if held(cluster, shard)]


@pytest.mark.parametrize("codec", ["q8", "q4"])
def test_a_copy_of_an_encoded_page_is_the_same_bytes(start: Start, codec: str) -> None:
    cluster = tiers(start, codec, shards=2, host_raw_blocks=0)
    client = went_down(cluster, numbers())
    (source,) = holders(cluster)
    before = held(cluster, source)
    assert client.pin(TOKENS, 600.0, replicas=2).blocks == BLOCKS
    (target,) = (shard for shard in cluster.shards if shard != source)
    cluster.wait_until(lambda: held(cluster, target) == before)
    assert held(cluster, source) == before
    values = loaded(client)
    cluster.stop_shard(source)
    cluster.wait_until(lambda: client.load(TOKENS, room(BLOCKS, NUMBERS)) == BLOCKS * BLOCK)
    assert same(loaded(client), values)


@pytest.mark.parametrize("codec", ["q8", "q4"])
def test_a_shard_that_goes_leaves_its_encoded_pages_as_they_are(start: Start, codec: str) -> None:
    cluster = tiers(start, codec, shards=2, host_raw_blocks=0)
    client = went_down(cluster, numbers())
    (source,) = holders(cluster)
    before, values = held(cluster, source), loaded(client)
    drain(cluster, source)
    cluster.wait_until(lambda: cluster.drained == [source])
    (target,) = cluster.shards
    cluster.wait_until(lambda: held(cluster, target) == before)
    wait_until_below(cluster, client)
    assert same(loaded(client), values)
    assert client.lookup(TOKENS).loss is LOSSES[codec]
