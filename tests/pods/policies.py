"""NetworkPolicies as rules of iptables for the host of one pod.

Pure. A policy says which peers may reach the pods that it selects, and which these may reach; what no policy names is
dropped once one selects the pod. Answers of connections that are allowed pass: any segment but the first of a TCP
connection. As in Kubernetes, the node itself, which probes, is not kept out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.pods.objects import Objects, of_kind, selects

NAMESPACE_LABEL = "kubernetes.io/metadata.name"


@dataclass(frozen=True, slots=True)
class Peer:
    """A pod as policies see it, with all addresses that lead to it."""

    labels: Mapping[str, str]
    namespace: str
    addresses: tuple[str, ...]


def rules(objects: Objects, pod: Peer, peers: Sequence[Peer], node: str) -> list[list[str]]:
    """Returns the arguments of iptables, one list for each rule, in order. `peers`: all pods, this one among them.
    `node`: the address of the pod's node."""
    policies = [
        each["spec"]
        for each in of_kind(objects, "NetworkPolicy")
        if each["metadata"]["namespace"] == pod.namespace and selects(each["spec"]["podSelector"], pod.labels)
    ]
    made: list[list[str]] = []
    for direction, chain, key, end in (("Ingress", "INPUT", "from", "-s"), ("Egress", "OUTPUT", "to", "-d")):
        its = [policy for policy in policies if direction in policy["policyTypes"]]
        if not its:
            continue
        made += [
            ["-A", chain, *("-i" if chain == "INPUT" else "-o", "lo"), "-j", "ACCEPT"],
            ["-A", chain, "-p", "tcp", "!", "--syn", "-j", "ACCEPT"],
            ["-A", chain, end, node, "-j", "ACCEPT"],
        ]
        for policy in its:
            for rule in policy.get(direction.lower(), ()):
                made += _of_rule(chain, end, rule, rule.get(key), pod, peers)
        made.append(["-A", chain, "-j", "DROP"])
    return made


def _of_rule(
    chain: str,
    end: str,
    rule: Mapping[str, Any],
    among: Sequence[Mapping[str, Any]] | None,
    pod: Peer,
    peers: Sequence[Peer],
) -> Iterator[list[str]]:
    ends: Iterable[list[str]] = [[]]  # without peers a rule is for everybody
    if among is not None:
        chosen = [peer for peer in peers if any(_is_meant(each, peer, pod.namespace) for each in among)]
        ends = [[end, address] for peer in chosen for address in peer.addresses]
    for one in ends:
        for port in rule.get("ports") or [{}]:
            yield ["-A", chain, *one, *_port(port), "-j", "ACCEPT"]


def _port(port: Mapping[str, Any]) -> list[str]:
    if not port:
        return []
    first = int(port["port"])
    return ["-p", port.get("protocol", "TCP").lower(), "--dport", f"{first}:{port.get('endPort', first)}"]


def _is_meant(meant: Mapping[str, Any], peer: Peer, namespace: str) -> bool:
    assert set(meant) <= {"podSelector", "namespaceSelector"}, f"a peer that is not understood: {meant}"
    if "namespaceSelector" in meant:
        if not selects(meant["namespaceSelector"], {NAMESPACE_LABEL: peer.namespace}):
            return False
    elif peer.namespace != namespace:
        return False
    return selects(meant.get("podSelector", {}), peer.labels)
