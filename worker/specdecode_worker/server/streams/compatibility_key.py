"""Compatibility key: digest of everything that the text of a request depends on besides the request itself.

A request that began on one worker continues on another one with the same text only if their keys are equal.
"""

from __future__ import annotations

import hashlib
import json
from importlib import metadata

from specdecode_worker.contract import WorkerConfig
from specdecode_worker.server.served_model import Model
from specdecode_worker.server.version import VERSION

_KEY_DIGITS = 32


def compatibility_key(config: WorkerConfig, model: Model) -> str:
    """Return the key of a worker. Drafts are not part of it, because speculation does not change the text."""
    parts = {
        "weights": model.loaded.target,
        "tokenizer": model.tokenizer.digest,
        "end_tokens": model.loaded.eos_token_ids,
        "sampling": dict(model.sampling_defaults),
        "dtype": config.model.dtype,
        "quantization": config.model.quantization,
        "sampler": config.engine.sampler,
        "kernels": model.loaded.kernel_class,
        "tensor_parallel_size": config.engine.tensor_parallel_size,
        "grammars": metadata.version("llguidance"),
        "tool_call_parser": config.server.tool_call_parser,
        "version": VERSION,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:_KEY_DIGITS]
