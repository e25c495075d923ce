"""Devices, CPU and memory of a worker: ``spec.workers.accelerator``, ``resourceClaims`` and ``resources``."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from specdecode_operator.api.schema import Api, LabelName, Name, Quantity, rule, rules

_KUBERNETES_MESSAGE = "workers.accelerator.resource must be an extended resource, not one of kubernetes.io"
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
        description="Devices of one worker. 0 asks for none: the worker runs on CPUs, or on a device that "
        "workers.resourceClaims brings. Absent: workers.tensorParallelSize, or 1 without that.",
        examples=[4],
    )

    @model_validator(mode="after")
    def _is_extended(self) -> Self:
        domain = self.resource.partition("/")[0]
        if domain == "kubernetes.io" or domain.endswith(".kubernetes.io"):
            raise ValueError(_KUBERNETES_MESSAGE)
        return self


class ResourceClaimSpec(Api):
    """Device that is allocated for each pod (dynamic resource allocation)."""

    name: LabelName = Field(description="Name of the claim within the pod.", examples=["gpu"])
    resource_claim_template_name: Name = Field(
        description="ResourceClaimTemplate in the same namespace, of which every pod gets a claim.",
        examples=["one-h100"],
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
