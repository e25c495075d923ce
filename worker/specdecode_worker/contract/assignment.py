"""Assignment of drafts: which draft the workers run, and which one of them tries a candidate.

The operator writes it into the plan. A worker follows it by itself: it compares the hash of its draft with the assigned
one and replaces its draft if they differ, at start and whenever a plan arrives. A worker whose own spec draft or target
differs ignores the assignment, so that a user's change wins at once.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from pydantic import Field

from specdecode_worker.contract.wire import Received, TaskName


class Artifact(Received):
    """A draft as files: an EAGLE-3 head with its config and calibration."""

    uri: str = Field(min_length=1, max_length=1024)
    hash: str = Field(max_length=128)
    """`draft_hash`: covers weights, config and calibration. A worker refuses files with another hash.

    It is empty only of a candidate whose hash nobody knows yet: the worker loads what lies there, and `TrialState.hash`
    says what it is.
    """


class DraftTrial(Received):
    """A canary: one worker runs the assigned draft and ``candidate`` in pairs of request blocks in random order."""

    id: str = Field(min_length=1, max_length=64)
    """Names the trial, and is the seed of the order in each pair. Another id ends the trial and begins a new one."""
    candidate: Artifact
    pod: str = Field(min_length=1, max_length=253)
    """Name of the pod that tries the candidate. All other workers run the assigned draft."""
    block_requests: int = Field(default=32, ge=1, le=4096)
    """Finished requests of a block. Requests that were running at a swap belong to no block."""
    first_pair: int = Field(default=0, ge=0)
    """Index of the first pair that is still to run: pairs that an earlier pod reported are not repeated."""


class DraftAssignment(Received):
    """Draft of all workers of a deployment, and the trial of a candidate."""

    spec_draft: str = ""
    """URI of the draft in the deployment's spec."""
    target: str = ""
    """URI of the target in the deployment's spec."""
    stable: Artifact | None = None
    """Draft that the workers run. None: that of the spec."""
    trial: DraftTrial | None = None


def candidate_first(trial: str, pair: int) -> bool:
    """Return whether the candidate runs the first block of a pair: a coin that a restart tosses the same way."""
    return hashlib.blake2b(f"{trial}/{pair}".encode(), digest_size=1).digest()[0] % 2 == 1


class TrialCost(Received):
    """Cost of one cell within a block: sums over its steps, those that the guard held back included."""

    task: TaskName
    concurrency: int = Field(ge=0)
    """Index of the plan's bucket."""
    context: int = Field(ge=0)
    """Index of the plan's bucket."""
    sequence_seconds: float = Field(ge=0, allow_inf_nan=False)
    """Sum over the steps of duration times running sequences of the task."""
    tokens: float = Field(ge=0, allow_inf_nan=False)


class TrialPair(Received):
    """Costs of a finished pair."""

    index: int = Field(ge=0)
    incumbent: tuple[TrialCost, ...] = ()
    candidate: tuple[TrialCost, ...] = ()


class TrialState(Received):
    """Progress of a trial, as the worker that runs it reports it."""

    id: str
    state: Literal["Loading", "Running", "Failed"]
    """Failed: the candidate or the incumbent could not be loaded; ``problem`` says why."""
    hash: str = Field(default="", max_length=128)
    """Hash of the candidate; empty until it is loaded."""
    pair: int = Field(default=0, ge=0)
    """Index of the pair that runs."""
    pairs: tuple[TrialPair, ...] = Field(default=(), max_length=16)
    """The newest finished pairs, oldest first. The operator counts each index once."""
    problem: str | None = Field(default=None, max_length=1000)
    """Reason of Failed, naming the file or tensor."""
