"""Kinds of requests: ``spec.speculation.tasks``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from specdecode_operator.api.schema import Api, rule, rules
from specdecode_worker.contract import MAX_MERGED, MergedDraft, TaskMatch, TaskName

_TASK_NAME = "Name of the task in the header X-Specdecode-Task, in status and in metrics."
MERGE_NAME_MESSAGE = "a merged draft must be the name of one of speculation.drafts"
MERGE_DEPTH_MESSAGE = "merge.depth is for drafts of the methods ngram and suffix, which need no draft passes"
MERGE_METHOD_MESSAGE = "merge needs a draft to merge with: speculation.method is none"
MERGE_PLACEMENT_MESSAGE = (
    "merge needs speculation.draft.placement Shared: a draft on a device of its own drafts whole trees"
)
MERGE_SAMPLER_MESSAGE = "merge needs engine.sampler coupled: mss knows the distribution of one draft alone"
_OWN_DRAFT_MESSAGE = "a task cannot merge its own draft with itself"
_ONCE_MESSAGE = "a task merges a draft once"


class TaskDepthSpec(Api):
    """Bounds of the draft depth of one task."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "(!has(self.min) || !has(self.max) || self.min <= self.max)"
                " && (!has(self.min) || !has(self.initial) || self.min <= self.initial)"
                " && (!has(self.initial) || !has(self.max) || self.initial <= self.max)",
                "a task's depth must satisfy min <= initial <= max",
            )
        )
    )

    min: int | None = Field(default=None, ge=0, le=16, description="Least depth. Absent: speculation.depth.min.")
    max: int | None = Field(default=None, ge=0, le=16, description="Largest depth. Absent: speculation.depth.max.")
    initial: int | None = Field(
        default=None,
        ge=0,
        le=16,
        description="Depth until the draft was measured, and always in mode Static. Absent: speculation.depth.initial.",
    )

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        given = [depth for depth in (self.min, self.initial, self.max) if depth is not None]
        if given != sorted(given):
            raise ValueError("a task's depth must satisfy min <= initial <= max")
        return self


class MergeSpec(Api):
    """Draft that proposes into the trees of a task together with the task's own draft."""

    draft: TaskName = Field(description="Name of one of speculation.drafts.", examples=["lookup"])
    depth: int = Field(
        default=0,
        ge=0,
        le=16,
        description="Depth to which a draft of the methods ngram and suffix extends the tree where it has a match. "
        "The extension needs no draft passes. 0: the draft stays within the planned tree.",
    )


class TaskSpec(Api):
    """Kind of requests with measurements and plan rows of its own.

    A request names its task in the header X-Specdecode-Task, or its prompt contains the text of ``match``. The name
    ``other`` means all requests that belong to no task.
    """

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("!has(self.draft) || self.merge.all(one, one.draft != self.draft)", _OWN_DRAFT_MESSAGE),
            rule("self.merge.all(one, self.merge.exists_one(other, other.draft == one.draft))", _ONCE_MESSAGE),
        )
    )

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=32)] = Field(
        description=_TASK_NAME, examples=["code"]
    )
    match: Annotated[str, Field(max_length=256, min_length=1)] | None = Field(
        default=None,
        description="Text in the prompt of requests that belong to the task, unless the header says otherwise. "
        "Absent: only the header counts.",
        examples=["```"],
    )
    mode: Literal["Off", "Static", "Auto"] | None = Field(
        default=None,
        description="Mode of this task where speculation.mode is Auto, Advisory or Static. Absent: speculation.mode.",
    )
    depth: TaskDepthSpec | None = Field(
        default=None,
        description="Bounds of the depth of this task. Absent: speculation.depth.",
        examples=[{"max": 8}],
    )
    draft: TaskName | None = Field(
        default=None,
        description="Name of one of speculation.drafts. Absent: speculation.draft.",
        examples=["sql-head"],
    )
    merge: Annotated[tuple[MergeSpec, ...], Field(max_length=MAX_MERGED)] = Field(
        default=(),
        description="Further drafts whose proposals are merged into the trees of the task. They need engine.sampler "
        "coupled and, for a task without a draft of its own, speculation.draft.placement Shared. Every head among them "
        "runs its own draft passes. In mode Auto the operator decides which of them take part, by their credit and "
        "the step times. In mode Static all do.",
        examples=[[{"draft": "lookup", "depth": 8}]],
    )

    @model_validator(mode="after")
    def _merges_other_drafts(self) -> Self:
        merged = [one.draft for one in self.merge]
        if self.draft in merged:
            raise ValueError(_OWN_DRAFT_MESSAGE)
        if len(set(merged)) < len(merged):
            raise ValueError(_ONCE_MESSAGE)
        return self

    def for_worker(self) -> TaskMatch:
        """Return the task in the form of the plan."""
        merge = tuple(MergedDraft(draft=one.draft, depth=one.depth) for one in self.merge)
        return TaskMatch(name=self.name, match=self.match, draft=self.draft, merge=merge)
