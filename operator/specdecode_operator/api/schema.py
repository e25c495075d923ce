"""Building blocks of the resource's models: names of the kind, shared types, CEL rules and the base class."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

GROUP = "specdecode.io"
VERSION = "v1alpha1"
KIND = "SpecDecodeDeployment"
PLURAL = "specdecodedeployments"
NAME_LABEL = f"{GROUP}/name"
"""Label with the name of the deployment that an object belongs to."""
MAX_NAME_LENGTH = 45
"""Maximum characters of a name. Children append suffixes to it, and a label value has at most 63 characters."""
NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""Names of Services (RFC 1035): the public Service has the name of its deployment."""
NAME_MESSAGE = (
    f"metadata.name becomes the name of a Service: write at most {MAX_NAME_LENGTH} characters of a-z, 0-9 and '-', "
    "the first a letter, the last no '-'; dots are not allowed"
)

SELF_SPLIT_RULE = (
    "!has(self.spec.router) || !has(self.spec.router.trafficSplit)"
    " || self.spec.router.trafficSplit.all(one, one.deployment != self.metadata.name)"
)
SELF_SPLIT_MESSAGE = "spec.router.trafficSplit names other deployments; this one has the rest of the traffic"

MAX_TEXT = 1024
"""Maximum characters of a text in status."""
QUANTITY = re.compile(
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
)
"""Quantities as Kubernetes writes them."""
_PERCENT = re.compile("^(100|[1-9]?[0-9])%$")
MAX_COUNT = 1000
"""Largest number of pods in a count of a rollout; also the largest number of replicas."""

SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"

ModelUri = Annotated[
    str,
    Field(
        pattern=r"^(hf://[^/@ ]+/[^/@ ]+(@[^@ ]+)?|(s3|gs|az)://[a-z0-9][a-z0-9._-]+/[^/ ][^ ]*"
        r"|pvc://[^/ ]+/.+|file:///.+|embedded://[a-z0-9.-]+)$",
        max_length=512,
    ),
]
"""URI of a model: one of the forms below."""
URI_FORMS = "one of hf://org/name@revision, s3://, gs:// or az://bucket/path, pvc://claim/path, file:///path and embedded://name"
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Name = Annotated[str, Field(pattern=SUBDOMAIN, max_length=253)]
"""Name of an object in the same namespace (DNS subdomain)."""
Duration = Annotated[str, Field(pattern="^([0-9]{1,5}(h|m|s)){1,3}$", max_length=18)]
"""Duration such as 24h, 90m or 1h30m."""
Latency = Annotated[str, Field(pattern=r"^[0-9]{1,6}(\.[0-9]{1,3})?(ms|s)$", max_length=12)]
"""Latency such as 500ms or 2s."""
Percent = Annotated[int, Field(ge=0, le=100)]
Anything = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]
"""Object that the API server validates when a child that contains it is applied."""


Quantity = Annotated[
    int | str,
    WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": QUANTITY.pattern, "maxLength": 64}),
]
"""Amount of a resource, such as 2, 500m or 16Gi."""
CountOrPercent = Annotated[
    int | str,
    WithJsonSchema(
        {"x-kubernetes-int-or-string": True, "pattern": _PERCENT.pattern, "minimum": 0, "maximum": MAX_COUNT}
    ),
]
"""Number of pods, or their share of the replicas, such as 1 or 25%."""


def rule(expression: str, message: str) -> dict[str, str]:
    """Return one CEL validation of the CRD."""
    return {"rule": expression, "message": message}


def rules(*validations: dict[str, str]) -> dict[str, Any]:
    """Return the part of a schema that holds CEL validations."""
    return {"x-kubernetes-validations": list(validations)}


def bounds(least: str, most: str) -> dict[str, Any]:
    """Return the part of a schema that holds a duration between two others."""
    return rules(
        rule(
            f"duration(self) >= duration('{least}') && duration(self) <= duration('{most}')",
            f"write a duration from {least} to {most}",
        )
    )


def named_list(key: str) -> dict[str, Any]:
    """Return the part of a schema of a list whose items are identified by ``key``.

    Two managers that apply items of their own do not overwrite each other's list.
    """
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def object_in(value: Any, key: str) -> dict[str, Any]:
    """Return the object under a key of a user's pod template; empty if there is none."""
    inner = value.get(key) if isinstance(value, Mapping) else None
    return dict(inner) if isinstance(inner, Mapping) else {}


def objects_in(value: Any, key: str, *keys: str) -> list[dict[str, Any]]:
    """Return the objects of the list under a key of a user's pod template that have a text in each of ``keys``."""
    items = value.get(key) if isinstance(value, Mapping) else None
    found = [dict(one) for one in items if isinstance(one, Mapping)] if isinstance(items, list) else []
    return [one for one in found if all(isinstance(one.get(name), str) for name in keys)]


def container_in(template: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a container of a user's pod template; empty if there is none of this name."""
    containers = objects_in(object_in(template, "spec"), "containers", "name")
    return next((one for one in containers if one["name"] == name), {})


class Api(BaseModel):
    """Base of all models of the resource: camelCase outside, immutable.

    Unknown fields are ignored: the CRD of a newer operator may already have put its defaults into a resource. A field
    that a user misspelled does not come this far, because the API server refuses or prunes it.
    """

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True, use_attribute_docstrings=True
    )


class NameRef(Api):
    """Object in the same namespace."""

    name: Name = Field(examples=["llama"])
    """Name of the object, in the same namespace."""


class SecretKeyRef(NameRef):
    """One entry of a Secret in the same namespace."""

    key: Annotated[str, Field(max_length=253, min_length=1)] = "token"
    """Entry of the Secret."""
