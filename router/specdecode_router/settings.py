"""Settings of the router, as its command line reads them, and the file with those that change while it runs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from specdecode_worker.http_edge import ReloadedFiles, fingerprint_of

log = logging.getLogger(__name__)


class BackendSettings(BaseModel):
    """Another deployment that gets a share of the traffic."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    percent: float = Field(default=0, ge=0, le=100)
    service: str | None = None
    """Headless Service of its workers, in the namespace of the router."""
    workers: tuple[str, ...] = ()
    """Base URLs of its workers' admin ports, instead of ``service``."""
    token_file: str | None = None
    """File with tokens of the scope router for its workers. None: they have those of the others."""

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
    live_settings_file: str | None = None
    """File with settings that change without a restart, as ``LiveSettings`` reads it."""
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    admin_token_file: str | None = None
    """File with tokens of the scope router, one a line and the current one first; read again when it changes."""
    ca_file: str | None = None
    """Certificates that sign those of the workers, as PEM; read again when it changes. None for the system's."""

    api_keys_path: str | None = None
    """Folder or file with the API keys of tenants; read again when it changes. None for clients without keys."""
    max_waiting: int = Field(default=1024, ge=0)
    """Waiting requests of all tenants while there are workers. More get a 429."""
    max_waiting_per_tenant: int = Field(default=256, ge=0)
    """Waiting requests of one tenant. More get a 429. It does not apply where clients are not authenticated."""
    max_waiting_bytes: int = Field(default=128 * 1024 * 1024, ge=1)
    """Bodies of all waiting and held requests, of which one tenant may have a quarter. More get the same answers. A
    parsed body, as it waits, takes up to seven times its bytes."""
    max_held: int = Field(default=1024, ge=0)
    """Held requests of all tenants while there is no worker. More get a 503."""
    hold_seconds: float = Field(default=300, gt=0)
    """Longest time that a request is held. The model of a first worker is pulled and loaded in this time."""

    request_timeout_seconds: float = Field(default=3600, gt=0, allow_inf_nan=False)
    """Longest time of a request; the header X-Request-Timeout lowers it."""
    header_timeout_seconds: float = Field(default=10, gt=0)
    max_connections: int = Field(default=8192, ge=1)
    body_timeout_seconds: float = Field(default=30, gt=0)
    write_timeout_seconds: float = Field(default=20, gt=0)
    """Time for a client to read output that is ready. Less than the worker's, which waits for the router meanwhile."""
    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1)
    max_unfinished_body_bytes: int = Field(default=64 * 1024 * 1024, ge=1)
    """Bodies that are still arriving. Those of forwarded requests have as much apart, until clients have answers."""
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


LIVE_FIELDS = ("hold_seconds", "no_worker_seconds", "min_silence_seconds", "max_silence_seconds")
"""Settings that the file of live settings may have. In addition it may have ``percents`` of ``backends`` by name."""


class LiveSettings(ReloadedFiles[RouterSettings]):
    """Settings of the command line, with those of a JSON file over them. The file is read again when it changes.

    The operator writes the file into a ConfigMap, so that shares of traffic change without a rollout of the routers.
    Fields that this version does not know are left out: the operator may be newer.
    """

    def __init__(self, given: RouterSettings) -> None:
        """Read the file. Raises UnusableFiles if it cannot be used."""
        self._given, path = given, given.live_settings_file
        files = [] if path is None else [Path(path)]
        super().__init__(
            f"live settings {path}",
            lambda: self._settings(*files),
            lambda: fingerprint_of(files),
            stays="the last good settings stay in use",
        )

    def _settings(self, path: Path | None = None) -> RouterSettings:
        if path is None:
            return self._given
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict) or not isinstance(percents := values.get("percents", {}), dict):
            raise ValueError("it is no JSON object with an object of percents")
        given = self._given.model_dump()
        backends = [{**one, "percent": percents.get(one["name"], one["percent"])} for one in given["backends"]]
        live = {name: values[name] for name in LIVE_FIELDS if name in values}
        try:
            read = RouterSettings.model_validate({**given, **live, "backends": backends})
        except ValidationError as error:
            raise ValueError(first_problem(error)) from None
        log.info("live settings: hold %g s, suspicion %g to %g s, shares %s", read.hold_seconds,
                 read.min_silence_seconds, read.max_silence_seconds,
                 {one.name: one.percent for one in read.backends})  # fmt: skip
        return read


def first_problem(error: ValidationError) -> str:
    """Return the first problem of values, with the name of the field."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"
