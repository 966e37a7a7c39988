"""The containers that the chart renders with `security.encryption: tls`, run as they are rendered (kubelet.py). In
place of cert-manager an authority of the tests signs what the rendered Certificates ask for, and nothing more: so their
names and roles are those by which the program's processes verify one another. And with Secrets that are made by the
commands of docs/kubernetes.md.

Needs the environment of `make chart`, which renders, and root. The tests of one release run in order.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvcluster.runtime.auth import new_token, token_line
from tests.authority import Authority
from tests.chart.rendering import CHART_PYTHON, render
from tests.hosts.hosts import ROOT
from tests.hosts.netns import missing
from tests.hosts.worker import BLOCKS
from tests.pods.kubelet import Client, Kubelet
from tests.pods.objects import Objects, of_kind
from tests.pods.privileges import check_unprivileged
from tests.pods.test_pods import HEAD, METRICS, SHARDS, Release
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(900)]
RENDERED = [] if missing() or not CHART_PYTHON.exists() else ["rendered"]
"""None where the machine gives us no network namespaces, or `make chart` has not run: then nothing here runs."""

DOCUMENT = ROOT / "docs" / "kubernetes.md"
VALUES: dict[str, Any] = {
    "config": {"shard": {"ram_bytes": "256MiB"}, "coordinator": {"host_codec": "raw"}},
    "monitoring": {"enabled": True},
}
CLIENTS = {
    "engine": Client({"kvcluster-client": "true"}, "llm"),
    "prometheus": Client({}, "monitoring"),
}
PROMPTS = 8


Secrets = dict[str, dict[str, bytes]]


class CertManager:
    """What cert-manager and an issuer do: a Secret for each Certificate. Engines show one, too."""

    security: Mapping[str, Any] = {
        "encryption": "tls",
        "clientCertificates": True,
        "certManager": {"issuerRef": {"name": "ca"}, "clients": ["tenant-ops"]},
    }

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)

    def secrets(self, objects: Objects) -> Secrets:
        return self._signed(objects, days=20)

    def renewed(self, objects: Objects) -> Secrets:
        return self._signed(objects, days=25)

    def _signed(self, objects: Objects, days: float) -> Secrets:
        made = {}
        for each in of_kind(objects, "Certificate"):
            spec = each["spec"]
            cluster, _, role = spec["uris"][0].removeprefix("kvcluster://").partition("/")
            names = tuple(spec.get("dnsNames", ()))
            issued = self.authority.issue(each["metadata"]["name"], role, names=names, cluster=cluster, days=days)
            files = zip(("ca.crt", "tls.crt", "tls.key"), issued.files, strict=True)
            made[spec["secretName"]] = {file: Path(path).read_bytes() for file, path in files}
        return made


class Commands:
    """The commands that the document prints, in a folder."""

    security: Mapping[str, Any] = {
        "encryption": "tls",
        "existingSecrets": {"coordinator": "kv-head", "shard": "kv-shards"},
    }

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        text = DOCUMENT.read_text(encoding="utf-8").partition("### Encryption by plain Secrets")[2].partition("\n##")[0]
        self._text = text

    def secrets(self, objects: Objects) -> Secrets:
        assert not of_kind(objects, "Certificate")
        for line in re.findall(r"^kvcluster (certs (?:init|issue) .*)$", self._text, re.MULTILINE):
            self._run(line.partition("#")[0].split())
        return self._files()

    def renewed(self, objects: Objects) -> Secrets:
        (line,) = re.findall(r"`kvcluster (certs renew [^`]*)`", self._text)
        for name in ("kv-head", "kv-shards"):
            self._run([*line.replace("kv-head", name).split(), "--days", "200"])
        return self._files()

    def _files(self) -> Secrets:
        """As `kubectl create secret generic NAME --from-file=NAME` reads them."""
        made = re.findall(r"^kubectl .* create secret generic (\S+) --from-file=(\S+)", self._text, re.MULTILINE)
        assert len(made) == 2
        return {name: {path.name: path.read_bytes() for path in (self.folder / of).iterdir()} for name, of in made}

    def _run(self, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "kvcluster.cli.main", *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, capture_output=True, cwd=self.folder, env=environment, timeout=60)


class EncryptedRelease(Release):
    """The release that all tests use, and who signs its certificates."""

    def __init__(self, kubelet: Kubelet, secrets: Secrets, token: str, signer: CertManager | Commands) -> None:
        super().__init__(kubelet, secrets, token)
        self.signer = signer
        self.objects = render({**VALUES, "security": signer.security})

    def expiries(self) -> set[float]:
        """When the certificates of all processes end, read as the rendered PodMonitor says."""
        (endpoint,) = of_kind(self.objects, "PodMonitor")[0]["spec"]["podMetricsEndpoints"]
        assert endpoint["scheme"] == "https"
        name, ca = endpoint["tlsConfig"]["serverName"], endpoint["tlsConfig"]["ca"]["secret"]
        authority = self.secrets[ca["name"]][ca["key"]].decode()
        found = set()
        for pod, port in METRICS.items():
            command = [sys.executable, "-I", "-S", "-c", _SCRAPE, self.kubelet.address(pod), str(port), name, authority]
            done = subprocess.run(
                self.kubelet.command("prometheus", command), check=True, capture_output=True, text=True, timeout=60
            )
            found.add(float(done.stdout))
        return found


_SCRAPE = """
import socket, ssl, sys
address, port, name, authority = sys.argv[1:]
context = ssl.create_default_context(cadata=authority)
with socket.create_connection((address, int(port)), 10) as plain:
    with context.wrap_socket(plain, server_hostname=name) as connected:
        connected.sendall(b"GET /metrics HTTP/1.1\\r\\n\\r\\n")
        text = b"".join(iter(lambda: connected.recv(65536), b"")).decode()
(line,) = [line for line in text.splitlines() if line.startswith("kvcluster_certificate_expires_seconds ")]
print(line.split()[1])
"""


@pytest.fixture(scope="module", params=[each for each in (CertManager, Commands) if RENDERED])
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EncryptedRelease]:
    token = new_token()
    tokens = (token_line(token, "ops", operator=True) + "\n").encode()
    signer: CertManager | Commands = request.param(tmp_path_factory.mktemp("signer"))
    objects = render({**VALUES, "security": signer.security})
    secrets: Secrets = {"cache-kvcluster-auth": {"secret": new_token().encode(), "tokens": tokens}}
    secrets |= signer.secrets(objects)
    with Kubelet(objects, secrets, CLIENTS) as kubelet:
        kubelet.wait_ready()
        yield EncryptedRelease(kubelet, secrets, token, signer)


def test_what_one_engine_stores_another_loads_over_tls(release: EncryptedRelease) -> None:
    assert release.work("engine", "store", 0, PROMPTS)["stored"] == PROMPTS * BLOCKS
    found = release.work("engine", "load", 0, PROMPTS)
    assert (found["blocks"], found["wrong"]) == (PROMPTS * BLOCKS, 0)
    assert len(release.status()["shards"]) == len(SHARDS)
    assert all(release.kubelet.alive(name) for name in release.kubelet.containers)
    for container in release.kubelet.containers.values():
        check_unprivileged(container)


def test_in_the_clear_and_by_another_authority_nothing_is_sent(release: EncryptedRelease, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other").ca
    for more in (["--encryption", "none"], ["--ca", str(other)]):
        done = release.kubelet.kvcluster(
            "engine", release.token, "status", "--address", "cache-kvcluster-head.llm.svc:7070", *more
        )
        assert done.returncode != 0 and "shards" not in done.stdout, done.stdout
        assert "certificate" in done.stderr or "TLS" in done.stderr, done.stderr


def test_a_command_in_the_heads_container_connects_by_its_environment(release: EncryptedRelease) -> None:
    command = release.kubelet.containers[HEAD].inside(
        ["env", f"KVCLUSTER_TOKEN={release.token}", "kvcluster", "status"]
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_renewed_certificate_is_used_without_a_restart(release: EncryptedRelease) -> None:
    before, kubelet = release.expiries(), release.kubelet
    release.secrets.update(release.signer.renewed(release.objects))
    assert kubelet.apply(release.objects) == []
    eventually(lambda: min(release.expiries()) > max(before), 30)
    found = release.work("engine", "load", 0, PROMPTS)
    assert (found["blocks"], found["wrong"]) == (PROMPTS * BLOCKS, 0)
    assert all(kubelet.alive(name) for name in kubelet.containers)
