"""The Pod Security Standard `restricted`, field by field, with `baseline` which it contains.

Each line of https://kubernetes.io/docs/concepts/security/pod-security-standards/ is a line here. A pod is looked at as
it is written: nothing is filled in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
_SECCOMP = {"RuntimeDefault", "Localhost"}
_SYSCTLS = {"kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start"}
_SELINUX = {None, "", "container_t", "container_init_t", "container_kvm_t"}


def restricted(pod: dict[str, Any], containers: list[dict[str, Any]], *, of_pod: bool = True) -> list[str]:
    """Returns what `restricted` refuses of a pod's spec and of these containers; [] for nothing. `of_pod`: whether the
    pod's own fields are ours, too, or the containers must keep the standard by themselves."""
    found = [*_pod(pod)] if of_pod else [*_volumes(pod)]
    for each in containers:
        found += [f"{each['name']}: {fault}" for fault in _container(each)]
    return found


def _pod(pod: dict[str, Any]) -> Iterator[str]:
    yield from (f"{name} is set" for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name))
    yield from _volumes(pod)
    context = pod.get("securityContext", {})
    if context.get("runAsUser") == 0:
        yield "runAsUser is 0"
    if context.get("runAsNonRoot") is not True:
        yield "runAsNonRoot is not true"
    if context.get("seccompProfile", {}).get("type") not in _SECCOMP:
        yield "seccompProfile is not RuntimeDefault"
    if context.get("seLinuxOptions", {}).get("type") not in _SELINUX:
        yield "seLinuxOptions.type"
    if not {sysctl["name"] for sysctl in context.get("sysctls", [])} <= _SYSCTLS:
        yield "sysctls"
    if "windowsOptions" in context:
        yield "windowsOptions"


def _volumes(pod: dict[str, Any]) -> Iterator[str]:
    for volume in pod.get("volumes", []):
        if kinds := volume.keys() - {"name"} - _VOLUMES:
            yield f"volume {volume['name']} is a {', '.join(kinds)}"


def _container(container: dict[str, Any]) -> Iterator[str]:
    context = container.get("securityContext", {})
    if context.get("privileged"):
        yield "privileged"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if context.get("runAsNonRoot") is not True:
        yield "runAsNonRoot is not true"
    if not context.get("runAsUser"):
        yield "runAsUser is 0 or missing"
    if context.get("seccompProfile", {}).get("type") not in _SECCOMP:
        yield "seccompProfile is not RuntimeDefault"
    capabilities = context.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield "capabilities.drop has no ALL"
    if not set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"}:
        yield "capabilities.add"
    if context.get("procMount", "Default") != "Default":
        yield "procMount"
    if context.get("seLinuxOptions", {}).get("type") not in _SELINUX:
        yield "seLinuxOptions.type"
    if any("hostPort" in port for port in container.get("ports", [])):
        yield "hostPort"
    for probe in (container.get(name, {}) for name in ("startupProbe", "readinessProbe", "livenessProbe")):
        if probe.get("httpGet", {}).get("host") or probe.get("tcpSocket", {}).get("host"):
            yield "a probe asks another host"
