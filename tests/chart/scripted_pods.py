"""Pods that answer as prove_client.py would, without running anything: what they reach follows from the rendered
NetworkPolicies, and what they may from the tokens in the Secrets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvcluster.runtime.auth import digest
from tests.pods.objects import selects
from tests.pods.policies import Peer, rules

Object = dict[str, Any]

LISTENS = {"head": (7070, 7071, 6379, 6380, 9400), "shard": (7100, 6380, 9401), "redis": (6379,)}
"""The ports of the processes in a pod, by its component."""
NODE = "10.0.0.1"


class ScriptedPods:
    """A Runtime. `faults`: what goes wrong in the pods and between them."""

    def __init__(self, faults: frozenset[str] = frozenset()) -> None:
        self._faults = faults
        self._labels: dict[str, Mapping[str, str]] = {}  # of pods that are no part of the release
        self._admitted: set[str] = set()
        self._objects: list[Object] = []
        self._secrets: Mapping[str, Mapping[str, bytes]] = {}
        self._templates: dict[str, Object] = {}
        self._stored, self._lost, self._restarts = 0, 0, 0

    # -------------------------------------------------------------------------------------- as a Runtime

    def start(self, objects: list[Object], secrets: Mapping[str, Mapping[str, bytes]]) -> None:
        self._secrets = secrets
        self.apply(objects)

    def add(self, pod: str, labels: Mapping[str, str]) -> None:
        self._labels[pod] = labels

    def secrets_changed(self) -> None:
        """Tokens are looked up when they are asked for."""

    def apply(self, objects: list[Object]) -> list[str]:
        self._objects, before = objects, self._templates
        self._templates = {
            f"{each['metadata']['name']}-{number}": each["spec"]["template"]
            for each in objects
            if each["kind"] == "StatefulSet"
            for number in range(each["spec"]["replicas"])
        }
        changed = [name for name, template in self._templates.items() if before.get(name) != template]
        if self._stored and "upgrade-loses" in self._faults:
            self._lost = self._stored // 2
        return changed

    def restart(self, pod: str) -> None:
        self._restarts += 1
        if "pages-lost" in self._faults and self._restarts == 2:  # the first follows an eviction
            self._lost = self._stored // 2

    def wait_ready(self, pod: str) -> None:
        assert pod in self._templates

    def stop(self) -> None:
        self._templates.clear()

    def address(self, pod: str) -> str:
        return f"10.0.1.{([*self._templates, *self._labels]).index(pod)}" if pod in self._known() else ""

    def execute(self, pod: str, argv: list[str], stdin: bytes) -> tuple[int, bytes, bytes]:
        assert argv[:2] == ["python3", "-"] and b"def main(job: str" in stdin
        job, *arguments = argv[2:]
        if job == "reach":
            return 0, f"open={','.join(sorted(self._reached(pod, arguments)))}\n".encode(), b""
        if job == "scrape":
            open_ones = self._reached(pod, arguments)
            return (0, b"series=99\n", b"") if open_ones == arguments else (1, b"", b"URLError\n")
        return self._worker(pod, job, *arguments)

    # ------------------------------------------------------------------------------------------ a worker

    def _worker(self, pod: str, job: str, address: str, token_file: str, *more: str) -> tuple[int, bytes, bytes]:
        assert selects({"matchLabels": {"kvcluster-client": "true"}}, self._labels[pod])
        assert address == self._connection()
        known = self._knows(token_file)
        if job in ("admitted", "refused"):
            fine = known == (job == "admitted")
            return (0, b"seconds=42\n", b"") if fine else (1, b"", b"TimeoutError: not within 1 s\n")
        if not known:
            return 1, b"", b"CredentialError: the cluster does not know this token\n"
        of = int(more[0]) * 16
        if job == "store":
            self._stored = of - (1 if "stores-less" in self._faults else 0)
            return 0, f"blocks={self._stored} of={of} miss=none\n".encode(), b""
        assert job == "load"
        blocks, wrong = self._stored - self._lost, int("wrong-bytes" in self._faults)
        return 0, f"blocks={blocks} of={of} wrong={wrong}\n".encode(), b""

    def _knows(self, token_file: str) -> bool:
        """Whether the cluster knows the token of that file, of the Secret that client pods mount."""
        folder, _, name = token_file.rpartition("/")
        token = self._secrets["prove-tokens"][name].decode()
        assert folder == "/etc/kvcluster-token" and len(token) >= 32
        if name == "next" and "token-unseen" in self._faults:
            return False
        if name in self._admitted and "token-stays" in self._faults:
            return True
        lines = self._secrets["cache-kvcluster-auth"]["tokens"].decode().splitlines()
        known = any(line.split() == [f"sha256:{digest(token)}", "prove"] for line in lines)
        self._admitted |= {name} if known else set()
        return known

    # ----------------------------------------------------------------------------------------- the network

    def _connection(self) -> str:
        (found,) = [each for each in self._objects if each["metadata"]["name"] == "cache-kvcluster-connection"]
        return str(found["data"]["KVCLUSTER_ADDRESS"])

    def _known(self) -> dict[str, Mapping[str, str]]:
        return {name: template["metadata"]["labels"] for name, template in self._templates.items()} | dict(self._labels)

    def _reached(self, pod: str, targets: Iterable[str]) -> list[str]:
        """Returns which HOST:PORT let that pod in."""
        labels, service = self._known(), self._connection().rpartition(":")[0]
        (of_service,) = [
            each for each in self._objects if each["kind"] == "Service" and service.startswith(each["metadata"]["name"])
        ]
        found = []
        for target in targets:
            host, _, port = target.rpartition(":")
            if host == service:
                served = {each["port"] for each in of_service["spec"]["ports"]}
                selector = {"matchLabels": of_service["spec"]["selector"]}
                (to,) = [name for name, its in labels.items() if selects(selector, its)]
                if int(port) not in served:
                    continue
            else:
                (to,) = [name for name in labels if self.address(name) == host]
            listens = LISTENS.get(labels[to].get("app.kubernetes.io/component", ""), ())
            if int(port) in listens and (to == pod or self._passes(pod, to, int(port))):
                found.append(target)
        return found

    def _passes(self, source: str, to: str, port: int) -> bool:
        """Whether the policies let the first packet of a connection through."""
        if "no-policies" in self._faults:
            return True
        if "all-closed" in self._faults:
            return False
        namespace = self._objects[0]["metadata"]["namespace"]
        peers = {name: Peer(its, namespace, (self.address(name),)) for name, its in self._known().items()}
        leaves = rules(self._objects, peers[source], [*peers.values()], NODE)
        enters = rules(self._objects, peers[to], [*peers.values()], NODE)
        return _accepts(leaves, "OUTPUT", self.address(to), port) and _accepts(
            enters, "INPUT", self.address(source), port
        )


def _accepts(made: list[list[str]], chain: str, other: str, port: int) -> bool:
    """Follows rules of iptables, as tests/pods/policies.py writes them, for a first packet of TCP."""
    for rule in (rule for rule in made if rule[1] == chain):
        words = dict(zip(rule[::2], rule[1::2], strict=True)) if "!" not in rule else {}
        if not words or "-i" in words or "-o" in words or words.get("-p", "tcp") != "tcp":
            continue
        if words.get("-s", words.get("-d", other)) != other:
            continue
        first, _, last = words.get("--dport", f"{port}:{port}").partition(":")
        if int(first) <= port <= int(last):
            return words["-j"] == "ACCEPT"
    return True
