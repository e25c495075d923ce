"""How one request is sampled, as the host knows it; processing.py makes tensors of a batch of laws."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Law:
    """``temperature`` 0 is greedy. Fields mean what messages.Sampling says. ``blocked`` are the token ids that cannot
    be chosen before ``min_tokens`` are out; the answer begins at position ``prompt_tokens``."""

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

    @cached_property
    def greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def truncated(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @cached_property
    def counts(self) -> bool:
        """Whether the answer so far matters."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @cached_property
    def blocks(self) -> bool:
        return self.min_tokens > 0 and bool(self.blocked)

    @cached_property
    def adjusts(self) -> bool:
        """Whether single tokens' logits move, so that greedy decoding feels it too."""
        return self.counts or self.blocks or bool(self.logit_bias)
