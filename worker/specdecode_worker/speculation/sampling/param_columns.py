"""The laws of a batch as tensors, one row a sequence; each is made when something first asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.speculation.sampling.params import Law


class Columns:
    """[B] or [B, K]. A penalty is None when no law of the batch has it."""

    def __init__(self, laws: Sequence[Law], device: torch.device) -> None:
        self._laws, self._device = laws, device

    @cached_property
    def temperature_B(self) -> Tensor:
        return self._floats([law.temperature or 1.0 for law in self._laws])

    @cached_property
    def own_temperature_B(self) -> Tensor:
        """0 where greedy."""
        return self._floats([law.temperature for law in self._laws])

    @cached_property
    def seed_B(self) -> Tensor:
        return to_device([law.seed for law in self._laws], self._device)

    @cached_property
    def top_k_B(self) -> Tensor:
        return to_device([law.top_k for law in self._laws], self._device)

    @cached_property
    def top_p_B(self) -> Tensor:
        return self._floats([law.top_p for law in self._laws])

    @cached_property
    def min_p_B(self) -> Tensor:
        return self._floats([law.min_p for law in self._laws])

    @cached_property
    def repetition_B(self) -> Tensor | None:
        return self._penalty([law.repetition_penalty for law in self._laws], 1.0)

    @cached_property
    def frequency_B(self) -> Tensor | None:
        return self._penalty([law.frequency_penalty for law in self._laws], 0.0)

    @cached_property
    def presence_B(self) -> Tensor | None:
        return self._penalty([law.presence_penalty for law in self._laws], 0.0)

    @cached_property
    def prompt_tokens_B(self) -> Tensor:
        return to_device([law.prompt_tokens for law in self._laws], self._device)

    @cached_property
    def min_tokens_B(self) -> Tensor:
        return to_device([law.min_tokens if law.blocks else 0 for law in self._laws], self._device)

    @cached_property
    def bias_BK(self) -> tuple[Tensor, Tensor] | None:
        """(token ids, values), padded with what changes nothing."""
        longest = max(len(law.logit_bias) for law in self._laws)
        if not longest:
            return None
        rows = [[*law.logit_bias, *[(0, 0.0)] * (longest - len(law.logit_bias))] for law in self._laws]
        tokens = to_device([[token for token, _ in row] for row in rows], self._device)
        return tokens, self._floats([[value for _, value in row] for row in rows])

    @cached_property
    def blocked_BK(self) -> Tensor | None:
        """Token ids, padded with a law's own: none may be said to be blocked and free."""
        rows = [law.blocked if law.blocks else (0,) for law in self._laws]
        if not any(law.blocks for law in self._laws):
            return None
        longest = max(map(len, rows))
        return to_device([[*row, *row[:1] * (longest - len(row))] for row in rows], self._device)

    def _penalty(self, values: list[float], neutral: float) -> Tensor | None:
        return None if all(value == neutral for value in values) else self._floats(values)

    def _floats(self, values: list[float] | list[list[float]]) -> Tensor:
        return to_device(values, self._device, dtype=torch.float32)
