"""Objects that are closed, and those that must stay open because other schemas apply to the same value."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from specdecode_worker.guided.grammars import close_objects

A: dict[str, Any] = {"properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"properties": {"b": {"type": "integer"}}}

CLOSED: dict[str, tuple[Any, tuple[str | int, ...]]] = {
    "root": (A, ()),
    "with type and required": ({**A, "type": "object", "required": ["a"]}, ()),
    "property": ({"properties": {"x": A}}, ("properties", "x")),
    "item": ({"items": A}, ("items",)),
    "prefix item": ({"prefixItems": [True, A]}, ("prefixItems", 1)),
    "branch": ({"anyOf": [A, {"type": "null"}]}, ("anyOf", 0)),
    "branch of a described schema": ({"description": "x", "anyOf": [A, B]}, ("anyOf", 1)),
    "within a part": ({"allOf": [{"properties": {"x": A}}, B]}, ("allOf", 0, "properties", "x")),
    "only part": ({"allOf": [A]}, ("allOf", 0)),
    "definition": ({"properties": {"x": {"$ref": "#/$defs/d"}}, "$defs": {"d": A}}, ("$defs", "d")),
    "value of an open object": ({"additionalProperties": A}, ("additionalProperties",)),
}
OPEN: dict[str, tuple[Any, tuple[str | int, ...]]] = {
    "without properties": ({"type": "object"}, ()),
    "said to be open": ({**A, "additionalProperties": True}, ()),
    "others by a schema": ({**A, "additionalProperties": {"type": "string"}}, ()),
    "by pattern": ({**A, "patternProperties": {"^x": {}}}, ()),
    "unevaluated": ({**A, "unevaluatedProperties": True}, ()),
    "requires another": ({**A, "required": ["z"]}, ()),
    "needs more properties": ({**A, "minProperties": 2}, ()),
    "parts": ({"allOf": [A, B]}, ("allOf", 0)),
    "branch beside properties": ({**B, "anyOf": [A]}, ("anyOf", 0)),
    "properties beside a branch": ({**A, "anyOf": [B]}, ()),
    "branch below a part": ({"allOf": [{"anyOf": [A, B]}, B]}, ("allOf", 0, "anyOf", 0)),
    "definition that is a part": (
        {"allOf": [{"$ref": "#/definitions/d"}, B], "properties": {"x": {"$ref": "#/definitions/d"}},
         "definitions": {"d": A}},
        ("definitions", "d"),
    ),
    "reference beside properties": ({**B, "$ref": "#/definitions/d", "definitions": {"d": A}}, ("definitions", "d")),
    "one branch": ({"oneOf": [A, B]}, ("oneOf", 0)),
    "within one branch": (
        {"oneOf": [{"properties": {"x": A}}, {"properties": {"x": B}}]}, ("oneOf", 0, "properties", "x")
    ),
    "contained": ({"contains": A, "maxContains": 1}, ("contains",)),
    "within not": ({"not": {"properties": {"x": A}, "required": ["x"]}}, ("not", "properties", "x")),
    "condition": ({"if": A, "then": B}, ("then",)),
    "not": ({"not": A}, ("not",)),
    "dependent": ({**B, "dependentSchemas": {"b": A}}, ("dependentSchemas", "b")),
    "definition that nothing uses": ({"definitions": {"d": A}}, ("definitions", "d")),
}  # fmt: skip


def at(schema: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        schema = schema[step]
    return schema


@pytest.mark.parametrize("name", CLOSED)
def test_objects_that_name_their_properties_are_closed(name: str) -> None:
    schema, path = CLOSED[name]
    before = repr(schema)
    assert at(close_objects(schema), path) == {**at(schema, path), "additionalProperties": False}
    assert repr(schema) == before, "the schema itself is not changed"


@pytest.mark.parametrize("name", OPEN)
def test_objects_stay_open_where_other_properties_may_be_meant(name: str) -> None:
    schema, path = OPEN[name]
    assert at(close_objects(schema), path) == at(schema, path)


VALUES = ({}, {"a": 1}, {"b": 2}, {"a": 1, "b": 2}, {"x": {"a": 1}}, {"x": {"a": 1, "z": 2}}, [{"a": 1}], 3, {"z": 1})


@pytest.mark.parametrize("name", [*CLOSED, *OPEN])
def test_a_closed_schema_allows_nothing_that_the_schema_forbids(name: str) -> None:
    schema, _ = {**CLOSED, **OPEN}[name]
    loose, closed = (jsonschema.Draft202012Validator(one) for one in (schema, close_objects(schema)))
    for value in VALUES:
        assert loose.is_valid(value) or not closed.is_valid(value)
    assert name in OPEN or any(map(closed.is_valid, VALUES))


@pytest.mark.parametrize(
    ("schema", "more"),
    [
        (True, {}),
        ({"$ref": "#"}, {}),
        ({"properties": {"x": {"$ref": "#"}}}, {"additionalProperties": False}),
        ({"$ref": "#/a/b"}, {}),
    ],
)
def test_schemas_that_refer_to_themselves_or_to_nothing(schema: Any, more: dict[str, Any]) -> None:
    assert close_objects(schema) == ({**schema, **more} if more else schema)
