"""Drafts of a deployment, as ``status.draft`` shows them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from specdecode_operator.api.schema import Api, Text

Outcome = Literal["Promoted", "RolledBack", "Rejected", "Undecided", "Refused", "Failed", "Expired", "Superseded"]
"""End of a candidate's trial or promotion."""


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
        description="Phase of the rollout: Serving, Canary, Promoting, RollingBack or Cooldown. Absent until a "
        "candidate was offered.",
    )
    trial: DraftTrialStatus | None = Field(default=None, description="Trial that runs now.")
    last_verdict: Text | None = Field(default=None, description="Latest verdict or end of a rollout, in a sentence.")
    lineage: Annotated[tuple[DraftLineageStatus, ...], Field(max_length=10)] = Field(
        default=(), description="Candidates that were tried, the latest first."
    )
