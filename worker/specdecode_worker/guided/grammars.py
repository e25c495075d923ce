"""Grammars of answers: their texts from JSON schemas, and their compilation."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from specdecode_worker.guided.guide import GrammarRefused, Guide, library_message

# Objects of a JSON schema that are closed: they get no property that the schema does not name.
#
# JSON Schema allows any further property where ``additionalProperties`` is absent. A model that may invent properties
# often does not end, and clients do not expect them. Other engines close such objects too (``strict_mode`` of xgrammar,
# the default of vLLM; OpenAI's ``strict`` demands it). What a closed schema allows, the schema itself allows.

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


_SINGLE = {
    **dict.fromkeys(("items", "additionalItems", "additionalProperties", "unevaluatedProperties"), _Use.ALONE),
    **dict.fromkeys(("then", "else"), _Use.COMBINED),
    # Schemas that, if they allowed less, could make the whole schema allow more.
    **dict.fromkeys(("not", "if", "contains"), _Use.REVERSED),
}
"""Use of the schema that is the value of a keyword."""
_LISTED = {"items": _Use.ALONE, "prefixItems": _Use.ALONE, "oneOf": _Use.REVERSED}
"""Use of the schemas of a list. That of ``anyOf`` and ``allOf`` depends on the keywords beside them."""
_BY_NAME = {
    **dict.fromkeys(("properties", "patternProperties"), _Use.ALONE),
    **dict.fromkeys(("dependentSchemas", "dependencies"), _Use.COMBINED),
}
"""Use of the schemas of an object, by names."""


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
    keywords = _COMBINED & part.keys()
    is_only = use is _Use.ALONE and len(keywords) == 1 and part.keys() - keywords <= _WITHOUT_RULES
    only = _Use.ALONE if is_only else _Use.COMBINED
    for key, below in _SINGLE.items():
        yield part.get(key), below
    for key, below in {**_LISTED, "anyOf": only, "allOf": only}.items():
        children = part.get(key)
        if isinstance(children, list):
            are_combined = key == "allOf" and len(children) > 1
            yield from ((child, _Use.COMBINED if are_combined else below) for child in children)
    for key, below in _BY_NAME.items():
        if isinstance(part.get(key), Mapping):
            yield from ((child, below) for child in part[key].values())
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


# Numbers of a JSON schema at the ends of 64 bits, on which llguidance fails.
#
# It computes bounds of integers in 64 bits and those of other numbers as doubles, and refuses the range of int64, which
# many generators of schemas write. Such bounds are moved inwards by 1,024, the distance of doubles there. A constant
# that a double rounds to int64's minimum ends the process of llguidance 1.9, so it is refused before.

_LEAST, _MOST = -(2**63) + 1024, 2**63 - 1024
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_SCHEMAS_BY_NAME = (*_BY_NAME, "$defs", "definitions")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_FATAL = re.compile(r"-9223372036854\d{6}(?![\d.eE])")


def with_readable_numbers(schema: Any) -> Any:
    """Return ``schema`` with bounds that llguidance can read, within those given.

    Raises:
        GrammarRefused: A constant cannot be read.
    """
    if isinstance(schema, list):
        return [with_readable_numbers(child) for child in schema]
    if not isinstance(schema, Mapping):
        return schema
    readable: dict[str, Any] = {}
    for key, child in schema.items():
        if key in ("const", "enum"):
            _check_constants(_STRING.sub("", json.dumps(child)))
            readable[key] = child
        elif key in _SCHEMAS_BY_NAME and isinstance(child, Mapping):
            readable[key] = {name: with_readable_numbers(one) for name, one in child.items()}
        elif isinstance(child, int | float) and not isinstance(child, bool) and key in _LOWER:
            readable[key] = max(child, _LEAST)
        elif isinstance(child, int | float) and not isinstance(child, bool) and key in _UPPER:
            readable[key] = child if schema.get("type") == "integer" else min(child, _MOST)
        else:
            readable[key] = with_readable_numbers(child)
    return readable


def _check_constants(text: str) -> None:
    """Raise GrammarRefused for a text with a number that ends llguidance's process."""
    for number in _FATAL.findall(text):
        if float(number) == float(-(2**63)):
            raise GrammarRefused(f"the number {number} cannot be a constant of a schema; send one above {_LEAST - 1}")


# Grammars as texts: a JSON schema, a regular expression, a list of choices or a context-free grammar.
#
# A text is what llguidance reads. It says everything about the language of the answer, so it identifies a compiled
# grammar, and it crosses from the server to the engine process.

ITEM_SEPARATOR, KEY_SEPARATOR = ", ?", ": ?"
"""White space between JSON tokens, as regular expressions: at most one space, behind a comma or a colon.

With more white space, models can fill an answer with it up to ``max_tokens``.
"""

Schema = Mapping[str, Any] | bool
T = TypeVar("T")
MAX_GRAMMAR_BYTES = 256 * 1024
"""Largest grammar. The largest schemas of public collections that compile at all have about 200 KB."""
MAX_TEXT_BYTES = 64 * 1024
"""Largest grammar that a client writes in Lark's or GBNF's notation."""
_LARK = re.compile(r"(?m)^[^\S\n]*(%llguidance\b|start\s*:)")
"""A line with `%llguidance` or `start:` marks Lark's notation, as in llguidance, whose own pattern for it takes time by
the square of the number of lines."""
_MOST_GBNF_WORK = 2**24
"""Most characters times lines of a text in GBNF's notation, which llguidance converts in Python: seconds of work."""


def check_size(*texts: str, most: int = MAX_GRAMMAR_BYTES) -> None:
    """Raise GrammarRefused for texts that have more than ``most`` bytes together, before any other work on them."""
    if sum(len(text.encode()) for text in texts) > most:
        raise GrammarRefused(f"the grammar has more than {most} bytes")


def readable_schema(schema: Schema) -> Any:
    """Return a schema that llguidance can read, with closed objects.

    Raises:
        GrammarRefused: The schema is too large, or has a constant that cannot be read.
    """
    check_size(json.dumps(schema, ensure_ascii=False, separators=(",", ":")))
    return close_objects(with_readable_numbers(schema))


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
        GrammarRefused: The schema is too large or nested too deeply to be read, or has a constant that cannot be read.
    """
    options: Any = compile_options(exact=exact, white_space=white_space)
    try:
        readable = json.dumps(readable_schema(schema))
        return str(LLMatcher.grammar_from_json_schema(readable, overrides=options))
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(f"the schema cannot be read: {error}") from None


def regex_grammar(pattern: str) -> str:
    """Return the grammar of the texts that a regular expression matches as a whole."""
    return str(LLMatcher.grammar_from_regex(pattern))


def text_without(words: Sequence[str]) -> str:
    """Return the grammar of the texts that contain none of some words, whatever tokens write them."""
    letters = ("".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in word) for word in words)
    return lark_grammar(f"start: TEXT\nTEXT: /(?s:.*)/ & ~/(?s:.*)({'|'.join(letters)})(?s:.*)/")


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar of a list of texts."""
    return lark_grammar("start: " + " | ".join(json.dumps(choice) for choice in choices))


def context_free_grammar(text: str) -> str:
    """Return the grammar of a text in Lark's or GBNF's notation.

    Raises:
        GrammarRefused: The text is in neither notation, too long, or has a schema with a constant that cannot be read.
    """
    check_size(text, most=MAX_TEXT_BYTES)
    if "%json" in text:
        _check_constants(text)
    if _LARK.search(text):
        return lark_grammar(text)
    if len(text) * len(text.splitlines()) > _MOST_GBNF_WORK:
        raise GrammarRefused("the grammar has too many lines to be converted from GBNF's notation; write it in Lark's")
    try:
        return lark_grammar(gbnf_to_lark(text))
    except Exception as error:  # the converter raises plain exceptions of several kinds
        raise GrammarRefused(f"the grammar is neither in Lark's nor in GBNF's notation: {error}") from None


def lark_grammar(text: str) -> str:
    """Return the grammar of a text in Lark's notation."""
    return str(LLMatcher.grammar_from_lark(text))


# Compiler of grammars for one tokenizer, with bounds on time and memory, and a cache of what it compiled.

STACK_BYTES = 256 * 2**20
"""Stack of a thread that compiles. The library calls itself for each rule or reference within another, with some
kilobytes each, and the usual 8 MiB would end the process; grammars of the largest sizes take up to 100 MiB of it."""
CACHED_GRAMMARS = 64
"""Number of compiled grammars that are cached."""
TEXT_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Added tokens that are text even where tokenizer.json marks them as special: clients and parsers need them."""


def parser_limits() -> LLParserLimits:
    """Return the bounds of one grammar.

    Lexer fuel bounds the time: one million units take about 20 ms at compilation, and 200,000 about 14 ms in a mask.
    Lexer states bound the memory: each takes one to two kilobytes.
    """
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=25_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class _TokenTexts:
    """Tokens as the text that clients receive, for llguidance's ``TokenizerWrapper``.

    A special token, or one that ends an answer, has no text: no literal of a grammar matches it, and its name in a
    literal is spelled with other tokens. Any other added token is its text. llguidance itself takes every added token
    of the form ``<...>`` for a special one, and still writes literals with it, so that a literal ``<tool_call>`` ends
    in an error.
    """

    bos_token_id = None

    def __init__(self, tokenizer_json: str, vocab_size: int, end_tokens: tuple[int, ...]) -> None:
        document = json.loads(tokenizer_json)
        added, document["added_tokens"], document["post_processor"] = document["added_tokens"], [], None
        self._base = LLTokenizer(json.dumps(document), vocab_size)
        self.eos_token_id = end_tokens[0]
        self.tokens = [self._base.decode_bytes([token]) for token in range(vocab_size)]
        special = {token for token in range(vocab_size) if self._base.is_special_token(token)}
        self._ids: dict[str, int] = {}
        for token in (token for token in added if token["id"] < vocab_size):
            self.tokens[token["id"]] = token["content"].encode()
            if token["id"] in end_tokens or (token["special"] and token["content"] not in TEXT_TAGS):
                special.add(token["id"])
            else:
                special.discard(token["id"])
                self._ids[token["content"]] = token["id"]
        self.special_token_ids = sorted(special)
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def __call__(self, text: str) -> list[int]:
        """Return the tokens with which the tokenizer writes a text, without special ones."""
        ids: list[int] = []
        for part in filter(None, self._split.split(text)):
            ids += [self._ids[part]] if part in self._ids else self._base.tokenize_str(part)
        return ids


_stack_size = threading.Lock()
"""Held while the size of new stacks, which is that of the process, is changed."""


def _on_large_stack(work: Callable[[], T]) -> T:
    """Return the result of ``work`` from a thread of its own, whose memory is free afterwards."""
    with ThreadPoolExecutor(1, "grammar") as thread:
        with _stack_size:
            usual = threading.stack_size(STACK_BYTES)
            try:
                future = thread.submit(work)
            finally:
                threading.stack_size(usual)
        return future.result()


class GrammarCompiler:
    """Compiler for one model. Safe to use from several threads; it holds the interpreter lock only briefly."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, end_tokens: tuple[int, ...]) -> None:
        """Create a compiler; the tokenizer is read at the first compilation, which takes half a second.

        Args:
            tokenizer_json: Function that returns the contents of tokenizer.json.
            vocab_size: Number of token ids of the model.
            end_tokens: Token ids that end an answer.
        """
        self._tokenizer_json, self._vocab_size, self._end_tokens = tokenizer_json, vocab_size, end_tokens
        self._tokenizer: LLTokenizer | None = None
        self._cache: OrderedDict[bytes, LLMatcher | str] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, grammar: str) -> None:
        """Compile a grammar. Raises GrammarRefused if it cannot be used."""
        self._matcher(grammar)

    def compiles(self, grammar: str) -> bool:
        """Return whether a grammar can be used, without caching the answer."""
        return not isinstance(self._compile(grammar), str)

    def guide(self, grammar: str, *, min_tokens: int = 0, blocked: tuple[int, ...] = ()) -> Guide:
        """Compile a grammar and return a guide at the start of its language.

        Args:
            grammar: Text from ``grammars``.
            min_tokens: Number of answer tokens before which ``blocked`` tokens are not allowed.
            blocked: Those tokens.

        Raises:
            GrammarRefused: The grammar cannot be used.
        """
        matcher = self._matcher(grammar).deep_copy()
        return Guide(matcher, self._end_tokens, self._vocab_size, min_tokens=min_tokens, blocked=blocked)

    def _matcher(self, grammar: str) -> LLMatcher:
        """Return the matcher of a grammar in its initial state, from the cache if possible."""
        key = hashlib.sha256(grammar.encode()).digest()
        with self._lock:
            if key not in self._cache:
                self._cache[key] = self._compile(grammar)
            self._cache.move_to_end(key)
            while len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
            compiled = self._cache[key]
        if isinstance(compiled, str):
            raise GrammarRefused(compiled)
        return compiled

    def _compile(self, grammar: str) -> LLMatcher | str:
        """Return the matcher of a grammar, or the reason why it cannot be used."""
        if not self._end_tokens:
            return "the model has no end-of-text token, so a guided answer could not end"
        try:
            check_size(grammar)
            return _on_large_stack(lambda: self._build(grammar))
        except GrammarRefused as error:
            return str(error)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is not an Exception
            return f"the grammar library failed: {library_message(str(error))}"

    def _build(self, grammar: str) -> LLMatcher | str:
        """Return the matcher of a grammar, or the library's reason to refuse it."""
        if self._tokenizer is None:
            texts = _TokenTexts(self._tokenizer_json(), self._vocab_size, self._end_tokens)
            self._tokenizer = LLTokenizer(TokenizerWrapper(texts), eos_token=list(self._end_tokens))
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            return library_message(matcher.get_error())
        matcher.compute_bitmask()  # a grammar that is too complex for its first mask is refused, not failed later
        return library_message(matcher.get_error()) if matcher.is_error() else matcher
