"""The mapping from what a user promised themselves (spec) to what a worker is told (WorkerConfig)."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

from specdecode_operator.api.v1alpha1 import Spec
from specdecode_operator.errors import SpecError
from specdecode_worker.contract import DraftConfig, EngineConfig, ModelConfig, NamedDraft, ServerConfig, WorkerConfig

CACHE_DIR = "/var/cache/specdecode"


def worker_config(spec: Spec, uid: str) -> WorkerConfig:
    """What travels in the pod's environment. Nothing in here may be live: a change of it rolls the pods."""
    return WorkerConfig(
        deployment_uid=uid,
        model=ModelConfig(
            uri=spec.model.uri,
            served_name=spec.model.served_name or default_served_name(spec.model.uri),
            dtype=spec.model.dtype,
            quantization=spec.model.quantization,
            max_model_len=spec.model.max_model_len,
        ),
        draft=DraftConfig(
            method=spec.speculation.method,
            uri=spec.speculation.draft.uri if spec.speculation.draft else None,
            required=spec.speculation.required,
            quantization=spec.speculation.draft.quantization if spec.speculation.draft else None,
        ),
        drafts=tuple(
            NamedDraft(name=draft.name, method=draft.method, uri=draft.uri, quantization=draft.quantization)
            for draft in spec.speculation.drafts
        ),
        engine=EngineConfig(
            max_num_seqs=spec.workers.max_num_seqs,
            kv_cache_tokens=spec.workers.kv_cache_tokens,
            max_num_batched_tokens=spec.workers.max_num_batched_tokens or EngineConfig().max_num_batched_tokens,
            threads=threads(spec),
            device="cuda" if spec.workers.gpu else "cpu",
            tensor_parallel_size=spec.workers.tensor_parallel_size,
        ),
        server=ServerConfig(
            endpoint_delay_seconds=spec.drain.endpoint_delay_seconds,
            grace_period_seconds=spec.drain.grace_period_seconds,
        ),
        cache_dir=CACHE_DIR,
    )


def model_uris(spec: Spec) -> list[str]:
    """Of the target and all drafts, each once."""
    speculation = spec.speculation
    drafts = [speculation.draft, *speculation.drafts]
    return list(dict.fromkeys([spec.model.uri, *(draft.uri for draft in drafts if draft and draft.uri)]))


def default_served_name(uri: str) -> str:
    """The last part of the URI: ``hf://org/name@revision`` is served as ``name``."""
    return uri.partition("://")[2].rstrip("/").rsplit("/", 1)[-1].partition("@")[0]


def threads(spec: Spec) -> int | None:
    """Torch threads of a CPU worker: whole cores of its limit. More would be throttled in the middle of a step."""
    limits = spec.workers.resources.get("limits") or {}
    if spec.workers.gpu or "cpu" not in limits:
        return None
    return max(1, int(cores(limits["cpu"])))


def cores(quantity: object) -> Decimal:
    """A CPU quantity such as ``2``, ``1.5`` or ``500m``."""
    text = str(quantity)
    try:
        return Decimal(text[:-1]) / 1000 if text.endswith("m") else Decimal(text)
    except InvalidOperation:
        raise SpecError(f"workers.resources.limits.cpu is {text!r}; write cores such as 2, 1.5 or 500m") from None
