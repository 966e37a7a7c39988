"""An engine with a paged cache over a cluster: transformers' continuous batching, which runs on a CPU. What it gains,
that its bytes are right, and that faults which are planted are noticed.

**Why tokens can be compared exactly.** The sums of a forward pass depend on what else is in its batch, and an engine
that loads a prefix has other batches than one that computes it. In float32 logarithms of probability differ by less
than 1e-5 here, and a greedy token changes only where two logits are as close as that. So each comparison also measures
the smallest margin by which any token was chosen, in a plain forward pass over prompt and output, and the drift between
the two runs, and demands that the first is at least MARGIN times the second. With that, equal tokens are a claim about
KV: a wrong block moves logarithms of probability by more than one. A seed with a near tie fails, and says so. Which
bytes are loaded is compared apart, without any tolerance, by the audit (audit.py).
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcluster
from kvcluster.client import Client
from kvcluster.config import ClientConfig
from kvcluster.core.ids import ShardId
from kvcluster.core.miss import MissReason
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.layouts import Buffers, Paged
from kvcluster.transfers.transfer import Loaded, Stored
from tests.cli.served import Served
from tests.engines.generate_batch import shared_prefixes
from tests.engines.generate_batch.__main__ import DEADLINE_MS, main, run
from tests.engines.generate_batch.audit import Audit
from tests.engines.generate_batch.engine import (
    BATCH_TOKENS,
    BLOCK,
    CACHE_BLOCKS,
    NEW_TOKENS,
    Output,
    generate,
    shared_prompts,
    smallest_margin,
    spec_of,
    tiny_llama,
)
from tests.engines.generate_batch.shared_prefixes import SharedPrefixes

MARGIN = 20.0
TIGHT = {"num_blocks": 40, "max_requests_per_batch": 8}
"""A cache in which requests take one another's blocks while they run, so that some begin anew."""
ROOT = Path(__file__).parents[3]
SHARD = ShardId("shard-0")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return shared_prompts(48, seed=1)


@pytest.fixture(scope="module")
def alone(model: Any, prompts: list[list[int]]) -> Output:
    """What an engine without kvcluster generates."""
    return generate(model, prompts)


@pytest.fixture
def cluster() -> Iterator[MemoryCluster]:
    with MemoryCluster() as running:
        yield running
        running.wait_until_idle()  # no ticket or lease is left behind
        running.check()


@pytest.fixture
def client(cluster: MemoryCluster, model: Any) -> Client:
    return cluster.client(spec_of(model))


def check_same_tokens(model: Any, prompts: list[list[int]], output: Output, reference: Output) -> None:
    assert output.tokens == reference.tokens
    margin, drift = smallest_margin(model, prompts, reference), output.drift(reference)
    assert margin >= MARGIN * drift, f"tokens were chosen by {margin:.1e}, and runs differ by {drift:.1e}: another seed"


class Faulty:
    """A transfer of which a test changes some answers."""

    def __init__(self, inner: Any = None, **answers: Callable[[], object]) -> None:
        self._inner = inner
        for name, answer in answers.items():
            setattr(self, name, answer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


# --------------------------------------------------------------------------------------------------- what is shared


def test_two_engines_share_prefixes_and_generate_the_tokens_of_one_that_shares_nothing(
    model: Any, prompts: list[list[int]], alone: Output, client: Client
) -> None:
    assert max(map(len, prompts)) > 2 * BATCH_TOKENS, "some prompts are computed in several passes"
    audit = Audit()
    (_, first), (output, second) = runs = [run(model, prompts, SharedPrefixes(client, audit)) for _ in range(2)]
    for generated, counts in runs:
        check_same_tokens(model, prompts, generated, alone)
        assert counts.handed_out > 2 * CACHE_BLOCKS, "blocks are evicted and used again"
        assert not counts.misses and not counts.cancelled
    assert 2 * second.loaded > second.shared > 0
    tokens = sum(map(len, prompts)) + len(prompts) * (NEW_TOKENS - 1)  # KV of the last new one is not computed
    assert output.computed == tokens - second.matched, "what was found was not computed"
    assert second.stored == 0 < first.stored, "the second engine has nothing new"
    assert audit.blocks * BLOCK == first.loaded + second.loaded and audit.wrong == []


def test_requests_that_lose_their_blocks_while_they_run_generate_the_same_tokens(
    model: Any, prompts: list[list[int]], client: Client
) -> None:
    reference, audit = generate(model, prompts, None, **TIGHT), Audit()
    for number in range(2):
        output, counts = run(model, prompts, SharedPrefixes(client, audit), **TIGHT)
        check_same_tokens(model, prompts, output, reference)
        assert not counts.misses and not counts.cancelled
        assert counts.restarted > 0
        assert counts.loaded > 0 or number == 0
    assert audit.wrong == []


@pytest.mark.parametrize("settings", [{}, TIGHT], ids=["room", "tight"])
def test_a_request_waits_for_its_load_while_others_run(
    model: Any,
    prompts: list[list[int]],
    alone: Output,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, int],
) -> None:
    audit = Audit()
    run(model, prompts, SharedPrefixes(client, audit))
    begin = client.begin_load

    def begin_load(ticket: Any, into: Any, *, first: int) -> Any:
        asked = itertools.count(1)
        transfer = begin(ticket, into, first=first)
        return Faulty(transfer, done=lambda: next(asked) > 3 and transfer.done())

    monkeypatch.setattr(client, "begin_load", begin_load)
    output, counts = run(model, prompts, SharedPrefixes(client, audit, beside=True), **settings)
    check_same_tokens(model, prompts, output, alone)
    assert counts.passed_over > 0 and counts.loaded > 0 and audit.wrong == []
    assert len(counts.misses) <= counts.given_back


@pytest.mark.slow
def test_two_processes_share_prefixes_over_one_cluster(
    model: Any, prompts: list[list[int]], alone: Output, tmp_path: Path
) -> None:
    filed, audit = tmp_path / "filed", Audit()
    with Served("127.0.0.1") as served:
        command = [sys.executable, "-m", "tests.engines.generate_batch", "--prompts", "48", "--seed", "1"]
        command += ["--connect", served.coordinator, "--filed", str(filed)]
        other = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert other.returncode == 0, other.stdout + other.stderr
        assert " 0 wrong, 0 tokens differ" in other.stdout
        audit.restore(filed)
        config = ClientConfig(deadline_ms=DEADLINE_MS, connect_ms=DEADLINE_MS)
        with kvcluster.connect(served.coordinator, spec_of(model), config=config) as mine:
            output, counts = run(model, prompts, SharedPrefixes(mine, audit))
            assert {one["name"] for one in mine.status()["transports"].values()} == {"tcp"}
    check_same_tokens(model, prompts, output, alone)
    assert 2 * counts.loaded > counts.shared > 0 and counts.stored == 0
    assert audit.blocks * BLOCK == counts.loaded and audit.wrong == []


def test_the_command_line_prints_what_two_engines_shared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--prompts", "16", "--seed", "2", "--beside"]) == 0
    line = r"16 prompts, \d+ tokens shared, \d+ loaded, \d+ blocks audited, 0 wrong, 0 tokens differ; .*\n"
    assert re.fullmatch(line, capsys.readouterr().out)


def test_a_block_of_the_paged_cache_is_a_page(model: Any, prompts: list[list[int]], client: Client) -> None:
    """What is stored from the views of the cache comes back as the bytes that the engine's attention reads there."""

    class Keeping(SharedPrefixes):
        def completed(self, request_id: str, token_ids: list[int], written_tokens: int) -> None:
            super().completed(request_id, token_ids, written_tokens)
            full = written_tokens // BLOCK
            for number, block in enumerate(self.blocks.table(request_id)[:full]):
                read[tuple(token_ids[: (number + 1) * BLOCK])] = self.blocks.read(block)

    read: dict[tuple[int, ...], torch.Tensor] = {}
    hooks = Keeping(client, Audit())
    generate(model, prompts[:1], hooks)
    hooks.settle()
    count = len(prompts[0]) // BLOCK
    pages = [bytearray(client.spec.block_bytes) for _ in range(count)]
    assert client.load(prompts[0], Buffers(pages)) == count * BLOCK
    for number, page in enumerate(pages):
        block = read[tuple(prompts[0][: (number + 1) * BLOCK])]
        assert list(block.shape) == [2, 2, BLOCK, 2, 16]
        assert block.contiguous().numpy().tobytes() == bytes(page)


def test_the_bookkeeping_of_a_cache_adds_up_after_loads(model: Any, prompts: list[list[int]], client: Client) -> None:
    """When all requests have ended, every block is free or cached, and each cached one is found by its hash."""
    audit = Audit()
    run(model, prompts, SharedPrefixes(client, audit))
    hooks = SharedPrefixes(client, audit)
    run(model, prompts, hooks)
    assert hooks.blocks.unaccounted() == 0


# ------------------------------------------------------------------------------------------ what must not go wrong


def test_of_a_load_of_which_only_a_part_comes_the_rest_is_computed(
    model: Any, prompts: list[list[int]], alone: Output, cluster: MemoryCluster, client: Client
) -> None:
    audit = Audit()
    run(model, prompts, SharedPrefixes(client, audit))
    _corrupt(cluster, client, prompts)
    output, counts = run(model, prompts, SharedPrefixes(client, audit))
    assert any(MissReason.CORRUPT.value in miss for miss in counts.misses)
    assert counts.loaded > 0 and audit.wrong == []
    check_same_tokens(model, prompts, output, alone)


def test_a_block_is_handed_out_only_when_every_store_has_read_it(
    model: Any, prompts: list[list[int]], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, reused = client.begin_store, SharedPrefixes.reused
    readers: dict[int, list[Slow]] = {}
    late: list[bool] = []

    class Slow(Faulty):
        """A store that has read its source only when it is asked for the fifth time."""

        asked = 0

        def source_free(self) -> bool:
            self.asked += 1
            return self.asked >= 5 and bool(self._inner.source_free())

    def begin_store(hashes: Any, source: Paged, *, first: int) -> Any:
        slow = Slow(begin(hashes, source, first=first))
        for block in map(int, source.block_ids):
            readers.setdefault(block, []).append(slow)
        return slow

    def watched(self: SharedPrefixes, block_ids: Sequence[int]) -> None:
        stores = [store for block in block_ids for store in readers.pop(block, ())]
        late.extend(store.asked < 5 for store in stores)
        reused(self, block_ids)
        assert all(store.asked >= 5 for store in stores)

    monkeypatch.setattr(client, "begin_store", begin_store)
    monkeypatch.setattr(SharedPrefixes, "reused", watched)
    _, counts = run(model, prompts[:16], SharedPrefixes(client, Audit()))
    assert any(late) and counts.waits > 0 and not counts.cancelled


def test_a_store_that_never_lets_go_of_a_block_is_cancelled(
    model: Any, prompts: list[list[int]], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = client.begin_store
    monkeypatch.setattr(
        client, "begin_store", lambda *given, **named: Faulty(begin(*given, **named), source_free=lambda: False)
    )
    monkeypatch.setattr(shared_prefixes, "WAIT_S", 0.0)
    output, counts = run(model, prompts[:16], SharedPrefixes(client, Audit()))
    assert counts.cancelled > 0
    assert output.tokens == generate(model, prompts[:16]).tokens


# --------------------------------------------------------------------------------- faults that are planted, and noticed


def test_a_block_stored_in_place_of_its_neighbour_is_noticed(
    model: Any, prompts: list[list[int]], alone: Output, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = client.begin_store

    def begin_store(hashes: Any, source: Paged, *, first: int) -> Any:
        neighbours = [max(0, int(block) - 1) for block in source.block_ids]
        return begin(hashes, Paged(source.layers, neighbours), first=first)

    monkeypatch.setattr(client, "begin_store", begin_store)
    audit = Audit()
    _, (output, _) = [run(model, prompts, SharedPrefixes(client, audit)) for _ in range(2)]
    assert "is not what was stored" in audit.wrong[0]
    assert output.differing(alone) > 0
    assert output.drift(alone) > 1, "rounding is not what makes the difference"


def test_a_part_of_a_load_taken_for_all_of_it_is_noticed(
    model: Any,
    prompts: list[list[int]],
    cluster: MemoryCluster,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    audit = Audit()
    run(model, prompts, SharedPrefixes(client, audit))
    _corrupt(cluster, client, prompts)
    begin = client.begin_load

    def begin_load(ticket: Any, into: Any, *, first: int) -> Any:
        transfer = begin(ticket, into, first=first)

        def result() -> Loaded:
            transfer.result()
            return Loaded(ticket.blocks, 0)

        return Faulty(transfer, result=result)

    monkeypatch.setattr(client, "begin_load", begin_load)
    run(model, prompts, SharedPrefixes(client, audit))
    assert any("is not what was stored" in wrong for wrong in audit.wrong)


def test_a_store_that_reads_blocks_after_they_were_used_again_is_noticed(
    model: Any, prompts: list[list[int]], alone: Output, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = client.begin_store
    held: list[tuple[Any, Any, int]] = []

    def begin_store(hashes: Any, source: Any, *, first: int) -> Any:
        held.append((hashes, source, first))
        return Faulty(source_free=lambda: True, result=lambda: Stored(0, 0, 0, 0))

    audit = Audit()
    with monkeypatch.context() as planted:
        planted.setattr(client, "begin_store", begin_store)
        run(model, prompts, SharedPrefixes(client, audit))
    for hashes, source, first in held:
        begin(hashes, source, first=first).result()
    assert client.flush()
    output, _ = run(model, prompts, SharedPrefixes(client, audit))
    assert any("is not what was stored" in wrong for wrong in audit.wrong)
    assert output.differing(alone) > 0


def _corrupt(cluster: MemoryCluster, client: Client, prompts: list[list[int]]) -> None:
    """Flips a bit of the second block of every prompt whose second block is not corrupt yet."""
    done: set[object] = set()
    for prompt in prompts:
        hashes = client.hashes(prompt)
        if len(hashes) > 2 and hashes[1] not in done:
            done.add(hashes[1])
            cluster.corrupt(SHARD, block=hashes[1])
