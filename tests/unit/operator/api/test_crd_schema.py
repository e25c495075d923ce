"""Tests of the generated schema: every field is documented."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.api import crd
from specdecode_operator.api.v1alpha1 import COLUMNS, ConditionType

ROOT = Path(__file__).parents[4]

SCHEMA = crd.root_schema()
Schema = Mapping[str, Any]


def fields(path: str, node: Schema) -> Iterator[tuple[str, Schema, bool]]:
    """Yield the path and schema of every field below a node, and whether it is required."""
    inner = node.get("items", node)
    for name, field in inner.get("properties", {}).items():
        yield f"{path}.{name}", field, name in inner.get("required", ())
        yield from fields(f"{path}.{name}", field)


SPEC_FIELDS = list(fields("spec", SCHEMA["properties"]["spec"]))
STATUS_FIELDS = list(fields("status", SCHEMA["properties"]["status"]))


def test_every_field_has_a_description() -> None:
    assert len(SPEC_FIELDS) > 80
    assert len(STATUS_FIELDS) > 60
    everything = [*SPEC_FIELDS, *STATUS_FIELDS]
    assert [path for path, field, _ in everything if len(field.get("description", "")) < 10] == []


def test_every_optional_field_says_what_holds_without_it() -> None:
    missing = [
        path
        for path, field, required in SPEC_FIELDS
        if not required
        and "default" not in field
        and not field.get("properties")
        and field.get("type") != "array"
        and "Absent:" not in field["description"]
        and "Absent for" not in field["description"]
        and "additionalProperties" not in field
        and "x-kubernetes-preserve-unknown-fields" not in field
    ]
    assert missing == []


def is_free(field: Schema) -> bool:
    """Return whether a value cannot be guessed: free text, a map, or an object without a schema."""
    if field.get("type") == "string":
        return "enum" not in field and "default" not in field
    items = field.get("items", {})
    return (
        "additionalProperties" in field
        or bool(field.get("x-kubernetes-preserve-unknown-fields"))
        or bool(items.get("x-kubernetes-preserve-unknown-fields"))
        or items.get("type") == "string"
    )


def test_every_free_field_has_an_example() -> None:
    assert [path for path, field, _ in SPEC_FIELDS if is_free(field) and "Example: " not in field["description"]] == []


def test_defaults_are_in_the_descriptions() -> None:
    missing = [
        path
        for path, field, _ in SPEC_FIELDS
        if isinstance(field.get("default"), str | int | float) and "Default: " not in field["description"]
    ]
    assert missing == []


def test_status_has_no_defaults() -> None:
    assert '"default"' not in json.dumps(SCHEMA["properties"]["status"])


def test_conditions_fit_into_status() -> None:
    assert len(ConditionType) <= SCHEMA["properties"]["status"]["properties"]["conditions"]["maxItems"]
    documented = ConditionType.__doc__ or ""
    assert all(f"| {kind} |" in documented for kind in ConditionType)


def test_lists_whose_items_have_names_are_maps() -> None:
    """Two managers that apply items of their own must not overwrite each other's list."""
    lists = [(path, field) for path, field, _ in [*SPEC_FIELDS, *STATUS_FIELDS] if field.get("type") == "array"]
    named = {
        path
        for path, field in lists
        if {"name", "deployment", "draft", "type"}.intersection(field["items"].get("required", ()))
    }
    assert named == {path for path, field in lists if field.get("x-kubernetes-list-type") == "map"}
    assert len(named) >= 7


def test_printer_columns_refer_to_existing_fields() -> None:
    known = {path for path, _, _ in [*SPEC_FIELDS, *STATUS_FIELDS]} | {"metadata.creationTimestamp"}
    assert [column["jsonPath"] for column in COLUMNS if column["jsonPath"][1:] not in known] == []
    narrow = [column["name"].upper() for column in COLUMNS if not column.get("priority")]
    wide = [column["name"].upper() for column in COLUMNS if column.get("priority")]
    assert narrow == ["READY", "MODE", "DEPTH", "ACCEPT", "SPEEDUP", "AGE", "REASON"]
    assert wide == ["MODEL", "DRAFT", "URL", "ROUTERS", "PREFILL"]


def test_no_rule_is_too_costly_for_the_oldest_kubernetes() -> None:
    """1.29 knows no bound of a mapped list, and refuses a CRD whose rule sums one (see hack/cluster/api-server)."""
    assert [text for text in re.findall(r'"rule": "([^"]+)"', json.dumps(SCHEMA)) if ".sum()" in text] == []


PAGES = [
    path
    for pattern in ("README.md", "docs/**/*.md", "helm/specdecode/files/*", "examples/**/*.yaml")
    for path in ROOT.glob(pattern)
]
KNOWN = {path.removeprefix("spec."): field for path, field, _ in SPEC_FIELDS}
FREE = tuple(
    f"{path}."  # a pod template, or a map
    for path, field in KNOWN.items()
    if "x-kubernetes-preserve-unknown-fields" in field or "additionalProperties" in field
)
FILE_ENDINGS = ("md", "yaml", "py", "json", "png", "gguf", "svc")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_fields_that_a_page_names_exist(page: Path) -> None:
    tops = "|".join(path for path in KNOWN if "." not in path)
    named = re.findall(rf"(?<![\w.])(?:spec\.)?((?:{tops})(?:\.[a-zA-Z]+)+)", page.read_text())
    paths = [path for path in named if path.rpartition(".")[2] not in FILE_ENDINGS]
    assert [path for path in paths if path not in KNOWN and not path.startswith(FREE)] == []
