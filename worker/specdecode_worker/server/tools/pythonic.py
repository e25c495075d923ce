"""Parser of the pythonic tool call format of Llama 3.2 and 4.

The whole output is a Python list of calls, such as [get_weather(city="Oslo"), now()]. It is parsed once it is complete,
because only then a list of calls can be distinguished from text in brackets.
"""

from __future__ import annotations

import ast

from specdecode_worker.server.tools.call_reader import object_text
from specdecode_worker.server.tools.deltas import ArgumentsDelta, CallStart, Delta, IsOffered, text_deltas

_JSON_NAMES = {"true": True, "false": False, "null": None}


class PythonicParser:
    """Parser of the pythonic format, which the module docstring describes."""

    def __init__(self, is_offered: IsOffered) -> None:
        self._is_offered = is_offered
        self._held = ""
        self._text_only = False

    def push(self, text: str) -> list[Delta]:
        """Add text. It is returned at once if the output does not begin with a bracket, else held until ``end``."""
        self._held += text
        begin = self._held.lstrip()
        self._text_only = self._text_only or (bool(begin) and begin[0] != "[")
        if not self._text_only:
            return []
        shown, self._held = self._held, ""
        return text_deltas(shown)

    def end(self) -> list[Delta]:
        """Return the calls of the complete output, or its text if it is no list of valid calls."""
        text, self._held = self._held, ""
        try:
            return [delta for call in _calls(text) for delta in self._deltas(call)]
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return text_deltas(text)

    def _deltas(self, call: ast.expr) -> list[Delta]:
        """Convert one call. Raises ValueError unless it calls an offered function with literal keyword arguments."""
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("not a call with named arguments")
        name = ast.unparse(call.func)
        if not self._is_offered(name):
            raise ValueError(f"{name} was not offered")
        arguments = {
            str(one.arg): ast.literal_eval(_Literals().visit(one.value)) for one in call.keywords if one.arg is not None
        }
        if len(arguments) < len(call.keywords):
            raise ValueError("** is no literal")
        return [CallStart(name), ArgumentsDelta(object_text(arguments))]


class _Literals(ast.NodeTransformer):
    """Reading of JSON's names of constants, which models write too, as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the constant of a name such as `true`, else the name."""
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _calls(text: str) -> list[ast.expr]:
    """Parse a list of expressions.

    Raises:
        ValueError: The text is empty or no list.
        SyntaxError: The text is no Python expression.
    """
    if not text.strip():
        raise ValueError("empty")
    expression = ast.parse(text.strip(), mode="eval").body
    if not isinstance(expression, ast.List) or not expression.elts:
        raise ValueError("no list")
    return expression.elts
