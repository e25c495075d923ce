"""Flags that several commands share."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from specdecode_worker.contract import (
    DRAFT_FREE,
    GPU_DEFAULTS,
    DraftConfig,
    DraftQuantization,
    Dtype,
    EngineConfig,
    Method,
    ModelConfig,
    Placement,
    ServerConfig,
    TargetQuantization,
    TreeShape,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

# Command-line flags that have the same meaning in several commands.

EMBEDDED_TARGET = "embedded://smollm2-135m-instruct"
EMBEDDED_DRAFT = "embedded://smollm2-135m-instruct-eagle3"


def add_flag(parser: argparse._ActionsContainer, name: str, text: str, default: Any = None, **how: Any) -> None:
    """Add a flag. Its type is that of its default, which the help shows."""
    if default is True or default is False:
        how |= {"action": argparse.BooleanOptionalAction}
        text += f" (default: {'yes' if default else 'no'})"
    elif default not in (None, (), []):
        how = {"type": type(default), **how}
        text += "" if "default: " in text else " (default: %(default)s)"
    parser.add_argument(name, default=default, help=text, **how)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add --model, --draft, --method, --device and the other flags that select models and how they are loaded."""
    add_flag(parser, "--model", "target", EMBEDDED_TARGET, metavar="URI")
    add_adapter_flag(parser)
    add_flag(parser, "--draft", "draft (default: the embedded head for the embedded target)", metavar="URI")
    text = "drafting method (default: eagle3 with a draft, else none)"
    add_flag(parser, "--method", text, choices=get_args(Method))
    add_flag(parser, "--dtype", "number format of weights and activations", "bfloat16", choices=get_args(Dtype))
    add_quantization_flag(parser)
    text = "quantize the draft's MLPs and head"
    add_flag(parser, "--draft-quantization", text, choices=get_args(DraftQuantization))
    add_device_flag(parser)
    add_flag(parser, "--threads", "torch threads (default: all)", type=int)
    add_flag(parser, "--cache-dir", "folder of downloaded models (default: the user's cache)", metavar="DIR")


def add_quantization_flag(parser: argparse.ArgumentParser) -> None:
    """Add --quantization."""
    add_flag(parser, "--quantization", "quantize the target's weights", choices=get_args(TargetQuantization))


def add_adapter_flag(parser: argparse.ArgumentParser) -> None:
    """Add --adapter."""
    add_flag(parser, "--adapter", "LoRA adapter, in PEFT's format, to merge into the target", metavar="URI")


def add_placement_flag(parser: argparse.ArgumentParser) -> None:
    """Add --draft-placement."""
    text = "device of the draft: the target's, or another GPU in a process of its own"
    add_flag(parser, "--draft-placement", text, "shared", choices=get_args(Placement))


def add_device_flag(parser: argparse.ArgumentParser) -> None:
    """Add --device."""
    add_flag(parser, "--device", "auto: a GPU if there is one", "auto", choices=("auto", "cpu", "cuda"))


def add_tensor_parallel_flag(parser: argparse.ArgumentParser) -> None:
    """Add --tensor-parallel-size."""
    parser.add_argument(
        "--tensor-parallel-size", "-tp", type=positive, default=1, metavar="N", help="devices that share the target"
    )


def default_by_device(name: str) -> str:
    """Describe the default of an engine field that depends on the device."""
    return f"default: {getattr(EngineConfig(), name)}, with --device cuda {GPU_DEFAULTS[name]}"


def add_shape_flags(parser: argparse.ArgumentParser) -> None:
    """Add --depth N and --tree SHAPE, which both set ``args.shape`` (a TreeShape, None if neither is given)."""
    which = parser.add_mutually_exclusive_group()
    add_flag(which, "--depth", "chain of N drafted tokens", dest="shape", type=_chain, metavar="N")
    text = "shape of the draft: chain:5, tree:4,2,1 or parents 0,0,1"
    add_flag(which, "--tree", text, dest="shape", type=_shape, metavar="SHAPE")


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Add the flags of the sampling parameters."""
    add_flag(parser, "--max-tokens", "length of an answer", max_tokens)
    add_flag(parser, "--temperature", "0 is greedy", 0.0)
    add_flag(parser, "--top-p", "as in OpenAI's API", 1.0)
    add_flag(parser, "--top-k", "as in vLLM; 0 is off", 0)
    add_flag(parser, "--seed", "seed of the first prompt (default: 0)", type=int)


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Add --prompts and --json."""
    add_flag(parser, "--prompts", 'lines of {"messages": [...]} or {"prompt": "..."}', metavar="FILE.jsonl")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")


def method_and_draft(args: argparse.Namespace) -> tuple[str, str | None]:
    """Return the speculation method and the draft URI, with defaults applied.

    Raises:
        ValueError: The two flags contradict each other.
    """
    draft = args.draft
    if draft is None and args.method in (None, "eagle3") and args.model == EMBEDDED_TARGET:
        draft = EMBEDDED_DRAFT
    method = args.method or ("eagle3" if draft else "none")
    if method in DRAFT_FREE and args.draft is not None:
        raise ValueError(f"--method {method} takes no --draft")
    if method not in DRAFT_FREE and draft is None:
        raise ValueError(f"--method {method} needs --draft URI")
    return method, draft


def draft_config(args: argparse.Namespace, **other: Any) -> DraftConfig:
    """Return the draft that the flags of ``add_model_flags`` name, with ``other`` fields.

    Raises:
        ValueError: The flags contradict each other, or a field is invalid.
    """
    method, draft = method_and_draft(args)
    fields = {
        "method": method,
        "uri": draft,
        "required": draft is not None,
        "quantization": args.draft_quantization,
        "placement": getattr(args, "draft_placement", "shared"),
    }
    return DraftConfig.model_validate(fields | other)


def model_config(args: argparse.Namespace, served_name: str) -> ModelConfig:
    """Return the target that the flags of ``add_model_flags`` name; ``--max-model-len`` where a command has it."""
    return ModelConfig(
        uri=args.model,
        adapter=args.adapter,
        served_name=served_name,
        dtype=args.dtype,
        quantization=args.quantization,
        max_model_len=getattr(args, "max_model_len", None),
    )


def positive(text: str) -> int:
    """Parse a number of at least 1. Raise ArgumentTypeError for other text."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _chain(text: str) -> TreeShape:
    """Parse the depth of a chain. Raise ArgumentTypeError for other text."""
    return _shape(f"chain:{text}")


def _shape(text: str) -> TreeShape:
    """Parse a shape. Raise ArgumentTypeError for other text."""
    try:
        return TreeShape.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; write chain:5, tree:4,2,1 or parents 0,0,1") from None


# Translation of vLLM's ``--speculative-config`` into the flags of this worker.

# vLLM spells the name of this method with an underscore.
_METHODS = {"draft_model": "draft-model"}
_SAID = frozenset({"prompt_lookup_min", "prompt_lookup_max", "quantization"})
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
        args.shape = _chain_of(fields["num_speculative_tokens"])
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


def _chain_of(count: Any) -> TreeShape:
    """Return the chain of ``count`` drafted tokens. Raise ValueError if the count is not valid."""
    if type(count) is not int or count < 1:
        raise ValueError(
            f"--speculative-config: num_speculative_tokens must be a whole number from 1 on, got {count!r}"
        )
    try:
        return TreeShape.chain(count)
    except ValueError as error:
        raise ValueError(f"--speculative-config: num_speculative_tokens: {error}") from None


# Settings that take the values of flags of the same names.


def settings_of(kind: type[T], args: argparse.Namespace, **other: Any) -> T:
    """Build ``kind``, a dataclass, from the flags that have the names of its fields, and from ``other``."""
    names = (entry.name for entry in fields(cast("type[DataclassInstance]", kind)))
    return kind(**{name: getattr(args, name) for name in names if hasattr(args, name)} | other)


def named(args: argparse.Namespace, kind: type[EngineConfig | ServerConfig]) -> dict[str, Any]:
    """Return the values of the flags that have the name of a field of ``kind``; None leaves a field at its default."""
    return {name: value for name in kind.model_fields if (value := getattr(args, name, None)) is not None}


# Progress of commands, on standard error.


def print_progress(line: str) -> None:
    """Print a line to standard error at once."""
    print(line, file=sys.stderr, flush=True)
