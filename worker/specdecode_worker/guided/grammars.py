"""Grammars as texts: a JSON schema, a regular expression, a list of choices or a context-free grammar.

A text is what llguidance reads. It says everything about the language of the answer, so it identifies a compiled
grammar, and it crosses from the server to the engine process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from specdecode_worker.guided.closed_objects import close_objects
from specdecode_worker.guided.errors import GrammarRefused

ITEM_SEPARATOR, KEY_SEPARATOR = ", ?", ": ?"
"""White space between JSON tokens, as regular expressions: at most one space, behind a comma or a colon.

With more white space, models can fill an answer with it up to ``max_tokens``.
"""

Schema = Mapping[str, Any] | bool


def compile_options(*, exact: bool, white_space: bool) -> dict[str, Any]:
    """Return llguidance's options for a JSON schema.

    Args:
        exact: Refuse keywords that a grammar cannot express. Otherwise they are ignored, and ``oneOf`` becomes
            ``anyOf``.
        white_space: Allow a space behind commas and colons.
    """
    return {
        "lenient": not exact,
        "coerce_one_of": not exact,
        "whitespace_flexible": False,
        **({"item_separator": ITEM_SEPARATOR, "key_separator": KEY_SEPARATOR} if white_space else {}),
    }


def json_grammar(schema: Schema, *, exact: bool = True, white_space: bool = True) -> str:
    """Return the grammar of the JSON texts that a schema allows, without properties that it does not name.

    The arguments are those of ``compile_options``; see ``close_objects`` for the properties.

    Raises:
        GrammarRefused: The schema is nested too deeply to be read.
    """
    options: Any = compile_options(exact=exact, white_space=white_space)
    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(close_objects(schema)), overrides=options))
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(f"the schema cannot be read: {error}") from None


def regex_grammar(pattern: str) -> str:
    """Return the grammar of the texts that a regular expression matches as a whole."""
    return str(LLMatcher.grammar_from_regex(pattern))


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar of a list of texts."""
    return lark_grammar("start: " + " | ".join(json.dumps(choice) for choice in choices))


def context_free_grammar(text: str) -> str:
    """Return the grammar of a text in Lark's or GBNF's notation.

    Raises:
        GrammarRefused: The text is in neither notation.
    """
    try:
        return lark_grammar(any_to_lark(text))
    except Exception as error:  # the converter raises plain exceptions of several kinds
        raise GrammarRefused(f"the grammar is neither in Lark's nor in GBNF's notation: {error}") from None


def lark_grammar(text: str) -> str:
    """Return the grammar of a text in Lark's notation."""
    return str(LLMatcher.grammar_from_lark(text))
