"""Way of a new draft into service: ``spec.draftRollout``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from specdecode_operator.api.schema import URI_FORMS, Api, Duration, ModelUri, Percent

DraftHash = Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z._-]*$", max_length=128)]
"""Hash of a draft's files, as workers report it."""

CANDIDATE_METHOD_MESSAGE = "draftRollout.candidate needs speculation.method eagle3"
CANDIDATE_METHOD_RULE = (
    "!has(self.draftRollout) || !has(self.draftRollout.candidate)"
    " || (has(self.speculation) && self.speculation.method == 'eagle3')"
)
CANDIDATE_URI_MESSAGE = "draftRollout.candidate.uri must differ from speculation.draft.uri: a rollback needs both"
CANDIDATE_URI_RULE = (
    "!has(self.draftRollout) || !has(self.draftRollout.candidate)"
    " || !has(self.speculation) || !has(self.speculation.draft)"
    " || self.draftRollout.candidate.uri != self.speculation.draft.uri"
)


class DraftCandidateSpec(Api):
    """Draft that is offered in place of the one in use."""

    uri: ModelUri = Field(
        description=f"Where the draft comes from: {URI_FORMS}. It must be readable until the draft is replaced.",
        examples=["pvc://drafts/week-47"],
    )
    hash: DraftHash | None = Field(
        default=None,
        description="Hash of the draft's files: its weights, config and calibration. Workers refuse files with another "
        "hash. Absent: that of the files which the first worker loads; status.draft.candidate has it then.",
        examples=["4f1c9a7be2d05c6e"],
    )


class DraftRolloutSpec(Api):
    """Trial and promotion of a candidate draft. Settings of a running trial are those of its beginning."""

    mode: Literal["Canary", "Direct", "Manual"] = Field(
        default="Canary",
        description="Canary: one worker tries the candidate, and a better one is promoted. Manual: as Canary, but only "
        "the draft that approve names is promoted. Direct: a draft whose training run found it better is promoted "
        "without a trial; candidate is tried as with Canary.",
    )
    candidate: DraftCandidateSpec | None = Field(
        default=None,
        description="Draft to try. Each candidate is tried once; to repeat a trial, remove and set it again. Removing "
        "it ends its trial; a promoted draft stays. Absent: nothing is tried.",
        examples=[{"uri": "pvc://drafts/week-47", "hash": "4f1c9a7be2d05c6e"}],
    )
    approve: DraftHash | None = Field(
        default=None,
        description="Hash of the draft that may be promoted in mode Manual, once its trial found it better. It may be "
        "set before or after that. Absent: a better draft waits.",
        examples=["4f1c9a7be2d05c6e"],
    )
    reject: DraftHash | None = Field(
        default=None,
        description="Hash of a draft that must not serve, or the id of a training run. The run or the trial ends; if "
        "the draft was promoted, the one before it returns. Absent: nothing is rejected.",
        examples=["4f1c9a7be2d05c6e"],
    )
    block_requests: int = Field(
        default=32,
        ge=1,
        le=4096,
        description="Finished requests of a block. A pair is one block of the present draft and one of the candidate.",
    )
    max_duration: Duration = Field(
        default="24h", description="Time after which a trial without a verdict ends, such as 24h or 90m."
    )
    min_gain_percent: Percent = Field(
        default=2, description="Gain in speed that a candidate must be shown to exceed, in percent."
    )
