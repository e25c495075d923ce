"""Compiler of grammars for one tokenizer, with bounds on time and memory, and a cache of what it compiled."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from specdecode_worker.guided.errors import GrammarRefused, library_message
from specdecode_worker.guided.guide import Guide

MAX_GRAMMAR_BYTES = 256 * 1024
"""Largest grammar. The largest schemas of public collections that compile at all have about 200 KB."""
CACHED_GRAMMARS = 64
"""Number of compiled grammars that are cached."""
TEXT_TAGS = ("<tool_call>", "</tool_call>")
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
        if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            return f"the grammar has more than {MAX_GRAMMAR_BYTES} bytes"
        try:
            return self._build(grammar)
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
