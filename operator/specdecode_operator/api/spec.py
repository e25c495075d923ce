"""Desired state that users write: ``spec``. Its larger parts have files of their own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from specdecode_operator.api.distillation import METHOD_MESSAGE as DISTILLATION_METHOD_MESSAGE
from specdecode_operator.api.distillation import METHOD_RULE as DISTILLATION_METHOD_RULE
from specdecode_operator.api.distillation import DistillationSpec
from specdecode_operator.api.draft_rollout import (
    CANDIDATE_METHOD_MESSAGE,
    CANDIDATE_METHOD_RULE,
    CANDIDATE_URI_MESSAGE,
    CANDIDATE_URI_RULE,
    DraftRolloutSpec,
)
from specdecode_operator.api.engine import EngineSpec
from specdecode_operator.api.router import RouterSpec
from specdecode_operator.api.schema import (
    URI_FORMS,
    Anything,
    Api,
    Duration,
    ModelUri,
    NameRef,
    SecretKeyRef,
    bounds,
    named_list,
    rule,
    rules,
    seconds_of,
)
from specdecode_operator.api.speculation import MERGE_SAMPLER_MESSAGE, SpeculationSpec
from specdecode_operator.api.workers import WorkersSpec
from specdecode_worker.contract import EngineConfig, adapted_uri

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
_RANKS_MESSAGE = (
    "engine.tensorParallelSize must equal workers.accelerator.count, unless that is 0; leave one of them out"
)
_RANKS_RULE = (
    "!has(self.engine) || !has(self.engine.tensorParallelSize) || !has(self.workers)"
    " || !has(self.workers.accelerator) || !has(self.workers.accelerator.count)"
    " || self.workers.accelerator.count in [0, self.engine.tensorParallelSize]"
)
_NONE = (0, "0%")


class AdapterSpec(Api):
    """LoRA adapter of the target, in PEFT's format. It is merged into the weights when they are loaded."""

    uri: ModelUri = Field(
        description=f"Where the adapter comes from: {URI_FORMS}. It is read with the token or key of the model.",
        examples=["pvc://adapters/support"],
    )


class ModelSpec(Api):
    """Target model: the one whose text is served."""

    uri: ModelUri = Field(
        description=f"Where the model comes from: {URI_FORMS}.",
        examples=["hf://meta-llama/Llama-3.1-8B-Instruct@0e9e39f249a16976918f6564b8830bc894c89659"],
    )
    adapter: AdapterSpec | None = Field(
        default=None,
        description="LoRA adapter of the target, in PEFT's format. It is merged into the weights when they are loaded.",
        examples=[{"uri": "pvc://adapters/support"}],
    )
    served_name: Annotated[str, Field(max_length=128, min_length=1)] | None = Field(
        default=None,
        description="Name of the model in the OpenAI API. Absent: the last part of the uri.",
        examples=["llama-3.1-8b"],
    )
    chat_template: Annotated[str, Field(max_length=65536, pattern="[{]")] | None = Field(
        default=None,
        description="Text of a chat template, in Jinja. Absent: the template of the model's folder.",
        examples=["{% for message in messages %}...{% endfor %}"],  # without the braces that Helm reads
    )
    token_secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="Token of the hub, for gated models. Only the download sees it. Absent: models are downloaded "
        "without a token.",
        examples=[{"name": "hub-token"}],
    )

    @property
    def target(self) -> str:
        """URI of what is served: the model, with its adapter."""
        return adapted_uri(self.uri, self.adapter.uri if self.adapter else None)


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
        description="Least number of workers. 0: without requests for idleAfter no worker runs, and routers hold the "
        "next requests while one starts. It needs router.replicas above 0.",
    )
    max_replicas: int = Field(default=4, ge=1, le=1000, description="Largest number of workers.")
    scale_down_window: Duration = Field(
        default="5m",
        description="Time for which demand must stay low before a worker is removed. The highest demand in it counts.",
        json_schema_extra=bounds("0s", "24h"),
    )
    idle_after: Duration = Field(
        default="5m",
        description="Time without requests after which the last workers are removed, where minReplicas is 0.",
        json_schema_extra=bounds("10s", "168h"),
    )

    @property
    def scale_down_window_seconds(self) -> int:
        """Time for which demand must stay low before a worker is removed, in seconds."""
        return int(seconds_of(self.scale_down_window))

    @property
    def idle_seconds(self) -> int:
        """Time without requests after which the last workers are removed, in seconds."""
        return int(seconds_of(self.idle_after))


class DrainSpec(Api):
    """Shutdown of a worker, and of a router."""

    endpoint_delay: Duration = Field(
        default="5s",
        description="Time after SIGTERM during which new requests are served, until no endpoint lists the pod.",
        json_schema_extra=bounds("0s", "5m"),
    )
    grace_period: Duration = Field(
        default="60s",
        description="Time after that for running requests to finish.",
        json_schema_extra=bounds("1s", "2h"),
    )

    @property
    def endpoint_delay_seconds(self) -> int:
        """Time after SIGTERM during which new requests are served, in seconds."""
        return int(seconds_of(self.endpoint_delay))

    @property
    def grace_period_seconds(self) -> int:
        """Time after that for running requests to finish, in seconds."""
        return int(seconds_of(self.grace_period))


class ApiKeysRef(NameRef):
    """Secret with the API keys of the public port. It is read again when it changes, without a restart."""

    key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", max_length=253)] | None = Field(
        default=None,
        description="Entry that lists all API keys, one `name=key` or `key` a line. Absent: every entry of the Secret "
        "is one API key, and its name is the client's name.",
        examples=["keys.txt"],
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
            rule(_RANKS_RULE, _RANKS_MESSAGE),
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
    engine: EngineSpec = Field(
        default=EngineSpec(), description="Settings of the inference engine. A change replaces the workers."
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
    paused: bool = Field(
        default=False,
        description="true: the operator changes nothing of this deployment, whatever the spec says. Workers and "
        "routers serve on with the plan that they have.",
    )
    workers: WorkersSpec = Field(default=WorkersSpec(), description="Pods that serve the model.")
    router: RouterSpec = Field(
        default=RouterSpec(),
        description="Routers before the workers: one endpoint whose streams survive their worker.",
        examples=[{"replicas": 3}],
    )
    image_pull_secrets: Annotated[tuple[NameRef, ...], Field(max_length=8, json_schema_extra=named_list("name"))] = (
        Field(
            default=(),
            description="Secrets with the credentials of the images' registry, for workers, routers and training Jobs.",
            examples=[[{"name": "registry"}]],
        )
    )
    api_keys_secret_ref: ApiKeysRef | None = Field(
        default=None,
        description="API keys of the public port. Absent: every client is served.",
        examples=[{"name": "llama-keys"}],
    )
    tls_secret_ref: NameRef | None = Field(
        default=None,
        description="Certificate of the ports 8000 and 8001, which then serve HTTPS; the Service listens on port 443. "
        "It is a Secret of type kubernetes.io/tls, as cert-manager writes it; a renewed certificate is loaded without "
        "a restart. Absent: plain HTTP, on port 80 of the Service.",
        examples=[{"name": "llama-tls"}],
    )
    drain: DrainSpec = Field(default=DrainSpec(), description="Shutdown of a worker, and of a router.")
    model_cache: Anything | None = Field(
        default=None,
        description="Volume of downloaded models: the source of a volume as in a pod. The folder must be writable for "
        "the workers' user, 65532 unless the namespace assigns another. Absent: the operator's setting "
        "worker.modelCache, an emptyDir with a sizeLimit of 64Gi.",
        examples=[{"persistentVolumeClaim": {"claimName": "llama-cache"}}],
    )
    draft_rollout: DraftRolloutSpec = Field(
        default=DraftRolloutSpec(),
        description="Way of a new draft into service. No change of it replaces workers.",
        examples=[{"candidate": {"uri": "pvc://drafts/week-47", "hash": "4f1c9a7be2d05c6e"}}],
    )
    distillation: DistillationSpec = Field(
        default=DistillationSpec(),
        description="Capture of traffic, and training of new drafts from it. Only storage replaces workers.",
        examples=[{"capture": {}, "trigger": {"mode": "Drift"}, "storage": {"uri": "pvc://drafts"}}],
    )

    @property
    def devices(self) -> int:
        """Number of devices of the accelerator's resource that the target of one worker asks for."""
        count = self.workers.accelerator.count
        return (self.engine.tensor_parallel_size or 1) if count is None else count

    @property
    def has_own_draft(self) -> bool:
        """True if the draft runs on a device of its own."""
        return self.speculation.draft is not None and self.speculation.draft.is_own

    @property
    def worker_devices(self) -> int:
        """Number of devices that one worker asks for, with that of its draft."""
        return self.devices + (self.has_own_draft and self.devices > 0)

    @property
    def ranks(self) -> int:
        """Number of devices, or of processes on CPUs, that the target is split over."""
        return self.engine.tensor_parallel_size or max(1, self.devices)

    @property
    def step_tokens(self) -> int:
        """Tokens that one step computes at most."""
        engine = EngineConfig(device="cuda" if self.devices else "cpu")
        return self.engine.max_num_batched_tokens or engine.max_num_batched_tokens

    @property
    def max_surge(self) -> int | str:
        """Workers beyond the replicas during a rolling update, with the default applied."""
        surge, unavailable = self.workers.strategy.max_surge, self.workers.strategy.max_unavailable
        if surge is not None:
            return surge
        scarce = bool(self.devices or self.workers.has_claims)
        return int(not scarce if unavailable is None else unavailable in _NONE)

    @property
    def max_unavailable(self) -> int | str:
        """Missing workers during a rolling update, with the default applied."""
        unavailable = self.workers.strategy.max_unavailable
        return int(self.max_surge in _NONE) if unavailable is None else unavailable
