"""What the models of the resource share: names of the kind, types with their patterns, CEL rules, the base class."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

GROUP = "specdecode.io"
VERSION = "v1alpha1"
KIND = "SpecDecodeDeployment"
PLURAL = "specdecodedeployments"
MAX_NAME_LENGTH = 45
"""Children add suffixes to the name, and a label value ends at 63 characters."""

PAUSED_ANNOTATION = "specdecode.io/paused"
PIN_ANNOTATION = "specdecode.io/pin"

_UID_FREE_TEXT = 1024
ModelUri = Annotated[
    str,
    Field(
        pattern=r"^(hf://[^/@ ]+/[^/@ ]+(@[^@ ]+)?|pvc://[^/ ]+/.+|file:///.+|embedded://[a-z0-9.-]+)$",
        max_length=512,
        description="hf://org/name@revision, pvc://claim/path, file:///path or embedded://name.",
    ),
]
Text = Annotated[str, Field(max_length=_UID_FREE_TEXT)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Anything = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]


def rule(expression: str, message: str) -> dict[str, str]:
    """One CEL validation of the CRD."""
    return {"rule": expression, "message": message}


def rules(*found: dict[str, str]) -> dict[str, Any]:
    return {"x-kubernetes-validations": list(found)}


class Api(BaseModel):
    """Base of everything in the resource: camelCase outside, unknown fields refused, never changed in place."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


# --- spec ---------------------------------------------------------------------------------------------------------
