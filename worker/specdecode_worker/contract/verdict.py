"""What a worker finds out about a model before it loads anything; travels by the container's termination message.

A message of the kubelet's holds at most 4096 bytes; whoever writes to it cuts, so this stays well below.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from specdecode_worker.contract.report import MemoryState
from specdecode_worker.contract.wire import CONTRACT_VERSION, Received

MAX_VERDICT_BYTES = 4096


class CheckVerdict(Received):
    """``serves`` is what counts: a worker that finds it False ends before it loads."""

    kind: Literal["specdecode-verdict"] = "specdecode-verdict"
    contract_version: int = CONTRACT_VERSION
    serves: bool
    fits: bool
    """The memory holds it all, and one sequence of full length."""
    problem: str = Field(default="", max_length=1000)
    """What does not fit, and what to change."""
    arithmetic: tuple[str, ...] = Field(default=(), max_length=20)
    """Line by line, as `specdecode-worker check` prints it."""
    memory: MemoryState = MemoryState()
    kv_tokens: int = 0
    """Tokens of keys and values that the caches will hold; where it does not fit, those there would be room for."""
    max_model_len: int = 0
    sequences: int = 0
    """That run at once when all are of full length."""
    draft_problem: str | None = Field(default=None, max_length=1000)
    """What of the draft does not fit the target, naming the tensor or the field."""
    warnings: tuple[str, ...] = Field(default=(), max_length=8)
