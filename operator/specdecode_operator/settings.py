"""Settings of the operator process: read from the environment once, by __main__."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from specdecode_operator.errors import SettingsError

PREFIX = "SPECDECODE_OPERATOR_"


class Settings(BaseModel):
    """Every field is the variable SPECDECODE_OPERATOR_<FIELD>; lists are separated by commas."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker_image: str = Field(default="localhost/specdecode-worker:dev", min_length=1)
    """Image of workers whose spec names none."""
    worker_image_pull_policy: str = Field(default="IfNotPresent", pattern="^(Always|IfNotPresent|Never)$")
    watch_namespaces: tuple[str, ...] = ()
    """Namespaces to serve; all of them when empty."""
    poll_seconds: float = Field(default=5, ge=0.5, le=60)
    """Time between two looks at one deployment and its workers' reports."""
    concurrency: int = Field(default=4, ge=1, le=64)
    """Deployments that are reconciled at the same time."""
    worker_proxy: str = Field(default="", pattern="^(https?://.+)?$")
    """HTTP proxy through which workers' admin ports are asked, where pods cannot be reached directly."""
    # Named back to front: a Service called specdecode-operator-metrics would set SPECDECODE_OPERATOR_METRICS_PORT.
    port_health: int = Field(default=8080, ge=1, le=65535)
    port_metrics: int = Field(default=9090, ge=1, le=65535)
    listen_address: str = "0.0.0.0"
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$")

    @field_validator("watch_namespaces", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return tuple(part.strip() for part in value.split(",") if part.strip())


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Raises SettingsError that names the variable. Empty variables count as absent."""
    fields = {name: environ.get(PREFIX + name.upper(), "") for name in Settings.model_fields}
    try:
        return Settings.model_validate({name: value for name, value in fields.items() if value})
    except ValidationError as error:
        first = error.errors()[0]
        name = PREFIX + str(first["loc"][0]).upper()
        raise SettingsError(f"{name}={first['input']!r}: {first['msg']}") from error
