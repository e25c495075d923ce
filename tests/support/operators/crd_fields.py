"""Fields of the generated schema of the resource."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specdecode_operator.api import crd

SCHEMA = crd.root_schema()
Schema = Mapping[str, Any]


def fields(path: str, node: Schema) -> Iterator[tuple[str, Schema, bool]]:
    """Yield the path and schema of every field below a node, and whether it is required."""
    inner = node.get("items", node)
    for name, field in inner.get("properties", {}).items():
        yield f"{path}.{name}", field, name in inner.get("required", ())
        yield from fields(f"{path}.{name}", field)
