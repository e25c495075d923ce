"""How tokens are drafted and who decides: ``spec.speculation``.

Rules across fields stand twice, as CEL for the API server and as a validator for the same input read from anywhere
else; one test feeds both the same examples.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from specdecode_operator.api.schema import Api, ModelUri, rule, rules
from specdecode_worker.contract import DRAFT_FREE, WITH_MLP, DraftQuantization, Method, TaskName

_QUANTIZATION = "Of its MLPs and head (int4: a head of int8); as the model's dtype when absent."


class DraftSpec(Api):
    uri: ModelUri
    quantization: DraftQuantization | None = Field(default=None, description=_QUANTIZATION)


DRAFT_RULE = "(self.method in ['ngram', 'none']) != has(self.{field})"
DRAFT_MESSAGE = "{field} is needed by every method but ngram and none, and only by those"
_MLP = "self.method in ['eagle3', 'eagle', 'draft-model']"
_MLP_MESSAGE = f"quantization is for drafts of methods {', '.join(WITH_MLP)}; the others have no MLP"


class NamedDraftSpec(Api):
    """A further draft, loaded beside the first for the tasks that name it."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(DRAFT_RULE.format(field="uri"), DRAFT_MESSAGE.format(field="uri")),
            rule(f"!has(self.quantization) || {_MLP}", _MLP_MESSAGE),
        )
    )

    name: TaskName
    method: Literal["eagle3", "eagle", "draft-model", "medusa", "ngram"] = "eagle3"
    uri: ModelUri | None = None
    quantization: DraftQuantization | None = Field(default=None, description=_QUANTIZATION)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.method in DRAFT_FREE) != (self.uri is None):
            raise ValueError(DRAFT_MESSAGE.format(field="uri"))
        if self.quantization and self.method not in WITH_MLP:
            raise ValueError(_MLP_MESSAGE)
        return self


class DepthSpec(Api):
    """Bounds of the draft depth, in tokens per step."""

    min: int = Field(default=0, ge=0, le=16)
    max: int = Field(default=5, ge=0, le=16)
    initial: int = Field(default=3, ge=0, le=16, description="Runs until there is a plan for the draft, and in Static.")


class TreeSpec(Api):
    """Bounds of the draft's trees. Chains are trees of width 1."""

    max_nodes: int = Field(default=16, ge=1, le=63, description="Most draft tokens of one step of a sequence.")
    top_k: int = Field(default=1, ge=1, le=8, description="Most choices that follow one token; 1 allows chains alone.")


class ObjectiveSpec(Api):
    """What users were promised. Shapes and replicas are chosen so that it holds; absent: the most tokens a second."""

    ttit_milliseconds: float | None = Field(
        default=None, ge=0.1, le=600000, description="Most time per output token after the first, every task's mean."
    )
    ttft_milliseconds: float | None = Field(
        default=None, ge=1, le=600000, description="Most time to the first token, mean."
    )
    min_speedup: float | None = Field(
        default=None, ge=1, le=10, description="Speculation that is not faster than plain decoding by this is stopped."
    )


class HysteresisSpec(Api):
    """What keeps the plan from flapping."""

    min_dwell_seconds: int = Field(default=60, ge=0, le=86400, description="Least time between changes of a row.")
    min_gain_percent: float = Field(default=3, ge=0, le=100, description="Least expected gain of a change.")
    max_changes_per_hour: int = Field(
        default=6, ge=1, le=3600, description="Most changes of a row in an hour; what loses is stopped in spite of it."
    )


class TaskDepthSpec(Api):
    """Bounds of one task's depth; what is absent is as in speculation.depth."""

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

    min: int | None = Field(default=None, ge=0, le=16)
    max: int | None = Field(default=None, ge=0, le=16)
    initial: int | None = Field(default=None, ge=0, le=16)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        given = [depth for depth in (self.min, self.initial, self.max) if depth is not None]
        if given != sorted(given):
            raise ValueError("a task's depth must satisfy min <= initial <= max")
        return self


class TaskSpec(Api):
    """A task whose acceptance and plan are kept apart. Requests name it by header X-Specdecode-Task or match it.

    The name ``other`` stands for all requests that belong to no task.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=32)]
    match: Annotated[str, Field(max_length=256, min_length=1)] | None = Field(
        default=None, description="A prompt that contains this text belongs to the task, unless the header says so."
    )
    mode: Literal["Off", "Static", "Auto"] | None = Field(
        default=None,
        description="Overrides speculation.mode for this task where that is Auto, Advisory or Static.",
    )
    depth: TaskDepthSpec | None = Field(default=None, description="Overrides speculation.depth for this task.")
    draft: TaskName | None = Field(
        default=None, description="Name of one of speculation.drafts; the task uses it instead of speculation.draft."
    )


class SpeculationSpec(Api):
    """How tokens are drafted, and who decides how many."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(DRAFT_RULE.format(field="draft"), DRAFT_MESSAGE.format(field="draft.uri")),
            rule(f"!has(self.draft) || !has(self.draft.quantization) || {_MLP}", _MLP_MESSAGE),
            rule(
                "self.drafts.all(one, self.drafts.exists_one(other, other.name == one.name))",
                "every draft needs a name of its own",
            ),
            rule(
                "self.tasks.all(task, !has(task.draft) || self.drafts.exists(one, one.name == task.draft))",
                "a task's draft must be the name of one of speculation.drafts",
            ),
            rule(
                "self.depth.min <= self.depth.initial && self.depth.initial <= self.depth.max",
                "depth must satisfy min <= initial <= max",
            ),
            rule(
                "self.depth.initial <= self.tree.maxNodes",
                "depth.initial must not exceed tree.maxNodes",
            ),
            rule(
                "self.tasks.all(one, self.tasks.exists_one(other, other.name == one.name))",
                "every task needs a name of its own",
            ),
        )
    )

    method: Method = Field(
        default="eagle3",
        description="eagle3 or eagle: a head; medusa: heads; draft-model: a smaller model with the same tokenizer; "
        "ngram: prompt lookup, without a draft; none: plain decoding.",
    )
    draft: DraftSpec | None = None
    drafts: Annotated[tuple[NamedDraftSpec, ...], Field(max_length=4)] = Field(
        default=(), description="Further drafts, loaded beside the first; tasks choose them by name."
    )
    required: bool = Field(
        default=False, description="true: a draft that does not fit is fatal; false: the target serves plainly."
    )
    mode: Literal["Off", "Static", "Advisory", "Auto"] = Field(
        default="Auto",
        description="Off: the draft is loaded, depth 0. Static: depth.initial, guard on. Advisory: plan and replicas "
        "stay, status.speculation.recommended says what Auto would run. Auto: follows measurements.",
    )
    depth: DepthSpec = DepthSpec()
    tree: TreeSpec = TreeSpec()
    objective: ObjectiveSpec = ObjectiveSpec()
    hysteresis: HysteresisSpec = HysteresisSpec()
    explore_percent: float = Field(
        default=1, ge=0, le=20, description="Share of device seconds that may be spent on learning other depths."
    )
    tasks: Annotated[tuple[TaskSpec, ...], Field(max_length=7)] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.method in DRAFT_FREE) != (self.draft is None):
            raise ValueError(DRAFT_MESSAGE.format(field="draft.uri"))
        if self.draft and self.draft.quantization and self.method not in WITH_MLP:
            raise ValueError(_MLP_MESSAGE)
        names = [draft.name for draft in self.drafts]
        if len(set(names)) < len(names):
            raise ValueError("every draft needs a name of its own")
        if any(task.draft not in (None, *names) for task in self.tasks):
            raise ValueError("a task's draft must be the name of one of speculation.drafts")
        if not self.depth.min <= self.depth.initial <= self.depth.max:
            raise ValueError("depth must satisfy min <= initial <= max")
        if self.depth.initial > self.tree.max_nodes:
            raise ValueError("depth.initial must not exceed tree.maxNodes")
        if len({task.name for task in self.tasks}) < len(self.tasks):
            raise ValueError("every task needs a name of its own")
        return self
