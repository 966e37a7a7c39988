"""The hash by which an operator sees which processes run with another configuration."""

from __future__ import annotations

from dataclasses import replace

from kvcluster.config import load
from kvcluster.config_hash import HEX_DIGITS, config_hash


def test_the_same_settings_have_the_same_hash_wherever_they_come_from() -> None:
    digest = config_hash(load())
    assert digest == config_hash(load(overrides={"shard": {"report_interval_ms": load().shard.report_interval_ms}}))
    assert len(digest) == HEX_DIGITS and not set(digest) - set("0123456789abcdef")


def test_each_setting_changes_the_hash() -> None:
    changed = [{"shards": 7}, {"shard": {"ram_bytes": 2**31}}, {"server": {"transports": ["grpc"]}}]
    assert len({config_hash(load(overrides=settings)) for settings in [{}, *changed]}) == 1 + len(changed)


def test_the_folder_of_one_process_does_not() -> None:
    config = load()
    elsewhere = replace(config, coordinator=replace(config.coordinator, state_dir="/elsewhere"))
    assert config_hash(config) == config_hash(elsewhere)
