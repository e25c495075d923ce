"""Location of the part of a JSON schema that cannot be compiled, for error messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Path = tuple[str | int, ...]
Compiles = Callable[[Any], bool]
"""Predicate: this schema can be compiled."""

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else")
_DEFINITIONS = ("$defs", "definitions")
MOST_TRIES = 400
"""Most schemas that are compiled to find one path. A compilation takes about a millisecond."""


def locate(schema: Any, compiles: Compiles) -> Path:
    """Return the path of the smallest part of ``schema`` that cannot be compiled, if the schema cannot.

    Parts are compiled with the definitions of the whole schema. The path is that of an enclosing part if the search
    takes more than MOST_TRIES compilations, or if the fault lies in how parts combine.
    """
    definitions = {key: schema[key] for key in _DEFINITIONS if isinstance(schema, Mapping) and key in schema}
    path: Path = ()
    part, tries = schema, MOST_TRIES
    while True:
        for step, child in _children(part):
            if tries <= 0:
                return path
            tries -= 1
            alone = {**definitions, **child} if isinstance(child, Mapping) else child
            # A definition that is at fault itself would make every part fail.
            if step[0] in _DEFINITIONS:
                alone = child
            if not compiles(alone):
                path, part = path + step, child
                break
        else:
            return path


def _children(part: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the schemas directly within a schema, with their paths. Definitions come first."""
    if not isinstance(part, Mapping):
        return
    for key in sorted(_BY_NAME, key=lambda key: key not in _DEFINITIONS):
        named = part.get(key)
        if isinstance(named, Mapping):
            yield from (((key, name), child) for name, child in named.items())
    for key in _LISTS:
        listed = part.get(key)
        if isinstance(listed, list):
            yield from (((key, index), child) for index, child in enumerate(listed))
    for key in _SINGLE:
        if isinstance(part.get(key), Mapping):
            yield (key,), part[key]
