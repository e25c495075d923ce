"""Lark rules of calls in the pythonic format, such as ``[get_weather(city="Oslo", days=3), now()]``.

The arguments are Python literals, so they are not covered by the library's JSON grammar: ``True``, ``False`` and
``None`` differ from JSON, and so do some escapes. A schema becomes rules here; what these rules cannot express is
refused for functions with ``strict``, and ignored for others.
"""

from __future__ import annotations

import json
import keyword
from collections.abc import Mapping, Sequence
from typing import Any

from specdecode_worker.guided.errors import GrammarRefused

Path = tuple[str | int, ...]

_TERMINALS = (
    r'STRING: /"([^"\\\x00-\x1f\x7f]|\\["\\nrt])*"/',
    r"INTEGER: /-?(0|[1-9][0-9]{0,17})/",
    r"NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/",
    "SEPARATOR: /, ?/",
    'true_or_false: "True" | "False"',
    'literal: STRING | NUMBER | true_or_false | "None" | list | dict',
    'list: "[" (literal (SEPARATOR literal)*)? "]"',
    'dict: "{" (STRING ": " literal (SEPARATOR STRING ": " literal)*)? "}"',
)
_RULE_OF_TYPE = {"string": "STRING", "integer": "INTEGER", "number": "NUMBER", "boolean": "true_or_false",
                 "null": '"None"', "array": "list", "object": "dict"}  # fmt: skip
_HANDLED = frozenset(("type", "enum", "const", "anyOf", "oneOf", "items", "properties", "required",
                      "additionalProperties", "$ref", "$defs", "definitions"))  # fmt: skip
_WITHOUT_EFFECT = frozenset(("title", "description", "default", "examples", "$comment", "$schema", "$id", "deprecated"))
MOST_RULES = 2_000
"""Most rules of the functions of one request; each takes a few microseconds to compile."""


class PythonicRules:
    """Rules of calls of several functions. ``lines`` holds them as Lark text, with the rule ``call``."""

    def __init__(self) -> None:
        self.lines = list(_TERMINALS)
        self._calls: list[str] = []
        self._root: Mapping[str, Any] = {}
        self._exact = True
        self._references: dict[str, str] = {}

    def add(self, name: str, parameters: Mapping[str, Any], *, exact: bool) -> None:
        """Add a function. With ``exact``, constraints that the rules cannot express are refused.

        Raises:
            GrammarRefused: The function cannot be called in this format; the error names the part of its schema.
        """
        if not all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
            raise GrammarRefused(f"calls in the pythonic format need a Python name; {name} is none")
        self._root, self._exact, self._references = parameters, exact, {}
        self._check(parameters, ())
        arguments = {}
        required = set(parameters.get("required", ()))
        for argument, schema in parameters.get("properties", {}).items():
            if argument.isidentifier() and not keyword.iskeyword(argument):
                value = self._value(schema, ("properties", argument))
                arguments[argument] = f'"{argument}=" {value}', argument in required
            elif exact or argument in required:
                raise GrammarRefused(f"the pythonic format cannot name {argument}", ("properties", argument))
        if missing := sorted(required - arguments.keys()):
            raise GrammarRefused(f"required names {missing[0]}, which is no property", ("required",))
        self._calls.append(self._rule(f'{json.dumps(name + "(")} {self._sequence(list(arguments.values()))} ")"'))

    @property
    def text(self) -> str:
        """All rules, with ``call`` for a call of any of the functions."""
        return "\n".join([*self.lines, f"call: {' | '.join(self._calls)}"])

    def _rule(self, body: str) -> str:
        """Add a rule and return its name."""
        if len(self.lines) >= MOST_RULES:
            raise GrammarRefused("the schemas of the functions are too large")
        self.lines.append(f"rule_{len(self.lines)}: {body}")
        return self.lines[-1].partition(":")[0]

    def _sequence(self, items: Sequence[tuple[str, bool]]) -> str:
        """Return a rule of items in order, of which the required ones are never left out."""
        after, first = '""', '""'
        for body, is_required in reversed(items):
            start = f"{body} {after}"
            go_on = self._rule(f"SEPARATOR {start}" + ("" if is_required else f" | {after}"))
            first = self._rule(start + ("" if is_required else f" | {first}"))
            after = go_on
        return first

    def _value(self, schema: Any, path: Path) -> str:
        """Return the rule of the values that a schema allows."""
        if not isinstance(schema, Mapping):
            return "literal"
        self._check(schema, path)
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]), (*path, "$ref"))
        if "const" in schema or "enum" in schema:
            allowed = [schema["const"]] if "const" in schema else schema["enum"]
            return self._rule(" | ".join(json.dumps(_python(value)) for value in allowed))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._rule(" | ".join(self._value(one, (*path, key, i)) for i, one in enumerate(schema[key])))
        kinds = schema.get("type", ())
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        return self._rule(" | ".join(self._of_type(kind, schema, path) for kind in kinds)) if kinds else "literal"

    def _of_type(self, kind: str, schema: Mapping[str, Any], path: Path) -> str:
        """Return the rule of the values of one type."""
        if kind == "array" and "items" in schema:
            item = self._value(schema["items"], (*path, "items"))
            return self._rule(f'"[" ({item} (SEPARATOR {item})*)? "]"')
        if kind == "object" and schema.get("properties"):
            required = set(schema.get("required", ()))
            entries = [
                (f"{json.dumps(json.dumps(name) + ': ')} {self._value(one, (*path, 'properties', name))}",
                 name in required)
                for name, one in schema["properties"].items()
            ]  # fmt: skip
            return self._rule(f'"{{" {self._sequence(entries)} "}}"')
        if kind not in _RULE_OF_TYPE:
            raise GrammarRefused(f"there is no type {kind}", (*path, "type"))
        return _RULE_OF_TYPE[kind]

    def _reference(self, reference: str, path: Path) -> str:
        """Return the rule of a referenced definition. It may refer to itself."""
        if reference not in self._references:
            self._references[reference] = name = f"reference_{len(self.lines)}"
            self.lines.append("")
            place = len(self.lines) - 1
            steps = reference.split("/")
            definition: Any = self._root
            for step in steps[1:]:
                definition = definition.get(step) if isinstance(definition, Mapping) else None
            if steps[0] != "#" or definition is None:
                raise GrammarRefused(f"{reference} refers to nothing in the schema", path)
            self.lines[place] = f"{name}: {self._value(definition, tuple(steps[1:]))}"
        return self._references[reference]

    def _check(self, schema: Mapping[str, Any], path: Path) -> None:
        """Refuse keywords that the rules cannot express, for functions with ``strict``."""
        unknown = sorted(schema.keys() - _HANDLED - _WITHOUT_EFFECT)
        if self._exact and unknown:
            raise GrammarRefused(f"calls in the pythonic format cannot express {unknown[0]}", (*path, unknown[0]))


def _python(value: Any) -> str:
    """Return a JSON value as a Python literal."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_python(key)}: {_python(one)}" for key, one in value.items()) + "}"
    return repr(value)
