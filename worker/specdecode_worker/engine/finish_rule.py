"""Rule for the end of a request by its tokens. Engine and server share it, so it needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from specdecode_worker.engine.ipc.messages import Sampling


@dataclass(frozen=True, slots=True)
class FinishRule:
    """Rule that ends one request at a stop token, or at its largest number of output tokens."""

    stops: frozenset[int]
    """Token ids that end the request."""
    min_tokens: int
    max_tokens: int

    @classmethod
    def of(cls, sampling: Sampling, eos_token_ids: Iterable[int]) -> FinishRule:
        """Return the rule for the sampling parameters of a request and the end tokens of the model."""
        eos = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        return cls(frozenset(sampling.stop_token_ids) | eos, sampling.min_tokens, sampling.max_tokens)

    def may_finish(self, tokens: Sequence[int], emitted: int) -> bool:
        """Return whether one of ``tokens`` may end the request; the last one is output token number ``emitted``."""
        return emitted >= self.max_tokens or not self.stops.isdisjoint(tokens)

    def finish(self, token: int, emitted: int) -> Literal["stop", "length"] | None:
        """Return the finish reason at ``token``, which is output token number ``emitted`` (from 1); None to go on."""
        if token in self.stops and emitted >= self.min_tokens:
            return "stop"
        return "length" if emitted >= self.max_tokens else None
