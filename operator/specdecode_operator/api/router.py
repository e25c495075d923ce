"""Routers before the workers of a deployment: ``spec.router``."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from specdecode_operator.api.schema import (
    MAX_NAME_LENGTH,
    NAME_PATTERN,
    Anything,
    Api,
    Duration,
    Percent,
    bounds,
    named_list,
    rule,
    rules,
    seconds_of,
)

_SPLIT_SUM_MESSAGE = "the shares of router.trafficSplit add up to at most 100 percent"
_SPLIT_ROUTERS_MESSAGE = "router.trafficSplit needs router.replicas above 0"
_MAX_DEPLOYMENTS = 4


class TrafficShareSpec(Api):
    """Another deployment that gets a share of the traffic, for the trial of a new model."""

    deployment: Annotated[str, Field(pattern=NAME_PATTERN, max_length=MAX_NAME_LENGTH)] = Field(
        description="Name of a SpecDecodeDeployment in the same namespace. It has the same model.servedName.",
        examples=["llama-next"],
    )
    percent: Percent = Field(
        description="Share of the conversations in percent. 0: none, also when the others have no worker."
    )


class RouterSpec(Api):
    """Routers: one endpoint before all workers, whose streams survive their worker. Changes replace no worker."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            # A default is checked before its own defaults are filled in, so the field may be missing.
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
    hold_timeout: Duration = Field(
        default="10m",
        description="Longest time that a request waits while no worker is ready. After scaling to zero, the first "
        "worker must pull and load the model in this time.",
        json_schema_extra=bounds("1s", "24h"),
    )
    traffic_split: Annotated[
        tuple[TrafficShareSpec, ...], Field(max_length=_MAX_DEPLOYMENTS, json_schema_extra=named_list("deployment"))
    ] = Field(
        default=(),
        description="Other deployments that get a share of the traffic. This deployment has the rest. A conversation "
        "stays with one deployment. It needs scaling.minReplicas of at least 1.",
        examples=[[{"deployment": "llama-next", "percent": 10}]],
    )
    tracing_endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+(/\S*)?$", max_length=512)] | None = Field(
        default=None,
        description="Base URL of a collector that receives spans of requests as OTLP over HTTP; /v1/traces is added "
        "to it. Absent: no spans; a client's traceparent goes to the workers all the same.",
        examples=["http://otel-collector.observability.svc:4318"],
    )
    template: Anything = Field(
        default_factory=dict,
        description="Pod template that is merged over the operator's, as workers.template. The container is 'router': "
        "one process on one core, with requests of 250m CPU and 256Mi and a limit of 1Gi unless it says otherwise.",
        examples=[{"spec": {"nodeSelector": {"pool": "cpu"}}}],
    )

    @property
    def hold_seconds(self) -> int:
        """Longest time that a request waits while no worker is ready, in seconds."""
        return int(seconds_of(self.hold_timeout))
