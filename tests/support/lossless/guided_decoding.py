"""Reference decoder with grammars: a fresh matcher reads the whole answer again before every token."""

from __future__ import annotations

import math

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from specdecode_worker.core.messages import Submit
from specdecode_worker.models.causal_lm import CausalLM
from support.char_tokenizer import END, tokenizer_json
from support.lossless.plain_decoding import PlainDecoding, with_processors


class GuidedDecoding(PlainDecoding):
    """Texts of requests with and without grammars, computed with dense passes and token by token."""

    def __init__(self, target: CausalLM) -> None:
        super().__init__(target)
        self._size = target.config.vocab_size
        self._tokenizer = LLTokenizer(tokenizer_json(), self._size, [END])

    def allowed(self, request: Submit, answer: list[int]) -> Tensor:
        """Return the allowed tokens after ``answer`` as a bool mask [V]."""
        sampling = request.sampling
        matcher = LLMatcher(self._tokenizer, sampling.grammar)
        for token in answer:
            assert matcher.consume_token(token), matcher.get_error()
        bits = matcher.compute_bitmask()
        mask = torch.tensor([bool(bits[token // 8] >> token % 8 & 1) for token in range(self._size)])
        if len(answer) < sampling.min_tokens:
            rest = mask.clone()
            rest[[END, *sampling.stop_token_ids]] = False
            mask = rest if rest.any() else mask
        return mask

    def moved(self, request: Submit, answer: list[int]) -> Tensor:
        """Return the logits of the token after ``answer``, of which a grammar leaves the allowed ones, [1, V]."""
        if not request.sampling.grammar:
            return super().moved(request, answer)
        moved = with_processors(self.logits([*request.prompt, *answer])[-1:], request, answer, blocks=False)
        return moved.masked_fill(~self.allowed(request, answer), -math.inf)

    def is_end(self, request: Submit, answer: list[int]) -> bool:
        """Return whether the last token of ``answer`` ends it."""
        return (bool(request.sampling.grammar) and answer[-1] == END) or super().is_end(request, answer)
