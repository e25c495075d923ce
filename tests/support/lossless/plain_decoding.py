"""Reference decoder: one dense forward pass over all tokens per generated token, and reference processors.

It uses no engine, no cache, no packing and no batching. With grammars, a fresh matcher reads the whole answer again
before every token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from specdecode_kernels.noise.reference import gumbel
from specdecode_kernels.sample.reference import adjusted, processed
from specdecode_worker.core.messages import Submit
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.sampling.params import Sampling
from support.char_tokenizer import END, tokenizer_json
from support.worker.dense_attention import dense


class PlainDecoding:
    """Texts of requests and the probabilities of their next tokens, computed with dense passes."""

    def __init__(self, target: CausalLM) -> None:
        self._target = target
        self.text = lru_cache(maxsize=None)(self._text)

    def texts(self, requests: Iterable[Submit]) -> dict[str, list[int]]:
        return {request.request_id: self.text(request) for request in requests}

    def logits(self, tokens: list[int]) -> Tensor:
        """Return the target's logits after every token, [T, V]."""
        hidden = self._target(torch.tensor(tokens), torch.arange(len(tokens)), dense).hidden_TE
        return self._target.logits(hidden)

    def logp(self, request: Submit, answer: list[int]) -> Tensor:
        """Return the log-probabilities of the token after ``answer``, [1, V].

        For a greedy request all probability is on one token.
        """
        sampling, moved = request.sampling, self.moved(request, answer)
        cuts = torch.tensor([sampling.top_k]), torch.tensor([sampling.top_p]), torch.tensor([sampling.min_p])
        return processed(moved, torch.tensor([sampling.temperature]), *cuts)

    def moved(self, request: Submit, answer: list[int]) -> Tensor:
        """Return the logits of the token after ``answer`` with bias, penalties and blocked tokens, [1, V]."""
        return with_processors(self.logits([*request.prompt, *answer])[-1:], request, answer)

    def is_end(self, request: Submit, answer: list[int]) -> bool:
        """Return whether the last token of ``answer`` ends it."""
        return answer[-1] in request.sampling.stop_token_ids and len(answer) >= request.sampling.min_tokens

    def _text(self, request: Submit) -> list[int]:
        answer: list[int] = []
        seed = torch.tensor([request.sampling.seed])
        while len(answer) < request.sampling.max_tokens:
            logp = self.logp(request, answer)
            noise = gumbel(seed, torch.tensor([len(request.prompt) + len(answer)]), logp.shape[-1])
            answer.append(int((logp + noise).argmax()))
            if self.is_end(request, answer):
                break
        return answer


def with_processors(logits: Tensor, request: Submit, answer: list[int], *, blocks: bool = True) -> Tensor:
    sampling, words = request.sampling, range(logits.shape[-1])
    bias = torch.zeros_like(logits)
    for token, value in sampling.logit_bias:
        bias[0, token] = value
    blocked = torch.zeros_like(logits, dtype=torch.bool)
    blocked[0, list(sampling.stop_token_ids)] = blocks and len(answer) < sampling.min_tokens
    if sampling.allowed_token_ids:
        blocked[0, [token for token in words if token not in sampling.allowed_token_ids]] = True
    return adjusted(
        logits,
        bias_RV=bias,
        blocked_RV=blocked,
        prompt_RV=torch.tensor([[token in request.prompt for token in words]]),
        counts_RV=torch.tensor([[answer.count(token) for token in words]]),
        repetition_R=torch.tensor([sampling.repetition_penalty]),
        frequency_R=torch.tensor([sampling.frequency_penalty]),
        presence_R=torch.tensor([sampling.presence_penalty]),
    )


def noised(logits_RV: Tensor, sampling: Sampling, position_R: Tensor) -> Tensor:
    """Return the scores, [R, V], of which the largest is emitted: logits, or noised log-probabilities if sampled."""
    if sampling.temperature == 0:
        return logits_RV
    rows = len(logits_RV)
    fields = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    logp = processed(logits_RV, *(torch.full((rows,), value) for value in fields))
    return logp + gumbel(torch.full((rows,), sampling.seed), position_R, logits_RV.shape[-1])


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
        long_enough = bool(request.sampling.grammar) or len(answer) >= request.sampling.min_tokens
        return (answer[-1] == END and long_enough) or super().is_end(request, answer)
