"""What a worker must know at start; travels once, in the pod's environment."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from specdecode_worker.contract.capture import CaptureConfig
from specdecode_worker.contract.names import Port
from specdecode_worker.contract.wire import (
    CONTRACT_VERSION,
    DraftQuantization,
    Dtype,
    Method,
    Sampler,
    TargetQuantization,
    TaskName,
    ToolFormat,
    Written,
)


class ModelConfig(Written):
    """The target: where it comes from and how it is served."""

    uri: str
    served_name: str
    dtype: Dtype = "bfloat16"
    quantization: TargetQuantization | None = None
    """Of the weights of its blocks; None leaves them in ``dtype``."""
    max_model_len: int | None = Field(default=None, ge=16)
    """Tokens of prompt and answer together; None takes the model's own limit."""


class DraftConfig(Written):
    """What proposes tokens. ``required`` makes a draft that does not fit fatal instead of serving plainly."""

    method: Method = "eagle3"
    uri: str | None = None
    required: bool = False
    quantization: DraftQuantization | None = None
    """Of the weights of its MLPs and its head; None leaves them in the target's dtype."""
    prompt_lookup_min: int = Field(default=2, ge=1, le=16)
    prompt_lookup_max: int = Field(default=5, ge=1, le=16)
    """ngram alone: shortest and longest run of last tokens that is looked up (vLLM's names)."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.method in DRAFT_FREE) != (self.uri is None):
            raise ValueError("draft.uri is needed by every method but ngram and none, and only by those")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("prompt_lookup_min is above prompt_lookup_max")
        if self.quantization and self.method not in WITH_MLP:
            raise ValueError(f"draft.quantization is for methods {', '.join(WITH_MLP)}; {self.method} has no MLP")
        return self


DRAFT_FREE: frozenset[Method] = frozenset(("ngram", "none"))
"""Methods without weights of their own."""
WITH_MLP: tuple[Method, ...] = ("eagle3", "eagle", "draft-model")
"""Methods whose drafts have decoder blocks, of which there is something to quantise."""


class NamedDraft(DraftConfig):
    """A further draft, loaded beside the first; the plan's tasks choose it by name."""

    name: TaskName


class EngineConfig(Written):
    """Bounds of the engine. Names follow vLLM's flags."""

    max_num_seqs: int = Field(default=16, ge=1, le=1024)
    max_num_batched_tokens: int = Field(default=512, ge=16)
    kv_cache_tokens: int | None = Field(default=None, ge=256)
    """Tokens of KV cache; None takes what the free memory allows."""
    threads: int | None = Field(default=None, ge=1)
    """Torch threads on a CPU; None takes the container's CPU limit."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    tensor_parallel_size: int = Field(default=1, ge=1)
    gpu_memory_utilization: float = Field(default=0.8, gt=0, le=1)
    """Share of the device's memory (on a CPU: the container's limit) for weights and KV cache; the rest is reserve."""
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    sampler: Sampler = "coupled"
    enforce_eager: bool = False
    """No CUDA graphs: every step is queued call by call."""
    cuda_graph_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(), max_length=64)
    """Numbers of sequences that graphs are captured for; none takes 1, 2, 4 and every eighth, up to max_num_seqs."""


class ServerConfig(Written):
    """The HTTP surface and the way out."""

    host: str = "0.0.0.0"
    port: int = Port.http
    admin_port: int = Port.admin
    max_waiting: int = Field(default=256, ge=1)
    """Requests that may wait for a slot; beyond it the answer is 429."""
    endpoint_delay_seconds: float = Field(default=5, ge=0)
    """After SIGTERM: how long requests are still served while endpoints forget this pod."""
    grace_period_seconds: float = Field(default=60, ge=0)
    """After SIGTERM: how long running requests may take to finish."""
    tool_call_parser: ToolFormat | None = None
    """How the model writes tool calls; None reads it off the chat template."""


class WorkerConfig(Written):
    """Everything that a worker must know at start; a change of it rolls the pods."""

    contract_version: int = CONTRACT_VERSION
    deployment_uid: str = ""
    """uid of the SpecDecodeDeployment; a plan for another uid is refused."""
    model: ModelConfig
    draft: DraftConfig = DraftConfig(method="none")
    drafts: tuple[NamedDraft, ...] = Field(default=(), max_length=7)
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    capture: CaptureConfig | None = None
    """None keeps nothing of what is served."""
    cache_dir: str = "/var/cache/specdecode"
    """Where `pull` puts models and `serve` finds them."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [draft.name for draft in self.drafts]
        if len(set(names)) < len(names):
            raise ValueError(f"drafts have distinct names, got {names}")
        return self

    @model_validator(mode="after")
    def _splits_what_it_can(self) -> Self:
        if self.model.quantization and self.engine.tensor_parallel_size > 1:
            raise ValueError("model.quantization needs tensor_parallel_size 1; leave one of them out")
        return self
