"""An in-memory API server, enough for the real Helm library to install, upgrade and uninstall a release.

It is not Kubernetes: nothing is scheduled, admitted, defaulted or run. It has what Helm asks for (discovery, reading,
creating, applying, deleting) and refuses what a real one refuses of a write: fields that the schema of its kind does
not have, and changes of fields that cannot be changed. It listens on loopback and keeps everything in a dictionary.
"""

from __future__ import annotations

import base64
import json
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.chart import protobuf
from tests.chart.schemas import Invalid, check_schema
from tests.chart.serving import serving

Object = dict[str, Any]
Key = tuple[str, str, str]
"""Plural, namespace, name."""

_MOST_BYTES = 8 * 2**20
_SET_SPEC_MAY_CHANGE = {"replicas", "template", "updateStrategy", "persistentVolumeClaimRetentionPolicy"}
_SET_SPEC_MAY_CHANGE |= {"ordinals", "minReadySeconds", "revisionHistoryLimit"}


class Kind(NamedTuple):
    """A kind of object that the server knows."""

    group_version: str
    plural: str
    kind: str


KINDS = (
    *(Kind("v1", f"{kind.lower()}s", kind) for kind in ("ConfigMap", "Secret", "Service", "ServiceAccount", "Pod")),
    *(Kind("apps/v1", f"{kind.lower()}s", kind) for kind in ("StatefulSet", "DaemonSet", "Deployment")),
    Kind("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy"),
    Kind("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    *(
        Kind("monitoring.coreos.com/v1", f"{kind.lower()}s", kind)
        for kind in ("PodMonitor", "ServiceMonitor", "PrometheusRule")
    ),
    Kind("cert-manager.io/v1", "certificates", "Certificate"),
)
_BY_PLURAL = {kind.plural: kind for kind in KINDS}


class ApiServer:
    """Use as a context manager. `objects` holds everything that was written, Helm's own records among it."""

    def __init__(self) -> None:
        self.objects: dict[Key, Object] = {}
        self.lock = threading.Lock()
        self.refused: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._serving = ExitStack()

    def __enter__(self) -> ApiServer:
        self._serving.enter_context(serving(self._server))
        return self

    def __exit__(self, *error: object) -> None:
        self._serving.close()

    @property
    def kubeconfig(self) -> str:
        """A configuration for clients of this server."""
        where = {"server": f"http://127.0.0.1:{self._server.server_port}"}
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "memory", "cluster": where}],
                "users": [{"name": "memory", "user": {}}],
                "contexts": [{"name": "memory", "context": {"cluster": "memory", "user": "memory"}}],
                "current-context": "memory",
            }
        )

    def owned(self) -> list[Object]:
        """Returns all objects but the records that Helm keeps of releases."""
        return [found for found in self.objects.values() if found.get("type") != "helm.sh/release.v1"]

    # ------------------------------------------------------------------------------------------- writes

    def create(self, kind: Kind, namespace: str, new: Object) -> Object:
        key = kind.plural, namespace, new["metadata"]["name"]
        with self.lock:
            if key in self.objects:
                raise Refused(409, "AlreadyExists", f"{kind.plural} {key[2]!r} already exists")
            return self._write(key, new, None)

    def replace(self, kind: Kind, namespace: str, name: str, new: Object, *, upsert: bool = False) -> Object:
        key = kind.plural, namespace, name
        with self.lock:
            old = self.objects.get(key)
            if old is None and not upsert:
                raise Refused(404, "NotFound", f"{kind.plural} {name!r} not found")
            return self._write(key, new, old)

    def _write(self, key: Key, new: Object, old: Object | None) -> Object:
        try:
            check_schema(new)
            _check_unchanged(new, old)
        except Invalid as error:
            self.refused.append(str(error))
            raise Refused(422, "Invalid", str(error)) from None
        stored = json.loads(json.dumps(new))
        stored["metadata"] |= {"namespace": key[1], "uid": "-".join(key)}
        stored["metadata"]["resourceVersion"] = str(int(old["metadata"]["resourceVersion"]) + 1 if old else 1)
        self.objects[key] = stored
        return stored

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(_Handler):
            server_of = api

        return Handler


class Refused(Exception):
    """What is answered with a status that is no success."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


def _check_unchanged(new: Object, old: Object | None) -> None:
    """Raises Invalid if a field changes that a real API server refuses to change."""
    if old is None:
        return
    before, after = old.get("spec") or {}, new.get("spec") or {}
    fixed: set[str] = set()
    if new["kind"] == "StatefulSet":
        fixed = (before.keys() | after.keys()) - _SET_SPEC_MAY_CHANGE
    elif new["kind"] in ("DaemonSet", "Deployment"):
        fixed = {"selector"}
    elif new["kind"] == "Service":
        fixed = {"clusterIP"}
    for name in sorted(fixed):
        if before.get(name) != after.get(name):
            raise Invalid(f"{new['kind']} {new['metadata']['name']}: spec.{name} cannot be changed")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in one packet: the second of two would wait 40 ms for the client's acknowledgement
    server_of: ApiServer

    def log_message(self, format: str, *args: object) -> None:
        """Keeps quiet."""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def do_PATCH(self) -> None:
        self._answer(self._patch)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    # ------------------------------------------------------------------------------------------- verbs

    def _get(self) -> tuple[int, Object]:
        parts = self._parts()
        if parts[:1] == ["version"]:
            return 200, {"major": "1", "minor": "34", "gitVersion": "v1.34.0", "platform": "linux/amd64"}
        discovered = _discovery(parts)
        if discovered is not None:
            return 200, discovered
        kind, namespace, name = self._where()
        with self.server_of.lock:
            if name:
                found = self.server_of.objects.get((kind.plural, namespace, name))
                if found is None:
                    raise Refused(404, "NotFound", f"{kind.plural} {name!r} not found")
                return 200, found
            items = [found for key, found in self.server_of.objects.items() if key[:2] == (kind.plural, namespace)]
        wanted = dict(pair.split("=", 1) for pair in self._query("labelSelector").split(",") if "=" in pair)
        items = [each for each in items if wanted.items() <= (each["metadata"].get("labels") or {}).items()]
        return 200, {"kind": f"{kind.kind}List", "apiVersion": kind.group_version, "metadata": {}, "items": items}

    def _post(self) -> tuple[int, Object]:
        kind, namespace, _ = self._where()
        return 201, self.server_of.create(kind, namespace, self._body(kind))

    def _put(self) -> tuple[int, Object]:
        kind, namespace, name = self._where()
        return 200, self.server_of.replace(kind, namespace, name, self._body(kind))

    def _patch(self) -> tuple[int, Object]:
        kind, namespace, name = self._where()
        if self.headers["Content-Type"] != "application/apply-patch+yaml":
            raise Refused(415, "UnsupportedMediaType", "this server knows server-side apply alone")
        return 200, self.server_of.replace(kind, namespace, name, yaml.safe_load(self._read()), upsert=True)

    def _delete(self) -> tuple[int, Object]:
        self._read()
        kind, namespace, name = self._where()
        with self.server_of.lock:
            if self.server_of.objects.pop((kind.plural, namespace, name), None) is None:
                raise Refused(404, "NotFound", f"{kind.plural} {name!r} not found")
        return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    # ----------------------------------------------------------------------------------------- requests

    def _answer(self, act: Any) -> None:
        try:
            code, body = act()
        except Refused as error:
            code = error.code
            status = {"status": "Failure", "reason": error.reason, "code": code, "message": str(error)}
            body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, **status}
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _parts(self) -> list[str]:
        return [part for part in urlsplit(self.path).path.split("/") if part]

    def _query(self, name: str) -> str:
        return parse_qs(urlsplit(self.path).query).get(name, [""])[0]

    def _where(self) -> tuple[Kind, str, str]:
        """Returns the kind, namespace and name ("" for all) of the path."""
        parts = self._parts()
        rest = parts[2:] if parts[0] == "api" else parts[3:]
        if len(rest) < 3 or rest[0] != "namespaces" or rest[2] not in _BY_PLURAL:
            raise Refused(404, "NotFound", f"there is no {self.path}")
        return _BY_PLURAL[rest[2]], rest[1], rest[3] if len(rest) > 3 else ""

    def _read(self) -> bytes:
        length = int(self.headers.get("Content-Length") or 0)
        if length > _MOST_BYTES:
            raise Refused(413, "RequestEntityTooLarge", "the object is too large")
        return self.rfile.read(length)

    def _body(self, kind: Kind) -> Object:
        data = self._read()
        if not data.startswith(protobuf.MAGIC):
            body: Object = json.loads(data)
            return body
        if kind.kind != "Secret":
            raise Refused(415, "UnsupportedMediaType", f"a {kind.kind} in protobuf is not understood")
        return _secret(data)


def _secret(data: bytes) -> Object:
    """Returns the Secret of Helm's record of a release, which its client sends in protobuf."""
    unknown = protobuf.fields(data[len(protobuf.MAGIC) :])
    secret = protobuf.fields(unknown[2][0])
    meta = protobuf.fields(secret[1][0])
    labels = dict(protobuf.entry(each) for each in meta.get(11, []))
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": meta[1][0].decode(),
            "labels": {key.decode(): value.decode() for key, value in labels.items()},
        },
        "type": secret[3][0].decode(),
        "data": {
            key.decode(): base64.b64encode(value).decode()
            for key, value in (protobuf.entry(each) for each in secret.get(2, []))
        },
    }


def _discovery(parts: list[str]) -> Object | None:
    """Returns the answer to a question of discovery; None if it is none."""
    group_versions = list(dict.fromkeys(kind.group_version for kind in KINDS))
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"]}
    if parts == ["apis"]:
        groups = []
        for each in group_versions:
            if "/" in each:
                named = {"groupVersion": each, "version": each.partition("/")[2]}
                groups.append({"name": each.partition("/")[0], "versions": [named], "preferredVersion": named})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    path = "/".join(parts[1:])
    if parts[0] in ("api", "apis") and path in group_versions:
        verbs = ["create", "delete", "get", "list", "patch", "update"]
        resources = [
            {"name": kind.plural, "singularName": kind.kind.lower(), "namespaced": True, "kind": kind.kind}
            | {"verbs": verbs}
            for kind in KINDS
            if kind.group_version == path
        ]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": path, "resources": resources}
    return None
