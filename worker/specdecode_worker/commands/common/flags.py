"""Command-line flags that have the same meaning in several commands."""

from __future__ import annotations

import argparse
from typing import get_args

from specdecode_worker.contract import (
    DRAFT_FREE,
    GPU_DEFAULTS,
    DraftQuantization,
    EngineConfig,
    Method,
    Placement,
    TargetQuantization,
    TreeShape,
)

EMBEDDED_TARGET = "embedded://smollm2-135m-instruct"
EMBEDDED_DRAFT = "embedded://smollm2-135m-instruct-eagle3"


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add --model, --draft, --method, --device and the other flags that select models and how they are loaded."""
    parser.add_argument("--model", default=EMBEDDED_TARGET, metavar="URI", help="target (default: %(default)s)")
    parser.add_argument("--draft", metavar="URI", help="draft; default: the embedded head for the embedded target")
    parser.add_argument("--method", choices=get_args(Method), help="default: eagle3 with a draft, else none")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--quantization", choices=get_args(TargetQuantization), help="of the target's weights alone")
    parser.add_argument("--draft-quantization", choices=get_args(DraftQuantization), help="of its MLPs and head")
    add_device_flag(parser)
    parser.add_argument("--threads", type=int, help="torch threads on a CPU (default: all)")
    parser.add_argument("--cache-dir", metavar="DIR", help="where models are kept (default: the user's cache)")


def add_placement_flag(parser: argparse.ArgumentParser) -> None:
    """Add --draft-placement."""
    help_text = "of the draft: the target's device, or own: another GPU, in a process of its own"
    parser.add_argument("--draft-placement", choices=get_args(Placement), default="shared", help=help_text)


def add_device_flag(parser: argparse.ArgumentParser) -> None:
    """Add --device."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")


def add_tensor_parallel_flag(parser: argparse.ArgumentParser) -> None:
    """Add --tensor-parallel-size."""
    parser.add_argument(
        "--tensor-parallel-size", type=_positive, default=1, metavar="N", help="devices that share the target"
    )


def default_by_device(name: str) -> str:
    """Describe the default of an engine field that depends on the device."""
    return f"default: {getattr(EngineConfig(), name)}, with --device cuda {GPU_DEFAULTS[name]}"


def add_shape_flags(parser: argparse.ArgumentParser) -> None:
    """Add --depth N and --tree SHAPE, which both set ``args.shape`` (a TreeShape, None if neither is given)."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--depth", dest="shape", type=_chain, metavar="N", help="chain of N drafted tokens")
    which.add_argument("--tree", dest="shape", type=_shape, metavar="SHAPE", help="chain:5, tree:4,2,1 or 0,0,1")


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Add the flags of the sampling parameters."""
    parser.add_argument("--max-tokens", type=int, default=max_tokens)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--seed", type=int)


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Add --prompts and --json."""
    parser.add_argument("--prompts", metavar="FILE.jsonl", help='lines of {"messages": [...]} or {"prompt": "..."}')
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


def _positive(text: str) -> int:
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
