"""What the objects of the chart say of pods, as values: containers with their command, environment, files and probes.

Pure. Only what the chart renders is understood; anything else raises, so that nothing is left out silently.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Objects = Sequence[Mapping[str, Any]]

_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_IGNORED = frozenset(
    {"serviceAccountName", "automountServiceAccountToken", "enableServiceLinks", "topologySpreadConstraints"}
    | {"affinity", "tolerations", "nodeSelector", "priorityClassName", "runtimeClassName"}
)
"""Fields of a pod that tell where it runs and whom it asks, which is Kubernetes' part."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder of a container. `volume`: its name in the pod; `kind`: configMap, secret, emptyDir, claim, or node for a
    directory of the node; `source`: the name of what lies there, or the node's path. `files`: keys with their file
    names, empty for all. `mode`: of files of a ConfigMap or Secret."""

    path: str
    volume: str
    kind: str
    source: str
    read_only: bool = False
    files: tuple[tuple[str, str], ...] = ()
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class Probe:
    """What is asked how often, and how many failures in a row count. `path`: of an HTTP probe, "" for one of TCP.
    `scheme`: http or https."""

    port: int
    path: str
    period_s: float
    timeout_s: float
    failures: int
    scheme: str = "http"


@dataclass(frozen=True, slots=True)
class Preparation:
    """An init container that runs as root with these capabilities alone."""

    argv: tuple[str, ...]
    mounts: tuple[Mount, ...]
    capabilities: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of one container, and of those that prepare its volumes. `template`: a digest of what it was made from:
    another one means another pod."""

    name: str
    owner: str
    labels: Mapping[str, str]
    argv: tuple[str, ...]
    env: Mapping[str, str]
    uid: int
    gid: int
    fs_group: int
    memory: int
    grace_s: float
    mounts: tuple[Mount, ...]
    probes: Mapping[str, Probe]
    template: str
    preparations: tuple[Preparation, ...] = ()


def named(objects: Objects, kind: str, name: str) -> Mapping[str, Any]:
    """Returns that object. Raises LookupError if it is not among them."""
    for each in objects:
        if each["kind"] == kind and each["metadata"]["name"] == name:
            return each
    raise LookupError(f"there is no {kind} {name}")


def of_kind(objects: Objects, kind: str) -> list[Mapping[str, Any]]:
    """Returns all objects of that kind."""
    return [each for each in objects if each["kind"] == kind]


def workloads(objects: Objects) -> list[Mapping[str, Any]]:
    """Returns the StatefulSets and DaemonSets."""
    return [*of_kind(objects, "StatefulSet"), *of_kind(objects, "DaemonSet")]


def all_pods(objects: Objects, addresses: Mapping[str, str]) -> list[Pod]:
    """Returns the pods of all workloads. `addresses`: the address of each pod by its name."""
    return [pod for each in workloads(objects) for pod in _pods_of(each, addresses)]


def pod_names(objects: Objects) -> list[str]:
    """Returns the names of the pods of all workloads."""
    return [name for each in workloads(objects) for name in _names(each)]


def partition(objects: Objects, owner: str) -> int:
    """Returns the ordinal from which on an update of that workload replaces its pods: 0 for a DaemonSet."""
    (workload,) = [each for each in workloads(objects) if each["metadata"]["name"] == owner]
    strategy = workload["spec"].get("updateStrategy", {})
    return int(strategy.get("rollingUpdate", {}).get("partition", 0))


def ordinal(pod: str) -> int:
    """Returns the number of a pod of a workload."""
    return int(pod.rpartition("-")[2])


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a selector by labels selects them. {} selects all."""
    assert set(selector) <= {"matchLabels"}, f"a selector that is not understood: {selector}"
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())


def nbytes(quantity: str) -> int:
    """Returns the bytes of a quantity such as 14792Mi."""
    number, unit = re.fullmatch(r"(\d+)([A-Za-z]*)", str(quantity)).groups()  # type: ignore[union-attr]
    return int(number) * _UNITS[unit]


# ---------------------------------------------------------------------------------------------- one set


def _names(workload: Mapping[str, Any]) -> list[str]:
    """The pods' names; of a DaemonSet one, since there is one node."""
    count = workload["spec"]["replicas"] if workload["kind"] == "StatefulSet" else 1
    return [f"{workload['metadata']['name']}-{number}" for number in range(count)]


def _pods_of(workload: Mapping[str, Any], addresses: Mapping[str, str]) -> Iterator[Pod]:
    spec = workload["spec"]
    template, claims = spec["template"], [each["metadata"]["name"] for each in spec.get("volumeClaimTemplates", ())]
    digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()
    for name in _names(workload):
        yield _pod(name, workload["metadata"]["name"], template, digest, claims, addresses[name])


def _pod(name: str, owner: str, template: Mapping[str, Any], digest: str, claims: Iterable[str], address: str) -> Pod:
    spec = template["spec"]
    known = {"containers", "initContainers", "volumes", "securityContext", "terminationGracePeriodSeconds"}
    assert set(spec) <= known | _IGNORED, f"fields that are not understood: {set(spec) - known - _IGNORED}"
    (container,) = spec["containers"]
    env = {each["name"]: _value(each, name, address) for each in container.get("env", ())}
    argv = [*container["command"], *container.get("args", ())]
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
    volumes = {each["name"]: each for each in spec.get("volumes", ())}
    volumes |= {claim: {"name": claim, "claim": f"{claim}-{name}"} for claim in claims}
    return Pod(
        name=name,
        owner=owner,
        labels=template["metadata"]["labels"],
        argv=tuple(_VARIABLE.sub(lambda match: env[match[1]], part) for part in argv),
        env=env,
        uid=container["securityContext"]["runAsUser"],
        gid=container["securityContext"]["runAsGroup"],
        fs_group=spec["securityContext"]["fsGroup"],
        memory=nbytes(container["resources"]["limits"]["memory"]),
        grace_s=spec.get("terminationGracePeriodSeconds", 30),
        mounts=tuple(_mount(each, volumes[each["name"]]) for each in container.get("volumeMounts", ())),
        probes={kind: _probe(container[kind], ports) for kind in _PROBES if kind in container},
        template=digest,
        preparations=tuple(_preparation(each, volumes) for each in spec.get("initContainers", ())),
    )


def _preparation(container: Mapping[str, Any], volumes: Mapping[str, Any]) -> Preparation:
    context = container["securityContext"]
    assert context["runAsUser"] == 0 and context["capabilities"]["drop"] == ["ALL"]
    return Preparation(
        (*container["command"], *container["args"]),
        tuple(_mount(each, volumes[each["name"]]) for each in container["volumeMounts"]),
        tuple(context["capabilities"]["add"]),
    )


_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def _value(variable: Mapping[str, Any], name: str, address: str) -> str:
    if "value" in variable:
        return str(variable["value"])
    fields = {"status.podIP": address, "metadata.name": name}
    return fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]


def _probe(probe: Mapping[str, Any], ports: Mapping[str, int]) -> Probe:
    get = probe["httpGet"] if "httpGet" in probe else probe["tcpSocket"]
    port = get["port"]
    return Probe(
        ports[port] if isinstance(port, str) else port,
        get.get("path", ""),
        probe.get("periodSeconds", 10),
        probe.get("timeoutSeconds", 1),
        probe.get("failureThreshold", 3),
        get.get("scheme", "HTTP").lower(),
    )


def _mount(mount: Mapping[str, Any], volume: Mapping[str, Any]) -> Mount:
    path, read_only = mount["mountPath"], mount.get("readOnly", False)
    where = path, volume["name"]
    for kind, name in (("configMap", "name"), ("secret", "secretName")):
        if kind in volume:
            source = volume[kind]
            files = tuple((item["key"], item["path"]) for item in source.get("items", ()))
            return Mount(*where, kind, source[name], read_only, files, source.get("defaultMode", 0o644))
    if "claim" in volume:
        return Mount(*where, "claim", volume["claim"], read_only)
    if "hostPath" in volume:
        return Mount(*where, "node", volume["hostPath"]["path"], read_only)
    assert "emptyDir" in volume, f"a volume that is not understood: {volume}"
    return Mount(*where, "emptyDir", volume["name"], read_only)
