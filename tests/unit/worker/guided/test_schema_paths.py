"""Paths to the parts of JSON schemas that cannot be compiled."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_worker.guided import schema_paths
from specdecode_worker.guided.schema_paths import locate


def has_no_bad_part(schema: Any) -> bool:
    if isinstance(schema, dict):
        return "bad" not in schema and all(map(has_no_bad_part, schema.values()))
    return all(map(has_no_bad_part, schema)) if isinstance(schema, list) else True


BAD = {"bad": 1}
CASES: list[tuple[Any, tuple[str | int, ...]]] = [
    (BAD, ()),
    ({"properties": {"a": {}, "b": BAD}}, ("properties", "b")),
    ({"properties": {"a": {"anyOf": [{}, {"items": BAD}]}}}, ("properties", "a", "anyOf", 1, "items")),
    ({"$defs": {"x": {}, "y": BAD}, "properties": {"a": {}}}, ("$defs", "y")),
    ({"prefixItems": [{}, BAD], "items": BAD}, ("prefixItems", 1)),
    ({"properties": {"a": {"additionalProperties": BAD}}}, ("properties", "a", "additionalProperties")),
]


@pytest.mark.parametrize(("schema", "path"), CASES)
def test_the_smallest_part_at_fault(schema: Any, path: tuple[str | int, ...]) -> None:
    assert locate(schema, has_no_bad_part) == path


def test_parts_are_compiled_with_the_definitions_they_refer_to() -> None:
    schema = {"$defs": {"x": {}}, "properties": {"a": {"$ref": "#/$defs/x"}, "b": BAD}}

    def compiles(part: Any) -> bool:
        assert "$ref" not in part or "$defs" in part
        return has_no_bad_part(part)

    assert locate(schema, compiles) == ("properties", "b")


def test_a_fault_in_the_combination_is_that_of_the_enclosing_part() -> None:
    schema = {"properties": {"a": {"minimum": 3, "maximum": 2, "anyOf": [{}]}}}
    assert locate(schema, lambda part: "minimum" not in str(part)) == ("properties", "a")


def test_the_search_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_paths, "MOST_TRIES", 10)
    tries = []
    schema = {"properties": {f"{i}": {} for i in range(1000)} | {"last": BAD}}
    assert locate(schema, lambda part: tries.append(1) or has_no_bad_part(part)) == ()
    assert len(tries) == 10
