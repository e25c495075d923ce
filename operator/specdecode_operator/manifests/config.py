"""Configuration of a worker (WorkerConfig) from the spec of its deployment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from specdecode_operator.api.v1alpha1 import Spec
from specdecode_operator.errors import SpecError
from specdecode_worker.contract import (
    DraftConfig,
    EngineConfig,
    ModelConfig,
    NamedDraft,
    Port,
    ServerConfig,
    WorkerConfig,
    default_served_name,
)

CACHE_DIR = "/var/cache/specdecode"
CAPTURES_DIR = "/var/lib/specdecode/captures"
"""Folder of captured requests, one for each pod."""
TOKENS_DIR = "/etc/specdecode/tokens"
"""Folder with the admin tokens: the files ``operator``, ``router`` and ``capture``."""
API_KEYS_DIR = "/etc/specdecode/api-keys"
"""Folder with the API keys of the public port."""
TLS_DIR = "/etc/specdecode/tls"
"""Folder with the certificate, in the files of a Secret of type kubernetes.io/tls."""
MAX_THREADS = 1024
"""Largest number of torch threads, beyond any machine."""
_PINNED = re.compile("@[0-9a-f]{40}([0-9a-f]{24})?$")
"""End of an hf:// URI that names a commit."""
_FACTORS = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", 1)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}
"""Factors of the suffixes of a Kubernetes quantity."""


def worker_config(spec: Spec, uid: str) -> WorkerConfig:
    """Return the configuration in the environment of a pod. It holds nothing live: a change replaces the pods."""
    return WorkerConfig(
        deployment_uid=uid,
        model=ModelConfig(
            uri=spec.model.uri,
            adapter=spec.model.adapter,
            served_name=spec.model.served_name or default_served_name(spec.model.uri),
            dtype=spec.engine.dtype,
            quantization=spec.engine.quantization,
            max_model_len=spec.engine.max_model_len,
        ),
        draft=DraftConfig(
            method=spec.speculation.method,
            uri=spec.speculation.draft.uri if spec.speculation.draft else None,
            quantization=spec.speculation.draft.quantization if spec.speculation.draft else None,
            placement="own" if spec.has_own_draft else "shared",
        ),
        drafts=tuple(
            NamedDraft(name=draft.name, method=draft.method, uri=draft.uri, quantization=draft.quantization)
            for draft in spec.speculation.drafts
        ),
        engine=_engine(spec),
        server=_server(spec),
        capture_dir=CAPTURES_DIR,
        cache_dir=CACHE_DIR,
    )


def _engine(spec: Spec) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=spec.engine.max_num_seqs,
        kv_cache_tokens=spec.engine.kv_cache_tokens,
        kv_cache_dtype=spec.engine.kv_cache_dtype,
        max_num_batched_tokens=spec.step_tokens,
        threads=threads(spec),
        device=device(spec),
        tensor_parallel_size=spec.ranks,
        gpu_memory_utilization=spec.engine.memory_percent / 100,
        sampler=spec.engine.sampler,
        block_port=None if spec.has_own_draft else Port.blocks,
    )


def _server(spec: Spec) -> ServerConfig:
    keys = spec.api_keys_secret_ref
    return ServerConfig(
        chat_template=spec.model.chat_template,
        endpoint_delay_seconds=spec.drain.endpoint_delay_seconds,
        grace_period_seconds=spec.drain.grace_period_seconds,
        admin_tokens_path=TOKENS_DIR,
        api_keys_path=f"{API_KEYS_DIR}/{keys.key or ''}".rstrip("/") if keys else None,
        tls_cert_file=f"{TLS_DIR}/tls.crt" if spec.tls_secret_ref else None,
        tls_key_file=f"{TLS_DIR}/tls.key" if spec.tls_secret_ref else None,
    )


def device(spec: Spec) -> Literal["auto", "cpu", "cuda"]:
    """Return the device. A resource claim may bring a GPU or another device, so the worker examines what is there."""
    if spec.devices:
        return "cuda"
    return "auto" if spec.workers.has_claims else "cpu"


def model_uris(spec: Spec) -> list[str]:
    """Return the URIs of the target, its adapter and all drafts, each once."""
    speculation = spec.speculation
    drafts = [draft.uri for draft in (speculation.draft, *speculation.drafts) if draft]
    return list(dict.fromkeys(uri for uri in (spec.model.uri, spec.model.adapter, *drafts) if uri))


def unpinned_uris(spec: Spec) -> list[str]:
    """Return the hf:// URIs of the spec that name no commit: without a revision, or with a branch or a tag."""
    return [uri for uri in model_uris(spec) if uri.startswith("hf://") and not is_pinned(uri)]


def is_pinned(uri: str) -> bool:
    """Return whether an hf:// URI names a commit."""
    return _PINNED.search(uri) is not None


def threads(spec: Spec) -> int | None:
    """Return the torch threads of a CPU worker; None on another device, or without a limit of its cores."""
    return whole_cores(spec.workers.resources.limits) if device(spec) == "cpu" else None


def whole_cores(limits: Mapping[str, Any]) -> int | None:
    """Return the whole cores of a limit, because more threads would be throttled in a step. None without a limit."""
    if "cpu" not in limits:
        return None
    return max(1, int(min(cores(limits["cpu"]), Decimal(MAX_THREADS))))


def cores(quantity: object) -> Decimal:
    """Return the value of a CPU quantity such as ``2``, ``1.5`` or ``500m``.

    Raises:
        SpecError: The text is no quantity.
    """
    try:
        return quantity_value(quantity)
    except InvalidOperation:
        raise SpecError(f"workers.resources.limits.cpu is {quantity!r}; write cores such as 2, 1.5 or 500m") from None


def quantity_value(quantity: object) -> Decimal:
    """Return the number of a Kubernetes quantity. Raise decimal.InvalidOperation if the text is none."""
    text = str(quantity)
    suffix = next((suffix for suffix in sorted(_FACTORS, key=len, reverse=True) if text.endswith(suffix)), "")
    return Decimal(text.removesuffix(suffix)) * _FACTORS.get(suffix, 1)
