"""Translation of vLLM's ``--speculative-config`` into the flags of this worker."""

from __future__ import annotations

import argparse
import json
from typing import Any

from specdecode_worker.contract import TreeShape

# vLLM spells the name of this method with an underscore.
_METHODS = {"draft_model": "draft-model"}
_LOOKUP = frozenset({"prompt_lookup_min", "prompt_lookup_max"})
_SAID = _LOOKUP | {"quantization"}
"""Fields that have the same name in DraftConfig."""
_FIELDS = frozenset({"method", "model", "num_speculative_tokens", "parallel_drafting"}) | _SAID


def take_speculative_config(args: argparse.Namespace) -> dict[str, Any]:
    """Set ``method``, ``draft`` and ``shape`` of ``args``, and return the other fields for DraftConfig.

    Raises:
        ValueError: The JSON is invalid or contradicts other flags; the message names the field.
    """
    fields = _read(args.speculative_config)
    if unknown := sorted(fields.keys() - _FIELDS):
        raise ValueError(f"--speculative-config: {unknown[0]} is not supported")
    if any(given is not None for given in (args.draft, args.method, args.shape, args.draft_quantization)):
        raise ValueError("--speculative-config says what --method, --draft and --depth say; give one or the other")
    method, args.draft = fields.get("method"), fields.get("model")
    if method == "ngram" and args.draft == "ngram":
        args.draft = None  # vLLM also accepts "ngram" as the model.
    args.method = _method(method, fields.get("parallel_drafting", False))
    if "num_speculative_tokens" in fields:
        args.shape = _chain(fields["num_speculative_tokens"])
    return {name: fields[name] for name in sorted(_SAID & fields.keys())}


def _method(method: Any, parallel: Any) -> Any:
    """Return the method by our name. Raise ValueError if ``parallel_drafting`` does not suit it.

    vLLM has no name of its own for P-EAGLE: it is the method eagle3 with ``parallel_drafting``.
    """
    if not isinstance(parallel, bool):
        raise ValueError(f"--speculative-config: parallel_drafting must be true or false, got {parallel!r}")
    if parallel and method not in (None, "eagle3", "peagle"):
        raise ValueError(f"--speculative-config: parallel_drafting is for the method eagle3, not {method}")
    if parallel:
        return "peagle"
    return _METHODS.get(method, method) if isinstance(method, str) else method


def _read(text: str) -> dict[str, Any]:
    """Parse the JSON object. Raise ValueError for anything else."""
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError("--speculative-config must be a JSON object")
    return parsed


def _chain(count: Any) -> TreeShape:
    """Return the chain of ``count`` drafted tokens. Raise ValueError if the count is not valid."""
    if type(count) is not int or count < 1:
        raise ValueError(
            f"--speculative-config: num_speculative_tokens must be a whole number from 1 on, got {count!r}"
        )
    try:
        return TreeShape.chain(count)
    except ValueError as error:
        raise ValueError(f"--speculative-config: num_speculative_tokens: {error}") from None
