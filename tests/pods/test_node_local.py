"""Mode node-local as it is rendered: engines in other pods of the node, in user, process and network namespaces of
their own, have the memory of the node's shard, whatever restarts; strangers get none.

Needs the environment of `make chart`, which renders, and root. The tests of one release run in order.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcluster.runtime.auth import NO_TENANT, new_token, token_line
from kvcluster.transport.process_location import SOCKET_DIR
from tests.chart.rendering import CHART_PYTHON, render
from tests.hosts.netns import missing
from tests.hosts.worker import BLOCKS
from tests.other_users import OtherUser
from tests.pods.kubelet import Client, Kubelet
from tests.pods.objects import named
from tests.pods.privileges import check_unprivileged
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(900)]
RENDERED = [] if missing() or not CHART_PYTHON.exists() else ["rendered"]

HEAD, SHARD = "cache-kvcluster-head-0", "cache-kvcluster-shard-0"
ADDRESS = "cache-kvcluster-head.llm.svc.cluster.local:7070"
GROUP, ENGINE_USER = 10_002, 2_000
VALUES: dict[str, Any] = {"mode": "node-local", "config": {"shard": {"ram_bytes": "512MiB"}}}
PROMPTS = 32
CLIENTS = {name: Client({"kvcluster-client": "true"}, "llm") for name in ("one", "two", "stranger")}


class Engine:
    """An engine in the pod `name`, with the directory that its manifest mounts. Use as a context manager."""

    def __init__(
        self, release: Release, name: str, *, user: int = ENGINE_USER, group: int = GROUP, in_pod: bool = True,
        token: str = "", writable: bool = False
    ) -> None:  # fmt: skip
        there = release.connection[SOCKET_DIR]
        script = [*python_for_all(), f"mkdir -p {there}; mount --bind {release.directory} {there}"]
        script += [] if writable else [f"mount -o remount,ro,bind {there}"]
        mounted = ["unshare", "--mount", "sh", "-ec", "; ".join([*script, 'exec "$@"']), "sh"]
        python = [
            sys.executable,
            "-m",
            "tests.pods.engine",
            ADDRESS,
            str(user),
            str(group),
            "pod" if in_pod else "host",
        ]
        env = {"KVCLUSTER_TOKEN": token or release.token, SOCKET_DIR: there}
        command = release.kubelet.command(name, [*mounted, *python])
        self._process = OtherUser(command, group, in_pod=in_pod, env=env)

    def __enter__(self) -> Engine:
        self._process.__enter__()
        self.said = json.loads(self._process.says())
        return self

    def __exit__(self, *error: object) -> None:
        self._process.__exit__()

    def does(self, job: str, first: int = 0, last: int = PROMPTS) -> dict[str, Any]:
        """Has it do a job, and returns what it says."""
        self._process.tell(f"{job} {first} {last}")
        found: dict[str, Any] = json.loads(self._process.says())
        return found

    def rate(self) -> float:
        """The bytes a second of its loads by shared memory."""
        found = self.does("rate")
        assert shm(found)
        return float(found["rate"])


def python_for_all() -> list[str]:
    """Commands after which every user of a mount namespace can read this Python's modules, whatever folder they lie in,
    and /run is empty."""
    lines = ["mount -t tmpfs tmpfs /run"]
    prefix = Path(sys.base_prefix)
    for closed in (folder for folder in reversed(prefix.parents) if not folder.stat().st_mode & stat.S_IXOTH):
        lines += [f"mkdir /run/python; mount --rbind {prefix} /run/python; mount -t tmpfs -o mode=755 tmpfs {closed}"]
        return [*lines, f"mkdir -p {prefix}; mount --move /run/python {prefix}"]
    return lines


class Release:
    """A head, a Redis, and a pod of a shard on the only node."""

    def __init__(self, kubelet: Kubelet, secrets: dict[str, dict[str, bytes]], token: str, operator: str) -> None:
        self.kubelet, self.secrets, self.token, self._operator = kubelet, secrets, token, operator
        objects = render(VALUES)
        self.connection: dict[str, str] = named(objects, "ConfigMap", "cache-kvcluster-connection")["data"]
        volumes = named(objects, "DaemonSet", "cache-kvcluster-shard")["spec"]["template"]["spec"]["volumes"]
        (path,) = [each["hostPath"]["path"] for each in volumes if "hostPath" in each]
        self.directory: Path = kubelet.node_folder(path)

    def status(self) -> str:
        """What `kvcluster status` says to the operator."""
        return self.kubelet.kvcluster("one", self._operator, "status", "--address", ADDRESS).stdout


def shm(found: dict[str, Any]) -> bool:
    return [way["name"] for way in found["ways"]] == ["shm"]


@pytest.fixture(scope="module", params=RENDERED)
def release() -> Iterator[Release]:
    token, operator = new_token(), new_token()
    tokens = f"{token_line(token, 'default')}\n{token_line(operator, NO_TENANT, operator=True)}\n".encode()
    secrets = {"cache-kvcluster-auth": {"secret": new_token().encode(), "tokens": tokens}}
    with Kubelet(render(VALUES), secrets, CLIENTS) as kubelet:
        kubelet.wait_ready()
        yield Release(kubelet, secrets, token, operator)


def test_the_directory_is_the_shards_and_engines_only_search_it(release: Release) -> None:
    status = release.directory.stat()
    assert (status.st_uid, status.st_gid, oct(status.st_mode)) == (10_001, GROUP, "0o42750")
    for container in release.kubelet.containers.values():
        check_unprivileged(container)


def test_two_engines_in_namespaces_of_their_own_share_the_memory_of_one_shard(release: Release) -> None:
    with Engine(release, "one") as one, Engine(release, "two") as two:
        stored = one.does("store")
        assert (stored["stored"], shm(stored)) == (PROMPTS * BLOCKS, True)
        loaded = two.does("load")
        assert (loaded["blocks"], loaded["wrong"], shm(loaded)) == (PROMPTS * BLOCKS, 0, True)


def test_another_pod_loads_as_fast_as_the_shards_own(release: Release, capsys: pytest.CaptureFixture[str]) -> None:
    """Says the rates; it asserts that both go by shared memory."""
    with Engine(release, "two") as other:
        rates = [(other.rate(), same_pod_rate(release)) for _ in range(3)]
    said = ", ".join(f"{theirs / 1e9:.2f} and {own / 1e9:.2f} ({theirs / own:.2f})" for theirs, own in rates)
    with capsys.disabled():
        print(f"\nGB/s of loads from another pod, and from the shard's own: {said}")


def same_pod_rate(release: Release) -> float:
    """The rate of a process of the shard's user in the network namespace of the shard."""
    with Engine(release, release.kubelet.host_of(SHARD), user=10_001, group=10_001, in_pod=False) as engine:
        return engine.rate()


def test_an_engine_s_pod_that_restarts_goes_on_in_shared_memory(release: Release) -> None:
    with Engine(release, "one") as engine:
        assert shm(engine.does("load"))
    with Engine(release, "one") as again:
        found = again.does("load")
        assert (found["blocks"], found["wrong"], shm(found)) == (PROMPTS * BLOCKS, 0, True)


def test_a_shard_s_pod_that_restarts_is_found_again_by_engines_that_stay(release: Release) -> None:
    kubelet = release.kubelet
    with Engine(release, "one") as engine:
        assert shm(engine.does("load"))
        before = set(os.listdir(release.directory))
        kubelet.restart(SHARD)
        kubelet.wait_ready([SHARD])
        assert not before & set(os.listdir(release.directory)), "a socket stays without its shard"
        eventually(lambda: engine.does("store")["stored"] == PROMPTS * BLOCKS)
        found = eventually(lambda: shm(found := engine.does("load")) and found)
        assert (found["blocks"], found["wrong"]) == (PROMPTS * BLOCKS, 0)


def test_a_shard_that_is_killed_leaves_a_socket_that_its_successor_removes(release: Release) -> None:
    kubelet = release.kubelet
    (before,) = os.listdir(release.directory)
    kubelet.containers[SHARD].kill()
    assert os.listdir(release.directory) == [before]
    kubelet.restart(SHARD)
    kubelet.wait_ready([SHARD])
    (after,) = os.listdir(release.directory)
    assert after != before
    with Engine(release, "two") as engine:
        eventually(lambda: engine.does("store")["stored"] == PROMPTS * BLOCKS)
        assert shm(engine.does("load"))


def test_a_token_that_is_not_known_gets_nothing_whatever_the_directory_says(release: Release) -> None:
    with Engine(release, "stranger", token=new_token()) as stranger:
        assert "CredentialError" in stranger.said["error"]


def test_an_engine_without_the_group_goes_by_tcp_and_is_told_why(release: Release) -> None:
    with Engine(release, "one", group=4_000) as engine:
        found = engine.does("load")
    assert (found["blocks"], found["wrong"]) == (PROMPTS * BLOCKS, 0)
    (way,) = found["ways"]
    assert way["name"] == "tcp"
    assert re.search(r"cannot be opened: Permission denied|may not connect", way["refused"]["shm"])


def test_an_engine_that_could_take_the_shards_place_does_not_trust_the_directory(release: Release) -> None:
    release.directory.chmod(0o2770)
    try:
        with Engine(release, "one", writable=True) as engine:
            found = engine.does("load")
    finally:
        release.directory.chmod(0o2750)
    (way,) = found["ways"]
    assert way["name"] == "tcp" and f"the group {GROUP} may write to it" in way["refused"]["shm"]


def test_a_second_tenant_is_refused_by_name_and_the_first_keeps_its_memory(release: Release) -> None:
    """One release, one tenant: the directory of another tenant is another release's."""
    other = new_token()
    keys = release.secrets["cache-kvcluster-auth"]
    keys["tokens"] += (token_line(other, "team-b") + "\n").encode()
    assert release.kubelet.apply(render(VALUES)) == []
    with Engine(release, "two", token=other) as engine:
        assert "CredentialError" in engine.said["error"]
    eventually(lambda: "now names several tenants" in release.status(), 90)
    with Engine(release, "one") as engine:
        assert shm(engine.does("load"))
