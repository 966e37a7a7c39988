"""Names of release 0.2 that are still accepted: they do what those of today do, and each says which that is."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import kvcluster
from kvcluster.cli.main import main
from kvcluster.config import load
from kvcluster.config.loading import renamed
from kvcluster.errors import ConfigError
from kvcluster.testing import MemoryCluster
from tests.actors.worker import SPEC


def test_a_file_may_call_ram_bytes_device_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        '[shard]\ndevice_bytes = "2GiB"\n[groups.big]\nshards = 1\n[groups.big.shard]\ndevice_bytes = "3GiB"\n', "utf-8"
    )
    with caplog.at_level(logging.WARNING):
        config = load(file)
    assert (config.shard.ram_bytes, config.groups["big"].shard.ram_bytes) == (2 * 2**30, 3 * 2**30)
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "shard.device_bytes is called shard.ram_bytes now",
        "groups.big.shard.device_bytes is called groups.big.shard.ram_bytes now",
    ]


def test_what_is_given_beside_a_file_wins_by_either_name(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[shard]\ndevice_bytes = "2GiB"\n', "utf-8")
    assert load(file, {"shard": {"ram_bytes": "1GiB"}}).shard.ram_bytes == 2**30
    file.write_text('[shard]\nram_bytes = "2GiB"\n', "utf-8")
    assert load(file, {"shard": {"device_bytes": "1GiB"}}).shard.ram_bytes == 2**30


def test_both_names_of_one_setting_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"old name of shard\.ram_bytes: give only the latter"):
        load(overrides={"shard": {"ram_bytes": "1GiB", "device_bytes": "1GiB"}})


@pytest.mark.parametrize("given", [{"shard": 3}, {"groups": 3}, {"groups": {"a": 3}}, {"groups": {"a": {"shard": 3}}}])
def test_what_is_no_table_is_left_to_be_refused_by_its_own_name(given: dict[str, object]) -> None:
    assert renamed(given) == given
    with pytest.raises(ConfigError, match="must be a table"):
        load(overrides=given)


def test_python_callers_may_say_device_bytes() -> None:
    with (
        pytest.warns(DeprecationWarning, match="device_bytes is called ram_bytes now"),
        kvcluster.local(ray=False, device_bytes="8MiB") as cluster,
    ):
        (shard,) = cluster.client(SPEC).status()["shards"]
        assert shard["capacity_bytes"] == 8 * 2**20
    with (
        pytest.warns(DeprecationWarning, match="device_bytes is called ram_bytes now"),
        MemoryCluster(device_bytes="8MiB") as memory,
    ):
        assert memory.config.shard.ram_bytes == 8 * 2**20


def test_the_option_of_up_sets_the_setting_of_today(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setattr("kvcluster.cli.cluster._from_here", lambda config: asked.append(config) or _stop())
    assert main(["up", "--device-bytes", "2GiB"]) == 1
    assert asked[0].shard.ram_bytes == 2 * 2**30
    assert "--device-bytes is called --ram-bytes now" in caplog.text
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    assert "--device-bytes" not in capsys.readouterr().out


def test_a_tier_of_a_report_may_be_called_device(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["report", "--tier", "device=1GiB", str(tmp_path)]) == 1, "there is no trace"
    assert "the tier device is called ram now" in caplog.text


def _stop() -> None:
    raise ConfigError("enough is known")


def test_a_planner_that_is_gone_says_what_to_use() -> None:
    with pytest.raises(AttributeError, match="FetchWhatFits and ShipAbsent send queries"):
        _ = kvcluster.CostPlanner  # type: ignore[attr-defined]
