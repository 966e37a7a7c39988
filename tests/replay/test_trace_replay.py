"""`kvcluster bench trace`: its counts are decisions of the cores, and a malformed trace is refused with its line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcluster.cli import bench_trace
from kvcluster.cli.main import main
from kvcluster.config import load
from kvcluster.core.hashing import foreign
from kvcluster.core.ids import BlockHash
from kvcluster.core.invariants import check_coordinator, check_shard
from kvcluster.core.messages import LoadGrant, Tier
from kvcluster.core.miss import Loss
from kvcluster.errors import ConfigError
from kvcluster.replay import trace_replay
from kvcluster.replay.kernel import MS
from kvcluster.replay.replayed_cluster import TENANT, TraceCluster

PAGE = trace_replay.SPEC.page_bytes(0, trace_replay.SPEC.whole(0))
USERS, TURNS, GROWTH = 10, 3, 4


def line(at_ms: int, ids: Sequence[int]) -> str:
    return json.dumps({"timestamp": at_ms, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": list(ids)})


def conversations() -> list[str]:
    """Ten conversations of three turns behind one block that all share: of 270 blocks asked for 121 are distinct."""
    out = []
    for turn in range(TURNS):
        for user in range(USERS):
            own = range(1 + 100 * user, 1 + 100 * user + GROWTH * (turn + 1))
            out.append(line(1_000 * len(out), [0, *own]))
    return out


def strangers(count: int, blocks: int) -> list[str]:
    """Requests that share nothing, each a chain of its own."""
    return [line(1_000 * n, range(100 * n, 100 * n + blocks)) for n in range(count)]


def measured(lines: Sequence[str], *, capacity: float, host: float, shards: int = 1) -> dict[str, Any]:
    trace = trace_replay.parse(lines, "trace")
    return trace_replay.measure(trace, capacity=capacity, host=host, shards=shards, block_tokens=16)


def by_name(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in figures["rows"]}


def chain(count: int, first: int = 0) -> list[BlockHash]:
    names = (number.to_bytes(16, "little") for number in range(first, first + count))
    return foreign(trace_replay.SPEC.namespace(TENANT), names)


# ------------------------------------------------------------------------------------------------- the replay


@pytest.mark.parametrize("shards", [1, 3])
def test_with_room_for_everything_all_that_was_asked_before_is_found(shards: int) -> None:
    figures = measured(conversations(), capacity=10, host=1, shards=shards)
    assert (figures["requests"], figures["asked_blocks"], figures["distinct_blocks"]) == (30, 270, 121)
    for row in figures["rows"]:
        assert (row["hit_blocks"], row["hits_from_host"], row["hits_lossy"]) == (270 - 121, 0, 0)
        assert (row["cached_blocks_end"], row["ram_blocks_end"], row["host_blocks_end"]) == (121, 121, 0)
        assert (row["counters"]["commits"], row["counters"]["evicted"], row["counters"]["full"]) == (121, 0, 0)
    assert figures["reused_share"] == row["hit_rate"] == 149 / 270


def test_an_encoded_host_tier_keeps_and_finds_more_blocks_in_the_same_bytes() -> None:
    rows = by_name(measured(conversations(), capacity=0.2, host=0.2))
    alone, raw, q8, q4 = (rows[name] for name in ("RAM alone", "+ host raw", "+ host q8", "+ host q4"))
    assert alone["host_blocks"] == alone["hits_from_host"] == 0
    assert alone["hit_blocks"] < raw["hit_blocks"] < q8["hit_blocks"] <= q4["hit_blocks"] <= 149
    assert raw["cached_blocks"] < q8["cached_blocks"] < q4["cached_blocks"]
    assert raw["host_ratio"] == 1 < q8["host_ratio"] < q4["host_ratio"]
    assert raw["hits_lossy"] == 0 < min(q8["hits_lossy"], q4["hits_lossy"])
    assert raw["hits_from_host"] > 0


def test_a_tier_that_is_full_holds_as_many_times_the_blocks_as_its_codec_makes_pages_smaller() -> None:
    rows = by_name(measured(strangers(150, 8), capacity=0.1, host=0.1))
    assert 1.8 < rows["+ host q8"]["host_ratio"] < 2.1
    assert 3.2 < rows["+ host q4"]["host_ratio"] < 3.6
    assert all(0.85 < row["host_used"] < 1 for row in rows.values() if row["codec"])


def test_first_blocks_that_stay_raw_cost_room_where_every_chain_has_its_own() -> None:
    rows = by_name(measured(strangers(300, 4), capacity=0.1, host=0.1))
    assert rows["+ host q4, first block raw"]["host_blocks"] < rows["+ host q4"]["host_blocks"]
    shared = by_name(measured(conversations(), capacity=0.2, host=0.2))
    assert shared["+ host q4, first block raw"]["hit_blocks"] == shared["+ host q4"]["hit_blocks"]


def test_the_same_trace_gives_the_same_figures() -> None:
    assert measured(conversations(), capacity=0.3, host=0.1) == measured(conversations(), capacity=0.3, host=0.1)


def test_shards_divide_the_bytes_and_copies_that_cannot_come_end() -> None:
    # The shared block is hot within a minute, and another shard is to fetch it, which here brings nothing.
    lines = [line(100 * n, [0, 1 + n]) for n in range(200)]
    figures = measured(lines, capacity=0.5, host=0.2, shards=2)
    assert figures["ram_bytes"] == int(0.5 * 201 * PAGE) // 2 * 2
    for row in figures["rows"]:
        assert row["hit_blocks"] == 199, "only the shared block is found, and always"
        assert row["counters"]["aborted"] > 0
        assert row["counters"]["pulled"] == 0


def test_a_policy_is_chosen_by_name_and_keeps_what_it_values() -> None:
    # Of eight prompts two are the same ten blocks; the others come once, and five of them fill the tier.
    alike, once = range(10), (range(100 * n, 100 * n + 20) for n in range(1, 61))
    lines = [line(20_000 * n, alike if n % 8 < 2 else ids) for n, ids in enumerate(once)]
    trace = trace_replay.parse(lines, "trace")
    shape: dict[str, Any] = {"capacity": 0.1, "host": 0.01, "shards": 1, "block_tokens": 16}
    lru, gdsf = (trace_replay.measure(trace, **shape, eviction_policy=name) for name in ("lru", "gdsf"))
    assert (lru["eviction_policy"], gdsf["eviction_policy"]) == ("lru", "gdsf")
    assert lru["rows"][0]["hit_blocks"] < gdsf["rows"][0]["hit_blocks"] <= 150
    assert lru["rows"][0]["saved_share"] < gdsf["rows"][0]["saved_share"]
    with pytest.raises(ConfigError, match="must be one of lru, gdsf, not 'lfu'"):
        trace_replay.measure(trace, **shape, eviction_policy="lfu")


# ------------------------------------------------------------------------------------------------ the cluster


def small(pages: int, host_pages: int = 0, **client: Any) -> TraceCluster:
    shard = {"ram_bytes": pages * PAGE, "host_bytes": host_pages * PAGE, "scrub_bytes": 0}
    return TraceCluster(load(None, {"shard": shard, "client": client}), trace_replay.SPEC)


def deepest(grant: LoadGrant) -> Tier:
    """The lowest tier that any of it comes from."""
    return max(source.tier for run in grant.runs for source in run.plan[0] or ())


def checked(cluster: TraceCluster) -> TraceCluster:
    check_coordinator(cluster.coordinator)
    for shard in cluster.shards:
        check_shard(shard)
    return cluster


def test_nothing_is_left_of_a_request_but_its_blocks() -> None:
    cluster = small(16)
    cluster.store(chain(4), 0, Loss.EXACT)
    assert cluster.load(chain(8)).blocks == 4
    assert len(cluster.coordinator.state.tickets) == 0
    assert [len(shard.leases) for shard in cluster.shards] == [0]
    checked(cluster)


def test_a_store_larger_than_the_tier_waits_its_time_and_keeps_what_fits() -> None:
    cluster = small(8)
    cluster.store(chain(8), 0, Loss.EXACT)
    cluster.store(chain(40, first=100), 0, Loss.EXACT)
    for second in range(1, 6):
        cluster.advance(second * 1_000 * MS)
    assert len(cluster.coordinator.state.tickets) == 0
    assert 0 < cluster.load(chain(40, first=100)).blocks <= 8
    checked(cluster)


def test_what_was_computed_over_a_lossy_prefix_is_stored_with_its_loss() -> None:
    cluster = small(16)
    cluster.store(chain(2), 0, Loss.Q4)
    grant = cluster.load(chain(2))
    assert [source.loss for run in grant.runs for source in run.plan[0] or ()] == [Loss.Q4]


def test_what_is_demoted_is_found_below() -> None:
    cluster = small(8, 16)
    for number in range(4):
        cluster.advance(number * 1_000 * MS)
        cluster.store(chain(4, first=100 * number), 0, Loss.EXACT)
    cluster.advance(5_000 * MS)
    found = [cluster.load(chain(4, first=100 * number)) for number in range(4)]
    assert [grant.blocks for grant in found] == [4, 4, 4, 4]
    assert [deepest(found[0]), deepest(found[3])] == [Tier.HOST, Tier.RAM]
    checked(cluster)


# ------------------------------------------------------------------------------------------------ the command


def written(tmp_path: Path, lines: Sequence[str]) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_the_command_prints_a_row_for_every_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, conversations())
    assert main(["bench", "trace", file, "--capacity", "0.2", "--host", "0.2", "--requests", "20", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["requests"], figures["capacity"], figures["host"], figures["shards"]) == (20, 0.2, 0.2, 1)
    assert [row["name"] for row in figures["rows"]] == [row.name for row in trace_replay.ROWS]
    assert figures["page_bytes"] == PAGE == 2 * 2**20
    assert main(["bench", "trace", file, "--as-tokens", "512"]) == 0
    printed = capsys.readouterr().out
    assert "30 requests ask for 270 blocks, 121 distinct; an unbounded cache finds 55.2%" in printed
    assert "512 tokens of Llama 3 8B, 67,108,864 bytes raw; 1 shard(s); eviction policy lru" in printed
    assert all(f"\n{row.name} " in printed for row in trace_replay.ROWS)


def test_a_host_tier_that_nothing_came_down_to_has_no_ratio() -> None:
    printed = bench_trace.lines(measured(conversations(), capacity=10, host=1))
    assert all(" - " in text for text in printed if text.startswith("+ host"))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("{", "line 3: not a JSON object with timestamp and hash_ids"),
        ("", "line 3: not a JSON object"),
        ("[1]", "line 3: not a JSON object"),
        ('{"hash_ids": [1]}', "line 3: not a JSON object"),
        ('{"timestamp": 9000}', "line 3: not a JSON object"),
        ('{"timestamp": 9000, "hash_ids": 1}', "line 3: not a JSON object"),
        ('{"timestamp": -1, "hash_ids": [1]}', "line 3: timestamp is an integer of milliseconds, and hash_ids a list"),
        ('{"timestamp": true, "hash_ids": [1]}', "line 3: timestamp is an integer of milliseconds"),
        ('{"timestamp": 9000, "hash_ids": []}', "line 3: timestamp is an integer of milliseconds, and hash_ids a list"),
        ('{"timestamp": 9000, "hash_ids": [0, "1"]}', "line 3: timestamp is an integer"),
        ('{"timestamp": 9000, "hash_ids": [0, 1.0]}', "line 3: timestamp is an integer"),
        ('{"timestamp": 9000, "hash_ids": [-5]}', "line 3: timestamp is an integer"),
        ('{"timestamp": 0, "hash_ids": [0]}', "line 3: timestamp 0 is before 1000, that of the line above"),
        ('{"timestamp": 9000, "hash_ids": [0, 2]}', "line 3: block 2 follows 0, and elsewhere 1: not a chain"),
        ('{"timestamp": 9000, "hash_ids": [1]}', "line 3: block 1 follows None, and elsewhere 0: not a chain"),
        ('{"timestamp": 9000, "hash_ids": [0, 1, 0]}', "line 3: block 0 follows 1, and elsewhere None: not a chain"),
    ],
)
def test_a_line_that_is_no_request_is_refused_by_its_number(
    wrong: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, [*conversations()[:2], wrong])
    assert main(["bench", "trace", file]) == 1
    assert capsys.readouterr().err.startswith(f"kvcluster: {file}, {sentence}")


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "trace", str(tmp_path / "nothing")]) == 1
    assert capsys.readouterr().err.startswith(f"kvcluster: cannot read the trace {tmp_path / 'nothing'}: No such file")
    binary, empty = tmp_path / "binary", tmp_path / "empty"
    binary.write_bytes(b"\xff\xfe")
    empty.write_bytes(b"")
    assert main(["bench", "trace", str(binary)]) == 1
    assert capsys.readouterr().err == f"kvcluster: {binary} is no trace: it is not UTF-8 text\n"
    assert main(["bench", "trace", str(empty)]) == 1
    assert capsys.readouterr().err == f"kvcluster: {empty} holds no requests\n"


@pytest.mark.parametrize("option", ["--capacity", "--host"])
def test_a_tier_too_small_for_a_block_is_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, conversations())
    assert main(["bench", "trace", file, option, "0.005"]) == 1
    assert capsys.readouterr().err == (
        f"kvcluster: {option} 0.005 is less than one block per shard; give more, or fewer shards\n"
    )


@pytest.mark.parametrize("share", ["0", "-1", "nan", "much"])
def test_a_share_is_a_number_above_0(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "trace", "nothing", "--capacity", share])
    assert "--capacity" in capsys.readouterr().err
