"""Reference decoder with grammars: a fresh matcher reads the whole answer again before every token."""

from __future__ import annotations

import math

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from specdecode_kernels.noise.reference import gumbel
from specdecode_kernels.sample.reference import processed
from specdecode_worker.core.messages import Submit
from specdecode_worker.models.causal_lm import CausalLM
from support.char_tokenizer import END, tokenizer_json
from support.lossless.plain_decoding import PlainDecoding, _adjusted


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

    def logp(self, request: Submit, answer: list[int]) -> Tensor:
        """Return the log-probabilities of the token after ``answer``, [1, V]."""
        if not request.sampling.grammar:
            return super().logp(request, answer)
        sampling = request.sampling
        moved = _adjusted(self.logits([*request.prompt, *answer])[-1:], request, answer, blocks=False)
        moved = moved.masked_fill(~self.allowed(request, answer), -math.inf)
        cuts = torch.tensor([sampling.top_k]), torch.tensor([sampling.top_p]), torch.tensor([sampling.min_p])
        return processed(moved, torch.tensor([sampling.temperature]), *cuts)

    def _text(self, request: Submit) -> list[int]:
        if not request.sampling.grammar:
            return super()._text(request)
        answer: list[int] = []
        seed, sampling = torch.tensor([request.sampling.seed]), request.sampling
        while len(answer) < sampling.max_tokens:
            logp = self.logp(request, answer)
            noise = gumbel(seed, torch.tensor([len(request.prompt) + len(answer)]), logp.shape[-1])
            answer.append(int((logp + noise).argmax()))
            if answer[-1] == END or (answer[-1] in sampling.stop_token_ids and len(answer) >= sampling.min_tokens):
                break
        return answer
