"""`kubectl explain` prints every description of the generated schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from kind_copy import KindCopy

from specdecode_operator.api import crd
from specdecode_operator.api.v1alpha1 import PLURAL

SCHEMA = crd.root_schema()


Schema = Mapping[str, Any]


def fields(path: str, node: Schema) -> Iterator[tuple[str, Schema, bool]]:
    """Yield the path and schema of every field below a node, and whether it is required."""
    inner = node.get("items", node)
    for name, field in inner.get("properties", {}).items():
        yield f"{path}.{name}", field, name in inner.get("required", ())
        yield from fields(f"{path}.{name}", field)


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
