"""Simulated cost of requests with the noise of real workers: slow drift, stalls, heavy tails, spread between nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CostNoise:
    """Noise of log cost per token.

    In benchmarks/recordings/ranks-smollm2.json, the log of tokens per step of a chain of 3 has standard deviations of
    0.07 to 0.19 between answers of a domain, and the log of their lengths 0.3 to 0.7.
    """

    request: float = 0.2
    """Standard deviation of a request's own noise, with the tails of Student's t of 4 degrees of freedom."""
    slow: float = 0.05
    """Standard deviation of the slow part (load, neighbours), an autoregression over requests."""
    memory: float = 0.98
    """Its correlation from one request to the next."""
    node: float = 0.03
    """Standard deviation between nodes."""
    stall_chance: float = 0.002
    """Chance that a stall begins with a request."""
    stall_requests: int = 10
    stall_factor: float = 2.0
    length: float = 0.6
    """Standard deviation of log output tokens."""


DEFAULT_NOISE = CostNoise()


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests in order: seconds of decoding and output tokens."""

    seconds: Array
    tokens: Array


def draw_requests(generator: Any, count: int, noise: CostNoise, log_cost: Array | float = 0.0) -> Requests:
    """Draw consecutive requests of one worker with mean log cost ``log_cost``, given per request or for all."""
    tokens = np.maximum(1.0, np.exp(4.6 + noise.length * generator.standard_normal(count)))
    own = noise.request * generator.standard_t(4, count) / np.sqrt(2)
    stalls = generator.random(count) < noise.stall_chance
    stalled = np.convolve(stalls, np.ones(noise.stall_requests))[:count] > 0
    slow = _autoregression(generator, count, noise)
    node = noise.node * generator.standard_normal()
    cost = np.exp(log_cost + own + slow + node + np.log(noise.stall_factor) * stalled)
    return Requests(cost * tokens * 0.02, tokens)


def _autoregression(generator: Any, count: int, noise: CostNoise) -> Array:
    """Return a stationary autoregression of order 1 with standard deviation ``noise.slow``."""
    shocks = generator.standard_normal(count) * noise.slow * np.sqrt(1 - noise.memory**2)
    value = noise.slow * generator.standard_normal()
    values = np.empty(count)
    for index, shock in enumerate(shocks.tolist()):
        value = noise.memory * value + shock
        values[index] = value
    return values
