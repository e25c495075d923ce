"""Positions in grammars: masks behind tree paths, the end of a grammar, forced tokens, and failures."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tokenizers

from specdecode_worker.commands.flags import EMBEDDED_TARGET
from specdecode_worker.guided import guide as guide_module
from specdecode_worker.guided.grammars import (
    CACHED_GRAMMARS,
    MAX_GRAMMAR_BYTES,
    MAX_TEXT_BYTES,
    GrammarCompiler,
    choice_grammar,
    context_free_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
    with_readable_numbers,
)
from specdecode_worker.guided.guide import GrammarRefused, Guide
from specdecode_worker.models.fetch import default_cache_dir, resolve
from specdecode_worker.server.grammars import forced_calls
from specdecode_worker.server.requests import FunctionDefinition
from specdecode_worker.server.tools import Tokenizer
from support import small_model
from support.char_tokenizer import END, tokenizer_json

SIZE = 61
TOKENIZER = tokenizers.Tokenizer.from_str(tokenizer_json())


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def allowed(mask: Any) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer_json, SIZE, (END,))


def test_masks_follow_paths_and_leave_the_position(compiler: GrammarCompiler) -> None:
    guide = compiler.guide(regex_grammar("ab[0-9]c"))
    at_start = allowed(guide.mask())
    assert at_start == set(ids("ab")), "forced bytes are written as the tokenizer writes them"
    digits = {token for digit in "0123456789" for token in ids(digit)}
    assert allowed(guide.mask(ids("ab"))) == digits
    assert allowed(guide.mask([*ids("a"), *ids("b"), *ids("7")])) == set(ids("c"))
    assert allowed(guide.mask()) == at_start


@pytest.mark.parametrize("path", ["b", "abc", "ab7cc", "ab7c}"])
def test_a_draft_token_that_violates_the_grammar_has_no_mask(compiler: GrammarCompiler, path: str) -> None:
    guide = compiler.guide(regex_grammar("ab[0-9]c"))
    tokens = [token for letter in path for token in ids(letter)]
    assert guide.mask(tokens) is None
    assert allowed(guide.mask()) == set(ids("ab"))
    assert not guide.error


def test_draft_tokens_behind_the_end_of_the_grammar_have_no_mask(compiler: GrammarCompiler) -> None:
    guide = compiler.guide(choice_grammar(["ab"]))
    assert allowed(guide.mask(ids("ab"))) == {END}
    for path in ([*ids("ab"), END], [*ids("ab"), END, END], [*ids("ab"), *ids("a")], [END], [*ids("a"), END]):
        assert guide.mask(path) is None
    guide.advance([*ids("ab"), END])
    assert guide.ended
    assert guide.mask() is None
    guide.advance(ids("a"))
    assert not guide.error


def test_an_end_token_in_the_middle_ends_a_grammar_that_could_continue(compiler: GrammarCompiler) -> None:
    guide = compiler.guide(regex_grammar("(ab)*"))
    assert END in allowed(guide.mask())
    guide.advance([*ids("ab"), END, *ids("ab")])
    assert guide.ended
    assert not guide.error


def test_a_violation_by_emitted_tokens_is_an_error(compiler: GrammarCompiler) -> None:
    guide = compiler.guide(choice_grammar(["ab"]))
    guide.advance(ids("c"))
    assert guide.error
    assert guide.mask() is None
    assert guide.forced() == ()


def test_min_tokens_blocks_the_end_unless_nothing_else_is_allowed(compiler: GrammarCompiler) -> None:
    open_ended = compiler.guide(regex_grammar("(ab)*"), min_tokens=3, blocked=(END,))
    assert END not in allowed(open_ended.mask())
    assert END not in allowed(open_ended.mask(ids("ab") * 2))
    assert END in allowed(open_ended.mask(ids("ab") * 3))
    open_ended.advance(ids("ab") * 2)
    assert END in allowed(open_ended.mask(ids("ab")))
    complete = compiler.guide(choice_grammar(["ab"]), min_tokens=3, blocked=(END,))
    assert allowed(complete.mask(ids("ab"))) == {END}


def test_forced_tokens_are_the_only_possible_bytes(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "object", "properties": {"name": {"enum": ["abc"]}}, "required": ["name"],
              "additionalProperties": False}  # fmt: skip
    guide = compiler.guide(json_grammar(schema, white_space=False))
    assert TOKENIZER.decode(guide.forced()) == '{"name":"abc"}'
    guide.advance(ids('{"'))
    assert TOKENIZER.decode(guide.forced()) == 'name":"abc"}'
    monkeypatch.setattr(guide_module, "MOST_FORCED", 2)
    guide.advance(ids("na"))
    assert len(guide.forced()) == 2


def test_bits_beyond_the_vocabulary_are_never_set(compiler: GrammarCompiler) -> None:
    mask = compiler.guide(regex_grammar(".*")).mask()
    assert mask is not None
    assert max(allowed(mask)) < SIZE
    assert len(mask) == 2


@pytest.mark.parametrize(
    "grammar",
    [
        lark_grammar("start: missing"),
        regex_grammar("(a"),
        regex_grammar("(?=a)b"),
        json_grammar({"type": "nothing"}),
        regex_grammar("x" * MAX_GRAMMAR_BYTES),
    ],
)
def test_bad_and_too_large_grammars_are_refused(compiler: GrammarCompiler, grammar: str) -> None:
    for _ in range(2):  # the second answer is cached
        with pytest.raises(GrammarRefused) as refused:
            compiler.guide(grammar)
        assert 0 < len(str(refused.value)) <= 500


INT64 = (-(2**63), 2**63 - 1)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": INT64[0]},
        {"type": "integer", "minimum": INT64[0], "maximum": INT64[1]},
        {"type": "integer", "minimum": -1e30, "maximum": 2**64 - 1},
        {"type": "integer", "exclusiveMinimum": INT64[0] - 1},
        {"type": "number", "minimum": INT64[0], "maximum": 2**64},
        {"anyOf": [{"type": "integer", "minimum": INT64[0]}, {"type": "null"}]},
    ],
)
def test_bounds_at_the_ends_of_64_bits(schema: Any) -> None:
    compiler = GrammarCompiler(lambda: small_model.byte_tokenizer().to_str(), 258, (257,))
    for exact in (True, False):
        guide = compiler.guide(json_grammar(schema, exact=exact))
        for text in ("-5", "-9223372036854774784", "9007199254740991"):
            mask = guide.mask(small_model.byte_tokenizer().encode(text).ids)
            assert mask is not None, text
            assert 257 in allowed(mask), text
        assert guide.mask(small_model.byte_tokenizer().encode("-92233720368547758080").ids) is None


FATAL = [INT64[0], INT64[0] + 1, INT64[0] + 400]


@pytest.mark.parametrize("number", FATAL)
@pytest.mark.parametrize(
    "schema", ['{"const": %d}', '{"enum": [1, %d]}', '{"properties": {"enum": {"const": {"a": [%d]}}}}']
)
def test_constants_that_end_the_library_are_refused(schema: str, number: int) -> None:
    text = schema % number
    with pytest.raises(GrammarRefused, match=f"the number {number} cannot be a constant"):
        json_grammar(json.loads(text), exact=False)
    with pytest.raises(GrammarRefused, match=f"the number {number} cannot be a constant"):
        context_free_grammar(f"start: %json {text}")
    with pytest.raises(GrammarRefused, match=f"the number {number} cannot be a constant"):
        forced_calls("hermes", [FunctionDefinition(name="f", parameters=json.loads(text))], parallel=False)


def test_texts_with_such_numbers_are_no_constants(compiler: GrammarCompiler) -> None:
    described = {
        "description": f"from {INT64[0]}",
        "default": INT64[0],
        "enum": [-(2**53), f'\\"{INT64[0]}', {f"{INT64[0]}": 1}],
    }
    compiler.check(json_grammar({"properties": {"const": described, "minimum": {"type": "string"}}}))
    assert with_readable_numbers({"const": {"minimum": -1e30}}) == {"const": {"minimum": -1e30}}


def test_a_schema_larger_than_any_grammar_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdecode_worker.guided.grammars.close_objects", None)
    with pytest.raises(GrammarRefused, match=f"more than {MAX_GRAMMAR_BYTES} bytes"):
        json_grammar({"anyOf": [{}] * MAX_GRAMMAR_BYTES})
    with pytest.raises(GrammarRefused, match=f"more than {MAX_GRAMMAR_BYTES} bytes"):
        json_grammar({"const": "é" * (MAX_GRAMMAR_BYTES // 2)})


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"items": schema}
    with pytest.raises(GrammarRefused, match="cannot be read"):
        json_grammar(schema)


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a" | "c"',
        'start: "a" | "c"',
        '\n \n\tstart : "a" | "c"',
        '# text\n%llguidance {}\nstart: "a" | "c"',
    ],
)
def test_grammars_in_both_notations(compiler: GrammarCompiler, text: str) -> None:
    guide = compiler.guide(context_free_grammar(text))
    assert allowed(guide.mask()) == {*ids("a"), *ids("c")}


def test_text_that_is_no_grammar_is_refused() -> None:
    with pytest.raises(GrammarRefused):
        context_free_grammar("root ::= ( unclosed")


CHAIN = "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(2000)), 'r2000 ::= "a"'])


@pytest.mark.parametrize("text", ["\n" * 20_000, CHAIN], ids=["white space", "chain"])
def test_text_that_takes_long_to_convert_is_refused(text: str) -> None:
    """Llguidance looks for Lark's notation from each line on, and goes through all rules once for each of a chain."""
    with pytest.raises(GrammarRefused, match="too many lines"):
        context_free_grammar(text)


REFERENCES = {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(8000)} | {"8000": {}}}
RULES = "\n".join(["start: a0", *(f"a{i}: ((((((a{i + 1}))))))" for i in range(2500)), 'a2500: "x"'])


@pytest.mark.parametrize("deep", [lambda: json_grammar(REFERENCES), lambda: context_free_grammar(RULES)])
def test_a_grammar_of_long_chains_does_not_end_the_process(compiler: GrammarCompiler, deep: Any) -> None:
    """The library's recursion overflows the usual stack of a thread, which would end the process."""
    compiler.compiles(deep())


@pytest.mark.parametrize(
    "rule", [" a" * (MAX_TEXT_BYTES // 2), f' "{"é" * (MAX_TEXT_BYTES // 2)}"'], ids=["rules", "two bytes a character"]
)
def test_a_grammar_written_by_a_client_is_small(rule: str) -> None:
    with pytest.raises(GrammarRefused, match=f"more than {MAX_TEXT_BYTES} bytes"):
        context_free_grammar(f"start: a{rule}")


def test_a_model_without_end_token_refuses_grammars() -> None:
    with pytest.raises(GrammarRefused, match="end-of-text"):
        GrammarCompiler(tokenizer_json, SIZE, ()).check(regex_grammar("a"))


def test_guides_of_one_grammar_are_independent_and_compiled_once(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    right = GrammarCompiler._compile
    monkeypatch.setattr(
        GrammarCompiler, "_compile", lambda self, grammar: (compiled.append(grammar), right(self, grammar))[1]
    )
    grammar = regex_grammar("abcd?")
    one, two = compiler.guide(grammar), compiler.guide(grammar)
    one.advance(ids("ab"))
    assert allowed(two.mask()) & set(ids("abc"))
    assert not allowed(one.mask()) & set(ids("abc"))
    assert compiled == [grammar]
    for index in range(CACHED_GRAMMARS):
        compiler.check(regex_grammar(f"a{{{index + 2}}}"))
    compiler.check(grammar)
    assert compiled.count(grammar) == 2, "the cache is bounded"


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"a":1,"b":2}', True),
        ('{"a": 1, "b": 2}', True),
        ('{"a":  1', False),
        ('{ "a"', False),
        ('{"a" :', False),
        ('{"a":1 ', False),
        ("{\n", False),
        ("[", False),
    ],
)
def test_white_space_of_json_is_one_space_behind_separators(
    compiler: GrammarCompiler, text: str, is_allowed: bool
) -> None:
    guide = compiler.guide(json_grammar({"type": "object"}))
    assert (guide.mask(ids(text)) is not None) == is_allowed


def test_a_failing_matcher_ends_in_an_error_not_an_exception() -> None:
    matcher = Mock()
    matcher.is_error.return_value, matcher.get_error.return_value = True, "lexer too complex"
    guide = Guide(matcher, (END,), SIZE)
    assert guide.mask() is None
    assert guide.error == "lexer too complex"


def test_a_panic_of_the_library_while_it_compiles_refuses_the_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """Error like a panic of a Rust library, which is no Exception."""

    monkeypatch.setattr(GrammarCompiler, "_build", Mock(side_effect=Panic("index out of bounds")))
    with pytest.raises(GrammarRefused, match="failed: index out of bounds"):
        compiler.check(regex_grammar("panics"))


EMBEDDED_END, MOST_PROBES = 2, 200
SHAPES: Any = {
    "type": "object",
    "properties": {
        "dimensions": {
            "type": "object",
            "properties": {name: {"type": "number"} for name in ("base", "height", "radius", "side")},
            "additionalProperties": True,
        },
        "shape": {"type": "string"},
    },
    "required": ["shape", "dimensions"],
}
TEXTS = (
    '{"dimensions":{"properties":{"description":{"height":{"type":{"a": [1, 2, true]}}}}}, "shape":"x, y"}',
    '{"dimensions": {"height": 2, "radius": 3.5}, "shape": "circle"}',
)


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    """Return the tokenizer of the embedded model, whose vocabulary is a real one."""
    return Tokenizer.from_folder(resolve(EMBEDDED_TARGET, default_cache_dir()))


@pytest.mark.embedded
@pytest.mark.parametrize("text", TEXTS)
def test_masks_behind_paths_equal_those_of_a_fresh_guide(embedded: Tokenizer, text: str) -> None:
    """Every token that a mask allows can also be consumed, and looking behind a path leaves the position unchanged."""
    compiler = GrammarCompiler(lambda: embedded.json, embedded.vocab_size, (EMBEDDED_END,))
    grammar, tokens = json_grammar(SHAPES), embedded.encode(text)
    guide = compiler.guide(grammar)
    for place, token in enumerate(tokens):
        before = guide.mask()
        for end in range(place, min(place + 4, len(tokens)) + 1):
            fresh = compiler.guide(grammar)
            fresh.advance(tokens[:end])
            mask, wanted = guide.mask(tokens[place:end]), fresh.mask()
            assert mask is not None
            assert wanted is not None
            assert np.array_equal(mask, wanted), (place, end, embedded.decode(tokens[place:end]))
        assert before is not None
        # Nothing follows the end.
        for other in sorted(allowed(before) - {EMBEDDED_END})[:MOST_PROBES]:
            assert guide.mask([other]) is not None, (place, embedded.decode([other]))
        after = guide.mask()
        assert after is not None
        assert np.array_equal(before, after)
        guide.advance([token])
        assert not guide.error


WRONG_PATH = (" [", '">', " Inclusion", "atteries")
"""Tokens behind a colon that the text does not continue with. The path ends inside a string."""


@pytest.mark.embedded
def test_rejected_paths_leave_the_position_unchanged(embedded: Tokenizer) -> None:
    """After llguidance 1.9.1 has left such a path by its rollback, masks behind the next tokens are wrong."""
    compiler = GrammarCompiler(lambda: embedded.json, embedded.vocab_size, (EMBEDDED_END,))
    wrong = [token for piece in WRONG_PATH for token in embedded.encode(piece)]
    assert len(wrong) == len(WRONG_PATH), "each piece is one token"
    grammar, tokens = json_grammar({"type": "object"}), embedded.encode(TEXTS[0])
    guide = compiler.guide(grammar)
    looked = 0
    for place, token in enumerate(tokens):
        looked += guide.mask(wrong) is not None
        guide.advance([token])
        fresh = compiler.guide(grammar)
        fresh.advance(tokens[: place + 1])
        mask, wanted = guide.mask(), fresh.mask()
        assert mask is not None
        assert wanted is not None
        assert np.array_equal(mask, wanted), embedded.decode(tokens[: place + 1])
    assert looked > 1, "the path must be allowed at some places"
