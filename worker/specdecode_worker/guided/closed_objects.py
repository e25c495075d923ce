"""Objects of a JSON schema that are closed: they get no property that the schema does not name.

JSON Schema allows any further property where ``additionalProperties`` is absent. A model that may invent properties
often does not end, and clients do not expect them. Other engines close such objects too (``strict_mode`` of xgrammar,
the default of vLLM; OpenAI's ``strict`` demands it). What a closed schema allows, the schema itself allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any

_REVERSED = ("not", "if", "contains")
"""Keywords whose schema, if it allowed less, could make the whole schema allow more."""
_IN_PLACE = ("then", "else")
_BY_NAME = ("properties", "patternProperties")
_SINGLE = ("items", "additionalItems", "additionalProperties", "unevaluatedProperties")
_COMBINED = frozenset(
    ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "$recursiveRef", "dependencies",
     "dependentSchemas")
)  # fmt: skip
"""Keywords that apply further schemas to the same value."""
_SAID = frozenset(("additionalProperties", "unevaluatedProperties", "patternProperties"))
"""Keywords that say which other properties are allowed."""
_WITHOUT_RULES = frozenset(
    ("$schema", "$id", "id", "$defs", "definitions", "title", "description", "$comment", "default", "examples", "type")
)
"""Keywords that leave the rules for an object's properties to the schemas combined with them."""


class _Use(IntEnum):
    """Use of a schema within another one. Of several uses, the highest value decides."""

    ALONE = 0
    """No other schema applies to the value: the object can be closed."""
    COMBINED = 1
    """Another schema applies to the same value, too: only objects within can be closed."""
    REVERSED = 2
    """Neither the object nor those within may be closed, as with ``oneOf``, which counts the branches that match."""


def close_objects(schema: Any) -> Any:
    """Return ``schema`` with ``additionalProperties: false`` in the objects that can be closed.

    An object is closed if it names its properties, if nothing says that others are allowed or required, and if no
    other schema applies to the same value: closing one part of ``allOf`` would forbid the properties of the other.
    """
    uses: dict[int, _Use] = {}
    stack = [(schema, _Use.ALONE)]
    while stack:
        part, use = stack.pop()
        if not isinstance(part, Mapping) or uses.get(id(part), -1) >= use:
            continue
        uses[id(part)] = use
        for child, below in _parts(part, schema, use):
            stack.append((child, _Use.REVERSED if use is _Use.REVERSED else below))
    return _closed(schema, {part for part, use in uses.items() if use is _Use.ALONE})


def _parts(part: Mapping[str, Any], root: Any, use: _Use) -> Iterator[tuple[Any, _Use]]:
    """Yield the schemas that ``part`` applies, each with how it applies."""
    for key in _BY_NAME:
        if isinstance(part.get(key), Mapping):
            yield from ((child, _Use.ALONE) for child in part[key].values())
    for key in _SINGLE:
        yield part.get(key), _Use.ALONE
    for key in ("items", "prefixItems"):
        if isinstance(part.get(key), list):
            yield from ((child, _Use.ALONE) for child in part[key])
    yield from _combined(part, root, use)


def _combined(part: Mapping[str, Any], root: Any, use: _Use) -> Iterator[tuple[Any, _Use]]:
    """Yield the schemas that ``part`` applies to the same value."""
    keywords = _COMBINED & part.keys()
    is_only = use is _Use.ALONE and len(keywords) == 1 and part.keys() - keywords <= _WITHOUT_RULES
    only = _Use.ALONE if is_only else _Use.COMBINED
    for key, below in (("anyOf", only), ("allOf", only), ("oneOf", _Use.REVERSED)):
        branches = part.get(key)
        if isinstance(branches, list):
            single = below if key != "allOf" or len(branches) == 1 else _Use.COMBINED
            yield from ((child, single) for child in branches)
    for key in _IN_PLACE:
        yield part.get(key), _Use.COMBINED
    for key in _REVERSED:
        yield part.get(key), _Use.REVERSED
    for key in ("dependentSchemas", "dependencies"):
        if isinstance(part.get(key), Mapping):
            yield from ((child, _Use.COMBINED) for child in part[key].values())
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
