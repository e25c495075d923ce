"""`kubectl explain` prints every description of the generated schema."""

from __future__ import annotations

import pytest

from specdecode_operator.api.v1alpha1 import PLURAL
from support.kind_copy import KindCopy
from support.operators.crd_fields import SCHEMA, fields


@pytest.mark.parametrize("part", ["spec", "status"])
def test_kubectl_explain_prints_every_description(api: KindCopy, part: str) -> None:
    """``explain --recursive`` prints names only, so each object is asked for, as a user would."""
    version = ("--api-version", f"{api.group}/v1alpha1")
    below = fields(part, SCHEMA["properties"][part])
    objects = [part, *(path for path, field, _ in below if field.get("items", field).get("properties"))]
    for path in objects:
        text = api.cluster.kubectl("explain", f"{PLURAL}.{path}", *version)
        assert "<empty>" not in text, f"{path}: {text}"
        assert "<no description>" not in text, f"{path}: {text}"
