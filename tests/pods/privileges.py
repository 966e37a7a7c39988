"""What every process of a container must be without."""

from __future__ import annotations

import subprocess

from tests.pods.container import Container

_LOOK = "cat /proc/[0-9]*/status; ! touch /x 2>/dev/null && ! touch /etc/x 2>/dev/null && echo read-only"


def check_unprivileged(container: Container) -> None:
    """Every process has the pod's user and group and no capability, can gain none, and cannot write to the root."""
    name, uid, gid = container.pod.name, container.pod.uid, container.pod.gid
    said = subprocess.run(container.inside(["sh", "-c", _LOOK]), check=True, capture_output=True, text=True).stdout
    assert said.splitlines()[-1] == "read-only", name
    of: dict[str, set[str]] = {}
    for line in said.splitlines():
        field, _, value = line.partition(":")
        of.setdefault(field, set()).add(value.strip())
    assert uid != 0
    assert of["Uid"] == {"\t".join([str(uid)] * 4)}, name
    assert of["Gid"] == {"\t".join([str(gid)] * 4)}, name
    assert of["NoNewPrivs"] == {"1"}, name
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert of[kind] == {"0" * 16}, name
