"""SpecDecodeDeployment, version v1alpha1: what users write (spec) and what they read (status).

These models are the single source of the CRD: ``crd.py`` makes crds/*.yaml of them. Descriptions are what ``kubectl
explain`` prints. Rules across fields stand twice, as CEL for the API server and as a validator for the same input
read from anywhere else; one test feeds both the same examples.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from specdecode_worker.contract import DRAFT_FREE, Method, TaskName

GROUP = "specdecode.io"
VERSION = "v1alpha1"
KIND = "SpecDecodeDeployment"
PLURAL = "specdecodedeployments"
MAX_NAME_LENGTH = 45
"""Children add suffixes to the name, and a label value ends at 63 characters."""

PAUSED_ANNOTATION = "specdecode.io/paused"
PIN_ANNOTATION = "specdecode.io/pin"

_UID_FREE_TEXT = 1024
ModelUri = Annotated[
    str,
    Field(
        pattern=r"^(hf://[^/@ ]+/[^/@ ]+(@[^@ ]+)?|pvc://[^/ ]+/.+|file:///.+|embedded://[a-z0-9.-]+)$",
        max_length=512,
        description="hf://org/name@revision, pvc://claim/path, file:///path or embedded://name.",
    ),
]
Text = Annotated[str, Field(max_length=_UID_FREE_TEXT)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Anything = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]


def rule(expression: str, message: str) -> dict[str, str]:
    """One CEL validation of the CRD."""
    return {"rule": expression, "message": message}


def rules(*found: dict[str, str]) -> dict[str, Any]:
    return {"x-kubernetes-validations": list(found)}


class Api(BaseModel):
    """Base of everything in the resource: camelCase outside, unknown fields refused, never changed in place."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


# --- spec ---------------------------------------------------------------------------------------------------------


class SecretKeyRef(Api):
    """One key of a Secret in the same namespace."""

    name: Name
    key: Annotated[str, Field(max_length=253)] = "token"


class ModelSpec(Api):
    """The target model."""

    uri: ModelUri
    served_name: Annotated[str, Field(max_length=128, min_length=1)] | None = Field(
        default=None, description="Name in the OpenAI API; the last part of the uri when absent."
    )
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_model_len: int | None = Field(
        default=None, ge=16, le=1048576, description="Tokens of prompt and answer; the model's limit when absent."
    )
    token_secret_ref: SecretKeyRef | None = Field(default=None, description="Hub token for gated models.")


class DraftSpec(Api):
    uri: ModelUri


DRAFT_RULE = "(self.method in ['ngram', 'none']) != has(self.{field})"
DRAFT_MESSAGE = "{field} is needed by every method but ngram and none, and only by those"


class NamedDraftSpec(Api):
    """A further draft, loaded beside the first for the tasks that name it."""

    model_config = ConfigDict(
        json_schema_extra=rules(rule(DRAFT_RULE.format(field="uri"), DRAFT_MESSAGE.format(field="uri")))
    )

    name: TaskName
    method: Literal["eagle3", "eagle", "draft-model", "medusa", "ngram"] = "eagle3"
    uri: ModelUri | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.method in DRAFT_FREE) != (self.uri is None):
            raise ValueError(DRAFT_MESSAGE.format(field="uri"))
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


class ScalingSpec(Api):
    """Who sets the number of workers, and between which bounds."""

    model_config = ConfigDict(
        json_schema_extra=rules(rule("self.minReplicas <= self.maxReplicas", "minReplicas must not exceed maxReplicas"))
    )

    owner: Literal["Operator", "External"] = Field(
        default="Operator",
        description="Operator: follows demand. External: kubectl scale, an HPA or KEDA sets replicas.",
    )
    min_replicas: int = Field(default=1, ge=1, le=1000)
    max_replicas: int = Field(default=4, ge=1, le=1000)
    scale_down_window_seconds: int = Field(
        default=300, ge=0, le=86400, description="Demand must stay low this long before a worker goes."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("minReplicas must not exceed maxReplicas")
        return self


class WorkersSpec(Api):
    """The pods."""

    image: Annotated[str, Field(max_length=512)] | None = Field(
        default=None, description="Worker image; the operator's default when absent."
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    image_pull_secrets: Annotated[tuple[Name, ...], Field(max_length=8)] = ()
    resources: Anything = Field(
        default_factory=dict, description="As in a container; GPUs come from tensorParallelSize."
    )
    gpu: bool = Field(default=True, description="Ask for nvidia.com/gpu; false runs on CPUs.")
    tensor_parallel_size: int = Field(default=1, ge=1, le=64, description="GPUs of one replica.")
    max_num_seqs: int = Field(default=16, ge=1, le=1024, description="Sequences that one worker runs at a time.")
    kv_cache_tokens: int | None = Field(
        default=None, ge=256, description="Tokens of KV cache; from memory when absent."
    )
    update_policy: Literal["OnSpecChange", "Automatic"] = Field(
        default="OnSpecChange",
        description="Automatic: an upgrade of the operator may roll workers; else only a change of this spec does.",
    )
    recycle: Literal["Never", "OnCollapse"] = Field(
        default="Never",
        description="OnCollapse: a worker whose acceptance collapses, while its peers' does not, is replaced.",
    )
    max_num_batched_tokens: int | None = Field(
        default=None, ge=16, le=1048576, description="Tokens that one step computes at most, prompts included."
    )
    api_keys_secret_ref: SecretKeyRef | None = Field(
        default=None, description="Keys of the public port, separated by whitespace; absent lets everyone in."
    )
    template: Anything = Field(
        default_factory=dict,
        description="Pod template merged over the operator's (containers by name: 'worker', init container 'pull').",
    )


class DrainSpec(Api):
    """How a worker leaves."""

    endpoint_delay_seconds: int = Field(default=5, ge=0, le=300)
    grace_period_seconds: int = Field(default=60, ge=1, le=7200)


class ModelCacheSpec(Api):
    """Where pulled models are kept; an emptyDir when nothing is said."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("!(has(self.pvc) && has(self.hostPath))", "a model cache is a pvc or a hostPath, not both")
        )
    )

    pvc: Name | None = Field(default=None, description="A PersistentVolumeClaim, shared by the workers.")
    host_path: Annotated[str, Field(pattern="^/.+", max_length=512)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.pvc and self.host_path:
            raise ValueError("a model cache is a pvc or a hostPath, not both")
        return self


class StorageSpec(Api):
    model_cache: ModelCacheSpec = ModelCacheSpec()


class Spec(Api):
    """What the user wants."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            {
                "rule": (
                    "!(has(self.scaling) && has(oldSelf.scaling) && self.scaling.owner == 'Operator'"
                    " && oldSelf.scaling.owner == 'Operator') || self.replicas == oldSelf.replicas"
                ),
                "message": (
                    "replicas are set by the operator (scaling.owner is Operator);"
                    " set scaling.owner to External to scale by hand, HPA or KEDA"
                ),
                "fieldPath": ".replicas",
            }
        )
    )

    model: ModelSpec
    speculation: SpeculationSpec = Field(default_factory=lambda: SpeculationSpec(method="none"))
    replicas: int = Field(default=1, ge=0, le=1000, description="Workers, unless scaling.owner is Operator.")
    scaling: ScalingSpec | None = Field(default=None, description="Absent: replicas are followed as written.")
    workers: WorkersSpec = WorkersSpec()
    drain: DrainSpec = DrainSpec()
    storage: StorageSpec = StorageSpec()


# --- status -------------------------------------------------------------------------------------------------------


class ConditionType(StrEnum):
    """A condition exists only while its feature is in use. Ready means that somebody answers, and nothing more."""

    ready = "Ready"
    progressing = "Progressing"
    memory_fits = "MemoryFits"
    draft_compatible = "DraftCompatible"
    speculation_effective = "SpeculationEffective"
    scaling_limited = "ScalingLimited"
    reports_fresh = "ReportsFresh"
    workers_alike = "WorkersAlike"
    pinned = "Pinned"
    reconciled = "Reconciled"


class Condition(Api):
    """As metav1.Condition."""

    type: Text
    status: Literal["True", "False", "Unknown"]
    reason: Text
    message: Annotated[str, Field(max_length=4096)] = ""
    last_transition_time: Text
    observed_generation: int = 0


class Decision(Api):
    """One decision: what was measured, what changed, from what to what, why, and later what it brought."""

    time: Text
    kind: Literal["Plan", "Replicas", "Steering"] = Field(
        default="Plan", description="Plan: rows moved. Replicas: workers were added or removed. Steering: mode or pin."
    )
    load: Text = Field(description="What moved: the row's concurrency, context and task; or replicas; or every load.")
    before: Text
    after: Text
    measured: Text | None = Field(default=None, description="What was measured when it was decided.")
    expected_gain_percent: float | None = Field(
        default=None, description="More tokens in the same time, as the model of the worker predicts."
    )
    realised_gain_percent: float | None = Field(
        default=None,
        description="More tokens in the same time, as measured: the steps of the first 500 drafts after the change "
        "against those of the shape before it, at equal numbers of sequences. Absent until then.",
    )
    reason: Annotated[str, Field(max_length=4096)]


class SpeculationStatus(Api):
    """What speculation does now. Figures are differences of the fleet's counters."""

    depth: int | None = Field(default=None, description="Depth of the row in use at the present load.")
    nodes: int | None = Field(default=None, description="Nodes of that row's shape.")
    acceptance_rate: float | None = Field(default=None, description="Accepted over drafted tokens.")
    accepted_length: float | None = Field(default=None, description="Tokens per step: 1 + accepted / drafts.")
    speedup: float | None = Field(default=None, description="Plain over speculative time per token.")
    measured_at: Text | None = Field(default=None, description="When the three figures above last changed.")
    plan_version: int | None = Field(default=None, description="Version of the plan that is out; it only rises.")
    pinned: Text | None = Field(default=None, description="The pin in force (annotation specdecode.io/pin).")
    recommended: Text | None = Field(
        default=None, description="What Auto would run at the present load (mode Advisory, or while pinned)."
    )
    last_decision: Annotated[str, Field(max_length=4096)] | None = None
    history: Annotated[tuple[Decision, ...], Field(max_length=10, description="Newest first.")] = ()


class TaskStatus(Api):
    """One task of spec.speculation.tasks, at the present load."""

    name: Text
    mode: Text | None = Field(
        default=None, description="Who decides: the task's mode, else speculation.mode; or Pinned."
    )
    depth: int | None = Field(default=None, description="Depth of the task's row.")
    acceptance_rate: float | None = Field(default=None, description="Accepted tokens over the depth of the row.")
    accepted_length: float | None = Field(default=None, description="Tokens per step: 1 + accepted / drafts.")


class DraftStatus(Api):
    """Hash and source of the draft that the workers run."""

    hash: Text | None = None
    uri: Text | None = None


class MemoryStatus(Api):
    """Memory of one worker's device, as it stood before anything was loaded."""

    limit: Text | None = Field(default=None, description="Of the GPU, or the container's limit.")
    weights: Text | None = Field(default=None, description="Of the target, on each device.")
    drafts: Text | None = None
    kv_cache: Text | None = Field(default=None, description="Keys and values of the target and the drafts.")
    reserve: Text | None = Field(default=None, description="Left alone.")
    kv_tokens: int | None = Field(default=None, description="Tokens of keys and values that there is room for.")


class TrafficStatus(Api):
    """Demand over the last minute, whole fleet."""

    running: float | None = None
    waiting: float | None = None
    tokens_per_second: float | None = None
    synthetic: bool | None = Field(default=None, description="Synthetic knobs are on in some worker.")


class CapacityStatus(Api):
    """Why there are as many workers as there are."""

    wanted_replicas: int | None = Field(
        default=None, description="Workers that demand asks for, before the bounds of spec.scaling."
    )
    requests_per_second: float | None = Field(
        default=None, description="Arrivals of the observed mix that one worker carries within the objectives."
    )
    arrivals_per_second: float | None = Field(default=None, description="Measured arrivals, whole fleet.")
    limited_by: Text | None = Field(default=None, description="The limit that one worker meets first.")


class Status(Api):
    """What is so."""

    observed_generation: int | None = None
    url: Text | None = None
    replicas: int = 0
    ready_replicas: int = 0
    selector: Text | None = None
    ready: Text | None = Field(default=None, description="Ready over wanted workers, for the READY column.")
    reason: Text | None = Field(default=None, description="Why it is not all well, for the REASON column.")
    conditions: Annotated[
        tuple[Condition, ...],
        Field(
            max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
        ),
    ] = ()
    resolved_image: Text | None = None
    speculation: SpeculationStatus | None = None
    tasks: Annotated[tuple[TaskStatus, ...], Field(max_length=8)] = ()
    draft: DraftStatus | None = None
    traffic: TrafficStatus | None = None
    capacity: CapacityStatus | None = None
    memory: MemoryStatus | None = None


class SpecDecodeDeployment(Api):
    """A model served with speculative decoding that tunes itself."""

    spec: Spec
    status: Status | None = None


COLUMNS: tuple[dict[str, Any], ...] = (
    {"name": "Ready", "type": "string", "jsonPath": ".status.ready"},
    {"name": "Replicas", "type": "integer", "jsonPath": ".status.replicas"},
    {"name": "Depth", "type": "integer", "jsonPath": ".status.speculation.depth"},
    {"name": "Accept", "type": "number", "jsonPath": ".status.speculation.acceptanceRate"},
    {"name": "Speedup", "type": "number", "jsonPath": ".status.speculation.speedup"},
    {"name": "Draft", "type": "string", "jsonPath": ".status.draft.hash"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    {"name": "Reason", "type": "string", "jsonPath": ".status.reason", "priority": 1},
)
