"""A kubectl and a helm for scripts under test, which answer from the objects that the real Helm library renders.

It is not Kubernetes: a script talks to it by `kubectl.sh`, called `kubectl` or `helm`, first on PATH. It takes only the
verbs and options that it knows; it refuses objects that break Kubernetes' schemas and pods that break `restricted`; and
it has pods, volumes, budgets and Secrets as far as deploy/kubernetes/prove.sh asks for them. What pods do is the part
of a `Runtime`.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import socketserver
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import yaml

from tests.chart.security import restricted
from tests.chart.serving import serving

Object = dict[str, Any]
Render = Callable[[Mapping[str, Any], str, str], list[Object]]
"""From values, the name of the release and the namespace to objects."""
Check = Callable[[Object], None]
"""Raises if an object breaks its schema."""

WITH_VALUE = {
    "get": {"-o", "-l", "--sort-by", "--field-selector"},
    "create": {"-o", "-f", "--raw", "--from-file", "--dry-run"},
    "run": {"--image", "--restart", "--dry-run"},
    "apply": {"-f"},
    "wait": {"-l", "--for", "--timeout"},
    "delete": {"--timeout"},
    "rollout": {"--timeout"},
    "exec": set(),
    "label": set(),
    "config": set(),
}
"""The options of each verb of kubectl that take a value; -n is an option of all."""
WITHOUT_VALUE = {
    "get": {"--no-headers", "--ignore-not-found"},
    "wait": {"--all"},
    "delete": {"--all"},
    "run": {"--privileged"},
    "exec": {"-i"},
}
PLURALS = {"pods": "pod", "pvc": "persistentvolumeclaim", "pdb": "poddisruptionbudget", "events": "event"}


class Failed(Exception):
    """What a command says when it ends with a status of 1."""


class Runtime(Protocol):
    """Runs the pods of a release, and programs in them."""

    def start(self, objects: list[Object], secrets: Mapping[str, Mapping[str, bytes]]) -> None:
        """Starts the pods of these objects. `secrets` may change later."""

    def add(self, pod: str, labels: Mapping[str, str]) -> None:
        """A pod was made that is no part of the release."""

    def secrets_changed(self) -> None:
        """A Secret has other files now."""

    def apply(self, objects: list[Object]) -> list[str]:
        """Follows changed objects, and returns the pods that were replaced."""

    def restart(self, pod: str) -> None:
        """Ends a pod and starts its successor, with the same volume."""

    def wait_ready(self, pod: str) -> None:
        """Waits until the probes of a pod succeed."""

    def stop(self) -> None:
        """Ends all pods of the release."""

    def address(self, pod: str) -> str:
        """The address of a pod."""

    def execute(self, pod: str, argv: list[str], stdin: bytes) -> tuple[int, bytes, bytes]:
        """Runs a program in a pod, and returns its status and what it says."""


class FakeCluster:
    """A context manager; `environment` has what a script needs to find it. `faults`: what goes wrong, by names that
    stand where it does."""

    def __init__(
        self, folder: Path, render: Render, check: Check, runtime: Runtime, faults: frozenset[str] = frozenset()
    ) -> None:
        self._render, self._check, self.runtime, self.faults = render, check, runtime, faults
        self.commands: list[list[str]] = []
        self.namespaces: dict[str, dict[str, str]] = {}
        self.objects: list[Object] = []
        self.pods: dict[str, Object] = {}
        self.claims: dict[str, Object] = {}
        self.secrets: dict[str, dict[str, bytes]] = {}
        self._disrupted: list[str] = []
        self._numbers = count(1)
        self._bin = folder / "bin"
        self._serving = ExitStack()

    def __enter__(self) -> FakeCluster:
        self._bin.mkdir(parents=True)
        for name in ("kubectl", "helm"):
            shutil.copy(Path(__file__).with_name("kubectl.sh"), self._bin / name)
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), self._handler())
        self._serving.enter_context(serving(self._server))
        return self

    def __exit__(self, *error: object) -> None:
        self._serving.close()

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self._bin}:/usr/local/bin:/usr/bin:/bin"
        return {"PATH": path, "FAKE_CLUSTER_PORT": str(self._server.server_address[1]), "LC_ALL": "C"}

    # ---------------------------------------------------------------------------------------- commands

    def run(self, argv: list[str], stdin: bytes) -> tuple[int, bytes, bytes]:
        """Returns the status of a command and what it says."""
        self.commands.append(argv)
        try:
            if argv[0] == "helm":
                return 0, self._helm(argv[1:]).encode(), b""
            words, options = _parsed(argv[1:])
            if words[0] == "exec":
                self._namespace(options)
                return self.runtime.execute(words[1], argv[argv.index("--") + 1 :], stdin)
            return 0, getattr(self, f"_{words[0]}")(words[1:], options, stdin).encode(), b""
        except Failed as error:
            return 1, b"", f"{error}\n".encode()

    def _helm(self, argv: list[str]) -> str:
        verb, release, values, namespace = argv[0], argv[1], dict[str, Any](), ""
        chart, rest = ("", argv[2:]) if verb == "uninstall" else (argv[2], argv[3:])
        for option, value in zip(rest[::2], rest[1::2], strict=True):
            if option == "-n":
                namespace = value
            elif option == "-f":
                values = _merged(values, yaml.safe_load(Path(value).read_text(encoding="utf-8")))
            elif option in ("--set", "--set-string"):
                path, _, given = value.partition("=")
                values = _merged(values, _nested(path.split("."), given))
            else:
                raise Failed(f"Error: unknown flag: {option}")
        assert namespace in self.namespaces and (verb == "uninstall" or Path(chart, "Chart.yaml").exists())
        if verb == "uninstall":
            return self._uninstall()
        objects = self._render(values, release, namespace)
        if verb == "install":
            self._install(objects)
        else:
            assert verb == "upgrade" and self.objects
            self._upgrade(objects)
        return f"{verb}: {release}\n"

    def _install(self, objects: list[Object]) -> None:
        self.objects = objects
        for pod, template, claims in _stateful(objects):
            if not self._admits(template["spec"]) or self._is("refuses-shards", "-shard-" in pod):
                continue
            for claim in claims:
                phase = "Pending" if self._is("unbound", pod.endswith("-shard-1")) else "Bound"
                name = f"{claim['metadata']['name']}-{pod}"
                self.claims[name] = {
                    "kind": "PersistentVolumeClaim",
                    "metadata": {"name": name},
                    "spec": {**claim["spec"], "volumeName": f"pv-{next(self._numbers)}"},
                    "status": {"phase": phase},
                }
            self._add(pod, template)
        if "refuses-shards" not in self.faults:
            self.runtime.start(objects, self.secrets)

    def _upgrade(self, objects: list[Object]) -> None:
        self.objects = objects
        if "upgrade-skips" not in self.faults:
            templates = {pod: template for pod, template, _ in _stateful(objects)}
            for pod in self.runtime.apply(objects):
                self._add(pod, templates[pod])
        if "upgrade-takes-head" in self.faults:
            self._replace("cache-kvcluster-head-0")

    def _uninstall(self) -> str:
        left = [each for each in self.objects if each["kind"] == "Service"] if "leftovers" in self.faults else []
        self.objects = left
        self.pods = {name: pod for name, pod in self.pods.items() if "app" in pod["metadata"]["labels"]}
        if "volumes-gone" in self.faults:
            self.claims.clear()
        self.runtime.stop()
        return "release uninstalled\n"

    # ------------------------------------------------------------------------------------- kubectl VERB

    def _config(self, words: list[str], options: Mapping[str, list[str]], stdin: bytes) -> str:
        assert words == ["current-context"]
        return "fake\n"

    def _get(self, words: list[str], options: Mapping[str, list[str]], stdin: bytes) -> str:
        if words[0] == "namespace":
            return f"namespace/{words[1]}\n" if words[1] in self.namespaces else ""
        self._namespace(options)
        found = self._found(words, options)
        form = options["-o"][0]
        if form == "name":
            return "".join(f"{each['kind'].lower()}/{each['metadata']['name']}\n" for each in found)
        if form.startswith("jsonpath="):
            return _at(found[0], form.removeprefix("jsonpath={").removesuffix("}"))
        columns = [each.partition(":")[2] for each in form.removeprefix("custom-columns=").split(",")]
        return "".join("   ".join(_at(each, path) or "<none>" for path in columns) + "\n" for each in found)

    def _create(self, words: list[str], options: Mapping[str, list[str]], stdin: bytes) -> str:
        if "--raw" in options:
            return self._evict(options["--raw"][0], json.loads(stdin))
        if words[0] == "namespace":
            self.namespaces[words[1]] = {}
            return f"namespace/{words[1]} created\n"
        assert words[:2] == ["secret", "generic"]
        paths = [Path(each) for each in options["--from-file"]]
        data = {path.name: base64.b64encode(path.read_bytes()).decode() for path in paths}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": words[2]}, "data": data}
        if "--dry-run" in options:
            assert (options["--dry-run"], options["-o"]) == (["client"], ["yaml"])
            return yaml.safe_dump(secret)
        self._namespace(options)
        return self._write(secret)

    def _label(self, words: list[str], options: Mapping[str, list[str]], stdin: bytes) -> str:
        assert words[0] == "namespace"
        self.namespaces[words[1]] |= dict(each.split("=", 1) for each in words[2:])
        return f"namespace/{words[1]} labeled\n"

    def _run(self, words: list[str], options: Mapping[str, list[str]], stdin: bytes) -> str:
        assert options["--dry-run"] == ["server"] and options["--restart"] == ["Never"]
        context = {"securityContext": {"privileged": True}} if "--privileged" in options else {}
        container = {"name": words[0], "image": options["--image"][0], **context}
        self._admit(words[0], {"containers": [container]})
        return f"pod/{words[0]} created (server dry run)\n"

    def _apply(self, words: list[str], options: Mapping[str, list[str]], stdin: bytes) -> str:
        assert options["-f"] == ["-"] and not words
        self._namespace(options)
        return "".join(self._write(each) for each in yaml.safe_load_all(stdin))

    def _wait(self, words: list[str], options: Mapping[str, list[str]], stdin: bytes) -> str:
        self._namespace(options)
        for each in self._found(words, options, must_exist=options["--for"] != ["delete"]):
            condition, _, wanted = options["--for"][0].partition("=")
            if condition == "jsonpath":
                path, _, wanted = wanted.removeprefix("{").partition("}=")
                is_so = _at(each, path) == wanted
            elif condition == "condition":
                is_so = wanted in each["status"]["conditions"]
                if wanted == "Ready" and "app" not in each["metadata"]["labels"]:
                    self.runtime.wait_ready(each["metadata"]["name"])
            else:
                is_so = False
            if not is_so:
                raise Failed(f"error: timed out waiting for the condition on {each['metadata']['name']}")
            if each["metadata"]["name"] in self._disrupted:
                self._disrupted.remove(each["metadata"]["name"])
        return ""

    def _rollout(self, words: list[str], options: Mapping[str, list[str]], stdin: bytes) -> str:
        assert words[0] == "status"
        self._namespace(options)
        for pod in self.pods:
            if pod.rpartition("-")[0] == words[1].rpartition("/")[2]:
                if self._is("unready", pod.endswith("-1")):
                    raise Failed(f"error: timed out waiting for the condition on {words[1]}")
                self.runtime.wait_ready(pod)
        return "partitioned roll out complete\n"

    def _delete(self, words: list[str], options: Mapping[str, list[str]], stdin: bytes) -> str:
        if words[0] == "namespace":
            del self.namespaces[words[1]]
        elif words[0] == "pvc" and "--all" in options:
            self._namespace(options)
            self.claims.clear()
        else:
            assert words[0] == "pod"
            self._namespace(options)
            self._replace(words[1])
        return f"{words[0]} deleted\n"

    # ------------------------------------------------------------------------------------------ the pods

    def _is(self, fault: str, here: bool) -> bool:
        return here and fault in self.faults

    def _namespace(self, options: Mapping[str, list[str]]) -> None:
        if options.get("-n", [""])[0] not in self.namespaces:
            raise Failed(f"Error from server (NotFound): namespaces {options.get('-n')} not found")

    def _add(self, name: str, template: Object) -> None:
        number = next(self._numbers)
        labels = template["metadata"]["labels"]
        conditions = ["PodScheduled"] if self._is("unready", name.endswith("-1")) else ["PodScheduled", "Ready"]
        self.pods[name] = {
            "kind": "Pod",
            "metadata": {"name": name, "uid": f"uid-{number}", "labels": labels},
            "spec": template["spec"],
            "status": {"conditions": conditions, "containerStatuses": [{"restartCount": 0}]},
        }

    def _replace(self, name: str) -> None:
        self.runtime.restart(name)
        self._add(name, {"metadata": self.pods[name]["metadata"], "spec": self.pods[name]["spec"]})
        if self._is("volume-lost", "shard" in name):
            self.claims[f"disk-{name}"]["spec"]["volumeName"] = f"pv-{next(self._numbers)}"
        if self._is("head-takes-shards", name.endswith("-head-0")):
            self._replace("cache-kvcluster-shard-0")

    def _evict(self, path: str, eviction: Object) -> str:
        found = re.fullmatch(r"/api/v1/namespaces/([a-z-]+)/pods/([a-z0-9-]+)/eviction", path)
        assert (
            found and found[1] in self.namespaces and eviction["metadata"] == {"name": found[2], "namespace": found[1]}
        )
        assert (eviction["apiVersion"], eviction["kind"]) == ("policy/v1", "Eviction")
        for budget in (each for each in self.objects if each["kind"] == "PodDisruptionBudget"):
            its = budget["spec"]["selector"]["matchLabels"].items()
            away = [name for name in self._disrupted if its <= self.pods[name]["metadata"]["labels"].items()]
            full = len(away) >= budget["spec"]["maxUnavailable"] and "no-budget" not in self.faults
            if full and its <= self.pods[found[2]]["metadata"]["labels"].items():
                says = "Cannot evict pod as it would violate the pod's disruption budget."
                raise Failed(f"Error from server (TooManyRequests): {says}")
        self._disrupted.append(found[2])
        self._replace(found[2])
        return '{"kind":"Status","apiVersion":"v1","status":"Success"}'

    def _admits(self, pod: Object) -> bool:
        enforced = any("restricted" in labels.values() for labels in self.namespaces.values())
        return not enforced or not restricted(pod, [*pod.get("initContainers", []), *pod["containers"]])

    def _admit(self, name: str, pod: Object) -> None:
        if not self._admits(pod) and "admits-all" not in self.faults:
            raise Failed(
                f'Error from server (Forbidden): pods "{name}" is forbidden: violates PodSecurity "restricted"'
            )

    def _write(self, new: Object) -> str:
        self._check(new)
        name = new["metadata"]["name"]
        if new["kind"] == "Secret":
            self.secrets[name] = {key: base64.b64decode(value) for key, value in new["data"].items()}
            if self.pods:
                self.runtime.secrets_changed()
            if self._is("token-restarts", b"\n" in self.secrets[name].get("tokens", b"").strip()):
                self.pods["cache-kvcluster-head-0"]["status"]["containerStatuses"][0]["restartCount"] += 1
        else:
            assert new["kind"] == "Pod"
            self._admit(name, new["spec"])
            self._add(name, {"metadata": new["metadata"], "spec": new["spec"]})
            self.runtime.add(name, new["metadata"]["labels"])
        return f"{new['kind'].lower()}/{name} configured\n"

    # --------------------------------------------------------------------------------------- what is found

    def _found(self, words: list[str], options: Mapping[str, list[str]], *, must_exist: bool = True) -> list[Object]:
        if len(words) == 1 and "/" not in words[0]:
            wanted = dict(each.split("=", 1) for each in options.get("-l", [""])[0].split(",") if each)
            kinds = [PLURALS.get(kind, kind) for kind in words[0].split(",")]
            found = [each for kind in kinds for each in self._all(kind)]
            return [each for each in found if wanted.items() <= each["metadata"].get("labels", {}).items()]
        named = [each.split("/") for each in words] if "/" in words[0] else [[words[0], name] for name in words[1:]]
        found = []
        for kind, name in named:
            its = [each for each in self._all(PLURALS.get(kind, kind)) if each["metadata"]["name"] == name]
            if not its and must_exist and "--ignore-not-found" not in options:
                raise Failed(f'Error from server (NotFound): {kind} "{name}" not found')
            found += its
        return found

    def _all(self, kind: str) -> list[Object]:
        if kind == "pod":
            its = sorted(self.pods.items())
            return [{**pod, "status": {**pod["status"], "podIP": self.runtime.address(name)}} for name, pod in its]
        if kind == "persistentvolumeclaim":
            return [*self.claims.values()]
        return [self._with_status(each) for each in self.objects if each["kind"].lower() == kind]

    def _with_status(self, each: Object) -> Object:
        if each["kind"] == "StatefulSet":
            its = [pod for pod in self.pods if pod.rpartition("-")[0] == each["metadata"]["name"]]
            return {**each, "status": {"replicas": len(its)}}
        if each["kind"] == "PodDisruptionBudget":
            return {**each, "status": {"disruptionsAllowed": each["spec"]["maxUnavailable"] - len(self._disrupted)}}
        return each

    def _handler(self) -> type[socketserver.StreamRequestHandler]:
        cluster = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                parts = [self._part() for _ in range(int(self._part()) + 2)]
                status, said, complaints = cluster.run(
                    [each.decode() for each in parts[:-1]], base64.b64decode(parts[-1])
                )
                self.wfile.write(f"{status}\n".encode() + base64.b64encode(complaints) + b"\n" + said)

            def _part(self) -> bytes:
                found = bytearray()
                while (byte := self.rfile.read(1)) not in (b"\0", b""):
                    found += byte
                return bytes(found)

        return Handler


def _parsed(argv: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Returns the words of a command of kubectl and its options. Raises Failed for one that the verb does not have."""
    words: list[str] = []
    options: dict[str, list[str]] = {}
    rest = iter(argv)
    for each in rest:
        if each == "--":
            break
        if not each.startswith("-") or each == "-":
            words.append(each)
            continue
        option, equals, value = each.partition("=")
        verb = words[0] if words else ""
        if option == "-n" or option in WITH_VALUE.get(verb, ()):
            given = value if equals else next(rest, None)
            if given is None:
                raise Failed(f"error: flag needs an argument: {option}")
            options.setdefault(option, []).append(given)
        elif option in WITHOUT_VALUE.get(verb, ()) and not equals:
            options[option] = []
        else:
            raise Failed(f"error: unknown flag: {each}")
    if words[0] not in WITH_VALUE:
        raise Failed(f'error: unknown command "{words[0]}" for "kubectl"')
    return words, options


def _at(found: Any, path: str) -> str:
    """Returns what lies at a path such as .status.containerStatuses[0].restartCount; "" for nothing."""
    for part in re.findall(r"[A-Za-z_]+|\[\d+\]", path):
        try:
            found = found[int(part[1:-1])] if part.startswith("[") else found[part]
        except (KeyError, IndexError):
            return ""
    return str(found)


def _stateful(objects: list[Object]) -> Iterator[tuple[str, Object, list[Object]]]:
    """Yields each pod of the StatefulSets with its template and its claims."""
    for each in (each for each in objects if each["kind"] == "StatefulSet"):
        for number in range(each["spec"]["replicas"]):
            template, claims = each["spec"]["template"], each["spec"].get("volumeClaimTemplates", [])
            yield f"{each['metadata']['name']}-{number}", template, claims


def _nested(path: list[str], value: Any) -> Object:
    for part in reversed(path):
        value = {part: value}
    return dict(value)


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> Object:
    merged = dict(under)
    for key, value in over.items():
        merged[key] = _merged(merged.get(key) or {}, value) if isinstance(value, Mapping) else value
    return merged
