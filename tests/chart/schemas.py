"""The strict schemas that every object is held to: Kubernetes' own, and those of the Prometheus operator's kinds.

The operator's are made of a package's models of its CRDs and closed, so that an unknown field fails as it does in
Kubernetes' strict schemas.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate
from cloudcoil.models.prometheus_operator import v1 as prometheus_operator

VERSIONS = ("1.30", "1.37")
"""The oldest and the newest Kubernetes whose schemas every object keeps."""

_OPERATOR = "monitoring.coreos.com/"


class Invalid(Exception):
    """An object that an API server refuses."""


def check_schema(found: dict[str, Any]) -> None:
    """Raises Invalid if the object does not keep the schema of its kind, in any of VERSIONS."""
    name = f"{found.get('kind')} {found.get('metadata', {}).get('name')}"
    try:
        if str(found.get("apiVersion")).startswith(_OPERATOR):
            jsonschema.Draft202012Validator(_closed_schema(found["kind"])).validate(found)
        else:
            for version in VERSIONS:
                kubernetes_validate.validate(found, version, strict=True)
    except jsonschema.ValidationError as error:
        where = ".".join(map(str, error.absolute_path))
        raise Invalid(f"{name}: {where}: {error.message}") from None
    except kubernetes_validate.SchemaNotFoundError as error:
        raise Invalid(f"{name}: {error.message}") from None


@cache
def _closed_schema(kind: str) -> dict[str, Any]:
    """Returns the schema of a kind of the Prometheus operator, without room for fields that it does not name."""
    schema: dict[str, Any] = getattr(prometheus_operator, kind).model_json_schema(by_alias=True)
    for each in (schema, *schema["$defs"].values()):
        if "properties" in each:
            each["additionalProperties"] = False
    # A server adds these before it validates; they are what it keeps, and not what is written.
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return schema
