"""Runs the pods that a chart renders, on hosts in a network of their own: what a kubelet, the controllers of
StatefulSets and DaemonSets, a DNS server and a network with policies do, as far as the chart's objects ask for it. All
pods are on one node, whose directories they may mount.

It is not Kubernetes: nothing is admitted, scheduled or restarted, and a pod counts as ready when its probes say so
once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvcluster.transport.credentials import CA_FILE, CERT_FILE, ENCRYPTION, KEY_FILE
from tests.hosts.hosts import ROOT
from tests.hosts.netns import Network
from tests.pods.container import Container, Image
from tests.pods.objects import (
    Mount,
    Objects,
    Pod,
    Preparation,
    Probe,
    all_pods,
    named,
    of_kind,
    ordinal,
    partition,
    pod_names,
    selects,
    workloads,
)
from tests.pods.policies import Peer, rules
from tests.pods.volumes import empty_folder, write_files
from tests.waiting import eventually

NODE = "node"
"""The host of the kubelet, which probes."""

_LONGEST_S = 180.0


@dataclass(frozen=True, slots=True)
class Client:
    """A pod that is no part of the release: an engine, or a stranger."""

    labels: Mapping[str, str]
    namespace: str


class Kubelet:
    """A context manager; leaving it ends all pods and takes the hosts away. `secrets`: files by name of the Secret.
    `clients`: other pods by a short name; each has a host of that name. `image`: what all containers are made from
    (container.py)."""

    def __init__(
        self,
        objects: Objects,
        secrets: Mapping[str, Mapping[str, bytes]],
        clients: Mapping[str, Client],
        image: Image | Path = Path(sys.prefix),
    ) -> None:
        self._objects, self._secrets, self._clients, self._image = objects, secrets, clients, image
        self._hosts = {name: f"pod{number}" for number, name in enumerate(pod_names(objects))}
        self.network = Network([*self._hosts.values(), *clients, NODE])
        self.containers: dict[str, Container] = {}
        self.stopped: dict[str, int | None] = {}
        """How each pod that was replaced has ended: its status, None if it had to be killed."""
        self._services: dict[str, str] = {}  # the address of each Service that has one

    def __enter__(self) -> Kubelet:
        self._folder = Path(tempfile.mkdtemp(prefix="kvpods-"))
        try:
            self.network.__enter__()
            self._take(self._objects)
            for pod in self._pods():
                self._start(pod)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.network.close()
        for container in self.containers.values():
            container.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -------------------------------------------------------------------------------------- what is done

    def apply(self, objects: Objects) -> list[str]:
        """Follows changed objects as an upgrade does: changed files appear in the pods, and pods whose template has
        changed are replaced, the highest ordinal first, each when the one before is ready, down to the partition.
        Returns the pods that were replaced."""
        self._take(objects)
        changed: dict[str, list[Pod]] = {}
        for pod in sorted(self._pods(), key=lambda pod: -ordinal(pod.name)):
            is_changed = self.containers[pod.name].pod.template != pod.template
            if is_changed and ordinal(pod.name) >= partition(objects, pod.owner):
                changed.setdefault(pod.owner, []).append(pod)
        with ThreadPoolExecutor(len(changed) or 1) as owners:  # each StatefulSet goes its own way
            list(owners.map(self._replace, changed.values()))
        return sorted(pod.name for pods in changed.values() for pod in pods)

    def restart(self, name: str) -> None:
        """Ends a pod and starts its successor, with the same volumes and address, and does not wait for it."""
        self._restart_as(self.containers[name].pod)

    def wait_ready(self, names: Iterable[str] = ()) -> None:
        """Waits until the probes of these pods, or of all, have succeeded. Raises AssertionError with the pod's log
        when a probe has failed as often as it may, or the pod has ended."""
        for name in names or self.containers:
            container = self.containers[name]
            for kind in ("startupProbe", "readinessProbe"):
                probe = container.pod.probes.get(kind)
                if probe is not None:
                    self._await(container, kind, probe)

    def alive(self, name: str) -> bool:
        """Whether the pod runs and its liveness probe succeeds."""
        container = self.containers[name]
        probe = container.pod.probes.get("livenessProbe")
        return container.runs() and (probe is None or self._probe(name, probe))

    def address(self, name: str) -> str:
        """The address of a pod, or of a Service that has one."""
        return self._services.get(name) or self.network.addresses[self._hosts.get(name, name)]

    def host_of(self, pod: str) -> str:
        """The host of a pod of the release, as `command` names it."""
        return self._hosts[pod]

    def command(self, client: str, argv: Sequence[str]) -> list[str]:
        """A command line that runs `argv` where that client is, with the cluster's names resolved, and with what an
        engine's pod has of the release's ConfigMap in its environment: how to connect, and by which authority."""
        bind = 'mount --bind "$0" /etc/hosts && mount --bind /dev/null /etc/resolv.conf && exec "$@"'
        bound = ["unshare", "--mount", "sh", "-c", bind, str(self._names())]
        return self.network.command(client, [*bound, "env", *self._connection(), *argv])

    def kvcluster(self, client: str, token: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of kvcluster where that client is, with its token."""
        return subprocess.run(
            self.command(client, [sys.executable, "-m", "kvcluster.cli.main", *arguments]),
            check=False,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ | {"KVCLUSTER_TOKEN": token},
        )

    def log(self, name: str) -> str:
        """What the pod has said, over all its starts."""
        return self.containers[name].log.read_text(encoding="utf-8", errors="replace")

    # ------------------------------------------------------------------------------------------ the pods

    def _pods(self) -> list[Pod]:
        return all_pods(self._objects, {name: self.address(name) for name in self._hosts})

    def _take(self, objects: Objects) -> None:
        assert pod_names(objects) == list(self._hosts), "the number of pods is fixed here"
        self._objects = objects
        self._serve()
        self._names().write_text(self._resolved(), encoding="utf-8")
        self._guard()
        for pod in self._pods():
            for mount in pod.mounts:
                self._fill(pod, mount)

    def _connection(self) -> list[str]:
        (data,) = [each["data"] for each in of_kind(self._objects, "ConfigMap") if ENCRYPTION in each["data"]]
        found = {ENCRYPTION: data[ENCRYPTION]}
        if CA_FILE in data:
            found[CA_FILE] = str(self._folder / "ca.crt")
            authorities = {files["ca.crt"] for files in self._secrets.values() if "ca.crt" in files}
            (self._folder / "ca.crt").write_bytes(b"".join(sorted(authorities)))
        for variable, file in ((CERT_FILE, "tls.crt"), (KEY_FILE, "tls.key")):
            if variable in data:
                (own,) = [files for name, files in self._secrets.items() if "-tenant-" in name]
                (self._folder / file).write_bytes(own[file])
                (self._folder / file).chmod(0o600)
                found[variable] = str(self._folder / file)
        return [f"{name}={value}" for name, value in found.items()]

    def _start(self, pod: Pod) -> None:
        folder = self._folder / pod.name
        folders = [self._volume(pod, mount) for mount in pod.mounts]
        for mount, there in zip(pod.mounts, folders, strict=True):
            if mount.kind == "emptyDir":  # as long as the pod lives
                shutil.rmtree(there, ignore_errors=True)
                self._fill(pod, mount)
        for preparation in pod.preparations:
            self._prepare(pod, preparation)
        enter = self.network.command(self._hosts[pod.name], [])
        self.containers[pod.name] = Container(pod, enter, folder, folders, self._names(), self._image)

    def _replace(self, pods: Iterable[Pod]) -> None:
        for pod in pods:
            self._restart_as(pod)
            self.wait_ready([pod.name])

    def _restart_as(self, pod: Pod) -> None:
        self.stopped[pod.name] = self.containers[pod.name].stop()
        self._start(pod)

    def _prepare(self, pod: Pod, preparation: Preparation) -> None:
        """Runs an init container as root with no capability but those that it has."""
        mounts = [(mount.path, self._volume(pod, mount)) for mount in preparation.mounts]
        lines = ["mount -t tmpfs tmpfs /run"]  # /var/run leads there, too
        lines += [f"mkdir -p {path}; mount --bind {folder} {path}" for path, folder in mounts]
        script = "; ".join([*lines, 'exec "$@"'])
        capabilities = ",".join(["-all", *(f"+{name.lower()}" for name in preparation.capabilities)])
        rights = ["setpriv", f"--bounding-set={capabilities}", "--inh-caps=-all", "--no-new-privs", "--clear-groups"]
        command = ["unshare", "--mount", "sh", "-ec", script, "sh", *rights, *preparation.argv]
        subprocess.run(command, check=True)

    def node_folder(self, path: str) -> Path:
        """The directory of the node that pods know by that path."""
        return self._folder / "node" / path.strip("/")

    def _volume(self, pod: Pod, mount: Mount) -> Path:
        if mount.kind == "node":
            return self.node_folder(mount.source)
        if mount.kind == "claim":
            return self._folder / "claims" / mount.source
        return self._folder / f"{pod.name}-volumes" / mount.volume

    def _fill(self, pod: Pod, mount: Mount) -> None:
        folder = self._volume(pod, mount)
        if mount.kind == "node":
            folder.mkdir(parents=True, exist_ok=True)
            return
        if mount.kind in ("emptyDir", "claim"):
            empty_folder(folder, mode=0o2777 if mount.kind == "emptyDir" else 0o2775, group=pod.fs_group)
            return
        if mount.kind == "configMap":
            data = {key: text.encode() for key, text in named(self._objects, "ConfigMap", mount.source)["data"].items()}
        else:
            data = dict(self._secrets[mount.source])
        files = mount.files or tuple((key, key) for key in data)
        write_files(folder, {path: data[key] for key, path in files}, mode=mount.mode, group=pod.fs_group)

    # ------------------------------------------------------------------------------------------- network

    def _serve(self) -> None:
        """Gives each Service that has an address one, which leads to its pod."""
        services = [each for each in of_kind(self._objects, "Service") if each["spec"].get("clusterIP") != "None"]
        for number, service in enumerate(services):
            name = service["metadata"]["name"]
            (pod,) = [pod for pod in self._labelled() if selects({"matchLabels": service["spec"]["selector"]}, pod[1])]
            if name not in self._services:
                self._services[name] = f"10.203.0.{200 + number}"
                self.network.move(self._services[name], self._hosts[pod[0]])

    def _labelled(self) -> list[tuple[str, Mapping[str, str]]]:
        sets = workloads(self._objects)
        labels = {each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"] for each in sets}
        return [(name, labels[name.rpartition("-")[0]]) for name in self._hosts]

    def _names(self) -> Path:
        return self._folder / "hosts"

    def _resolved(self) -> str:
        lines = ["127.0.0.1 localhost"]
        for service in of_kind(self._objects, "Service"):
            name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
            if name in self._services:
                lines.append(f"{self._services[name]} {_dns(name, namespace)}")
        for each in of_kind(self._objects, "StatefulSet"):  # a DaemonSet's pods have no names
            for pod in (pod for pod in self._hosts if pod.rpartition("-")[0] == each["metadata"]["name"]):
                service, namespace = each["spec"]["serviceName"], each["metadata"]["namespace"]
                lines.append(f"{self.address(pod)} {pod} {_dns(f'{pod}.{service}', namespace)}")
        return "\n".join(lines) + "\n"

    def _guard(self) -> None:
        """Has each pod's host drop what the policies do not allow, and what comes to a Service at another port."""
        labelled = self._labelled()
        namespace = of_kind(self._objects, "StatefulSet")[0]["metadata"]["namespace"]
        of_pod = {name: [address for service, address in self._services.items() if self._leads(service, labels)]
                  for name, labels in labelled}  # fmt: skip
        pods = {name: Peer(labels, namespace, (self.address(name), *of_pod[name])) for name, labels in labelled}
        clients = [Peer(each.labels, each.namespace, (self.address(name),)) for name, each in self._clients.items()]
        for name, pod in pods.items():
            lines = ["*filter", ":INPUT ACCEPT", ":FORWARD ACCEPT", ":OUTPUT ACCEPT"]
            lines += self._service_rules(of_pod[name])
            made = rules(self._objects, pod, [*pods.values(), *clients], self.address(NODE))
            lines += [" ".join(rule) for rule in made] + ["COMMIT", ""]
            restore = self.network.command(self._hosts[name], ["iptables-restore"])
            subprocess.run(restore, input="\n".join(lines), text=True, check=True)

    def _leads(self, service: str, labels: Mapping[str, str]) -> bool:
        return selects({"matchLabels": named(self._objects, "Service", service)["spec"]["selector"]}, labels)

    def _service_rules(self, addresses: Sequence[str]) -> list[str]:
        lines: list[str] = []
        for service, address in self._services.items():
            if address in addresses:
                chain = f"SERVICE-{address}"
                lines += [f":{chain} -", f"-A INPUT ! -i lo -d {address} -p tcp --syn -j {chain}"]
                ports = named(self._objects, "Service", service)["spec"]["ports"]
                lines += [f"-A {chain} -p tcp --dport {port['port']} -j RETURN" for port in ports]
                lines.append(f"-A {chain} -j DROP")
        return lines

    # -------------------------------------------------------------------------------------------- probes

    def _await(self, container: Container, kind: str, probe: Probe) -> None:
        name = container.pod.name
        try:
            eventually(
                lambda: self._probe(name, probe) or not container.runs(),
                min(_LONGEST_S, probe.period_s * probe.failures),
            )
        except AssertionError:
            said = "\n".join(f"--- {each}\n{self.log(each)[-2_000:]}" for each in self.containers)
            raise AssertionError(f"the {kind} of {name} fails\n{said}") from None
        assert container.runs(), f"{name} has ended: {self.log(name)[-4_000:]}"

    def _probe(self, name: str, probe: Probe) -> bool:
        if probe.path:
            url = f"{probe.scheme}://{self.address(name)}:{probe.port}{probe.path}"
            trusting = "context=ssl._create_unverified_context()"  # as a kubelet does
            ask = f"import ssl, urllib.request as u; u.urlopen({url!r}, timeout={probe.timeout_s}, {trusting}).read()"
        else:
            ask = f"import socket; socket.create_connection({(self.address(name), probe.port)}, {probe.timeout_s})"
        command = self.network.command(NODE, [sys.executable, "-I", "-S", "-c", ask])
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _dns(name: str, namespace: str) -> str:
    return " ".join((name, f"{name}.{namespace}", f"{name}.{namespace}.svc", f"{name}.{namespace}.svc.cluster.local"))
