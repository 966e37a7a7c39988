from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster import config
from kvcluster.config import Config
from kvcluster.config.ports import port_table, shard_ports
from kvcluster.errors import ConfigError

UNITS = {"": 1, "b": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def written(folder: Path, text: str) -> Path:
    path = folder / "kvcluster.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_given_is_the_defaults_and_they_pass_the_checks() -> None:
    assert config.load() == config.load(None, {}) == Config()


def test_a_file_sets_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    path = written(tmp_path, 'shards = 3\n[shard]\nram_bytes = "2 GiB"\n[coordinator]\nlow_free = 0\n')
    loaded = config.load(path)
    assert (loaded.shards, loaded.shard.ram_bytes, loaded.coordinator.low_free) == (3, 2**31, 0.0)
    assert isinstance(loaded.coordinator.low_free, float)
    assert loaded.client == Config().client
    assert dataclasses.replace(loaded.shard, ram_bytes=2**30) == Config().shard
    assert config.load(str(path)) == loaded


def test_transports_are_a_list_in_a_file(tmp_path: Path) -> None:
    loaded = config.load(written(tmp_path, '[client]\ntransports = ["tcp", "grpc"]\n'))
    assert loaded.client.transports == ("tcp", "grpc")
    assert loaded.server.transports == ("shm", "tcp", "grpc")


def test_overrides_win_key_by_key(tmp_path: Path) -> None:
    path = written(tmp_path, "shards = 3\n[server]\nport = 7071\nthreads = 4\n")
    loaded = config.load(path, {"server": {"port": 7072}, "client": {"deadline_ms": 50}})
    assert (loaded.shards, loaded.server.port, loaded.server.threads, loaded.client.deadline_ms) == (3, 7072, 4, 50)


def test_an_override_that_is_no_table_does_not_pass_for_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shard must be a table of settings, not 3"):
        config.load(written(tmp_path, "[shard]\nlease_ttl_ms = 200\n"), {"shard": 3})
    assert config.load(written(tmp_path, "shard = 3\n"), {"shard": {}}) == Config()


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config.load(), "shards", 2)  # noqa: B010 - an assignment would not pass the type checker


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (
            {"shard": {"ram_byte": 1}},
            r"unknown setting shard\.ram_byte; known here: ram_bytes, gpu_bytes, num_gpus, gpu_device, host_bytes",
        ),
        ({"lease_ttl_ms": 1}, "unknown setting lease_ttl_ms; known here: name, shards, volume_wait_ms"),
        ({"client": {"deadline": 1}}, r"unknown setting client\.deadline"),
    ],
)
def test_an_unknown_setting_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config.load(overrides=values)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"shards": "2"}, "shards must be of type int, such as 1, not '2'"),
        ({"shards": True}, "shards must be of type int"),
        ({"shards": 2.0}, "shards must be of type int"),
        ({"server": {"insecure": 1}}, r"server\.insecure must be of type bool"),
        ({"server": {"host": 127}}, r"server\.host must be of type str"),
        ({"coordinator": {"low_free": "5 %"}}, r"coordinator\.low_free must be of type float"),
        ({"coordinator": {"low_free": True}}, r"coordinator\.low_free must be of type float"),
        ({"coordinator": {"low_free": 10**309}}, r"coordinator\.low_free must be a number such as 0\.05"),
        ({"shard": 3}, "shard must be a table of settings, not 3"),
        (
            {"client": {"transports": "tcp"}},
            r"client\.transports must be a list of texts, such as \['shm'",
        ),
        ({"client": {"transports": [1]}}, r"client\.transports must be a list of texts"),
        ({"shard": {"ram_bytes": "much"}}, r"shard\.ram_bytes: 'much' is no size"),
        ({"shard": {"ram_bytes": True}}, r"shard\.ram_bytes: True is no size"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config.load(overrides=values)


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("", "shards", 0, "shards must be at least 1"),
        ("", "membership_ttl_ms", 1_000, "must exceed two report intervals"),
        ("", "stall_ms", 0, "stall_ms must be positive"),
        ("server", "port", -1, "between 0 and 65535"),
        ("server", "port", 65_536, "between 0 and 65535"),
        ("server", "report_port", 65_536, "server.report_port must be between 0 and 65535"),
        ("server", "report_port", 7_070, "server.report_port must differ from server.port"),
        ("server", "threads", 1, "server.threads must be at least 2"),
        ("metrics", "port", 65_535, "metrics.port must be at most 65471: shards take ports after it"),
        ("metrics", "port", 7069, "server.port and metrics.port share a port; move one of them"),
        ("log", "format", "xml", "log.format must be one of text, json, not 'xml'"),
        ("log", "lines_per_second", 0, "log.lines_per_second must be at least 1"),
        ("server", "transports", ["shm", "tcp"], "server.transports must name grpc, since control goes over it"),
        ("server", "transports", ["grpc", "rdma"], "server.transports must be some of shm, tcp, grpc, not 'rdma'"),
        ("client", "transports", [], "client.transports must name one of shm, tcp, grpc"),
        (
            "events",
            "endpoint",
            "127.0.0.1:5557",
            "events.endpoint must be tcp://host:port, such as tcp://127.0.0.1:5557",
        ),
        (
            "events",
            "endpoint",
            "tcp://127.0.0.1:65536",
            "events.endpoint must be tcp://host:port, such as tcp://127.0.0.1:5557",
        ),
        (
            "events",
            "endpoint",
            "tcp://0.0.0.0:5557",
            "events.endpoint: every process that reaches tcp://0.0.0.0:5557 reads",
        ),
        ("events", "endpoint", "tcp://*:5557", "Use a loopback address, or TLS"),
        ("events", "replay", "tcp://127.0.0.1:5558", "events.replay needs events.endpoint"),
        ("events", "buffer_batches", 0, "events.buffer_batches must be at least 1"),
        ("client", "store_niceness", 20, "client.store_niceness must be between 0 and 19"),
        (
            "coordinator",
            "eviction_policy",
            "fifo",
            "coordinator.eviction_policy must be one of lru, gdsf, not 'fifo'",
        ),
        ("client", "transports", ["udp"], "client.transports must be some of shm, tcp, grpc, not 'udp'"),
        ("coordinator", "low_free", -0.1, "low_free <= high_free"),
        ("coordinator", "low_free", 0.2, "low_free <= high_free"),
        ("coordinator", "low_free", float("nan"), "low_free <= high_free"),
        ("coordinator", "high_free", 0.95, "low_free <= high_free"),
        ("coordinator", "pinned_share", -0.1, "pinned_share must be between 0 and 0.9"),
        ("coordinator", "pinned_share", 1.0, "pinned_share must be between 0 and 0.9"),
        ("coordinator", "sequence_share", -0.1, "sequence_share must be between 0 and 0.9"),
        ("coordinator", "sequence_share", 1.0, "sequence_share must be between 0 and 0.9"),
        ("coordinator", "sequence_ttl_ms", 0, "coordinator.sequence_ttl_ms must be positive"),
        ("coordinator", "private_grace_ms", 29_999, "private_grace_ms must be at least sequence_ttl_ms"),
        ("coordinator", "run_blocks", 0, "run_blocks must be between 1 and 8192"),
        ("coordinator", "run_blocks", 8_193, "run_blocks must be between 1 and 8192"),
        ("coordinator", "ticket_ttl_ms", 0, "coordinator.ticket_ttl_ms must be positive"),
        ("coordinator", "refresh_ms", -1, "coordinator.refresh_ms must be positive"),
        ("coordinator", "rebuild_grace_ms", 0, "coordinator.rebuild_grace_ms must be positive"),
        ("coordinator", "q4_error_budget", float("inf"), "coordinator.q4_error_budget must be a number of at least 0"),
        ("coordinator", "q4_error_budget", float("nan"), "coordinator.q4_error_budget must be a number of at least 0"),
        ("coordinator", "hold_ms", -1, "coordinator.hold_ms must not be negative"),
        ("shard", "ram_bytes", 4_095, "shard.ram_bytes must be at least 4KiB"),
        ("shard", "num_gpus", 1, "shard.num_gpus needs shard.gpu_bytes: the shard's pool on its GPU"),
        (
            "shard",
            "num_gpus",
            1.5,
            "shard.num_gpus must be 1 or a part of one GPU with four decimals at most, such as 0.5, not 1.5",
        ),
        ("shard", "num_gpus", 0.00001, "shard.num_gpus must be 1 or a part of one GPU with four decimals at most"),
        (
            "shard",
            "num_gpus",
            -1,
            "shard.num_gpus must be 1 or a part of one GPU with four decimals at most, such as 0.5, not -1",
        ),
        ("shard", "disk_bytes", "1GiB", "shard.disk_bytes needs shard.disk_dir: a folder on a local drive"),
        (
            "shard",
            "disk_dir",
            "/drive",
            "shard.disk_dir needs shard.disk_bytes: the size of the disk tier in that folder",
        ),
        ("shard", "lease_ttl_ms", 99, "shard.lease_ttl_ms must be at least 100"),
        ("shard", "report_interval_ms", 0, "shard.report_interval_ms must be positive"),
        ("shard", "report_interval_ms", 2_500, "must exceed two report intervals"),
        ("shard", "report_retry_ms", 0, "shard.report_retry_ms must be positive"),
        ("shard", "stop_ms", -1, "shard.stop_ms must not be negative"),
        ("shard", "stop_ms", 3_600_001, "shard.stop_ms must be at most 3600000"),
        ("client", "deadline_ms", -1, "client.deadline_ms must not be negative"),
        ("client", "connect_ms", -5, "client.connect_ms must be positive"),
        ("client", "store_wait_ms", -1, "client.store_wait_ms must not be negative"),
    ],
)
def test_what_cannot_work_is_refused_with_the_rule_it_breaks(section: str, key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        config.load(overrides={section: {key: value}} if section else {key: value})


ON_DISK = {"host_bytes": "1GiB", "disk_bytes": "0.5TiB", "disk_dir": "/drive"}


def test_a_disk_tier_is_a_size_a_folder_and_a_host_tier(tmp_path: Path) -> None:
    sizes = "".join(f'{name} = "{value}"\n' for name, value in ON_DISK.items())
    shard = config.load(written(tmp_path, f'[shard]\n{sizes}disk_file_bytes = "64MiB"\n')).shard
    assert (shard.disk_bytes, shard.disk_dir, shard.disk_file_bytes) == (2**39, "/drive", 2**26)
    assert config.load(overrides={"shard": ON_DISK}).shard.disk_file_bytes == 0
    none = Config().shard
    assert (none.disk_bytes, none.disk_dir, none.disk_file_bytes) == (0, "", 0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"disk_dir": ""}, "shard.disk_bytes needs shard.disk_dir: a folder on a local drive"),
        ({"disk_bytes": 0}, "shard.disk_dir needs shard.disk_bytes: the size of the disk tier in that folder"),
        ({"host_bytes": 0}, "shard.disk_bytes needs shard.host_bytes: pages reach the disk from the host tier"),
        ({"gpu_bytes": 1}, "shard.gpu_bytes must be at least 4KiB"),
        ({"gpu_bytes": "1GiB", "host_bytes": 0, "disk_bytes": 0, "disk_dir": ""}, "gpu_bytes needs shard.host_bytes"),
        ({"gpu_device": "0"}, "shard.gpu_device must be cuda or twin, not '0'"),
        ({"disk_dir": "drive"}, "shard.disk_dir must be an absolute path, not 'drive': shards run in folders of"),
        ({"disk_dir": "~/drive"}, "shard.disk_dir must be an absolute path, not '~/drive'"),
        ({"disk_bytes": "some"}, "shard.disk_bytes: 'some' is no size"),
        ({"disk_file_bytes": "some"}, "shard.disk_file_bytes: 'some' is no size"),
        ({"disk_file_bytes": -1}, "shard.disk_file_bytes: -1 is no size"),
        ({"disk_dir": 1}, "shard.disk_dir must be of type str"),
    ],
)
def test_a_disk_tier_that_cannot_be_is_refused_with_what_it_lacks(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        config.load(overrides={"shard": ON_DISK | changed})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("server", "port", 0),
        ("server", "port", 65_535),
        ("server", "threads", 2),
        ("server", "transports", ("grpc",)),
        ("client", "transports", ("tcp",)),
        ("events", "endpoint", "tcp://127.0.0.1:0"),
        ("events", "endpoint", "tcp://[::1]:65535"),
        ("events", "buffer_batches", 1),
        ("coordinator", "low_free", 0.1),
        ("coordinator", "high_free", 0.9),
        ("coordinator", "pinned_share", 0),
        ("coordinator", "pinned_share", 0.9),
        ("coordinator", "sequence_share", 0),
        ("coordinator", "sequence_share", 0.9),
        ("coordinator", "private_grace_ms", 30_000),
        ("coordinator", "run_blocks", 1),
        ("coordinator", "run_blocks", 8_192),
        ("coordinator", "hold_ms", 0),
        ("client", "deadline_ms", 1),
        ("shard", "ram_bytes", 4_096),
        ("shard", "lease_ttl_ms", 100),
        ("shard", "report_interval_ms", 2_499),
        ("client", "store_wait_ms", 0),
    ],
)
def test_the_edges_of_the_rules_are_allowed(section: str, key: str, value: Any) -> None:
    loaded = config.load(overrides={section: {key: value}})
    assert getattr(getattr(loaded, section), key) == value


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*gone\.toml: No such file"):
        config.load(tmp_path / "gone.toml")


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5557", "tcp://*:5557", "tcp://localhost:5557"])
def test_events_go_beyond_loopback_only_where_that_is_meant(endpoint: str) -> None:
    meant = {"endpoint": endpoint, "insecure": True}
    assert config.load(overrides={"events": meant}).events.endpoint == endpoint
    with pytest.raises(ConfigError, match="reads the prompts of all tenants"):
        config.load(overrides={"events": {"endpoint": endpoint}})


@pytest.mark.parametrize("content", [b"shards =", b"shards = 1\nshards = 2", b'\xff = "not UTF-8"'])
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "kvcluster.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"kvcluster\.toml is not valid TOML"):
        config.load(path)


@given(number=st.integers(0, 2**70), unit=st.sampled_from(sorted(UNITS)), space=st.sampled_from(["", " "]))
def test_a_size_is_a_number_and_a_unit_in_any_case(number: int, unit: str, space: str) -> None:
    expected = number * UNITS[unit]
    assert config.size(f" {number}{space}{unit} ") == expected
    assert config.size(f"{number}{unit.lower()}") == config.size(f"{number}{unit.upper()}") == expected
    assert config.size(number) == number


def test_a_size_may_have_a_fraction_and_is_whole_bytes() -> None:
    assert config.size("1.5GiB") == 3 * 2**29
    assert config.size("0.1 kb") == 100
    assert config.size("0.0001 KiB") == 0


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1_023, "1023 B"),
        (1_536, "1.5 KiB"),
        (2**21, "2 MiB"),
        (1_124_352, "1.07 MiB"),
        (1_000 * 2**30, "1000 GiB"),
        (3 * 2**50, "3072 TiB"),
    ],
)
def test_a_size_as_text_has_three_digits_and_a_unit_that_is_read_again(nbytes: int, text: str) -> None:
    assert config.size_text(nbytes) == text
    assert abs(config.size(text) - nbytes) <= nbytes / 200


def test_a_size_as_text_may_have_more_digits() -> None:
    assert (config.size_text(14.406 * 2**30, 4), config.size_text(2**30, 4)) == ("14.41 GiB", "1 GiB")


@pytest.mark.parametrize(
    "text", ["", "GiB", "1 PiB", "-1", "-1GiB", "1e3", "1 GiB 2", ".5GiB", "nan", -1, True, 1.5, None]
)
def test_what_is_no_size_is_refused_by_name(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"pool: .* is no size; write bytes, or a number with KiB, MiB, GiB or TiB"):
        config.size(text, "pool")


# ------------------------------------------------------------------------------------------------ groups and ports


def test_without_groups_all_shards_are_one_group() -> None:
    loaded = config.load(overrides={"shards": 3, "shard": {"ram_bytes": "64MiB"}})
    assert list(loaded.shard_groups) == ["shard"]
    group = loaded.shard_groups["shard"]
    assert (group.shards, group.per_node, group.shard) == (3, False, loaded.shard)
    assert loaded.of_group("shard") == loaded


def test_how_many_shards_there_are_in_all_is_known_unless_nodes_bring_their_own() -> None:
    assert config.load(overrides={"shards": 3}).shards_in_all == 3
    two = {"a": {"shards": 2}, "b": {"shards": 3}}
    assert config.load(overrides={"groups": two}).shards_in_all == 5
    assert config.load(overrides={"groups": two | {"c": {"per_node": True}}}).shards_in_all is None


def test_a_group_has_the_settings_of_all_shards_but_for_its_own() -> None:
    gpu = {"per_node": True, "resources": {"kvcluster_gpu": 1}, "shard": {"ram_bytes": "2GiB"}}
    shard = {"lease_ttl_ms": 500, "ram_bytes": "1GiB"}
    loaded = config.load(overrides={"shard": shard, "groups": {"gpu": gpu, "cpu": {"shards": 2}}})
    assert loaded.of_group("gpu").shard == dataclasses.replace(loaded.shard, ram_bytes=2**31)
    assert loaded.shard_groups["cpu"].shard == loaded.shard
    assert loaded.shard_groups["gpu"].resources == {"kvcluster_gpu": 1.0}
    assert loaded.shard_groups["cpu"].resources == {config.SHARD_RESOURCE: 1.0}
    with pytest.raises(ConfigError, match="no group 'tpu' of shards: gpu, cpu"):
        loaded.of_group("tpu")


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"gpu": 3}, "groups.gpu must be a table of settings, not 3"),
        ({"gpu": {"shard": 3}}, "groups.gpu.shard must be a table of settings, not 3"),
        ({"gpu": {"size": 3}}, "unknown setting groups.gpu.size"),
        ({"GPU": {}}, "a name is up to 40 of a-z"),
        ({"gpu": {"shards": 0}}, "groups.gpu.shards must be at least 1"),
        ({"gpu": {"per_node": True, "resources": {}}}, "groups.gpu.per_node needs groups.gpu.resources"),
        ({"gpu": {"resources": {"x": -1.0}}}, "groups.gpu.resources.x must be positive"),
        ({"gpu": {"resources": {"x": "1"}}}, "groups.gpu.resources.x must be of type float"),
        ({"gpu": {"shard": {"disk_bytes": 4096}}}, "groups.gpu.shard.disk_bytes needs groups.gpu.shard.disk_dir"),
    ],
)
def test_what_a_group_cannot_be(groups: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        config.load(overrides={"groups": groups})


def test_shards_and_groups_contradict_one_another() -> None:
    with pytest.raises(ConfigError, match="give shards or groups, not both"):
        config.load(overrides={"shards": 2, "groups": {"gpu": {}}})


def test_a_configuration_is_made_again_of_its_values() -> None:
    for values in ({}, {"groups": {"gpu": {"per_node": True}}}, {"shards": 3, "server": {"advertise": "cache"}}):
        loaded = config.load(overrides=values)
        assert config.load(overrides=json.loads(json.dumps(config.as_values(loaded)))) == loaded


@pytest.mark.parametrize("text", ["-1", "70000", "1-70000", "9-3", "0-5", "a", "1-2-3", "1,2"])
def test_a_range_of_ports_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.shard_ports must be a range of ports"):
        config.load(overrides={"server": {"shard_ports": text}})


@pytest.mark.parametrize(
    ("port", "ports"),
    [
        (7070, range(7100, 7164)),
        (7071, range(7101, 7165)),
        (1, range(31, 95)),
        (65_442, range(65_472, 65_536)),
        (65_443, range(65_350, 65_414)),
        (65_535, range(65_442, 65_506)),
        (0, range(1)),
    ],
)
def test_the_ports_of_shards_follow_the_port_of_the_coordinator_unless_they_are_set(port: int, ports: range) -> None:
    assert shard_ports(config.load(overrides={"server": {"port": port}}).server) == ports
    for text, set_ports in (("7300-7310", range(7300, 7311)), ("0", range(1))):
        assert shard_ports(config.load(overrides={"server": {"port": port, "shard_ports": text}}).server) == set_ports


@given(st.integers(0, 65_535))
def test_every_port_of_a_coordinator_leaves_its_shards_ports_of_their_own(port: int) -> None:
    loaded = config.load(overrides={"server": {"port": port}})
    assert [use.setting for use in port_table(loaded)] == ["server.port", "server.shard_ports"][: 2 * bool(port)]
    assert max(shard_ports(loaded.server)) < 2**16


ALL_PORTS = {
    "server": {"report_port": 7071, "secret_file": "/s"},
    "metrics": {"port": 9400},
    "events": {"endpoint": "tcp://127.0.0.1:5557", "replay": "tcp://[::1]:5558"},
}
"""A configuration in which everything listens that can."""


def test_the_ports_of_a_cluster_are_in_one_table() -> None:
    loaded = config.load(overrides=ALL_PORTS)
    ports = {(use.setting, use.listener): use.ports for use in port_table(loaded)}
    assert ports["server.port", "coordinator"] == range(7070, 7071)
    assert ports["metrics.port", "shards"] == range(9401, 9465)
    assert ports["events.endpoint", "coordinator"] == range(5557, 5558)
    assert ports["events.replay", "coordinator"] == range(5558, 5559)
    assert ports["ray.port", "Ray's head"] == range(6379, 6380)
    assert not any(use.ray for use in port_table(config.load()))  # a Ray on loopback takes any ports
    assert [use.setting for use in port_table(config.load(overrides={"server": {"port": 0, "shard_ports": "0"}}))] == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"server": {"shard_ports": "7000-7100"}}, "server.shard_ports and server.port share a port"),
        ({"server": {"secret_file": "/s"}, "ray": {"node_ports": "6370-6380"}}, "ray.node_ports and ray.port share"),
        ({"events": {"endpoint": "tcp://127.0.0.1:7070"}}, "server.port and events.endpoint share a port"),
        ({"ray": {"node_ports": "6380-6382"}}, "ray.node_ports must be a range of at least 8 ports"),
        ({"ray": {"worker_ports": "10002"}}, "ray.worker_ports must be a range of at least 16 ports"),
        ({"ray": {"redis": "host"}}, "ray.redis must be HOST:PORT"),
        ({"ray": {"node_timeout_ms": 7_999}}, "ray.node_timeout_ms must be between 8000 and 600000"),
        ({"ray": {"node_timeout_ms": 600_001}}, "ray.node_timeout_ms must be between 8000 and 600000"),
        ({"ray": {"redis": "host:1", "redis_password_from_secret": True}}, "needs ray.redis and server.secret_file"),
        (
            {"ray": {"redis_password_from_secret": True}, "server": {"secret_file": "/s"}},
            "ray.redis_password_from_secret needs ray.redis and server.secret_file",
        ),
        (
            {
                "ray": {"redis": "host:1", "redis_password_from_secret": True, "redis_password_file": "/p"},
                "server": {"secret_file": "/s"},
            },
            "and no ray.redis_password_file",
        ),
        ({"server": {"secret_file": "secret"}}, "server.secret_file must be an absolute path"),
        ({"server": {"quota_file": "quotas"}}, "server.quota_file must be an absolute path, not 'quotas'"),
        ({"log": {"audit_file": "audit"}}, "log.audit_file must be an absolute path, not 'audit'"),
        ({"server": {"advertise": "cache:7070"}}, "server.advertise must be a host name or address without a port"),
        ({"name": "My Cluster"}, "name must be up to 40 of a-z"),
    ],
)
def test_ports_and_names_that_cannot_work_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        config.load(overrides=values)


def test_the_document_of_ports_prints_the_table() -> None:
    text = (Path(__file__).parents[1] / "docs" / "operations.md").read_text(encoding="utf-8")
    printed = re.findall(
        r"^\| ([0-9-]+) \| `([a-z_.]+)` \|", text.partition("### Ports")[2].partition("\n### ")[0], re.M
    )
    table = [(f"{use.ports[0]}-{use.ports[-1]}", use.setting) for use in port_table(config.load(overrides=ALL_PORTS))]
    assert printed == [(ports if len({*ports.split("-")}) == 2 else ports.split("-")[0], name) for ports, name in table]


@pytest.mark.parametrize(("shards", "part", "gpus"), [(4, 0.6, 4), (4, 0.3, 2), (2, 0.5, 1), (3, 0.3333, 1), (2, 1, 2)])
def test_a_node_of_twins_has_gpus_in_name_for_all_of_them(shards: int, part: float, gpus: int) -> None:
    shard = {"host_bytes": "1MiB", "gpu_bytes": "1MiB", "num_gpus": part}
    assert config.load(overrides={"shards": shards, "shard": {**shard, "gpu_device": "twin"}}).gpus_of_twins == gpus
    assert config.load(overrides={"shards": shards, "shard": shard}).gpus_of_twins == 0, (
        "those of a card are counted by Ray"
    )
