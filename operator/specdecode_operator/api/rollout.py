"""Way of a new draft into service: ``spec.rollout``."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from specdecode_operator.api.schema import URI_FORMS, Api, ModelUri

_SECONDS = {"h": 3600, "m": 60, "s": 1}

Duration = Annotated[str, Field(pattern=r"^([0-9]{1,4}h)?([0-9]{1,4}m)?([0-9]{1,5}s)?$", min_length=2, max_length=16)]
"""Duration such as 24h, 90m or 1h30m."""
DraftHash = Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z._-]*$", max_length=128)]
"""Hash of a draft's files, as workers report it."""

CANDIDATE_METHOD_MESSAGE = "rollout.draft.candidate needs speculation.method eagle3"
CANDIDATE_METHOD_RULE = (
    "!has(self.rollout) || !has(self.rollout.draft) || !has(self.rollout.draft.candidate)"
    " || (has(self.speculation) && self.speculation.method == 'eagle3')"
)
CANDIDATE_URI_MESSAGE = "rollout.draft.candidate.uri must differ from speculation.draft.uri: a rollback needs both"
CANDIDATE_URI_RULE = (
    "!has(self.rollout) || !has(self.rollout.draft) || !has(self.rollout.draft.candidate)"
    " || !has(self.speculation) || !has(self.speculation.draft)"
    " || self.rollout.draft.candidate.uri != self.speculation.draft.uri"
)


def seconds_of(duration: str) -> int:
    """Return the seconds of a Duration."""
    return sum(int(count) * _SECONDS[unit] for count, unit in re.findall(r"([0-9]+)([hms])", duration))


class DraftCandidateSpec(Api):
    """Draft that is offered in place of the one in use."""

    uri: ModelUri = Field(
        description=f"Where the draft comes from: {URI_FORMS}. It must be readable until the draft is replaced.",
        examples=["pvc://drafts/week-47"],
    )
    hash: DraftHash = Field(
        description="Hash of the draft's files: its weights, config and calibration. Workers refuse files with another "
        "hash.",
        examples=["4f1c9a7be2d05c6e"],
    )


class DraftRolloutSpec(Api):
    """Trial and promotion of a candidate draft. Settings of a running trial are those of its beginning."""

    mode: Literal["Canary", "Direct", "Manual"] = Field(
        default="Canary",
        description="Canary: one worker tries the candidate, and a better one is promoted. Manual: as Canary, but a "
        "user promotes it. Direct: a draft whose training run found it better is promoted without a trial; candidate "
        "is tried as with Canary.",
    )
    candidate: DraftCandidateSpec | None = Field(
        default=None,
        description="Draft to try. Each candidate is tried once; to repeat a trial, remove and set it again. Removing "
        "it ends its trial; a promoted draft stays. Absent: nothing is tried.",
        examples=[{"uri": "pvc://drafts/week-47", "hash": "4f1c9a7be2d05c6e"}],
    )
    block_requests: int = Field(
        default=32,
        ge=1,
        le=4096,
        description="Finished requests of a block. A pair is one block of the present draft and one of the candidate.",
    )
    max_pairs: int = Field(
        default=120, ge=8, le=500, description="Pairs after which a trial without a verdict ends as undecided."
    )
    max_duration: Duration = Field(
        default="24h", description="Time after which a trial without a verdict ends, such as 24h or 90m."
    )
    min_gain_percent: float = Field(
        default=2, ge=0, le=100, description="Gain in speed that a candidate must be shown to exceed, in percent."
    )
    failure_limit: int = Field(
        default=3, ge=1, le=10, description="Losses of the worker that tries the candidate after which it is rejected."
    )


class RolloutsSpec(Api):
    """Way of new artefacts into service."""

    draft: DraftRolloutSpec = Field(
        default=DraftRolloutSpec(),
        description="Trial and promotion of a candidate draft.",
        examples=[{"candidate": {"uri": "pvc://drafts/week-47", "hash": "4f1c9a7be2d05c6e"}}],
    )
