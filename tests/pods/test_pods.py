"""The containers that the chart renders, run as they are rendered (kubelet.py): unprivileged, behind the policies, and
upgraded without losing what is cached.

Needs the environment of `make chart`, which renders, and root. The tests of one release run in order.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from kvcluster.runtime.auth import new_token, token_line
from tests.chart.rendering import CHART_PYTHON, render
from tests.hosts.netns import missing
from tests.hosts.replay import Round, judge, replaying, start_worker
from tests.hosts.worker import BLOCKS
from tests.pods.kubelet import Client, Kubelet
from tests.pods.privileges import check_unprivileged

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(900)]
RENDERED = [] if missing() or not CHART_PYTHON.exists() else ["rendered"]
"""None where the machine gives us no network namespaces, or `make chart` has not run: then nothing here runs."""

HEAD, SHARDS = "cache-kvcluster-head-0", ("cache-kvcluster-shard-0", "cache-kvcluster-shard-1")
ADDRESS = "cache-kvcluster-head.llm.svc.cluster.local:7070"
VALUES: dict[str, Any] = {
    # Pages go down as they are, so that every byte can be compared.
    "config": {"shard": {"ram_bytes": "256MiB"}, "coordinator": {"host_codec": "raw"}},
    "shards": {"minReadySeconds": 0, "shard": {"host_bytes": "32MiB", "disk_bytes": "512MiB"}},
}
PROMPTS = 112
FULL = 0.85
CLIENTS = {
    "engine": Client({"kvcluster-client": "true"}, "llm"),
    "stranger": Client({"app": "other"}, "llm"),
    "elsewhere": Client({"kvcluster-client": "true"}, "other"),
    "prometheus": Client({}, "monitoring"),
}
TRY_S = 0.5
RAY, REPORTS, WORKERS = (6379, 6380, 6381, 10002), (7071,), (7070, 7100, 7101)
METRICS = {HEAD: 9400, SHARDS[0]: 9401, SHARDS[1]: 9401}


def with_values(more: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the release with these on top."""
    return _merged(VALUES, more)


class Release:
    """The release that all tests use. `secrets` may be changed."""

    def __init__(self, kubelet: Kubelet, secrets: dict[str, dict[str, bytes]], token: str) -> None:
        self.kubelet, self.secrets, self.token = kubelet, secrets, token

    def worker(self, client: str, *arguments: object) -> subprocess.Popen[str]:
        """Runs tests/hosts/worker.py where that client is."""
        environment = os.environ | {"KVCLUSTER_TOKEN": self.token}
        return start_worker(partial(self.kubelet.command, client), ADDRESS, environment, *arguments)

    def work(self, client: str, *arguments: object) -> dict[str, Any]:
        """Runs it to its end, and returns what it says."""
        with self.worker(client, *arguments) as process:
            said, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        found: dict[str, Any] = json.loads(said.splitlines()[-1])
        return found

    @contextmanager
    def replayed(self) -> Iterator[list[Round]]:
        """Replays the prompts of an engine, as `replaying` does."""
        with replaying(self.worker("engine", "replay", 0, PROMPTS)) as rounds:
            yield rounds

    def status(self) -> dict[str, Any]:
        done = self.kubelet.kvcluster("engine", self.token, "status", "--address", ADDRESS, "--json")
        assert done.returncode in (0, 3), done.stderr  # 3: a shard is lost or waited for
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def reached(self, client: str) -> dict[str, list[int]]:
        """Tries to connect from there to every port that a process of the release listens at, and returns the ports of
        each pod that let it in."""
        ports = [*RAY, *REPORTS, *WORKERS, *set(METRICS.values())]
        targets = {name: [(self.kubelet.address(name), port) for port in ports] for name in (HEAD, *SHARDS)}
        command = [sys.executable, "-I", "-S", "-c", _KNOCK, json.dumps(targets), str(TRY_S)]
        done = subprocess.run(self.kubelet.command(client, command), check=True, capture_output=True, text=True)
        found: dict[str, list[int]] = json.loads(done.stdout)
        return found


_KNOCK = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def open_at(where):
    try:
        socket.create_connection(where, float(sys.argv[2])).close()
        return True
    except OSError:
        return False
with ThreadPoolExecutor(32) as threads:
    print(json.dumps({name: [where[1] for where, is_open in zip(its, threads.map(open_at, map(tuple, its))) if is_open]
                      for name, its in json.loads(sys.argv[1]).items()}))
"""


@pytest.fixture(scope="module", params=RENDERED)
def release() -> Iterator[Release]:
    """A head, a Redis and two pods of a shard, full to 85 %."""
    token = new_token()
    tokens = (token_line(token, "ops", operator=True) + "\n").encode()
    keys = {"secret": new_token().encode(), "tokens": tokens}
    secrets = {"cache-kvcluster-auth": keys}
    with Kubelet(render(VALUES), secrets, CLIENTS) as kubelet:
        kubelet.wait_ready()
        yield Release(kubelet, secrets, token)


def test_what_one_engine_stores_another_process_loads(release: Release) -> None:
    assert release.work("engine", "store", 0, PROMPTS)["stored"] == PROMPTS * BLOCKS
    found = release.work("engine", "load", 0, PROMPTS)
    assert (found["blocks"], found["wrong"]) == (PROMPTS * BLOCKS, 0)
    shards = release.status()["shards"]
    assert len(shards) == len(SHARDS)
    assert sum(each["free_bytes"] for each in shards) < (1 - FULL) * sum(each["capacity_bytes"] for each in shards)


def test_every_process_of_every_pod_is_without_privileges(release: Release) -> None:
    for container in release.kubelet.containers.values():
        check_unprivileged(container)


def test_the_memory_of_every_pod_is_limited_and_kept_within(release: Release) -> None:
    for name, container in release.kubelet.containers.items():
        if (used := container.memory_used()) is not None:
            assert 0 < used < 0.9 * container.pod.memory, f"{name} uses {used} of {container.pod.memory} bytes"


def test_the_policies_keep_out_whom_they_should(release: Release) -> None:
    engine, monitored = release.reached("engine"), release.reached("prometheus")
    assert release.reached("stranger") == {HEAD: [], SHARDS[0]: [], SHARDS[1]: []}
    assert release.reached("elsewhere") == {HEAD: [], SHARDS[0]: [], SHARDS[1]: []}
    assert engine[HEAD] == [7070]
    assert all(set(engine[shard]) <= {7100, 7101} and engine[shard] for shard in SHARDS)
    assert monitored == {name: [port] for name, port in METRICS.items()}


def test_without_the_policies_all_of_that_is_open(release: Release) -> None:
    kubelet = release.kubelet
    assert kubelet.apply(render(with_values({"networkPolicy": {"enabled": False}}))) == []
    found = release.reached("stranger")
    assert set(found[HEAD]) >= {7070, 7071, 6379, 9400}
    assert all(set(found[shard]) >= {7100, 6380, 9401} for shard in SHARDS)
    assert kubelet.apply(render(VALUES)) == []
    assert release.reached("stranger") == {HEAD: [], SHARDS[0]: [], SHARDS[1]: []}


def test_another_token_holds_without_a_restart(release: Release) -> None:
    kubelet, keys = release.kubelet, release.secrets["cache-kvcluster-auth"]
    before, release.token = release.token, new_token()
    keys["tokens"] += (token_line(release.token, "ops", operator=True) + "\n").encode()
    assert kubelet.apply(render(VALUES)) == []
    found = release.work("engine", "load", 0, 1)  # connects with patience until the file is read again
    assert (found["blocks"], found["wrong"]) == (BLOCKS, 0)
    assert before != release.token


def test_an_upgrade_by_partition_keeps_what_is_cached(release: Release, capsys: pytest.CaptureFixture[str]) -> None:
    """Another image for all of it, first for the head and the last shard only."""
    kubelet = release.kubelet
    for last, replaced in ((1, [HEAD, SHARDS[1]]), (0, [SHARDS[0]])):
        changed = {"image": {"tag": "next"}, "shards": {"updateStrategy": {"partition": last}}}
        with release.replayed() as rounds:
            assert kubelet.apply(render(with_values(changed))) == replaced
        assert {kubelet.stopped[name] for name in replaced} == {0}
        judge(rounds, release.work("engine", "load", 0, PROMPTS), capsys)
    assert all(kubelet.alive(name) for name in kubelet.containers)


def test_larger_pools_restart_the_shards_and_keep_what_is_cached(
    release: Release, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {"image": {"tag": "next"}, "config": {"shard": {"ram_bytes": "320MiB"}}}
    with release.replayed() as rounds:
        replaced = release.kubelet.apply(render(with_values(changed)))
    assert set(replaced) >= set(SHARDS)
    judge(rounds, release.work("engine", "load", 0, PROMPTS), capsys)
    assert {each["capacity_bytes"] for each in release.status()["shards"]} == {320 * 2**20}


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        merged[key] = _merged(merged.get(key, {}), value) if isinstance(value, Mapping) else value
    return merged
