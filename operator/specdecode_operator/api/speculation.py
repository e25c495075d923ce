"""Drafting of tokens, and the decision how many: ``spec.speculation``.

Rules across fields are written twice: as CEL for the API server, and as a validator for the same input from any other
source. One test gives both the same examples.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from specdecode_operator.api.schema import URI_FORMS, Api, ModelUri, rule, rules
from specdecode_operator.api.tasks.task_spec import (
    MERGE_DEPTH_MESSAGE,
    MERGE_METHOD_MESSAGE,
    MERGE_NAME_MESSAGE,
    MERGE_PLACEMENT_MESSAGE,
    TaskSpec,
)
from specdecode_worker.contract import DRAFT_FREE, PLACEABLE, WITH_MLP, DraftQuantization, Method, TaskName

_QUANTIZATION = (
    "Quantization of the weights of the draft's MLPs and head (int4: a head of int8). Absent: weights are of the "
    "model's dtype."
)


class DraftSpec(Api):
    """Draft that all tasks use unless they name another one."""

    uri: ModelUri = Field(
        description=f"Where the draft comes from: {URI_FORMS}.",
        examples=["hf://yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"],
    )
    quantization: DraftQuantization | None = Field(default=None, description=_QUANTIZATION)
    placement: Literal["Shared", "Own"] = Field(
        default="Shared",
        description="Device of the draft. Shared: that of the target, the first of several. Own: a process of its own, "
        "on a device of its own where workers have an accelerator, of which a pod then requests one more; a resource "
        "claim must bring it. Own is for the methods eagle3, eagle and draft-model, and needs engine.sampler coupled. "
        "Drafts of speculation.drafts are always Shared.",
    )

    @property
    def is_own(self) -> bool:
        """True if the draft runs on a device of its own."""
        return self.placement == "Own"


DRAFT_RULE = "(self.method in ['ngram', 'suffix', 'none']) != has(self.{field})"
DRAFT_MESSAGE = "{field} is needed by every method but ngram, suffix and none, and only by those"
_MLP = "self.method in ['eagle3', 'peagle', 'dflash', 'eagle', 'draft-model']"
_MLP_MESSAGE = f"quantization is for drafts of methods {', '.join(WITH_MLP)}; the others have no MLP"
_PLACEABLE = f"self.method in {list(PLACEABLE)}"
_PLACEABLE_MESSAGE = f"draft.placement Own is for methods {', '.join(PLACEABLE)}"


class NamedDraftSpec(Api):
    """Additional draft for the tasks that name it."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(DRAFT_RULE.format(field="uri"), DRAFT_MESSAGE.format(field="uri")),
            rule(f"!has(self.quantization) || {_MLP}", _MLP_MESSAGE),
        )
    )

    name: TaskName = Field(description="Name by which tasks choose the draft.", examples=["sql-head"])
    method: Literal["eagle3", "peagle", "dflash", "eagle", "draft-model", "medusa", "ngram", "suffix"] = Field(
        default="eagle3", description="Kind of the draft, as in speculation.method."
    )
    uri: ModelUri | None = Field(
        default=None,
        description=f"Where the draft comes from: {URI_FORMS}. Absent for the methods ngram and suffix, and only for "
        "those.",
        examples=["pvc://heads/sql"],
    )
    quantization: DraftQuantization | None = Field(default=None, description=_QUANTIZATION)

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if (self.method in DRAFT_FREE) != (self.uri is None):
            raise ValueError(DRAFT_MESSAGE.format(field="uri"))
        if self.quantization and self.method not in WITH_MLP:
            raise ValueError(_MLP_MESSAGE)
        return self


class DepthSpec(Api):
    """Bounds of the draft depth, in tokens per step."""

    min: int = Field(default=0, ge=0, le=16, description="Least depth. 0 allows plain decoding.")
    max: int = Field(default=5, ge=0, le=16, description="Largest depth.")
    initial: int = Field(
        default=3, ge=0, le=16, description="Depth until the draft was measured, and always in mode Static."
    )


class TreeSpec(Api):
    """Bounds of the draft's trees. Chains are trees of width 1."""

    max_nodes: int = Field(default=16, ge=1, le=63, description="Maximum draft tokens of a sequence in one step.")
    top_k: int = Field(default=1, ge=1, le=8, description="Maximum alternatives after one token. 1 allows chains only.")


_PERCENTILE_RULE = "!has(self.percentile) || has(self.ttftMilliseconds) || has(self.itlMilliseconds)"
_PERCENTILE_MESSAGE = "percentile needs ttftMilliseconds or itlMilliseconds"


class ObjectiveSpec(Api):
    """Latency and speed-up that shapes and replicas are chosen for. Without any, the most tokens per second."""

    model_config = ConfigDict(json_schema_extra=rules(rule(_PERCENTILE_RULE, _PERCENTILE_MESSAGE)))

    ttft_milliseconds: float | None = Field(
        default=None,
        ge=1,
        le=600000,
        description="Largest time to the first token (TTFT), in milliseconds: the mean, or percentile. Absent: no "
        "objective.",
        examples=[500],
    )
    itl_milliseconds: float | None = Field(
        default=None,
        ge=0.1,
        le=600000,
        description="Largest inter-token latency (ITL) of every task, in milliseconds: the mean, or percentile. "
        "Absent: no objective.",
        examples=[30],
    )
    percentile: Literal[50, 90, 95, 99] | None = Field(
        default=None,
        description="Percentile of TTFT and ITL that the objectives bound. Its ratio to the mean comes from the "
        "workers' latency histograms. Absent: the mean.",
        examples=[99],
    )
    min_speedup: float | None = Field(
        default=None,
        ge=1,
        le=10,
        description="Least speed-up over plain decoding. Speculation below it is stopped. Absent: 1.",
        examples=[1.1],
    )

    @model_validator(mode="after")
    def _bounds_a_latency(self) -> Self:
        if self.percentile is not None and self.ttft_milliseconds is None and self.itl_milliseconds is None:
            raise ValueError(_PERCENTILE_MESSAGE)
        return self


class HysteresisSpec(Api):
    """Limits of how often the plan changes."""

    min_dwell_seconds: int = Field(default=60, ge=0, le=86400, description="Least time between two changes of a row.")
    min_gain_percent: float = Field(default=3, ge=0, le=100, description="Least expected gain of a change.")
    max_changes_per_hour: int = Field(
        default=6,
        ge=1,
        le=3600,
        description="Maximum changes of a row in one hour. Speculation that loses is stopped regardless.",
    )


class SpeculationSpec(Api):
    """Drafting of tokens, and the decision how many."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(DRAFT_RULE.format(field="draft"), DRAFT_MESSAGE.format(field="draft.uri")),
            rule(f"!has(self.draft) || !has(self.draft.quantization) || {_MLP}", _MLP_MESSAGE),
            rule(
                f"!has(self.draft) || !has(self.draft.placement) || self.draft.placement == 'Shared' || {_PLACEABLE}",
                _PLACEABLE_MESSAGE,
            ),
            rule(
                "self.drafts.all(one, self.drafts.exists_one(other, other.name == one.name))",
                "every draft needs a name of its own",
            ),
            rule(
                "self.tasks.all(task, !has(task.draft) || self.drafts.exists(one, one.name == task.draft))",
                "a task's draft must be the name of one of speculation.drafts",
            ),
            rule(
                "self.tasks.all(task, task.merge.all(one, self.drafts.exists(draft, draft.name == one.draft)))",
                MERGE_NAME_MESSAGE,
            ),
            rule(
                "self.tasks.all(task, task.merge.all(one, one.depth == 0 || self.drafts.exists(draft,"
                " draft.name == one.draft && draft.method in ['ngram', 'suffix'])))",
                MERGE_DEPTH_MESSAGE,
            ),
            rule("self.method != 'none' || self.tasks.all(task, task.merge.size() == 0)", MERGE_METHOD_MESSAGE),
            rule(
                "!has(self.draft) || !has(self.draft.placement) || self.draft.placement == 'Shared'"
                " || self.tasks.all(task, has(task.draft) || task.merge.size() == 0)",
                MERGE_PLACEMENT_MESSAGE,
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
        description="Kind of the draft. eagle3, eagle: a head; peagle, dflash: a head that drafts all depths in one "
        "pass; medusa: several heads; draft-model: a smaller model; ngram: lookup in the "
        "prompt, without a draft; suffix: lookup in the prompt and in earlier answers; none: plain decoding.",
    )
    draft: DraftSpec | None = Field(
        default=None,
        description="Draft that all tasks use unless they name another one. Absent for the methods ngram, suffix and "
        "none, and only for those.",
        examples=[{"uri": "hf://yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}],
    )
    drafts: Annotated[tuple[NamedDraftSpec, ...], Field(max_length=4)] = Field(
        default=(), description="Additional drafts, which tasks choose by name."
    )
    required: bool = Field(
        default=False,
        description="true: a draft that does not fit the target stops the worker. false: the worker serves without "
        "speculation.",
    )
    mode: Literal["Off", "Static", "Advisory", "Auto"] = Field(
        default="Auto",
        description="Off: the draft is loaded and not used. Static: depth.initial. Advisory: plan and replicas do not "
        "change, and status.speculation.recommended shows what Auto would run. Auto: the plan follows measurements.",
    )
    depth: DepthSpec = Field(default=DepthSpec(), description="Bounds of the draft depth, in tokens per step.")
    tree: TreeSpec = Field(default=TreeSpec(), description="Bounds of the draft's trees.")
    objective: ObjectiveSpec = Field(
        default=ObjectiveSpec(),
        description="Latency and speed-up that shapes and replicas are chosen for. Absent: the most tokens per second.",
        examples=[{"ttftMilliseconds": 500, "itlMilliseconds": 30, "minSpeedup": 1.1}],
    )
    hysteresis: HysteresisSpec = Field(default=HysteresisSpec(), description="Limits of how often the plan changes.")
    explore_percent: float = Field(
        default=1,
        ge=0,
        le=20,
        description="Largest share of the device's time for measuring other depths, in percent. Workers take less of "
        "it the longer nothing changes.",
    )
    tasks: Annotated[tuple[TaskSpec, ...], Field(max_length=7)] = Field(
        default=(),
        description="Kinds of requests with measurements and plan rows of their own.",
        examples=[[{"name": "code", "match": "```"}]],
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if (self.method in DRAFT_FREE) != (self.draft is None):
            raise ValueError(DRAFT_MESSAGE.format(field="draft.uri"))
        if self.draft and self.draft.quantization and self.method not in WITH_MLP:
            raise ValueError(_MLP_MESSAGE)
        if self.draft and self.draft.is_own and self.method not in PLACEABLE:
            raise ValueError(_PLACEABLE_MESSAGE)
        names = [draft.name for draft in self.drafts]
        if len(set(names)) < len(names):
            raise ValueError("every draft needs a name of its own")
        if any(task.draft not in (None, *names) for task in self.tasks):
            raise ValueError("a task's draft must be the name of one of speculation.drafts")
        self._check_merges()
        if not self.depth.min <= self.depth.initial <= self.depth.max:
            raise ValueError("depth must satisfy min <= initial <= max")
        if self.depth.initial > self.tree.max_nodes:
            raise ValueError("depth.initial must not exceed tree.maxNodes")
        if len({task.name for task in self.tasks}) < len(self.tasks):
            raise ValueError("every task needs a name of its own")
        return self

    def _check_merges(self) -> None:
        methods = {draft.name: draft.method for draft in self.drafts}
        merged = [one for task in self.tasks for one in task.merge]
        if any(one.draft not in methods for one in merged):
            raise ValueError(MERGE_NAME_MESSAGE)
        if any(one.depth and methods[one.draft] not in DRAFT_FREE for one in merged):
            raise ValueError(MERGE_DEPTH_MESSAGE)
        if merged and self.method == "none":
            raise ValueError(MERGE_METHOD_MESSAGE)
        if self.draft and self.draft.is_own and any(task.merge and not task.draft for task in self.tasks):
            raise ValueError(MERGE_PLACEMENT_MESSAGE)
