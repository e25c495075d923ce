"""Pods of a deployment: ``spec.workers``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from specdecode_operator.api.devices import AcceleratorSpec, ResourceClaimSpec, ResourcesSpec
from specdecode_operator.api.schema import (
    Anything,
    Api,
    CountOrPercent,
    Name,
    rule,
    rules,
)
from specdecode_worker.contract import EngineConfig

RESERVED_ENV = ("SPECDECODE_CONFIG", "SPECDECODE_PLAN_PATH", "POD_NAME")
"""Environment variables that the operator sets and that must not be replaced."""
_RESERVED_MESSAGE = f"workers.env must not set {', '.join(RESERVED_ENV)}: the operator sets them"
_SPLIT_MESSAGE = (
    "workers.tensorParallelSize must equal workers.accelerator.count, unless that is 0; leave one of them out"
)
_ROLLOUT_MESSAGE = "workers.rollout needs a maxSurge or a maxUnavailable above 0: otherwise no pod can be replaced"

Objects = Annotated[tuple[Anything, ...], Field(max_length=32)]
"""List of objects that the API server validates."""


def _map(key: str) -> dict[str, Any]:
    """Return the schema of a list whose items are identified, and merged by kubectl, by ``key``."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


class EnvVarSpec(Api):
    """Environment variable of the worker's container."""

    name: Annotated[str, Field(pattern="^[-._a-zA-Z][-._a-zA-Z0-9]*$", max_length=256)] = Field(
        description="Name of the variable.", examples=["NCCL_DEBUG"]
    )
    value: Annotated[str, Field(max_length=8192)] | None = Field(
        default=None, description="Value of the variable. Absent: valueFrom, or the empty text.", examples=["WARN"]
    )
    value_from: Anything | None = Field(
        default=None,
        description="Source of the value, as in a container. Absent: value is used.",
        examples=[{"secretKeyRef": {"name": "proxy", "key": "url"}}],
    )


class RolloutSpec(Api):
    """Number of workers that a change of the spec may add and take away at a time.

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
                _ROLLOUT_MESSAGE,
            )
        )
    )

    max_surge: CountOrPercent | None = Field(
        default=None,
        description="Workers beyond the replicas that a rollout may create, as a number or a percentage. Each needs a "
        "spare accelerator. Absent: 1 where maxUnavailable is 0, or where it is absent too and the workers run on "
        "CPUs; else 0.",
        examples=[1],
    )
    max_unavailable: CountOrPercent | None = Field(
        default=None,
        description="Workers that a rollout may take away before their successors are ready, as a number or a "
        "percentage. Absent: 1 where maxSurge is 0, or where it is absent too and the workers have an accelerator; "
        "else 0.",
        examples=["25%"],
    )

    @model_validator(mode="after")
    def _makes_progress(self) -> Self:
        if self.max_surge in (0, "0%") and self.max_unavailable in (0, "0%"):
            raise ValueError(_ROLLOUT_MESSAGE)
        return self


class ApiKeysSecretRef(Api):
    """Secret with the API keys of the public port. Workers read it again when it changes, without a restart."""

    name: Name = Field(description="Secret in the same namespace.", examples=["llama-keys"])
    key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", max_length=253)] | None = Field(
        default=None,
        description="Entry that lists all API keys, one `name=key` or `key` a line. Absent: every entry of the Secret "
        "is one API key, and its name is the client's name.",
        examples=["keys.txt"],
    )


class SchedulingSpec(Api):
    """Pod fields for scheduling and identity: node selection, priority, service account and runtime class."""

    node_selector: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)] = Field(
        default_factory=dict,
        description="Labels that a node must have.",
        examples=[{"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}],
    )
    tolerations: Objects = Field(
        default=(),
        description="Taints of nodes that the pods tolerate, as in a pod.",
        examples=[[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]],
    )
    affinity: Anything | None = Field(
        default=None,
        description="Affinity to nodes and pods, as in a pod. Absent: none.",
        examples=[{"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": ["..."]}}}],
    )
    topology_spread_constraints: Objects = Field(
        default=(),
        description="Spread of the pods over nodes or zones, as in a pod. A constraint without a labelSelector counts "
        "the workers of this deployment.",
        examples=[
            [{"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}],
        ],
    )
    priority_class_name: Name | None = Field(
        default=None, description="PriorityClass of the pods. Absent: the cluster's default.", examples=["serving"]
    )
    service_account_name: Name | None = Field(
        default=None,
        description="ServiceAccount of the pods, whose token is not mounted. Absent: default.",
        examples=["model-reader"],
    )
    runtime_class_name: Name | None = Field(
        default=None, description="RuntimeClass of the pods. Absent: the cluster's default.", examples=["nvidia"]
    )


class WorkersSpec(SchedulingSpec):
    """Pods that serve the model. Changes replace them, except of updatePolicy, recycle and rollout."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.tensorParallelSize) || !has(self.accelerator) || !has(self.accelerator.count)"
                " || self.accelerator.count in [0, self.tensorParallelSize]",
                _SPLIT_MESSAGE,
            ),
            rule(f"!has(self.env) || self.env.all(one, !(one.name in {list(RESERVED_ENV)}))", _RESERVED_MESSAGE),
        )
    )

    image: Annotated[str, Field(max_length=512)] | None = Field(
        default=None,
        description="Image of the workers. Absent: the operator's setting worker.image.",
        examples=["registry.example.com/specdecode-worker:1.0"],
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="When nodes pull the image. Absent: the operator's setting worker.imagePullPolicy."
    )
    image_pull_secrets: Annotated[tuple[Name, ...], Field(max_length=8)] = Field(
        default=(), description="Secrets with the credentials of the image's registry.", examples=[["registry"]]
    )
    accelerator: AcceleratorSpec = Field(
        default=AcceleratorSpec(),
        description="Devices of one worker. count 0 runs it on CPUs.",
        examples=[{"resource": "nvidia.com/gpu", "count": 4}],
    )
    resource_claims: Annotated[tuple[ResourceClaimSpec, ...], Field(max_length=8, json_schema_extra=_map("name"))] = (
        Field(
            default=(),
            description="Devices that are allocated for each worker by dynamic resource allocation, in addition to the "
            "accelerator. Set accelerator.count to 0 where a claim brings the GPU.",
        )
    )
    gpu: bool | None = Field(
        default=None,
        description="Deprecated, and removed in the next version of the API. false means accelerator.count 0 where "
        "that is absent. Absent: accelerator decides.",
    )
    tensor_parallel_size: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Devices that the target is split over. Absent: accelerator.count, or 1 where that is 0 or absent.",
        examples=[4],
    )
    resources: ResourcesSpec = Field(
        default=ResourcesSpec(),
        description="CPU, memory and other resources of the worker's container. The operator adds the accelerator.",
    )
    max_num_seqs: int = Field(
        default=16, ge=1, le=1024, description="Sequences that one worker runs at a time. Others wait."
    )
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=16,
        le=1048576,
        description="Tokens that one step computes at most, prompts included. Absent: 2048 on accelerators, else 512.",
        examples=[2048],
    )
    kv_cache_tokens: int | None = Field(
        default=None,
        ge=256,
        le=1073741824,
        description="Size of the KV cache in tokens. Absent: what the free memory allows.",
        examples=[131072],
    )
    update_policy: Literal["OnSpecChange", "Automatic"] = Field(
        default="OnSpecChange",
        description="When an upgrade of the operator may replace workers. OnSpecChange: with the next change of this "
        "spec. Automatic: at once.",
    )
    rollout: RolloutSpec = Field(
        default=RolloutSpec(),
        description="Workers that a rollout adds and takes away at a time. Absent: with an accelerator one is taken "
        "away first, which needs no spare device and costs the capacity of one worker while its successor loads; on "
        "CPUs one is added first.",
        examples=[{"maxSurge": 1, "maxUnavailable": 0}],
    )
    recycle: Literal["Never", "OnCollapse"] = Field(
        default="Never",
        description="OnCollapse replaces a worker whose acceptance collapses while that of its peers does not.",
    )
    api_keys_secret_ref: ApiKeysSecretRef | None = Field(
        default=None,
        description="API keys of the public port. Absent: every client is served.",
        examples=[{"name": "llama-keys"}],
    )
    env: Annotated[tuple[EnvVarSpec, ...], Field(max_length=64, json_schema_extra=_map("name"))] = Field(
        default=(),
        description="Environment variables of the worker's container. They replace those of the same name that the "
        f"operator sets, except {', '.join(RESERVED_ENV)}, which are refused. The init container pull and "
        "training Jobs get them too, for proxies, certificates and mirrors, except those that the operator sets there.",
        examples=[[{"name": "NCCL_DEBUG", "value": "WARN"}]],
    )
    env_from: Objects = Field(
        default=(),
        description="ConfigMaps and Secrets whose entries become environment variables, as in a container, "
        "of the worker, of the init container pull and of training Jobs.",
        examples=[[{"secretRef": {"name": "proxy"}}]],
    )
    template: Anything = Field(
        default_factory=dict,
        description="Pod template that is merged over the operator's, for everything that has no field of its own. "
        "Containers are merged by name: 'worker', and the init container 'pull'. null removes a field. Of fields "
        "that exclude each other, such as the sources of a volume, the one that is given stays. Variables of the "
        "worker, and mounts of volumes that the template adds, reach pull and training Jobs too, as those of env.",
        examples=[{"metadata": {"annotations": {"team": "search"}}}],
    )

    @property
    def devices(self) -> int:
        """Number of devices of the accelerator's resource that one worker asks for."""
        if self.accelerator.count is not None:
            return self.accelerator.count
        return 0 if self.gpu is False else self.tensor_parallel_size or 1

    @property
    def step_tokens(self) -> int:
        """Tokens that one step computes at most."""
        engine = EngineConfig(device="cuda" if self.devices else "cpu")
        return self.max_num_batched_tokens or engine.max_num_batched_tokens

    @property
    def ranks(self) -> int:
        """Number of devices, or of processes on CPUs, that the target is split over."""
        return self.tensor_parallel_size or max(1, self.devices)

    @property
    def max_surge(self) -> int | str:
        """Workers beyond the replicas during a rollout, with the default applied."""
        surge, unavailable = self.rollout.max_surge, self.rollout.max_unavailable
        if surge is not None:
            return surge
        scarce = bool(self.devices or self.resource_claims)
        return int(not scarce if unavailable is None else unavailable in (0, "0%"))

    @property
    def max_unavailable(self) -> int | str:
        """Missing workers during a rollout, with the default applied."""
        unavailable = self.rollout.max_unavailable
        return int(self.max_surge in (0, "0%")) if unavailable is None else unavailable

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.tensor_parallel_size is not None and self.devices not in (0, self.tensor_parallel_size):
            raise ValueError(_SPLIT_MESSAGE)
        if any(variable.name in RESERVED_ENV for variable in self.env):
            raise ValueError(_RESERVED_MESSAGE)
        for field, names in (
            ("env", [variable.name for variable in self.env]),
            ("resourceClaims", [claim.name for claim in self.resource_claims]),
        ):
            if len(set(names)) < len(names):
                raise ValueError(f"Duplicate value: every item of workers.{field} needs a name of its own")
        return self
