"""What users write: ``spec``. Speculation has a file of its own."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from specdecode_operator.api.schema import Anything, Api, ModelUri, Name, rule, rules
from specdecode_operator.api.speculation import SpeculationSpec
from specdecode_worker.contract import TargetQuantization

_ONE_DEVICE = "model.quantization needs workers.tensorParallelSize 1"


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
    quantization: TargetQuantization | None = Field(
        default=None, description="Of the weights of its blocks; as dtype when absent. Needs tensorParallelSize 1."
    )
    max_model_len: int | None = Field(
        default=None, ge=16, le=1048576, description="Tokens of prompt and answer; the model's limit when absent."
    )
    token_secret_ref: SecretKeyRef | None = Field(default=None, description="Hub token for gated models.")


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
            },
            rule("!has(self.model.quantization) || self.workers.tensorParallelSize == 1", _ONE_DEVICE),
        )
    )

    model: ModelSpec
    speculation: SpeculationSpec = Field(default_factory=lambda: SpeculationSpec(method="none"))
    replicas: int = Field(default=1, ge=0, le=1000, description="Workers, unless scaling.owner is Operator.")
    scaling: ScalingSpec | None = Field(default=None, description="Absent: replicas are followed as written.")
    workers: WorkersSpec = WorkersSpec()
    drain: DrainSpec = DrainSpec()
    storage: StorageSpec = StorageSpec()

    @model_validator(mode="after")
    def _splits_what_it_can(self) -> Self:
        if self.model.quantization and self.workers.tensor_parallel_size > 1:
            raise ValueError(_ONE_DEVICE)
        return self


# --- status -------------------------------------------------------------------------------------------------------
