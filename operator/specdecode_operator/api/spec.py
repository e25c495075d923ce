"""Desired state that users write: ``spec``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from specdecode_operator.api.distillation import METHOD_MESSAGE as DISTILLATION_METHOD_MESSAGE
from specdecode_operator.api.distillation import METHOD_RULE as DISTILLATION_METHOD_RULE
from specdecode_operator.api.distillation import (
    DistillationSpec,
    DraftRolloutSpec,
)
from specdecode_operator.api.schema import (
    MAX_NAME_LENGTH,
    NAME_PATTERN,
    URI_FORMS,
    Anything,
    Api,
    CountOrPercent,
    Duration,
    ModelUri,
    NameRef,
    Percent,
    Quantity,
    SecretKeyRef,
    bounds,
    named_list,
    object_in,
    rule,
    rules,
)
from specdecode_operator.api.speculation import MERGE_SAMPLER_MESSAGE, SpeculationSpec
from specdecode_operator.times import seconds_of
from specdecode_worker.contract import EngineConfig, KVCacheDtype, Sampler, TargetQuantization, adapted_uri

# Settings of the inference engine that need a restart of the workers: ``spec.engine``.

OPERATOR_FLAGS = (
    "model",
    "adapter",
    "served-model-name",
    "dtype",
    "quantization",
    "method",
    "draft",
    "draft-quantization",
    "draft-placement",
    "speculative-config",
    "depth",
    "tree",
    "device",
    "threads",
    "cache-dir",
    "host",
    "port",
    "admin-port",
    "api-key",
    "api-keys-path",
    "admin-tokens-path",
    "tls-cert-file",
    "tls-key-file",
    "chat-template",
    "endpoint-delay-seconds",
    "grace-period-seconds",
    "max-model-len",
    "max-num-seqs",
    "max-num-batched-tokens",
    "kv-cache-tokens",
    "kv-cache-dtype",
    "role",
    "block-port",
    "prefill",
    "gpu-memory-utilization",
    "tensor-parallel-size",
    "sampler",
    "help",
)
"""Flags of ``specdecode-worker serve`` that the spec has fields for, or that the operator chooses."""
REFUSED_ARGUMENT = f"^(-h|-tp|--({'|'.join(OPERATOR_FLAGS)}))(=.*)?$"
"""Arguments that ``extraArgs`` must not contain. Without multi-line text, so that ``.`` is every character."""
_MESSAGE = (
    "engine.extraArgs must not contain a flag that has a field of its own in the spec or that the operator sets "
    "(--model, --draft, --port, --api-key, --max-num-seqs, ...)"
)
# A default of an object is validated before the defaults of its fields are filled in, hence has().
_RULE = f"!has(self.extraArgs) || self.extraArgs.all(argument, !argument.matches('{REFUSED_ARGUMENT}'))"
_ENGINE = EngineConfig()


class EngineSpec(Api):
    """Settings of the engine. A change replaces the workers."""

    model_config = ConfigDict(json_schema_extra=rules(rule(_RULE, _MESSAGE)))

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of weights and arithmetic."""
    quantization: TargetQuantization | None = None
    """Quantization of the weights of the model's blocks. Absent: weights are of dtype."""
    max_model_len: int | None = Field(default=None, ge=16, le=1048576, examples=[16384])
    """Maximum tokens of prompt and answer together. Absent: the model's own limit."""
    tensor_parallel_size: int | None = Field(default=None, ge=1, le=64, examples=[4])
    """Devices that the target is split over. Absent: workers.accelerator.count, or 1 where that is 0 or absent."""
    max_num_seqs: int = Field(default=16, ge=1, le=1024)
    """Sequences that one worker runs at a time. Others wait. `specdecode-worker --device cuda` without a resource takes
    64."""
    max_num_batched_tokens: int | None = Field(default=None, ge=16, le=1048576, examples=[2048])
    """Tokens that one step computes at most, prompts included. Absent: 2048 on accelerators, else 512."""
    kv_cache_tokens: int | None = Field(default=None, ge=256, le=1073741824, examples=[131072])
    """Size of the KV cache in tokens. Absent: what the free memory allows."""
    kv_cache_dtype: KVCacheDtype = _ENGINE.kv_cache_dtype
    """Number format of the target's keys and values; auto is that of activations. fp8 rounds them."""
    memory_percent: int = Field(default=round(100 * _ENGINE.gpu_memory_utilization), ge=5, le=100)
    """Share of the accelerator's memory, or of the memory limit on CPUs, for weights and KV cache, in percent (vLLM:
    gpu-memory-utilization). `specdecode-worker --device cuda` without a resource takes 90."""
    sampler: Sampler = _ENGINE.sampler
    """How draft tokens are accepted. coupled: for one seed the text of plain decoding, within the limits of
    docs/explanation/losslessness.md. mss: multi-round sampling, with the distribution alone."""
    extra_args: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\n]+$")], ...], Field(max_length=32)
    ] = Field(default=(), examples=[["--request-timeout-seconds=600", "--max-waiting=512"]])
    """Further flags of `specdecode-worker serve`, one word an item. Flags that have a field in the spec are refused."""


# Pods of a deployment: ``spec.workers``.

_KUBERNETES_MESSAGE = "workers.accelerator.resource must be an extended resource, not one of kubernetes.io"
_STRATEGY_MESSAGE = "workers.strategy needs a maxSurge or a maxUnavailable above 0: otherwise no pod can be replaced"
Amounts = Annotated[dict[str, Quantity], Field(max_length=32)]


class AcceleratorSpec(Api):
    """Devices of one worker."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("!has(self.resource) || !self.resource.matches('^([^/]*[.])?kubernetes[.]io/')", _KUBERNETES_MESSAGE)
        )
    )

    resource: Annotated[
        str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?$", max_length=128)
    ] = Field(default="nvidia.com/gpu", examples=["nvidia.com/mig-1g.10gb"])
    """Extended resource of the device plugin. A MIG slice has a resource of its own."""
    count: int | None = Field(default=None, ge=0, le=64, examples=[4])
    """Devices of one worker. 0: CPUs, or a device that a resource claim of the template brings. Absent:
    engine.tensorParallelSize, or 1 without that."""


class ResourcesSpec(Api):
    """CPU, memory and other resources of the worker's container."""

    limits: Amounts = Field(default_factory=dict, examples=[{"cpu": "8", "memory": "48Gi"}])
    """Largest amounts. On CPUs the whole cores of the limit are the engine's threads. The accelerator is added by the
    operator."""
    requests: Amounts = Field(default_factory=dict, examples=[{"cpu": "4", "memory": "32Gi"}])
    """Amounts that are reserved on the node."""


class StrategySpec(Api):
    """Number of workers that a rolling update may add and take away at a time.

    Without any field the default depends on the devices. With an accelerator or a resource claim one worker is taken
    away first, because a cluster may have no spare device: that costs the capacity of one worker while its successor
    loads the model, and with one replica the endpoint. On CPUs one worker is added first, which costs no capacity.
    """

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.maxSurge) || !has(self.maxUnavailable)"
                " || !((self.maxSurge == 0 || self.maxSurge == '0%')"
                " && (self.maxUnavailable == 0 || self.maxUnavailable == '0%'))",
                _STRATEGY_MESSAGE,
            )
        )
    )

    max_surge: CountOrPercent | None = Field(default=None, examples=[1])
    """Workers beyond the replicas that an update may create, as a number or a percentage. Absent: 1 on CPUs, or where
    maxUnavailable is 0; else 0."""
    max_unavailable: CountOrPercent | None = Field(default=None, examples=["25%"])
    """Workers that an update may take away before their successors are ready, as a number or a percentage. Absent: 1
    with an accelerator, or where maxSurge is 0; else 0."""


class WorkersSpec(Api):
    """Pods that serve the model. Changes replace them, except of updatePolicy, recycle and strategy."""

    image: Annotated[str, Field(max_length=512)] | None = Field(
        default=None, examples=["registry.example.com/specdecode-worker:1.0"]
    )
    """Image of the workers. Absent: the operator's setting worker.image."""
    accelerator: AcceleratorSpec = Field(
        default=AcceleratorSpec(), examples=[{"resource": "nvidia.com/gpu", "count": 4}]
    )
    """Devices of one worker. count 0 runs it on CPUs."""
    resources: ResourcesSpec = ResourcesSpec()
    """CPU, memory and other resources of the worker's container. The operator adds the accelerator."""
    update_policy: Literal["OnSpecChange", "Automatic"] = "OnSpecChange"
    """When an upgrade of the operator may replace workers. OnSpecChange: with the next change of this spec. Automatic:
    at once."""
    strategy: StrategySpec = Field(default=StrategySpec(), examples=[{"maxSurge": 1, "maxUnavailable": 0}])
    """Workers that a rolling update adds and takes away at a time. Absent: with an accelerator one is taken away first,
    on CPUs one is added first."""
    recycle: Literal["Never", "OnCollapse"] = "Never"
    """OnCollapse replaces a worker whose acceptance collapses while that of its peers does not."""
    template: Anything = Field(
        default_factory=dict,
        examples=[{"spec": {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]}}],
    )
    """Pod template that is merged over the operator's. Containers are merged by name: 'worker', and the init container
    'pull'. null removes a field. Of fields that exclude each other the one that is given stays. Variables of the
    worker, and mounts of volumes that the template adds, reach pull and training Jobs too."""

    @property
    def has_claims(self) -> bool:
        """True if the template has resource claims, which may bring a device."""
        return bool(object_in(self.template, "spec").get("resourceClaims"))


# Routers before the workers of a deployment: ``spec.router``.

_SPLIT_SUM_MESSAGE = "the shares of router.trafficSplit add up to at most 100 percent"
_SPLIT_ROUTERS_MESSAGE = "router.trafficSplit needs router.replicas above 0"
_MAX_DEPLOYMENTS = 4


class TrafficShareSpec(Api):
    """Another deployment that gets a share of the traffic, for the trial of a new model."""

    deployment: Annotated[str, Field(pattern=NAME_PATTERN, max_length=MAX_NAME_LENGTH)] = Field(examples=["llama-next"])
    """Name of a SpecDecodeDeployment in the same namespace. It has the same model.servedName."""
    percent: Percent
    """Share of the conversations in percent. 0: none, also when the others have no worker."""


_SPLIT_SUM = " + ".join(
    f"(self.trafficSplit.size() > {index} ? self.trafficSplit[{index}].percent : 0)"
    for index in range(_MAX_DEPLOYMENTS)
)
"""Kubernetes 1.29 takes ``map(...).sum()`` for too costly, whatever the length of the list."""


class RouterSpec(Api):
    """Routers: one endpoint before all workers, whose streams survive their worker. Changes replace no worker."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            # A default is checked before its own defaults are filled in, so the field may be missing.
            rule(f"!has(self.trafficSplit) || {_SPLIT_SUM} <= 100", _SPLIT_SUM_MESSAGE),
            rule(
                "!has(self.trafficSplit) || self.trafficSplit.size() == 0 || self.replicas > 0", _SPLIT_ROUTERS_MESSAGE
            ),
        )
    )

    replicas: int = Field(default=2, ge=0, le=100)
    """Number of routers. 0: the Service selects the workers, clients reach them directly, and a lost worker breaks its
    streams."""
    autoscaled: bool = False
    """true: an autoscaler sets the number of routers on the Deployment NAME-router. replicas then only says whether
    there are routers."""
    hold_timeout: Duration = Field(default="10m", json_schema_extra=bounds("1s", "24h"))
    """Longest time that a request waits while no worker is ready. After scaling to zero, a worker must start in this
    time."""
    traffic_split: Annotated[
        tuple[TrafficShareSpec, ...], Field(max_length=_MAX_DEPLOYMENTS, json_schema_extra=named_list("deployment"))
    ] = Field(default=(), examples=[[{"deployment": "llama-next", "percent": 10}]])
    """Other deployments that get a share of the conversations; this one has the rest. It needs scaling.minReplicas of
    at least 1."""
    template: Anything = Field(default_factory=dict, examples=[{"spec": {"nodeSelector": {"pool": "cpu"}}}])
    """Pod template that is merged over the operator's, as workers.template. The container is 'router', on one core."""

    @property
    def hold_seconds(self) -> int:
        """Longest time that a request waits while no worker is ready, in seconds."""
        return int(seconds_of(self.hold_timeout))


# Desired state that users write: ``spec``. Its larger parts have files of their own.


class PrefillSpec(Api):
    """Prefill workers: they compute long prompts, for which the running streams of a worker would otherwise wait."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.maxReplicas) || !has(self.replicas) || self.replicas <= self.maxReplicas",
                "prefill.replicas must not exceed prefill.maxReplicas",
            )
        )
    )

    replicas: int = Field(default=0, ge=0, le=256)
    """Number of prefill workers, or the least one with maxReplicas. They have the pods of the workers and are in no
    Service. Tasks that merge drafts with weights do not use them."""
    max_replicas: int | None = Field(default=None, ge=1, le=256, examples=[4])
    """Largest number of prefill workers, which then follows the prompt tokens that no cache has. Absent: it is
    replicas."""

    @property
    def is_used(self) -> bool:
        """True if the deployment can have prefill workers."""
        return self.replicas > 0 or self.max_replicas is not None


_PREFILL_IS_SHARED = "speculation.draft.placement Own keeps the draft's keys in another process; prefill needs Shared"
_PREFILL_DRAFT_RULE = (
    "!has(self.prefill)"
    " || (!has(self.prefill.maxReplicas) && (!has(self.prefill.replicas) || self.prefill.replicas == 0))"
    " || !has(self.speculation) || !has(self.speculation.draft) || !has(self.speculation.draft.placement)"
    " || self.speculation.draft.placement == 'Shared'"
)
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


class ModelSpec(Api):
    """Target model: the one whose text is served."""

    uri: ModelUri = Field(
        description=f"Where the model comes from: {URI_FORMS}.",
        examples=["hf://meta-llama/Llama-3.1-8B-Instruct@0e9e39f249a16976918f6564b8830bc894c89659"],
    )
    adapter: ModelUri | None = Field(default=None, examples=["pvc://adapters/support"])
    """Where a LoRA adapter of the target comes from, in PEFT's format, as uri. It is read with the model's token and
    merged into the weights when they are loaded. Absent: none."""
    served_name: Annotated[str, Field(max_length=128, min_length=1)] | None = Field(
        default=None, examples=["llama-3.1-8b"]
    )
    """Name of the model in the OpenAI API. Absent: the last part of the uri."""
    chat_template: Annotated[str, Field(max_length=65536, pattern="[{]")] | None = Field(
        default=None,
        examples=["{% for message in messages %}...{% endfor %}"],  # without the braces that Helm reads
    )
    """Text of a chat template, in Jinja. Absent: the template of the model's folder."""
    token_secret_ref: SecretKeyRef | None = Field(default=None, examples=[{"name": "hub-token"}])
    """Token of the hub, for gated models. Only the download sees it. Absent: models are downloaded without a token."""

    @property
    def target(self) -> str:
        """URI of what is served: the model, with its adapter."""
        return adapted_uri(self.uri, self.adapter)


class ScalingSpec(Api):
    """Owner of the number of workers, and its bounds."""

    model_config = ConfigDict(
        json_schema_extra=rules(rule("self.minReplicas <= self.maxReplicas", "minReplicas must not exceed maxReplicas"))
    )

    owner: Literal["Operator", "External"] = "Operator"
    """Operator: the number of workers follows demand. External: kubectl scale, an HPA or KEDA sets it."""
    min_replicas: int = Field(default=1, ge=0, le=1000)
    """Least number of workers. 0: without requests for idleAfter no worker runs, and routers, which it needs, hold the
    next requests while one starts."""
    max_replicas: int = Field(default=4, ge=1, le=1000)
    """Largest number of workers."""
    scale_down_window: Duration = Field(default="5m", json_schema_extra=bounds("0s", "24h"))
    """Time for which demand must stay low before a worker is removed. The highest demand in it counts."""
    idle_after: Duration = Field(default="5m", json_schema_extra=bounds("10s", "168h"))
    """Time without requests after which the last workers are removed, where minReplicas is 0."""

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

    endpoint_delay: Duration = Field(default="5s", json_schema_extra=bounds("0s", "5m"))
    """Time after SIGTERM during which new requests are served, until no endpoint lists the pod."""
    grace_period: Duration = Field(default="60s", json_schema_extra=bounds("1s", "2h"))
    """Time after that for running requests to finish. Requests that came by a router do not need it: they move to
    another worker at SIGTERM."""

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
        default=None, examples=["keys.txt"]
    )
    """Entry that lists all API keys, one `name=key` or `key` a line; tenants.json is then not read. Absent: each entry
    is named after a client and has its keys, one a line. The entry tenants.json is no key."""


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
            rule(_PREFILL_DRAFT_RULE, _PREFILL_IS_SHARED),
            rule(_SPLIT_HAS_WORKERS, _SPLIT_NEEDS_WORKERS),
            rule(DISTILLATION_METHOD_RULE, DISTILLATION_METHOD_MESSAGE),
            rule(
                "!has(self.engine) || self.engine.sampler == 'coupled' || !has(self.speculation)"
                " || self.speculation.tasks.all(task, task.merge.size() == 0)",
                MERGE_SAMPLER_MESSAGE,
            ),
        )
    )

    model: ModelSpec = Field(examples=[{"uri": "hf://meta-llama/Llama-3.1-8B-Instruct"}])
    """Target model: the one whose text is served."""
    speculation: SpeculationSpec = Field(
        default_factory=lambda: SpeculationSpec(method="none"),
        examples=[{"method": "eagle3", "draft": {"uri": "hf://yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}}],
    )
    """How tokens are drafted, and what decides how many. Absent: plain decoding."""
    engine: EngineSpec = EngineSpec()
    """Settings of the inference engine. A change replaces the workers."""
    replicas: int = Field(default=1, ge=0, le=1000)
    """Number of workers. With scaling.owner Operator it is only the number to start with."""
    scaling: ScalingSpec | None = Field(
        default=None, examples=[{"owner": "Operator", "minReplicas": 1, "maxReplicas": 4}]
    )
    """Owner and bounds of the number of workers. Absent: there are as many workers as replicas says."""
    prefill: PrefillSpec = Field(default=PrefillSpec(), examples=[{"replicas": 1}])
    """Prefill workers, which keep long prompts away from running streams. No change replaces a worker."""
    paused: bool = False
    """true: the operator changes nothing of this deployment, whatever the spec says. Workers and routers serve on with
    the plan that they have."""
    workers: WorkersSpec = WorkersSpec()
    """Pods that serve the model."""
    router: RouterSpec = Field(default=RouterSpec(), examples=[{"replicas": 3}])
    """Routers before the workers: one endpoint whose streams survive their worker."""
    image_pull_secrets: Annotated[tuple[NameRef, ...], Field(max_length=8, json_schema_extra=named_list("name"))] = (
        Field(default=(), examples=[[{"name": "registry"}]])
    )
    """Secrets with the credentials of the images' registry, for workers, routers and training Jobs."""
    api_keys_secret_ref: ApiKeysRef | None = Field(default=None, examples=[{"name": "llama-keys"}])
    """API keys of the public port. Absent: every client is served."""
    tls_secret_ref: NameRef | None = Field(default=None, examples=[{"name": "llama-tls"}])
    """Certificate of the ports 8000 and 8001, a Secret of type kubernetes.io/tls; the Service then listens on port 443.
    Absent: HTTP, on port 80 of the Service."""
    drain: DrainSpec = DrainSpec()
    """Shutdown of a worker, and of a router."""
    model_cache: Anything | None = Field(
        default=None, examples=[{"persistentVolumeClaim": {"claimName": "llama-cache"}}]
    )
    """Volume of downloaded models: the source of a volume as in a pod, writable for the workers' user. Absent: the
    operator's setting worker.modelCache, an emptyDir with a sizeLimit of 64Gi."""
    prefetch_node_selector: Annotated[dict[str, str], Field(min_length=1, max_length=16)] | None = Field(
        default=None, examples=[{"models": "llama"}]
    )
    """Labels of the nodes on which a DaemonSet downloads the models before a worker starts there. It needs
    modelCache.hostPath, that is Pod Security level privileged. Absent: there is none."""
    draft_rollout: DraftRolloutSpec = Field(default=DraftRolloutSpec(), examples=[{"mode": "Manual"}])
    """Way of a new draft, a SpecDecodeDraft, into service. No change of it replaces workers."""
    distillation: DistillationSpec = Field(
        default=DistillationSpec(),
        examples=[{"capture": {}, "trigger": {"mode": "Drift"}, "storage": {"uri": "pvc://drafts"}}],
    )
    """Capture of traffic, and training of new drafts from it. Only storage replaces workers."""

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
