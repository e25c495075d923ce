"""Drafts of a deployment, as ``status.draft`` shows them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from specdecode_operator.api.schema import Api, Text

Outcome = Literal["Promoted", "RolledBack", "Rejected", "Undecided", "Refused", "Failed", "Expired", "Superseded"]
"""End of a candidate's trial or promotion."""
RunOutcome = Literal["Better", "NotBetter", "Failed", "Poisoned", "Expired", "Rejected", "Superseded"]
"""End of a training run."""


class DraftVersionStatus(Api):
    """One draft by its content."""

    hash: Text | None = Field(default=None, description="Hash of the draft's files. Absent: not reported yet.")
    uri: Text | None = Field(default=None, description="Where the draft comes from.")


class DraftTrialStatus(Api):
    """Trial of a candidate that runs now."""

    pod: Text | None = Field(default=None, description="Pod that tries the candidate. Absent: none is ready for it.")
    pairs: int = Field(default=0, description="Pairs of request blocks that were counted.")
    gain_percent: float | None = Field(
        default=None, description="Mean gain in speed so far, in percent. It is no verdict."
    )
    least_gain_percent: float | None = Field(
        default=None,
        description="Lower bound of the gain, valid at any time with 97.5 % confidence, in percent. "
        "Absent: too few pairs.",
    )
    most_gain_percent: float | None = Field(default=None, description="Upper bound, likewise.")


class DraftLineageStatus(Api):
    """A candidate that was tried, and its end."""

    hash: Text = Field(description="Hash of the candidate.")
    uri: Text | None = Field(default=None, description="Where it came from.")
    time: Text = Field(description="Time of the end.")
    outcome: Outcome = Field(
        description="Promoted; RolledBack: it was slower, or a promotion was taken back; Rejected: by a user; "
        "Undecided: too little evidence; Refused: a worker could not load it; Failed: its worker was lost too often; "
        "Expired: time was over; Superseded: draft, target or image changed."
    )
    pairs: int = Field(default=0, description="Pairs of request blocks that were counted.")
    gain_percent: float | None = Field(default=None, description="Mean gain in speed of these pairs, in percent.")
    reason: Text = Field(default="", description="Reason in a sentence, with numbers.")


class DraftRunStatus(Api):
    """Training run that is under way."""

    id: Text = Field(description="Name of the run: part of the Job's name, and its folder on the claim.")
    started: Text = Field(description="Time of its beginning.")
    reason: Text = Field(default="", description="Reason for the run.")
    conversations: int | None = Field(
        default=None, description="Captured conversations of all workers while the run collects, rounded down."
    )
    needed: int | None = Field(default=None, description="Captured conversations that the run needs.")
    capture_problem: Text | None = Field(
        default=None, description="Reason why a worker captures no requests, while the run collects."
    )
    job: Text | None = Field(default=None, description="Name of the Job. Absent: the run collects still.")
    job_state: Text | None = Field(
        default=None,
        description="State of the Job: Absent, Refused, Pending, Unschedulable, Suspended, Running, Preempted, "
        "Retrying, Failed, OutOfMemory, DeadlineExceeded or Finished.",
    )
    job_reason: Text | None = Field(
        default=None, description="Reason for that state, in the words of the scheduler, the queue or the kernel."
    )
    losses: int = Field(default=0, description="Times that the Job vanished and was created again.")


class DraftRunEndStatus(Api):
    """Training run that ended."""

    id: Text = Field(description="Name of the run.")
    time: Text = Field(description="Time of its end.")
    outcome: RunOutcome = Field(
        description="Better: its draft became a candidate; NotBetter: no gain was shown; Failed; Poisoned: too much "
        "captured text is not the target's own; Expired: time was over; Rejected: by a user; Superseded: draft or "
        "target changed."
    )
    hash: Text | None = Field(default=None, description="Hash of its draft. Absent: there is none.")
    gain_percent: float | None = Field(
        default=None, description="Gain in tokens per second over the draft before, on the captured mix, in percent."
    )
    least_gain_percent: float | None = Field(default=None, description="Lower bound of the gain, in percent.")
    most_gain_percent: float | None = Field(default=None, description="Upper bound, likewise.")
    conversations: int = Field(default=0, description="Captured conversations that were used.")
    device_seconds: float = Field(default=0, description="Device seconds of the run.")
    reason: Text = Field(default="", description="Reason in a sentence.")


class DraftStatus(Api):
    """Draft that the workers run, and the rollout of another one."""

    hash: Text | None = Field(default=None, description="Hash of the draft's weights.")
    uri: Text | None = Field(default=None, description="URI of the draft.")
    current: DraftVersionStatus | None = Field(
        default=None, description="Draft that is assigned to the workers. Absent until a candidate was offered."
    )
    candidate: DraftVersionStatus | None = Field(default=None, description="Draft that is tried or promoted now.")
    previous: DraftVersionStatus | None = Field(default=None, description="Draft to which a rollback returns.")
    phase: Text | None = Field(
        default=None,
        description="Phase: Serving, Collecting, Distilling, Canary, Promoting, RollingBack or Cooldown. Absent until "
        "a candidate was offered or a run was requested.",
    )
    trial: DraftTrialStatus | None = Field(default=None, description="Trial that runs now.")
    run: DraftRunStatus | None = Field(default=None, description="Training run that is under way.")
    last_run: DraftRunEndStatus | None = Field(default=None, description="Latest training run that ended.")
    last_verdict: Text | None = Field(default=None, description="Latest verdict or end of a rollout, in a sentence.")
    lineage: Annotated[tuple[DraftLineageStatus, ...], Field(max_length=10)] = Field(
        default=(), description="Candidates that were tried, the latest first."
    )
