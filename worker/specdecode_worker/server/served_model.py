"""The model that a worker serves, and the key of workers that can continue its streams."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from typing import Any, TypeVar

from specdecode_worker.contract import ToolFormat, WorkerConfig
from specdecode_worker.core.messages import Loaded
from specdecode_worker.guided.grammars import GrammarCompiler
from specdecode_worker.server.admission import ModelLimits
from specdecode_worker.server.requests import GenerationRequest
from specdecode_worker.server.tokenizer import Tokenizer
from specdecode_worker.server.tools import format_of
from specdecode_worker.version import VERSION

# The served model as the HTTP server sees it: tokenizer, limits, fingerprint and tool call format.

Body = TypeVar("Body", bound=GenerationRequest)


@dataclass(frozen=True)
class Model:
    """Tokenizer and engine facts that are known once the model has loaded."""

    tokenizer: Tokenizer
    loaded: Loaded
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of sampling fields that a request leaves out, where they differ from those of the API."""

    @cached_property
    def limits(self) -> ModelLimits:
        """Context length and vocabulary size of the model."""
        # Tokenizer and embedding may have different sizes: fine-tunes add tokens, and published models pad embeddings.
        rows = self.loaded.vocab_size or self.tokenizer.vocab_size
        return ModelLimits(
            self.loaded.max_model_len, min(self.tokenizer.vocab_size, rows), self.tokenizer.tokens_from(rows)
        )

    @cached_property
    def fingerprint(self) -> str:
        """Value of `system_fingerprint`: it changes with the target's weights and with the program version only.

        The draft is not part of it, because speculation does not change the text.
        """
        return "fp_" + hashlib.sha256(f"{self.loaded.target} {VERSION}".encode()).hexdigest()[:10]

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """Tool call format that the chat template asks for; None when the template takes no tools."""
        template = self.tokenizer.template
        return format_of(template.tool_source) if template is not None and template.takes_tools else None

    def with_defaults(self, body: Body) -> Body:
        """Return a request with the model's defaults in the sampling fields that it leaves out."""
        left_out = {name: value for name, value in self.sampling_defaults.items() if name not in body.model_fields_set}
        return body.model_copy(update=left_out) if left_out else body

    def grammar_compiler(self) -> GrammarCompiler:
        """Return a compiler that accepts the grammars that the engine accepts."""
        size = self.loaded.vocab_size or self.tokenizer.vocab_size
        return GrammarCompiler(lambda: self.tokenizer.json, size, self.loaded.eos_token_ids)


# Compatibility key: digest of everything that the text of a request depends on besides the request itself.
#
# A request that began on one worker continues on another one with the same text only if their keys are equal.

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
        "kv_cache_dtype": config.engine.kv_cache_dtype,
        "sampler": config.engine.sampler,
        "kernels": model.loaded.kernel_class,
        "tensor_parallel_size": config.engine.tensor_parallel_size,
        "grammars": metadata.version("llguidance"),
        "tool_call_parser": config.server.tool_call_parser,
        "reasoning_parser": config.server.reasoning_parser,
        "version": VERSION,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:_KEY_DIGITS]
