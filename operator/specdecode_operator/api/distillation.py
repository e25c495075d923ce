"""Distillation of new drafts from traffic: ``spec.distillation``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from specdecode_operator.api.devices import AcceleratorSpec, ResourcesSpec
from specdecode_operator.api.rollout import Duration, seconds_of
from specdecode_operator.api.schema import Anything, Api, LabelName, Name, Quantity, rule, rules

LEAST_BASELINE_SECONDS = 300
CaptureShare = Annotated[float, Field(ge=0, le=1)]

TRIGGER_MESSAGE = "distillation.trigger.mode Drift and Schedule need distillation.capture.enabled"
SCHEDULE_MESSAGE = "distillation.trigger.schedule is needed with mode Schedule, and only there"
BASELINE_MESSAGE = "distillation.trigger.baseline is at least 5m"
STORAGE_MESSAGE = "distillation needs distillation.storage: workers read the new draft from there"
ONE_STORAGE_MESSAGE = "distillation.storage has a claim or s3, not both"
METHOD_MESSAGE = "distillation.capture.enabled needs speculation.method eagle3"
METHOD_RULE = (
    "!has(self.distillation) || !has(self.distillation.capture) || !has(self.distillation.capture.enabled)"
    " || !self.distillation.capture.enabled || (has(self.speculation) && self.speculation.method == 'eagle3')"
)


class DistillationCaptureSpec(Api):
    """Capture of served requests by the workers. A change takes effect at once and replaces no workers."""

    enabled: bool = Field(
        default=False,
        description="Capture requests, as token ids, on the workers' own disks. If it is switched off, workers delete "
        "what they captured.",
    )
    share: CaptureShare = Field(default=0.05, description="Share of requests to capture; 0 or at least 0.001.")
    share_by_task: Annotated[dict[str, CaptureShare], Field(max_length=16)] = Field(
        default={},
        description="Share of requests to capture by task. Tasks that are not listed have share.",
        examples=[{"code": 0.2}],
    )
    max_bytes: Quantity = Field(
        default="2Gi", description="Most bytes of captured requests on one worker, at most 14Gi; the oldest go first."
    )
    max_age: Duration = Field(
        default="336h", description="Time after which a captured request is deleted, such as 336h."
    )
    redact: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$", max_length=256)] | None = Field(
        default=None,
        description="module:function of the worker's image that receives every record and returns it, changed or not, "
        "or None to drop it. Absent: records are kept as they are.",
        examples=["redaction:remove_names"],
    )
    consent: Literal["OptOut", "OptIn"] = Field(
        default="OptOut",
        description="OptOut: requests are captured unless the client forbids it (header X-Specdecode-Capture or "
        "metadata.capture). OptIn: only requests that permit it are captured.",
    )


class DistillationTriggerSpec(Api):
    """Reason for a training run."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("has(self.schedule) == (has(self.mode) && self.mode == 'Schedule')", SCHEDULE_MESSAGE),
            rule("!has(self.baseline) || duration(self.baseline) >= duration('5m')", BASELINE_MESSAGE),
        )
    )

    mode: Literal["Manual", "Drift", "Schedule"] = Field(
        default="Manual",
        description="Manual: only kubectl specdecode distill starts a run. Drift: also a draft that became slower, if "
        "a run is worth its device time. Schedule: also at the times of schedule.",
    )
    schedule: Annotated[str, Field(max_length=64, pattern=r"^(\S+ ){4}\S+$")] | None = Field(
        default=None,
        description="Times of runs with mode Schedule, as a cron expression of five fields in UTC. Absent: no run has "
        "a fixed time.",
        examples=["0 3 * * 0"],
    )
    min_loss_percent: float = Field(
        default=5, ge=0, le=90, description="Loss of speed against the baseline that counts as drift, in percent."
    )
    baseline: Duration = Field(
        default="168h",
        description="Time over which the normal speed of a draft is learnt, at least 5m; whole days where traffic "
        "differs by the hour.",
    )
    min_conversations: int = Field(
        default=800, ge=1, le=10_000_000, description="Captured conversations of all workers that a run needs."
    )
    payback: Duration = Field(
        default="168h", description="Time within which a run must save twice the device time that it takes."
    )
    cooldown: Duration = Field(
        default="24h",
        description="Time after a run or a rollout of a draft in which the operator "
        "begins no other one by itself. Commands of a user are carried out.",
    )

    @field_validator("baseline")
    @classmethod
    def _is_long_enough(cls, baseline: str) -> str:
        if seconds_of(baseline) < LEAST_BASELINE_SECONDS:
            raise ValueError(BASELINE_MESSAGE)
        return baseline

    @model_validator(mode="after")
    def _has_a_schedule(self) -> Self:
        if (self.schedule is not None) != (self.mode == "Schedule"):
            raise ValueError(SCHEDULE_MESSAGE)
        return self


class DistillationJobSpec(Api):
    """Job that trains a draft."""

    image: Annotated[str, Field(max_length=512, min_length=1)] | None = Field(
        default=None, description="Image of the Job. Absent: that of the workers.", examples=["registry/worker:v2"]
    )
    resources: ResourcesSpec = Field(default=ResourcesSpec(), description="Resources of the Job's container.")
    accelerator: AcceleratorSpec | None = Field(
        default=None, description="Devices of the Job. Absent: it trains on the CPU.", examples=[{"count": 1}]
    )
    node_selector: Annotated[dict[str, str], Field(max_length=32)] = Field(
        default={}, description="Labels of nodes that the Job may run on.", examples=[{"pool": "training"}]
    )
    tolerations: Annotated[list[Anything], Field(max_length=32)] = Field(
        default=[], description="Tolerations of the Job's pod.", examples=[[{"key": "training", "operator": "Exists"}]]
    )
    priority_class_name: Name | None = Field(
        default=None, description="PriorityClass of the Job's pod. Absent: that of the cluster.", examples=["batch"]
    )
    queue_name: LabelName | None = Field(
        default=None,
        description="LocalQueue of Kueue, which starts, preempts and resumes the Job. Absent: the Job starts at once.",
        examples=["training"],
    )
    time_limit: Duration = Field(
        default="4h", description="Longest time of a run, counted over restarts, without time in a queue."
    )
    steps: int | None = Field(
        default=None, ge=1, le=10_000_000, description="Training steps. Absent: the command's default.", examples=[2000]
    )
    golden: Name | None = Field(
        default=None,
        description="ConfigMap with golden.jsonl: prompts on which a new draft must not be slower. Absent: the "
        "captured traffic alone decides.",
        examples=["golden-prompts"],
    )
    replay_prompts: Name | None = Field(
        default=None,
        description="ConfigMap with replay.jsonl: prompts of the draft's earlier training, answered by the target and "
        "mixed in. Absent: the draft learns from captured traffic alone.",
        examples=["replay-prompts"],
    )
    template: Anything | None = Field(
        default=None,
        description="Fields of the Job's pod that are merged over those of the operator, as with workers.template.",
        examples=[{"spec": {"runtimeClassName": "nvidia"}}],
    )

    @property
    def devices(self) -> int:
        """Number of devices of the Job; 0 if it trains on the CPU."""
        if self.accelerator is None:
            return 0
        return 1 if self.accelerator.count is None else self.accelerator.count


class DistillationS3Spec(Api):
    """Bucket of trained drafts in any S3 store. A change replaces the workers and ends a run."""

    bucket: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", max_length=63)] = Field(
        description="Name of the bucket, which must exist.", examples=["models"]
    )
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*$", max_length=200)] | None = Field(
        default=None,
        description="Path in the bucket. Drafts lie in PREFIX/drafts/NAME/HASH. Absent: in drafts/NAME/HASH.",
        examples=["team-a"],
    )
    endpoint: Annotated[str, Field(pattern=r"^https?://[^/ ]+$", max_length=256)] | None = Field(
        default=None,
        description="URL of the store. With http:// there is no TLS. Absent: that of AWS in the region.",
        examples=["https://s3.example.com"],
    )
    region: Annotated[str, Field(pattern=r"^[a-z0-9-]+$", max_length=63)] = Field(
        default="us-east-1", description="Region of the bucket."
    )
    secret: Name = Field(
        description="Secret with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for a temporary key, AWS_SESSION_TOKEN. "
        "The Job needs the rights to write, read and list, the workers those to read and list.",
        examples=["models-key"],
    )
    scratch: Quantity = Field(
        default="64Gi",
        description="Most bytes of a run's data and checkpoints on its node. A new pod of the Job begins anew.",
    )

    @property
    def uri(self) -> str:
        """URI of the place below which drafts lie."""
        return f"s3://{self.bucket}/{self.prefix}" if self.prefix else f"s3://{self.bucket}"


class DistillationStorageSpec(Api):
    """Place of trained drafts and of the state of a run."""

    model_config = ConfigDict(
        json_schema_extra=rules(rule("!has(self.claim) || !has(self.s3)", ONE_STORAGE_MESSAGE)),
    )

    claim: Name | None = Field(
        default=None,
        description="PersistentVolumeClaim that all workers can mount (ReadWriteMany, or one node). The Job writes "
        "drafts and checkpoints to it. A change replaces the workers. Absent: drafts go to s3, or no run can be "
        "started.",
        examples=["drafts"],
    )
    s3: DistillationS3Spec | None = Field(
        default=None,
        description="Bucket that the Job writes drafts to, where no claim can be shared. Absent: no bucket.",
        examples=[{"bucket": "models", "secret": "models-key"}],
    )

    @property
    def is_set(self) -> bool:
        """True if there is a place for drafts."""
        return bool(self.claim) or self.s3 is not None

    @model_validator(mode="after")
    def _is_one_place(self) -> Self:
        if self.claim and self.s3 is not None:
            raise ValueError(ONE_STORAGE_MESSAGE)
        return self


class DistillationSpec(Api):
    """Capture of traffic, and training of new drafts from it."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.trigger) || !has(self.trigger.mode) || self.trigger.mode == 'Manual'"
                " || (has(self.capture) && has(self.capture.enabled) && self.capture.enabled)",
                TRIGGER_MESSAGE,
            ),
            rule(
                "!has(self.trigger) || !has(self.trigger.mode) || self.trigger.mode == 'Manual'"
                " || (has(self.storage) && (has(self.storage.claim) || has(self.storage.s3)))",
                STORAGE_MESSAGE,
            ),
        )
    )

    capture: DistillationCaptureSpec = Field(
        default=DistillationCaptureSpec(), description="Capture of served requests by the workers."
    )
    trigger: DistillationTriggerSpec = Field(
        default=DistillationTriggerSpec(), description="Reason for a training run."
    )
    job: DistillationJobSpec = Field(default=DistillationJobSpec(), description="Job that trains a draft.")
    storage: DistillationStorageSpec = Field(
        default=DistillationStorageSpec(),
        description="Place of trained drafts and of the state of a run.",
        examples=[{"claim": "drafts"}],
    )

    @model_validator(mode="after")
    def _can_run_by_itself(self) -> Self:
        if self.trigger.mode != "Manual" and not self.capture.enabled:
            raise ValueError(TRIGGER_MESSAGE)
        if self.trigger.mode != "Manual" and not self.storage.is_set:
            raise ValueError(STORAGE_MESSAGE)
        return self
