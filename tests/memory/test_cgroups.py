"""The limit of a nested group and of those above it, over the files of machines and containers as they look there."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcluster.memory import arena, cgroups
from kvcluster.memory.arena import Arena, memory_limit_bytes
from kvcluster.memory.cgroups import memory_limits

MIB = 2**20
V1_UNLIMITED = 9223372036854771712

V2 = "35 24 0:30 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "30 24 0:26 {top} /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n"
OTHERS = (
    "24 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
    "31 24 0:27 / /sys/fs/cgroup/pids rw,nosuid shared:9 - cgroup cgroup rw,pids\n"
)


class Machine:
    """A root with the files that a process reads of its groups."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def joins(self, memberships: str, mounts: str) -> None:
        about = self.root / "proc/self"
        about.mkdir(parents=True)
        (about / "cgroup").write_text(memberships)
        (about / "mountinfo").write_text(OTHERS + mounts)

    def limit(self, group: str, text: str | int, name: str = "memory.max") -> None:
        folder = self.root / "sys/fs/cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")

    def limits(self) -> set[int]:
        return set(memory_limits(self.root))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_nested_group_of_v2_and_all_groups_above_it_limit(machine: Machine) -> None:
    machine.joins("0::/system.slice/kv.service/shard\n", V2.format(top="/"))
    machine.limit("system.slice/kv.service/shard", 900 * MIB)
    machine.limit("system.slice/kv.service", 700 * MIB)
    machine.limit("system.slice", "max")
    machine.limit("system.slice/other.service", 1 * MIB)
    assert machine.limits() == {900 * MIB, 700 * MIB}


def test_a_nested_group_of_v1_and_all_groups_above_it_limit(machine: Machine) -> None:
    machine.joins("5:memory:/jobs/kv\n3:pids:/elsewhere\n0::/\n", V1.format(top="/"))
    machine.limit("memory", V1_UNLIMITED, "memory.limit_in_bytes")
    machine.limit("memory/jobs", 700 * MIB, "memory.limit_in_bytes")
    machine.limit("memory/jobs/kv", 800 * MIB, "memory.limit_in_bytes")
    machine.limit("memory/elsewhere", 1 * MIB, "memory.limit_in_bytes")
    assert min(machine.limits()) == 700 * MIB


def test_a_container_in_its_own_namespace_of_groups_has_the_limit_of_the_root(machine: Machine) -> None:
    machine.joins("0::/\n", V2.format(top="/"))
    machine.limit(".", 700 * MIB)
    assert machine.limits() == {700 * MIB}


def test_a_container_of_which_only_the_own_group_is_mounted_has_its_limit(machine: Machine) -> None:
    machine.joins("5:memory:/docker/c0ffee/nested\n", V1.format(top="/docker/c0ffee"))
    machine.limit("memory", 900 * MIB, "memory.limit_in_bytes")
    machine.limit("memory/nested", 700 * MIB, "memory.limit_in_bytes")
    assert machine.limits() == {900 * MIB, 700 * MIB}


def test_the_limit_of_a_group_above_what_is_mounted_is_the_one_that_v1_counts(machine: Machine) -> None:
    machine.joins("5:memory:/pod/c0ffee\n", V1.format(top="/pod/c0ffee"))
    machine.limit("memory", V1_UNLIMITED, "memory.limit_in_bytes")
    machine.limit(
        "memory", f"cache 0\nhierarchical_memory_limit {700 * MIB}\nhierarchical_memsw_limit 5", "memory.stat"
    )
    assert min(machine.limits()) == 700 * MIB


@pytest.mark.parametrize(("own", "top"), [("/../other", "/"), ("/here", "/../.."), ("/a", "/b")])
def test_a_group_that_has_another_name_where_it_is_mounted_has_the_limit_of_what_is_mounted(
    machine: Machine, own: str, top: str
) -> None:
    machine.joins(f"0::{own}\n", V2.format(top=top))
    machine.limit(".", 700 * MIB)
    assert machine.limits() == {700 * MIB}


def test_a_folder_with_a_space_and_a_group_with_a_colon_are_found(machine: Machine) -> None:
    machine.joins("0::/a b:c\n", "35 24 0:30 / /sys/fs/cgroup/v\\0402 rw - cgroup2 none rw\n")
    machine.limit("v 2/a b:c", 700 * MIB)
    assert machine.limits() == {700 * MIB}


def test_a_machine_without_groups_has_no_limit(machine: Machine) -> None:
    assert machine.limits() == set()
    machine.joins("", "")
    assert machine.limits() == set()


def test_a_pool_beyond_the_limit_of_a_nested_group_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.joins("0::/kv\n", V2.format(top="/"))
    machine.limit(".", "max")
    machine.limit("kv", 7 * MIB)
    monkeypatch.setattr(arena, "memory_limits", lambda: cgroups.memory_limits(machine.root))
    assert memory_limit_bytes() == 7 * MIB
    with pytest.raises(arena.ConfigError, match="this machine or container has 7 MiB in all"):
        Arena(10 * MIB)
