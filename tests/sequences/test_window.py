"""What leaves the precise part of a sequence: encoded blocks, dropped tokens; and what is left of both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcluster
from kvcluster.attention import PageAddresses, PageLayout, PageSpan, QueryRow, partial
from kvcluster.core.codecs import Codec
from kvcluster.core.miss import Loss
from kvcluster.errors import CallerError, ConfigError, ResidentSetFull
from kvcluster.memory.codec_torch import TorchCoder
from kvcluster.sequences.statistics import ResidentUse
from kvcluster.testing import MemoryCluster
from tests.client.conftest import Start
from tests.sequences.small_spec import HEADS, LAYERS, small_spec
from tests.sequences.test_sequence import Grown

DIM, BLOCK = 32, 8
SPEC = small_spec(DIM, BLOCK)
PAGE = SPEC.page_bytes(0, SPEC.whole(0))
POLICY = kvcluster.WindowPolicy(tail_tokens=BLOCK, migration_tokens=2 * BLOCK, sink_tokens=BLOCK)


def made(tokens: int, seed: int) -> Tensor:
    return torch.randn(LAYERS, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed)).bfloat16()


def append(one: Grown, ids: list[int] | int, seed: int = 0) -> None:
    tokens = ids if isinstance(ids, int) else len(ids)
    k, v = made(tokens, seed + 1), made(tokens, seed + 2)
    for layer in range(LAYERS):
        one.sequence.append(layer, k[layer], v[layer])
    one.sequence.advance(ids)
    one.k, one.v = torch.cat([one.k, k], 1), torch.cat([one.v, v], 1)


def opened(client: kvcluster.Client, tokens: int = 0, policy: kvcluster.WindowPolicy = POLICY, **how: object) -> Grown:
    one = Grown(client.sequence(policy=policy, **how), made(0, 0), made(0, 0))  # type: ignore[arg-type]
    for token in range(tokens):
        append(one, [token], seed=10 * token)
    return one


def decoded(one: Grown, depths: range, codec: Codec) -> Grown:
    """The same, with the tokens of these blocks as encoding leaves them."""
    k, v = one.k.clone(), one.v.clone()
    coder = TorchCoder(codec, SPEC.groups[0], block_tokens=BLOCK, heads=HEADS)
    for depth in depths:
        at = slice(depth * BLOCK, (depth + 1) * BLOCK)
        page = torch.stack([k[:, at], v[:, at]], 1)
        raw = memoryview(bytearray(page.view(torch.uint8).flatten().tolist()))
        coded = memoryview(bytearray(PAGE))
        assert coder.encode(raw, coded, LAYERS)
        coder.decode(coded, raw, LAYERS)
        page = torch.frombuffer(raw, dtype=torch.bfloat16).view(page.shape)
        k[:, at], v[:, at] = page[:, 0], page[:, 1]
    return Grown(one.sequence, k, v)


def attends(one: Grown, keep: list[tuple[int, int]] | None = None) -> None:
    """Attention over these tokens, or over these ranges of them, has the bits of the same in one tensor."""
    tokens = one.k.shape[1]
    blocks = -(-tokens // BLOCK)
    pool = torch.zeros(blocks, LAYERS, 2, BLOCK, HEADS, DIM, dtype=torch.bfloat16)
    for plane, values in enumerate((one.k, one.v)):
        padded = torch.zeros(LAYERS, blocks * BLOCK, HEADS, DIM, dtype=torch.bfloat16)
        padded[:, :tokens] = values
        pool[:, :, plane] = padded.view(LAYERS, blocks, BLOCK, HEADS, DIM).transpose(0, 1)
    layout = PageLayout(SPEC.groups[0], BLOCK, LAYERS, HEADS)
    pages = PageAddresses.from_pool(layout, pool, torch.arange(blocks, dtype=torch.int32))
    spans = [
        PageSpan(pages.part(first // BLOCK, -(-stop // BLOCK)), first, stop - first)
        for first, stop in keep or [(0, tokens)]
    ]
    query = torch.randn(1, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(1))
    for layer in range(LAYERS):
        wanted = partial(query, [QueryRow([tokens - 1], spans)], layout, layer).out
        assert torch.equal(one.sequence.attend(layer, query), wanted)


@pytest.fixture
def cluster(start: Start) -> MemoryCluster:
    return start(shards=2, ram_bytes="8MiB", config={"client": {"resident_bytes": 256 * PAGE, "accept": "q4"}})


@pytest.mark.parametrize("codec", ["q8", "q4"])
def test_what_leaves_the_tail_is_encoded_in_batches_and_read_as_such(cluster: MemoryCluster, codec: str) -> None:
    with cluster.client(SPEC) as client:
        one = opened(client, 23, replace(POLICY, codec=codec))
        one.check()
        assert one.sequence.statistics().encoded == 0
        append(one, [23], seed=5)
        after = decoded(one, range(1, 2), Codec[codec.upper()])
        after.check()
        attends(after)
        use = client.resident()
        assert use.encoded_pages == 1 and use.encoded_bytes < PAGE / 1.7 and use.ratio > 1.7
        assert one.sequence.statistics().encoded == BLOCK
        for token in range(24, 60):
            append(one, [token], seed=10 * token)
        after = decoded(one, range(1, 6), Codec[codec.upper()])
        after.check()
        attends(after)


def test_raw_pages_of_encoded_blocks_go_once_the_cluster_has_them(start: Start) -> None:
    cluster = start(shards=2, ram_bytes="8MiB", config={"client": {"resident_bytes": 12 * PAGE, "accept": "q4"}})
    with cluster.client(SPEC) as client:
        one = opened(client, 20 * BLOCK, replace(POLICY, codec="q4"))
        after = decoded(one, range(1, 18), Codec.Q4)
        attends(after)
        use = client.resident()
        assert use.encoded_pages == 17 and use.used_bytes <= 12 * PAGE
        with pytest.raises(ResidentSetFull, match="resident_bytes"):
            for token in range(2_000):
                append(one, [token])
        one.sequence.truncate(one.sequence.length)
        attends(decoded(one, range(1, one.sequence.statistics().encoded // BLOCK + 1), Codec.Q4))


def test_what_was_complete_is_published_exactly_and_what_follows_with_its_precision(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = opened(client, 60, replace(POLICY, codec="q8"))
        assert one.sequence.flush()
        losses = [block.loss for block in one.sequence.checked().blocks]
        assert losses[:3] == [0, 0, 0] and losses[3:] == [1] * 5, "tokens 24 and later attended to encoded ones"
        found = client.sequence(list(range(60)))
        assert found.length == 56 and [block.loss for block in found.checked().blocks] == losses[:7]
        for layer in range(LAYERS):
            assert torch.equal(found.read(layer, 0, 56)[0], one.k[layer, :56])


def test_a_fork_of_another_policy_keeps_what_it_has(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = opened(client, 20)
        raw = Grown(one.sequence.fork(), one.k, one.v)
        one.sequence.policy = replace(POLICY, tail_tokens=4, migration_tokens=BLOCK, codec="q4")
        for token in range(20, 40):
            append(one, [token], seed=token)
        assert one.sequence.statistics().encoded == 16
        attends(decoded(one, range(2, 4), Codec.Q4))
        attends(raw)
        coded = one.sequence.fork()
        one.sequence.close()
        attends(raw)
        attends(decoded(Grown(coded, one.k, one.v), range(2, 4), Codec.Q4))


def test_a_policy_changes_what_leaves_the_tail_from_then_on(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = opened(client, 40)
        assert one.sequence.statistics().encoded == 0
        one.sequence.policy = replace(POLICY, codec="q8")
        append(one, list(range(40, 64)), seed=3)
        attends(decoded(one, range(4, 7), Codec.Q8))
        one.sequence.policy = POLICY
        append(one, list(range(64, 96)), seed=4)
        attends(decoded(one, range(4, 7), Codec.Q8))
        with pytest.raises(CallerError, match="WindowPolicy"):
            one.sequence.policy = "q8"  # type: ignore[assignment]


def test_a_truncation_into_an_encoded_block_keeps_the_precision_that_is_lost(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = opened(client, 60, replace(POLICY, codec="q4"))
        fork = one.sequence.fork()
        before = decoded(one, range(1, 6), Codec.Q4)
        for sequence in (one.sequence, fork):
            sequence.truncate(21)
            left = Grown(sequence, before.k[:, :21], before.v[:, :21])
            left.check()
            append(left, list(range(100, 110)), seed=9)
            attends(left)
        k, v = made(1, 70), made(1, 71)
        for layer in range(LAYERS):
            fork.write(layer, 9, k[layer], v[layer])
        assert torch.equal(fork.read(1, 9)[0], k[1])
        assert not torch.equal(one.sequence.read(1, 9)[0], k[1])


def test_what_no_codec_has_a_code_for_stays_raw(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = opened(client, 10, replace(POLICY, codec="q8"))
        k = made(1, 3)
        k[1, 0, 0, 0] = float("inf")
        for layer in range(LAYERS):
            one.sequence.append(layer, k[layer], k[layer])
        one.sequence.advance([10])
        append(one, list(range(11, 48)), seed=6)
        assert one.sequence.statistics().encoded == 3 * BLOCK
        assert one.sequence.read(1, 10)[0][0, 0, 0].isinf()


def test_the_oldest_are_dropped_behind_the_sinks_and_positions_stay(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = opened(client, 48, max_tokens=48, drop_oldest=True)
        assert not one.sequence.dropped
        append(one, [48], seed=480)
        assert one.sequence.dropped == range(BLOCK, 2 * BLOCK) and one.sequence.length == 49
        attends(one, [(0, 8), (16, 49)])
        for token in range(49, 130):
            append(one, [token], seed=10 * token)
        assert one.sequence.dropped == range(8, 96) and one.sequence.position == 130
        attends(one, [(0, 8), (96, 130)])
        for layer in range(LAYERS):
            assert torch.equal(one.sequence.read(layer, 96, 34)[0], one.k[layer, 96:])
        use = one.sequence.statistics()
        assert use.dropped == 88 and use.tokens == 130


def test_what_is_made_after_a_drop_is_its_own_and_need_not_leave_the_worker(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = opened(client, 40, replace(POLICY, migration_tokens=0), max_tokens=40, drop_oldest=True)
        for token in range(40, 400):
            append(one, [token], seed=token)
        assert client.flush() and client.lookup(list(range(400))).tokens == 32
        assert client.status()["private_blocks"] == 0
        assert one.sequence.flush()
        attends(one, [(0, 8), (one.sequence.dropped.stop, 400)])
        one.sequence.close()
        cluster.wait_until(lambda: client.status()["private_blocks"] == 0)
        assert client.resident().pages_used == 0


def test_forks_of_a_sequence_that_drops_go_on_alone(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = opened(client, 48, replace(POLICY, codec="q8"), max_tokens=48, drop_oldest=True)
        fork = Grown(one.sequence.fork(), one.k, one.v)
        whole = decoded(fork, range(1, 4), Codec.Q8)
        for token in range(48, 64):
            append(one, [token], seed=token)
        attends(Grown(fork.sequence, whole.k, whole.v))
        assert not fork.sequence.dropped and one.sequence.dropped == range(8, 24)
        again = Grown(one.sequence.fork(), one.k, one.v)
        append(again, [64], seed=1)
        assert again.sequence.dropped == range(8, 32) and one.sequence.dropped == range(8, 24)
        one.sequence.truncate(24)
        one.sequence.truncate(8)
        assert not one.sequence.dropped and one.sequence.length == 8
        attends(Grown(one.sequence, one.k[:, :8], one.v[:, :8]))


def test_a_sequence_that_drops_fits_a_resident_set_of_its_window(start: Start) -> None:
    cluster = start(shards=1, ram_bytes="1MiB", config={"client": {"resident_bytes": 6 * PAGE, "deadline_ms": 300}})
    with cluster.client(SPEC) as client:
        one = opened(client, 0, replace(POLICY, migration_tokens=1_000), max_tokens=48, drop_oldest=True)
        cluster.stop_coordinator()
        for token in range(100):
            append(one, 1, seed=token)
        attends(one, [(0, 8), (one.sequence.dropped.stop, 100)])


REFUSED = {
    "a read of dropped tokens": (lambda s, k: s.read(0, 15), "dropped"),
    "a read across dropped tokens": (lambda s, k: s.read(0, 0, s.length), "dropped"),
    "a write before the kept ones": (lambda s, k: s.write(0, 2, k, k), "dropped"),
    "a truncation into dropped tokens": (lambda s, k: s.truncate(20), "dropped"),
    "more at a time than is kept": (lambda s, k: s.append(0, torch.cat([k] * 42), torch.cat([k] * 42)), "max_tokens"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_was_dropped_is_refused_by_name(cluster: MemoryCluster, what: str) -> None:
    call, named = REFUSED[what]
    with cluster.client(SPEC) as client:
        one = opened(client, 70, max_tokens=48, drop_oldest=True)
        dropped = one.sequence.dropped
        with pytest.raises(CallerError, match=named):
            call(one.sequence, made(1, 1)[0])
        assert one.sequence.dropped == dropped
        attends(one, [(0, 8), (dropped.stop, 70)])


def test_the_block_table_names_pages_of_the_resident_set_and_never_moves(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = opened(client, 20, max_tokens=400)
        table, pages = one.sequence.block_table, one.sequence.resident_pages
        assert table.dtype == torch.int32 and table.shape == (50,)
        at = table.data_ptr(), pages.data_ptr()
        append(one, list(range(20, 100)), seed=2)
        assert (one.sequence.block_table.data_ptr(), one.sequence.resident_pages.data_ptr()) == at
        k = pages[table[:13].long(), 1, 0].reshape(-1, HEADS, DIM)[:100]
        assert torch.equal(k, one.k[1])


def test_memory_is_provided_before_it_is_needed(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        client.prewarm_resident(100)
        one = opened(client, 20)
        one.check()
        client.prewarm_resident(256 * BLOCK)
        one.check()
        with pytest.raises(CallerError, match="tokens"):
            client.prewarm_resident(0)
        with pytest.raises(CallerError, match="the resident set has 256"):
            client.prewarm_resident(256 * BLOCK + 1)


def test_memory_that_encoded_pages_use_is_not_provided_twice(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = opened(client, 60, replace(POLICY, codec="q8"))
        with pytest.raises(ResidentSetFull, match="of 256 pages"):
            client.prewarm_resident(256 * BLOCK)
        assert one.sequence.statistics().encoded == 5 * BLOCK


def test_the_size_of_the_resident_set_can_be_read_at_any_time(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        before = client.resident()
        assert (before.pages, before.pages_used, before.pages_available, before.utilisation) == (256, 0, 256, 0.0)
        assert (before.page_bytes, before.capacity_bytes) == (PAGE, 256 * PAGE)
        assert (before.block_tokens, before.tokens_available) == (BLOCK, 256 * BLOCK)
        one = opened(client, max_tokens=2_000)
        assert client.resident() == replace(before, sequences=1)
        assert (one.sequence.capacity, one.sequence.remaining, one.sequence.reserved) == (2_000, 2_000, 0)
        append(one, 20)
        assert (one.sequence.remaining, one.sequence.reserved) == (1_980, 4)
        one.sequence.reserve(30)
        assert one.sequence.reserved == 36
        use = client.resident()
        assert (use.pages_used, use.pages_available, use.utilisation) == (7, 249, 7 / 256)
        assert one.sequence.flush()
        assert client.resident().pages_available == 250, "of what the cluster has, a sink stays"
        one.sequence.close()


def test_a_client_whose_spec_sequences_cannot_have_has_no_resident_set(cluster: MemoryCluster) -> None:
    two = replace(SPEC, groups=(replace(SPEC.groups[0], layers=(0,)), replace(SPEC.groups[0], layers=(1,))))
    with cluster.client(two) as client:
        assert client.resident() == ResidentUse() and client.resident().utilisation == 0.0


@pytest.mark.parametrize(("given", "pages"), [("8KiB", 2), (f"{3 * PAGE}", 3), (4 * PAGE, 4)])
def test_a_size_may_be_text_as_in_a_file(start: Start, given: str | int, pages: int) -> None:
    cluster = start(ram_bytes="4MiB", config={"client": {"resident_bytes": given}})
    with cluster.client(SPEC) as client:
        assert client.resident().pages == pages
    config = kvcluster.ClientConfig(resident_bytes=given)  # type: ignore[arg-type]
    with kvcluster.Client(cluster.port(), cluster.opener(), SPEC, config=config) as client, client.sequence() as one:
        assert (client.resident().pages, one.length) == (pages, 0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"resident_bytes": "1 elephant"}, "client.resident_bytes"),
        ({"resident_bytes": 1.5}, "client.resident_bytes"),
        ({"deadline_ms": "soon"}, "client.deadline_ms"),
        ({"accept": "q5"}, "client.accept"),
        ({"transports": ("pigeon",)}, "pigeon"),
    ],
)
def test_settings_of_one_client_are_held_to_the_rules_of_a_file(
    cluster: MemoryCluster, wrong: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        kvcluster.Client(cluster.port(), cluster.opener(), SPEC, config=kvcluster.ClientConfig(**wrong))


@pytest.mark.parametrize("tail", [0, 2 * BLOCK])
def test_a_full_resident_set_leaves_the_tail_raw_and_there(start: Start, tail: int) -> None:
    config = {"client": {"resident_bytes": 8 * PAGE, "deadline_ms": 2_000}}
    with start(ram_bytes="4MiB", config=config).client(SPEC) as client:
        policy = kvcluster.WindowPolicy(tail_tokens=tail, migration_tokens=1_000)
        one, other = opened(client, policy=policy), opened(client, policy=policy)
        append(one, list(range(4 * BLOCK)))
        append(other, list(range(100, 100 + 4 * BLOCK)))
        append(other, list(range(200, 200 + (4 - tail // BLOCK) * BLOCK)))
        use = one.sequence.statistics()
        assert use.sealed == 4 * BLOCK - tail and use.resident >= tail
        assert not one.sequence._state.absent(range(4 - tail // BLOCK, 4))
        if tail:
            with pytest.raises(ResidentSetFull, match="tail_tokens"):
                append(other, list(range(300, 300 + 5 * BLOCK)))
            cut = 3 * BLOCK + 1
            one.sequence.truncate(cut)
            one = Grown(one.sequence, one.k[:, :cut], one.v[:, :cut])
        one.check()


@pytest.mark.parametrize("wrong", [{"codec": "q5"}, {"tail_tokens": -1}, {"sink_tokens": 1.5}])
def test_a_policy_that_is_none_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(CallerError, match=next(iter(wrong))):
        kvcluster.WindowPolicy(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("codec", "times"), [("raw", 1.0), ("q8", 3.7), ("q4", 6.6)])
def test_a_local_sequence_needs_no_shard_and_its_encoded_blocks_no_raw_page(
    start: Start, codec: str, times: float
) -> None:
    """In the room of 2,048 raw tokens: nothing waits for shards, which have no room."""
    spec = kvcluster.KVSpec.uniform(
        model="m", weights="w", num_layers=1, num_kv_heads=2, head_dim=128, dtype="float32", block_tokens=16
    )
    room = {"resident_bytes": 2_048 * int(spec.token_bytes), "deadline_ms": 300}
    cluster = start(ram_bytes="64KiB", config={"client": room})
    policy = kvcluster.WindowPolicy(tail_tokens=16, migration_tokens=16, codec=codec)
    values = torch.randn(512, 2, 128)
    with cluster.client(spec) as client, client.sequence(policy=policy, publish=False) as one:
        fits = 0
        with pytest.raises(ResidentSetFull):
            while True:
                one.append(0, values[:16], values[:16])
                one.advance(range(one.length, one.length + 16))
                fits = one.length
        assert times <= fits / 2_048 < times + 1
        one.truncate(fits)
        assert client.resident().blocks_waiting == 0 and one.sealed == 0
        assert one.flush(), "there is nothing to store"
        with one.fork() as fork:
            assert fork.length == fits
        k, _ = one.read(0, 0, 512)
        worst = {"raw": 0.0, "q8": 0.03, "q4": 0.6}[codec]
        assert (k - values[:16].repeat(32, 1, 1)).abs().max() <= worst
        with cluster.client(spec) as other, other.sequence(list(range(fits))) as found:
            assert found.length == 0, "no other client finds it"


def test_a_batch_reads_of_a_fork_the_form_of_its_own(cluster: MemoryCluster) -> None:
    """One fork has encoded a block that the other goes on to read raw: attention gives each what it has alone."""
    with cluster.client(SPEC) as client:
        raw = opened(client, 2 * BLOCK, replace(POLICY, sink_tokens=0))
        coded = Grown(raw.sequence.fork(), raw.k, raw.v)
        coded.sequence.policy = replace(POLICY, sink_tokens=0, codec="q4", migration_tokens=BLOCK)
        append(coded, list(range(BLOCK)), seed=7)
        append(raw, list(range(BLOCK)), seed=7)
        assert coded.sequence.statistics().encoded > raw.sequence.statistics().encoded == 0
        query = torch.randn(1, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(1))
        for rows in ((raw, coded), (coded, raw)):
            with_both = kvcluster.SequenceBatch([row.sequence for row in rows]).attend(0, torch.cat([query, query]))
            alone = torch.cat([row.sequence.attend(0, query) for row in rows])
            assert torch.equal(with_both, alone)
        raw.sequence.close()
        coded.sequence.close()


def test_a_fork_does_not_read_what_another_has_encoded_in_a_codec_that_is_not_its_own(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = opened(client, 2 * BLOCK, replace(POLICY, sink_tokens=0, tail_tokens=4 * BLOCK, codec="q8"))
        other = Grown(one.sequence.fork(), one.k, one.v)
        other.sequence.policy = replace(POLICY, sink_tokens=0, tail_tokens=0, migration_tokens=BLOCK, codec="q4")
        append(other, list(range(BLOCK)), seed=7)
        assert other.sequence.statistics().encoded
        append(one, list(range(4 * BLOCK)), seed=8)
        for layer in range(LAYERS):
            k, _ = one.sequence.read(layer, 0, 2 * BLOCK)
            assert (k.float() - one.k[layer, : 2 * BLOCK].float()).abs().max() < 0.02, "q8 or exact, and not q4"
        one.sequence.close()
        other.sequence.close()


def test_a_block_that_keeps_tokens_of_an_encoded_one_is_published_with_its_loss(cluster: MemoryCluster) -> None:
    """Block 1 is exact in the cluster. What is made of its first four tokens, as encoding left them, is not."""
    with cluster.client(SPEC) as client, cluster.client(SPEC) as other:
        one = opened(client, 60, replace(POLICY, codec="q8"))
        assert one.sequence.flush() and other.lookup(list(range(60)), accept=Loss.EXACT).tokens == 3 * BLOCK
        one.sequence.truncate(BLOCK + 4)
        coded = decoded(one, range(1, 2), Codec.Q8)
        after = Grown(one.sequence, coded.k[:, : BLOCK + 4], coded.v[:, : BLOCK + 4])
        after.check()
        ids = [*range(1_000, 1_020)]
        append(after, ids)
        assert after.sequence.flush()
        prompt = [*range(BLOCK + 4), *ids]
        assert other.lookup(prompt, accept=Loss.EXACT).tokens == BLOCK
        assert other.lookup(prompt, accept=Loss.Q8).tokens == 4 * BLOCK


def test_a_sequence_opens_though_encoded_pages_have_taken_the_resident_set(start: Start) -> None:
    cluster = start(shards=2, ram_bytes="8MiB", config={"client": {"resident_bytes": 8 * PAGE}})
    policy = kvcluster.WindowPolicy(tail_tokens=0, migration_tokens=BLOCK, codec="q8")
    with cluster.client(SPEC) as client, cluster.client(SPEC) as other:
        prompt = list(range(1_000, 1_000 + 4 * BLOCK))
        theirs = opened(other)
        append(theirs, prompt)
        assert theirs.sequence.flush()
        full = opened(client, 0, policy)
        with pytest.raises(ResidentSetFull):
            for step in range(40):
                append(full, [step] * BLOCK, seed=step)
        with client.sequence(prompt) as again:
            assert again.length == len(prompt)
        full.sequence.close()
        theirs.sequence.close()


def test_a_flush_succeeds_where_blocks_are_left_in_encoded_form_alone(cluster: MemoryCluster) -> None:
    policy = kvcluster.WindowPolicy(tail_tokens=1, migration_tokens=BLOCK, codec="q8")
    with cluster.client(SPEC) as client:
        one = opened(client, 5 * BLOCK, policy, max_tokens=2 * BLOCK + 3, drop_oldest=True)
        assert one.sequence.dropped and one.sequence.flush()
        one.sequence.close()
