"""Settings of the inference engine that need a restart of the workers: ``spec.engine``."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from specdecode_operator.api.schema import Api, rule, rules
from specdecode_worker.contract import EngineConfig, Sampler, ServerConfig

OPERATOR_FLAGS = (
    "model",
    "served-model-name",
    "dtype",
    "quantization",
    "method",
    "draft",
    "draft-quantization",
    "draft-placement",
    "speculative-config",
    "depth",
    "tree",
    "device",
    "threads",
    "cache-dir",
    "host",
    "port",
    "admin-port",
    "api-key",
    "api-keys-path",
    "admin-tokens-path",
    "tls-cert-file",
    "tls-key-file",
    "max-waiting",
    "endpoint-delay-seconds",
    "grace-period-seconds",
    "max-model-len",
    "max-num-seqs",
    "max-num-batched-tokens",
    "kv-cache-tokens",
    "gpu-memory-utilization",
    "tensor-parallel-size",
    "sampler",
    "enforce-eager",
    "help",
)
"""Flags of ``specdecode-worker serve`` that the spec has fields for, or that the operator chooses."""
REFUSED_ARGUMENT = f"^(-h|-tp|--({'|'.join(OPERATOR_FLAGS)}))(=.*)?$"
"""Arguments that ``extraArgs`` must not contain. Without multi-line text, so that ``.`` is every character."""
_MESSAGE = (
    "engine.extraArgs must not contain a flag that has a field of its own in the spec or that the operator sets "
    "(--model, --draft, --port, --api-key, --max-num-seqs, ...)"
)
# A default of an object is validated before the defaults of its fields are filled in, hence has().
_RULE = f"!has(self.extraArgs) || self.extraArgs.all(argument, !argument.matches('{REFUSED_ARGUMENT}'))"
_ENGINE = EngineConfig()
_MAX_WAITING = ServerConfig().max_waiting


class EngineSpec(Api):
    """Settings of the engine. A change replaces the workers."""

    model_config = ConfigDict(json_schema_extra=rules(rule(_RULE, _MESSAGE)))

    gpu_memory_utilization: float = Field(
        default=_ENGINE.gpu_memory_utilization,
        ge=0.05,
        le=1,
        description="Share of the accelerator's memory, or of the memory limit on CPUs, for weights and KV cache.",
    )
    max_waiting: int = Field(
        default=_MAX_WAITING,
        ge=1,
        le=1000000,
        description="Maximum number of queued requests of one worker. Further requests get the answer 429.",
    )
    enforce_eager: bool = Field(
        default=False, description="true turns CUDA graphs off, which saves memory and costs speed."
    )
    sampler: Sampler = Field(
        default=_ENGINE.sampler,
        description="How draft tokens are accepted. coupled: the text is that of plain decoding. mss: multi-round "
        "sampling, which has the distribution of plain decoding.",
    )
    extra_args: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\n]+$")], ...], Field(max_length=32)
    ] = Field(
        default=(),
        description="Further flags of `specdecode-worker serve`, one word an item. Flags that have a field in the "
        "spec are refused.",
        examples=[["--request-timeout-seconds=600", "--no-enable-prefix-caching"]],
    )

    @model_validator(mode="after")
    def _leaves_operator_flags_alone(self) -> Self:
        if any(re.match(REFUSED_ARGUMENT, argument) for argument in self.extra_args):
            raise ValueError(_MESSAGE)
        return self
