"""Settings of the inference engine that need a restart of the workers: ``spec.engine``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from specdecode_operator.api.schema import Api, rule, rules
from specdecode_worker.contract import EngineConfig, Sampler, TargetQuantization

OPERATOR_FLAGS = (
    "model",
    "adapter",
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
    "chat-template",
    "endpoint-delay-seconds",
    "grace-period-seconds",
    "max-model-len",
    "max-num-seqs",
    "max-num-batched-tokens",
    "kv-cache-tokens",
    "gpu-memory-utilization",
    "tensor-parallel-size",
    "sampler",
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


class EngineSpec(Api):
    """Settings of the engine. A change replaces the workers."""

    model_config = ConfigDict(json_schema_extra=rules(rule(_RULE, _MESSAGE)))

    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="Data type of weights and arithmetic."
    )
    quantization: TargetQuantization | None = Field(
        default=None,
        description="Quantization of the weights of the model's blocks. Absent: weights are of dtype.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=16,
        le=1048576,
        description="Maximum tokens of prompt and answer together. Absent: the model's own limit.",
        examples=[16384],
    )
    tensor_parallel_size: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Devices that the target is split over. Absent: workers.accelerator.count, or 1 where that is 0 or "
        "absent.",
        examples=[4],
    )
    max_num_seqs: int = Field(
        default=16, ge=1, le=1024, description="Sequences that one worker runs at a time. Others wait."
    )
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=16,
        le=1048576,
        description="Tokens that one step computes at most, prompts included. Absent: 2048 on accelerators, else 512.",
        examples=[2048],
    )
    kv_cache_tokens: int | None = Field(
        default=None,
        ge=256,
        le=1073741824,
        description="Size of the KV cache in tokens. Absent: what the free memory allows.",
        examples=[131072],
    )
    memory_percent: int = Field(
        default=round(100 * _ENGINE.gpu_memory_utilization),
        ge=5,
        le=100,
        description="Share of the accelerator's memory, or of the memory limit on CPUs, for weights and KV cache, in "
        "percent. vLLM calls it gpu-memory-utilization.",
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
        examples=[["--request-timeout-seconds=600", "--max-waiting=512"]],
    )
