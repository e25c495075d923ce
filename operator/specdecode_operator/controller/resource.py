"""Parsing of a SpecDecodeDeployment of the API server into the records that decisions use. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from specdecode_operator.api.v1alpha1 import Spec, Status
from specdecode_operator.errors import SpecError
from specdecode_operator.types import Deployment


def deployment_of(resource: Mapping[str, Any]) -> Deployment:
    """Parse a resource.

    Raises:
        SpecError: The spec is invalid, because the CRD is of another version than this operator.
    """
    metadata = resource["metadata"]
    try:
        spec = Spec.model_validate(resource["spec"])
    except ValidationError as error:
        first = error.errors()[0]
        raise SpecError(f"spec.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    return Deployment(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata["generation"],
        spec=spec,
        status=status_of_resource(resource),
    )


def status_of_resource(resource: Mapping[str, Any]) -> Status:
    """Return the present status, or an empty one if another version of the operator wrote it."""
    try:
        return Status.model_validate(resource.get("status") or {})
    except ValidationError:
        return Status()
