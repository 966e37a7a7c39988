"""The fingerprint of a checkpoint: equal exactly if its names and bytes are, and read as seldom as possible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvcluster.engines.vllm import weights
from kvcluster.errors import CallerError
from tests.client.build import BOUND_S

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Cache:
    """A folder for what has been read, and how often anything was."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.reads = 0
        self.during: Callable[[], object] = lambda: None
        read = weights._read

        def counting(files: list[tuple[str, Path]]) -> str:
            self.reads += 1
            digest = read(files)
            self.during()
            return digest

        monkeypatch.setattr(weights, "_read", counting)

    def __call__(self, path: Path) -> str:
        return weights.fingerprint(str(path), self.path)


@pytest.fixture
def fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    return Cache(tmp_path / "cache", monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "model")


def checkpoint(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "weights.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "sub" / "more.bin").write_bytes(b"more")
    return folder


# ------------------------------------------------------------------------------------------------ what it depends on


def test_a_snapshot_of_a_hub_is_its_commit_and_is_not_read(tmp_path: Path, fingerprint: Cache) -> None:
    assert fingerprint(checkpoint(tmp_path / "snapshots" / COMMIT)) == f"commit:{COMMIT}"
    assert fingerprint.reads == 0


@pytest.mark.parametrize("folders", [("snapshots", COMMIT[:39]), ("snapshots", "main"), ("elsewhere", COMMIT)])
def test_what_only_looks_like_one_is_read(tmp_path: Path, fingerprint: Cache, folders: tuple[str, str]) -> None:
    assert fingerprint(checkpoint(tmp_path.joinpath(*folders))).startswith("sha256:")


def test_it_does_not_depend_on_where_a_checkpoint_lies(tmp_path: Path, model: Path, fingerprint: Cache) -> None:
    assert fingerprint(checkpoint(tmp_path / "another" / "place")) == fingerprint(model)


@pytest.mark.parametrize("name", ["config.json", "weights.bin", "sub/more.bin"])
def test_one_byte_makes_another(model: Path, fingerprint: Cache, name: str) -> None:
    before = fingerprint(model)
    content = bytearray((model / name).read_bytes())
    content[-1] ^= 1
    (model / name).write_bytes(content)
    os.utime(model / name, ns=(1, 1))
    assert fingerprint(model) != before


@pytest.mark.parametrize(("name", "other"), [("weights.bin", "weights.bim"), ("sub/more.bin", "more.bin")])
def test_one_name_makes_another(model: Path, fingerprint: Cache, name: str, other: str) -> None:
    before = fingerprint(model)
    (model / name).rename(model / other)
    assert fingerprint(model) != before


def test_one_file_more_makes_another_and_a_hidden_one_does_not(model: Path, fingerprint: Cache) -> None:
    before = fingerprint(model)
    (model / ".note").write_text("x")
    (model / ".git").mkdir()
    (model / ".git" / "config").write_text("x")
    assert fingerprint(model) == before
    (model / "empty").touch()
    assert fingerprint(model) != before


def test_bytes_may_not_move_from_one_file_to_the_next(tmp_path: Path, fingerprint: Cache) -> None:
    folders = []
    for name, contents in (("one", (b"ab", b"c")), ("other", (b"a", b"bc"))):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        for number, content in enumerate(contents):
            (folders[-1] / str(number)).write_bytes(content)
    assert fingerprint(folders[0]) != fingerprint(folders[1])


def test_one_file_is_a_checkpoint_too(model: Path, fingerprint: Cache) -> None:
    one = fingerprint(model / "weights.bin")
    assert one.startswith("sha256:") and one != fingerprint(model)


def test_links_are_followed(tmp_path: Path, model: Path, fingerprint: Cache) -> None:
    before = fingerprint(model)
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in ("config.json", "weights.bin", "sub"):
        (linked / name).symlink_to(model / name)
    assert fingerprint(linked) == before


# ----------------------------------------------------------------------------------------------- how often it is read


def test_what_was_read_is_remembered_by_size_and_time(model: Path, fingerprint: Cache) -> None:
    one = fingerprint(model)
    assert fingerprint(model) == one
    assert fingerprint.reads == 1
    os.utime(model / "weights.bin", ns=(5, 5))
    assert fingerprint(model) == one, "read again, and the same"
    assert fingerprint.reads == 2


def test_the_latest_are_remembered(tmp_path: Path, fingerprint: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_REMEMBERED", 2)
    folders = []
    for number in range(3):
        folders.append(tmp_path / f"model-{number}")
        folders[-1].mkdir()
        (folders[-1] / "weights").write_bytes(bytes([number]))
        fingerprint(folders[-1])
    assert fingerprint.reads == 3
    for folder in folders[1:]:
        fingerprint(folder)
    assert fingerprint.reads == 3
    fingerprint(folders[0])
    assert fingerprint.reads == 4


def test_of_two_processes_at_once_one_reads_and_the_other_waits(tmp_path: Path, model: Path) -> None:
    log = tmp_path / "log"
    code = f"""
import importlib.util, sys
from pathlib import Path
found = importlib.util.spec_from_file_location("weights", {weights.__file__!r})  # alone: vLLM takes its time
weights = importlib.util.module_from_spec(found)
found.loader.exec_module(weights)
read = weights._read
def noting(files):
    with open({str(log)!r}, "a") as file:
        file.write("read\\n")
    return read(files)
weights._read = noting
print("ready", flush=True)
sys.stdin.readline()
print(weights.fingerprint({str(model)!r}, Path({str(tmp_path / "cache")!r})))
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    told = [process.communicate(timeout=BOUND_S)[0].strip() for process in started]
    assert told[0] == told[1] == weights.fingerprint(str(model), tmp_path / "elsewhere")
    assert log.read_text() == "read\n"


def test_threads_of_one_process_read_once_too(model: Path, fingerprint: Cache) -> None:
    gate = threading.Barrier(4)

    def read(_: int) -> str:
        gate.wait(BOUND_S)
        return fingerprint(model)

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(read, range(4)))) == 1
    assert fingerprint.reads == 1


# ----------------------------------------------------------------------------------------------------- what is wrong


def test_a_checkpoint_that_changes_while_it_is_read_is_refused_and_not_remembered(
    model: Path, fingerprint: Cache
) -> None:
    fingerprint.during = lambda: (model / "weights.bin").write_bytes(b"another")
    with pytest.raises(CallerError, match="changed while it was read; start the engine when it is complete"):
        fingerprint(model)
    fingerprint.during = lambda: None
    assert fingerprint(model)
    assert fingerprint.reads == 2


def test_one_that_vanishes_while_it_is_read_is_refused(model: Path, fingerprint: Cache) -> None:
    fingerprint.during = (model / "weights.bin").unlink
    with pytest.raises(CallerError, match=r"cannot read .*weights\.bin: No such file"):
        fingerprint(model)


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_without_files_has_no_weights(tmp_path: Path, fingerprint: Cache, there: bool) -> None:
    if there:
        (tmp_path / "empty" / ".hidden").mkdir(parents=True)
    with pytest.raises(
        CallerError, match=r"holds no files, so its weights have no fingerprint; give weights='sha256:\.\.\.'"
    ):
        fingerprint(tmp_path / "empty")


def test_a_link_to_nothing_is_named(model: Path, fingerprint: Cache) -> None:
    (model / "lost.bin").symlink_to(model / "nowhere")
    with pytest.raises(CallerError, match=r"cannot read .*lost\.bin: No such file"):
        fingerprint(model)


def test_a_file_that_cannot_be_read_is_named(model: Path, fingerprint: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **more: Any) -> Any:
        if path.name == "weights.bin":
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CallerError, match=r"cannot read .*weights\.bin: Permission denied"):
        fingerprint(model)


# ----------------------------------------------------------------------------------------- where nothing can be kept


def test_where_nothing_can_be_kept_it_is_read_each_time(tmp_path: Path, model: Path, fingerprint: Cache) -> None:
    fingerprint.path.write_text("a file where a folder should be")
    one = fingerprint(model)
    assert fingerprint(model) == one
    assert fingerprint.reads == 2


@pytest.mark.parametrize("kept", ["", "{", "[]", '"x"', "\x00"])
def test_a_kept_fingerprint_that_makes_no_sense_is_computed_again(model: Path, fingerprint: Cache, kept: str) -> None:
    fingerprint.path.mkdir()
    (fingerprint.path / "weights.json").write_text(kept)
    one = fingerprint(model)
    assert fingerprint(model) == one
    assert fingerprint.reads == 1
    assert list(json.loads((fingerprint.path / "weights.json").read_text()).values()) == [one]


def test_nothing_half_written_is_ever_seen(model: Path, fingerprint: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path, target: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fails)
    one = fingerprint(model)
    assert fingerprint(model) == one
    assert fingerprint.reads == 2
    assert not (fingerprint.path / "weights.json").exists()


def test_a_user_keeps_them_in_the_folder_for_such_things(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    weights.fingerprint(str(model))
    assert (tmp_path / ".cache" / "kvcluster" / "weights.json").exists()
