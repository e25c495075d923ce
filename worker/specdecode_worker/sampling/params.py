"""Sampling parameters of one request on the host. logits_processing.py applies those of a batch to logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Fields have the meaning defined in core/messages.py, `Sampling`.

    ``temperature`` 0 is greedy. ``blocked`` are token ids that cannot be chosen before ``min_tokens`` answer tokens.
    The answer begins at position ``prompt_tokens``.
    """

    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    blocked: tuple[int, ...] = ()
    prompt_tokens: int = 0
    guided: bool = False
    """True if the answer follows a grammar, whose masks (token_masks.py) then include ``min_tokens``."""

    @cached_property
    def greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.temperature == 0

    @cached_property
    def truncated(self) -> bool:
        """True if top-k, top-p or min-p removes tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @cached_property
    def counts(self) -> bool:
        """True if a penalty depends on the tokens emitted so far."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @cached_property
    def blocks(self) -> bool:
        """True if tokens are blocked before min_tokens."""
        return self.min_tokens > 0 and bool(self.blocked)

    @cached_property
    def adjusts(self) -> bool:
        """True if logits of single tokens change, which also affects greedy decoding."""
        return self.counts or self.blocks or self.guided or bool(self.logit_bias)
