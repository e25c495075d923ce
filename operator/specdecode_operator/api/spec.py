"""Desired state that users write: ``spec``. Speculation, workers and engine have files of their own."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from specdecode_operator.api.distillation import METHOD_MESSAGE as DISTILLATION_METHOD_MESSAGE
from specdecode_operator.api.distillation import METHOD_RULE as DISTILLATION_METHOD_RULE
from specdecode_operator.api.distillation import DistillationSpec
from specdecode_operator.api.engine import EngineSpec
from specdecode_operator.api.rollout import (
    CANDIDATE_METHOD_MESSAGE,
    CANDIDATE_METHOD_RULE,
    CANDIDATE_URI_MESSAGE,
    CANDIDATE_URI_RULE,
    RolloutsSpec,
)
from specdecode_operator.api.router import RouterSpec
from specdecode_operator.api.schema import URI_FORMS, Api, ModelUri, Name, rule, rules
from specdecode_operator.api.speculation import SpeculationSpec
from specdecode_operator.api.tasks.task_spec import MERGE_SAMPLER_MESSAGE
from specdecode_operator.api.workers import WorkersSpec
from specdecode_worker.contract import TargetQuantization

_NEEDS_ROUTERS = "scaling.minReplicas 0 needs router.replicas above 0: routers hold requests until a worker is ready"
_HAS_ROUTERS = (
    "!has(self.scaling) || self.scaling.owner == 'External' || self.scaling.minReplicas > 0"
    " || (has(self.router) && has(self.router.replicas) && self.router.replicas > 0)"
)
_SPLIT_NEEDS_WORKERS = "router.trafficSplit needs scaling.minReplicas above 0: nothing is held while others serve"
_SPLIT_HAS_WORKERS = (
    "!has(self.scaling) || self.scaling.owner == 'External' || self.scaling.minReplicas > 0"
    " || !has(self.router) || !has(self.router.trafficSplit) || self.router.trafficSplit.size() == 0"
)
_OWN_IS_COUPLED = "speculation.draft.placement Own needs engine.sampler coupled"
_OWN_DRAFT_RULE = (
    "!has(self.speculation) || !has(self.speculation.draft) || !has(self.speculation.draft.placement)"
    " || self.speculation.draft.placement == 'Shared'"
    " || !has(self.engine) || !has(self.engine.sampler) || self.engine.sampler == 'coupled'"
)


class SecretKeyRef(Api):
    """One key of a Secret in the same namespace."""

    name: Name = Field(description="Secret in the same namespace.", examples=["hub-token"])
    key: Annotated[str, Field(max_length=253, min_length=1)] = Field(default="token", description="Key of the Secret.")


class ModelSpec(Api):
    """Target model: the one whose text is served."""

    uri: ModelUri = Field(
        description=f"Where the model comes from: {URI_FORMS}.",
        examples=["hf://meta-llama/Llama-3.1-8B-Instruct@0e9e39f249a16976918f6564b8830bc894c89659"],
    )
    served_name: Annotated[str, Field(max_length=128, min_length=1)] | None = Field(
        default=None,
        description="Name of the model in the OpenAI API. Absent: the last part of the uri.",
        examples=["llama-3.1-8b"],
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="Data type of weights and arithmetic."
    )
    quantization: TargetQuantization | None = Field(
        default=None,
        description="Quantization of the weights of the model's blocks. Absent: weights are of dtype.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=16,
        le=1048576,
        description="Maximum tokens of prompt and answer together. Absent: the model's own limit.",
        examples=[16384],
    )
    token_secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="Token of the hub, for gated models. Only the download sees it. Absent: models are downloaded "
        "without a token.",
        examples=[{"name": "hub-token", "key": "token"}],
    )


class ScalingSpec(Api):
    """Owner of the number of workers, and its bounds."""

    model_config = ConfigDict(
        json_schema_extra=rules(rule("self.minReplicas <= self.maxReplicas", "minReplicas must not exceed maxReplicas"))
    )

    owner: Literal["Operator", "External"] = Field(
        default="Operator",
        description="Operator: the number of workers follows demand. External: kubectl scale, an HPA or KEDA sets it.",
    )
    min_replicas: int = Field(
        default=1,
        ge=0,
        le=1000,
        description="Least number of workers. 0: without requests for idleSeconds no worker runs, and routers hold the "
        "next requests while one starts. It needs router.replicas above 0.",
    )
    max_replicas: int = Field(default=4, ge=1, le=1000, description="Largest number of workers.")
    scale_down_window_seconds: int = Field(
        default=300,
        ge=0,
        le=86400,
        description="Time for which demand must stay low before a worker is removed. The highest demand in it counts.",
    )
    idle_seconds: int = Field(
        default=300,
        ge=10,
        le=604800,
        description="Time without requests after which the last workers are removed, where minReplicas is 0.",
    )

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("minReplicas must not exceed maxReplicas")
        return self


class DrainSpec(Api):
    """Shutdown of a worker."""

    endpoint_delay_seconds: int = Field(
        default=5,
        ge=0,
        le=300,
        description="Time after SIGTERM during which new requests are served, until no endpoint lists the pod.",
    )
    grace_period_seconds: int = Field(
        default=60, ge=1, le=7200, description="Time after that for running requests to finish."
    )


class ModelCacheSpec(Api):
    """Volume of downloaded models. Without pvc and hostPath every pod downloads into a volume of its own."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("!(has(self.pvc) && has(self.hostPath))", "a model cache is a pvc or a hostPath, not both")
        )
    )

    pvc: Name | None = Field(
        default=None,
        description="PersistentVolumeClaim that the workers share. Absent: hostPath, or a volume of each pod.",
        examples=["llama-cache"],
    )
    host_path: Annotated[str, Field(pattern="^/.+", max_length=512)] | None = Field(
        default=None,
        description="Folder of the node, which must exist and be writable for user 65532. Absent: pvc, or a volume of "
        "each pod.",
        examples=["/var/lib/models"],
    )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.pvc and self.host_path:
            raise ValueError("a model cache is a pvc or a hostPath, not both")
        return self


class StorageSpec(Api):
    """Volumes of the workers."""

    model_cache: ModelCacheSpec = Field(
        default=ModelCacheSpec(),
        description="Where downloaded models are stored.",
        examples=[{"pvc": "llama-cache"}],
    )


class TlsSpec(Api):
    """Certificate of the workers' ports."""

    secret_name: Name = Field(
        description="Secret of type kubernetes.io/tls (tls.crt, tls.key) in the same namespace, as cert-manager writes "
        "it. Workers load a renewed certificate without a restart.",
        examples=["llama-tls"],
    )


class Spec(Api):
    """Desired state of the deployment."""

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
            },
            rule(_OWN_DRAFT_RULE, _OWN_IS_COUPLED),
            rule(_HAS_ROUTERS, _NEEDS_ROUTERS),
            rule(_SPLIT_HAS_WORKERS, _SPLIT_NEEDS_WORKERS),
            rule(CANDIDATE_METHOD_RULE, CANDIDATE_METHOD_MESSAGE),
            rule(CANDIDATE_URI_RULE, CANDIDATE_URI_MESSAGE),
            rule(DISTILLATION_METHOD_RULE, DISTILLATION_METHOD_MESSAGE),
            rule(
                "!has(self.engine) || self.engine.sampler == 'coupled' || !has(self.speculation)"
                " || self.speculation.tasks.all(task, task.merge.size() == 0)",
                MERGE_SAMPLER_MESSAGE,
            ),
        )
    )

    model: ModelSpec = Field(
        description="Target model: the one whose text is served.",
        examples=[{"uri": "hf://meta-llama/Llama-3.1-8B-Instruct"}],
    )
    speculation: SpeculationSpec = Field(
        default_factory=lambda: SpeculationSpec(method="none"),
        description="How tokens are drafted, and what decides how many. Absent: plain decoding.",
        examples=[{"method": "eagle3", "draft": {"uri": "hf://yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}}],
    )
    replicas: int = Field(
        default=1,
        ge=0,
        le=1000,
        description="Number of workers. With scaling.owner Operator it is only the number to start with.",
    )
    scaling: ScalingSpec | None = Field(
        default=None,
        description="Owner and bounds of the number of workers. Absent: there are as many workers as replicas says.",
        examples=[{"owner": "Operator", "minReplicas": 1, "maxReplicas": 4}],
    )
    engine: EngineSpec = Field(
        default=EngineSpec(), description="Settings of the inference engine. A change replaces the workers."
    )
    workers: WorkersSpec = Field(default=WorkersSpec(), description="Pods that serve the model.")
    router: RouterSpec = Field(
        default=RouterSpec(),
        description="Routers before the workers: one endpoint whose streams survive their worker.",
        examples=[{"replicas": 3}],
    )
    rollout: RolloutsSpec = Field(
        default=RolloutsSpec(),
        description="Way of a new draft into service. No change of it replaces workers.",
        examples=[{"draft": {"candidate": {"uri": "pvc://drafts/week-47", "hash": "4f1c9a7be2d05c6e"}}}],
    )
    distillation: DistillationSpec = Field(
        default=DistillationSpec(),
        description="Capture of traffic, and training of new drafts from it. Only storage replaces workers.",
        examples=[{"capture": {"enabled": True}, "trigger": {"mode": "Drift"}, "storage": {"claim": "drafts"}}],
    )
    tls: TlsSpec | None = Field(
        default=None,
        description="Certificate of the ports 8000 and 8001, which then serve HTTPS; the Service listens on port 443. "
        "Absent: plain HTTP, on port 80 of the Service.",
        examples=[{"secretName": "llama-tls"}],
    )
    drain: DrainSpec = Field(default=DrainSpec(), description="Shutdown of a worker.")
    storage: StorageSpec = Field(default=StorageSpec(), description="Volumes of the workers.")

    @property
    def has_own_draft(self) -> bool:
        """True if the draft runs on a device of its own."""
        return self.speculation.draft is not None and self.speculation.draft.is_own

    @property
    def worker_devices(self) -> int:
        """Number of devices that one worker asks for, with that of its draft."""
        return self.workers.devices + (self.has_own_draft and self.workers.devices > 0)

    @model_validator(mode="after")
    def _drafts_where_it_can(self) -> Self:
        if self.has_own_draft and self.engine.sampler != "coupled":
            raise ValueError(_OWN_IS_COUPLED)
        return self

    @model_validator(mode="after")
    def _can_merge(self) -> Self:
        if self.engine.sampler != "coupled" and any(task.merge for task in self.speculation.tasks):
            raise ValueError(MERGE_SAMPLER_MESSAGE)
        return self

    @model_validator(mode="after")
    def _can_try_the_candidate(self) -> Self:
        candidate, draft = self.rollout.draft.candidate, self.speculation.draft
        if candidate and self.speculation.method != "eagle3":
            raise ValueError(CANDIDATE_METHOD_MESSAGE)
        if candidate and draft and candidate.uri == draft.uri:
            raise ValueError(CANDIDATE_URI_MESSAGE)
        return self

    @model_validator(mode="after")
    def _can_distil(self) -> Self:
        if self.distillation.capture.enabled and self.speculation.method != "eagle3":
            raise ValueError(DISTILLATION_METHOD_MESSAGE)
        return self

    @model_validator(mode="after")
    def _holds_requests_while_no_worker_runs(self) -> Self:
        scaling = self.scaling
        if scaling and scaling.owner == "Operator" and not scaling.min_replicas and not self.router.replicas:
            raise ValueError(_NEEDS_ROUTERS)
        if scaling and scaling.owner == "Operator" and not scaling.min_replicas and self.router.traffic_split:
            raise ValueError(_SPLIT_NEEDS_WORKERS)
        return self
