"""Result of a worker's check of its model before loading, passed in the container's termination message.

The kubelet truncates a termination message at 4096 bytes, so the verdict stays well below.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from specdecode_worker.contract.report import MemoryState
from specdecode_worker.contract.wire import CONTRACT_VERSION, Received

MAX_VERDICT_BYTES = 4096


class CheckVerdict(Received):
    """Result of the check before loading. If ``serves`` is false, the worker exits before it loads the model."""

    kind: Literal["specdecode-verdict"] = "specdecode-verdict"
    contract_version: int = CONTRACT_VERSION
    serves: bool
    fits: bool
    """True if the memory holds the weights and the caches of one sequence of full length."""
    problem: str = Field(default="", max_length=1000)
    """Reason why the model does not fit, and the change to make."""
    arithmetic: tuple[str, ...] = Field(default=(), max_length=20)
    """Memory arithmetic, line by line, as `specdecode-worker check` prints it."""
    memory: MemoryState = MemoryState()
    kv_tokens: int = 0
    """Tokens that the KV caches will hold; if the model does not fit, those that would fit."""
    max_model_len: int = 0
    sequences: int = 0
    """Number of sequences of full length that can run concurrently."""
    draft_problem: str | None = Field(default=None, max_length=1000)
    """Reason why the draft does not fit the target, naming the tensor or the field."""
    warnings: tuple[str, ...] = Field(default=(), max_length=8)
