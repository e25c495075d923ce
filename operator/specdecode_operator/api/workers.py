"""Pods of a deployment: ``spec.workers``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from specdecode_operator.api.schema import Anything, Api, CountOrPercent, Quantity, object_in, rule, rules

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
    ] = Field(
        default="nvidia.com/gpu",
        description="Extended resource of the device plugin. A MIG slice has a resource of its own.",
        examples=["nvidia.com/mig-1g.10gb"],
    )
    count: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Devices of one worker. 0 asks for none: the worker runs on CPUs, or on a device that a resource "
        "claim of the template brings. Absent: engine.tensorParallelSize, or 1 without that.",
        examples=[4],
    )


class ResourcesSpec(Api):
    """CPU, memory and other resources of the worker's container."""

    limits: Amounts = Field(
        default_factory=dict,
        description="Largest amounts. On CPUs the whole cores of the limit are the engine's threads. The accelerator "
        "is added by the operator.",
        examples=[{"cpu": "8", "memory": "48Gi"}],
    )
    requests: Amounts = Field(
        default_factory=dict,
        description="Amounts that are reserved on the node.",
        examples=[{"cpu": "4", "memory": "32Gi"}],
    )


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

    max_surge: CountOrPercent | None = Field(
        default=None,
        description="Workers beyond the replicas that an update may create, as a number or a percentage. Each needs a "
        "spare accelerator. Absent: 1 where maxUnavailable is 0, or where it is absent too and the workers run on "
        "CPUs; else 0.",
        examples=[1],
    )
    max_unavailable: CountOrPercent | None = Field(
        default=None,
        description="Workers that an update may take away before their successors are ready, as a number or a "
        "percentage. Absent: 1 where maxSurge is 0, or where it is absent too and the workers have an accelerator; "
        "else 0.",
        examples=["25%"],
    )


class WorkersSpec(Api):
    """Pods that serve the model. Changes replace them, except of updatePolicy, recycle and strategy."""

    image: Annotated[str, Field(max_length=512)] | None = Field(
        default=None,
        description="Image of the workers. Absent: the operator's setting worker.image.",
        examples=["registry.example.com/specdecode-worker:1.0"],
    )
    accelerator: AcceleratorSpec = Field(
        default=AcceleratorSpec(),
        description="Devices of one worker. count 0 runs it on CPUs.",
        examples=[{"resource": "nvidia.com/gpu", "count": 4}],
    )
    resources: ResourcesSpec = Field(
        default=ResourcesSpec(),
        description="CPU, memory and other resources of the worker's container. The operator adds the accelerator.",
    )
    update_policy: Literal["OnSpecChange", "Automatic"] = Field(
        default="OnSpecChange",
        description="When an upgrade of the operator may replace workers. OnSpecChange: with the next change of this "
        "spec. Automatic: at once.",
    )
    strategy: StrategySpec = Field(
        default=StrategySpec(),
        description="Workers that a rolling update adds and takes away at a time. Absent: with an accelerator one is "
        "taken away first, which needs no spare device and costs the capacity of one worker while its successor "
        "loads; on CPUs one is added first.",
        examples=[{"maxSurge": 1, "maxUnavailable": 0}],
    )
    recycle: Literal["Never", "OnCollapse"] = Field(
        default="Never",
        description="OnCollapse replaces a worker whose acceptance collapses while that of its peers does not.",
    )
    template: Anything = Field(
        default_factory=dict,
        description="Pod template that is merged over the operator's, for everything of a pod that has no field of its "
        "own: node selector, tolerations, affinity, resource claims, variables, volumes. Containers are merged by "
        "name: 'worker', and the init container 'pull'. null removes a field. Of fields that exclude each other, such "
        "as the sources of a volume, the one that is given stays. Variables of the worker, and mounts of volumes that "
        "the template adds, reach pull and training Jobs too, for proxies, certificates and mirrors.",
        examples=[{"spec": {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]}}],
    )

    @property
    def has_claims(self) -> bool:
        """True if the template has resource claims, which may bring a device."""
        return bool(object_in(self.template, "spec").get("resourceClaims"))
