"""Drafting of tokens, the decision how many, and pins: ``spec.speculation``. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from specdecode_operator.api.schema import (
    URI_FORMS,
    Api,
    Latency,
    ModelUri,
    bounds,
    named_list,
    rule,
    rules,
)
from specdecode_operator.errors import SpecError
from specdecode_operator.times import seconds_of
from specdecode_worker.contract import (
    DRAFT_FREE,
    MAX_CLIENTS,
    MAX_MERGED,
    OTHER_TASK,
    PLACEABLE,
    WITH_MLP,
    DraftMethod,
    DraftQuantization,
    MergedDraft,
    Method,
    Plan,
    PlanRow,
    TaskMatch,
    TaskName,
    TreeShape,
)

MERGE_SAMPLER_MESSAGE = "merge needs engine.sampler coupled: mss knows the distribution of one draft alone"
_LOOKUPS = [name for name in DRAFT_FREE if name != "none"]
DRAFT_RULE = f"(self.method in {list(DRAFT_FREE)}) != has(self.{{field}})"
DRAFT_MESSAGE = f"{{field}} is needed by every method but {', '.join(_LOOKUPS)} and none, and only by those"
_MERGE_NAME_MESSAGE = "a merged draft must be the name of one of speculation.drafts"
_MERGE_DEPTH_MESSAGE = f"merge.depth is for drafts of methods {', '.join(_LOOKUPS)}, which need no draft passes"
_MERGE_METHOD_MESSAGE = "merge needs a draft to merge with: speculation.method is none"
_MERGE_PLACEMENT_MESSAGE = (
    "merge needs speculation.draft.placement Shared: a draft on a device of its own drafts whole trees"
)
_OWN_DRAFT_MESSAGE = "a task cannot merge its own draft with itself"
_MLP = f"self.method in {list(WITH_MLP)}"
_MLP_MESSAGE = f"quantization is for drafts of methods {', '.join(WITH_MLP)}; the others have no MLP"
_PLACEABLE = f"self.method in {list(PLACEABLE)}"
_PLACEABLE_MESSAGE = f"draft.placement Own is for methods {', '.join(PLACEABLE)}"
_PERCENTILE_RULE = "!has(self.percentile) || has(self.ttft) || has(self.itl)"
_PERCENTILE_MESSAGE = "percentile needs ttft or itl"
_QUANTIZATION = (
    "Quantization of the weights of the draft's MLPs and head (int4: a head of int8). Absent: weights are of the "
    "model's dtype."
)
Pinned = Annotated[
    str, Field(pattern=r"^(none|chain:[0-9]{1,2}|(tree:)?[0-9]{1,2}(,[0-9]{1,2}){0,62})$", max_length=192)
]
"""Shape that runs at every load: none, chain:3, tree:4,2,1 (children per node, level by level) or the parents."""


class DraftSpec(Api):
    """Draft that all tasks use unless they name another one."""

    uri: ModelUri = Field(
        description=f"Where the draft comes from: {URI_FORMS}.",
        examples=["hf://yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"],
    )
    quantization: DraftQuantization | None = Field(default=None, description=_QUANTIZATION)
    placement: Literal["Shared", "Own"] = "Shared"
    """Device of the draft. Shared: that of the target, the first of several. Own: a process of its own, with an
    accelerator of its own where workers have one; for eagle3, eagle and draft-model, with engine.sampler coupled.
    Drafts of speculation.drafts are always Shared."""

    @property
    def is_own(self) -> bool:
        """True if the draft runs on a device of its own."""
        return self.placement == "Own"


class NamedDraftSpec(Api):
    """Additional draft for the tasks that name it."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(DRAFT_RULE.format(field="uri"), DRAFT_MESSAGE.format(field="uri")),
            rule(f"!has(self.quantization) || {_MLP}", _MLP_MESSAGE),
        )
    )

    name: TaskName = Field(examples=["sql-head"])
    """Name by which tasks choose the draft."""
    method: DraftMethod = "eagle3"
    """Kind of the draft, as in speculation.method."""
    uri: ModelUri | None = Field(
        default=None,
        description=f"Where the draft comes from: {URI_FORMS}. Absent for the methods ngram and suffix, and only for "
        "those.",
        examples=["pvc://heads/sql"],
    )
    quantization: DraftQuantization | None = Field(default=None, description=_QUANTIZATION)


USUAL_DEPTH = 3
"""Depth until the draft was measured, where the spec says nothing."""


class DepthSpec(Api):
    """Bounds of the draft depth, in tokens per step."""

    min: int = Field(default=0, ge=0, le=16)
    """Least depth. 0 allows plain decoding."""
    max: int = Field(default=5, ge=0, le=16)
    """Largest depth."""
    initial: int | None = Field(default=None, ge=0, le=16)
    """Depth until the draft was measured, and always in mode Static. Absent: 3, or the nearest that min, max and
    tree.maxNodes allow."""


class TreeSpec(Api):
    """Bounds of the draft's trees. Chains are trees of width 1."""

    max_nodes: int = Field(default=16, ge=1, le=63)
    """Maximum draft tokens of a sequence in one step."""
    top_k: int = Field(default=4, ge=1, le=8)
    """Maximum alternatives after one token. 1 allows chains only."""


class ObjectiveSpec(Api):
    """Latency and speed-up that shapes and replicas are chosen for. Without any, the most tokens per second."""

    model_config = ConfigDict(json_schema_extra=rules(rule(_PERCENTILE_RULE, _PERCENTILE_MESSAGE)))

    ttft: Latency | None = Field(default=None, examples=["500ms"], json_schema_extra=bounds("1ms", "10m"))
    """Largest time to the first token (TTFT): the mean, or percentile. Absent: no objective."""
    itl: Latency | None = Field(default=None, examples=["30ms"], json_schema_extra=bounds("1ms", "10m"))
    """Largest inter-token latency (ITL) of every task: the mean, or percentile. Absent: no objective."""
    percentile: Literal[50, 90, 95, 99] | None = Field(default=None, examples=[99])
    """Percentile of TTFT and ITL that the objectives bound. Absent: the mean."""
    min_gain_percent: int = Field(default=0, ge=0, le=900)
    """Least gain over plain decoding, in percent. Speculation below it is stopped."""

    @property
    def ttft_seconds(self) -> float | None:
        """Largest time to the first token, in seconds. None without an objective."""
        return None if self.ttft is None else seconds_of(self.ttft)

    @property
    def itl_seconds(self) -> float | None:
        """Largest inter-token latency, in seconds. None without an objective."""
        return None if self.itl is None else seconds_of(self.itl)

    @property
    def min_speedup(self) -> float:
        """Least speed-up over plain decoding."""
        return 1 + self.min_gain_percent / 100


@dataclass(frozen=True, slots=True)
class StabilityLimits:
    """Limits of how often the plan changes, and of the device time for measuring other shapes."""

    min_dwell_seconds: float
    """Least time between two changes of a row."""
    min_gain_percent: float
    """Least expected gain of a change."""
    max_changes_per_hour: int
    """Most changes of a row in one hour. Speculation that loses is stopped regardless."""
    explore_percent: float
    """Largest share of the device's time for measuring other depths."""


STABILITY = {
    "Low": StabilityLimits(5, 3, 120, 20),
    "Medium": StabilityLimits(60, 3, 6, 1),
    "High": StabilityLimits(600, 10, 2, 0.5),
}
"""Limits by ``speculation.stability``."""


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

    min: int | None = Field(default=None, ge=0, le=16)
    """Least depth. Absent: speculation.depth.min."""
    max: int | None = Field(default=None, ge=0, le=16)
    """Largest depth. Absent: speculation.depth.max."""
    initial: int | None = Field(default=None, ge=0, le=16)
    """Depth until the draft was measured, and always in mode Static. Absent: speculation.depth.initial."""


class MergeSpec(Api):
    """Draft that proposes into the trees of a task together with the task's own draft."""

    draft: TaskName = Field(examples=["lookup"])
    """Name of one of speculation.drafts."""
    depth: int = Field(default=0, ge=0, le=16)
    """Depth to which a draft of the methods ngram and suffix extends the tree where it has a match. 0: the draft stays
    within the planned tree."""


class TaskSpec(Api):
    """Kind of requests with measurements and plan rows of its own.

    A request names its task in the header X-Specdecode-Task, or it is of one of ``clients``, or its prompt contains the
    text of ``match``; both where both are given. The name ``other`` means all requests that belong to no task.
    """

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("!has(self.draft) || self.merge.all(one, one.draft != self.draft)", _OWN_DRAFT_MESSAGE)
        )
    )

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=32)] = Field(examples=["code"])
    """Name of the task in the header X-Specdecode-Task, in status and in metrics."""
    match: Annotated[str, Field(max_length=256, min_length=1)] | None = Field(default=None, examples=["```"])
    """Text in the prompt of requests that belong to the task, unless the header says otherwise. Absent: header,
    metadata.task and clients decide."""
    clients: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=253)], ...], Field(max_length=MAX_CLIENTS)
    ] = Field(default=(), examples=[["acme"]])
    """Customers whose requests belong to the task, unless the header says otherwise: names of API keys of
    spec.apiKeysSecretRef, which are tenants at routers. With match, both must hold."""
    mode: Literal["Off", "Static", "Auto"] | None = None
    """Mode of this task where speculation.mode is Auto, Advisory or Static. Absent: speculation.mode."""
    pin: Pinned | None = Field(default=None, examples=["chain:6"])
    """Shape of this task at every load, in every mode, also Off. Absent: speculation.pin."""
    depth: TaskDepthSpec | None = Field(default=None, examples=[{"max": 8}])
    """Bounds of the depth of this task. Absent: speculation.depth."""
    draft: TaskName | None = Field(default=None, examples=["sql-head"])
    """Name of one of speculation.drafts. Absent: speculation.draft."""
    merge: Annotated[tuple[MergeSpec, ...], Field(max_length=MAX_MERGED, json_schema_extra=named_list("draft"))] = (
        Field(default=(), examples=[[{"draft": "lookup", "depth": 8}]])
    )
    """Further drafts whose proposals are merged into the trees of the task. They need engine.sampler coupled and, for a
    task without a draft of its own, speculation.draft.placement Shared. In mode Auto the operator decides which take
    part; in mode Static all do."""

    def for_worker(self) -> TaskMatch:
        """Return the task in the form of the plan."""
        merge = tuple(MergedDraft(draft=one.draft, depth=one.depth) for one in self.merge)
        return TaskMatch(name=self.name, match=self.match, clients=self.clients, draft=self.draft, merge=merge)


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
                "self.tasks.all(task, !has(task.draft) || self.drafts.exists(one, one.name == task.draft))",
                "a task's draft must be the name of one of speculation.drafts",
            ),
            rule(
                "self.tasks.all(task, task.merge.all(one, self.drafts.exists(draft, draft.name == one.draft)))",
                _MERGE_NAME_MESSAGE,
            ),
            rule(
                "self.tasks.all(task, task.merge.all(one, one.depth == 0 || self.drafts.exists(draft,"
                f" draft.name == one.draft && draft.method in {_LOOKUPS})))",
                _MERGE_DEPTH_MESSAGE,
            ),
            rule("self.method != 'none' || self.tasks.all(task, task.merge.size() == 0)", _MERGE_METHOD_MESSAGE),
            rule(
                "!has(self.draft) || !has(self.draft.placement) || self.draft.placement == 'Shared'"
                " || self.tasks.all(task, has(task.draft) || task.merge.size() == 0)",
                _MERGE_PLACEMENT_MESSAGE,
            ),
            rule(
                "self.depth.min <= self.depth.max && (!has(self.depth.initial)"
                " || self.depth.min <= self.depth.initial && self.depth.initial <= self.depth.max)",
                "depth needs min <= initial <= max",
            ),
            rule(
                "self.depth.min <= self.tree.maxNodes"
                " && (!has(self.depth.initial) || self.depth.initial <= self.tree.maxNodes)",
                "depth.min and depth.initial must not exceed tree.maxNodes",
            ),
        )
    )

    method: Method = "eagle3"
    """Kind of the draft. eagle3, eagle: a head; peagle, dflash: a head that drafts all depths in one pass; medusa:
    several heads; draft-model: a smaller model; ngram: lookup in the prompt, without a draft; suffix: lookup in the
    prompt and in earlier answers; none: plain decoding."""
    draft: DraftSpec | None = Field(default=None, examples=[{"uri": "hf://yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}])
    """Draft that all tasks use unless they name another one. Absent for the methods ngram, suffix and none, and only
    for those."""
    drafts: Annotated[tuple[NamedDraftSpec, ...], Field(max_length=4, json_schema_extra=named_list("name"))] = ()
    """Additional drafts, which tasks choose by name."""
    mode: Literal["Off", "Static", "Advisory", "Auto"] = "Auto"
    """Off: the draft is loaded and not used. Static: a chain of depth.initial. Advisory: plan and replicas do not
    change, and status.speculation.recommended shows what Auto would run. Auto: the plan follows measurements."""
    pin: Pinned | None = Field(default=None, examples=["chain:3"])
    """Shape at every load, in every mode: none, chain:3 or tree:4,2,1 (children per node, level by level). The guard
    stays active. Absent: mode decides."""
    depth: DepthSpec = DepthSpec()
    """Bounds of the draft depth, in tokens per step."""
    tree: TreeSpec = TreeSpec()
    """Bounds of the draft's trees."""
    objective: ObjectiveSpec = Field(
        default=ObjectiveSpec(), examples=[{"ttft": "500ms", "itl": "30ms", "minGainPercent": 10}]
    )
    """Latency and speed-up that shapes and replicas are chosen for. Absent: the most tokens per second."""
    stability: Literal["Low", "Medium", "High"] = "Medium"
    """How slowly the plan follows measurements. Medium: a row changes for a gain of 3 %, once a minute and 6 times an
    hour at most; 1 % of the time measures other shapes. High: 10 %, every 10 minutes, twice an hour; 0.5 %. Low, for
    trying out: 3 %, every 5 seconds, 120 times an hour; 20 %."""
    tasks: Annotated[tuple[TaskSpec, ...], Field(max_length=7, json_schema_extra=named_list("name"))] = Field(
        default=(), examples=[[{"name": "code", "match": "```"}]]
    )
    """Kinds of requests with measurements and plan rows of their own."""

    @property
    def initial(self) -> int:
        """Depth until the draft was measured."""
        if self.depth.initial is not None:
            return self.depth.initial
        return max(self.depth.min, min(USUAL_DEPTH, self.depth.max, self.tree.max_nodes))

    @property
    def limits(self) -> StabilityLimits:
        """Limits of how often the plan changes."""
        return STABILITY[self.stability]


# Pins, ``speculation.pin`` and ``speculation.tasks[].pin``: shapes that run at every load in every mode. Pure.
#
# As text, ``chain:3`` or ``none`` pins all tasks, ``code=chain:6,chat=none`` the named tasks, and ``none,code=chain:6``
# both. The guard stays active. An invalid pin changes nothing: the previous pin or mode stays in force, and a condition
# and an Event show the problem.

MAX_DEPTH = 16
"""Deepest shape that can be pinned; the limit of spec.speculation.depth and of plans."""
EXAMPLES = "write chain:3, none, or tasks such as code=chain:6,chat=none"
"""End of error messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Pinned shapes: one shape for all tasks, shapes of some tasks, or both."""

    every: TreeShape | None = None
    """Shape of all tasks without one of their own; None if these are not pinned."""
    by_task: dict[str, TreeShape] = field(default_factory=dict)
    """Shapes of tasks that are pinned by name."""

    def over(self, plan: Plan) -> Plan:
        """Return ``plan`` with the pinned shapes at every load. Rows of other tasks stay as they are."""
        shapes = [*self.by_task.values(), *([self.every] if self.every is not None else [])]
        deepest = max(plan.max_depth, *(shape.depth for shape in shapes))
        others = tuple(row for row in plan.rows if self.shape_of(row.task) is None)
        initial = plan.initial if self.every is None else self.every
        rows = (*others, *self._rows(plan))
        return plan.model_copy(update={"rows": rows, "initial": initial, "max_depth": deepest})

    def shape_of(self, task: str) -> TreeShape | None:
        """Return the pinned shape of a task, or None if the task is not pinned."""
        return self.by_task.get(task, self.every)

    def _rows(self, plan: Plan) -> Iterator[PlanRow]:
        loads = product(range(len(plan.buckets.concurrency) + 1), range(len(plan.buckets.context) + 1))
        for (concurrency, context), (task, shape) in product(loads, self.by_task.items()):
            yield PlanRow(concurrency=concurrency, context=context, task=task, shape=shape)


def pin_text(speculation: SpeculationSpec) -> str:
    """Return the pins of the spec as one text; empty without any."""
    every = [speculation.pin] if speculation.pin else []
    return ",".join([*every, *(f"{task.name}={task.pin}" for task in speculation.tasks if task.pin)])


def pin_operations(resource: Mapping[str, Any], pin: Pin) -> list[dict[str, Any]]:
    """Return the operations of a JSON patch that make ``pin`` the only one of a resource. Tasks of it are added.

    Args:
        resource: A SpecDecodeDeployment. The patch fails if its tasks changed meanwhile.
        pin: The pins; without any, all are removed.
    """
    speculation, base = resource["spec"].get("speculation") or {}, "/spec/speculation"
    operations = list(_set(f"{base}/pin", speculation.get("pin"), pin.every))
    tasks = speculation.get("tasks") or []
    for index, task in enumerate(tasks):
        path = f"{base}/tasks/{index}"
        changes = list(_set(f"{path}/pin", task.get("pin"), pin.by_task.get(task["name"])))
        operations += [{"op": "test", "path": f"{path}/name", "value": task["name"]}, *changes] if changes else []
    missing = pin.by_task.keys() - {task["name"] for task in tasks}
    added = [{"name": name, "pin": str(pin.by_task[name])} for name in sorted(missing)]
    if added and not tasks:
        return [*operations, {"op": "add", "path": f"{base}/tasks", "value": added}]
    return [*operations, *({"op": "add", "path": f"{base}/tasks/-", "value": one} for one in added)]


def _set(path: str, before: str | None, shape: TreeShape | None) -> Iterator[dict[str, Any]]:
    if shape is not None:
        yield {"op": "add", "path": path, "value": str(shape)}
    elif before is not None:
        yield {"op": "remove", "path": path}


def read_pin(text: str, speculation: SpeculationSpec) -> Pin | None:
    """Parse the text of pins.

    Args:
        text: The pins, as `pin_text` writes them or a user of the plugin.
        speculation: The spec, which has the names of the tasks.

    Returns:
        The pin, or None for an empty text.

    Raises:
        SpecError: The text is invalid. The message says what to write instead.
    """
    if not text.strip():
        return None
    if speculation.method == "none":
        raise SpecError("speculation.pin: speculation.method is none, so there is no draft to pin a shape of")
    known = {OTHER_TASK, *(task.name for task in speculation.tasks)}
    every: TreeShape | None = None
    by_task: dict[str, TreeShape] = {}
    for task, shape in _assignments(text):
        if not task:
            every = _shape(shape)
        elif task not in known:
            raise SpecError(f"speculation.pin: no task {task!r}; there are {', '.join(sorted(known))}")
        elif task in by_task:
            raise SpecError(f"speculation.pin: task {task!r} is pinned twice")
        else:
            by_task[task] = _shape(shape)
    return Pin(every=every, by_task=by_task)


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    """Yield task and shape of each part of ``none,code=tree:2,1,chat=none``. All tasks have the name "".

    Shapes may have commas too. A comma therefore ends a part only if a name and ``=`` follow it.
    """
    for number, part in enumerate(re.split(r",(?=[^,=]*=)", text)):
        task, equals, shape = part.partition("=")
        if equals and task.strip():
            yield task.strip(), shape.strip()
        elif equals or number:
            raise SpecError(f"speculation.pin: {part.strip()!r} names no task; {EXAMPLES}")
        else:
            yield "", part.strip()


def _shape(text: str) -> TreeShape:
    if not text:
        raise SpecError(f"speculation.pin: a shape is missing; {EXAMPLES}")
    try:
        shape = TreeShape.parse(text)
    except ValueError:
        raise SpecError(f"speculation.pin: {text!r} is no shape of at most 63 nodes; {EXAMPLES}") from None
    if not shape.nodes and text != "none":
        raise SpecError(f"speculation.pin: {text!r} drafts nothing; write none for plain decoding")
    if shape.depth > MAX_DEPTH:
        raise SpecError(f"speculation.pin: {text!r} is {shape.depth} deep, at most {MAX_DEPTH} can be run")
    return shape
