"""Settings of the router, as its command line reads them."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class BackendSettings(BaseModel):
    """Another deployment that gets a share of the traffic."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    percent: float = Field(ge=0, le=100)
    service: str | None = None
    """Headless Service of its workers, in the namespace of the router."""
    workers: tuple[str, ...] = ()
    """Base URLs of its workers' admin ports, instead of ``service``."""
    token_file: str | None = None
    """File with a token of the scope router for its workers. None: they have the token of the others."""

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        """Read the form of the command line: ``name=NAME,percent=P,service=NAME,token-file=FILE``."""
        if not isinstance(value, str):
            return value
        pairs = [part.partition("=")[::2] for part in value.split(",")]
        fields: dict[str, Any] = {name.replace("-", "_"): text for name, text in pairs if name != "worker"}
        return {**fields, "workers": tuple(text for name, text in pairs if name == "worker")}

    @model_validator(mode="after")
    def _has_workers(self) -> Self:
        if (self.service is None) != bool(self.workers):
            raise ValueError(f"{self.name} needs a service or workers, and not both")
        return self


class RouterSettings(BaseModel):
    """Settings of one router process. Times are in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    workers: tuple[str, ...] = ()
    """Base URLs of the workers' admin ports, where no API server lists them."""
    namespace: str | None = None
    service: str | None = None
    """Headless Service of the workers, whose EndpointSlices list them; instead of ``workers``."""
    deployment: str = ""
    """Name of the deployment, for metrics."""
    backends: tuple[BackendSettings, ...] = ()
    """Other deployments that share the traffic. This router's deployment has the rest."""
    demand_config_map: str | None = None
    """ConfigMap in which held requests are reported to the operator."""
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    admin_token_file: str | None = None
    """File with a token of the scope router; read again when it changes."""
    ca_file: str | None = None
    """Certificates that sign those of the workers, as PEM; None for the system's."""

    api_keys_path: str | None = None
    """Folder or file with the API keys of tenants; read again when it changes. None for clients without keys."""
    max_waiting: int = Field(default=1024, ge=0)
    max_waiting_per_tenant: int = Field(default=256, ge=0)
    max_held: int = Field(default=1024, ge=0)
    hold_seconds: float = Field(default=300, gt=0)
    """Bounds of the queue, as in ``QueueLimits``."""

    request_timeout_seconds: float = Field(default=3600, gt=0, allow_inf_nan=False)
    """Longest time of a request; the header X-Request-Timeout lowers it."""
    header_timeout_seconds: float = Field(default=10, gt=0)
    max_connections: int = Field(default=8192, ge=1)
    body_timeout_seconds: float = Field(default=30, gt=0)
    write_timeout_seconds: float = Field(default=20, gt=0)
    """Time for a client to read output that is ready. Less than the worker's, which waits for the router meanwhile."""
    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1)
    max_unfinished_body_bytes: int = Field(default=64 * 1024 * 1024, ge=1)
    max_unsent_bytes: int = Field(default=64 * 1024, ge=1)
    """Output of one stream that waits for its client. Beyond it the worker's frames are not read."""
    endpoint_delay_seconds: float = Field(default=5, ge=0)
    """Time after SIGTERM in which new requests are still served, until the Service has removed the router."""
    grace_period_seconds: float = Field(default=60, ge=0)
    """Time after ``endpoint_delay_seconds`` for running requests."""

    connect_seconds: float = Field(default=1, gt=0)
    """Time for a connection to a worker."""
    open_seconds: float = Field(default=5, gt=0)
    """Time from a request to its ``Open`` after which a second worker is asked."""
    no_worker_seconds: float = Field(default=10, gt=0)
    """Time in which a request without a worker waits for one, after its first attempt has failed."""
    max_refusals: int = Field(default=3, ge=1)
    """Workers that may refuse a request before the client gets the last refusal."""
    max_crashes: int = Field(default=2, ge=1)
    """Workers that may fail while they serve a request. It may be the cause, so it is not given to further ones."""
    min_silence_seconds: float = Field(default=1, gt=0)
    max_silence_seconds: float = Field(default=10, gt=0)
    """Bounds of the silence after which a worker is suspected."""
    failure_cooldown_seconds: float = Field(default=1, gt=0)
    """Time for which a worker is avoided after a failed connection."""
    load_seconds: float = Field(default=2, gt=0)
    """Interval at which the workers' loads are read, and the deadline for each of them."""

    @field_validator("backends")
    @classmethod
    def _have_at_most_all(cls, backends: tuple[BackendSettings, ...]) -> tuple[BackendSettings, ...]:
        if len({one.name for one in backends}) < len(backends):
            raise ValueError("every deployment may be named once")
        if sum(one.percent for one in backends) > 100:
            raise ValueError("the shares add up to more than 100 percent")
        return backends

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if bool(self.namespace) != bool(self.service):
            raise ValueError("--namespace and --service are used together")
        if self.service and self.workers:
            raise ValueError("--worker is not used with --service")
        if self.service is None and any(one.service for one in self.backends):
            raise ValueError("the service of a --backend needs --service")
        if any(one.name == self.deployment for one in self.backends):
            raise ValueError("a --backend needs another name than --deployment")
        if self.demand_config_map and not self.service:
            raise ValueError("--demand-config-map needs --service")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("--tls-cert-file and --tls-key-file are used together")
        return self
