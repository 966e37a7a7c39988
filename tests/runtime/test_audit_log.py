"""The audit log: what is recorded of operators' calls, and that it bounds itself."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcluster.config import Config
from kvcluster.core import limits
from kvcluster.core.ids import Epoch, ShardId, Tenant
from kvcluster.core.messages import Drain, GetStatus, Purge, Request, SetPolicy
from kvcluster.errors import ConfigError
from kvcluster.runtime.audit_log import AuditLog, audited, set_up_audit
from kvcluster.runtime.coordinator_host import CoordinatorHost
from tests.waiting import eventually

OPS, RED = Tenant("-"), Tenant("red")


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "audit.jsonl"
    set_up_audit(str(path))
    yield path
    set_up_audit("")


def lines(path: Path) -> list[dict[str, Any]]:
    set_up_audit("")  # what waits is written
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_call_of_an_operator_is_a_line_with_who_what_and_what_became_of_it(path: Path) -> None:
    host = CoordinatorHost(Epoch(1), Config(), on_end=lambda leave: None)
    host.start()
    for question in (
        SetPolicy((("cache", "off"),)),
        SetPolicy((("nonsense", "1"),)),
        Drain(ShardId("s9")),
        GetStatus(),
    ):
        host.ask(lambda call, question=question: Request(call, OPS, None, question, True), 1.0)  # type: ignore[misc]
    host.ask(lambda call: Request(call, RED, None, Purge(model="m"), False), 1.0)
    host.close()
    found = lines(path)
    assert [line["call"] for line in found] == ["SetPolicy", "SetPolicy", "Drain", "Purge"]
    assert [line["outcome"][:12] for line in found] == ["done", "refused (bad", "done: nothin", "done: 0 bloc"]
    assert [(line["tenant"], line["operator"]) for line in found] == [("-", True)] * 3 + [("red", False)]
    assert found[0]["parameters"] == "settings=(('cache', 'off'),)" and found[0]["time"].endswith("Z")
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_a_file_that_was_read_again_is_a_line(path: Path) -> None:
    audited("quota_file_read", path="/etc/quotas", tenants=3)
    (line,) = lines(path)
    assert (line["call"], line["parameters"]) == ("quota_file_read", "path='/etc/quotas', tenants=3")


def test_what_tenants_do_pushes_out_nothing_that_operators_did(path: Path) -> None:
    for _ in range(100):
        audited("Purge", RED, operator=False)
    audited("Drain", OPS, shard="s1")
    found = lines(path)
    assert [line["call"] for line in found] == ["Purge", "Drain"] and found[1]["left_out"] == 99


def test_a_text_is_cut_and_a_large_file_gives_way_to_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "AUDIT_FILE_BYTES", 1_000)
    for _ in range(3):
        audited("SetPolicy", OPS, settings="x" * 10_000)
    set_up_audit("")
    assert len(path.with_name("audit.jsonl.1").read_text().splitlines()) == 2
    assert len(path.read_text().splitlines()) == 1
    assert all(len(line) < 1_000 for line in path.read_text().splitlines())


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"log\.audit_file .* cannot be written: No such file"):
        AuditLog(str(tmp_path / "none" / "audit"))


class FullOnce:
    """A file on a disk that has room for ten bytes of the first write, and for all that follow."""

    def __init__(self, file: Any) -> None:
        self._file, self._full = file, True
        self.fileno, self.close = file.fileno, file.close

    def write(self, line: bytes) -> int:
        line, self._full = (line[:10] if self._full else line), False
        return int(self._file.write(line))


def test_a_line_that_was_cut_short_spoils_none_that_follow(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    log = AuditLog(str(path))
    log._file = FullOnce(log._file)
    log.add({"call": "Drain"}, OPS, operator=True)
    eventually(lambda: log._left_out == 1)
    for call in ("Purge", "Probe"):
        log.add({"call": call}, OPS, operator=True)
    log.close()
    cut, *whole = path.read_text(encoding="utf-8").splitlines()
    assert len(cut) == 10
    assert [json.loads(line) for line in whole] == [{"call": "Purge", "left_out": 1}, {"call": "Probe"}]


def test_a_call_does_not_wait_for_a_file_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "AUDIT_LINES", 2)
    monkeypatch.setattr(AuditLog, "_run", lambda self: None)
    log = AuditLog(str(tmp_path / "audit"))
    for _ in range(5):
        log.add({"call": "Drain"}, OPS, operator=True)
    assert log._left_out == 3
    log._file.close()
