"""Settings of the operator process, read once from the environment."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from specdecode_operator.api.v1alpha1 import SecretKeyRef
from specdecode_operator.errors import SettingsError
from specdecode_operator.types import DEFAULT_MODEL_CACHE, PolicyPeers

PREFIX = "SPECDECODE_OPERATOR_"


class Settings(BaseModel):
    """Each field is the variable SPECDECODE_OPERATOR_<FIELD>. Lists are separated by commas, objects are JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker_image: str = Field(default="localhost/specdecode-worker:dev", min_length=1)
    """Image of workers whose spec has none."""
    worker_image_pull_policy: str = Field(default="IfNotPresent", pattern="^(Always|IfNotPresent|Never)$")
    router_image: str = Field(default="localhost/specdecode-operator:dev", min_length=1)
    """Image of routers whose spec has none: the operator's own."""
    router_image_pull_policy: str = Field(default="IfNotPresent", pattern="^(Always|IfNotPresent|Never)$")
    worker_template: dict[str, Any] = {}
    """Pod template of workers and training Jobs, beneath that of a spec."""
    router_template: dict[str, Any] = {}
    """Pod template of routers, beneath that of a spec."""
    model_cache: dict[str, Any] = Field(default=DEFAULT_MODEL_CACHE)
    """Volume of downloaded models where the spec has none."""
    hub_token: SecretKeyRef | None = None
    """Optional Secret with the hub's token, where the spec names none."""
    policy_peers: PolicyPeers | None = None
    """Peers that the NetworkPolicies of deployments admit. Absent: there are no policies."""
    fixed_user: bool = True
    """Run the pods of deployments as user and group 65532. false leaves both to the namespace, as on OpenShift."""
    watch_namespaces: tuple[str, ...] = ()
    """Namespaces to serve. Empty serves all of them."""
    poll_seconds: float = Field(default=5, ge=0.5, le=60)
    """Time between two readings of a deployment's workers, in seconds."""
    concurrency: int = Field(default=4, ge=1, le=64)
    """Number of deployments that talk to the API server at the same time."""
    worker_proxy: str = Field(default="", pattern="^(https?://.+)?$")
    """HTTP proxy to the workers' admin ports, where pods cannot be reached directly."""
    worker_ca: str = ""
    """PEM file with the certificate authority of workers that serve TLS. Empty trusts the authorities of the image."""
    leader_election: bool = False
    """Take part in a leader election, so that several replicas can run. The chart turns it on."""
    lease_name: str = Field(default="specdecode-operator", min_length=1)
    """Name of the Lease."""
    namespace: str = Field(default="default", min_length=1)
    """The operator's own namespace, which holds the Lease and the key of the admin tokens."""
    identity: str = Field(default_factory=socket.gethostname, min_length=1)
    """Name of this replica. The Lease has it with a suffix, because a restarted process is another candidate."""
    # Words in this order: a Service named specdecode-operator-metrics would set SPECDECODE_OPERATOR_METRICS_PORT.
    port_health: int = Field(default=8080, ge=1, le=65535)
    port_metrics: int = Field(default=9090, ge=1, le=65535)
    listen_address: str = "0.0.0.0"
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$")

    @field_validator("worker_template", "router_template", "model_cache", "hub_token", "policy_peers", mode="before")
    @classmethod
    def _parse(cls, value: object) -> object:
        return json.loads(value) if isinstance(value, str) else value

    @field_validator("model_cache")
    @classmethod
    def _fill(cls, value: dict[str, Any]) -> dict[str, Any]:
        return value or DEFAULT_MODEL_CACHE

    @field_validator("watch_namespaces", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return tuple(part.strip() for part in value.split(",") if part.strip())


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Read the settings. Empty variables count as absent. Raises SettingsError, which names the variable."""
    fields = {name: environ.get(PREFIX + name.upper(), "") for name in Settings.model_fields}
    try:
        return Settings.model_validate({name: value for name, value in fields.items() if value})
    except ValidationError as error:
        first = error.errors()[0]
        name = PREFIX + str(first["loc"][0]).upper()
        raise SettingsError(f"{name}={first['input']!r}: {first['msg']}") from error
