"""Sampling parameters of a batch as tensors, with one row per sequence, built on first use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.speculation.sampling.params import SamplingParams


class ParamColumns:
    """Tensors [B] or [B, K] of the sampling parameters. A penalty is None if no request of the batch uses it."""

    def __init__(self, batch_params: Sequence[SamplingParams], device: torch.device) -> None:
        self._batch_params, self._device = batch_params, device

    @cached_property
    def temperature_B(self) -> Tensor:
        """Temperature, 1 for greedy requests, so that it can be a divisor."""
        return self._floats([params.temperature or 1.0 for params in self._batch_params])

    @cached_property
    def own_temperature_B(self) -> Tensor:
        """Temperature, 0 for greedy requests."""
        return self._floats([params.temperature for params in self._batch_params])

    @cached_property
    def seed_B(self) -> Tensor:
        """Seed of the noise."""
        return to_device([params.seed for params in self._batch_params], self._device)

    @cached_property
    def top_k_B(self) -> Tensor:
        """Top-k; 0 disables it."""
        return to_device([params.top_k for params in self._batch_params], self._device)

    @cached_property
    def top_p_B(self) -> Tensor:
        """Top-p; 1 disables it."""
        return self._floats([params.top_p for params in self._batch_params])

    @cached_property
    def min_p_B(self) -> Tensor:
        """Min-p; 0 disables it."""
        return self._floats([params.min_p for params in self._batch_params])

    @cached_property
    def repetition_B(self) -> Tensor | None:
        """Repetition penalty; 1 is neutral."""
        return self._penalty([params.repetition_penalty for params in self._batch_params], 1.0)

    @cached_property
    def frequency_B(self) -> Tensor | None:
        """Frequency penalty; 0 is neutral."""
        return self._penalty([params.frequency_penalty for params in self._batch_params], 0.0)

    @cached_property
    def presence_B(self) -> Tensor | None:
        """Presence penalty; 0 is neutral."""
        return self._penalty([params.presence_penalty for params in self._batch_params], 0.0)

    @cached_property
    def prompt_tokens_B(self) -> Tensor:
        """Number of prompt tokens."""
        return to_device([params.prompt_tokens for params in self._batch_params], self._device)

    @cached_property
    def min_tokens_B(self) -> Tensor:
        """Number of answer tokens before which tokens are blocked; 0 if no token is blocked."""
        return to_device([params.min_tokens if params.blocks else 0 for params in self._batch_params], self._device)

    @cached_property
    def bias_BK(self) -> tuple[Tensor, Tensor] | None:
        """Token ids and logit biases, padded with a bias of 0; None if no request has a bias."""
        longest = max(len(params.logit_bias) for params in self._batch_params)
        if not longest:
            return None
        rows = [[*params.logit_bias, *[(0, 0.0)] * (longest - len(params.logit_bias))] for params in self._batch_params]
        tokens = to_device([[token for token, _ in row] for row in rows], self._device)
        return tokens, self._floats([[value for _, value in row] for row in rows])

    @cached_property
    def blocked_BK(self) -> Tensor | None:
        """Token ids blocked before min_tokens; None if no request blocks any.

        Rows are padded with one of their own ids, so that no id is marked as both blocked and free.
        """
        rows = [params.blocked if params.blocks else (0,) for params in self._batch_params]
        if not any(params.blocks for params in self._batch_params):
            return None
        longest = max(map(len, rows))
        return to_device([[*row, *row[:1] * (longest - len(row))] for row in rows], self._device)

    def _penalty(self, values: list[float], neutral: float) -> Tensor | None:
        """Return the values as a tensor, or None if all are neutral."""
        return None if all(value == neutral for value in values) else self._floats(values)

    def _floats(self, values: list[float] | list[list[float]]) -> Tensor:
        return to_device(values, self._device, dtype=torch.float32)
