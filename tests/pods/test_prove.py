"""deploy/kubernetes/prove.sh against the chart's rendered containers, run as processes (kubelet.py): the real head,
Redis and shards, behind the chart's policies, and the real program in the pods of clients.

What a kubectl and a helm say is the part of tests/chart/fake_cluster.py. Needs the environment of `make chart`, which
renders, and root.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.chart.fake_cluster import FakeCluster, Object
from tests.chart.rendering import CHART_PYTHON, render
from tests.hosts.hosts import ROOT
from tests.hosts.netns import missing
from tests.pods.kubelet import Client, Kubelet

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(900)]
MACHINE = [] if missing() or not CHART_PYTHON.exists() else ["this machine"]
"""None where the machine gives us no network namespaces, or `make chart` has not run: then nothing here runs."""

NAMESPACE = "kvcluster-prove"
MOUNTED = "/etc/kvcluster-token"
LABELS = {
    "engine-a": "kvcluster-client",
    "engine-b": "kvcluster-client",
    "stranger": "kvcluster-prove-stranger",
    "monitor": "kvcluster-monitoring",
}


class RealPods:
    """A Runtime over a Kubelet. `folder`: for the files of the clients' Secret."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._secrets: Mapping[str, Mapping[str, bytes]] = {}
        self._objects: list[Object] = []
        self.kubelet: Kubelet | None = None
        self.alive: list[str] = []
        """The pods that were alive at the end."""

    def start(self, objects: list[Object], secrets: Mapping[str, Mapping[str, bytes]]) -> None:
        for name, token in secrets["prove-tokens"].items():
            (self._folder / name).write_bytes(token)
        self._secrets, self._objects = secrets, objects
        clients = {name: Client({"app": "kvcluster-prove", label: "true"}, NAMESPACE) for name, label in LABELS.items()}
        self.kubelet = Kubelet(objects, secrets, clients).__enter__()

    def add(self, pod: str, labels: Mapping[str, str]) -> None:
        assert labels == {"app": "kvcluster-prove", LABELS[pod]: "true"}

    def secrets_changed(self) -> None:
        self._running().apply(self._objects)

    def apply(self, objects: list[Object]) -> list[str]:
        self._objects = objects
        return self._running().apply(objects)

    def restart(self, pod: str) -> None:
        self._running().restart(pod)

    def wait_ready(self, pod: str) -> None:
        self._running().wait_ready([pod])

    def address(self, pod: str) -> str:
        return self.kubelet.address(pod) if self.kubelet is not None else ""

    def execute(self, pod: str, argv: list[str], stdin: bytes) -> tuple[int, bytes, bytes]:
        kubelet = self._running()
        argv = [each.replace(MOUNTED, str(self._folder)) for each in argv]
        if pod in LABELS:
            command = kubelet.command(pod, [sys.executable, *argv[1:]])
        else:
            command = kubelet.containers[pod].inside(argv)
        done = subprocess.run(command, input=stdin, capture_output=True, check=False, cwd=ROOT, timeout=300)
        return done.returncode, done.stdout, done.stderr

    def stop(self) -> None:
        if self.kubelet is not None:
            self.alive = [name for name in self.kubelet.containers if self.kubelet.alive(name)]
            self.kubelet.__exit__()
        self.kubelet = None

    def _running(self) -> Kubelet:
        assert self.kubelet is not None, "the release is not installed"
        return self.kubelet


@pytest.mark.parametrize("machine", MACHINE)
def test_the_script_proves_its_claims(machine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pods = RealPods(tmp_path)
    script = ROOT / "deploy" / "kubernetes" / "prove.sh"
    with FakeCluster(tmp_path, _rendered, _as_it_is, pods) as fake:
        try:
            done = subprocess.run(
                ["bash", str(script), "--image", "kvcluster:1"],
                env=os.environ | fake.environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=800,
            )
        finally:
            pods.stop()
    with capsys.disabled():
        print(f"\n{done.stdout}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout and done.stdout.count("\nholds ") == 15
    assert len(pods.alive) == 4


def _rendered(values: Mapping[str, Any], release: str, namespace: str) -> list[Object]:
    return render(values, release=release, namespace=namespace)


def _as_it_is(written: Object) -> None:
    """Schemas are held by tests/chart, whose environment has them."""
