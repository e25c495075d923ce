"""Routers before the workers of a deployment: ``spec.router``."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from specdecode_operator.api.devices import Amounts
from specdecode_operator.api.schema import MAX_NAME_LENGTH, NAME_PATTERN, Anything, Api, Name, rule, rules

_SUSPICION_MESSAGE = "router.suspicion needs minSeconds <= maxSeconds"
_SPLIT_ONCE_MESSAGE = "router.trafficSplit names every deployment once"
_SPLIT_SUM_MESSAGE = "the shares of router.trafficSplit add up to at most 100 percent"
_SPLIT_ROUTERS_MESSAGE = "router.trafficSplit needs router.replicas above 0"
_MAX_DEPLOYMENTS = 4
_Objects = Annotated[tuple[Anything, ...], Field(max_length=32)]


class SuspicionSpec(Api):
    """Bounds of the silence after which a router asks a second worker for the rest of a request."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.minSeconds) || !has(self.maxSeconds) || self.minSeconds <= self.maxSeconds",
                _SUSPICION_MESSAGE,
            )
        )
    )

    min_seconds: float = Field(
        default=1, ge=0.25, le=600, description="Least silence of a worker that is suspected, in seconds."
    )
    max_seconds: float = Field(
        default=10,
        ge=0.25,
        le=600,
        description="Longest silence that is tolerated, in seconds, however long the worker's steps take.",
    )

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.min_seconds > self.max_seconds:
            raise ValueError(_SUSPICION_MESSAGE)
        return self


class TrafficShareSpec(Api):
    """Another deployment that gets a share of the traffic, for the trial of a new model."""

    deployment: Annotated[str, Field(pattern=NAME_PATTERN, max_length=MAX_NAME_LENGTH)] = Field(
        description="Name of a SpecDecodeDeployment in the same namespace. It has the same model.servedName.",
        examples=["llama-next"],
    )
    percent: int = Field(
        ge=0,
        le=100,
        description="Share of the conversations in percent. 0: none, also when the others have no worker.",
    )


class TracingSpec(Api):
    """Spans of requests and of their attempts on workers, sent to an OpenTelemetry collector."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+(/\S*)?$", max_length=512)] = Field(
        description="Base URL of a collector that receives OTLP over HTTP; /v1/traces is added to it.",
        examples=["http://otel-collector.observability.svc:4318"],
    )
    sample_percent: float = Field(
        default=100,
        ge=0,
        le=100,
        description="Share of the traces that are recorded, in percent. A client with a traceparent decides itself.",
    )


class RouterResourcesSpec(Api):
    """CPU, memory and other resources of the router's container. A router is one process on one core."""

    limits: Amounts = Field(default={"memory": "1Gi"}, description="Largest amounts.", examples=[{"memory": "1Gi"}])
    requests: Amounts = Field(
        default={"cpu": "250m", "memory": "256Mi"},
        description="Amounts that are reserved on the node. An autoscaler by CPU needs the CPU here.",
        examples=[{"cpu": "250m", "memory": "256Mi"}],
    )


class RouterSpec(Api):
    """Routers: one endpoint before all workers, whose streams survive their worker. Changes replace no worker."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                # A default is checked before its own defaults are filled in, so the field may be missing.
                "!has(self.trafficSplit) || self.trafficSplit.all(one, "
                "self.trafficSplit.exists_one(other, other.deployment == one.deployment))",
                _SPLIT_ONCE_MESSAGE,
            ),
            rule("!has(self.trafficSplit) || self.trafficSplit.map(one, one.percent).sum() <= 100", _SPLIT_SUM_MESSAGE),
            rule(
                "!has(self.trafficSplit) || self.trafficSplit.size() == 0 || self.replicas > 0", _SPLIT_ROUTERS_MESSAGE
            ),
        )
    )

    replicas: int = Field(
        default=2,
        ge=0,
        le=100,
        description="Number of routers. 0: the Service selects the workers, clients reach them directly, and a lost "
        "worker breaks its streams.",
    )
    autoscaled: bool = Field(
        default=False,
        description="true: an autoscaler sets the number of routers on the Deployment NAME-router. replicas then only "
        "says whether there are routers.",
    )
    image: Annotated[str, Field(max_length=512)] | None = Field(
        default=None,
        description="Image of the routers. Absent: the operator's own image.",
        examples=["registry.example.com/specdecode-operator:0.1.0"],
    )
    resources: RouterResourcesSpec = Field(
        default=RouterResourcesSpec(), description="CPU, memory and other resources of the router's container."
    )
    hold_seconds: int = Field(
        default=600,
        ge=1,
        le=86400,
        description="Longest time that a request waits while no worker is ready, in seconds. After scaling to zero, "
        "the first worker must pull and load the model in this time.",
    )
    suspicion: SuspicionSpec = Field(
        default=SuspicionSpec(),
        description="Bounds of the silence after which a router asks a second worker for the rest of a request.",
    )
    traffic_split: Annotated[tuple[TrafficShareSpec, ...], Field(max_length=_MAX_DEPLOYMENTS)] = Field(
        default=(),
        description="Other deployments that get a share of the traffic. This deployment has the rest. A conversation "
        "stays with one deployment. It needs scaling.minReplicas of at least 1.",
        examples=[[{"deployment": "llama-next", "percent": 10}]],
    )
    tracing: TracingSpec | None = Field(
        default=None,
        description="Spans of requests and of their attempts on workers. Absent: none; a client's traceparent goes to "
        "the workers all the same.",
        examples=[{"endpoint": "http://otel-collector.observability.svc:4318"}],
    )
    node_selector: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)] = Field(
        default_factory=dict, description="Labels that a node must have.", examples=[{"pool": "cpu"}]
    )
    tolerations: _Objects = Field(
        default=(),
        description="Taints of nodes that the routers tolerate, as in a pod.",
        examples=[[{"key": "dedicated", "operator": "Equal", "value": "serving", "effect": "NoSchedule"}]],
    )
    affinity: Anything | None = Field(
        default=None,
        description="Affinity to nodes and pods, as in a pod. Absent: the routers of a deployment prefer different "
        "nodes.",
        examples=[{"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": ["..."]}}}],
    )
    priority_class_name: Name | None = Field(
        default=None, description="PriorityClass of the routers. Absent: the cluster's default.", examples=["serving"]
    )

    @model_validator(mode="after")
    def _splits_all_traffic_at_most(self) -> Self:
        names = [one.deployment for one in self.traffic_split]
        if len(set(names)) < len(names):
            raise ValueError(_SPLIT_ONCE_MESSAGE)
        if sum(one.percent for one in self.traffic_split) > 100:
            raise ValueError(_SPLIT_SUM_MESSAGE)
        if names and not self.replicas:
            raise ValueError(_SPLIT_ROUTERS_MESSAGE)
        return self
