"""Drafts in ``spec``: the way of a new one into service, capture of traffic, and training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from specdecode_operator.api.schema import (
    Anything,
    Api,
    Duration,
    NameRef,
    Percent,
    container_in,
    object_in,
    rule,
    rules,
)
from specdecode_operator.times import seconds_of
from specdecode_worker.contract.distillation import JOB_CONTAINER

# Way of a new draft into service: ``spec.draftRollout``.

DraftHash = Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z._-]*$", max_length=128)]
"""Hash of a draft's files, as workers report it."""


class DraftRolloutSpec(Api):
    """Trial and promotion of drafts (SpecDecodeDraft). Settings of a running trial are those of its beginning."""

    mode: Literal["Canary", "Direct", "Manual"] = "Canary"
    """Canary: one worker tries the candidate, and a better one is promoted. Manual: a better one waits for its role
    Serving. Direct: a draft whose training run found it better is promoted without a trial."""
    block_requests: int = Field(default=32, ge=1, le=4096)
    """Finished requests of a block. A pair is one block of the present draft and one of the candidate."""
    max_duration: Duration = "24h"
    """Time after which a trial without a verdict ends, such as 24h or 90m."""
    min_gain_percent: Percent = 2
    """Gain in speed that a candidate must be shown to exceed, in percent."""


# Distillation of new drafts from traffic: ``spec.distillation``.

TRIGGER_MESSAGE = "distillation.trigger.mode Drift needs distillation.capture"
BASELINE_MESSAGE = "distillation.trigger.baseline is at least 5m"
STORAGE_MESSAGE = "distillation needs distillation.storage: workers read the new draft from there"
BUCKET_MESSAGE = "distillation.storage.secretRef is needed with an s3:// uri; all but the uri is only for one"
METHOD_MESSAGE = "distillation.capture needs speculation.method eagle3"
METHOD_RULE = (
    "!has(self.distillation) || !has(self.distillation.capture)"
    " || (has(self.speculation) && self.speculation.method == 'eagle3')"
)
AWS_REGION = "us-east-1"


class DistillationCaptureSpec(Api):
    """Capture of served requests by the workers. A change takes effect at once and replaces no workers."""

    percent: Percent = 5
    """Share of requests to capture, in percent."""
    percent_by_task: Annotated[dict[str, Percent], Field(max_length=16)] = Field(default={}, examples=[{"code": 20}])
    """Share of requests to capture by task, in percent. Tasks that are not listed have percent."""
    max_age: Duration = "336h"
    """Time after which a captured request is deleted, such as 336h."""
    redact: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$", max_length=256)] | None = Field(
        default=None, examples=["redaction:remove_names"]
    )
    """module:function of the worker's image that receives every record and returns it, changed, or None to drop it.
    Absent: none."""
    consent: Literal["OptOut", "OptIn"] = "OptOut"
    """OptOut: requests are captured unless the client forbids it (header X-Specdecode-Capture or metadata.capture).
    OptIn: only requests that permit it are captured."""


class DistillationTriggerSpec(Api):
    """Reason for a training run."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("!has(self.baseline) || duration(self.baseline) >= duration('5m')", BASELINE_MESSAGE),
        )
    )

    mode: Literal["Manual", "Drift"] = "Manual"
    """Manual: only a new value of request starts a run. Drift: also a draft that became slower, if a run is worth its
    device time."""
    request: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        default=None, examples=["2026-11-27 after the new prompt"]
    )
    """Any new value starts a run, as `kubectl specdecode distill` does with the time. Absent: no run is requested."""
    reject: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(default=None, examples=["6928f3a1"])
    """Id of a training run that is to end, as status.draft.run has it. Absent: none is."""
    baseline: Duration = "168h"
    """Time over which the normal speed of a draft is learnt, at least 5m; whole days where traffic differs by the
    hour."""
    min_conversations: int = Field(default=800, ge=1, le=10_000_000)
    """Captured conversations of all workers that a run needs."""
    cooldown: Duration = "24h"
    """Time after a run or a rollout of a draft in which the operator begins no other one by itself."""


class DistillationStorageSpec(Api):
    """Place of trained drafts and of the state of a run. A change replaces the workers and ends a run."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "has(self.secretRef) == self.uri.startsWith('s3://')"
                " && (has(self.secretRef) || (!has(self.endpoint) && !has(self.region)))",
                BUCKET_MESSAGE,
            )
        ),
    )

    uri: Annotated[
        str,
        Field(
            pattern=r"^(pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
            r"|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_-]+)*)$",
            max_length=270,
        ),
    ] = Field(examples=["pvc://drafts"])
    """pvc://CLAIM: a claim that all workers can mount (ReadWriteMany, or one node). s3://BUCKET/PREFIX: a bucket; a new
    pod of the Job then begins anew. Drafts lie below it in drafts/NAME/HASH."""
    endpoint: Annotated[str, Field(pattern=r"^https?://[^/ ]+$", max_length=256)] | None = Field(
        default=None, examples=["https://s3.example.com"]
    )
    """URL of the store of an s3:// uri; http:// is without TLS. Absent: that of AWS in the region."""
    region: Annotated[str, Field(pattern=r"^[a-z0-9-]+$", max_length=63)] | None = Field(
        default=None, description=f"Region of the bucket. Absent: {AWS_REGION}.", examples=["eu-central-1"]
    )
    secret_ref: NameRef | None = Field(default=None, examples=[{"name": "models-key"}])
    """Secret with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for a temporary key, AWS_SESSION_TOKEN. The Job writes,
    the workers read and list. Absent: the uri is a claim."""

    @property
    def claim(self) -> str:
        """Name of the claim; empty with a bucket."""
        return self.uri.removeprefix("pvc://") if self.uri.startswith("pvc://") else ""

    @property
    def bucket(self) -> str:
        """URI of the place in a bucket; empty with a claim."""
        return "" if self.claim else self.uri


class DistillationSpec(Api):
    """Capture of traffic, and training of new drafts from it."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.trigger) || !has(self.trigger.mode) || self.trigger.mode == 'Manual' || has(self.capture)",
                TRIGGER_MESSAGE,
            ),
            rule(
                "!has(self.trigger) || !has(self.trigger.mode) || self.trigger.mode == 'Manual' || has(self.storage)",
                STORAGE_MESSAGE,
            ),
        )
    )

    capture: DistillationCaptureSpec | None = Field(default=None, examples=[{"percent": 5}])
    """Capture of served requests, as token ids, on the workers' disks, at most 2Gi each. Absent: nothing is captured,
    and captures are deleted."""
    trigger: DistillationTriggerSpec = DistillationTriggerSpec()
    """Reason for a training run."""
    storage: DistillationStorageSpec | None = Field(default=None, examples=[{"uri": "pvc://drafts"}])
    """Place of trained drafts and of the state of a run. Absent: no run can be started."""
    time_limit: Duration = "4h"
    """Longest time of a run, counted over restarts, without time in a queue."""
    steps: int | None = Field(default=None, ge=1, le=10_000_000, examples=[2000])
    """Training steps. Absent: the command's default."""
    prompts_config_map_ref: NameRef | None = Field(default=None, examples=[{"name": "prompts"}])
    """ConfigMap with golden.jsonl, prompts on which a new draft must not be slower, and replay.jsonl, prompts that are
    mixed in. Absent: captured traffic alone decides and trains."""
    job_template: Anything = Field(
        default_factory=dict,
        description="Pod template of the training Job that is merged over the operator's, as workers.template. The "
        f"container is '{JOB_CONTAINER}'; devices in its limits make it train on them, else it trains on the CPU. A "
        "label kueue.x-k8s.io/queue-name gives the Job to Kueue.",
        examples=[
            {"spec": {"containers": [{"name": JOB_CONTAINER, "resources": {"limits": {"nvidia.com/gpu": 1}}}]}},
        ],
    )

    @property
    def job_resources(self) -> dict[str, Any]:
        """Resources of the Job's container in the template."""
        return object_in(container_in(self.job_template, JOB_CONTAINER), "resources")

    @property
    def job_devices(self) -> int:
        """Number of devices that the Job asks for; 0 if it trains on the CPU. Network adapters do not add to it."""
        limits = object_in(self.job_resources, "limits")
        counts = (int(amount) for name, amount in limits.items() if is_extended(name) and str(amount).isdecimal())
        return max(counts, default=0)

    @property
    def time_limit_seconds(self) -> int:
        """Longest time of a run, in seconds."""
        return int(seconds_of(self.time_limit))


def is_extended(resource: str) -> bool:
    """Return whether a resource of a container is an extended one, which a device plugin offers."""
    domain, slash, _ = resource.partition("/")
    return bool(slash) and domain != "kubernetes.io" and not domain.endswith(".kubernetes.io")


def without_devices(resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resources of a container for one that uses no device."""
    return {
        kind: {name: amount for name, amount in amounts.items() if not is_extended(name)}
        for kind, amounts in resources.items()
        if kind in ("limits", "requests") and isinstance(amounts, Mapping)
    }
