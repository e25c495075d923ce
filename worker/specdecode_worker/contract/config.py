"""Configuration of a worker, passed once in the pod's environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from specdecode_worker.contract.capture import CaptureConfig
from specdecode_worker.contract.names import Port
from specdecode_worker.contract.wire import (
    CONTRACT_VERSION,
    DraftQuantization,
    Dtype,
    KVCacheDtype,
    Method,
    Placement,
    ReasoningFormat,
    Sampler,
    TargetQuantization,
    TaskName,
    ToolFormat,
    Written,
)


def default_served_name(uri: str) -> str:
    """Return the last part of a model's URI without its revision: ``hf://org/name@refs/pr/4`` is served as ``name``."""
    path = uri.partition("://")[2] or uri
    if uri.startswith("hf://"):
        path = path.partition("@")[0]
    return path.rstrip("/").rpartition("/")[2]


def adapted_uri(uri: str, adapter: str | None) -> str:
    """Return the URI of a target with an adapter, ``hf://org/name+hf://org/adapter``, or ``uri`` without one."""
    return f"{uri}+{adapter}" if adapter else uri


class ModelConfig(Written):
    """The target: its location and how it is served."""

    uri: str
    adapter: str | None = None
    """URI of a LoRA adapter that is merged into the weights. None serves the weights as they are."""
    served_name: str
    dtype: Dtype = "bfloat16"
    quantization: TargetQuantization | None = None
    """Quantization of the weights of its blocks. None leaves them in ``dtype``."""
    max_model_len: int | None = Field(default=None, ge=16)
    """Maximum tokens of prompt and output together. None selects the model's own limit."""

    @property
    def target(self) -> str:
        """URI of what is served: the model, with its adapter."""
        return adapted_uri(self.uri, self.adapter)


class DraftConfig(Written):
    """The source of draft tokens.

    If ``required`` is true, a draft that does not fit the target is fatal; otherwise the worker serves without
    speculation.
    """

    method: Method = "eagle3"
    uri: str | None = None
    required: bool = False
    quantization: DraftQuantization | None = None
    """Quantization of the weights of its MLPs and lm_head. None leaves them in the target's dtype."""
    placement: Placement = "shared"
    """Device of the draft. ``own`` needs one device more than the target has ranks, except on a CPU."""
    prompt_lookup_min: int = Field(default=2, ge=1, le=16)
    prompt_lookup_max: int = Field(default=5, ge=1, le=16)
    """Longest run of last tokens to look up, for ngram only. prompt_lookup_min is the shortest (vLLM's names)."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.method in DRAFT_FREE) != (self.uri is None):
            raise ValueError(f"draft.uri is needed by every method but {', '.join(DRAFT_FREE)}, and only by those")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("prompt_lookup_min is above prompt_lookup_max")
        if self.method != "ngram" and (self.prompt_lookup_min, self.prompt_lookup_max) != (2, 5):
            raise ValueError(f"prompt_lookup_min and prompt_lookup_max are for the method ngram, not for {self.method}")
        if self.quantization and self.method not in WITH_MLP:
            raise ValueError(f"draft.quantization is for methods {', '.join(WITH_MLP)}; {self.method} has no MLP")
        if self.placement == "own" and self.method not in PLACEABLE:
            raise ValueError(f"draft.placement own is for methods {', '.join(PLACEABLE)}, not for {self.method}")
        return self


@dataclass(frozen=True, slots=True)
class MethodTraits:
    """Traits of a drafting method on which the contract depends."""

    weights: bool = True
    """True if the draft has weights, and so a URI."""
    one_pass: bool = False
    """True if the draft proposes all depths of a tree in one pass."""
    blocks: bool = True
    """True if the draft has decoder blocks, which can be quantized."""
    placeable: bool = False
    """True if the draft can run on a device of its own."""


_NOTHING = MethodTraits(weights=False, blocks=False)
METHODS: dict[Method, MethodTraits] = {
    "eagle3": MethodTraits(placeable=True),
    "peagle": MethodTraits(one_pass=True),
    "dflash": MethodTraits(one_pass=True),
    "eagle": MethodTraits(placeable=True),
    "draft-model": MethodTraits(placeable=True),
    "medusa": MethodTraits(blocks=False),
    "ngram": _NOTHING,
    "suffix": _NOTHING,
    "none": _NOTHING,
}
"""All drafting methods."""
DRAFT_FREE = tuple(name for name, traits in METHODS.items() if not traits.weights)
"""Methods without draft weights."""
ONE_PASS = frozenset(name for name, traits in METHODS.items() if traits.one_pass)
"""Methods whose draft proposes all depths of a tree in one pass."""
WITH_MLP = tuple(name for name, traits in METHODS.items() if traits.blocks)
"""Methods with decoder blocks in the draft, which can be quantized."""
PLACEABLE = tuple(name for name, traits in METHODS.items() if traits.placeable)
"""Methods whose draft can run on a device of its own."""


def draft_passes(method: Method, depth: int) -> int:
    """Return the draft passes of a tree of this depth, as step times count them (``StepCell.draft_passes``)."""
    return min(depth, 1) if method in ONE_PASS else depth


class NamedDraft(DraftConfig):
    """Additional draft, loaded with the first one. Tasks of the plan choose it by name."""

    name: TaskName


GPU_DEFAULTS: dict[str, int | float] = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "gpu_memory_utilization": 0.9,
}
"""Defaults of EngineConfig for ``device`` cuda. A GPU reads its weights once for many sequences, and a prompt in steps
of 2,048 tokens keeps its matrix units busy. Memory of a GPU is not shared with the page cache or other processes."""


class EngineConfig(Written):
    """Limits of the engine. Names follow vLLM's flags."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_gpu_defaults(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("device") == "cuda":
            return GPU_DEFAULTS | values
        return values

    max_num_seqs: int = Field(default=16, ge=1, le=1024)
    max_num_batched_tokens: int = Field(default=512, ge=16)
    kv_cache_tokens: int | None = Field(default=None, ge=256)
    """Size of the KV cache in tokens. None derives it from the free memory."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """How the target's keys and values are stored; auto is the type of the activations."""
    threads: int | None = Field(default=None, ge=1)
    """Number of torch threads. None selects the container's CPU limit."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    tensor_parallel_size: int = Field(default=1, ge=1)
    gpu_memory_utilization: float = Field(default=0.8, gt=0, le=1)
    """Share of the device's memory for weights and KV cache; the rest is reserve.

    On a CPU it is a share of the container's memory limit.
    """
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    sampler: Sampler = "coupled"
    enforce_eager: bool = False
    """Disables CUDA graphs."""
    cuda_graph_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(), max_length=64)
    """Numbers of sequences to capture CUDA graphs for.

    If empty: 1, 2, 4 and every multiple of 8 up to max_num_seqs.
    """
    role: Literal["worker", "prefill"] = "worker"
    """``prefill`` computes the cache blocks of long prompts for other workers, and sends them from ``block_port``."""
    block_port: int | None = Field(default=None, ge=0, le=65535)
    """Port from which other workers of the deployment get cache blocks. None sends none. 0 takes a free port."""
    kernel_timings: str | None = None
    """File of ``hack/gpu`` with the times of this GPU, from which operations choose. None chooses by rules."""

    @model_validator(mode="after")
    def _sends_what_it_has(self) -> Self:
        if self.role == "prefill" and (self.block_port is None or not self.enable_prefix_caching):
            raise ValueError("role prefill needs block_port, and enable_prefix_caching for the blocks to send from it")
        return self


class ServerConfig(Written):
    """Configuration of the HTTP server and its shutdown."""

    host: str = "0.0.0.0"
    port: int = Port.http
    admin_port: int = Port.admin
    max_waiting: int = Field(default=256, ge=1)
    """Maximum number of queued requests. Beyond it the server answers 429."""
    endpoint_delay_seconds: float = Field(default=5, ge=0)
    """Time after SIGTERM during which new requests are served, until endpoints no longer list this pod."""
    grace_period_seconds: float = Field(default=60, ge=0)
    """Time after the endpoint delay for running requests to finish."""
    api_keys_path: str | None = None
    """Folder (a mounted Secret: one key a file, under its name) or file (``name=key`` or ``key`` a line).

    It is read again when it changes. None leaves the keys of environment and flag alone.
    """
    admin_tokens_path: str | None = None
    """Folder whose files ``operator``, ``router`` and ``capture`` hold the tokens, one a line.

    It is read again when it changes.
    """
    shared_prefix_cache: bool = False
    """True lets requests with different API keys share cached prefixes, and see in ``cached_tokens`` that they do."""
    step_timeout_seconds: float = Field(default=60, gt=0)
    """Least time after which an engine that makes no progress counts as hung, in seconds.

    The bound of a step is longer for long prompts and after long steps. Loading, warm-up and graph capture have their
    own bounds.
    """
    request_timeout_seconds: float = Field(default=3600, gt=0, allow_inf_nan=False)
    """Time after which a request is cancelled, waiting or running. The header X-Request-Timeout lowers it."""
    queue_timeout_seconds: float = Field(default=600, gt=0, allow_inf_nan=False)
    """Maximum time from the arrival of a request to its first step. Beyond it the server answers 503."""
    api_key_metrics: bool = False
    """Exports request metrics by the name of the API key, for at most 32 names."""
    vllm_metrics: bool = True
    """Exports metrics under vLLM's names too, for its clients."""
    chat_template: str | None = None
    """Chat template instead of the model's: a file, or its text. None takes that of the model folder."""
    generation_config: Literal["auto", "vllm"] = "auto"
    """Sampling defaults: ``auto`` takes those of the model's generation_config.json, ``vllm`` those of the API."""
    tool_call_parser: ToolFormat | None = None
    """Format of the model's tool calls. None infers it from the chat template."""
    reasoning_parser: ReasoningFormat | None = None
    """How the model marks its thinking, which then leaves as ``reasoning_content``. None leaves it in the content."""
    header_timeout_seconds: float = Field(default=10, gt=0)
    """Time for the headers of a request, from the start of its connection or the first byte of a later request."""
    body_timeout_seconds: float = Field(default=30, gt=0)
    """Time for a whole request with its body, from the same moment as the headers."""
    write_timeout_seconds: float = Field(default=30, gt=0)
    """Time for a client to read output that the server has ready. A slower client is cut off and its request ends."""
    max_connections: int = Field(default=2048, ge=1)
    """Maximum number of open client connections of the public port."""
    max_unfinished_body_bytes: int = Field(default=64 * 1024 * 1024, ge=1)
    """Maximum bytes of request bodies that are still arriving, of all clients together. Beyond it the answer is 503."""
    tls_cert_file: str | None = None
    """PEM file with the certificate chain for both ports. It is read again when it changes. None serves plain HTTP."""
    tls_key_file: str | None = None
    """PEM file with the key of the certificate, without a password."""

    @model_validator(mode="after")
    def _has_both_tls_files(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file need each other; set both or neither")
        return self


class WorkerConfig(Written):
    """Complete configuration of a worker. A change rolls the pods."""

    contract_version: int = CONTRACT_VERSION
    deployment_uid: str = ""
    """uid of the SpecDecodeDeployment. A plan for another uid is refused."""
    model: ModelConfig
    draft: DraftConfig = DraftConfig(method="none")
    drafts: tuple[NamedDraft, ...] = Field(default=(), max_length=7)
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    capture: CaptureConfig | None = None
    """None disables capture, except where the plan switches it on."""
    capture_dir: str | None = None
    """Folder of this worker alone for captures that the plan switches on. None: it cannot."""
    cache_dir: str = "/var/cache/specdecode"
    """Folder into which `pull` downloads models and from which `serve` loads them."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [draft.name for draft in self.drafts]
        if len(set(names)) < len(names):
            raise ValueError(f"drafts have distinct names, got {names}")
        return self

    @model_validator(mode="after")
    def _places_drafts_where_they_can_run(self) -> Self:
        if all(draft.placement == "shared" for draft in (self.draft, *self.drafts)):
            return self
        if self.engine.block_port is not None:
            raise ValueError("block_port needs drafts in the engine's process: draft.placement own keeps their keys "
                             "in another one; use placement shared, or leave block_port out")  # fmt: skip
        if self.engine.sampler == "mss":
            raise ValueError("draft.placement own needs the sampler coupled; with mss leave placement at shared")
        return self
