"""The objects of a release, looked at as the checks need them: pods with their templates, files, ports."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvcluster.config import Config, load

Object = dict[str, Any]


@dataclass(frozen=True)
class PodTemplate:
    """A pod as a controller makes it. `owner`: the name of its controller."""

    owner: str
    labels: Mapping[str, str]
    spec: Object
    claims: tuple[str, ...] = ()

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def is_selected_by(self, selector: Mapping[str, str]) -> bool:
        return bool(selector) and selector.items() <= self.labels.items()


@dataclass(frozen=True)
class Release:
    """What one installation has written. `notes`: what Helm says afterwards."""

    values: Mapping[str, Any]
    objects: list[Object]
    notes: str = ""
    _parsed: dict[str, Config] = field(default_factory=dict)

    def of(self, *kinds: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] in kinds]

    def one(self, kind: str, ending: str) -> Object:
        """Returns the only object of that kind whose name ends so."""
        (found,) = [each for each in self.of(kind) if each["metadata"]["name"].endswith(ending)]
        return found

    @property
    def mode(self) -> str:
        return str(self.values.get("mode", "cluster"))

    @property
    def pods(self) -> list[PodTemplate]:
        """The pods of every controller, and an engine's pod with the sidecar's patch."""
        found = []
        for each in self.of("StatefulSet", "DaemonSet", "Deployment"):
            spec = each["spec"]
            claims = tuple(claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", []))
            template = spec["template"]
            found.append(
                PodTemplate(each["metadata"]["name"], template["metadata"]["labels"], template["spec"], claims)
            )
        return [*found, *self.patched_engines()]

    def patched_engines(self) -> Iterator[PodTemplate]:
        """Pods of an ordinary Deployment of engines after the patch of mode sidecar."""
        if self.mode != "sidecar":
            return
        for name, text in self.one("ConfigMap", "-sidecar")["data"].items():
            patch = yaml.safe_load(text)["spec"]["template"]
            engine = {
                "name": "engine",
                "image": "vllm/vllm-openai",
                "ports": [{"name": "http", "containerPort": 8000}],
            }
            labels = {"app": "engine", **patch["metadata"]["labels"]}
            yield PodTemplate(f"engine with {name}", labels, {**patch["spec"], "containers": [engine]})

    @property
    def config(self) -> Config:
        """The configuration that the pods mount, read by the program."""
        if "config" not in self._parsed:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "cluster.toml")
                path.write_text(self.one("ConfigMap", "-config")["data"]["cluster.toml"], encoding="utf-8")
                self._parsed["config"] = load(path)
        return self._parsed["config"]


def ours(pod: PodTemplate) -> list[Object]:
    """Returns the containers of a pod that run what the chart says: not an engine, nor what values have added."""
    return [each for each in pod.containers if each["name"] not in ("engine", "agent", "first")]
