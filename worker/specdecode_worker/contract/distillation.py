"""Result of a distillation Job, passed in the container's termination message.

The kubelet truncates a termination message at 4096 bytes, so the document is kept below.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from specdecode_worker.contract.assignment import Artifact
from specdecode_worker.contract.report import MemoryState
from specdecode_worker.contract.wire import CONTRACT_VERSION, Received

JOB_CONTAINER = "distill"
"""Container of the Job's pods whose termination message has the document."""
DistillationFailure = Literal[
    "capture", "poisoned", "disk-full", "out-of-memory", "time-limit", "publish", "input", "error"
]
"""Cause of a failed run.

``capture``: no captured segments could be fetched or read. ``poisoned``: too much of the captured text is not the
target's own. ``publish``: the candidate cannot be written to the place where workers read it. ``input``: a model, a
file or a setting cannot be used. ``error``: an error that nobody expected.
"""
MAX_DOMAINS = 16
_MAX_NAME, _MAX_REASON = 64, 400


class GainBounds(Received):
    """Gain in tokens per second over the deployed draft with 95 % bounds: 0.1 is 10 % more."""

    estimate: float = Field(allow_inf_nan=False)
    lower: float = Field(allow_inf_nan=False)
    upper: float = Field(allow_inf_nan=False)


class DomainGain(Received):
    """Gain on one domain. ``gain`` is None where the domain was judged within a pool or had no conversation."""

    name: str = Field(max_length=_MAX_NAME)
    kind: Literal["captured", "golden", "pool"]
    conversations: int = Field(ge=0)
    gain: GainBounds | None = None


class DistillationVerdict(Received):
    """Result of one run of `distill --job`."""

    kind: Literal["specdecode-distillation"] = "specdecode-distillation"
    contract_version: int = CONTRACT_VERSION
    verdict: Literal["better", "worse", "inconclusive", "failed"]
    reasons: tuple[str, ...] = Field(default=(), max_length=MAX_DOMAINS + 2)
    failure: DistillationFailure | None = None
    """Kind of the failure if the verdict is ``failed``; ``reasons`` has the words."""
    gain: GainBounds | None = None
    """Gain over the traffic's mix; None if there was nothing to judge by."""
    domains: tuple[DomainGain, ...] = Field(default=(), max_length=MAX_DOMAINS)
    domains_left_out: int = Field(default=0, ge=0)
    """Domains that the bound of the message had no room for."""
    draft: Artifact | None = None
    """The candidate; None if the run failed."""
    conversations: int = Field(default=0, ge=0)
    """Captured conversations that were used, in all splits."""
    seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Time of the run over all its restarts."""

    def message(self) -> str:
        """Return the document as JSON of at most MAX_VERDICT_BYTES bytes, with fewer domains and reasons if needed."""
        document = self
        while len((text := document.model_dump_json(exclude_none=True)).encode()) > MAX_VERDICT_BYTES:
            if document.domains:
                fewer = {"domains": document.domains[:-1], "domains_left_out": document.domains_left_out + 1}
            else:
                fewer = {"reasons": document.reasons[:-1]}
            document = document.model_copy(update=fewer)
        return text


def shortened_reason(text: str) -> str:
    """Return ``text`` on one line, cut to what a document takes of one reason."""
    return " ".join(text.split())[:_MAX_REASON]


def shortened_name(text: str) -> str:
    """Return the name of a domain, cut to what a document takes of it."""
    return text[:_MAX_NAME]


# Result of a worker's check of its model before loading, passed in the container's termination message.
#
# The kubelet truncates a termination message at 4096 bytes, so the verdict stays well below.

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
