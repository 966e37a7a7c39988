"""`kvcluster report`: figures of known traces, as text of 80 columns, JSON and a picture."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcluster.cli.main import main
from kvcluster.core import hashing
from kvcluster.core.ids import NamespaceId
from kvcluster.core.spec import KVSpec
from kvcluster.observe.reuse_prediction import ObservedRequest
from kvcluster.observe.trace_file import (
    PREFIX,
    UNREAD_WEIGHTS,
    ObservingCost,
    TraceHeader,
    cost_line,
    header_line,
    request_line,
    shortened,
)

BLOCK = 16
SECOND = 1_000_000_000
START = 1_795_000_000 * SECOND
SPEC = KVSpec.uniform(
    model="llama",
    weights=UNREAD_WEIGHTS,
    num_layers=4,
    num_kv_heads=2,
    head_dim=64,
    dtype="float16",
    block_tokens=BLOCK,
)
ROOT = hashing.root(NamespaceId(bytes(32)))


def request(
    engine: str, second: int, blocks: Sequence[int], *, local: int = 0, rate: int = 1_000, rest: int = 1
) -> ObservedRequest:
    """A prompt whose blocks are named by numbers; it is computed within the second."""
    chain = shortened(hashing.chain(ROOT, [token for block in blocks for token in [block] * BLOCK], BLOCK))
    at = START + second * SECOND
    computed = ((at + SECOND // 2, len(blocks)),)
    return ObservedRequest(engine, at, len(blocks) * BLOCK + rest, len(blocks), local, computed, chain, rate)


def write(
    folder: Path,
    engine: str,
    requests: Sequence[ObservedRequest],
    *,
    weights: str = "sha256:9",
    spec: KVSpec | None = SPEC,
    device: str = "cpu",
    more: Sequence[dict[str, Any]] = (),
) -> Path:
    parts = spec.whole_parts() if spec is not None else ()
    header = TraceHeader(engine, engine, spec, parts, {"vllm": "0.32.0", "device": device})
    cost = ObservingCost(steps=100, step_ns=2_000_000, worst_step_ns=90_000, requests=10, request_ns=500_000)
    lines = [header_line(header), *([{"weights": weights}] if weights else []), *map(request_line, requests)]
    file = folder / f"{PREFIX}{engine.replace(':', '-')}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, cost_line(cost), *more]), encoding="utf-8")
    return file


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Two engines: of six prompts, three find what the other one computed, one what it computed itself."""
    shared = list(range(20))
    write(
        tmp_path,
        "host:1",
        [request("host:1", 0, shared), request("host:1", 20, [*shared, 51]), request("host:1", 40, [*range(30, 50)])],
    )
    write(
        tmp_path,
        "host:2",
        [
            request("host:2", 10, shared),
            request("host:2", 30, [*shared, 51, 52], local=20),
            request("host:2", 50, [*range(30, 35)]),
        ],
    )
    return tmp_path


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["report", *arguments, "--json"]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


# ------------------------------------------------------------------------------------------------------ figures


def test_two_engines_are_predicted_together(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (group,) = report(capsys, str(two), "--gb-per-s", "100", "--fixed-ms", "0")["groups"]
    assert group["engines"] == ["host:1", "host:2"]
    assert (group["model"], group["weights"], group["requests"], group["loads"]) == ("llama", "sha256:9", 6, 4)
    assert group["prompt_tokens"] == (20 + 21 + 20 + 20 + 22 + 5) * BLOCK + 6
    assert group["local_tokens"] == 20 * BLOCK
    assert group["found_tokens"] == group["loaded_tokens"] == (20 + 20 + 1 + 5) * BLOCK
    assert group["alone_found_tokens"] == 20 * BLOCK, "only the second prompt of the first engine"
    assert group["working_set_bytes"] == (22 + 20) * SPEC.block_bytes
    assert group["prefill_tokens_per_s"] == 1_000
    assert group["saved_ms"] == pytest.approx(46 * BLOCK, rel=0.01)
    assert group["saved_ms_by_load"]["most"] == pytest.approx(20 * BLOCK, rel=0.01)


def test_loads_that_are_slower_than_computing_are_found_and_not_made(
    two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (group,) = report(capsys, str(two), "--gb-per-s", "100", "--fixed-ms", "100")["groups"]
    assert (group["found_tokens"], group["loaded_tokens"]) == (46 * BLOCK, 40 * BLOCK)
    assert group["link"] == {
        "path": "given",
        "measured": False,
        "bytes_per_s": 100_000_000_000,
        "fixed_ms": 100.0,
        "pays_from_tokens": 112,
    }


def test_the_hit_rate_grows_with_the_capacity_up_to_the_unlimited_one(
    two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (group,) = report(capsys, str(two))["groups"]
    rates = [row["hit_rate"] for row in group["capacity"]]
    assert rates == sorted(rates) and rates[-1] == group["found_tokens"] / group["prompt_tokens"]
    assert all(row["q8_hit_rate"] >= row["hit_rate"] for row in group["capacity"])
    sizes = [row["bytes"] for row in group["capacity"]]
    assert 1 < len(sizes) <= 10 and all(larger == 2 * smaller for smaller, larger in itertools.pairwise(sizes))


def test_capacities_may_be_chosen(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few, all_of_it = 19 * SPEC.block_bytes, 42 * SPEC.block_bytes
    (group,) = report(capsys, str(two), "--capacity", str(all_of_it), "--capacity", str(few))["groups"]
    assert [row["bytes"] for row in group["capacity"]] == [few, all_of_it]
    # A cache of 19 blocks never has the whole prefix of 20, and of the last prompt's five it has five.
    assert [row["found_tokens"] for row in group["capacity"]] == [(19 + 19 + 0 + 5) * BLOCK, 46 * BLOCK]


def test_tiers_are_consecutive_parts_of_one_order_of_use(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ram, host = 10 * SPEC.block_bytes, 100 * SPEC.block_bytes
    (group,) = report(capsys, str(two), "--tier", f"host={host}", "--tier", f"ram={ram}")["groups"]
    first, second = group["tiers"]
    assert [(row["tier"], row["codec"], row["bytes"]) for row in (first, second)] == [
        ("ram", "raw", ram),
        ("host", "q8", host),
    ]
    assert first["found_tokens"] == (10 + 10 + 0 + 5) * BLOCK
    assert first["found_tokens"] + second["found_tokens"] == group["found_tokens"] == 46 * BLOCK


def test_the_hits_of_a_group_are_those_of_its_tiers(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (group,) = report(capsys, str(two), "--tier", f"device={10 * SPEC.block_bytes}")["groups"]
    assert group["found_tokens"] == group["tiers"][0]["found_tokens"] == 25 * BLOCK


def test_requests_are_counted_by_the_share_they_would_load(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (group,) = report(capsys, str(two), "--gb-per-s", "100", "--fixed-ms", "0", "--by-request")["groups"]
    assert {row["share"]: row["requests"] for row in group["by_share"]} == {
        "nothing": 2,
        "up to a quarter": 1,
        "up to half": 0,
        "up to three quarters": 0,
        "more": 3,
    }
    assert [(one["engine"], one["loaded_tokens"]) for one in group["by_request"]] == [
        ("host:1", 0),
        ("host:2", 320),
        ("host:1", 320),
        ("host:2", 16),
        ("host:1", 0),
        ("host:2", 80),
    ]


def test_a_link_is_what_breakeven_measured(two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "breakeven.json"
    paths = [{"path": "shm", "why": "other host"}, {"path": "tcp", "why": None, "bytes_per_s": 2e9, "fixed_ms": 1.5}]
    file.write_text(json.dumps({"paths": paths}), encoding="utf-8")
    (group,) = report(capsys, str(two), "--link", str(file))["groups"]
    link = group["link"]
    assert (link["path"], link["measured"], link["bytes_per_s"], link["fixed_ms"]) == ("tcp", True, 2_000_000_000, 1.5)


def test_a_line_that_only_tells_of_a_store_is_no_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = replace(request("a:1", 1, range(8)), prompt_tokens=0, asked=0)
    asked = replace(request("a:1", 5, range(8)), computed=())
    write(tmp_path, "a:1", [stored, asked])
    (group,) = report(capsys, str(tmp_path), "--by-request")["groups"]
    assert (group["requests"], len(group["by_request"]), group["found_tokens"]) == (1, 1, 8 * BLOCK)


# --------------------------------------------------------------------------------------------- who would share


def test_engines_with_other_weights_do_not_share_and_the_field_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for engine, weights in (("a:1", "sha256:1"), ("b:1", "sha256:2")):
        write(tmp_path, engine, [request(engine, 1, range(8))], weights=weights)
    figures = report(capsys, str(tmp_path))
    assert [group["found_tokens"] for group in figures["groups"]] == [0, 0]
    assert any("different weights (sha256:2, not sha256:1)" in note for note in figures["notes"])


def test_engines_whose_weights_are_not_known_share_with_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for second, engine in enumerate(("a:1", "b:1")):
        write(tmp_path, engine, [request(engine, second, range(8))], weights="")
    figures = report(capsys, str(tmp_path))
    assert [group["found_tokens"] for group in figures["groups"]] == [0, 0]
    assert sum("the fingerprint of its weights is not known" in note for note in figures["notes"]) == 2


def test_what_needs_to_be_known_of_the_traces_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torn = write(tmp_path, "a:1", [request("a:1", 1, range(8))], device="cuda")
    with torn.open("a", encoding="utf-8") as file:
        file.write('{"request": {"eng')
    write(tmp_path, "b:1", [], spec=None, weights="", more=[{"note": "b:1 is not observed: it keeps no KV"}])
    write(tmp_path, "c:1", [])
    (tmp_path / f"{PREFIX}d.jsonl").write_text("?\n", encoding="utf-8")
    notes = report(capsys, str(tmp_path))["notes"]
    for part in (
        "torn, as the process ended while it wrote it; dropped",
        "keeps its KV in cuda memory, from where this release has moved none on a card",
        "b:1 is not observed: it keeps no KV",
        "c:1 noted no request yet",
        "no trace of this release",
    ):
        assert any(part in note for note in notes), part


def test_without_a_request_the_command_fails_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a:1", [])
    assert main(["report", str(tmp_path)]) == 1
    assert "no request has been observed" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------- damaged traces

STRANGE: list[Any] = [
    *(None, True, -1, 0, 1.5, float("inf"), float("nan"), 2**63, 10**400, "", "x", "\ud800", "\x1b[2J", "9" * 5_000),
    *([], {}, [[]], [None], [[1, 2, 3]], [[-1, -1]], [[10**400, 1]], {"a": 10**400}),
]
"""Values of JSON in the place of a line's own."""


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"request": ' + b"[" * 100_000,
        b'{"cost": {"steps": 1e999}}',
        b'{"cost": {"steps": 1, "step_ns": 1' + b"0" * 400 + b"}}",
        b'{"weights": "\\ud800"}',
    ],
)
def test_a_line_that_cannot_be_read_is_dropped_and_the_others_count(
    two: Path, capsys: pytest.CaptureFixture[str], line: bytes
) -> None:
    before = report(capsys, str(two))
    path = next(two.iterdir())
    path.write_bytes(path.read_bytes() + line + b"\n")
    after = report(capsys, str(two))
    assert len(after["notes"]) <= len(before["notes"]) + 1
    assert [group["requests"] for group in after["groups"]] in ([6], [3, 3])
    assert main(["report", str(two)]) == 0


def test_no_value_of_a_trace_breaks_the_report(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = next(two.iterdir())
    whole = path.read_bytes().splitlines(keepends=True)
    draw = random.Random(45)
    for _ in range(150):
        at = draw.randrange(len(whole))
        changed = json.loads(whole[at])
        inner = changed
        while (key := draw.choice([*inner])) and isinstance(inner[key], dict) and draw.random() < 0.9:
            inner = inner[key]
        inner[key] = draw.choice(STRANGE)
        path.write_bytes(b"".join([*whole[:at], json.dumps(changed).encode() + b"\n", *whole[at + 1 :]]))
        for options in ([], ["--json", "--by-request"]):
            assert main(["report", str(two), *options]) in (0, 1, 2), changed
            capsys.readouterr().out.encode()


def test_a_pipe_in_a_folder_of_traces_is_not_waited_for(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(two / f"{PREFIX}pipe.jsonl")
    assert len(report(capsys, str(two))["engines"]) == 2


# ---------------------------------------------------------------------------------------------------- as text


TEXT = """\
llama: 2 engines, 6 requests
2026-11-18 11:06:40 to 2026-11-18 11:07:30 UTC (50 s)

of the prompts                            tokens   share
all tokens                                 1,734  100.0%
in the engines' own caches                   320   18.5%
a cluster would have more                    736   42.4%
computed even with a cluster                 678   39.1%
if engines shared nothing (offload only)     320   18.5%

saved: 714 ms of 1,408 ms of prefill (50.7%)
  4 of 6 requests load; ms saved by each: median 314.3, p90 314.3, most 314.3
  prefill 1,000 tokens/s, median of what engines measured
  loads 1 GB/s after 5 ms (assumed, not measured); pay from 16 tokens

hit rate of an LRU cache (all 1.31 MiB that were computed, raw):
"""


def test_the_text_says_what_the_figures_say(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(two)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(TEXT)
    page = (Path(__file__).parents[2] / "docs/observe.md").read_text(encoding="utf-8")
    assert TEXT.rpartition("\n\n")[0] in page, "the page shows what the command prints"
    assert text.endswith(
        """\
loaded of its prompt  requests  tokens  saved ms
nothing                      2       0         0
up to a quarter              1      16        11
more                         3     720       704

what observing took, by the clock of its own hooks:
engine  requests  us a request  steps  us a step  longest us
host:1        10          50.0    100       20.0          90
host:2        10          50.0    100       20.0          90
"""
    )


def test_no_line_of_the_text_is_wider_than_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = replace(SPEC, model="a-model-with-quite-a-long-name-70b-instruct")
    for engine in ("a-host-with-a-very-long-name.example.internal:4194304", "b:1"):
        many = [request(engine, second, [*range(200), second], rate=10**6) for second in range(100)]
        write(tmp_path, engine, many, spec=spec, device="cuda")
    tiers = ("--tier", "device=1MiB", "--tier", "host=1.5TiB", "--tier", "disk=10TiB")
    assert main(["report", str(tmp_path), *tiers]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert re.search(r"^disk +q8 +10 TiB", text, re.MULTILINE)


def test_the_picture_is_a_png(two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.png"
    assert main(["report", str(two), "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.startswith("llama: 2 engines")


# -------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist; give trace files, or folders of them"),
        (["--link", "nowhere.json"], "cannot read --link nowhere.json"),
        (["--gb-per-s", "0"], "--gb-per-s must be above 0"),
        (["--gb-per-s", "nan"], "--gb-per-s must be above 0"),
        (["--tier", "host=1GiB", "--tier", "host=2GiB"], "--tier names a tier twice"),
        (["--plot", "nowhere/at-all.png"], "its folder does not exist"),
    ],
)
def test_a_mistake_is_named(two: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    traces = [] if arguments[0] == "nowhere" else [str(two)]
    assert main(["report", *arguments, *traces]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("tier", ["host", "hots=1GiB", "host=1Gig"])
def test_a_tier_that_is_none_is_refused_by_the_parser(two: Path, tier: str) -> None:
    with pytest.raises(SystemExit):
        main(["report", str(two), "--tier", tier])


@pytest.mark.parametrize("content", ["", "[]", '{"paths": []}', '{"paths": [{"why": null}]}'])
def test_a_link_that_breakeven_did_not_print_is_refused(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    file = tmp_path / "link.json"
    file.write_text(content, encoding="utf-8")
    assert main(["report", str(two), "--link", str(file)]) == 1
    assert "is not the output of `kvcluster breakeven --json`" in capsys.readouterr().err
