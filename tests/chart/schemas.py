"""The strict schemas that every object is held to: Kubernetes' own, and those of the kinds of the Prometheus operator
and of cert-manager.

These are made of packages' models of their CRDs and closed, so that an unknown field fails as it does in Kubernetes'
strict schemas.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import kubernetes_validate
from cloudcoil.models.cert_manager import v1 as cert_manager
from cloudcoil.models.prometheus_operator import v1 as prometheus_operator
from referencing import Registry, Resource

VERSIONS = ("1.30", "1.37")
"""The oldest and the newest Kubernetes whose schemas every object keeps."""

_MODELS = {"monitoring.coreos.com/v1": prometheus_operator, "cert-manager.io/v1": cert_manager}
"""By the version of their group."""


class Invalid(Exception):
    """An object that an API server refuses."""


def check_schema(found: dict[str, Any]) -> None:
    """Raises Invalid if the object does not keep the schema of its kind, in any of VERSIONS."""
    name = f"{found.get('kind')} {found.get('metadata', {}).get('name')}"
    try:
        models = _MODELS.get(str(found.get("apiVersion")))
        if models is not None:
            jsonschema.Draft202012Validator(_closed_schema(models, found["kind"])).validate(found)
        else:
            for version in VERSIONS:
                _validator(version, str(found.get("kind")), str(found.get("apiVersion"))).validate(found)
    except jsonschema.ValidationError as error:
        where = ".".join(map(str, error.absolute_path))
        raise Invalid(f"{name}: {where}: {error.message}") from None
    except FileNotFoundError:
        raise Invalid(f"{name}: there is no such kind in Kubernetes") from None


@cache
def _validator(version: str, kind: str, api_version: str) -> Any:
    """Returns the strict schema of a kind. kubernetes_validate.validate would read these files anew for each object."""
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = _contents(version, f"{kind.lower()}-{group}.json")
    registry = Resource.from_contents(schema) @ Registry()
    registry = Resource.from_contents(_contents(version, "_definitions.json")) @ registry
    return jsonschema.Draft202012Validator(schema, registry=registry)


@cache
def _contents(version: str, name: str) -> Any:
    folder = Path(kubernetes_validate.__file__).with_name("kubernetes-json-schema")
    return json.loads((folder / f"v{version}.0-local-strict" / name).read_text(encoding="utf-8"))


@cache
def _closed_schema(models: ModuleType, kind: str) -> dict[str, Any]:
    """Returns the schema of a kind of these models, without room for fields that it does not name."""
    schema: dict[str, Any] = getattr(models, kind).model_json_schema(by_alias=True)
    for each in (schema, *schema["$defs"].values()):
        if "properties" in each:
            each["additionalProperties"] = False
    # A server adds these before it validates; they are what it keeps, and not what is written.
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return schema
