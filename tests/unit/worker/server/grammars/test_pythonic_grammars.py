"""Grammars of pythonic calls: what they allow, that the parser reads it as calls, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdecode_worker.guided.guide import GrammarRefused
from specdecode_worker.server.grammars import CallableFunction, calls_within_text, forced_calls
from specdecode_worker.server.tools import ArgumentsDelta, CallStart, PythonicParser
from support.published.tokens import KINDS, Language

SCHEMA: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": ["integer", "null"]},
        "unit": {"enum": ["C", 'F"\\', None, 1.5, True]},
        "tags": {"type": "array", "items": {"type": "boolean"}},
        "at": {"$ref": "#/$defs/place"},
        "x": {"anyOf": [{"type": "number"}, {"const": {"a": [False]}}]},
    },
    "required": ["city"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "inner": {"$ref": "#/$defs/place"}},
            "required": ["name"],
        }
    },
}
FUNCTIONS = [CallableFunction("get.weather", SCHEMA, exact=True), CallableFunction("now", {}, exact=False)]


@pytest.fixture(scope="module", params=KINDS)
def language(request: pytest.FixtureRequest) -> Language:
    return Language(request.param)


def read(text: str) -> list[tuple[str, Any]]:
    """Return the calls that the parser finds."""
    parser, calls = PythonicParser(lambda name: name in ("get.weather", "now")), []
    for delta in [*parser.push(text), *parser.end()]:
        if isinstance(delta, CallStart):
            calls.append([delta.name, ""])
        else:
            assert isinstance(delta, ArgumentsDelta), delta
            calls[-1][1] += delta.text
    return [(name, json.loads(arguments)) for name, arguments in calls]


CALLS = (
    ('[get.weather(city="Oslo")]', [("get.weather", {"city": "Oslo"})]),
    ('[get.weather(city="a\\"\\\\\\n", days=None)]', [("get.weather", {"city": 'a"\\\n', "days": None})]),
    ('[get.weather(city="", days=-3, unit="F\\"\\\\")]', [("get.weather", {"city": "", "days": -3, "unit": 'F"\\'})]),
    ('[get.weather(city="é", unit=True, tags=[True, False])]',
     [("get.weather", {"city": "é", "unit": True, "tags": [True, False]})]),
    ('[get.weather(city="a", at={"name": "b", "inner": {"name": "c"}}, x={"a": [False]})]',
     [("get.weather", {"city": "a", "at": {"name": "b", "inner": {"name": "c"}}, "x": {"a": [False]}})]),
    ('[get.weather(city="a", tags=[], x=0.25), now()]',
     [("get.weather", {"city": "a", "tags": [], "x": 0.25}), ("now", {})]),
)  # fmt: skip


@pytest.mark.parametrize(("text", "calls"), CALLS)
def test_allowed_calls_are_read_by_the_parser(language: Language, text: str, calls: Any) -> None:
    assert language.allows(forced_calls("pythonic", FUNCTIONS, parallel=True), text)
    assert language.allows(calls_within_text("pythonic", FUNCTIONS, parallel=True), text)
    assert language.allows(forced_calls("pythonic", FUNCTIONS, parallel=False), text) == (len(calls) == 1)
    assert read(text) == calls


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[get.weather()]",
        '[get.weather(city="a",  days=1)]',
        "[get.weather(days=1)]",
        '[get.weather(days=1, city="a")]',
        '[get.weather(city="a", days=1.5)]',
        '[get.weather(city="a", days="1")]',
        '[get.weather(city="a", unit="K")]',
        '[get.weather(city="a", unit=true)]',
        '[get.weather(city="a", tags=[1])]',
        '[get.weather(city="a", at={"inner": {"name": "c"}})]',
        '[get.weather(city="a", other=1)]',
        '[get.weather(city="\\u0041")]',
        '[get.weather(city="\\/")]',
        '[other(city="a")]',
        'Hello [now()]',
        'now()',
    ],
)  # fmt: skip
def test_other_calls_are_not_allowed(language: Language, text: str) -> None:
    assert not language.allows(forced_calls("pythonic", FUNCTIONS, parallel=True), text)


def test_text_is_allowed_where_calls_are_not_forced(language: Language) -> None:
    grammar = calls_within_text("pythonic", FUNCTIONS, parallel=True)
    assert language.allows(grammar, "Hello [now(1)]")
    assert not language.allows(grammar, "[now(1)]")


@pytest.mark.parametrize(
    ("name", "schema", "part", "path"),
    [
        ("get-weather", {}, "get-weather", ()),
        ("class", {}, "class", ()),
        ("f", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern", ("properties", "a", "pattern")),
        ("f", {"properties": {"b-c": {}}}, "b-c", ("properties", "b-c")),
        ("f", {"properties": {"from": {}}}, "from", ("properties", "from")),
        ("f", {"required": ["z"]}, "z", ("required",)),
        ("f", {"properties": {"a": {"$ref": "#/x"}}}, "#/x", ("properties", "a", "$ref")),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(name: str, schema: Any, part: str, path: Any) -> None:
    with pytest.raises(GrammarRefused, match=part) as refused:
        forced_calls("pythonic", [CallableFunction(name, schema, exact=True)], parallel=True)
    assert refused.value.path == path


def test_without_strict_constraints_are_ignored(language: Language) -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": "x"}, "b-c": {}}}
    grammar = forced_calls("pythonic", [CallableFunction("f", schema, exact=False)], parallel=True)
    assert language.allows(grammar, '[f(a="y")]')
