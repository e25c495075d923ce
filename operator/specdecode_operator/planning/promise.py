"""What spec.speculation.objective asks of a step, and how far a step is from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specdecode_operator.api.v1alpha1 import ObjectiveSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A mean prompt: steps until it is read, and seconds that reading adds to each of them."""

    steps: int = 1
    seconds: float = 0

    def first_token_seconds(self, step_seconds: float) -> float:
        """Half a step under way, then the prompt's own. Waiting for a slot is the scaler's business."""
        return 0.5 * step_seconds + self.steps * (step_seconds + self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Bounds in seconds; None promises nothing."""

    ttit_seconds: float | None = None
    ttft_seconds: float | None = None
    min_speedup: float = 1
    prompt: Prompt = Prompt()

    @classmethod
    def of(cls, objective: ObjectiveSpec, prompt: Prompt) -> Promise:
        ttit, ttft = objective.itl_milliseconds, objective.ttft_milliseconds
        return cls(
            ttit_seconds=None if ttit is None else ttit / 1000,
            ttft_seconds=None if ttft is None else ttft / 1000,
            min_speedup=objective.min_speedup or 1.0,
            prompt=prompt,
        )

    @property
    def is_empty(self) -> bool:
        return self.ttit_seconds is None and self.ttft_seconds is None

    def violation(self, step_seconds: float, tokens: Iterable[float]) -> float:
        """How far the worst promise is missed, as a share of it; 0 when all are kept. ``tokens`` of a step, by task."""
        if self.is_empty:
            return 0.0
        worst = 1.0
        if self.ttit_seconds is not None:
            worst = max(worst, step_seconds / min(tokens, default=1.0) / self.ttit_seconds)
        if self.ttft_seconds is not None:
            worst = max(worst, self.prompt.first_token_seconds(step_seconds) / self.ttft_seconds)
        return worst - 1
