"""Tokenizers with the added tokens of published models, whose text grammars and tool calls write too.

Qwen's and Hermes' tokenizers have ``<tool_call>`` and ``<think>`` as tokens that are not marked as special; others mark
them, and mark ``<|python_tag|>`` and ``</s>``. The tests of grammars and tools run with each kind.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from tokenizers import Tokenizer

from specdecode_worker.guided.grammars import GrammarCompiler
from specdecode_worker.server.tools import with_text_tags
from support import small_model

TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "</s>", "[TOOL_CALLS]", "<a b>")
"""Added tokens, with the ids from ``small_model.VOCAB_SIZE`` on."""
SIZE = small_model.VOCAB_SIZE + len(TOKENS)
Kind = Literal["none", "text", "special"]
KINDS: tuple[Kind, ...] = ("none", "text", "special")
"""Without the tokens, with them as text, and with them marked as special."""


def tokenizer_of(kind: Kind) -> Tokenizer:
    """Return the tokenizer with one token per byte and the added tokens of a kind."""
    if kind == "none":
        return small_model.byte_tokenizer()
    return small_model.byte_tokenizer(TOKENS) if kind == "special" else small_model.byte_tokenizer((), TOKENS)


class Language:
    """Compiler of grammars for one tokenizer, which says what answers a grammar allows."""

    def __init__(self, kind: Kind) -> None:
        stored = tokenizer_of(kind)
        self.kind, self.tokenizer = kind, with_text_tags(stored)
        self.compiler = GrammarCompiler(stored.to_str, SIZE, (small_model.END_ID,))

    def allows(self, grammar: str, text: str) -> bool:
        """Return whether an answer may be exactly this text, however its tokens write it."""
        spelled = self._allows_ids(grammar, small_model.byte_tokenizer().encode(text).ids)
        if not any(token in text for token in TOKENS[2:]) or self.kind != "special":
            assert self._allows_ids(grammar, self.tokenizer.encode(text).ids) == spelled, text
        return spelled

    def written(self, grammar: str, *, wanted: tuple[int, ...] = ()) -> str:
        """Return an answer token by token: the first of ``wanted`` that is allowed, else the first allowed token."""
        guide, ids = self.compiler.guide(grammar), []
        while len(ids) < 500:
            mask = guide.mask()
            assert mask is not None, (guide.error, self.tokenizer.decode(ids))
            allowed = [token for token in range(SIZE) if mask[token // 32] >> np.uint32(token % 32) & 1]
            token = next((token for token in wanted if token in allowed), allowed[0])
            guide.advance([token])
            assert not guide.error, (guide.error, token, self.tokenizer.decode(ids))
            if guide.ended:
                return str(self.tokenizer.decode(ids))
            ids.append(token)
        raise AssertionError("the answer does not end")

    def _allows_ids(self, grammar: str, ids: list[int]) -> bool:
        mask, end = self.compiler.guide(grammar).mask(ids), small_model.END_ID
        return mask is not None and bool(mask[end // 32] >> np.uint32(end % 32) & 1)
