"""Writes helm/kvcluster/values.schema.json: the type of every value, so that Helm refuses a misspelt key or a wrong
type by its name.

Types come from the defaults in values.yaml, and those of `config` from the settings of kvcluster/config themselves.
What a default cannot say (choices, sizes, what may be null) stands in _RULES.

    python tools/chart_schema.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import yaml

from kvcluster.config import (
    CODECS,
    ENCRYPTIONS,
    LOG_FORMATS,
    LOSSES,
    NETWORK,
    NO_ENCRYPTION,
    TRANSPORTS,
    Config,
    ShardConfig,
    loading,
)
from kvcluster.config.sections import OF
from kvcluster.eviction import POLICIES

CHART = Path(__file__).parents[1] / "helm" / "kvcluster"
SCHEMA = CHART / "values.schema.json"

Schema = dict[str, Any]

SIZE: Schema = {
    "description": 'Bytes, as a number or as text such as "4096", "512MiB" or "1.5GiB"',
    "anyOf": [
        {"type": "integer", "minimum": 0},
        {
            "type": "string",
            "pattern": r"^ *([0-9]{1,15} *[Bb]?|[0-9]{1,9}(\.[0-9]{1,6})? *[KkMm][Ii]?[Bb]"
            r"|[0-9]{1,6}(\.[0-9]{1,6})? *([Gg][Ii]?|[Tt][Ii])[Bb]) *$",
        },
    ],
}
QUANTITY: Schema = {
    "description": 'Bytes as Kubernetes writes them, such as "40Gi"; "" for none',
    "anyOf": [
        {"type": "integer", "minimum": 0},
        {"type": "string", "pattern": r"^([0-9]{1,12}(\.[0-9]{1,6})?(k|[KMGT]i|[MGT])?)?$"},
    ],
}
_CPU: Schema = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^([0-9]+m|[0-9]+(\.[0-9]+)?)?$"}]}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_USER: Schema = {"type": ["integer", "null"], "minimum": 1}
_UNHEALTHY: Schema = {"enum": ["", "AlwaysAllow", "IfHealthyBudget"]}
_TRISTATE: Schema = {"type": ["boolean", "null"]}
_PEERS: Schema = {"type": "array", "items": {"type": "object"}}
_HOURS: Schema = {"type": "string", "pattern": "^[1-9][0-9]{0,5}h$"}
_HOST_PORT: Schema = {"type": "string", "pattern": r"^([^:\s]+:[0-9]{1,5})?$"}
_LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}

_RULES: dict[str, Schema] = {
    "security.encryption": {"enum": list(ENCRYPTIONS)},
    "security.rayEncryption": {"enum": [NETWORK, NO_ENCRYPTION]},
    "security.certManager.duration": _HOURS,
    "security.certManager.renewBefore": _HOURS,
    "security.certManager.dnsNames": {"type": "array", "items": {"type": "string", "pattern": "^[a-z0-9.*-]+$"}},
    "security.certManager.clients": {
        "type": "array",
        "uniqueItems": True,
        "items": {
            "type": "string",
            "pattern": "^(operator|events|tenant-[a-z0-9]([a-z0-9.-]{0,40}[a-z0-9])?)$",
        },
    },
    "mode": {"enum": ["cluster", "sidecar", "node-local", "join"]},
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "image.digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "image.command": {"type": "array", "items": {"type": "string"}, "minItems": 1},
    "shards.replicas": {"type": ["integer", "null"], "minimum": 0},
    "shards.perPod": {"type": "integer", "minimum": 1, "maximum": 64},
    "shards.gpu.count": _COUNT,
    "shards.disk.whenDeleted": {"enum": ["Retain", "Delete"]},
    "shards.disk.whenScaled": {"enum": ["Retain", "Delete"]},
    "shards.disk.size": QUANTITY,
    "shards.stop.pages": {"enum": ["", "drain", "save"]},
    "shards.stop.drainRate": SIZE,
    "shards.stop.saveRate": SIZE,
    "shards.stop.maxSeconds": {"type": "integer", "minimum": 1, "maximum": 3_600},
    "shards.stop.noticeSeconds": _COUNT,
    "shards.updateStrategy.partition": _COUNT,
    "shards.minReadySeconds": _COUNT,
    "shards.podDisruptionBudget.maxUnavailable": {"type": ["integer", "null"], "minimum": 0},
    "shards.podDisruptionBudget.minAvailable": {"type": ["integer", "null"], "minimum": 0},
    "shards.podDisruptionBudget.unhealthyPodEvictionPolicy": _UNHEALTHY,
    "head.podDisruptionBudget.maxUnavailable": {"type": "integer", "minimum": 0},
    "head.podDisruptionBudget.unhealthyPodEvictionPolicy": _UNHEALTHY,
    "head.service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "redis.podDisruptionBudget.maxUnavailable": {"type": "integer", "minimum": 0},
    "redis.podDisruptionBudget.unhealthyPodEvictionPolicy": _UNHEALTHY,
    "shards.topologySpreadConstraints": {"type": ["array", "null"], "items": {"type": "object"}},
    "head.restartOnConfigChange": _TRISTATE,
    "head.blockBytes": SIZE,
    "head.state.size": QUANTITY,
    "redis.address": _HOST_PORT,
    "redis.storage.size": QUANTITY,
    "redis.runAsUser": _USER,
    "sidecar.engineGraceSeconds": _COUNT,
    "nodeLocal.expectedNodes": {"type": "integer", "minimum": 1},
    "nodeLocal.maxUnavailable": {
        "anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": "^[1-9][0-9]?%$"}]
    },
    "nodeLocal.group": {"type": "integer", "minimum": 1},
    "nodeLocal.hostPath.path": {"type": "string", "pattern": "^(/[^/]+)*$"},
    "nodeLocal.csi": {"type": "object"},
    "join.address": _HOST_PORT,
    "join.headSelector": _LABELS,
    "connection.tlsDir": {"type": "string", "pattern": "^(/[^/]+)+$"},
    "networkPolicy.dnsPorts": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 65_535}},
    "networkPolicy.engines": _PEERS,
    "networkPolicy.monitoring": _PEERS,
    "monitoring.podMonitor": _TRISTATE,
    "monitoring.serviceMonitor": _TRISTATE,
    "monitoring.prometheusRule": _TRISTATE,
    "monitoring.dashboard": _TRISTATE,
    "monitoring.interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
    "monitoring.tlsConfig": {"type": "object"},
    "monitoring.dashboardLabels": _LABELS,
    "runAsUser": _USER,
    "runAsGroup": _USER,
    "tmpSize": QUANTITY,
    "commonLabels": _LABELS,
    "fullnameOverride": {"type": "string", "pattern": "^([a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?)?$"},
}
_RULES |= {
    f"{of}.resources.{kind}.{name}": rule
    for of in ("shards", "head", "redis", "join")
    for kind in ("requests", "limits")
    for name, rule in (("cpu", _CPU), ("memory", QUANTITY))
}

_CHOICES: dict[str, tuple[str, ...]] = {
    "coordinator.host_codec": CODECS,
    "coordinator.eviction_policy": tuple(POLICIES),
    "log.format": LOG_FORMATS,
    "client.accept": LOSSES,
    "client.encryption": ("", *ENCRYPTIONS),
    "client.transports": TRANSPORTS,
    "server.transports": TRANSPORTS,
}
_GROUP = "#/definitions/group"

_AMOUNT: Schema = {"type": ["string", "number", "null"]}
"""Of a resource that the chart only passes on, such as ephemeral-storage or rdma/hca."""

_LEFT_OUT = {"replicas", "runAsUser", "runAsGroup", "resources", "requests", "limits", "cpu", "memory", "clusterDomain"}
_LEFT_OUT |= {"shards.podDisruptionBudget.maxUnavailable"}
"""Values with a default that null leaves out of the objects."""


def schema(values: Mapping[str, Any]) -> Schema:
    """Returns the schema of values with these defaults. Raises ValueError for a default of null without a rule, and
    for a rule of a value that there is not."""
    unused = set(_RULES)
    whole = _of_table({name: value for name, value in values.items() if name not in ("config", "groups")}, "", unused)
    if unused:
        raise ValueError(f"there are no values {', '.join(sorted(unused))}")
    group = whole["properties"]["shards"]
    group["properties"]["shard"] = {"$ref": "#/definitions/shard"}
    whole["properties"] |= {
        "shards": {"allOf": [{"$ref": _GROUP}, _present(values["shards"], "shards.")]},
        "groups": {
            "type": "object",
            "propertyNames": {"pattern": "^[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?$"},
            "additionalProperties": {"anyOf": [{"$ref": _GROUP}, {"type": "null"}]},
        },
        "config": {"$ref": "#/definitions/config"},
        "global": {
            "type": "object",
            "description": "What a chart above this one gives to all of its charts; imageRegistry and imagePullSecrets "
            "are used here",
            "properties": {"imageRegistry": {"type": "string"}, "imagePullSecrets": {"type": "array"}},
        },
        "enabled": {"type": "boolean", "description": "The condition of a chart above this one; without effect here"},
    }
    present = _present({name: value for name, value in values.items() if name != "shards"})
    present["required"].append("shards")
    whole = {"allOf": [present], **whole}
    definitions = {"size": SIZE, "group": group, "shard": settings(ShardConfig, "shard."), "config": settings(Config)}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **whole, "definitions": definitions}


def _present(defaults: Mapping[str, Any], above: str = "") -> Schema:
    """Returns a schema that refuses null, by name, for a value whose default is not empty: Helm takes such a value out
    before it renders."""
    empty: tuple[object, ...] = ({}, [], "", None)
    needed = [name for name in defaults if not {name, above + name} & _LEFT_OUT and defaults[name] not in empty]
    tables = [name for name in needed if isinstance(defaults[name], dict) and name != "config"]
    below = {name: _present(defaults[name], f"{above}{name}.") for name in tables}
    return {"required": needed, "properties": below}


def settings(kind: type[Any], prefix: str = "") -> Schema:
    """Returns the schema of a section of the configuration."""
    named = {each.name: _setting(each, prefix) for each in fields(kind)}
    return _closed(named | {old: named[new] for old, new in loading.SETTINGS.items() if new in named})


def text(values: Path = CHART / "values.yaml") -> str:
    """Returns what the file should contain."""
    return json.dumps(schema(yaml.safe_load(values.read_text(encoding="utf-8"))), indent=1) + "\n"


def _setting(found: Field[Any], prefix: str) -> Schema:
    name = prefix + found.name
    if OF in found.metadata:
        of: Any = found.metadata[OF]
        below = settings(of, f"{name}.") if hasattr(of, "__dataclass_fields__") else _scalar(name, of())
        return {"type": "object", "additionalProperties": below}
    if found.default is MISSING:
        section: Any = found.default_factory
        return settings(section, f"{name}.")
    if name in _CHOICES:
        choice: Schema = {"enum": list(_CHOICES[name])}
        return {"type": "array", "items": choice} if isinstance(found.default, tuple) else choice
    return _scalar(found.name, found.default)


def _scalar(name: str, default: Any) -> Schema:
    if name.endswith("_bytes"):
        return {"$ref": "#/definitions/size"}
    if isinstance(default, tuple):
        return {"type": "array", "items": {"type": "string"}}
    types = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return {"type": types[type(default)]}


def _of_table(table: Mapping[str, Any], prefix: str, unused: set[str]) -> Schema:
    properties: Schema = {}
    for name, value in table.items():
        path = prefix + name
        if path in _RULES:
            unused.discard(path)
            properties[name] = _RULES[path]
        elif isinstance(value, dict) and value and not path.endswith("Selector"):
            properties[name] = _of_table(value, f"{path}.", unused)
        elif value is None:
            raise ValueError(f"the default of {path} is null: say in _RULES which types it may have")
        else:
            properties[name] = _scalar(name, value)
    for name in [name for name in _RULES if name.startswith(prefix) and "." not in name[len(prefix) :]]:
        if ".resources." in name:  # a rule for a resource that has no default
            unused.discard(name)
            properties.setdefault(name[len(prefix) :], _RULES[name])
    if prefix.endswith((".requests.", ".limits.")):
        return {"type": ["object", "null"], "additionalProperties": _AMOUNT, "properties": properties}
    return _closed(properties)


def _closed(properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def main() -> int:
    """Writes the file, or with --check says whether it is what it should be."""
    if "--check" not in sys.argv[1:]:
        SCHEMA.write_text(text(), encoding="utf-8")
    elif not SCHEMA.exists() or SCHEMA.read_text(encoding="utf-8") != text():
        print(f"{SCHEMA} is not current: python -m tools.chart_schema writes it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
