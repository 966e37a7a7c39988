"""A quota file that changes under a running coordinator: what holds from when on, and what an unusable file does."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

import pytest

from kvcluster.config import Config, ServerConfig
from kvcluster.core import limits
from kvcluster.core.ids import Epoch, Tenant
from kvcluster.core.quotas import NO_QUOTAS
from kvcluster.core.tiers import Tier
from kvcluster.errors import ConfigError
from kvcluster.runtime.coordinator_host import CoordinatorHost
from kvcluster.runtime.quota_file import QuotaFile, read_quota_file
from kvcluster.watched_files import LOOK_S

RED = Tenant("red")


class Watched:
    """A quota file that is read by a clock of its own."""

    def __init__(self, path: Path, limit: int | str) -> None:
        self.path, self.now, self._written = path, 0.0, 0
        self.write(limit)
        self.file = QuotaFile(str(path), clock=lambda: self.now)

    def write(self, limit: int | str) -> None:
        self.path.write_text(f"[tenants.red]\nram = {{ limit = {limit} }}\n")
        self.path.chmod(0o600)
        self._written += 1
        os.utime(self.path, ns=(self._written, self._written))

    def limit(self) -> int | None:
        self.now += LOOK_S
        return self.file.quotas().of(RED).of(Tier.RAM).limit


def test_a_changed_file_holds_at_the_next_look(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "quotas", 5)
    assert watched.limit() == 5
    watched.write(3)
    assert watched.file.quotas().of(RED).of(Tier.RAM).limit == 5, "it is not looked at for each call"
    assert watched.limit() == 3


def test_the_last_good_quotas_hold_while_the_file_is_bad(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(tmp_path / "quotas", 5)
    watched.write("lots")
    assert watched.limit() == 5 and watched.limit() == 5
    assert len(caplog.records) == 1, "it is told once"
    assert "not valid TOML" in watched.file.trouble() and "The quotas that it had hold on" in watched.file.trouble()
    watched.path.unlink()
    assert watched.limit() == 5
    watched.write(4)
    assert watched.limit() == 4 and not watched.file.trouble()


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "quotas"
    path.write_text("")
    path.chmod(0o620)
    with pytest.raises(ConfigError, match=r"can be written by other users, who could grant any tenant anything"):
        QuotaFile(str(path))
    path.chmod(0o644)
    assert QuotaFile(str(path)).quotas() == NO_QUOTAS


def test_a_file_larger_than_the_bound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "quotas"
    path.write_text("#" * (limits.QUOTA_FILE_BYTES + 1))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is larger than"):
        read_quota_file(str(path))


def test_a_coordinator_that_restarts_serves_without_quotas_until_its_file_can_be_used(tmp_path: Path) -> None:
    file = QuotaFile(str(tmp_path / "none"), must_exist=False)
    assert file.quotas() == NO_QUOTAS and "cannot read the quota file" in file.trouble()


def test_without_a_file_there_are_no_quotas() -> None:
    with closing(QuotaFile("")) as file:
        taken: list[object] = []
        file.watch(lambda quotas, trouble: taken.append((quotas, trouble)))
        assert taken == [(NO_QUOTAS, "")]


def test_a_running_coordinator_takes_changed_quotas_without_a_call(tmp_path: Path) -> None:
    path = tmp_path / "quotas"
    watched = Watched(path, 5)
    host = CoordinatorHost(Epoch(1), Config(server=ServerConfig(quota_file=str(path))), on_end=lambda leave: None)

    def limit() -> int | None:
        return host.inspect(lambda: host.core.state.quotas.quotas.of(RED).of(Tier.RAM).limit)

    with closing(host):
        host.start()
        assert limit() == 5
        watched.write(3)
        give_up = time.monotonic() + 5
        while limit() != 3:
            assert time.monotonic() < give_up, "changed quotas take effect within five seconds"
            host.quotas._ended.wait(0.05)
        watched.write("lots")
        while not host.inspect(lambda: host.core.state.quotas.trouble):
            assert time.monotonic() < give_up + 5
            host.quotas._ended.wait(0.05)
        assert limit() == 3
