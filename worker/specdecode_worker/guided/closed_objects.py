"""Objects of a JSON schema that are closed: they get no property that the schema does not name.

JSON Schema allows any further property where ``additionalProperties`` is absent. A model that may invent properties
often does not end, and clients do not expect them. Other engines close such objects too (``strict_mode`` of xgrammar,
the default of vLLM; OpenAI's ``strict`` demands it). What a closed schema allows, the schema itself allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_IN_PLACE_LISTS = ("anyOf", "oneOf", "allOf")
_IN_PLACE = ("not", "if", "then", "else")
_BY_NAME = ("properties", "patternProperties")
_SINGLE = ("items", "additionalItems", "additionalProperties", "unevaluatedProperties", "contains")
_COMBINED = frozenset(
    (*_IN_PLACE_LISTS, *_IN_PLACE, "$ref", "$dynamicRef", "dependentSchemas", "dependencies", "$recursiveRef")
)
"""Keywords that apply further schemas to the same value."""
_SAID = frozenset(("additionalProperties", "unevaluatedProperties", "patternProperties"))
"""Keywords that say which other properties are allowed."""
_WITHOUT_RULES = frozenset(
    ("$schema", "$id", "id", "$defs", "definitions", "title", "description", "$comment", "default", "examples", "type")
)
"""Keywords that leave the rules for an object's properties to the schemas combined with them."""


def close_objects(schema: Any) -> Any:
    """Return ``schema`` with ``additionalProperties: false`` in the objects that can be closed.

    An object is closed if it names its properties, if nothing says that others are allowed or required, and if no
    other schema applies to the same value: closing one part of ``allOf`` would forbid the properties of the other.
    """
    alone: set[int] = set()
    shared: set[int] = set()
    seen: set[tuple[int, bool]] = set()
    stack = [(schema, True)]
    while stack:
        part, is_alone = stack.pop()
        if not isinstance(part, Mapping) or (id(part), is_alone) in seen:
            continue
        seen.add((id(part), is_alone))
        (alone if is_alone else shared).add(id(part))
        stack += _parts(part, schema, is_alone=is_alone)
    return _closed(schema, alone - shared)


def _parts(part: Mapping[str, Any], root: Any, *, is_alone: bool) -> Iterator[tuple[Any, bool]]:
    """Yield the schemas that ``part`` applies, each with whether it applies to its value alone."""
    for key in _BY_NAME:
        if isinstance(part.get(key), Mapping):
            yield from ((child, True) for child in part[key].values())
    for key in _SINGLE:
        yield part.get(key), True
    for key in ("items", "prefixItems"):
        if isinstance(part.get(key), list):
            yield from ((child, True) for child in part[key])
    combined = _COMBINED & part.keys()
    only = is_alone and len(combined) == 1 and part.keys() - combined <= _WITHOUT_RULES
    for key in _IN_PLACE_LISTS:
        branches = part.get(key)
        if isinstance(branches, list):
            single = only and (key != "allOf" or len(branches) == 1)
            yield from ((child, single) for child in branches)
    for key in _IN_PLACE:
        yield part.get(key), False
    for key in ("dependentSchemas", "dependencies"):
        if isinstance(part.get(key), Mapping):
            yield from ((child, False) for child in part[key].values())
    yield _target(part.get("$ref"), root), only


def _target(reference: Any, root: Any) -> Any:
    """Return the schema that a reference within the document names; None for any other reference."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    part = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping):
            part = part.get(step)
        elif isinstance(part, list) and step.isdigit() and int(step) < len(part):
            part = part[int(step)]
        else:
            return None
    return part


def _closed(part: Any, chosen: set[int]) -> Any:
    """Return a copy of ``part`` in which the chosen schemas that can be closed are closed."""
    if isinstance(part, list):
        return [_closed(child, chosen) for child in part]
    if not isinstance(part, Mapping):
        return part
    copy = {key: _closed(child, chosen) for key, child in part.items()}
    if id(part) in chosen and _can_be_closed(part):
        copy["additionalProperties"] = False
    return copy


def _can_be_closed(part: Mapping[str, Any]) -> bool:
    """Return whether the schema names all properties that it needs and says nothing about others."""
    named, required = part.get("properties"), part.get("required", ())
    if not isinstance(named, Mapping) or not isinstance(required, list | tuple) or part.keys() & (_SAID | _COMBINED):
        return False
    least = part.get("minProperties", 0)
    return set(map(str, required)) <= named.keys() and isinstance(least, int) and least <= len(named)
