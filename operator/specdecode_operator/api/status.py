"""What users read: ``status``. Written on change alone, with figures rounded."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from specdecode_operator.api.schema import Api, Text


class ConditionType(StrEnum):
    """Types of conditions, after kstatus.

    Stalled and Reconciling exist only while True. A condition of a feature exists only while the feature is in use.
    """

    ready = "Ready"
    available = "Available"
    stalled = "Stalled"
    reconciling = "Reconciling"
    progressing = "Progressing"
    memory_fits = "MemoryFits"
    draft_compatible = "DraftCompatible"
    speculation_effective = "SpeculationEffective"
    scaling_limited = "ScalingLimited"
    reports_fresh = "ReportsFresh"
    workers_healthy = "WorkersHealthy"
    pinned = "Pinned"


class Condition(Api):
    """As metav1.Condition."""

    type: Text
    status: Literal["True", "False", "Unknown"]
    reason: Text
    message: Annotated[str, Field(max_length=4096)] = ""
    last_transition_time: Text
    observed_generation: int = 0


Cause = Literal["bounds", "loses", "gain", "trial", "probe", "up", "down", "mode", "pin"]
"""Of a decision: what the spec allows; speculation that loses; a measured gain; what runs to be measured, new or after
a stop; demand that rises or falls; a mode or a pin that somebody set."""


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
    cause: Cause | None = Field(default=None, description="The reason in a word, as the operator's metrics count it.")
    reason: Annotated[str, Field(max_length=4096)]


class SpeculationStatus(Api):
    """What speculation does now. Figures are differences of the fleet's counters."""

    depth: int | None = Field(default=None, description="Depth of the row in use at the present load.")
    nodes: int | None = Field(default=None, description="Nodes of that row's shape.")
    acceptance_rate: float | None = Field(default=None, description="Accepted over drafted tokens.")
    accepted_length: float | None = Field(default=None, description="Tokens per step: 1 + accepted / drafts.")
    speedup: float | None = Field(default=None, description="Time that plain decoding would take over the time taken.")
    measured_at: Text | None = Field(default=None, description="When the three figures above last changed.")
    plan_version: int | None = Field(default=None, description="Version of the plan that is out; it only rises.")
    pinned: Text | None = Field(default=None, description="The pin in force (annotation specdecode.io/pin).")
    device_hours_saved: float | None = Field(
        default=None, description="Device hours saved against plain decoding since the deployment was created."
    )
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
    ttft_milliseconds: float | None = Field(default=None, description="Mean time to the first token, in milliseconds.")
    itl_milliseconds: float | None = Field(default=None, description="Mean inter-token latency, in milliseconds.")
    speedup: float | None = Field(
        default=None, description="Time that plain decoding would take for the task's tokens, over the time taken."
    )


class ModelStatus(Api):
    """The model that new pods load."""

    uri: Text | None = Field(default=None, description="URI of the spec.")
    revision: Text | None = Field(default=None, description="Revision that new pods load.")


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
    model: ModelStatus | None = None
    speculation: SpeculationStatus | None = None
    tasks: Annotated[tuple[TaskStatus, ...], Field(max_length=8)] = ()
    draft: DraftStatus | None = None
    traffic: TrafficStatus | None = None
    capacity: CapacityStatus | None = None
    memory: MemoryStatus | None = None
