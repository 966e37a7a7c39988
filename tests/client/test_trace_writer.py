"""Traces: what is written is read again; what fails costs lines and never the engine."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core import hashing, limits
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.spec import KVSpec
from kvcluster.errors import ConfigError
from kvcluster.observe import trace_writer
from kvcluster.observe.reuse_prediction import ObservedRequest
from kvcluster.observe.trace_file import (
    HASH_BYTES,
    OLD,
    PREFIX,
    UNREAD_WEIGHTS,
    EngineTrace,
    TraceHeader,
    cost_line,
    header_line,
    read_traces,
    request_line,
    shortened,
)
from kvcluster.observe.trace_writer import TraceWriter, gentle_chain
from tests.waiting import eventually

SPEC = KVSpec.uniform(model="m", weights=UNREAD_WEIGHTS, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float16")
HEADER = TraceHeader("ab12", "host:1", SPEC, SPEC.whole_parts(), {"vllm": "0.32.0"})
REQUEST = ObservedRequest("host:1", 5, 40, 2, 1, ((7, 2), (9, 3)), (b"aaaaaa", b"bbbbbb", b"cccccc"), 900)
LIMIT = 8 * 2**20


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Callable[..., TraceWriter]]:
    made: list[TraceWriter] = []
    said: list[str] = []

    def begin(folder: Path = tmp_path, *, limit: int = LIMIT, header: TraceHeader = HEADER) -> TraceWriter:
        writer = TraceWriter(folder, header, limit_bytes=limit, log=said.append)
        writer.said = said  # type: ignore[attr-defined]
        made.append(writer)
        return writer

    yield begin
    for writer in made:
        writer.close()


def said(writer: TraceWriter) -> list[str]:
    lines: list[str] = writer.said  # type: ignore[attr-defined]
    return lines


def only(path: Path) -> EngineTrace:
    (trace,), strange = read_traces([path])
    assert not strange
    return trace


# ------------------------------------------------------------------------------------------------- what is kept


def test_what_is_written_is_read_again(write: Callable[..., TraceWriter], tmp_path: Path) -> None:
    writer = write()
    writer.start()
    writer.keep({"weights": "sha256:9"})
    writer.add(lambda: request_line(REQUEST))
    writer.add(lambda: {"note": "hello"})
    writer.cost.requests = 3
    writer.close()
    trace = only(tmp_path)
    assert (trace.header, trace.requests, trace.notes) == (HEADER, [REQUEST], ["hello"])
    assert (trace.weights, trace.cost.requests, trace.dropped) == ("sha256:9", 3, [])
    assert trace.spec is not None and trace.spec.weights == "sha256:9"


def test_a_trace_is_for_its_owner_alone(write: Callable[..., TraceWriter]) -> None:
    writer = write()
    writer.start()
    writer.close()
    assert stat.S_IMODE(writer.path.stat().st_mode) == 0o600


hashes = st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES)
counts = st.integers(0, 2**62)


@given(
    st.builds(
        ObservedRequest,
        engine=st.text(max_size=8).filter(str.isprintable),
        at_ns=counts,
        prompt_tokens=counts,
        asked=counts,
        local=counts,
        computed=st.lists(st.tuples(counts, counts), max_size=3).map(tuple),
        chain=st.lists(hashes, max_size=5).map(tuple),
        prefill_tokens_per_s=counts,
    )
)
def test_every_request_survives_its_line(tmp_path_factory: pytest.TempPathFactory, request: ObservedRequest) -> None:
    file = tmp_path_factory.mktemp("trace") / "one.jsonl"
    file.write_text("\n".join(map(json.dumps, (header_line(HEADER), request_line(request)))) + "\n", encoding="utf-8")
    assert only(file).requests == [request]


def test_no_token_and_no_whole_hash_is_in_a_line() -> None:
    chain = hashing.chain(hashing.root(NamespaceId(bytes(32))), list(range(10**6, 10**6 + 64)), 16)
    line = json.dumps(request_line(ObservedRequest("e", 1, 64, 4, 0, (), shortened(chain))))
    assert "1000000" not in line
    assert all(len(block) == HASH_BYTES for block in shortened(chain))
    assert shortened(chain)[0] == chain[0][:HASH_BYTES]


# --------------------------------------------------------------------------------------------------------- bounds


def test_of_a_trace_that_is_full_the_newest_half_is_kept(write: Callable[..., TraceWriter], tmp_path: Path) -> None:
    limit = 4_000
    writer = write(limit=limit)
    writer.keep({"weights": "sha256:9"})
    with patch.object(trace_writer, "_BATCH_S", 0.001):
        writer.start()
        for number in range(30):
            writer.add(lambda number=number: {"note": f"{number:03}" + "x" * 300})
            eventually(lambda: not writer._waiting)
        writer.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2 and files[0].name.endswith(OLD) is not files[1].name.endswith(OLD)
    assert sum(file.stat().st_size for file in files) <= limit
    trace = only(tmp_path)
    told = [int(note[:3]) for note in trace.notes]
    assert told == list(range(told[0], 30)) and told[0] > 0
    assert trace.weights == "sha256:9", "each half says what holds for all"


def test_what_would_wait_beyond_the_bound_is_dropped_and_counted(
    write: Callable[..., TraceWriter], tmp_path: Path
) -> None:
    writer = write()
    writer.add(lambda: request_line(REQUEST), limits.TRACE_WAITING_TOKENS - 1)
    writer.add(lambda: {"note": "too much"}, 2)
    writer.add(lambda: {"note": "fits"}, 1)
    writer.start()
    writer.close()
    trace = only(tmp_path)
    assert (trace.notes, trace.cost.dropped) == (["fits"], 1)


def test_a_folder_keeps_its_newest_files(write: Callable[..., TraceWriter], tmp_path: Path) -> None:
    for number in range(limits.TRACE_FILES + 5):
        old = tmp_path / f"{PREFIX}gone-{number}.jsonl"
        old.write_bytes(b"")
        os.utime(old, (number, number))
    (tmp_path / "notes.txt").write_bytes(b"")
    writer = write()
    writer.start()
    writer.close()
    left = {file.name for file in tmp_path.iterdir()}
    assert len(left) == limits.TRACE_FILES + 1 and writer.path.name in left and "notes.txt" in left
    assert f"{PREFIX}gone-5.jsonl" not in left and f"{PREFIX}gone-6.jsonl" in left


# --------------------------------------------------------------------------------------------------------- faults


def test_a_process_that_is_killed_within_a_line_loses_that_line_and_it_is_named(tmp_path: Path) -> None:
    lines = [json.dumps(line) for line in (header_line(HEADER), request_line(REQUEST), request_line(REQUEST))]
    file = tmp_path / f"{PREFIX}a.jsonl"
    file.write_text("\n".join(lines)[:-20], encoding="utf-8")
    trace = only(file)
    assert trace.requests == [REQUEST]
    assert trace.dropped == [f"{file}, line 3: torn, as the process ended while it wrote it; dropped"]


def test_a_line_that_cannot_be_read_costs_no_other(tmp_path: Path) -> None:
    good = json.dumps(request_line(REQUEST))
    bad = [
        "{",
        "[]",
        '{"what": 1}',
        '{"request": {}}',
        '{"cost": {"strange": 1}}',
        good.replace('"asked": 2', '"asked": -2'),
        good.replace('"chain": "', '"chain": "YQ=='),
        '{"request": [1]}',
    ]
    file = tmp_path / f"{PREFIX}a.jsonl"
    file.write_text("\n".join([json.dumps(header_line(HEADER)), *bad, good, ""]), encoding="utf-8")
    trace = only(file)
    assert trace.requests == [REQUEST]
    assert trace.dropped == [f"{file}: {len(bad)} line(s) cannot be read, as after a full disk; dropped"]


def test_a_file_that_is_no_trace_is_named_and_costs_no_other(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}a.jsonl").write_text(json.dumps(header_line(HEADER)), encoding="utf-8")
    strange = tmp_path / f"{PREFIX}b.jsonl"
    strange.write_text('{"kvcluster_trace": 99}\n', encoding="utf-8")
    traces, named = read_traces([tmp_path])
    assert [trace.header for trace in traces] == [HEADER]
    assert [line.partition(":")[0] for line in named] == [str(strange)]
    with pytest.raises(ConfigError, match="no trace of this release"):
        read_traces([strange])
    with pytest.raises(ConfigError, match="start an engine in observe mode first"):
        (tmp_path / "empty").mkdir()
        read_traces([tmp_path / "empty"])
    with pytest.raises(ConfigError, match="does not exist"):
        read_traces([tmp_path / "nothing"])


def test_a_folder_that_cannot_be_made_is_told_once_and_disturbs_nothing(
    write: Callable[..., TraceWriter], tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    writer = write(tmp_path / "file" / "folder")
    with patch.object(trace_writer, "_BATCH_S", 0.001):
        writer.start()
        for _ in range(3):
            writer.add(lambda: request_line(REQUEST))
            eventually(lambda: not writer._waiting)
    writer.close()
    assert len(said(writer)) == 1
    assert "cannot write the trace" in said(writer)[0] and "The engine is not affected" in said(writer)[0]
    assert writer.cost.dropped >= 3


class FullDisk:
    """os.write that writes half of what it gets and then finds the disk full, as often as it is told."""

    def __init__(self, times: int) -> None:
        self._times = times
        self._write = os.write

    def __call__(self, file: int, data: Any) -> int:
        if not self._times:
            return self._write(file, data)
        if len(data) > 1 and not getattr(self, "half", False):
            self.half = True
            return self._write(file, data[: len(data) // 2])
        self.half = False
        self._times -= 1
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_was_full_is_used_again_and_leaves_no_torn_line(
    write: Callable[..., TraceWriter], tmp_path: Path
) -> None:
    writer = write()
    full = FullDisk(times=2)
    with (
        patch.object(trace_writer, "_BATCH_S", 0.001),
        patch.object(trace_writer, "RETRY_S", 0.0),
        patch.object(trace_writer.os, "write", full),
    ):
        writer.start()
        for number in range(4):
            writer.add(lambda number=number: {"note": str(number)})
            eventually(lambda: not writer._waiting)
        eventually(lambda: not full._times)
        writer.close()
    trace = only(tmp_path)
    assert trace.dropped == []
    assert trace.notes and trace.notes[-1] == "3"
    assert trace.cost.dropped >= 2
    assert len(said(writer)) == 1 and "No space left on device" in said(writer)[0]


def test_a_line_that_cannot_be_made_is_told_and_costs_no_other(
    write: Callable[..., TraceWriter], tmp_path: Path
) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("a mistake of ours")

    writer = write()
    writer.add(broken)
    writer.add(lambda: request_line(REQUEST))
    writer.start()
    writer.close()
    assert only(tmp_path).requests == [REQUEST]
    assert ["a mistake of ours" in line for line in said(writer)] == [True]


def test_what_comes_after_the_end_is_dropped(write: Callable[..., TraceWriter], tmp_path: Path) -> None:
    writer = write()
    writer.start()
    writer.close()
    writer.add(lambda: request_line(REQUEST))
    writer.close()
    assert only(tmp_path).requests == []


# --------------------------------------------------------------------------------------------------------- hashes


def test_a_chain_that_is_computed_gently_is_the_same() -> None:
    parent = BlockHash(bytes(range(32)))
    tokens = list(range(16 * 200 + 5))
    extra = {0: b"x", 63: b"y", 64: b"z", 199: b"w"}
    assert gentle_chain(parent, tokens, 16, extra) == hashing.chain(parent, tokens, 16, extra)
    assert gentle_chain(parent, [], 16, {}) == []


def test_costs_are_written_as_they_are(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, HEADER, limit_bytes=LIMIT, log=print)
    writer.cost.steps, writer.cost.step_ns, writer.cost.worst_step_ns = 3, 40, 30
    assert cost_line(writer.cost)["cost"] == {
        "steps": 3,
        "step_ns": 40,
        "worst_step_ns": 30,
        "requests": 0,
        "request_ns": 0,
        "dropped": 0,
    }
