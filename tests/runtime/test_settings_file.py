"""An operator's settings outlive the coordinator, and a file that cannot be read is an error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvcluster.core.ids import Epoch, Tenant
from kvcluster.core.messages import Done, GetStatus, SetPolicy, Status
from kvcluster.errors import ConfigError
from kvcluster.replay.core_stepper import build_request
from kvcluster.runtime.coordinator_host import CoordinatorHost
from kvcluster.runtime.policy_file import NAME, read_settings, write_settings
from kvcluster.transport.base import Unavailable
from tests.runtime.hosts import configured

BOUND_S = 20.0

OPERATOR = Tenant("operator")


def host_of(folder: Path, epoch: int) -> CoordinatorHost:
    config = configured()
    config = replace(config, coordinator=replace(config.coordinator, state_dir=str(folder)))
    return CoordinatorHost(Epoch(epoch), config, on_end=lambda leave: None)


def policy(host: CoordinatorHost) -> dict[str, str]:
    status = host.ask(build_request(GetStatus(), OPERATOR), BOUND_S)
    assert isinstance(status, Status)
    return dict(status.policy)


def test_a_cache_that_was_turned_off_is_off_when_the_coordinator_restarts(tmp_path: Path) -> None:
    host = host_of(tmp_path, 1)
    assert isinstance(host.ask(build_request(SetPolicy((("cache", "off"),)), OPERATOR), BOUND_S), Done)
    host.close()
    successor = host_of(tmp_path, 2)
    assert policy(successor)["cache"] == "off"
    successor.ask(build_request(SetPolicy((("cache", "on"), ("host.codec", "q4"))), OPERATOR), BOUND_S)
    successor.close()
    third = host_of(tmp_path, 3)
    assert (policy(third)["cache"], policy(third)["host.codec"]) == ("on", "q4")
    third.close()


def test_what_cannot_be_kept_is_not_called_done(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    host = host_of(folder, 1)
    folder.rename(tmp_path / "elsewhere")
    folder.write_text("no folder", encoding="utf-8")
    with pytest.raises(Unavailable, match="cannot keep the settings"):
        host.ask(build_request(SetPolicy((("cache", "off"),)), OPERATOR), BOUND_S)
    assert policy(host)["cache"] == "off", "it holds all the same"
    host.close()


@pytest.mark.parametrize("content", ["torn", "[]", '{"cache": 1}', "[" * 100_000])
def test_a_file_that_cannot_be_understood_is_said_so(tmp_path: Path, content: str) -> None:
    (tmp_path / NAME).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_settings(str(tmp_path))


def test_settings_that_are_none_any_more_are_said_so(tmp_path: Path) -> None:
    write_settings(str(tmp_path), (("host.codec", "q5"),))
    with pytest.raises(ConfigError, match="there is no codec 'q5'"):
        host_of(tmp_path, 1)


def test_nothing_was_set(tmp_path: Path) -> None:
    assert read_settings(str(tmp_path)) == ()
